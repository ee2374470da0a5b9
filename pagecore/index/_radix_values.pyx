"""What the prefix cache's tree answers with."""

cimport cython
from libc.stdint cimport int32_t
from libc.string cimport memcpy
from libcpp.vector cimport vector

from pagecore.index._integers cimport new_int32


cdef object array_of(const vector[int32_t]& ids):
    cdef int32_t* data = NULL
    array = new_int32(<Py_ssize_t> ids.size(), &data)
    if ids.size() > 0:
        memcpy(data, ids.data(), ids.size() * sizeof(int32_t))
    return array


cdef tuple arrays_of(const vector[vector[int32_t]]& ids):
    cdef vector[int32_t] none
    cdef size_t num_lanes
    if ids.size() == 0:  # an object that no call has filled
        return array_of(none), array_of(none)
    num_lanes = ids.size() - 1
    if num_lanes == 1:
        return array_of(ids[0]), array_of(ids[1])
    arrays = []
    for lane in range(num_lanes):
        arrays.append(array_of(ids[lane]))
    return tuple(arrays), array_of(ids[num_lanes])


@cython.freelist(16)
cdef class Match:
    """What the tree has of a prefix.

    Attributes
    ----------
    num_tokens : int
        Tokens that every component can reuse, whole blocks.
    num_full_tokens : int
        Tokens that the full component has.
    checkpoint : int or None
        Where a new state would help: tokens after which the sequence should keep one, past `num_tokens`.
    state : int or None
        The state after `num_tokens`.
    blocks : numpy.ndarray or tuple of numpy.ndarray
        int32 [num_tokens / block_size], new, one for each lane; the null block before a window.
    """

    def __repr__(self):
        return (f"Match(num_tokens={self.num_tokens}, num_full_tokens={self.num_full_tokens}, "
                f"checkpoint={self.checkpoint}, state={self.state})")


@cython.freelist(16)
cdef class Inserted:
    """Result of an insertion.

    Attributes
    ----------
    num_tokens : int
        Tokens of the sequence that the tree has now, in whole blocks.
    num_old_tokens : int
        Tokens among these that the tree had before.
    """

    @property
    def taken(self):
        """Offered blocks that the tree holds from now on: int32 [num_taken], a tuple of arrays for several lanes.

        The caller gives the tree a reference to each.
        """
        return self._taken()[0]

    @property
    def duplicates(self):
        """Offered blocks that duplicate blocks of the tree: int32 [num_duplicates], a tuple for several lanes.

        They stay the caller's alone.
        """
        return self._duplicates()[0]

    @property
    def taken_states(self):
        """Offered states that the tree holds from now on: int32 [num_taken]."""
        return self._taken()[1]

    @property
    def duplicate_states(self):
        """Offered states that duplicate states of the tree: int32 [num_duplicates]."""
        return self._duplicates()[1]

    cdef tuple _taken(self):
        if self.taken_arrays is None:
            self.taken_arrays = arrays_of(self.taken_ids)
        return self.taken_arrays

    cdef tuple _duplicates(self):
        if self.duplicate_arrays is None:
            self.duplicate_arrays = arrays_of(self.duplicate_ids)
        return self.duplicate_arrays


@cython.freelist(16)
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

        With the full component go the windows of the same blocks.
        """
        return self._arrays()[0]

    @property
    def states(self):
        """Evicted states: int32 [num_states]."""
        return self._arrays()[1]

    cdef tuple _arrays(self):
        if self.arrays is None:
            self.arrays = arrays_of(self.gone)
        return self.arrays
