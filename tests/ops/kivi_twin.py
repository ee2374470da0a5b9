"""Plain twin of the formats "kivi2" and "kivi4" in NumPy: groups along one axis, their codes, scales and least numbers.

Along the axis, for each group, in float32 with one rounded operation at a time:

- numbers are clipped to the largest number of the dtype of `x`, so that infinities become finite;
- least is the smallest number, 0 for -0, and scale is ``(largest - least) / (2 ** bits - 1)``, both rounded to the
  dtype of `x`; a range above the largest float32 counts as that number;
- codes are ``(x - least) / scale`` to nearest even, within 0 to ``2 ** bits - 1``, and 0 if the scale is 0;
- a group with NaN has the scale NaN, the least number 0 and codes 0.

Words of 32 bits hold 16 or 8 consecutive codes, the first in the lowest bits. Numbers are ``least + code * scale``,
computed in float64 and rounded once to float32.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

BITS = {"kivi2": 2, "kivi4": 4}
LARGEST = np.finfo(np.float32).max


def quantize(
    x: Any, format: str, axis: int = -1, group_size: int = 32
) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
    """Return int32 words, and scales with an axis (scale, least) after that of the groups, as `pagecore.quantize`."""
    bits, given = BITS[format], np.moveaxis(np.asarray(x), axis, -1)  # the grouped axis is last
    dtype, top = given.dtype, np.float32(2**bits - 1)
    most = np.float32(ml_dtypes.finfo(dtype).max)
    numbers = np.clip(given.astype(np.float32), -most, most)
    grouped = numbers.reshape(*numbers.shape[:-1], -1, group_size)
    with np.errstate(all="ignore"):
        low, high = grouped.min(-1, keepdims=True), grouped.max(-1, keepdims=True)
        has_nan = np.isnan(grouped).any(-1, keepdims=True)
        scale = np.where(has_nan, np.float32(np.nan), np.minimum(high - low, LARGEST) / top).astype(dtype)
        least = np.where(has_nan, np.float32(0), low + 0).astype(dtype)
        steps = (grouped - least.astype(np.float32)) / scale.astype(np.float32)
    codes = np.where(scale.astype(np.float32) > 0, np.rint(np.clip(steps, 0, top)), 0).astype(np.uint32)
    codes = codes.reshape(*given.shape[:-1], -1, 32 // bits)
    words = (codes << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)
    scales = np.concatenate([scale, least], -1)  # [..., groups, 2]
    if axis == -1:
        return words, scales
    return np.moveaxis(words, -1, axis), np.moveaxis(scales, (-2, -1), (-3, -2))


def dequantize(words: Any, format: str, scales: Any, axis: int = -1) -> npt.NDArray[np.float32]:
    """Return the numbers of words and scales as float32."""
    bits = BITS[format]
    lined = np.moveaxis(np.asarray(words), axis, -1).view(np.uint32)
    pairs = np.asarray(scales) if axis == -1 else np.moveaxis(np.asarray(scales), (-3, -2), (-2, -1))
    codes = (lined[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & np.uint32(2**bits - 1)
    codes = codes.reshape(*lined.shape[:-1], pairs.shape[-2], -1)
    wide = pairs.astype(np.float64)[..., None]
    numbers = wide[..., 1, :] + codes * wide[..., 0, :]
    return np.moveaxis(numbers.reshape(*lined.shape[:-1], -1), -1, axis).astype(np.float32)
