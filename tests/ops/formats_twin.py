"""Plain twin of the quantised formats: codes and scales of rows in NumPy, and the numbers that they represent.

The native codecs round by arithmetic on bits. The twin rounds with ml_dtypes, and computes scales in float32, one
rounded operation at a time.

Bits of each format, for a row x of float32 (float16 and bfloat16 are widened first); each operation rounds to float32:

- amax is the largest ``|x|`` of the row or group. NaN is ignored and infinity counts as the largest float32.
- float8_e4m3fn, float8_e5m2: ``x / factor`` to nearest even, saturated. NaN is 0x7f.
- float8_token: scale ``max(amax / 448, 1e-6)``; codes ``x * (1 / scale)``. NaN is 0x7f.
- int8_token: scale ``max(amax / 127, 1e-6)``; codes ``x * (1 / scale)``, halves away from 0.
- int4_token: low ``min(0, x)``, high ``max(0, x)``; scale ``max((high - low) / 15, 1e-6)``; zero point
  ``-low * (1 / scale)`` and codes ``x * (1 / scale) + zero point``, halves away from 0, within 0 to 15. The 4 low bits
  of the stored scale hold the zero point, and count as 0 in the scale that is read.
- fp4_block16: scale ``2 ** ceil(log2(max(amax / 6, 1e-10)))``; halves up in magnitude.
- nvfp4: scale ``e4m3(amax / (6 * factor))``; codes ``x / (scale * factor)`` to nearest even, 0 if the scale is 0.
- nvfp4_4over6: of the codes with the scales of ``amax / (6 * factor)`` and ``amax / (4 * factor)`` those with the
  smaller sum of squared errors, the first if the sums are equal. The sum adds i and i + 8, then i and i + 4, i + 2,
  i + 1.
- mxfp8: scale ``2 ** ceil(log2(max(amax, 1e-30) / 448))``; codes ``x / scale`` to nearest even.

A row of int8_token or int4_token with NaN has the scale NaN, a group of fp4_block16 the byte 255 and a group of nvfp4
the byte 0x7f; the codes and zero points of these are 0. They read as NaN.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pagecore.arrays.dtypes.formats import FORMATS

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

F32 = np.float32
LARGEST = np.finfo(np.float32).max
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E5M2 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float64)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E2M1_BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
UE8M0 = np.array([2.0 ** (i - 127) for i in range(255)] + [np.nan])


def quantize_row(x: Any, format: str, scale: float = 1.0) -> tuple[Bytes, Bytes]:
    """Return the bytes of the codes and of the stored scales of rows.

    Parameters
    ----------
    x : array, [..., D]
    format : str
        A name of `FORMATS`, or "nvfp4_4over6".
    scale : float
        The given factor of float8_e4m3fn, float8_e5m2, nvfp4 and nvfp4_4over6.

    Returns
    -------
    codes : uint8, [..., D / codes_per_byte]
    scales : uint8, [..., bytes of the scales of a row]
        Without elements if no scale is stored.
    """
    rows = np.asarray(x).astype(np.float32)
    with np.errstate(all="ignore"):
        codes, scales = _QUANTIZE[format](rows, F32(scale))
    return codes, np.ascontiguousarray(scales).view(np.uint8).reshape(*rows.shape[:-1], -1)


def dequantize_row(codes: Any, format: str, scales: Any = None, scale: float = 1.0) -> Floats:
    """Return the numbers of rows as float32; codes and scales are bytes, or arrays in their dtypes."""
    kind = FORMATS[format.removesuffix("_4over6")]
    given = np.asarray(codes).view(np.uint8)
    stored = None if kind.scale_dtype is None else np.ascontiguousarray(scales).view(kind.scale_dtype.numpy)
    with np.errstate(all="ignore"):
        return _DEQUANTIZE[kind.name](given, stored, F32(scale)).astype(np.float32)


# ---- rounding


def _nearest_even(x: Floats, dtype: Any, nan: int) -> Bytes:
    """Return the codes of a dtype of ml_dtypes nearest to x, of two the even one; x saturates."""
    largest = F32(ml_dtypes.finfo(dtype).max)
    codes = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(nan), codes)


def e4m3(x: Floats) -> Bytes:
    """Return e4m3 codes: saturating, nearest even, NaN 0x7f."""
    return _nearest_even(x, ml_dtypes.float8_e4m3fn, 0x7F)


def e5m2(x: Floats) -> Bytes:
    """Return e5m2 codes: saturating, nearest even, NaN 0x7f."""
    return _nearest_even(x, ml_dtypes.float8_e5m2, 0x7F)


def e2m1(x: Floats) -> Bytes:
    """Return e2m1 codes: saturating, nearest even, NaN 0."""
    return _nearest_even(x, ml_dtypes.float4_e2m1fn, 0)


def half_away(x: Floats) -> Integers:
    """Return the nearest integers, halves away from 0; 0 for NaN."""
    wide = np.nan_to_num(x.astype(np.float64), nan=0.0)
    return (np.sign(wide) * np.floor(np.abs(wide) + 0.5)).clip(-(2**40), 2**40).astype(np.int64)


def _ceil_log2(x: Floats) -> Integers:
    """Return the exponent of the smallest power of two that is not below x."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.where(mantissa == 0.5, exponent - 1, exponent).astype(np.int64)


