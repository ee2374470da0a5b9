from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.ops.args cimport Format
from pagecore.ops.arguments._arguments cimport Place
from pagecore.ops.cpu.codecs.conversions cimport BlockConversion, LatentConversion
from pagecore.ops.cuda.codecs._codecs cimport DeviceConversions


# conversions.pxi: blocks that are converted between formats.

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


# rows.pxi: rows of arrays.

# ShapeError unless the tensor has rows whose elements are contiguous and aligned.
cdef int check_rows(Tensor tensor, str name) except -1

# The tensor as [..., D, 1] for an array [..., D].
cdef Tensor with_last_axis(Tensor tensor)

# The tensor as [rows, last axis]; a copy if its leading axes have no common stride.
cdef Tensor merged_rows(Tensor tensor)


# device_codec.pxi: quantize and dequantize of arrays in CUDA memory.

# Converts rows [..., D] of numbers to codes and scales, or back. `scales` is None if the format stores none. `factor`
# is the given factor of the caller: a number, one for each entry of the axis before the last, or None.
cdef int convert_rows(
    Format kind, Tensor numbers, Tensor codes, Tensor scales, object factor, bint is_4over6, bint quantizes,
    const Place* place) except -1

# The same for rows of 576 numbers and the rows of a packed latent format; `formats` are LatentFormat of both sides.
cdef int convert_latents_on_device(
    Tensor source, int source_format, Tensor target, int target_format, const Place* place) except -1


# latent_codec.pxi: rows of the packed latent formats as codes.

# True for the name of a packed latent format.
cdef bint is_latent_format(object name) except -1

# quantize() and dequantize() of these formats.
cdef object quantize_latents(object x, str format, object scale, object stream)
cdef object dequantize_latents(
    object codes, str format, object scales, object scale, int dtype_code, object stream)


# affine_codec.pxi: codes with a scale and a least number for each group (KIVI).

# Bits of a code of a format of this kind; 0 for other names.
cdef int64_t affine_bits(object name) except -1

# quantize() and dequantize() of these formats; `axis` and `group_size` are the arguments of the caller.
cdef tuple quantize_groups(object x, str format, object scale, object axis, object group_size, object stream)
cdef object dequantize_groups(
    object codes, str format, object scales, object scale, object axis, int dtype_code, object stream)

# UnsupportedOption if a format of another kind is given an axis or a group size.
cdef int check_row_format(object format, object axis, object group_size) except -1
