"""Rows of the packed latent formats, for quantize and dequantize."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU, UINT8, DType
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport (
    Place,
    any_tensor,
    await_arrays,
    check_length,
    find_place,
    finished,
    float_array,
    new_result,
)
from pagecore.ops.cpu._cpu cimport convert_latent_rows as run_convert_latents
from pagecore.ops.cpu.codecs.conversions cimport LatentConversion
from pagecore.ops.cpu.latent.latent cimport LatentCache, LatentFormat, kFp8RowBytes, kPackedLatentDim, kPackedRopeDim

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.ops.latent._latent import LATENT_ROW_BYTES as _ROW_BYTES, PACKED_LATENT_DIMS as _LATENT_DIMS

cdef enum:
    PLAIN = 0  # of LatentFormat


cdef bint is_latent_format(object name) except -1:
    return isinstance(name, str) and name in _ROW_BYTES


cdef object quantize_latents(object x, str format, object scale, object stream):
    cdef Place place
    cdef Tensor numbers = float_array(x, "x")
    check_rows(numbers, "x")
    find_place(&place, numbers, "x", x, stream)
    check_no_scales(format, scale, None)
    check_length(numbers, "x", numbers.ndim - 1, sum(_LATENT_DIMS), "512 latent and 64 rope numbers")
    cdef Tensor codes = result_like(numbers, _ROW_BYTES[format], UINT8, x, &place)
    if place.device_type == CPU:
        convert_latents(merged_rows(numbers), merged_rows(codes))
    else:
        await_arrays((x,), &place)
        convert_latents_on_device(numbers, PLAIN, codes, latent_code(format), &place)
    return finished(codes, x, &place)


cdef object dequantize_latents(
        object codes, str format, object scales, object scale, int dtype_code, object stream):
    cdef Place place
    cdef Tensor stored = any_tensor(codes, "codes")
    check_rows(stored, "codes")
    if stored.dtype_code != UINT8:
        raise UnsupportedDtype(f"codes is {stored.dtype}; the rows of {format!r} are uint8")
    find_place(&place, stored, "codes", codes, stream)
    check_no_scales(format, scale, scales)
    check_length(stored, "codes", stored.ndim - 1, _ROW_BYTES[format], f"the bytes of a row of {format}")
    cdef Tensor numbers = result_like(stored, sum(_LATENT_DIMS), dtype_code, codes, &place)
    if place.device_type == CPU:
        convert_latents(merged_rows(stored), merged_rows(numbers))
    else:
        await_arrays((codes,), &place)
        check_row_starts(stored, format)
        convert_latents_on_device(stored, latent_code(format), numbers, PLAIN, &place)
    return finished(numbers, codes, &place)


cdef int latent_code(str format) noexcept:
    return <int>(LatentFormat.Fp8DsMla if format == "fp8_ds_mla" else LatentFormat.Nvfp4DsMla)


cdef int check_row_starts(Tensor rows, str format) except -1:
    """Raise ShapeError unless the kernels can read vectors of every row."""
    cdef int64_t bits = <int64_t>rows.data
    cdef int i
    for i in range(rows.ndim - 1):
        bits |= rows.strides_[i]
    if bits % 16 != 0:
        raise ShapeError(
            f"codes has strides {rows.strides} bytes; on CUDA rows of {format} must start at multiples of 16 bytes: "
            "pass a copy"
        )
    return 0


cdef Tensor result_like(Tensor rows, int64_t row, int dtype_code, object example, const Place* place):
    """Return a new array with the axes of `rows`, but `row` elements in the last one."""
    cdef int64_t shape[8]
    cdef int i
    for i in range(rows.ndim):
        shape[i] = rows.shape_[i]
    shape[rows.ndim - 1] = row
    return new_result(rows.ndim, shape, dtype_code, example, place)


cdef int check_no_scales(str format, object scale, object scales) except -1:
    for given, name in ((scale, "scale"), (scales, "scales")):
        if given is not None:
            raise UnsupportedOption(f"format {format!r} stores its scales in its rows; leave {name} out")
    return 0


cdef LatentCache cache_of(Tensor rows) noexcept:
    """Return rows [n, row] as a cache of n blocks of one token."""
    cdef LatentCache cache
    cache.latent, cache.block_stride, cache.num_blocks = rows.data, rows.strides_[0], rows.shape_[0]
    cache.rope, cache.rope_block_stride = rows.data, rows.strides_[0]
    cache.block_size, cache.latent_dim, cache.rope_dim = 1, kPackedLatentDim, kPackedRopeDim
    if rows.dtype_code == UINT8:
        cache.format = (
            LatentFormat.Fp8DsMla if rows.shape_[1] == kFp8RowBytes else LatentFormat.Nvfp4DsMla)
        return cache
    cache.type = <DType>rows.dtype_code
    cache.rope = rows.data + kPackedLatentDim * rows.itemsize
    return cache


cdef int convert_latents(Tensor source, Tensor target) except -1:
    cdef LatentConversion rows
    rows.source, rows.target = cache_of(source), cache_of(target)
    return run_convert_latents(rows)
