"""quantize and dequantize: rows of any array to the codes and scales of a format, and back."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport LAST_FLOAT, CPU, UINT8, DType
from pagecore.arrays.tensors._tensor cimport Tensor, as_tensor
from pagecore.ops.args cimport Format
from pagecore.ops.arguments._arguments cimport (
    Place,
    any_tensor,
    await_arrays,
    check_place,
    code_dtype,
    find_place,
    finished,
    float_array,
    group_of,
    is_cast,
    is_packed,
    named_format,
    new_result,
    scale_dtype,
    scale_numbers,
    viewed,
)
from pagecore.ops.cpu._cpu cimport dequantize as run_dequantize, quantize as run_quantize
from pagecore.ops.cpu.args cimport Codec

import numpy as np

from pagecore.arrays.dtypes.dtype import DTYPES, as_dtype
from pagecore.arrays.dtypes.formats import SEALED_FORMATS
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.ops.arguments._arguments import NAMES as _NAMES
from pagecore.ops.latent._latent import LATENT_ROW_BYTES as _ROW_BYTES

cdef tuple _OTHER_FORMATS = (*_ROW_BYTES, *SEALED_FORMATS)  # those that write_kv does not take


def quantize(x, format, scale=None, *, axis=None, group_size=None, stream=None):
    """Return the codes and scales of numbers in a format, as `write_kv` stores them.

    Parameters
    ----------
    x : array, [..., D]
        float32, float16 or bfloat16, on the host or CUDA. The last axis is contiguous; other strides are free.
    format : str
        "float8_e4m3fn", "float8_e5m2", "float8_token", "int8_token", "int4_token", "fp4_block16", "nvfp4" or "mxfp8",
        or "nvfp4_4over6", which computes the scales of "nvfp4" so that the largest number of a group becomes 6 or 4,
        whichever has the smaller squared error. See `write_kv` for these formats. "fp8_ds_mla" and "nvfp4_ds_mla" take
        rows of 512 latent and 64 rope numbers; see `write_latent`. "kivi2" and "kivi4": codes of 2 or 4 bits with a
        scale and a least number for each group, which need not be numbers of one row; see Notes.
    scale : float or [H], optional
        Given factor of "float8_e4m3fn", "float8_e5m2" and "nvfp4", above 0 for the last: numbers are divided by it. H
        is the length of the axis before the last. 1 by default.
    axis : {-1, -2}, optional
        Of "kivi2" and "kivi4": -1, the default, for groups of the numbers of a row, as of values; -2 for groups of rows
        of each channel, as of keys ``[..., T, D]``.
    group_size : int, optional
        Of "kivi2" and "kivi4": consecutive numbers along `axis` that share a scale; 32 by default.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work; by default the current stream of the framework of `x`.

    Returns
    -------
    codes : array, [..., D] or [..., D / 2]
        float8_e4m3fn, float8_e5m2, int8, or uint8 with two codes a byte, that of the even index in the low nibble. New,
        C-contiguous, in the framework of `x`. For "fp8_ds_mla" and "nvfp4_ds_mla" uint8 rows of 656 and 352 bytes. For
        "kivi2" and "kivi4" words of int32, which hold 16 or 8 consecutive codes along `axis`, the first in the lowest
        bits: that axis is as much shorter.
    scales : array, [..., groups], or None
        Scales of groups of 16 or 32 numbers, or one of the row: float32, uint8 or float8_e4m3fn. None if the format
        stores none, or stores them in the rows. For "kivi2" and "kivi4" in the dtype of `x`, [..., groups, 2] with axis
        -1 and [..., groups, 2, D] with axis -2: the scale of each group, then its least number.

    Raises
    ------
    ShapeError
        An axis is not a multiple of the numbers that share a scale, a byte or a word, or `scale` has another length
        than H.
    UnsupportedDtype, UnsupportedOption
        Other dtypes, formats or factors. Factors in CUDA memory are not checked.
    DeviceError
        Arrays are on different devices.
    NotEnoughMemory
        The host or the device cannot allocate the result.

    Notes
    -----
    "kivi2" and "kivi4" store ``(x - least) / scale``, to nearest even, where least is the smallest number of a group
    and scale its range divided by 3 or 15, both rounded to the dtype of `x`. A group of equal numbers has the scale 0
    and reads back exactly. Infinities become the largest number of the dtype; a group with NaN reads as NaN. KIVI: Liu
    et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024, whose words these are.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> codes, scales = pagecore.quantize(np.array([[127, 2.5, -0.4, 0]], np.float32), "int8_token")
    >>> codes, scales
    (array([[127,   3,   0,   0]], dtype=int8), array([[1.]], dtype=float32))
    """
    cdef Place place
    cdef Codec codec
    cdef Tensor rows
    cdef bint four_over_six = False
    if affine_bits(format):
        return quantize_groups(x, format, scale, axis, group_size, stream)
    check_row_format(format, axis, group_size)
    if is_latent_format(format):
        return quantize_latents(x, format, scale, stream), None
    cdef Format kind = named_format(format, &four_over_six, _OTHER_FORMATS)
    cdef Tensor numbers = float_array(x, "x")
    check_rows(numbers, "x")
    find_place(&place, numbers, "x", x, stream)
    cdef int last = numbers.ndim - 1
    cdef int64_t dim = numbers.shape_[last], unit = unit_of(kind)
    if dim == 0 or dim % unit != 0:
        raise ShapeError(
            f"x has shape {numbers.shape}; format {format!r} needs a last axis of a multiple of {unit}, at least {unit}"
        )
    cdef Tensor factors = factors_of(kind, scale, numbers, &place)
    cdef int64_t shape[8]
    cdef int i
    for i in range(last):
        shape[i] = numbers.shape_[i]
    shape[last] = dim // 2 if is_packed(kind) else dim
    cdef Tensor codes = new_result(numbers.ndim, shape, code_dtype(kind), x, &place)
    cdef Tensor scales = None
    if not is_cast(kind):
        shape[last] = row_scales(kind, dim)
        scales = new_result(numbers.ndim, shape, scale_dtype(kind), x, &place)
    if place.device_type != CPU:
        await_arrays((x, scale), &place)
        convert_rows(kind, numbers, codes, scales, scale, four_over_six, True, &place)
    else:
        rows = merged_rows(numbers)  # may be a copy, which must outlive the call
        fill_codec(&codec, kind, rows, merged_rows(codes), None if scales is None else merged_rows(scales), factors)
        codec.four_over_six = four_over_six
        run_quantize(codec)
    return finished(codes, x, &place), None if scales is None else finished(scales, x, &place)


def dequantize(codes, format, scales=None, scale=None, dtype="float32", *, axis=None, stream=None):
    """Return the numbers of codes and scales: the inverse of `quantize`, but for rounding.

    Parameters
    ----------
    codes : array, [..., D] or [..., D / 2], or [..., 656] or [..., 352]
        On the host or CUDA, in the dtype of the format's codes. The last axis is contiguous, here and below; other
        strides are free, so that blocks of a cache can be passed.
    format : str
        As in `quantize`.
    scales : array, [..., groups], optional
        Required for formats that store scales. The axis of one scale a row may be absent. For "kivi2" and "kivi4" as
        `quantize` returns them; their shape determines the group size.
    scale : float or [H], optional
        Given factor, as in `quantize`.
    dtype : {"float32", "float16", "bfloat16"}
        Dtype of the result; float32 numbers are rounded to nearest even. Numbers of "fp8_ds_mla" and
        "nvfp4_ds_mla" are bfloat16 before; see `gather_latent`.
    axis : {-1, -2}, optional
        Of "kivi2" and "kivi4", as in `quantize`.
    stream : int or a stream, optional
        As in `quantize`.

    Returns
    -------
    array, [..., D]
        New, C-contiguous, in the framework of `codes`.

    Raises
    ------
    ShapeError
        `scales` does not have one scale for each group of `codes`, or `scale` has another length than H.
    UnsupportedDtype, UnsupportedOption
        Other dtypes, formats or factors, missing or needless scales.
    DeviceError
        Arrays are on different devices.
    NotEnoughMemory
        The host or the device cannot allocate the result.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> codes, scales = pagecore.quantize(np.array([[0.1, -3, 0.5, 4.5] * 4], np.float32), "fp4_block16")
    >>> pagecore.dequantize(codes, "fp4_block16", scales)[0, :4]
    array([ 0. , -3. ,  0.5,  4. ], dtype=float32)
    """
    cdef Place place
    cdef Codec codec
    cdef Tensor rows
    cdef bint four_over_six = False
    target = as_dtype(dtype)
    if target.code > LAST_FLOAT:
        raise UnsupportedDtype(f"dtype is {target}; use float32, float16 or bfloat16")
    if affine_bits(format):
        return dequantize_groups(codes, format, scales, scale, axis, target.code, stream)
    check_row_format(format, axis, None)
    if is_latent_format(format):
        return dequantize_latents(codes, format, scales, scale, target.code, stream)
    cdef Format kind = named_format(format, &four_over_six, _OTHER_FORMATS)
    cdef Tensor stored = any_tensor(codes, "codes")
    check_rows(stored, "codes")
    if stored.dtype_code != code_dtype(kind):
        raise UnsupportedDtype(f"codes is {stored.dtype}; the codes of {format!r} are {DTYPES[code_dtype(kind)]}")
    find_place(&place, stored, "codes", codes, stream)
    cdef int64_t shape[8]
    cdef int i, last = stored.ndim - 1
    for i in range(stored.ndim):
        shape[i] = stored.shape_[i]
    shape[last] *= 2 if is_packed(kind) else 1
    cdef int64_t dim = shape[last], unit = unit_of(kind)
    if dim == 0 or dim % unit != 0:
        raise ShapeError(f"codes has shape {stored.shape}, rows of {dim}; format {format!r} needs a multiple of {unit}")
    cdef Tensor plane = stored_scales(scales, stored, kind, format, row_scales(kind, dim))
    if plane is not None:
        check_place(plane, "scales", &place)
    cdef Tensor factors = factors_of(kind, scale, stored, &place)
    cdef Tensor numbers = new_result(stored.ndim, shape, target.code, codes, &place)
    if place.device_type != CPU:
        await_arrays((codes, scales, scale), &place)
        convert_rows(kind, numbers, stored, plane, scale, False, False, &place)
    else:
        rows = merged_rows(stored)  # may be copies, which must outlive the call
        plane = None if plane is None else merged_rows(plane)
        fill_codec(&codec, kind, merged_rows(numbers), rows, plane, factors)
        run_dequantize(codec)
    return finished(numbers, codes, &place)


# ---- sizes of a format

cdef int64_t unit_of(Format kind) noexcept:
    """Return the number that must divide the length of a row."""
    cdef int64_t group = group_of(kind)
    if group != 0:
        return group
    return 2 if is_packed(kind) else 1


cdef int64_t row_scales(Format kind, int64_t dim) noexcept:
    cdef int64_t group = group_of(kind)
    return 1 if group == 0 else dim // group


# ---- arguments

cdef Tensor stored_scales(object scales, Tensor codes, Format kind, str format, int64_t groups):
    """Return the scales with the axes of the codes; None if the format stores none."""
    cdef int i
    if is_cast(kind):
        if scales is not None:
            raise UnsupportedOption(
                f"format {format!r} stores no scales; pass its factor as scale, and leave scales out"
            )
        return None
    if scales is None:
        raise UnsupportedOption(f"format {format!r} stores scales; pass them as scales")
    cdef Tensor plane = any_tensor(scales, "scales")
    if group_of(kind) == 0 and plane.ndim == codes.ndim - 1:
        plane = with_last_axis(plane)
    check_rows(plane, "scales")
    if plane.dtype_code != scale_dtype(kind):
        wanted = DTYPES[scale_dtype(kind)]
        remedy = ": view them as that dtype" if plane.dtype_code == UINT8 and wanted.itemsize == 1 else ""
        raise UnsupportedDtype(f"scales is {plane.dtype}; the scales of {format!r} are {wanted}{remedy}")
    cdef bint fits = plane.ndim == codes.ndim and plane.shape_[plane.ndim - 1] == groups
    for i in range(codes.ndim - 1):
        fits = fits and plane.shape_[i] == codes.shape_[i]
    if not fits:
        raise ShapeError(f"scales has shape {plane.shape}; codes {codes.shape} need {(*codes.shape[:-1], groups)}")
    return plane


cdef Tensor factors_of(Format kind, object scale, Tensor rows, const Place* place):
    """Return the given factors as contiguous float32: one, or one for each entry of the axis before the last.

    Equal factors are returned as one: rows with one factor are quantised as one batch. Factors on the host are checked
    for rows on a device as well; None is returned for factors on a device.
    """
    cdef Tensor factors
    cdef Place here = place[0]
    cdef int64_t heads = rows.shape_[rows.ndim - 2] if rows.ndim > 1 else 1
    if scale is None:
        return None
    if not is_cast(kind) and kind != Format.NVFP4:
        raise UnsupportedOption(
            f"format {_NAMES[<int>kind]!r} computes its scales and has no given factor; leave scale out"
        )
    if place.device_type != CPU and not isinstance(scale, (float, int)):
        factors = viewed(scale, "scale")
        if factors is not None and factors.device_type != CPU:
            return None
    here.device_type = CPU
    factors = scale_numbers(scale, "scale", heads, True, &here)
    if factors is None:
        return None
    given = np.ascontiguousarray(factors.numpy(), np.float32)
    if kind == Format.NVFP4 and not (given > 0).all():
        raise UnsupportedOption(f"scale holds {given.min()}; the global scale of nvfp4 must be above 0")
    return as_tensor(given[:1] if (given == given[:1]).all() else given)


cdef int fill_codec(
        Codec* codec, Format kind, Tensor numbers, Tensor codes, Tensor scales, Tensor factors) except -1:
    codec.format = kind
    codec.numbers, codec.numbers_stride = numbers.data, numbers.strides_[0]
    codec.num_rows, codec.dim = numbers.shape_[0], numbers.shape_[1]
    codec.type = <DType>numbers.dtype_code
    codec.codes, codec.codes_stride = codes.data, codes.strides_[0]
    if scales is not None:
        codec.scales, codec.scales_stride = scales.data, scales.strides_[0]
    if factors is not None:
        codec.factors, codec.num_factors = <float*>factors.data, factors.shape_[0]
    return 0
