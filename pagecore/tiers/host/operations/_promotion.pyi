import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.host.operations._lease import EntryHold

class Promotion:
    @property
    def hold(self) -> EntryHold | None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def pairs(self) -> list[NDArray[np.int32]]: ...