def _amax(x: Floats) -> Floats:
    """Return the largest magnitude of the last axis; NaN is ignored, and infinity is the largest float32."""
    known = np.where(np.isnan(x), F32(0), np.abs(x))
    largest: Floats = np.minimum(known.max(-1), LARGEST)
    return largest


def _pack(codes: npt.NDArray[Any]) -> Bytes:
    """Two codes a byte, the even element in the low nibble."""
    packed: Bytes = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return packed


def _unpack(packed: Bytes) -> Bytes:
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def _grouped(x: Floats, group: int) -> Floats:
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _flat(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return x.reshape(*x.shape[:-2], -1)


# ---- quantise


def _float8_token(x: Floats, _: np.float32) -> tuple[Bytes, npt.NDArray[Any]]:
    scale = np.maximum(_amax(x) / F32(448), F32(1e-6))[..., None]
    return e4m3(x * (F32(1) / scale)), scale


def _int8_token(x: Floats, _: np.float32) -> tuple[Bytes, npt.NDArray[Any]]:
    scale = np.maximum(_amax(x) / F32(127), F32(1e-6))[..., None]
    scale = np.where(np.isnan(x).any(-1, keepdims=True), F32(np.nan), scale)
    codes = half_away(x * (F32(1) / scale)).clip(-128, 127)
    return codes.astype(np.int8).view(np.uint8), scale


def _int4_token(x: Floats, _: np.float32) -> tuple[Bytes, npt.NDArray[Any]]:
    finite = np.clip(x, -LARGEST, LARGEST)
    low, high = np.minimum(F32(0), finite.min(-1, keepdims=True)), np.maximum(F32(0), finite.max(-1, keepdims=True))
    scale = np.maximum(np.minimum(high - low, LARGEST) / F32(15), F32(1e-6))
    has_nan = np.isnan(x).any(-1, keepdims=True)
    scale = np.where(has_nan, F32(np.nan), scale)
    inverse = F32(1) / scale
    zero = half_away(-low * inverse).clip(0, 15)
    codes = half_away(x * inverse + zero.astype(np.float32)).clip(0, 15)
    bits = np.where(has_nan, 0x7FC00000, scale.view(np.uint32) & ~np.uint32(15) | zero.astype(np.uint32))
    return _pack(np.where(has_nan, 0, codes)), bits.astype(np.uint32)


def _fp4_block16(x: Floats, _: np.float32) -> tuple[Bytes, npt.NDArray[Any]]:
    groups = _grouped(x, 16)
    exponent = _ceil_log2(np.maximum(_amax(groups) / F32(6), F32(1e-10)))
    scaled = groups.astype(np.float64) / 2.0 ** exponent[..., None]
    size = np.abs(scaled)
    codes = sum((size >= bound).astype(np.uint8) for bound in E2M1_BOUNDS) | np.where(groups < 0, 8, 0)
    has_nan = np.isnan(groups).any(-1)
    return (
        _pack(_flat(np.where(has_nan[..., None], 0, codes))),
        np.where(has_nan, 255, exponent + 127).astype(np.uint8),
    )


def _nvfp4_with(x: Floats, most: float, factor: np.float32) -> tuple[Bytes, Bytes]:
    """Return codes (one a byte) and the scale of each group, for a largest code of `most`."""
    has_nan = np.isnan(x).any(-1)
    scales = np.where(has_nan, 0x7F, e4m3(_amax(x) / (F32(most) * factor))).astype(np.uint8)
    divisor = (E4M3[scales].astype(np.float32) * factor)[..., None]
    codes = np.where((divisor == 0) | has_nan[..., None], 0, e2m1(x / divisor))
    return codes.astype(np.uint8), scales


def _nvfp4(x: Floats, factor: np.float32) -> tuple[Bytes, npt.NDArray[Any]]:
    codes, scales = _nvfp4_with(_grouped(x, 16), 6, factor)
    return _pack(_flat(codes)), scales


def _squared_error(x: Floats, codes: Bytes, scales: Bytes, factor: np.float32) -> Floats:
    error = x - (E2M1[codes] * E4M3[scales][..., None]).astype(np.float32) * factor
    total: Floats = error * error
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def _nvfp4_4over6(x: Floats, factor: np.float32) -> tuple[Bytes, npt.NDArray[Any]]:
    groups = _grouped(x, 16)
    six, four = _nvfp4_with(groups, 6, factor), _nvfp4_with(groups, 4, factor)
    is_four = _squared_error(groups, *four, factor) < _squared_error(groups, *six, factor)
    codes = np.where(is_four[..., None], four[0], six[0])
    return _pack(_flat(codes)), np.where(is_four, four[1], six[1])


def _mxfp8(x: Floats, _: np.float32) -> tuple[Bytes, npt.NDArray[Any]]:
    groups = _grouped(x, 32)
    exponent = _ceil_log2(np.maximum(_amax(groups), F32(1e-30)) / F32(448)).clip(-127, 127)
    # An exponent within float32: the quotient rounds at most below the smallest code.
    codes = e4m3((groups.astype(np.float64) / 2.0 ** exponent[..., None]).astype(np.float32))
    return _flat(codes), (exponent + 127).astype(np.uint8)


_QUANTIZE = {
    "float8_e4m3fn": lambda x, factor: (e4m3(x / factor), np.zeros((*x.shape[:-1], 0), np.uint8)),
    "float8_e5m2": lambda x, factor: (e5m2(x / factor), np.zeros((*x.shape[:-1], 0), np.uint8)),
    "float8_token": _float8_token,
    "int8_token": _int8_token,
    "int4_token": _int4_token,
    "fp4_block16": _fp4_block16,
    "nvfp4": _nvfp4,
    "nvfp4_4over6": _nvfp4_4over6,
    "mxfp8": _mxfp8,
}


# ---- dequantise


def _read_int4(codes: Bytes, scales: npt.NDArray[Any], _: np.float32) -> npt.NDArray[Any]:
    bits = scales.view(np.uint32)
    centred = _unpack(codes).astype(np.float32) - (bits & 15).astype(np.float32)
    return centred * (bits & ~np.uint32(15)).view(np.float32)


def _read_groups(numbers: npt.NDArray[Any], scales: npt.NDArray[Any]) -> Floats:
    """Return numbers of codes times the scales of their groups, which float32 holds without rounding."""
    group = numbers.shape[-1] // scales.shape[-1]
    return _flat(_grouped(numbers, group) * scales[..., None]).astype(np.float32)


_DEQUANTIZE = {
    "float8_e4m3fn": lambda codes, _, factor: E4M3[codes].astype(np.float32) * factor,
    "float8_e5m2": lambda codes, _, factor: E5M2[codes].astype(np.float32) * factor,
    "float8_token": lambda codes, scales, _: E4M3[codes].astype(np.float32) * scales,
    "int8_token": lambda codes, scales, _: codes.view(np.int8).astype(np.float32) * scales,
    "int4_token": _read_int4,
    "fp4_block16": lambda codes, scales, _: _read_groups(E2M1[_unpack(codes)], UE8M0[scales]),
    "nvfp4": lambda codes, scales, factor: _read_groups(E2M1[_unpack(codes)], E4M3[scales.view(np.uint8)]) * factor,
    "mxfp8": lambda codes, scales, _: _read_groups(E4M3[codes], UE8M0[scales]),
}
