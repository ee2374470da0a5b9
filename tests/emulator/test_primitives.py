"""The emulated primitives, compared with NumPy."""

from __future__ import annotations

import functools
import re

import ml_dtypes
import numpy as np
import pytest

from tests.cuda.kit import Kit
from tests.emulator.build import NATIVE, SOURCES
from tests.emulator.probing import KERNELS, probe
from tests.emulator.runtime import EmulatedRuntime

NUMPY = {"float": np.float32, "pc_half": np.float16, "pc_bfloat16": ml_dtypes.bfloat16}
LANES = np.arange(32)


@pytest.fixture(scope="module", params=[0, 1, 2], ids=lambda seed: f"seed{seed}")
def kit(request):
    return Kit(EmulatedRuntime(KERNELS, seed=request.param))


def launch(kit, name, **arguments):
    probe(kit.runtime, name, **arguments)


def test_indices_of_a_thread(kit):
    out = kit.empty((12, 96, 11), np.int32)
    launch(kit, "places", output=out, grid=(3, 2, 2), threads=96)
    block, thread = np.indices((12, 96))
    expected = [thread, np.full_like(thread, 96), thread % 32, thread // 32]
    expected += [block % 3, block // 3 % 2, block // 6]
    expected += [np.full_like(thread, n) for n in (3, 2, 2, 0)]
    np.testing.assert_array_equal(kit.get(out), np.stack(expected, axis=2))


def test_shuffles_and_votes(kit):
    random = np.random.default_rng(1)
    values = random.integers(-1000, 1000, 64, dtype=np.int32)
    operands = random.integers(0, 32, 64, dtype=np.int32)
    out = kit.empty((6, 64), np.int32)
    launch(kit, "exchanges", input=kit.put(values), extra=kit.put(operands), output=out, threads=64)
    got = kit.get(out)
    lane, warp = np.arange(64) % 32, np.arange(64) // 32 * 32
    for rows, source in (
        (got[0:2], warp + (lane ^ operands)),
        (got[2:4], warp + operands),
        (got[4:5], warp + np.where(lane >= operands, lane - operands, lane)),
    ):
        np.testing.assert_array_equal(rows[0], values[source])
        if len(rows) == 2:
            np.testing.assert_array_equal(rows[1].view(np.float32), values[source].astype(np.float32))
    votes = [sum(1 << i for i in range(32) if values[w * 32 + i] > 0) for w in range(2)]
    np.testing.assert_array_equal(got[5], np.repeat(np.array(votes, np.uint32).view(np.int32), 32))


@pytest.mark.parametrize("way", [0, 1, 2], ids=["plain", "once", "asynchronous"])
def test_vectors_through_shared_memory(kit, way):
    values = np.random.default_rng(2).standard_normal((100, 8)).astype(np.float16)
    out = kit.empty((100, 8), np.float16)
    launch(kit, "vectors", input=kit.put(values), output=out, n=100, m=way, threads=128, shared_bytes=128 * 16 + 16)
    if way == 2:
        values[2::3] = 0  # not valid: filled with zeros
    np.testing.assert_array_equal(kit.get(out), values)


def test_asynchronous_copies_of_words(kit):
    values = np.random.default_rng(6).integers(0, 2**32, 100, dtype=np.uint32)
    out = kit.empty(100, np.int32)
    launch(kit, "copied_words", input=kit.put(values.view(np.int32)), output=out, n=100, threads=128, shared_bytes=512)
    values[2::3] = 0
    np.testing.assert_array_equal(kit.get(out).view(np.uint32), values)


def test_atomics(kit):
    counters = kit.put(np.array([-(2**31), 5], np.int32))
    least = kit.put(np.array([-1]))
    ticket = -(2**31) + 3 * (4 * 96 - 1)
    launch(kit, "atomics", output=counters, extra=least, n=3, m=ticket, grid=(4, 1, 1), threads=96)
    first, second = kit.get(counters)
    assert first == -(2**31) + 3 * 4 * 96
    assert second in (6, 7, 8, 9)
    assert kit.get(least)[0] == min((i * 37 + 5) % 256 for i in range(4 * 96))


@pytest.mark.parametrize("transposed", [0, 1])
def test_load_matrices(kit, transposed):
    values = np.arange(256, dtype=np.float16).reshape(4, 8, 8) * 3
    out = kit.empty((32, 4, 2), np.float16)
    launch(kit, f"matrices<{transposed}>", input=kit.put(values), output=out, shared_bytes=512)
    matrices = values.transpose(0, 2, 1) if transposed else values
    expected = matrices[:, LANES // 4][:, LANES, :].reshape(4, 32, 8)
    expected = np.stack([expected[:, LANES, LANES % 4 * 2 + i] for i in (0, 1)], axis=-1).transpose(1, 0, 2)
    np.testing.assert_array_equal(kit.get(out), expected)


@pytest.mark.parametrize("name", ["pc_half", "pc_bfloat16"])
def test_products_of_matrices(kit, name):
    random = np.random.default_rng(3)
    a = random.integers(-8, 8, (16, 16)).astype(NUMPY[name])
    b = random.integers(-8, 8, (16, 8)).astype(NUMPY[name])
    c = random.integers(-100, 100, (16, 8)).astype(np.float32)
    fragments = np.empty((32, 6, 2), NUMPY[name])
    sums = np.empty((32, 4), np.float32)
    for lane in LANES:
        g, q = lane // 4, lane % 4
        for i, (row, column) in enumerate([(g, 2 * q), (g + 8, 2 * q), (g, 2 * q + 8), (g + 8, 2 * q + 8)]):
            fragments[lane, i] = a[row, column : column + 2]
        fragments[lane, 4] = b[2 * q : 2 * q + 2, g]
        fragments[lane, 5] = b[2 * q + 8 : 2 * q + 10, g]
        sums[lane] = c[g, 2 * q], c[g, 2 * q + 1], c[g + 8, 2 * q], c[g + 8, 2 * q + 1]
    out = kit.put(sums)
    launch(kit, f"product<{name}>", input=kit.put(fragments), output=out)
    expected = a.astype(np.float64) @ b.astype(np.float64) + c
    got = kit.get(out)
    for lane in LANES:
        g, q = lane // 4, lane % 4
        np.testing.assert_array_equal(got[lane].reshape(2, 2), expected[g::8, 2 * q : 2 * q + 2])


@functools.cache
def floats():
    """Return random bits, and the edge cases of conversions to 16 bits."""
    random = np.random.default_rng(4)
    bits = random.integers(0, 2**32, 20000, dtype=np.uint32)
    small = (random.standard_normal(20000) * np.exp2(random.integers(-30, 18, 20000))).astype(np.float32)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        between = np.nextafter((halves[:-1] + halves[1:]) / 2, np.float32([[0], [np.inf], [-np.inf]]))
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, 3.3895e38, 2**-24, 2**-25, 2**-149]
    parts = [bits.view(np.float32), small, halves, (halves[:-1] + halves[1:]) / 2, between.ravel(), np.float32(edges)]
    return np.concatenate(parts)[: sum(map(len, parts)) // 2 * 2]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("name", ["pc_half", "pc_bfloat16"])
def test_rounding_to_16_bits_matches_numpy(kit, name):
    values = floats()
    out, pairs = kit.empty(len(values), NUMPY[name]), kit.empty(len(values), NUMPY[name])
    grid = (-(-len(values) // 256), 1, 1)
    launch(
        kit, f"narrow<{name}>", input=kit.put(values), output=out, extra=pairs, n=len(values), grid=grid, threads=256
    )
    expected = values.astype(NUMPY[name]).view(np.uint16)
    expected[np.isnan(values)] = 0x7FFF
    np.testing.assert_array_equal(kit.get(out).view(np.uint16), expected)
    np.testing.assert_array_equal(kit.get(pairs).view(np.uint16), expected)


@pytest.mark.parametrize("name", ["pc_half", "pc_bfloat16", "float"])
def test_every_16_bit_float_widens_exactly(kit, name):
    values = np.arange(2**16).astype(np.uint16).view(NUMPY[name]) if name != "float" else floats()
    out = kit.empty(len(values), np.float32)
    arguments = {"n": len(values), "grid": (-(-len(values) // 256), 1, 1), "threads": 256}
    launch(kit, f"widen<{name}>", input=kit.put(values), output=out, **arguments)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(kit.get(out), values.astype(np.float32))


def test_functions_of_numbers(kit):
    random = np.random.default_rng(5)
    values = (random.standard_normal((1000, 3)) * 40).astype(np.float32)
    values[:6, 0] = [0, -0.0, np.inf, -np.inf, np.nan, -127]
    out = kit.empty((1000, 5), np.float32)
    launch(kit, "functions", input=kit.put(values), output=out, n=1000, grid=(4, 1, 1), threads=256)
    a, b, c = values.astype(np.float64).T
    got = kit.get(out)
    with np.errstate(all="ignore"):
        power = np.exp2(a)
        power[power < 2.0**-126] = 0  # flushed
        np.testing.assert_allclose(got[:, 0], power.astype(np.float32), rtol=2.5e-7)
        np.testing.assert_allclose(got[:, 1], np.log2(a), rtol=2.5e-7, atol=1e-7)
        np.testing.assert_array_equal(got[:, 2], np.fmax(values[:, 0], values[:, 1]))
        np.testing.assert_allclose(got[:, 3], a * b + c, rtol=1e-6, atol=1e-5)
        np.testing.assert_array_equal(got[:, 4], np.where(np.isnan(a) | (a == np.inf), np.nan, np.inf))


# ---- both bodies


DECLARATION = re.compile(
    r"(?:PC_DEVICE|PC_MEMBER|\binline|__device__ __forceinline__)\s"  # specifiers
    r"+(?P<head>[\w<>:& ]*?[\w<>+ ]+)"  # result and name
    r"\((?P<arguments>(?:[^()]|\([^()]*\))*)\)\s*(?:const\s*)?[{;:=]"
)


def declarations(text):
    """Return the arguments of each function and method that kernels can call, by name."""
    text = re.sub(r"\n private:.*?\n};", "\n};", re.sub(r"//.*|#define.*", "", text), flags=re.DOTALL)
    found = {}
    for match in DECLARATION.finditer(text):
        name = re.sub(r"<.*>", "", match["head"].split()[-1])
        arguments = re.sub(r",?\s*PC_SITE$", "", " ".join(match["arguments"].split()))
        found.setdefault(name, set()).add(arguments)
    return found


def test_every_primitive_has_two_bodies_with_the_same_arguments():
    device = declarations((SOURCES / "device" / "primitives.cuh").read_text().partition("#else")[2])
    emulated = {}
    for name in ("primitives", "global", "shared"):
        for found, arguments in declarations((NATIVE / f"emulated_{name}.hpp").read_text()).items():
            emulated.setdefault(found, set()).update(arguments)
    del (
        device["Shared"],
        emulated["Shared"],
    )  # constructed from a pointer on the device, and from an offset in the emulator
    assert len(device) > 40
    assert emulated == device
