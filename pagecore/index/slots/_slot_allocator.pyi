from typing import Self, SupportsIndex

from numpy.typing import DTypeLike

from pagecore.index.pools._block_pool import BlockPool
from pagecore.index.slots._slot_methods import IndexDtype, SlotMethods

class SlotAllocator(SlotMethods):
    @property
    def pool(self) -> BlockPool: ...
    def __new__(
        cls, pool: BlockPool, block_size: SupportsIndex, *, index_dtype: IndexDtype | DTypeLike = "int64"
    ) -> Self: ...
    def check_invariants(self) -> None: ...
