from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport Place, Sealed, Selected, TreeMask


# block_checks.pxi: checks of the arguments of gather, scatter, transfer and copy.

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


# debug.pxi: checks of index arrays in device memory, made under `debug`. They raise as the host kernels do.

# True if debug is on. UnsupportedOption if PAGECORE_DEBUG, read by the first call, is invalid.
cdef bint debugging() except -1

cdef int debug_slots(Tensor slot_mapping, Tensor key, Tensor key_cache, const Place* place) except -1

# `independent`: the caller claims that pairs may be copied in any order, which is checked too.
cdef int debug_copied(list caches, Tensor pairs, bint independent, const Place* place) except -1
cdef int debug_transferred(
    list sources, list targets, Tensor pairs, bint independent, int64_t lowest, const Place* place) except -1

# For gather and scatter. `packed` is the first packed array and `name` its argument; rows may be None.
cdef int debug_sequences(
    list caches, Tensor packed, str name, Tensor block_table, Tensor seq_lens, Tensor rows,
    const Place* place) except -1

# rows, cu_query_lens, mask, tree, selected and sealed may be None.
cdef int debug_attention(
    Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
    Tensor cu_query_lens, bint causal, int64_t window_left, int64_t window_right, int64_t sink_tokens,
    Tensor mask, TreeMask tree, Selected selected, Sealed sealed, const Place* place) except -1

# For merges of any number of parts. cu_parts is on the device.
cdef int debug_parts(Tensor cu_parts, int64_t num_parts, const Place* place) except -1

# For scores of blocks and tokens. rows and cu_query_lens may be None; all arrays are on the device.
cdef int debug_scores(
    Tensor query, Tensor block_table, Tensor seq_lens, Tensor rows, Tensor cu_query_lens, int64_t num_blocks,
    int64_t block_size, const Place* place) except -1
