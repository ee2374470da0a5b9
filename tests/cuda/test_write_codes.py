"""write_kv into quantised caches on a CUDA device: bytes equal those of the twin, and no other byte changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore.arrays.dtypes.formats import FORMATS
from tests.cuda.kit import Kit, extent, whole
from tests.cuda.memory import calls_of
from tests.ops import formats_twin as twin
from tests.ops.cases import DTYPES

WRITTEN = (*FORMATS, "nvfp4_4over6")
LAYOUTS = {"NHD": (0, 1, 2, 3), "HND": (0, 2, 1, 3), "LNB": (1, 0, 2, 3)}


def numbers(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Any:
    """Return normal numbers of magnitudes that differ between rows, with zeros and rows of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, (*shape[:-1], 1)))
    x[rng.random(shape) < 0.05] = 0
    x[0, 0] = 0
    return x.astype(DTYPES[dtype])


def strided_like(shape: tuple[int, ...], dtype: Any, layout: str, gap: int = 0) -> Any:
    """Return an array of 0xA5 bytes with the axes in the order of `layout`, and `gap` elements between rows."""
    order = LAYOUTS[layout]
    wide = [shape[i] for i in order]
    wide[-1] += gap
    base = np.full(int(np.prod(wide)) * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype).reshape(wide)
    return base.transpose(np.argsort(order))[..., gap // 2 : gap // 2 + shape[3]]


class QuantisedPlane:
    """Codes and scales of keys or values on the host, with the arguments of write_kv."""

    def __init__(self, name: str, shape: tuple[int, int, int, int], layout: str, gap: int = 0) -> None:
        self.name, self.format = name, FORMATS[name.removesuffix("_4over6")]
        dim = shape[3]
        self.codes = strided_like((*shape[:3], self.format.row_codes(dim)), self.format.dtype.numpy, layout, gap)
        self.scales = None
        if self.format.scale_dtype is not None:
            groups = self.format.row_scales(dim)
            self.scales = strided_like((*shape[:3], groups), self.format.scale_dtype.numpy, layout, gap)

    def write(self, rows: Any, slots: Any, factors: Any) -> None:
        """Write rows by the twin; `factors`: given factors of the heads, or one number."""
        for token, slot in enumerate(np.asarray(slots).tolist()):
            if slot < 0:
                continue
            at = divmod(slot, self.codes.shape[1])
            for head in range(rows.shape[1]):
                factor = float(np.broadcast_to(factors, rows.shape[1])[head])
                codes, scales = twin.quantize_row(rows[token, head], self.name, factor)
                self.codes[(*at, head)] = codes.view(self.codes.dtype)
                if self.scales is not None:
                    self.scales[(*at, head)] = scales.view(self.scales.dtype)


def assert_same_bytes(got: Any, expected: Any) -> None:
    """Compare all bytes that the two arrays span, gaps included."""
    spanned = []
    for each in (got, expected):
        base = whole(each)
        offset = each.ctypes.data - extent(each)[0] - base.ctypes.data
        spanned.append(np.ndarray(sum(extent(each)), np.uint8, base, offset))
    np.testing.assert_array_equal(*spanned)


def check(
    cuda: Kit,
    name: str,
    key: Any,
    value: Any,
    slots: Any,
    *,
    layout: str = "NHD",
    gap: int = 0,
    block_size: int = 4,
    factors: Any = 1.0,
) -> None:
    """Write rows on the device and by the twin, and compare every byte of the caches."""
    num_blocks = -(-(max(slots) + 1) // block_size) + 1
    planes = [QuantisedPlane(name, (num_blocks, block_size, *rows.shape[1:]), layout, gap) for rows in (key, value)]
    put = [(cuda.put(each.codes), None if each.scales is None else cuda.put(each.scales)) for each in planes]
    arguments: dict[str, Any] = {"format": name}
    for label, (_, scales) in zip(("key", "value"), put, strict=True):
        arguments[f"{label}_scale"] = factors if scales is None else scales
        if name.startswith("nvfp4"):
            arguments[f"{label}_global_scale"] = factors
    pagecore.write_kv(cuda.put(key), cuda.put(value), put[0][0], put[1][0], cuda.put(np.asarray(slots)), **arguments)
    for plane, rows, (codes, scales) in zip(planes, (key, value), put, strict=True):
        plane.write(rows, slots, factors if name in ("float8_e4m3fn", "float8_e5m2") or "nvfp4" in name else 1.0)
        assert_same_bytes(cuda.get(codes), plane.codes)
        if scales is not None:
            assert_same_bytes(cuda.get(scales), plane.scales)


def slots_of(count: int, num_slots: int, seed: int = 0) -> list[int]:
    """Return different slots in random order, some of them negative."""
    slots = np.random.default_rng(seed).permutation(num_slots)[:count]
    slots[1::5] = -1
    return [int(slot) for slot in slots]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", WRITTEN)
def test_codes_and_scales_equal_the_twin(cuda, name, dtype):
    key, value = numbers((23, 3, 128), dtype), numbers((23, 3, 64), dtype, 1)
    check(cuda, name, key, value, slots_of(23, 40))


def test_four_over_six_serves_values_of_nvfp4_next_to_other_keys(cuda):
    rows = numbers((9, 2, 64)), numbers((9, 2, 64), seed=1)
    keys, values = (QuantisedPlane(name, (4, 4, 2, 64), "NHD") for name in ("int8_token", "nvfp4_4over6"))
    put = [cuda.put(array) for array in (keys.codes, values.codes, keys.scales, values.scales)]
    slots = slots_of(9, 16)
    scales = {"key_scale": put[2], "value_scale": put[3]}
    pagecore.write_kv(*map(cuda.put, rows), *put[:2], slots, format="nvfp4_4over6", **scales)
    for plane, given in zip((keys, values), rows, strict=True):
        plane.write(given, slots, 1.0)
    for got, expected in zip(put, (keys.codes, values.codes, keys.scales, values.scales), strict=True):
        assert_same_bytes(cuda.get(got), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WRITTEN)
def test_layouts(cuda, name, layout):
    key, value = numbers((11, 2, 96), "bfloat16"), numbers((11, 2, 96), "bfloat16", 1)
    check(cuda, name, key, value, slots_of(11, 36), layout=layout, block_size=3)


@pytest.mark.parametrize("dim", [32, 160, 288, 544])
@pytest.mark.parametrize("name", WRITTEN)
def test_dims(cuda, name, dim):
    """Fewer chunks than lanes, partly used steps, and more chunks than a warp has lanes."""
    check(cuda, name, numbers((5, 2, dim), "float16"), numbers((5, 2, dim), "float16", 1), slots_of(5, 16))


@pytest.mark.parametrize("gap", [2, 6, 8])
@pytest.mark.parametrize("name", WRITTEN)
def test_rows_may_begin_anywhere(cuda, name, gap):
    key, value = (numbers((7, 2, 64), "float32", seed) for seed in range(2))
    check(cuda, name, key, value, slots_of(7, 16), gap=gap)


@pytest.mark.parametrize("dim", [2, 6, 20, 36])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_token", "int8_token", "int4_token"])
def test_dims_that_are_no_whole_chunks(cuda, name, dim):
    check(cuda, name, numbers((5, 3, dim)), numbers((5, 3, dim), seed=1), slots_of(5, 16))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "nvfp4", "nvfp4_4over6"])
