# The kernels of latent attention, their parameters and launch shapes; see _latent_shapes.pyx.
from libc.stdint cimport int32_t

from pagecore.ops.cuda.plan.abi_attention cimport PcAttentionParams, PcLaunchShape, PcRows


cdef extern from "cuda_src/shapes/latent.h" nogil:
    cdef struct PcDivisor:
        pass

    ctypedef enum PcLatentFormat:
        pass

    cdef struct PcLatentParams:
        PcAttentionParams attention
        PcRows query_rope
        PcDivisor block
        PcLatentFormat format
        int32_t rope_dim
        int32_t sparse
        float value_factor

    const int kMaxGeneralLatent "pc_max_general_latent"
    const int kMaxGeneralRow "pc_max_general_row"
    int pc_latent_tiles(int num_rows, int rows)


# Returns the name of the kernel of a section and sets its launch shape, whose max_rows are the packed rows of a CTA.
# `in_vectors`: every row begins at a multiple of 16 bytes.
cdef str select_latent_kernel(const PcLatentParams& params, bint decode, bint in_vectors, PcLaunchShape* shape)
