"""A sequence: one request's growing list of tokens, as the user holds it."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

import numpy as np

from pagecore.errors import InvalidSequence, ShapeError
from pagecore.index._integers import int32_array


def token_ids(tokens, name="token id"):
    """`tokens` as a fresh int32 array of rank 1."""
    array = int32_array(tokens, name, ShapeError)
    if array.ndim == 0:
        raise ShapeError(f"{name}s are given as one number; give a list")
    return array


cdef class Sequence:
    """One request's tokens and how far its key and value are computed; made by a cache, and only good with it.

    As a context manager it removes itself from the cache at the end of the block.

    Attributes
    ----------
    id : object
        The caller's name for it, or a number that the cache made up.
    row : int
        Its row of the block tables; -1 while it is swapped out, and once it is removed.
    swap_space : SwapSpace or None
        What holds its key and value while it is swapped out.
    """

    def __cinit__(self, owner, id, int32_t row, const int32_t[::1] ids, int32_t computed=0, int32_t cached=0):
        self.owner = owner
        self.id = id
        self.row = row
        self.computed = computed
        self.cached = cached
        self._published = INT32_MAX
        self.pending = -1
        if ids.shape[0]:
            self.append(&ids[0], <int32_t>ids.shape[0])

    def __dealloc__(self):
        free(self.ids)

    cdef int append(self, const int32_t* ids, int32_t count) except -1:
        """Add known ids; doubles the buffer, so that n appends cost O(n)."""
        cdef int64_t needed = <int64_t>self.known + count
        cdef int64_t capacity
        cdef void* grown
        if needed > INT32_MAX:
            raise ShapeError(f"sequence {self.id!r} would have {needed} tokens; lengths are int32")
        if needed > self.ids_capacity:
            capacity = min(max(needed, 2 * <int64_t>self.ids_capacity, 16), <int64_t>INT32_MAX)
            grown = realloc(self.ids, capacity * sizeof(int32_t))
            if grown == NULL:
                raise MemoryError(f"no memory for {capacity} token ids")
            self.ids = <int32_t*>grown
            self.ids_capacity = <int32_t>capacity
        memcpy(self.ids + self.known, ids, count * sizeof(int32_t))
        self.known = <int32_t>needed
        return 0

    @property
    def num_tokens(self):
        """Tokens whose ids are known."""
        return self.known

    @property
    def num_computed_tokens(self):
        """Tokens whose key and value are written and valid."""
        return self.computed

    @property
    def num_cached_tokens(self):
        """Of the computed tokens, those that came from the prefix cache."""
        return self.cached

    @property
    def is_swapped(self):
        """Whether its key and value are in a `SwapSpace`, and not in the blocks of the cache."""
        return self.swap_space is not None

    @property
    def capacity(self):
        """Tokens that the blocks of this sequence have room for, in the scarcest group; 0 while it is swapped out."""
        owner = self._live()
        return 0 if self.swap_space is not None else owner._tables.capacity(self.row)

    @property
    def tokens(self):
        """The known token ids, an int32 copy."""
        cdef int32_t[::1] view
        ids = np.empty(self.known, np.int32)
        if self.known:
            view = ids
            memcpy(&view[0], self.ids, self.known * sizeof(int32_t))
        return ids

    def _live(self):
        if self.owner is None:
            raise InvalidSequence(f"sequence {self.id!r} was removed from its cache; add it again")
        return self.owner

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.owner is not None:
            self.owner.remove(self)

    def __repr__(self):
        if self.owner is None:
            return f"Sequence({self.id!r}, removed)"
        swapped = "" if self.swap_space is None else ", swapped out"
        return f"Sequence({self.id!r}, {self.known} tokens, {self.computed} computed{swapped})"


cdef Sequence require(object owner, object sequence, bint idle):
    """`sequence` as a live Sequence of `owner`; with `idle`, one with a row and no step in flight."""
    if not isinstance(sequence, Sequence):
        raise InvalidSequence(f"{sequence!r} is no Sequence; give what add_sequence returned")
    cdef Sequence checked = <Sequence>sequence
    if checked.owner is not owner:
        checked._live()
        raise InvalidSequence(f"sequence {checked.id!r} belongs to another cache; use it with its own")
    if idle and checked.pending >= 0:
        raise InvalidSequence(f"sequence {checked.id!r} has a step in flight; commit or abandon its batch first")
    if idle and checked.swap_space is not None:
        raise InvalidSequence(f"sequence {checked.id!r} is swapped out; swap it in first")
    return checked


def row_of(owner, sequence):
    """The row of an idle sequence of `owner`; InvalidSequence where it is none."""
    return require(owner, sequence, True).row


def row_to_remove(owner, sequence):
    """The row of a live sequence of `owner` that may be in flight; DeviceError where its step cannot be told."""
    cdef Sequence checked = require(owner, sequence, False)
    if checked.flight is not None:
        checked.flight.check_reachable()
    return checked.row


def rows_of(owner, sequences):
    """`row_of` for each of several sequences, no two of them the same."""
    rows = {}
    for sequence in sequences:
        row = row_of(owner, sequence)
        if row in rows:
            raise InvalidSequence(f"sequence {sequence.id!r} is listed twice; give each once")
        rows[row] = None
    return list(rows)


def any_swapped(list sequences):
    """Whether one of them is a sequence that is swapped out."""
    for sequence in sequences:
        if isinstance(sequence, Sequence) and (<Sequence>sequence).swap_space is not None:
            return True
    return False


def require_swapped(owner, sequences):
    """Refuse sequences that are not swapped out of `owner`, or are listed twice."""
    cdef set seen = set()
    cdef Sequence checked
    for sequence in sequences:
        checked = require(owner, sequence, False)
        if checked.swap_space is None:
            raise InvalidSequence(f"sequence {checked.id!r} is not swapped out; it is in the cache already")
        if checked in seen:
            raise InvalidSequence(f"sequence {checked.id!r} is listed twice; give each once")
        seen.add(checked)


def move(Sequence sequence, int32_t row, swap_space):
    """Note where the blocks of a sequence are from now on: in `row` of the cache's tables, or in a swap space."""
    sequence.row = row
    sequence.swap_space = swap_space


