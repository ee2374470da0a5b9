# quantize and dequantize of arrays in CUDA memory; see _device_codec.pyx.
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport Format
from pagecore.ops.arguments._place cimport Place


# Converts rows [..., D] of numbers to codes and scales, or back. `scales` is None if the format stores none. `factor`
# is the given factor of the caller: a number, one for each entry of the axis before the last, or None.
cdef int convert_rows(
    Format kind, Tensor numbers, Tensor codes, Tensor scales, object factor, bint is_4over6, bint quantizes,
    const Place* place) except -1

# The same for rows of 576 numbers and the rows of a packed latent format; `formats` are LatentFormat of both sides.
cdef int convert_latent_rows(
    Tensor source, int source_format, Tensor target, int target_format, const Place* place) except -1
