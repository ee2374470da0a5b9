# Rows of the packed latent formats as codes; see _latent_codec.pyx.
from pagecore.arrays.tensors._tensor cimport Tensor


# True for the name of a packed latent format.
cdef bint is_latent_format(object name) except -1

# Converts rows [n, 576] of numbers to rows of bytes, or back; the last axes are contiguous.
cdef int convert_latents(Tensor source, Tensor target) except -1
