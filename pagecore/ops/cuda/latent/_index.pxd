# The kernels of the sparse indexer on CUDA. The caller has checked all arguments except the contents of index arrays on
# the device; kernels skip invalid slots, read invalid blocks as block 0, and give invalid positions the slot -1.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport Cache, ScalePlane, TokenArray
from pagecore.ops.arguments._place cimport Place


# Slot-mapped write of keys, [token, 1, dim]. `written`: the arrays of keys and scales.
cdef int write_keys(
    const TokenArray& new, const Cache& keys, const ScalePlane& scales, Tensor slots, list written,
    const Place* place) except -1

# Scores of the keys of sequences, to `out`, [num_tokens, n]; weights are [token, 1, head]. Optional: rows,
# cu_query_lens.
cdef int score_keys(
    Tensor query, const TokenArray& weights, const Cache& keys, const ScalePlane& scales, Tensor table,
    Tensor seq_lens, Tensor rows, Tensor cu_query_lens, bint causal, Tensor out, const Place* place) except -1

# Slots of positions [num_tokens, n], to a contiguous `out`. Optional: rows, cu_query_lens.
cdef int find_slots(
    Tensor positions, Tensor table, Tensor rows, Tensor cu_query_lens, int64_t num_sequences, int64_t block_size,
    Tensor out, const Place* place) except -1
