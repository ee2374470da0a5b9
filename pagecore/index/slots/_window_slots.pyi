from typing import Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from pagecore.index.pools._block_pool import BlockPool
from pagecore.index.slots._slot_methods import IndexDtype, SlotMethods

class WindowSlotAllocator(SlotMethods):
    @property
    def full(self) -> BlockPool: ...
    @property
    def window(self) -> BlockPool: ...
    def __new__(
        cls,
        full: BlockPool,
        window: BlockPool,
        block_size: SupportsIndex,
        *,
        index_dtype: IndexDtype | DTypeLike = "int64",
    ) -> Self: ...
    def release_window(self, slots: ArrayLike) -> int: ...
    def share(self, slots: ArrayLike) -> None: ...
    @property
    def full_to_window(self) -> NDArray[np.int32]: ...
    def check_invariants(self) -> None: ...
