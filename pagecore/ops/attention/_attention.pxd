from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport Place, Sealed, Selected, StoredCache, TreeMask


# attention_checks.pxi

# Raise ShapeError for a query whose head dim is not that of the keys.
cdef int refuse_dim(Tensor query, StoredCache keys) except -1

# The remedy for a query that would fit with its first two axes exchanged.
cdef str layout_hint(bint is_transposed)
cdef str cache_hint(bint is_transposed)

# Refuses what a call with sink tokens does not take: a tree, or a selection.
cdef int check_without_sinks(int64_t num_sinks, TreeMask tree, Selected selected) except -1

cdef int check_plan_heads(object plan, Tensor query, int64_t num_kv_heads) except -1

# On CUDA: the checks of a call on the host, if all arrays that decide which blocks are read are on the host.
cdef int check_given_batch(
    Tensor query, Tensor key_cache, Tensor value_cache, Tensor table, Tensor lens, Tensor rows, Tensor cu, bint causal,
    int64_t window_left, int64_t window_right, int64_t sink_tokens, Tensor mask, TreeMask tree, Selected selected,
    Sealed sealed) except -1

cdef int check_out(
        Tensor out, Tensor query, StoredCache keys, StoredCache values, Tensor table, Tensor lens, Tensor rows,
        Tensor cu, Tensor sinks, Tensor slopes, Tensor mask, Tensor key_scale, Tensor value_scale) except -1

# A plan in an array, from the torch operator.
cdef Tensor planned_tensor(object plan, int64_t num_sequences, const Place* place)

# The array of the caller if it fits, or a new array if `out` is None: [shape[0], shape[1], shape[2]].
cdef Tensor float_result(
        Tensor out, str name, const int64_t* shape, int dtype_code, object example, const Place* place)
