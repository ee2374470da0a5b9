"""Small allocator for tests, and its observable state."""

from pagecore.index import BlockPool, SlotAllocator


def make():
    """Blocks of 4: two sequences at slots 4 to 9 and 12 to 14 (blocks 1 to 3), block 4 retired, 5 to 9 free."""
    allocator = SlotAllocator(BlockPool(10), 4)
    allocator.allocate(6)
    allocator.allocate(3)
    allocator.pool.retire(allocator.pool.allocate(1), step=1)
    return allocator


def snapshot(allocator):
    allocator.check_invariants()
    return allocator.pool.ref_counts().tolist(), allocator.pool.num_free, allocator.num_available
