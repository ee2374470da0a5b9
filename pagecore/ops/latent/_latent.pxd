from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport TokenArray
from pagecore.ops.arguments._arguments cimport Place
from pagecore.ops.cpu.latent.latent cimport LatentCache


# latent_cache.pxi: the planes of a latent cache.

# The checked planes of a call. `rope` is None if `latent` holds both parts of a row. Plain numbers have the format "".
cdef class LatentPlanes:
    cdef Tensor latent
    cdef Tensor rope
    cdef str format
    cdef LatentCache native
    cdef bint has_factor  # numbers are codes times a factor of the layer

# Checks the planes for rows of `latent_dim` and `rope_dim` numbers. With a rope_dim of -1 a plane that holds both parts
# is read as a latent alone, of any width.
cdef LatentPlanes latent_planes(
    object latent_cache, object rope_cache, object format, int64_t latent_dim, int64_t rope_dim, const Place* place)

# The rope part of rows or queries next to `latent`, [..., rope_dim]: `array`, or without one a part of no numbers.
cdef Tensor rope_part(object array, str name, str axes, Tensor latent, const Place* place)

# The factor of a layer: a finite number above 0; 1 if it is None. UnsupportedOption for a format without one.
cdef double latent_factor(object scale, str name, LatentPlanes planes) except? -1.0

# Rows [token, dim] as [token, 1, dim].
cdef TokenArray one_head(Tensor rows) noexcept

# Columns [begin, begin + count) of the last axis, with an axis of one head before it.
cdef Tensor columns_of(Tensor tensor, int64_t begin, int64_t count)
