# Blocks that are converted between formats; see _conversions.pyx.

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.ops.arguments._place cimport Place
from pagecore.ops.cpu.codecs.conversions cimport BlockConversion, LatentConversion
from pagecore.ops.cuda.codecs._convert cimport DeviceConversions


# The conversions of one call, and the arrays of scales and factors that they use.
cdef class Conversions:
    cdef vector[BlockConversion] caches
    cdef vector[LatentConversion] latents
    cdef DeviceConversions on_device  # instead of these for caches on CUDA
    cdef list source_planes
    cdef list target_planes
    cdef list copied  # pairs (source, target) of the call's other caches
    cdef list kept    # what the conversions refer to

    # True if there is nothing to convert.
    cdef bint is_empty(self)

# True if one array has rows of a packed latent format, and the other has rows of another dtype or length.
cdef bint are_latents(Tensor source, Tensor target) except -1

# Add the conversion of caches [num_blocks, block_size, heads, dim]; the scales are factors, planes or pairs of both, as
# the caller passed them. False if both are plain numbers, which nothing converts.
cdef bint add_caches(
    Conversions conversions, object source, object source_scale, object target, object target_scale,
    const Place* place) except -1

# The same for latents [num_blocks, block_size, row]; the scales are factors.
cdef int add_latents(
    Conversions conversions, object source, object source_scale, object target, object target_scale,
    const Place* place) except -1
