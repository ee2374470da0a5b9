import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.index import BlockPool

class Durations:
    def __init__(self, bounds: ArrayLike) -> None: ...
    def read(self) -> tuple[NDArray[np.int64], float]: ...

class WatchedPool(BlockPool):
    @property
    def pool(self) -> BlockPool: ...

def watched_pool(
    pool: BlockPool, blocks: NDArray[np.int32], lifetimes: Durations, idle_times: Durations, reuse_gaps: Durations
) -> WatchedPool: ...
