"""Conversions of stored codes in kernels, compared with the twin: all codes, and a dense sweep of numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.kit import Kit
from tests.emulator.probing import KERNELS, probe
from tests.emulator.runtime import EmulatedRuntime
from tests.emulator.test_primitives import floats
from tests.ops import formats_twin as twin

BY_BITS = 16  # e4m3 for architectures without an instruction


@pytest.fixture(scope="module")
def kit():
    return Kit(EmulatedRuntime(KERNELS))


def widened(kit, codes, format, zero_point=0):
    """Return the numbers of pairs of codes, [n, 2]."""
    out, given = kit.empty((len(codes), 2)), kit.put(codes.view(np.float16))
    mode, grid = format + 32 * zero_point, (-(-len(codes) // 256), 1, 1)
    probe(kit.runtime, "widen_codes", input=given, output=out, n=len(codes), m=mode, grid=grid, threads=256)
    return kit.get(out)


def all_pairs():
    return np.arange(65536).astype(np.uint16)


@pytest.mark.parametrize(
    ("format", "table"),
    [(1, twin.E4M3), (BY_BITS, twin.E4M3), (2, twin.E5M2), (3, twin.E4M3), (8, twin.E4M3)],
)
def test_every_pair_of_float8_codes_widens_exactly(kit, format, table):
    pairs = all_pairs()
    expected = table.astype(np.float32)[pairs[:, None] >> np.array([0, 8]) & 255]
    got = widened(kit, pairs, format)
    np.testing.assert_array_equal(got, expected)
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[known]), np.signbit(expected[known]))


def test_every_pair_of_int8_codes_widens_exactly(kit):
    pairs = all_pairs()
    np.testing.assert_array_equal(widened(kit, pairs, 4), pairs.view(np.int8).reshape(-1, 2).astype(np.float32))


@pytest.mark.parametrize("zero_point", range(16))
def test_every_pair_of_int4_codes_widens_exactly(kit, zero_point):
    pairs = np.arange(256).astype(np.uint16)
    expected = (pairs[:, None] >> np.array([0, 4]) & 15).astype(np.float32) - zero_point
    np.testing.assert_array_equal(widened(kit, pairs | 0xAB00, 5, zero_point), expected)


@pytest.mark.parametrize("format", [6, 7])
def test_every_pair_of_e2m1_codes_widens_exactly(kit, format):
    pairs = np.arange(256).astype(np.uint16)
    expected = twin.E2M1.astype(np.float32)[pairs[:, None] >> np.array([0, 4]) & 15]
    got = widened(kit, pairs | 0xAB00, format)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_float32_becomes_the_nearest_code(kit):
    every = np.unique(np.concatenate([twin.E4M3[~np.isnan(twin.E4M3)], twin.E5M2[np.isfinite(twin.E5M2)]]))
    middles = np.float32((every[1:] + every[:-1]) / 2)
    near = np.nextafter(middles[:, None], np.float32([-np.inf, np.inf]))
    values = np.concatenate([floats(), np.float32(every), middles, near.ravel(), np.float32(twin.E2M1_BOUNDS)])
    out = kit.empty((len(values), 3), "uint8")
    grid = (-(-len(values) // 256), 1, 1)
    probe(kit.runtime, "narrow_to_codes", input=kit.put(values), output=out, n=len(values), grid=grid, threads=256)
    expected = np.stack([twin.e4m3(values), twin.e5m2(values), twin.e2m1(values)], -1)
    np.testing.assert_array_equal(kit.get(out), expected)
