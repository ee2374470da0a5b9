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


cdef object per_lane(const vector[vector[int32_t]]& ids, int32_t num_lanes):
    if num_lanes == 1:
        return array_of(ids[0])
    return tuple([array_of(ids[lane]) for lane in range(num_lanes)])


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
    """What an insertion did.

    Attributes
    ----------
    num_tokens : int
        Tokens of the sequence that the tree has now, whole blocks.
    num_old_tokens : int
        Of those, what it had before.
    taken : numpy.ndarray or tuple of numpy.ndarray
        int32 [num_taken]: offered blocks that the tree holds from now on, by lane; the caller gives it a
        reference to each.
    duplicates : numpy.ndarray or tuple of numpy.ndarray
        int32 [num_duplicates]: offered blocks that it has from somebody else, by lane; they stay the caller's alone.
    taken_states, duplicate_states : numpy.ndarray
        int32: the same for states.
    """


@cython.freelist(16)
cdef class Evicted:
    """What an eviction gave up: the caller drops the tree's reference to each.

    Attributes
    ----------
    amount : int
        Of the component that was asked for.
    blocks : numpy.ndarray or tuple of numpy.ndarray
        int32 [num_gone], new, by lane; with the full component go the windows of the same blocks.
    states : numpy.ndarray
        int32 [num_states], new.
    """
