"""Keys and values as a cache with sealed blocks reads them: the first tokens quantised by the plain twin (KIVI)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagecore import AttentionSpec
from tests.ops import kivi_twin

Array = npt.NDArray[Any]


def sealed_after(length: int, sealed: int, residual: int, block_size: int) -> int:
    """Return the sealed tokens of a sequence once `length` tokens are committed."""
    return max(sealed, max(0, length - residual) // block_size * block_size)


def as_read(spec: AttentionSpec, key: Array, value: Array, sealed: int, block_size: int) -> tuple[Array, Array]:
    """Return keys and values [tokens, heads, dim] whose first `sealed` tokens are those of sealed blocks."""
    group = spec.sealing.group_size
    key_format, value_format = spec.format, spec.value_format or spec.format
    keys, values = key.astype(np.float32), value.astype(np.float32)
    for first in range(0, sealed, block_size):
        rows = slice(first, first + block_size)
        codes, scales = kivi_twin.quantize(keys[rows].swapaxes(0, 1), key_format, -2, group)
        keys[rows] = kivi_twin.dequantize(codes, key_format, scales, -2).swapaxes(0, 1)
        codes, scales = kivi_twin.quantize(values[rows], value_format, -1, group)
        values[rows] = kivi_twin.dequantize(codes, value_format, scales)
    return keys, values
