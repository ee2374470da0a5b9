from collections.abc import Sequence as Listed

import numpy as np
from numpy.typing import NDArray

from pagecore.index import BlockPool

class StoredBlocks:
    def __init__(self, pools: tuple[BlockPool, ...]) -> None: ...
    @property
    def arrays(self) -> tuple[NDArray[np.int32], ...]: ...

def hold(pools: tuple[BlockPool, ...], counts: Listed[int]) -> tuple[StoredBlocks, list[int]]: ...
