"""Every instruction set converts as NumPy does: narrowing rounds to nearest even, widening is exact."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from pagecore.ops import write_kv
from tests.ops.instruction_sets import on_every_isa
from tests.together import together

NARROW = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def written(numbers, dtype):
    """Return the numbers after a write to a cache of a dtype; rows have a tail in every vector width."""
    dim = 67
    rows = np.zeros((-(-numbers.size // dim), 1, dim), numbers.dtype)
    rows.reshape(-1)[: numbers.size] = numbers
    caches = np.zeros((2, len(rows), 1, 1, dim), dtype)
    write_kv(rows, rows, *caches, np.arange(len(rows)))
    np.testing.assert_array_equal(caches[0].view(np.uint8), caches[1].view(np.uint8))
    return caches[0].reshape(-1)[: numbers.size]


@together("dtype", NARROW.values())
@on_every_isa
def test_every_narrow_number_widens_exactly(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    wide = written(every, np.float32)
    expected = every.astype(np.float32)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(wide[~nan].view(np.uint32), expected[~nan].view(np.uint32))
    assert np.isnan(wide[nan]).all()


@together("dtype", NARROW.values())
@on_every_isa
def test_narrowing_rounds_to_nearest_even(dtype):
    rng = np.random.default_rng(0)
    neighbours = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    neighbours = np.sort(neighbours[np.isfinite(neighbours)])
    ties = (neighbours[1:].astype(np.float64) + neighbours[:-1]) / 2
    special = [0.0, -0.0, np.inf, -np.inf, 65504, 65519.996, 65520, 3.4e38, -3.4e38, 1e-45, 5.9e-8, 2.9e-8, 3.0e-8]
    numbers = np.concatenate(
        [
            ties.astype(np.float32),
            np.nextafter(ties.astype(np.float32), np.float32(np.inf)),
            np.nextafter(ties.astype(np.float32), np.float32(-np.inf)),
            rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32),
            np.array(special, np.float32),
        ]
    )
    numbers = numbers[~np.isnan(numbers)]
    with np.errstate(over="ignore"):
        expected = numbers.astype(dtype)
    np.testing.assert_array_equal(written(numbers, dtype).view(np.uint16), expected.view(np.uint16))


@together("dtype", NARROW.values())
@on_every_isa
def test_a_nan_stays_a_nan_whatever_its_payload(dtype):
    payloads = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0x7FC00000, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(written(payloads, dtype).astype(np.float32)).all()
