"""float8 queries and outputs of attention: cases, and the bound of a result that is rounded to float8 once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from tests.ops.cases import Array, Case

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
LARGEST = 448.0


def with_float8_query(case: Case, dtype: np.dtype[Any] = E4M3) -> Case:
    """Return the case with its query rounded to float8."""
    return replace(case, query=case.query.astype(np.float32).astype(dtype))


def dequantised(case: Case, scale: Any = 1.0) -> Case:
    """Return the case with the numbers of the codes of its query, in float64."""
    group = case.query.shape[1] // case.key_cache.shape[2]
    factors = np.broadcast_to(np.asarray(scale, np.float64), case.key_cache.shape[2]).repeat(group)
    return replace(case, query=case.query.astype(np.float64) * factors[:, None])


def neighbours(numbers: Array, slack: float) -> tuple[Array, Array]:
    """Return the codes of numbers that are less, and greater, by `slack`."""
    limited = np.clip(np.stack([numbers - slack, numbers + slack]), -LARGEST, LARGEST)
    low, high = limited.astype(np.float32).astype(E4M3).astype(np.float64)
    return low, high


def numbers_near_ties() -> Array:
    """Return float32 codes, their midpoints, the float32 numbers next to these, numbers beyond 448 and NaN."""
    codes = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    ties = (codes[:-1] + codes[1:]) / 2
    assert ties.dtype == np.float32
    below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))
    assert ((below < ties) & (ties < above)).all()
    numbers = np.concatenate([codes, ties, below, above, np.array([449, 464, 1e4, np.inf], np.float32)])
    return np.concatenate([numbers, -numbers, np.array([np.nan], np.float32)])


def assert_rounded_once(out: Array, expected: Array, scale: float, slack: float) -> None:
    """Check that each code is that of a number within `slack` of the expected one, divided by the scale."""
    assert out.dtype == E4M3
    got = out.astype(np.float64)
    low, high = neighbours(expected / scale, slack / scale)
    assert np.isfinite(got).all()
    wrong = (got < low) | (got > high)
    assert not wrong.any(), f"{np.count_nonzero(wrong)} of {wrong.size} codes are not the nearest ones"