def test_given_factors(cuda, name):
    key, value = numbers((9, 3, 64), "bfloat16"), numbers((9, 3, 64), "bfloat16", 1)
    check(cuda, name, key, value, slots_of(9, 20), factors=0.037)
    if not name.startswith("nvfp4"):
        check(cuda, name, key, value, slots_of(9, 20), factors=np.array([0.5, 3.0, 0.01], np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WRITTEN)
def test_numbers_that_are_not_finite(cuda, name, dtype):
    key = numbers((8, 2, 64), dtype)
    key[1, 0, 5], key[2, 1, 40], key[3, 0, 63], key[4, 1, :3] = np.nan, np.inf, -np.inf, (np.nan, np.inf, -np.inf)
    key[5] = 0.0
    key[6, 0] = -0.0
    key[7, :, ::2] = 3e38
    # Negative and signalling NaN, by their bits.
    bits = key.view(f"u{key.itemsize}")
    bits[1, 1, 9:13] = [word >> 32 - 8 * key.itemsize for word in (0xFFC00000, 0x7FA00000, 0xFFA00000, 0xFFFF0000)]
    check(cuda, name, key, key[::-1], list(range(8)))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_sweep_of_magnitudes(cuda, name):
    """Rows around every power of two, so that scales meet each rounding."""
    rng = np.random.default_rng(7)
    key = (rng.standard_normal((64, 1, 32)) * np.exp2(np.arange(-40, 24))[:, None, None]).astype(np.float32)
    key[:, 0, 0] = np.exp2(np.arange(-40, 24)) * 6
    check(cuda, name, key, key[::-1], list(range(64)))


def test_keys_with_a_format_beside_plain_values(cuda):
    key, value = numbers((6, 2, 64), "bfloat16"), numbers((6, 2, 64), "bfloat16", 1)
    plane = QuantisedPlane("int8_token", (3, 4, 2, 64), "NHD")
    values = np.zeros((3, 4, 2, 64), DTYPES["float16"])
    codes, scales, plain = cuda.put(plane.codes), cuda.put(plane.scales), cuda.put(values)
    slots = [3, -1, 5, 0, 11, 7]
    pagecore.write_kv(cuda.put(key), cuda.put(value), codes, plain, cuda.put(np.asarray(slots)), key_scale=scales)
    plane.write(key, slots, 1.0)
    for token, slot in enumerate(slots):
        if slot >= 0:
            values[divmod(slot, 4)] = value[token].astype(np.float16)
    assert_same_bytes(cuda.get(codes), plane.codes)
    assert_same_bytes(cuda.get(scales), plane.scales)
    np.testing.assert_array_equal(cuda.get(plain), values)


def test_key_and_value_of_different_dtypes(cuda):
    check(cuda, "nvfp4", numbers((6, 2, 64), "bfloat16"), numbers((6, 2, 64), "float32", 1), slots_of(6, 16))


@pytest.mark.parametrize("name", ["int4_token", "nvfp4"])
def test_a_warm_write_is_one_launch_and_nothing_else(cuda, name):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    plane = QuantisedPlane(name, (4, 4, 2, 64), "NHD")
    put = [(cuda.put(plane.codes), cuda.put(plane.scales)) for _ in range(2)]
    key, slots = cuda.put(numbers((4, 2, 64))), cuda.put(np.arange(4))
    call = lambda: pagecore.write_kv(  # noqa: E731
        key, key, put[0][0], put[1][0], slots, key_scale=put[0][1], value_scale=put[1][1]
    )
    assert calls_of(cuda, call) == {"launches": 1}
