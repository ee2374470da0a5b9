"""Slot allocator, for engines that keep their own tables of slots."""

from pagecore.index.pools._block_pool cimport BlockPool

from pagecore.errors import UnsupportedOption


cdef class SlotAllocator(SlotMethods):
    """SlotAllocator(pool, block_size, *, index_dtype='int64')\n--\n\n\
Allocator of slots for sequences whose tables the caller keeps.

    A slot is ``block * block_size + offset``. The slots of a sequence fill its blocks in order; only its last block can
    be partly used, and its last slot determines where it continues. Each sequence holds one reference to each of its
    blocks in the pool, where other code may share and free them. The allocator keeps no record of sequences: passing
    the same last slot twice returns the slots after it twice. All methods work on whole batches, and a call that fails
    changes nothing. Lengths and slots are one int or anything that NumPy converts to a one-dimensional array of
    integers. The allocator has one writer; its pool may have other users. `extend`, `decode` and `free_group` follow
    SGLang's paged allocator.

    Parameters
    ----------
    pool : BlockPool
    block_size : int
        Tokens in a block; 1 gives a pool of single slots.
    index_dtype : {"int64", "int32"}
        Type of the returned slots; int32 is for kernels without 64-bit indices.

    Attributes
    ----------
    pool : BlockPool
    index_dtype : str

    Raises
    ------
    ShapeError
        `block_size` is out of range.
    UnsupportedOption
        `pool` is not a BlockPool; `index_dtype` is unknown, or int32 for a pool of more than 2**31 slots.

    Examples
    --------
    >>> allocator = SlotAllocator(BlockPool(17), 4)
    >>> slots = allocator.allocate(6)
    >>> slots
    array([4, 5, 6, 7, 8, 9])
    >>> allocator.extend([6], [13], [9])
    array([10, 11, 12, 13, 14, 15, 16])
    >>> allocator.decode([14], [16])
    array([17])
    """

    def __cinit__(self, pool, block_size, *, index_dtype="int64"):
        if not isinstance(pool, BlockPool):
            raise UnsupportedOption(f"expected a BlockPool, got {type(pool).__name__}")
        self.pool = pool
        self.make(self.pool, None, block_size, index_dtype)

    def check_invariants(self):
        """Recount everything, including the pool; raise PagecoreError if something is inconsistent."""
        self.check()
        self.pool.check_invariants()

    def __repr__(self):
        return f"SlotAllocator({self.pool!r}, {self.block_size}): room for {self.num_available} tokens"
