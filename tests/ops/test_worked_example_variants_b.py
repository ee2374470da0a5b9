"""Worked examples B of the quantised formats: bytes of the twin, of `quantize` and of `write_kv`."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

import pagecore
from tests.ops import formats_twin as twin
from tests.ops.cases import DTYPES
from tests.together import together

INF, NAN = float("inf"), float("nan")
RAMP = [0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.25, -2.5, -5, -6, 0.1]
STEPS = [-3 + 0.5 * i for i in range(16)]
MIXED = [0.3, -0.7, 0.05, 1.1, -1, 0, 0.55, -0.21]

# id: format, row, given factor, bytes of the codes, bytes of the scales, numbers read back (None: not listed)
ROWS: dict[str, tuple[str, list[float], float, str, str, list[float] | None]] = {
    "b1": (
        "float8_e4m3fn",
        [
            0,
            -0.0,
            0.1,
            1,
            -300,
            432,
            447,
            448,
            463.9,
            464,
            465,
            1000,
            -1000,
            2**-6,
            2**-9,
            2**-10,
            1.5 * 2**-10,
            NAN,
            INF,
        ],
        1.0,
        "00801d38f97e7e7e7e7e7e7efe080100017f7e",
        "",
        None,
    ),
    "b2": (
        "float8_e5m2",
        [0.1, 1, -300, 57344, 60000, 65504, 1e6, 2**-14, 2**-16, 2**-17, 3 * 2**-18],
        1.0,
        "2e3cdd7b7b7b7b04010001",
        "",
        None,
    ),
    "b3": ("float8_e4m3fn", [1, 100, 250, -1.3], 0.5, "40747ec2", "", [1, 96, 224, -1.25]),
    "b4_int8": (
        "int8_token",
        [-127, -2.6, -2.4, -1.6, -1.4, -0.6, -0.4, 127],
        1.0,
        np.array([-127, -3, -2, -2, -1, -1, 0, 127], np.int8).tobytes().hex(),
        np.float32(1).tobytes().hex(),
        None,
    ),
    "b4_int8_halves": (
        "int8_token",
        [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0],
        1.0,
        np.array([127, 1, 2, 3, -1, -2, -3, 0], np.int8).tobytes().hex(),
        np.float32(1).tobytes().hex(),
        None,
    ),
    "b4_int8_mixed": (
        "int8_token",
        MIXED,
        1.0,
        np.array([35, -81, 6, 127, -115, 0, 64, -24], np.int8).tobytes().hex(),
        np.float32(0.00866141729).tobytes().hex(),
        None,
    ),
    "b4_int8_zeros": ("int8_token", [0.0] * 8, 1.0, "00" * 8, np.float32(1e-6).tobytes().hex(), [0.0] * 8),
    "b4_float8": ("float8_token", MIXED, 1.0, "6ff95a7efd0076eb", np.float32(0.00245535723).tobytes().hex(), None),
    "b5": (
        "int4_token",
        [-1, -0.5, 0, 0.25, 0.5, 1, 2, 2],
        1.0,
        bytes([48, 101, 168, 255]).hex(),
        np.uint32(0x3E4CCCC5).tobytes().hex(),
        [-0.9999990, -0.3999996, 0, 0.1999998, 0.5999994, 0.9999990, 1.9999981, 1.9999981],
    ),
    "b6": (
        "fp4_block16",
        RAMP,
        1.0,
        "1032547697bafd0f",
        "7f",
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, 6, -0.5, -1, -1.5, -3, -6, -6, 0],
    ),
    "b6_steps": ("fp4_block16", STEPS, 1.0, "ddbc9a1032546566", "7f", None),
    "b6_zeros": ("fp4_block16", [0.0] * 16, 1.0, "00" * 8, f"{94:02x}", [0.0] * 16),
    "b7": (
        "nvfp4",
        RAMP,
        1.0,
        "0022446687aaec0f",
        "38",
        [0, 0, 1, 1, 2, 2, 4, 4, 6, -0.0, -1, -1, -2, -4, -6, 0],
    ),
    "b7_steps": ("nvfp4", STEPS, 1.0, "decd9b1043556677", "34", None),
    "b7_steps_factor": ("nvfp4", STEPS, 0.01, "decd9b1043556677", "69", None),
    "b7_zeros": ("nvfp4", [0.0] * 16, 1.0, "00" * 8, "00", [0.0] * 16),
    "b7_saturated": ("nvfp4", [4000.0] * 16, 1.0, "77" * 8, "7e", [2688.0] * 16),
    "b8": (
        "nvfp4_4over6",
        [4, 3.9, -4, 2, 1, 3, -3, 0, 4, 3.5, 2, 1, -2, -1, 0.5, 4],
        1.0,
        "664e520d6624ac61",
        "38",
        None,
    ),
}


def with_amax(amax: float, size: int) -> list[float]:
    return [amax] + [0.0] * (size - 1)


for _name, _format, _size, _amaxes, _bytes in (
    ("b6", "fp4_block16", 16, (6, 6.0001, 3, 12, 0.001), (127, 128, 126, 128, 115)),
    ("b10", "mxfp8", 32, (1, 448, 500, 0), (119, 127, 128, 19)),
):
    for _amax, _byte in zip(_amaxes, _bytes, strict=True):
        ROWS[f"{_name}_amax_{_amax}"] = (_format, with_amax(_amax, _size), 1.0, "", f"{_byte:02x}", None)


@together("name", ROWS)
def test_worked_example_variants_b_bytes_of_the_twin(name):
    format, row, factor, codes, scales, read = ROWS[name]
    got_codes, got_scales = twin.quantize_row(np.array(row, np.float32), format, factor)
    assert got_codes.tobytes().hex() == codes or codes == ""
    assert got_scales.tobytes().hex() == scales
    if read is not None:
        numbers = twin.dequantize_row(got_codes, format, got_scales, factor)
        np.testing.assert_allclose(numbers, read, rtol=0, atol=1e-7)
        np.testing.assert_array_equal(np.signbit(numbers), np.signbit(read))


@together("name", ROWS)
def test_worked_example_variants_b_bytes_of_quantize_and_dequantize(name):
    format, row, factor, codes, scales, read = ROWS[name]
    given = factor if format.startswith(("float8_e", "nvfp4")) else None
    got_codes, got_scales = pagecore.quantize(np.array(row, np.float32), format, given)
    assert got_codes.tobytes().hex() == codes or codes == ""
    assert (b"" if got_scales is None else got_scales.tobytes()).hex() == scales
    if read is not None:
        numbers = pagecore.dequantize(got_codes, format, got_scales, given)
        np.testing.assert_allclose(numbers, read, rtol=0, atol=1e-7)
        np.testing.assert_array_equal(np.signbit(numbers), np.signbit(read))


@together("name", ROWS)
def test_worked_example_variants_b_bytes_of_write_kv(name):
    format, row, factor, codes, scales, _ = ROWS[name]
    x = np.array(row, np.float32).reshape(1, 1, -1)
    one, plane = pagecore.quantize(x, format, factor if format.startswith(("float8_e", "nvfp4")) else None)
    caches = [np.zeros((2, 2, 1, one.shape[-1]), one.dtype) for _ in range(2)]
    options: dict[str, Any] = {"format": format}
    planes = []
    for i, side in enumerate(("key", "value")):
        if plane is not None:
            planes.append(np.zeros((2, 2, 1, plane.shape[-1]), plane.dtype))
            options[f"{side}_scale"] = planes[i]
        if format.startswith(("float8_e", "nvfp4")):
            options[f"{side}_scale" if plane is None else f"{side}_global_scale"] = factor
    pagecore.write_kv(x, x, *caches, [3], **options)
    for cache in caches:
        assert cache[1, 1].tobytes().hex() == codes or codes == ""
        assert not cache.view(np.uint8).reshape(4, -1)[:3].any()
    for each in planes:
        assert each[1, 1].tobytes().hex() == scales
        assert not each.view(np.uint8).reshape(4, -1)[:3].any()


HASHES = {
    "float8_e4m3fn": "618af8c46c8396a777e752830636a8d18d6034207dce6eb9b7c8108230ed3f08",
    "float8_e5m2": "073759ce31deb36b4c6af5b82193b856606086240b82eca10741571caee138c0",
}


def finite_bfloat16() -> Any:
    every = np.arange(2**16, dtype=np.uint16).view(DTYPES["bfloat16"])
    return every[np.isfinite(every.astype(np.float32))]


@together("format", HASHES)
def test_worked_example_variants_b1_b2_all_finite_bfloat16(format):
    codes, _ = twin.quantize_row(finite_bfloat16(), format)
    assert hashlib.sha256(codes.tobytes()).hexdigest() == HASHES[format]
    codes, _ = pagecore.quantize(finite_bfloat16(), format)
    assert hashlib.sha256(codes.tobytes()).hexdigest() == HASHES[format]


# Relative Frobenius error on default_rng(0).normal((4096, 128)).
ERRORS = {
    "int8_token": (1.0, 0.00649, 1e-5),
    "float8_token": (1.0, 0.02571, 1e-5),
    "float8_e4m3fn": (1.0, 0.02650, 1e-5),
    "nvfp4": (1.0, 0.0951, 1e-4),
    "fp4_block16": (1.0, 0.1129, 1e-4),
    "int4_token": (1.0, 0.1007, 1e-4),
}


@together("format", ERRORS)
def test_worked_example_variants_b13_relative_error(format):
    factor, expected, tolerance = ERRORS[format]
    x = np.random.default_rng(0).normal(size=(4096, 128)).astype(np.float32)
    given = factor if format.startswith(("float8_e", "nvfp4")) else None
    codes, scales = pagecore.quantize(x, format, given)
    read = pagecore.dequantize(codes, format, scales, given).astype(np.float64)
    assert abs(np.linalg.norm(read - x) / np.linalg.norm(x) - expected) < tolerance


def test_worked_example_variants_b9_value_scales_of_trtllm_are_a_permutation_of_linear_ones():
    """The planes hold scales in linear order; the swizzled order is an index of the caller."""
    tokens, groups = np.divmod(np.arange(64), 8)
    rows, columns = 4 * (tokens // 4) + groups // 2, 4 * (groups % 2) + tokens % 4
    listed = {
        0: [(0, 0), (0, 4), (1, 0), (1, 4), (2, 0), (2, 4), (3, 0), (3, 4)],
        5: [(4, 1), (4, 5), (5, 1), (5, 5), (6, 1), (6, 5), (7, 1), (7, 5)],
    }
    for token, expected in listed.items():
        of_token = slice(8 * token, 8 * token + 8)
        assert list(zip(rows[of_token], columns[of_token], strict=True)) == expected
    scales = pagecore.quantize(np.random.default_rng(0).normal(size=(8, 128)).astype(np.float32), "nvfp4")[1]
    swizzled = np.zeros((8, 8), np.uint8)
    swizzled[rows, columns] = scales.view(np.uint8).reshape(-1)
    assert sorted(swizzled.reshape(-1)) == sorted(scales.view(np.uint8).reshape(-1))


def test_worked_example_variants_b5_the_range_contains_0():
    row = np.array([1, 2, 3, 4, 5, 6, 7, 8.5], np.float32)
    codes, scales = twin.quantize_row(row, "int4_token")
    assert abs(np.abs(twin.dequantize_row(codes, "int4_token", scales) - row).max() - 0.26667) < 1e-4
    assert abs(float(scales.view(np.float32)[0]) - 8.5 / 15) < 1e-5


@together("dtype", DTYPES)
def test_worked_example_variants_b12_scales_of_tokens_are_folded(dtype):
    key, value = (np.zeros((2, 2, 1, 2), np.int8) for _ in range(2))
    key_scale, value_scale = (np.full((2, 2, 1, 1), np.nan, np.float32) for _ in range(2))
    key[1, :, 0], value[1, :, 0] = [[10, -20], [30, 5]], [[4, 8], [-2, 6]]
    key_scale[1, :, 0, 0], value_scale[1, :, 0, 0] = [0.01, 0.02], [0.5, 0.25]
    query = np.array([[[3, -1]]], DTYPES[dtype])
    out, lse = pagecore.paged_attention(
        query, key, value, [[1]], [2], scale=2**-0.5, key_scale=key_scale, value_scale=value_scale, return_lse=True
    )
    tolerance = 1e-6 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(out[0, 0].astype(np.float32), [0.2493543, 2.2493543], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse[0, 0], 1.5583875, rtol=1e-6)
