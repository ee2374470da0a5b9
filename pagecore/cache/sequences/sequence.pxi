"""Sequence: one request's growing list of tokens, as the user holds it."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from pagecore.index._integers cimport new_int32

from pagecore.errors import InvalidSequence, NotEnoughMemory, ShapeError
from pagecore.index._integers import int32_array
from pagecore.storage.checks import shown

# Each checked list of sequences has a number; a sequence that already carries the number is listed twice.
cdef uint64_t _num_lists = 0


def token_ids(tokens, name="token id"):
    """Return `tokens` as a fresh int32 array of rank 1."""
    array = int32_array(tokens, name, ShapeError)
    if array.ndim == 0:
        raise ShapeError(f"{name}s are a single number; pass a list")
    return array


cdef class Sequence:
    """The tokens of one request, and the number of them whose keys and values are computed.

    A cache makes it (`PagedKVCache.add_sequence`, `fork`), and only that cache accepts it. As a context manager it
    removes itself from the cache at the end of the block.

    Attributes
    ----------
    id : object
        The caller's name for the sequence, or a number that the cache chose.
    row : int
        Row of the block tables; -1 while the sequence is swapped out, and after it was removed.
    swap_space : SwapSpace or None
        The space that holds its keys and values while it is swapped out; else None.
    """

    def __cinit__(self, *_, **__):
        self.row = self.pending = -1

    def __init__(self, *_, **__):
        raise InvalidSequence("a Sequence cannot be made directly; use PagedKVCache.add_sequence or fork")

    def __dealloc__(self):
        free(self.ids)

    cdef int reserve(self, int64_t count) except -1:
        # The buffer doubles, so that n appends cost O(n).
        cdef int64_t needed = <int64_t>self.known + count
        cdef int64_t capacity
        cdef void* grown
        if needed > INT32_MAX:
            raise ShapeError(f"sequence {self.id!r} would have {needed} tokens; the limit is {INT32_MAX}")
        if needed > self.ids_capacity:
            capacity = min(max(needed, 2 * <int64_t>self.ids_capacity, 16), <int64_t>INT32_MAX)
            grown = realloc(self.ids, capacity * sizeof(int32_t))
            if grown == NULL:
                raise NotEnoughMemory(f"no memory for {capacity} token ids; remove a sequence")
            self.ids = <int32_t*>grown
            self.ids_capacity = <int32_t>capacity
        return 0

    cdef void append(self, const int32_t* ids, int32_t count) noexcept:
        if count > 0:
            memcpy(self.ids + self.known, ids, count * sizeof(int32_t))
            self.known += count

    @property
    def num_tokens(self):
        """Number of tokens whose ids are known."""
        return self.known

    @property
    def num_computed_tokens(self):
        """Number of tokens whose key and value are written and valid."""
        return self.computed

    @property
    def num_cached_tokens(self):
        """Number of computed tokens that came from the prefix cache."""
        return self.cached

    @property
    def num_matched_tokens(self):
        """Number of tokens in the blocks that the prefix cache shared when the sequence was added.

        More than `num_cached_tokens` at that time in a cache with recurrent states, which computes the tokens after the
        deepest cached state again.
        """
        return self.matched

    @property
    def num_sealed_tokens(self):
        """Number of leading tokens whose keys and values are in sealed blocks; 0 in a cache without such layers."""
        return self.sealed

    @property
    def num_dropped_tokens(self):
        """Number of tokens that `PagedKVCache.compact` removed.

        The next token has position ``num_computed_tokens + num_dropped_tokens``.
        """
        return self.dropped

    @property
    def num_cross_tokens(self):
        """Number of encoder tokens that its cross-attention layers see; None if it has no encoder output."""
        return None if self.cross is None else self.cross.num_tokens

    @property
    def cross_row(self):
        """Row of its encoder output in the block tables of cross-attention groups; -1 before its blocks are taken."""
        return -1 if self.cross is None else self.cross.row

    @property
    def is_cross_written(self):
        """True if no later step writes the encoder's keys and values: they are in the cache, or there are none."""
        return self.cross is not None and (self.cross.is_written or self.cross.num_tokens == 0)

    @property
    def is_swapped(self):
        """True while the keys and values are in a `SwapSpace` instead of the blocks of the cache."""
        return self.swap_space is not None

    @property
    def capacity(self):
        """Number of tokens that its blocks have room for, in the scarcest group; 0 while it is swapped out."""
        owner = live_owner(self)
        return 0 if self.swap_space is not None else owner.tables.capacity(self.row)

    @property
    def tokens(self):
        """The known token ids: int32 ``[num_tokens]``, a copy."""
        cdef int32_t* data
        ids = new_int32(self.known, &data)
        if self.known:
            memcpy(data, self.ids, self.known * sizeof(int32_t))
        return ids

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        owner = self.owner
        if owner is not None:
            owner.removal(owner, self)

    def __repr__(self):
        if self.owner is None:
            return f"Sequence({self.id!r}, removed)"
        swapped = "" if self.swap_space is None else ", swapped out"
        return f"Sequence({self.id!r}, {self.known} tokens, {self.computed} computed{swapped})"


cdef Sequence new_sequence(object id, const int32_t[::1] ids):
    cdef Sequence sequence = Sequence.__new__(Sequence)
    sequence.id = id
    if ids.shape[0]:
        sequence.reserve(ids.shape[0])
        sequence.append(&ids[0], <int32_t>ids.shape[0])
    return sequence


cdef object live_owner(Sequence sequence):
    if sequence.owner is None:
        raise InvalidSequence(f"sequence {sequence.id!r} was removed from its cache; add it again")
    return sequence.owner


cdef Sequence require(object owner, object sequence, bint idle):
    if not isinstance(sequence, Sequence):
        raise InvalidSequence(f"expected a Sequence (as returned by add_sequence), got {shown(sequence)}")
    cdef Sequence checked = <Sequence>sequence
    if checked.owner is not owner:
        live_owner(checked)
        raise InvalidSequence(f"sequence {checked.id!r} belongs to another cache; pass it to the cache that made it")
    if idle and checked.pending >= 0:
        raise InvalidSequence(f"sequence {checked.id!r} has a step in flight; commit or abandon its batch first")
    if idle and checked.swap_space is not None:
        raise InvalidSequence(f"sequence {checked.id!r} is swapped out; swap it in first")
    return checked


cdef list require_each(object owner, object sequences, bint idle):
    global _num_lists
    # append() instead of a comprehension: Cython's comprehensions free an element twice when memory runs out.
    cdef list checked = []
    cdef Sequence sequence
    for each in sequences:
        checked.append(require(owner, each, idle))
    _num_lists += 1
    for sequence in checked:
        if sequence.last_list == _num_lists:
            raise InvalidSequence(f"sequence {sequence.id!r} is listed twice; list it once, with all its tokens")
        sequence.last_list = _num_lists
    return checked


def as_list(sequences):
    """Return one sequence, or an iterable of sequences, as a list."""
    if isinstance(sequences, Sequence):
        return [sequences]
    try:
        return list(sequences)
    except TypeError:
        raise InvalidSequence(
            f"expected a Sequence or a list of them (as returned by add_sequence), got {shown(sequences)}"
        ) from None
