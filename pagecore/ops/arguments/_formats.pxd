# Caches with their formats; see _formats.pyx.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport Cache, Format, cache_array
from pagecore.ops.arguments._place cimport Place


# Keys or values of a cache: codes and, if the format computes scales, the plane that stores them.
cdef class StoredCache:
    cdef Tensor codes    # [num_blocks, block_size, num_kv_heads, dim / codes_per_byte]
    cdef Tensor plane    # [num_blocks, block_size, num_kv_heads, groups], or None; of one group also without that axis
    cdef Format format
    cdef int64_t dim     # numbers of a row

# The checked cache of the arguments `{label}_cache`, `{label}_scale`: on the device of the call, contiguous rows, a
# known pair of dtypes, and a plane of the cache's shape.
cdef StoredCache stored_cache(object codes, object scale, str label, const Place* place)

# A cache of checked float32, float16 or bfloat16.
cdef StoredCache plain_cache(Tensor numbers)

# The argument that holds the given factor of a cache, a float or one number for each head: `scale`, or `global_scale`
# for nvfp4. None if the format computes its scales.
cdef object given_factor(StoredCache cache, object scale, object global_scale, str label)

# ShapeError unless both have the same blocks, block_size and heads.
cdef int check_stored(StoredCache keys, StoredCache values) except -1

# The format of a name; sets `four_over_six` to True for "nvfp4_4over6". UnsupportedOption, with the list, for any
# other name.
cdef Format named_format(object name, bint* four_over_six) except *

# Numbers that share a stored scale; 0 for a row.
cdef int64_t group_of(Format format) noexcept

# Dtypes of the codes, and of the stored scales: -1 if a format stores none.
cdef int code_dtype(Format format) noexcept
cdef int scale_dtype(Format format) noexcept

# Codes of two numbers in a byte.
cdef inline bint is_packed(Format format) noexcept:
    return format == Format.I4Token or format == Format.FP4Block16 or format == Format.NVFP4

# Formats without stored scales.
cdef inline bint is_cast(Format format) noexcept:
    return format == Format.E4M3 or format == Format.E5M2

# The arguments of a write: checks that the caches have the format of the argument of that name, if there is one, and
# returns True for "nvfp4_4over6".
cdef bint read_format(object format, StoredCache keys, StoredCache values) except -1

# Checks of written caches: writable, and no byte in two planes, in an input, or twice in one plane.
cdef int check_written(StoredCache keys, StoredCache values) except -1
cdef int check_apart_from(StoredCache keys, StoredCache values, Tensor read, str name) except -1


# A cache without codes: float32, float16 or bfloat16.
cdef inline bint is_plain(StoredCache cache) noexcept:
    return cache.format == Format.Plain


cdef inline Cache native_cache(StoredCache stored) noexcept:
    cdef Cache cache = cache_array(stored.codes)
    cache.dim, cache.format = stored.dim, stored.format
    if stored.plane is not None:
        cache.scales.data = stored.plane.data
        cache.scales.block_stride, cache.scales.token_stride = stored.plane.strides_[0], stored.plane.strides_[1]
        cache.scales.head_stride = stored.plane.strides_[2]
    return cache
