"""Block pool: reference-counted block ids."""

from cython.operator cimport dereference as deref
from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport Integers, as_int64, as_integers, const_int32, new_int32
from pagecore.native.std cimport span, vector

from pagecore.errors import InvalidBlock, OutOfBlocks, ShapeError, UnsupportedOption, shown

ORDERS = ("lifo", "fifo", "address")

# For fewer blocks, releasing and reacquiring the GIL takes longer than the call.
cdef enum: MIN_BLOCKS_WITHOUT_GIL = 1024


cdef class BlockPool:
    """BlockPool(num_blocks, *, order='lifo')\n--\n\n\
Reference-counted block ids.

    Block 0 is the null block: it counts in `num_blocks`, is never allocated and has no references. A new pool allocates
    1, 2, 3 ... Every method may be called from any thread; in a child of `os.fork`, no call of another thread is half
    done. A call that fails changes nothing. Block ids are one int or anything that NumPy converts to a one-dimensional
    array of integers; ids may repeat. The free list follows vLLM's and SGLang's pools; retired blocks follow vLLM's
    fence for steps in flight.

    Parameters
    ----------
    num_blocks : int
        Number of blocks including the null block, 2 to 2**31 - 1; ``num_blocks - 1`` can be allocated.
    order : {"lifo", "fifo", "address"}
        Allocation order of free blocks: last freed first (hot in caches), first freed first, or lowest id first (so
        that transfers coalesce).

    Attributes
    ----------
    num_blocks : int
    order : str

    Raises
    ------
    ShapeError
        `num_blocks` is out of range.
    UnsupportedOption
        `order` is unknown.

    Examples
    --------
    >>> pool = BlockPool(4)
    >>> pool.allocate(2)
    array([1, 2], dtype=int32)
    >>> pool.free([1, 2])
    2
    >>> pool.num_free
    3
    """

    def __cinit__(self, num_blocks, *, order="lifo"):
        if not isinstance(order, str) or order not in ORDERS:
            raise UnsupportedOption(f"order is {shown(order)}; use one of {', '.join(ORDERS)}")
        self.order = str(order)
        cdef int position = ORDERS.index(order)
        self.native.reset(new NativeBlockPool(as_int64(num_blocks, "num_blocks"), <Order> position))
        self.num_blocks = deref(self.native).num_blocks()

    cdef void share_raw(self, const int32_t* blocks, size_t count) noexcept:
        deref(self.native).share_known(span[const_int32](blocks, count))

    cdef int32_t free_raw(self, const int32_t* blocks, size_t count) noexcept:
        return deref(self.native).free_known(span[const_int32](blocks, count))

    cdef int32_t ref_count_raw(self, int32_t block) noexcept:
        return deref(self.native).ref_count_known(block)

    cdef int32_t num_free_raw(self) noexcept:
        return deref(self.native).num_free_known()

    cdef bint try_allocate_raw(self, vector[int32_t]& out) noexcept:
        return deref(self.native).try_allocate_known(span[int32_t](out.data(), out.size()))

    cdef size_t num_unshared_raw(self, const int32_t* blocks, size_t count) noexcept:
        return deref(self.native).num_unshared_known(span[const_int32](blocks, count))

    cdef void find_held_once_raw(self, const int32_t* blocks, size_t count, vector[int32_t]& out) noexcept:
        deref(self.native).find_held_once_known(span[const_int32](blocks, count), out)

    def allocate(self, n):
        """Take `n` blocks, each with one reference.

        Returns
        -------
        numpy.ndarray
            int32 [n], new.

        Raises
        ------
        OutOfBlocks
            Fewer than `n` blocks are free; none is taken.
        ShapeError
            `n` is negative.
        """
        cdef int64_t count = as_int64(n, "n")
        blocks = self._try_allocate(count)
        if blocks is None:
            wanted = n if type(n) is int else count
            available = self.num_free
            raise OutOfBlocks(
                f"{wanted} blocks are needed and {available} of {self.num_blocks - 1} are free; "
                "free some or make the pool larger", wanted, available,
            )
        return blocks

    def try_allocate(self, n):
        """Call `allocate`, but return None if fewer than `n` blocks are free."""
        return self._try_allocate(as_int64(n, "n"))

    cdef object _try_allocate(self, int64_t count):
        cdef int32_t* data = NULL
        cdef bint taken
        if count < 0:
            raise ShapeError(f"n is {count}; use 0 or more")
        if count >= self.num_blocks:
            return None
        blocks = new_int32(count, &data)
        if count < MIN_BLOCKS_WITHOUT_GIL:
            taken = deref(self.native).try_allocate(span[int32_t](data, <size_t> count))
        else:
            with nogil:
                taken = deref(self.native).try_allocate(span[int32_t](data, <size_t> count))
        return blocks if taken else None

    def share(self, blocks):
        """Add one reference to each block.

        Raises
        ------
        InvalidBlock
            An id is outside the pool, or the null block.
        DoubleFree
            A block is free.
        """
        cdef Integers ids = as_integers(blocks, "block", InvalidBlock)
        cdef span[const_int32] view = span[const_int32](ids.data, <size_t> ids.size)
        if ids.size < MIN_BLOCKS_WITHOUT_GIL:
            deref(self.native).share(view)
        else:
            with nogil:
                deref(self.native).share(view)

    def free(self, blocks):
        """Drop one reference to each block, in the given order.

        Returns
        -------
        int
            The number of blocks that became free.

        Raises
        ------
        InvalidBlock
            An id is outside the pool, or the null block.
        DoubleFree
            A block is free, or the list drops more references than it has.
        """
        cdef Integers ids = as_integers(blocks, "block", InvalidBlock)
        cdef span[const_int32] view = span[const_int32](ids.data, <size_t> ids.size)
        cdef int32_t freed
        if ids.size < MIN_BLOCKS_WITHOUT_GIL:
            return deref(self.native).free(view)
        with nogil:
            freed = deref(self.native).free(view)
        return freed

    def retire(self, blocks, step):
        """Drop one reference to each block; blocks without references become free only at `reclaim`.

        Use it for blocks that work in flight may still read, on another stream or in a transfer.

        Parameters
        ----------
        blocks : int or array_like of int
        step : int
            Step that must be complete before the blocks are reused; 64 bits.

        Returns
        -------
        int
            The number of blocks that this call retired.

        Raises
        ------
        InvalidBlock, DoubleFree
            As in `free`.
        """
        cdef Integers ids = as_integers(blocks, "block", InvalidBlock)
        cdef int64_t at = as_int64(step, "step")
        cdef span[const_int32] view = span[const_int32](ids.data, <size_t> ids.size)
        cdef int32_t retired
        if ids.size < MIN_BLOCKS_WITHOUT_GIL:
            return deref(self.native).retire(view, at)
        with nogil:
            retired = deref(self.native).retire(view, at)
        return retired

    def reclaim(self, step):
        """Free the blocks that were retired at `step` or before, in the order of steps and of retirement.

        Returns
        -------
        int
            The number of blocks that became free.
        """
        return deref(self.native).reclaim(as_int64(step, "step"))

    def ref_count(self, block):
        """Return the number of references to `block`; 0 if it is free, retired or the null block.

        Raises
        ------
        InvalidBlock
            The id is outside the pool.
        """
        return deref(self.native).ref_count(as_int64(block, "block"))

    def ref_counts(self):
        """Return the number of references to every block.

        Returns
        -------
        numpy.ndarray
            int32 [num_blocks], new.
        """
        cdef int32_t* data = NULL
        counts = new_int32(self.num_blocks, &data)
        cdef span[int32_t] out = span[int32_t](data, <size_t> self.num_blocks)
        with nogil:
            deref(self.native).copy_ref_counts(out)
        return counts

    @property
    def num_free(self):
        """Blocks that can be allocated now."""
        return deref(self.native).num_free()

    @property
    def num_used(self):
        """Blocks with references."""
        return deref(self.native).num_used()

    @property
    def num_retired(self):
        """Blocks that wait for `reclaim`."""
        return deref(self.native).num_retired()

    @property
    def nbytes(self):
        """Bytes of the native structure; the system commits them as blocks are first used."""
        return deref(self.native).nbytes()

    def check_invariants(self):
        """Recount everything; raise PagecoreError if the pool is inconsistent."""
        with nogil:
            deref(self.native).check_invariants()

    def __repr__(self):
        return f"BlockPool({self.num_blocks}, order={self.order!r}): {self.num_free} free, {self.num_used} used"
