"""Results of the prefix tree. They refer only to arrays of ids, so that none is in a cycle."""

cimport cython
from libc.stdint cimport int32_t
from libc.string cimport memcpy

from pagecore.index._integers cimport new_int32
from pagecore.native.std cimport vector


cdef object array_of(const vector[int32_t]& ids):
    cdef int32_t* data = NULL
    array = new_int32(<Py_ssize_t> ids.size(), &data)
    if ids.size() > 0:
        memcpy(data, ids.data(), ids.size() * sizeof(int32_t))
    return array


cdef object blocks_of(const vector[vector[int32_t]]& ids):
    cdef vector[int32_t] none
    cdef size_t lane
    if ids.size() == 0:  # made by hand
        return array_of(none)
    if ids.size() == 2:
        return array_of(ids[0])
    arrays = []
    for lane in range(ids.size() - 1):
        arrays.append(array_of(ids[lane]))
    return tuple(arrays)


cdef object states_of(const vector[vector[int32_t]]& ids):
    cdef vector[int32_t] none
    return array_of(ids.back()) if ids.size() > 0 else array_of(none)


cdef list lists_of(const vector[vector[int32_t]]& ids):
    lists = []
    cdef size_t lane
    for lane in range(ids.size()):
        lists.append(array_of(ids[lane]).tolist())
    return lists


cdef int read_lists(list lists, vector[vector[int32_t]]& out) except -1:
    cdef size_t lane
    out.resize(<size_t> len(lists))
    for lane in range(out.size()):
        for id in lists[lane]:
            out[lane].push_back(<int32_t> id)
    return 0


# Cython's own pickling would copy vectors outside of a try block.
def _restored_insertion(num_tokens, num_old_tokens, list taken, list duplicates):
    """Return an Inserted that was pickled."""
    cdef Inserted inserted = Inserted.__new__(Inserted)
    inserted.num_tokens, inserted.num_old_tokens = num_tokens, num_old_tokens
    read_lists(taken, inserted.taken_ids)
    read_lists(duplicates, inserted.duplicate_ids)
    return inserted


def _restored_eviction(amount, list gone):
    """Return an Evicted that was pickled."""
    cdef Evicted evicted = Evicted.__new__(Evicted)
    evicted.amount = amount
    read_lists(gone, evicted.gone)
    return evicted


@cython.auto_pickle(True)
@cython.freelist(16)
@cython.no_gc
cdef class Match:
    """Result of a lookup.

    Attributes
    ----------
    num_tokens : int
        Tokens that every component can reuse, whole blocks.
    num_full_tokens : int
        Tokens that the full component holds.
    checkpoint : int or None
        Number of tokens, past `num_tokens`, after which the sequence should keep a state to extend reuse.
    state : int or None
        The state after `num_tokens`.
    blocks : numpy.ndarray or tuple of numpy.ndarray
        int32 [num_tokens / block_size], new, one array for each lane; null before the start of a window.
    num_shared_tokens : int
        Tokens whose blocks a sequence can share: `num_full_tokens` in a tree with states and without windows, otherwise
        `num_tokens`. Only layers with a state compute the tokens after `num_tokens` again.
    shared_blocks : numpy.ndarray or tuple of numpy.ndarray
        int32 [num_shared_tokens / block_size], as `blocks`; `blocks` itself if the two lengths are equal.
    """

    def __repr__(self):
        return (f"Match(num_tokens={self.num_tokens}, num_full_tokens={self.num_full_tokens}, "
                f"checkpoint={self.checkpoint}, state={self.state})")


@cython.freelist(16)
@cython.no_gc
cdef class Inserted:
    """Result of an insertion.

    Attributes
    ----------
    num_tokens : int
        Tokens of the sequence that the tree has now, in whole blocks.
    num_old_tokens : int
        Tokens of `num_tokens` that the tree had before.
    """

    @property
    def taken(self):
        """Offered blocks that the tree holds from now on: int32 [num_taken], a tuple of arrays for several lanes.

        The caller gives the tree a reference to each.
        """
        if self.taken_blocks is None:
            self.taken_blocks = blocks_of(self.taken_ids)
        return self.taken_blocks

    @property
    def duplicates(self):
        """Offered blocks that duplicate blocks of the tree: int32 [num_duplicates], a tuple for several lanes.

        The tree does not take them.
        """
        if self.duplicate_blocks is None:
            self.duplicate_blocks = blocks_of(self.duplicate_ids)
        return self.duplicate_blocks

    @property
    def taken_states(self):
        """Offered states that the tree holds from now on: int32 [num_taken], new."""
        return states_of(self.taken_ids)

    @property
    def duplicate_states(self):
        """Offered states that duplicate states of the tree: int32 [num_duplicates], new."""
        return states_of(self.duplicate_ids)

    def __reduce__(self):
        values = self.num_tokens, self.num_old_tokens, lists_of(self.taken_ids), lists_of(self.duplicate_ids)
        return _restored_insertion, values


@cython.freelist(16)
@cython.no_gc
cdef class Evicted:
    """Result of an eviction: the caller drops the tree's reference to each id.

    Attributes
    ----------
    amount : int
        Blocks or states of the requested component.
    """

    @property
    def blocks(self):
        """Evicted blocks: int32 [num_gone], a tuple of arrays for several lanes.

        Evicting full blocks also evicts what windows have of the same blocks.
        """
        if self.gone_blocks is None:
            self.gone_blocks = blocks_of(self.gone)
        return self.gone_blocks

    @property
    def states(self):
        """Evicted states: int32 [num_states], new."""
        return states_of(self.gone)

    def __reduce__(self):
        return _restored_eviction, (self.amount, lists_of(self.gone))
