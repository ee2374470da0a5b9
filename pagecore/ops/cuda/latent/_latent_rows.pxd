# The kernels of latent rows on CUDA. The caller has checked all arguments except the contents of index arrays on the
# device; kernels skip invalid slots, and read invalid blocks and rows as holes.
from libc.stdint cimport int32_t, int64_t
from libcpp cimport bool as cbool

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport BlockArray, TokenArray
from pagecore.ops.arguments._place cimport Place


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
