# Checks of the arguments of gather, scatter, transfer and copy; see _block_checks.pyx.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._place cimport Place


cdef enum:
    UNKNOWN = -1


# The index arguments of a gather or scatter, with the sum and the maximum of the lengths.
# Those are UNKNOWN if the lengths are on a device.
cdef class Sequences:
    cdef Tensor table
    cdef Tensor lens
    cdef Tensor rows  # None: sequence i is row i of the table
    cdef int64_t num_tokens
    cdef int64_t longest


# The arrays of an argument with one array for each of `count` others: a list if `many`, otherwise one array.
cdef list matching_arrays(object arrays, str name, bint many, Py_ssize_t count, str others)

cdef str label(str name, Py_ssize_t i, bint many)

# Tensors of the first argument of a call. The first array determines the device; an empty list runs on the host.
cdef list first_tensors(Place* place, list arrays, str argument, bint many, object stream)

# Tensors of another argument, on the device of the call.
cdef list tensors_at(list arrays, str argument, bint many, const Place* place)

# ShapeError unless all are caches [num_blocks, block_size, ...] of one block_size.
cdef int check_paged(list tensors, str argument, bint many) except -1

# The index arrays where the caller has them. Before a launch, `send_sequences` copies them to the device; if all are on
# the host, the checks of a call on the host apply first.
cdef Sequences read_sequences(
    object block_table, object seq_lens, object rows, list caches, const Place* place)
cdef int send_sequences(Sequences batch, list caches, const Place* place) except -1

# The lowest block that is not a hole, or not refused, by the argument `null_block`.
cdef int64_t lowest_block(object null_block) except -1

# A new packed array [num_tokens, ...] for a cache.
cdef Tensor packed_like(Tensor cache, int64_t num_tokens, object example, const Place* place)

# If num_tokens is UNKNOWN, packed arrays must have one length.
cdef int check_packed(list packed, str argument, list caches, str others, bint many, int64_t num_tokens) except -1

# ShapeError unless `array` has one axis, followed by the axes of the cache from `first` on.
cdef int check_axes(
    Tensor array, str argument, Tensor cache, str others, Py_ssize_t i, bint many, int first) except -1
cdef int check_cast(Tensor a, str argument, Tensor b, str others, Py_ssize_t i, bint many) except -1
cdef int check_targets(list tensors, str argument, bint many) except -1

# UnsupportedOption if a written array shares memory with an index array, which may be None.
cdef int check_index_apart(list written, str name, bint many, Tensor indices, str other_name) except -1

# [n, 2] where the caller has them; None for an empty list.
cdef Tensor pair_ids(object pairs, const Place* place)
