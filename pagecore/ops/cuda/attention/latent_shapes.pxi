"""Selection of the kernel of latent attention for a call, and its launch shape, for launches and the report."""

from pagecore.ops.cuda.plan.abi_attention cimport PcAttentionParams, PcFloat, PcLaunchShape


cdef extern from "cuda_src/shapes/latent.h" nogil:
    cdef struct PcLatentKernel:
        PcFloat type
        int dim

    PcLatentKernel pc_latent_kernel(
        PcLatentFormat format, PcFloat query_type, PcFloat type, int latent_dim, int rope_dim)
    PcLaunchShape pc_latent_shape(PcLatentFormat format, int latent_dim, int rows)
    PcLaunchShape pc_general_latent_shape(int latent_dim, int rope_dim)


FORMATS = ("LatentPlain", "LatentE4M3", "LatentFp8", "LatentNvfp4")  # by PcLatentFormat

cdef enum:
    # Packed rows of a CTA: items of decode have at most 16, those of prompts up to 128.
    DECODE_ROWS = 16
    PROMPT_ROWS = 32

cdef dict _latent_names = {}  # names by their parts, so that a call does not build strings


cdef str select_latent_kernel(const PcLatentParams& params, bint decode, bint in_vectors, PcLaunchShape* shape):
    cdef const PcAttentionParams* p = &params.attention
    cdef PcLatentKernel found = pc_latent_kernel(
        params.format, p.query_type, p.key_type, p.value_dim, params.rope_dim)
    if not in_vectors or found.dim == 0:
        shape[0] = pc_general_latent_shape(p.value_dim, params.rope_dim)
        return "general_latent"
    cdef int rows = DECODE_ROWS if decode else PROMPT_ROWS
    shape[0] = pc_latent_shape(params.format, found.dim, rows)
    key = (<int>found.type, found.dim, rows, <int>params.format)
    name = _latent_names.get(key)
    if name is None:
        element, format = ELEMENTS[<int>found.type], FORMATS[<int>params.format]
        name = _latent_names[key] = f"latent<{element},{found.dim},{rows},{format}>"
    return name


def latent_launch_shape(tuple arguments):
    """Return the threads and the dynamic shared bytes of a block of ``latent<...>``, by its template arguments."""
    cdef PcLaunchShape shape = pc_latent_shape(
        <PcLatentFormat><int>FORMATS.index(arguments[3]), int(arguments[1]), int(arguments[2]))
    return shape.threads, shape.shared_bytes
