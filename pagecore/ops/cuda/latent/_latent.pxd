from libc.stdint cimport int32_t, int64_t
from libcpp cimport bool as cbool

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport BlockArray, Cache, ScalePlane, TokenArray
from pagecore.ops.arguments._arguments cimport Place
from pagecore.ops.planning._plan cimport AttentionPlan


# index.pxi

# The kernels of the sparse indexer on CUDA. The caller has checked all arguments except the contents of index arrays on
# the device; kernels skip invalid slots, read invalid blocks as block 0, and give invalid positions the slot -1.

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


# latent.pxi

# Latent attention on CUDA: parameters and launches. Arguments are what pagecore/ops/latent/latent.pxi has checked.

# The rows of a latent cache; strides count bytes. `format` is a PcLatentFormat, `type` the dtype of plain rows.
cdef struct LatentRows:
    char* latent
    int64_t block_stride
    int64_t token_stride
    char* rope
    int64_t rope_block_stride
    int64_t rope_token_stride
    int type
    int format
    int64_t num_blocks
    int64_t block_size
    int64_t latent_dim
    int64_t rope_dim


# `scale` includes the factor of the codes, `value_factor` is that factor. With `sparse`, `table` of a call lists the
# slots of each query, and `lens` their numbers.
cdef struct LatentOptions:
    double scale
    double value_factor
    bint causal
    int64_t window_left
    int64_t window_right
    bint sparse


# Launches latent attention. `lens` and `cu_query_lens` may be on the host; all other Tensors are on the device of the
# call. rows, cu_query_lens, plan, sinks and lse may be None. Without a plan the call plans its batch; the framework of
# `example` then allocates the workspace.
cdef int attend_latent(
    Tensor query, Tensor query_rope, const LatentRows& cache, const LatentOptions& options, Tensor table, Tensor lens,
    Tensor rows, Tensor cu_query_lens, AttentionPlan plan, Tensor sinks, Tensor out, Tensor lse, object example,
    const Place* place) except -1


# latent_rows.pxi

# The kernels of latent rows on CUDA. The caller has checked all arguments except the contents of index arrays on the
# device; kernels skip invalid slots, and read invalid blocks and rows as holes.

cdef extern from "pagecore/ops/cuda/latent/latent_row_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass LatentPlaneArgs:
        BlockArray latent
        BlockArray rope
        cbool has_rope
        int32_t format
        int64_t latent_dim
        int64_t rope_dim


# The planes of a latent cache; `rope` is None if `latent` holds both parts of a row. `format` is a LatentFormat.
cdef struct LatentPlaneSizes:
    int format
    int64_t latent_dim
    int64_t rope_dim

cdef void fill_planes(LatentPlaneArgs* planes, Tensor latent, Tensor rope, const LatentPlaneSizes* sizes) noexcept

# Slot-mapped write of rows, [token, 1, dim], into a cache with a format.
cdef int write_rows(
    const TokenArray& new_latent, const TokenArray& new_rope, Tensor latent, Tensor rope,
    const LatentPlaneSizes* sizes, Tensor slots, float factor, const Place* place) except -1

# Copies sequences to `out`, [token, 1, latent_dim + rope_dim]. `longest` is an upper bound of their tokens.
cdef int gather_rows(
    Tensor latent, Tensor rope, const LatentPlaneSizes* sizes, Tensor table, Tensor seq_lens, Tensor rows,
    const TokenArray& out, int64_t longest, int64_t lowest, float factor, const Place* place) except -1
