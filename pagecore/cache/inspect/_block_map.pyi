import numpy as np
from numpy.typing import NDArray

from pagecore.cache.sequences._sequences import Sequence
from pagecore.index import BlockPool

def mark_blocks(
    table: NDArray[np.int32],
    sequences: list[Sequence],
    sizes: list[int],
    block_size: int,
    owner: NDArray[np.int32],
    tokens: NDArray[np.int32],
) -> None: ...
def count_wasted(
    table: NDArray[np.int32], pool: BlockPool, sequences: list[Sequence], capacities: list[int], block_size: int
) -> int: ...
