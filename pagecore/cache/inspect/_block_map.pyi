from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.sequences._sequences import Sequence
from pagecore.index import BlockPool, BlockTables

def mark_blocks(
    table: NDArray[np.int32],
    sequences: list[Sequence],
    sizes: list[int],
    block_size: int,
    owner: NDArray[np.int32],
    tokens: NDArray[np.int32],
) -> None: ...
def count_sequences(
    sequences: list[Sequence], tables: BlockTables, pools: Iterable[BlockPool], block_size: int
) -> tuple[int, int, int, int, int]: ...
