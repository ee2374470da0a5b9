import numpy as np
from numpy.typing import NDArray

from pagecore.cache.sequences._sequence import Sequence

def mark_blocks(
    table: NDArray[np.int32],
    sequences: list[Sequence],
    sizes: list[int],
    block_size: int,
    owner: NDArray[np.int32],
    tokens: NDArray[np.int32],
) -> None: ...
