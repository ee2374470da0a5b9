"""The methods that both slot allocators have, and the group in which they free."""

from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport (
    Integers,
    Slots,
    address_of,
    as_int64,
    as_integers,
    as_width,
    borrowed_integers,
    borrowed_slots,
    new_int32,
    new_int64,
    repeat,
    repeat_slots,
    writable,
)
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.tables._native cimport SlotType, SlotsOut

from pagecore.errors import InvalidBlock, InvalidSequence, ShapeError, UnsupportedOption

# A larger step checks for blocks before it allocates an array for the slots.
cdef enum: MAX_UNCHECKED_SLOTS = 1 << 16


cdef inline Lengths lengths_of(Integers values):
    return Lengths(values.data, <size_t> values.size)


cdef inline SlotIds slots_of(Slots values):
    return SlotIds(values.data, <size_t> values.size)


cdef class SlotMethods:
    """The methods of `SlotAllocator` and `WindowSlotAllocator`: slots of whole batches, taken and freed."""

    cdef NativeSlotAllocator* made(self) except NULL:
        if self.native.get() == NULL:
            raise TypeError(f"a {type(self).__name__} has no pool; make a SlotAllocator or a WindowSlotAllocator")
        return self.native.get()

    cdef int make(self, BlockPool pool, BlockPool window, object block_size, object index_dtype) except -1:
        cdef int64_t num_slots
        as_width(index_dtype, "index_dtype", UnsupportedOption)
        if window is None:
            self.native.reset(new NativeSlotAllocator(pool.native, as_int64(block_size, "block_size")))
        else:
            self.native.reset(new NativeSlotAllocator(pool.native, as_int64(block_size, "block_size"), window.native))
        num_slots = self.made().num_slots()
        self.index_dtype = as_width(index_dtype, "index_dtype", UnsupportedOption)
        if self.index_dtype == "int32" and num_slots > <int64_t> 1 << 31:
            raise UnsupportedOption(
                f"index_dtype int32 cannot name the pool's {num_slots} slots; use int64, or a pool of at most {2**31}"
            )
        return 0

    cdef int32_t drop_window(self, object slots) except -1:
        cdef Slots named = borrowed_slots(slots, "slot", InvalidBlock)  # each is read once
        return self.made().release_window(slots_of(named))

    cdef int add_references(self, object slots) except -1:
        cdef Slots named = borrowed_slots(slots, "slot", InvalidBlock)  # each is read once
        self.made().share(slots_of(named))
        return 0

    cdef int check(self) except -1:
        self.made().check_invariants()
        return 0

    def allocate(self, n, out=None):
        """Take the slots of a new sequence of `n` tokens: the first `n` slots of ``ceil(n / block_size)`` blocks.

        Parameters
        ----------
        n : int
            0 or more.
        out : numpy.ndarray, optional
            int64 or int32, contiguous, [>= n].

        Returns
        -------
        numpy.ndarray
            `index_dtype` [n]: new, or a view of `out`.

        Raises
        ------
        OutOfBlocks
            Fewer blocks are free than needed; none is taken.
        ShapeError
            `n` is negative, or `out` is too small or too narrow for the slots.
        """
        return self._allocate(n, out, True)

    def try_allocate(self, n, out=None):
        """Call `allocate`, but return None if blocks are short."""
        return self._allocate(n, out, False)

    def extend(self, prefix_lens, seq_lens, last_slots, out=None):
        """Take slots for more tokens of each sequence: fill its last block, then take new blocks.

        Parameters
        ----------
        prefix_lens : int or array_like of int
            Tokens that each sequence has; one int applies to all sequences.
        seq_lens : int or array_like of int
            Tokens that each sequence will have, at least its prefix_len.
        last_slots : int or array_like of int
            Slot of the last token of each sequence; ignored (usually -1) for an empty prefix.
        out : numpy.ndarray, optional
            int64 or int32, contiguous, [>= sum(seq_lens - prefix_lens)]; it may be one of the arguments.

        Returns
        -------
        numpy.ndarray
            `index_dtype` [sum(seq_lens - prefix_lens)], sequence after sequence: new, or a view of `out`.

        Raises
        ------
        OutOfBlocks
            Fewer blocks are free than the batch needs; none is taken.
        ShapeError
            A sequence would shrink, ``(last_slot + 1) % block_size`` is not ``prefix_len % block_size``, the
            arguments differ in length, or `out` is too small or too narrow for the slots.
        InvalidBlock
            A last slot is outside the pool or in the null block.
        DoubleFree
            The block to be continued is free.
        """
        return self._extend(prefix_lens, seq_lens, last_slots, out, True)

    def try_extend(self, prefix_lens, seq_lens, last_slots, out=None):
        """Call `extend`, but return None if blocks are short."""
        return self._extend(prefix_lens, seq_lens, last_slots, out, False)

    def decode(self, seq_lens, last_slots, out=None):
        """Take one slot for each sequence.

        Parameters
        ----------
        seq_lens : int or array_like of int
            Tokens of each sequence including the new one, 1 or more.
        last_slots : int or array_like of int
            Slot of the previous token; ignored for the first token of a sequence.
        out : numpy.ndarray, optional
            int64 or int32, contiguous, [>= n]; it may be `last_slots`.

        Returns
        -------
        numpy.ndarray
            `index_dtype` [n]: new, or a view of `out`.

        Raises
        ------
        OutOfBlocks, ShapeError, InvalidBlock, DoubleFree
            As in `extend`.
        """
        return self._decode(seq_lens, last_slots, out, True)

    def try_decode(self, seq_lens, last_slots, out=None):
        """Call `decode`, but return None if blocks are short."""
        return self._decode(seq_lens, last_slots, out, False)

    # A plan is committed right after it is made: everything that can run other code or fail for lack of memory comes
    # before. Large steps are planned twice, to check for blocks before memory is allocated.

    cdef object _allocate(self, object n, object out, bint must):
        cdef SlotsOut to
        cdef int64_t count = as_int64(n, "n")
        target = as_target(out)
        if count > MAX_UNCHECKED_SLOTS:
            self.made().plan_allocate(count)
            if not self.made().has_room():
                return self._refuse(must)
        result = self._target(target, max(count, 0), &to)
        self.made().plan_allocate(count)
        return result if self.made().try_commit(to) else self._refuse(must)

    cdef object _extend(self, object prefix_lens, object seq_lens, object last_slots, object out, bint must):
        target = as_target(out)
        cdef Integers lengths = as_integers(seq_lens, "seq_len", ShapeError)
        cdef Slots last = borrowed_slots(last_slots, "last slot", InvalidBlock)  # a plan reads each once
        cdef Integers prefix = as_integers(prefix_lens, "prefix_len", ShapeError)
        cdef Py_ssize_t n = lengths.size
        if lengths.is_scalar:
            n = last.size if prefix.is_scalar else prefix.size
        repeat(prefix, n)
        repeat(lengths, n)
        repeat_slots(last, n)
        cdef SlotsOut to
        cdef int64_t count = growth_of(prefix, lengths)
        if not 0 <= count <= MAX_UNCHECKED_SLOTS:
            count = self.made().plan_extend(lengths_of(prefix), lengths_of(lengths), slots_of(last))
            if not self.made().has_room():
                return self._refuse(must)
        result = self._target(target, count, &to)
        self.made().plan_extend(lengths_of(prefix), lengths_of(lengths), slots_of(last))
        return result if self.made().try_commit(to) else self._refuse(must)

    cdef object _decode(self, object seq_lens, object last_slots, object out, bint must):
        target = as_target(out)
        cdef Integers lengths = borrowed_integers(seq_lens, "seq_len", ShapeError)  # a plan reads each once
        cdef Slots last = borrowed_slots(last_slots, "last slot", InvalidBlock)
        cdef Py_ssize_t n = last.size if lengths.is_scalar else lengths.size
        repeat(lengths, n)
        repeat_slots(last, n)
        cdef SlotsOut to
        if n > MAX_UNCHECKED_SLOTS:
            self.made().plan_decode(lengths_of(lengths), slots_of(last))
            if not self.made().has_room():
                return self._refuse(must)
        result = self._target(target, n, &to)
        self.made().plan_decode(lengths_of(lengths), slots_of(last))
        return result if self.made().try_commit(to) else self._refuse(must)

    cdef object _target(self, object target, int64_t num_slots, SlotsOut* out):
        """Return the result array, new or a view of `target`, and set `out` to its memory."""
        if target is None:
            return new_slots(num_slots, self.index_dtype, out)
        out.data = address_of(target)
        out.size = target.size
        out.type = SlotType.Int64 if target.itemsize == 8 else SlotType.Int32
        return target if out.size == num_slots else target[:num_slots]

    cdef object _refuse(self, bint must):
        if must:
            self.made().fail_out_of_blocks()
        return None

    def free(self, slots):
        """Drop one reference to each block of the given slots.

        Parameters
        ----------
        slots : int or array_like of int
            The slots of whole sequences, in order, or of their tails from the start of a block on: each slot starts a
            block, or follows the slot before it in the same block. A list that enters a block past its start is
            refused, because the other slots may be in use.

        Returns
        -------
        int
            The number of blocks that became free; 0 within a `free_group`, which frees them at its end.

        Raises
        ------
        InvalidBlock
            A slot is outside the pool, in the null block, or neither starts a block nor follows the slot before it.
        DoubleFree
            A block is free, or the list and the open group drop more references than it has.
        """
        cdef Slots named = borrowed_slots(slots, "slot", InvalidBlock)  # each is read once
        return self.made().free(slots_of(named))

    def free_group(self):
        """Return a context that collects the blocks of `free` and frees them together at its end.

        Within it, `free` checks its arguments at once. The end also runs if the body raises. Groups nest; the outermost
        one frees. Its `num_freed` is then the number of blocks that became free. Until the end, the collected
        references remain in the pool: other users of the pool must not drop them.

        Raises
        ------
        DoubleFree
            At the end, if another user of the pool freed a block of the group; the other blocks are freed.

        Examples
        --------
        >>> allocator = SlotAllocator(BlockPool(17), 4)
        >>> first, second = allocator.allocate(6), allocator.allocate(3)
        >>> with allocator.free_group() as group:
        ...     allocator.free(first) + allocator.free(second)
        0
        >>> group.num_freed
        3
        """
        return FreeGroup(self)

    @property
    def block_size(self):
        """Tokens in a block."""
        return self.made().block_size()

    @property
    def num_available(self):
        """Tokens that the free blocks of the pool, or of the scarcer pool, can hold."""
        return self.made().num_available()

    @property
    def nbytes(self):
        """Bytes of the native structure, without the pools."""
        return self.made().nbytes()