def detach(Sequence sequence):
    """Mark a sequence as removed; its ids stay readable. A step in flight writes nothing for it any more."""
    flight, sequence.flight = sequence.flight, None
    sequence.owner = None
    sequence.swap_space = None
    sequence.row = -1
    sequence.pending = -1
    if flight is not None:
        flight.skip(sequence.place)


def forked(Sequence parent, id, int32_t row):
    """A sequence in `row` that knows and has computed what `parent` has."""
    return Sequence(parent.owner, id, row, parent.tokens, parent.computed, parent.cached)


def become(Sequence child, ids, int32_t computed, int32_t cached):
    """Take over the ids and lengths of another sequence (beam search)."""
    cdef const int32_t[::1] view = ids
    child.known = 0
    if view.shape[0]:
        child.append(&view[0], <int32_t>view.shape[0])
    child.computed = computed
    child.cached = cached


def cut(Sequence sequence, int32_t length):
    """Forget what lies past `length`."""
    sequence.known = min(sequence.known, length)
    sequence.computed = min(sequence.computed, length)
    sequence.cached = min(sequence.cached, length)


def append_each(owner, sequences, ids):
    """One id for each sequence: a rank-1 array as long as `sequences`. Nothing is appended where one is refused."""
    cdef const int32_t[::1] view = token_ids(ids)
    cdef list checked = [require(owner, sequence, False) for sequence in sequences]
    if len(checked) != view.shape[0]:
        raise ShapeError(f"{view.shape[0]} ids are given for {len(checked)} sequences; give one for each")
    cdef Py_ssize_t i
    for i in range(view.shape[0]):
        (<Sequence>checked[i]).append(&view[i], 1)


def append_some(owner, sequences, ids):
    """A list of ids for each sequence. Nothing is appended where one is refused."""
    cdef list checked = [require(owner, sequence, False) for sequence in sequences]
    cdef list arrays = [token_ids(some) for some in ids]
    cdef const int32_t[::1] view
    if len(checked) != len(arrays):
        raise ShapeError(f"{len(arrays)} lists of ids are given for {len(checked)} sequences; give one for each")
    for sequence, some in zip(checked, arrays):
        if some.shape[0]:
            view = some
            (<Sequence>sequence).append(&view[0], <int32_t>view.shape[0])
