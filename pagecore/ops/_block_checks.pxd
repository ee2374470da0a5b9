# What gather, scatter and transfer demand of their arguments; see _block_checks.pyx.
from libc.stdint cimport int64_t

from pagecore.arrays._tensor cimport Tensor
from pagecore.ops._place cimport Place


cdef enum:
    UNKNOWN = -1


# The index arguments of a gather or scatter where the call runs, and the sum of the lengths and the longest; UNKNOWN
# where those are on a device.
cdef class Sequences:
    cdef Tensor table
    cdef Tensor lens
    cdef Tensor rows  # None: sequence i is row i of the table
    cdef int64_t num_tokens
    cdef int64_t longest


# The arrays of an argument that goes with `count` others of a list, or with one array.
cdef list arrays_beside(object arrays, str name, bint many, Py_ssize_t count, str others)

cdef str label(str name, Py_ssize_t i, bint many)

# Arrays of any dtype where the call runs, which the first array of its first argument says; without one on the host.
cdef list first_tensors(Place* place, list arrays, str argument, bint many, object stream)
cdef list placed_tensors(list arrays, str argument, bint many, const Place* place)

# That they are caches [num_blocks, block_size, ...], all of one block_size.
cdef int check_paged(list tensors, str argument, bint many) except -1

cdef Sequences read_sequences(
    object block_table, object seq_lens, object rows, list caches, const Place* place)

# A new [num_tokens, ...] for a cache.
cdef Tensor packed_like(Tensor cache, int64_t num_tokens, object example, const Place* place)

# num_tokens may be UNKNOWN: then packed arrays must be as long as each other.
cdef int check_packed(list packed, str argument, list caches, str others, bint many, int64_t num_tokens) except -1

# That `array` has one axis, and then the cache's from `first` on.
cdef int check_axes(
    Tensor array, str argument, Tensor cache, str others, Py_ssize_t i, bint many, int first) except -1
cdef int check_cast(Tensor a, str argument, Tensor b, str others, Py_ssize_t i, bint many) except -1
cdef int check_targets(list tensors, str argument, bint many) except -1

# [n, 2] where they are given, or None where there are none.
cdef Tensor pair_ids(object pairs, const Place* place)
