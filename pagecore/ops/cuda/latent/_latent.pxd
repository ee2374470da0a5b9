# Latent attention on CUDA: parameters and launches. Arguments are what pagecore/ops/latent/_latent.pyx has checked.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._place cimport Place
from pagecore.ops.planning._plan cimport AttentionPlan


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
