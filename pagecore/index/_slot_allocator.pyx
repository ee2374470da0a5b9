"""Slots for engines that keep their own tables."""

from cython.operator cimport dereference as deref
from libc.stdint cimport int32_t, int64_t

from pagecore.index._block_pool cimport BlockPool
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
from pagecore.index._step_buffers cimport SlotsOut, SlotType

from pagecore.errors import InvalidBlock, InvalidSequence, ShapeError, UnsupportedOption

# Steps of more slots than this ask for blocks before they ask for memory to write slots into.
cdef enum: MAX_SLOTS_UNASKED = 1 << 16


cdef inline Lengths lengths_of(Integers values):
    return Lengths(values.data, <size_t> values.size)


cdef inline SlotIds slots_of(Slots values):
    return SlotIds(values.data, <size_t> values.size)


cdef class SlotAllocator:
    """SlotAllocator(pool, block_size, *, index_dtype='int64')\n--\n\n\
Slots of sequences whose tables the caller keeps.

    A slot is ``block * block_size + offset``. A sequence's slots run through its blocks in order; only its last block
    can be partly used, and its last slot says where to go on. The blocks are the pool's: each is held once for every
    sequence that took it, others may share and free it there, and the allocator remembers nothing of sequences (who
    names a last slot twice gets the slots behind it twice). All methods work on whole batches, and one that fails
    changes nothing. Lengths and slots are taken as one int or as anything that NumPy makes a one-dimensional array of
    integers. There is one writer; the pool may be used by others meanwhile. The way it extends, decodes and groups
    frees follows SGLang's paged allocator.

    Parameters
    ----------
    pool : BlockPool
    block_size : int
        Tokens of a block; 1 gives a pool of single slots.
    index_dtype : {"int64", "int32"}
        Of the slots that are returned; int32 serves users without 64-bit integers.

    Attributes
    ----------
    pool : BlockPool
    index_dtype : str

    Raises
    ------
    ShapeError
        `block_size` is out of range.
    UnsupportedOption
        `pool` is no BlockPool, `index_dtype` is unknown, or int32 and the pool has more than 2**31 slots.

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
            raise UnsupportedOption(f"pool is of type {type(pool).__name__}; give a BlockPool")
        self.pool = pool
        self.index_dtype = as_width(index_dtype, "index_dtype", UnsupportedOption)
        self.native.reset(new NativeSlotAllocator(self.pool.native, as_int64(block_size, "block_size")))
        cdef int64_t num_slots = deref(self.native).num_slots()
        if self.index_dtype == "int32" and num_slots > <int64_t> 1 << 31:
            raise UnsupportedOption(
                f"index_dtype int32 cannot name the pool's {num_slots} slots; use int64, or a pool of at most {2**31}"
            )

    def allocate(self, n, out=None):
        """Take the slots of a new sequence of `n` tokens: the first `n` of ``ceil(n / block_size)`` blocks.

        Parameters
        ----------
        n : int
            0 or more.
        out : numpy.ndarray, optional
            int64 or int32, contiguous, with room for all slots.

        Returns
        -------
        numpy.ndarray
            `index_dtype` [n]: new, or the front of `out`.

        Raises
        ------
        OutOfBlocks
            Fewer blocks are free; none is taken.
        ShapeError
            `n` is negative, or `out` is too small or cannot name the slots.
        """
        return self._allocate(n, out, True)

    def try_allocate(self, n, out=None):
        """Do what `allocate` does, but return None where blocks are short."""
        return self._allocate(n, out, False)

    def extend(self, prefix_lens, seq_lens, last_slots, out=None):
        """Take the slots by which sequences grow: fill the block that is partly used, then take new ones.

        Parameters
        ----------
        prefix_lens : int or array_like of int
            Tokens that each sequence has; one int stands for all sequences.
        seq_lens : int or array_like of int
            Tokens that it shall have; prefix_len or more.
        last_slots : int or array_like of int
            The slot of its last token; ignored (-1 is usual) where the prefix is empty.
        out : numpy.ndarray, optional
            int64 or int32, contiguous, with room for all slots; it may be one of the arguments.

        Returns
        -------
        numpy.ndarray
            `index_dtype` [sum(seq_lens - prefix_lens)], sequence after sequence: new, or the front of `out`.

        Raises
        ------
        OutOfBlocks
            Fewer blocks are free than the batch needs; none is taken.
        ShapeError
            A sequence would shrink, ``(last_slot + 1) % block_size`` is not ``prefix_len % block_size``, the
            arguments are not equally long, or `out` is too small or cannot name the slots.
        InvalidBlock
            A last slot is outside the pool or in the null block.
        DoubleFree
            The block that is to be continued is held by nobody.
        """
        return self._extend(prefix_lens, seq_lens, last_slots, out, True)

    def try_extend(self, prefix_lens, seq_lens, last_slots, out=None):
        """Do what `extend` does, but return None where blocks are short."""
        return self._extend(prefix_lens, seq_lens, last_slots, out, False)

    def decode(self, seq_lens, last_slots, out=None):
        """Take one slot for each sequence.

        Parameters
        ----------
        seq_lens : int or array_like of int
            Tokens of each sequence, the new one counted: 1 or more.
        last_slots : int or array_like of int
            The slot of the token before; ignored where there is none.
        out : numpy.ndarray, optional
            int64 or int32, contiguous, with room for all slots; it may be `last_slots`.

        Returns
        -------
        numpy.ndarray
            `index_dtype` [n]: new, or the front of `out`.

        Raises
        ------
        OutOfBlocks, ShapeError, InvalidBlock, DoubleFree
            As `extend`.
        """
        return self._decode(seq_lens, last_slots, out, True)

    def try_decode(self, seq_lens, last_slots, out=None):
        """Do what `decode` does, but return None where blocks are short."""
        return self._decode(seq_lens, last_slots, out, False)

    # A plan is carried out right after it was made: what can run other code, or fail for want of memory, comes before.
    # Only a large step is planned once more, to ask for blocks before it asks for memory.

    cdef object _allocate(self, object n, object out, bint must):
        cdef SlotsOut to
        cdef int64_t count = as_int64(n, "n")
        target = as_target(out)
        if count > MAX_SLOTS_UNASKED:
            deref(self.native).plan_allocate(count)
            if not deref(self.native).has_room():
                return self._refuse(must)
        result = self._target(target, max(count, 0), &to)
        deref(self.native).plan_allocate(count)
        return result if deref(self.native).try_commit(to) else self._refuse(must)

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
        if not 0 <= count <= MAX_SLOTS_UNASKED:
            count = deref(self.native).plan_extend(lengths_of(prefix), lengths_of(lengths), slots_of(last))
            if not deref(self.native).has_room():
                return self._refuse(must)
        result = self._target(target, count, &to)
        deref(self.native).plan_extend(lengths_of(prefix), lengths_of(lengths), slots_of(last))
        return result if deref(self.native).try_commit(to) else self._refuse(must)

    cdef object _decode(self, object seq_lens, object last_slots, object out, bint must):
        target = as_target(out)
        cdef Integers lengths = borrowed_integers(seq_lens, "seq_len", ShapeError)  # a plan reads each once
        cdef Slots last = borrowed_slots(last_slots, "last slot", InvalidBlock)
        cdef Py_ssize_t n = last.size if lengths.is_scalar else lengths.size
        repeat(lengths, n)
        repeat_slots(last, n)
        cdef SlotsOut to
        if n > MAX_SLOTS_UNASKED:
            deref(self.native).plan_decode(lengths_of(lengths), slots_of(last))
            if not deref(self.native).has_room():
                return self._refuse(must)
        result = self._target(target, n, &to)
        deref(self.native).plan_decode(lengths_of(lengths), slots_of(last))
        return result if deref(self.native).try_commit(to) else self._refuse(must)

    cdef object _target(self, object target, int64_t num_slots, SlotsOut* out):
        """Return the array of the answer, the front of `target` where there is one, and where the slots go."""
        if target is None:
            return new_slots(num_slots, self.index_dtype, out)
        out.data = address_of(target)
        out.size = target.size
        out.type = SlotType.Int64 if target.itemsize == 8 else SlotType.Int32
        return target if out.size == num_slots else target[:num_slots]

    cdef object _refuse(self, bint must):
        if must:
            deref(self.native).fail_out_of_blocks()
        return None

    def free(self, slots):
        """Drop one reference of each block that the slots name.

        Parameters
        ----------
        slots : int or array_like of int
            Each slot starts a block, or is the one after the slot before it, in the same block: the slots of whole
            sequences, in order, do, and so does their tail from the start of a block on. A block that is named only
            from somewhere within is refused, because its other slots may be in use.

        Returns
        -------
        int
            How many blocks became free; 0 within a `free_group`, where they become free at its end.

        Raises
        ------
        InvalidBlock
            A slot is outside the pool, in the null block, or neither starts nor continues a block.
        DoubleFree
            A block is held by nobody, or by fewer than the list (and the group) says.
        """
        cdef Slots named = borrowed_slots(slots, "slot", InvalidBlock)  # each is read once
        return deref(self.native).free(slots_of(named))

    def free_group(self):
        """Collect frees: a context in which `free` checks at once, and at whose end all blocks are given back at once.

        The end comes also where the body raises. Groups nest; the outermost gives back. Its `num_freed` says, once
        it is over, how many blocks became free. Until then the pool counts the collected references as held: nobody
        else, another allocator of the pool neither, may give them back.

        Raises
        ------
        DoubleFree
            At the end, where somebody else gave back a block of the group meanwhile; the others are freed.

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
        """Tokens of a block."""
        return deref(self.native).block_size()

    @property
    def num_available(self):
        """Tokens that the pool's free blocks have room for."""
        return deref(self.native).num_available()

    @property
    def nbytes(self):
        """Bytes of the native structure, the pool not counted."""
        return deref(self.native).nbytes()

    def check_invariants(self):
        """Recount everything, the pool too; raise PagecoreError where something contradicts itself."""
        deref(self.native).check_invariants()
        self.pool.check_invariants()

    def __repr__(self):
        return f"SlotAllocator({self.pool!r}, {self.block_size}): room for {self.num_available} tokens"


cdef class FreeGroup:
    """The context of `SlotAllocator.free_group`.

    Attributes
    ----------
    allocator : SlotAllocator
    num_freed : int
        Blocks that became free at the end of the group; 0 before it, and for one inside another.
    """

    def __cinit__(self, SlotAllocator allocator not None):
        self.allocator = allocator

    def __enter__(self):
        if self.is_open:
            raise InvalidSequence("this group of frees is open already; ask free_group() for another")
        deref(self.allocator.native).begin_group()
        self.is_open = True
        self.num_freed = 0
        return self

    def __exit__(self, *_):
        if not self.is_open:
            raise InvalidSequence("this group of frees is not open; use it in a with statement")
        self.is_open = False
        self.num_freed = deref(self.allocator.native).end_group()


cdef int64_t growth_of(Integers prefix, Integers lengths) noexcept:
    """Slots by which sequences grow; -1 where some shrink or the lists are not equally long."""
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
