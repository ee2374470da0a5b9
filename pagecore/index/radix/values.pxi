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
    return array_of(ids.back() if ids.size() > 0 else none)


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