cdef class FreeGroup:
    """Context of `SlotAllocator.free_group`.

    Attributes
    ----------
    allocator : SlotAllocator
    num_freed : int
        Blocks that became free at the end of the group; 0 before the end, and for a nested group.
    """

    def __cinit__(self, SlotMethods allocator not None):
        self.allocator = allocator

    def __enter__(self):
        if self.is_open:
            raise InvalidSequence("this free group is open already; call free_group() for another")
        self.allocator.made().begin_group()
        self.is_open = True
        self.num_freed = 0
        return self

    def __exit__(self, *_):
        if not self.is_open:
            raise InvalidSequence("this free group is not open; use it in a with statement")
        self.is_open = False
        self.num_freed = self.allocator.made().end_group()


cdef int64_t growth_of(Integers prefix, Integers lengths) noexcept:
    """Return the number of new slots; -1 if a sequence shrinks or the lists differ in length."""
    cdef int64_t total = 0
    cdef Py_ssize_t i
    if prefix.size != lengths.size:
        return -1
    for i in range(prefix.size):
        if prefix.data[i] > lengths.data[i]:
            return -1
        total += <int64_t> lengths.data[i] - prefix.data[i]
    return total


cdef object as_target(object out):
    return None if out is None else writable(out, 1, "out", True)


cdef object new_slots(int64_t num_slots, str dtype, SlotsOut* out):
    cdef int64_t* wide = NULL
    cdef int32_t* narrow = NULL
    out.size = num_slots
    if dtype == "int64":
        array = new_int64(num_slots, &wide)
        out.data = wide
        out.type = SlotType.Int64
    else:
        array = new_int32(num_slots, &narrow)
        out.data = narrow
        out.type = SlotType.Int32
    return array
