"""Slot allocator of two pools: one for layers that see all keys, one for layers with a window."""

from pagecore.index._native_view cimport view_of
from pagecore.index.pools._block_pool cimport BlockPool

from pagecore.errors import UnsupportedOption


cdef class WindowSlotAllocator(SlotMethods):
    """WindowSlotAllocator(full, window, block_size, *, index_dtype='int64')\n--\n\n\
Allocator of slots for models some of whose layers have a sliding window, for engines with tables of their own.

    Layers that see all keys store them in blocks of the pool `full`; layers with a window use the pool `window`, which
    may be much smaller. Each block of the full pool has a block of the window pool, until `release_window` frees that
    because the window has passed it. All methods take and return slots of the full pool; `full_to_window` leads to
    those of the window pool. A call takes blocks of both pools or of neither. Other methods are those of
    `SlotAllocator`. The scheme follows SGLang's SWATokenToKVPoolAllocator.

    Free blocks of the full pool by this allocator, or by another holder before this one: a full block that another
    holder frees last keeps its window block until the allocator takes it again.

    Parameters
    ----------
    full, window : BlockPool
        Two different pools.
    block_size : int
        Tokens in a block of either pool.
    index_dtype : {"int64", "int32"}
        Type of the returned slots; int32 is for kernels without 64-bit indices.

    Attributes
    ----------
    full, window : BlockPool
    index_dtype : str

    Raises
    ------
    ShapeError
        `block_size` is out of range, or the window pool has more than 2**31 slots.
    UnsupportedOption
        A pool is not a BlockPool, or both are the same; `index_dtype` is unknown, or int32 for a full pool of more than
        2**31 slots.

    Examples
    --------
    >>> allocator = WindowSlotAllocator(BlockPool(9), BlockPool(5), 4)
    >>> slots = allocator.allocate(10)
    >>> slots
    array([ 4,  5,  6,  7,  8,  9, 10, 11, 12, 13])
    >>> allocator.release_window(slots[:4])  # the window has passed the first block
    1
    >>> allocator.full_to_window[slots]
    array([ 0,  0,  0,  0,  8,  9, 10, 11, 12, 13], dtype=int32)
    """

    def __cinit__(self, full, window, block_size, *, index_dtype="int64"):
        for name, pool in (("full", full), ("window", window)):
            if not isinstance(pool, BlockPool):
                raise UnsupportedOption(f"expected a BlockPool as {name}, got {type(pool).__name__}")
        self.full = full
        self.window = window
        self.make(self.full, self.window, block_size, index_dtype)

    def release_window(self, slots):
        """Drop one reference to the window block of each block of the given slots; blocks without one stay as they are.

        Call it for each sequence whose window has passed whole blocks. The full blocks stay.

        Parameters
        ----------
        slots : int or array_like of int
            Slots of the full pool, listed as for `free`.

        Returns
        -------
        int
            The number of window blocks that became free; `full_to_window` is 0 for their slots.

        Raises
        ------
        InvalidBlock
            As in `free`.
        DoubleFree
            A full block is free, or an open group frees it.
        """
        return self.drop_window(slots)

    def share(self, slots):
        """Add one reference to each block of the given slots and to its window block, for another sequence.

        The other sequence frees and releases them like its own.

        Parameters
        ----------
        slots : int or array_like of int
            Slots of the full pool, listed as for `free`.

        Raises
        ------
        InvalidBlock, DoubleFree
            As in `release_window`; nothing is shared.
        """
        self.add_references(slots)

    @property
    def full_to_window(self):
        """The window slot of each full slot: int32 [full.num_blocks * block_size + 1], a read-only view.

        Entries are 0 for slots that have none: free blocks, and holes that windows have passed. The last entry is -1,
        so that slot -1 (padding) leads to slot -1. The view changes with the allocator.
        """
        cdef Py_ssize_t[1] shape = [self.made().window_map_size()]
        return view_of(self, self.made().window_map(), 1, shape, False, True)

    def check_invariants(self):
        """Recount everything, including the pools; raise PagecoreError if something is inconsistent."""
        self.check()
        self.full.check_invariants()
        self.window.check_invariants()

    def __repr__(self):
        return (
            f"WindowSlotAllocator({self.full!r}, {self.window!r}, {self.block_size}): room for {self.num_available} "
            "tokens"
        )
