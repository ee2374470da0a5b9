"""Caches with their formats: the dtypes of codes and scales determine a format, and a cache is checked against it."""

cimport cython
from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport LAST_FLOAT, UINT8
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport Format
from pagecore.ops.arguments._overlap cimport are_nested, check_apart, check_own_elements, range_of, ranges_meet

from pagecore.arrays.dtypes.formats import FORMATS, FOUR_OVER_SIX, SEALED_FORMATS, as_format
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption, shown

# The table by the numbers of the enum; a format without stored scales has NO_SCALES.
NAMES = (None, *FORMATS)
cdef enum:
    NUM_FORMATS = 9
    NO_SCALES = -1
cdef int code_dtypes[NUM_FORMATS]
cdef int scale_dtypes[NUM_FORMATS]
cdef int64_t groups_of[NUM_FORMATS]


def _fill_table():
    assert len(NAMES) == NUM_FORMATS
    for number, entry in enumerate(FORMATS.values(), 1):
        code_dtypes[number] = entry.dtype.code
        scale_dtypes[number] = NO_SCALES if entry.scale_dtype is None else entry.scale_dtype.code
        groups_of[number] = entry.group or 0


_fill_table()


@cython.freelist(8)
cdef class StoredCache:
    pass


# ---- formats

cdef int64_t group_of(Format format) noexcept:
    return groups_of[<int>format]


cdef int code_dtype(Format format) noexcept:
    return code_dtypes[<int>format]


cdef int scale_dtype(Format format) noexcept:
    return scale_dtypes[<int>format]


cdef Format format_of(Tensor codes, Tensor plane, str label) except *:
    """Return the format of codes and stored scales; `plane` is None if the cache has none."""
    cdef int number, code = codes.dtype_code, scale = NO_SCALES if plane is None else plane.dtype_code
    if code <= LAST_FLOAT and plane is None:
        return Format.Plain
    for number in range(1, NUM_FORMATS):
        if code_dtypes[number] == code and scale_dtypes[number] == scale:
            return <Format>number
    if plane is None:
        wanted = " or ".join(
            f"{entry.scale_dtype} for {entry.name}" for entry in FORMATS.values() if entry.dtype == codes.dtype)
        raise UnsupportedOption(
            f"{label}_cache is {codes.dtype} and {label}_scale is not an array of stored scales; pass the plane "
            f"[num_blocks, block_size, num_kv_heads, groups]: {wanted}{bytes_hint(code)}"
        )
    if code <= LAST_FLOAT:
        raise UnsupportedOption(
            f"{label}_scale has shape {plane.shape} and {label}_cache is {codes.dtype}, which stores no scales; pass a "
            "float or one number for each head, or a cache of codes"
        )
    pairs = ", ".join(
        f"{entry.dtype} and {entry.scale_dtype} ({entry.name!r})" for entry in FORMATS.values() if entry.scale_dtype)
    raise UnsupportedDtype(
        f"{label}_cache is {codes.dtype} and {label}_scale {plane.dtype}; use codes and scales of one format: {pairs}"
    )


cdef str bytes_hint(int code):
    """Return a remedy for float8 codes in an array of bytes, as in vLLM."""
    return "; view bytes that are float8 codes as float8_e4m3fn or float8_e5m2" if code == UINT8 else ""


cdef bint read_format(object format, StoredCache keys, StoredCache values) except -1:
    cdef bint four_over_six = False
    if format is None or type(format) is str and keys.format == values.format and format == NAMES[<int>keys.format]:
        return False
    expected = NAMES[<int>named_format(format, &four_over_six)]
    if four_over_six and Format.NVFP4 in (keys.format, values.format):
        return True
    for label, cache in (("key", keys), ("value", values)):
        found = NAMES[<int>(<StoredCache>cache).format]
        if found != expected:
            held = f"has format {found!r}" if found else f"is {(<StoredCache>cache).codes.dtype}, without a format"
            raise UnsupportedOption(
                f"format is {format!r} and {label}_cache {held} by its dtype and that of {label}_scale; pass the codes "
                f"and scales of {expected!r}, or leave format out"
            )
    return four_over_six


cdef Format named_format(object name, bint* four_over_six, tuple others=()) except *:
    four_over_six[0] = isinstance(name, str) and name == FOUR_OVER_SIX
    if four_over_six[0]:
        return Format.NVFP4
    if isinstance(name, str) and name in SEALED_FORMATS:
        as_format(name)  # raises
    if not isinstance(name, str) or name not in NAMES[1:]:
        known = (*NAMES[1:], FOUR_OVER_SIX, *others)
        raise UnsupportedOption(f"format is {shown(name)}; use one of {', '.join(known)}")
    return <Format><int>NAMES.index(name)


# ---- caches

cdef StoredCache stored_cache(object codes, object scale, str label, const Place* place):
    cdef StoredCache cache = StoredCache.__new__(StoredCache)
    cdef str name = f"{label}_cache"
    cdef Tensor tensor = stored_array(codes, name)
    cdef int i
    cache.codes = tensor
    check_rank(tensor, name, 4, "[num_blocks, block_size, num_kv_heads, head_dim]")
    for i in range(1, 4):
        if tensor.shape_[i] == 0:
            raise ShapeError(
                f"{name} has shape {tensor.shape}, [num_blocks, block_size, num_kv_heads, head_dim]; axis {i} must "
                "have at least 1 element"
            )
    check_last_axis(tensor, name)
    check_aligned(tensor, name)
    check_place(tensor, name, place)
    if scale is not None:
        cache.plane = scale_plane(scale, f"{label}_scale")
    cache.format = format_of(tensor, cache.plane, label)
    cache.dim = tensor.shape_[3] * (2 if tensor.dtype_code == UINT8 else 1)
    if cache.plane is not None:
        check_plane(cache, label, place)
    return cache


cdef StoredCache plain_cache(Tensor numbers):
    cdef StoredCache cache = StoredCache.__new__(StoredCache)
    cache.codes, cache.format, cache.dim = numbers, Format.Plain, numbers.shape_[3]
    return cache


cdef Tensor scale_plane(object scale, str name):
    """Return a view of stored scales; None for factors, which have at most two axes."""
    if isinstance(scale, (float, int)):
        return None
    cdef Tensor tensor = viewed(scale, name)
    if tensor is None and str(getattr(scale, "dtype", "")).endswith("float8_e8m0fnu"):
        raise UnsupportedDtype(f"{name} is float8_e8m0fnu; pass it viewed as uint8, the dtype of such scales here")
    return tensor if tensor is not None and tensor.ndim > 2 else None


cdef int check_plane(StoredCache cache, str label, const Place* place) except -1:
    cdef Tensor plane = cache.plane, codes = cache.codes
    cdef int64_t group = group_of(cache.format), groups = 1
    cdef int i
    cdef str name = f"{label}_scale"
    format = NAMES[<int>cache.format]
    if group != 0:
        groups = cache.dim // group
        if cache.dim % group != 0:
            raise ShapeError(
                f"{label}_cache has shape {codes.shape} and so a head_dim of {cache.dim}; format {format!r} needs a "
                f"multiple of {group}, because {group} numbers share a scale"
            )
    check_place(plane, name, place)
    cdef bint fits = plane.ndim == 4 and plane.shape_[3] == groups or plane.ndim == 3 and group == 0
    for i in range(3):
        fits = fits and plane.shape_[i] == codes.shape_[i]
    if not fits:
        raise ShapeError(
            f"{name} has shape {plane.shape}; the scales of {label}_cache {codes.shape} in format {format!r} are "
            f"{(*codes.shape[:3], groups)}: pass the plane of the same pool"
        )
    if plane.ndim == 4:
        check_last_axis(plane, name)
    return check_aligned(plane, name)


cdef object given_factor(StoredCache cache, object scale, object global_scale, str label):
    cdef double factor
    if cache.format == Format.NVFP4:
        factor = finite_number(global_scale, f"{label}_global_scale")
        if not <float>factor > 0.0:
            raise UnsupportedOption(f"{label}_global_scale is {factor}; as a float32 it must be above 0")
        return factor
    if not (type(global_scale) is float and <double>global_scale == 1.0) and \
            finite_number(global_scale, f"{label}_global_scale") != 1.0:
        raise UnsupportedOption(
            f"{label}_global_scale is {shown(global_scale)} and {label}_cache is not nvfp4; leave it out: only nvfp4 "
            "has a global scale, and its stored scales are float8_e4m3fn"
        )
    return scale if cache.plane is None else None


cdef int check_stored(StoredCache keys, StoredCache values) except -1:
    cdef int i
    for i in range(3):
        if keys.codes.shape_[i] != values.codes.shape_[i]:
            raise ShapeError(
                f"key_cache has shape {keys.codes.shape} and value_cache {values.codes.shape}; blocks, block_size and "
                "kv heads must be equal, only head_dim may differ"
            )
    return 0


# ---- memory of a write

cdef int check_written(StoredCache keys, StoredCache values) except -1:
    cdef Tensor key = keys.codes, value = values.codes
    check_writable(key, "key_cache")
    check_writable(value, "value_cache")
    check_elements(key, "key_cache")
    check_elements(value, "value_cache")
    check_pair(key, "key_cache", value, "value_cache")
    if keys.plane is not None:
        check_written_plane(keys.plane, "key_scale", keys, values)
    if values.plane is not None:
        check_written_plane(values.plane, "value_scale", keys, values)
        check_pair(values.plane, "value_scale", keys.plane, "key_scale")
    return 0


cdef int check_written_plane(Tensor plane, str name, StoredCache keys, StoredCache values) except -1:
    check_writable(plane, name)
    check_elements(plane, name)
    check_pair(plane, name, keys.codes, "key_cache")
    return check_pair(plane, name, values.codes, "value_cache")


cdef int check_apart_from(StoredCache keys, StoredCache values, Tensor read, str name) except -1:
    if read is None:
        return 0
    check_pair(keys.codes, "key_cache", read, name)
    check_pair(values.codes, "value_cache", read, name)
    check_pair(keys.plane, "key_scale", read, name)
    return check_pair(values.plane, "value_scale", read, name)


cdef inline int check_elements(Tensor written, str name) except -1:
    return 0 if are_nested(written) else check_own_elements(written, name)


cdef inline int check_pair(Tensor written, str name, Tensor other, str other_name) except -1:
    """Raise an error if a written array overlaps another; either may be None."""
    if written is None or other is None or not ranges_meet(range_of(written), range_of(other)):
        return 0
    return check_apart(written, name, other, other_name)
