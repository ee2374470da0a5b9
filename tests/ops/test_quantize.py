"""quantize and dequantize: bits of the twin for hard numbers, on every instruction set and in every dtype."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pagecore
from pagecore import errors
from pagecore.arrays.dtypes.formats import FORMATS
from tests.ops import formats_twin as twin
from tests.ops.cases import DTYPES
from tests.ops.instruction_sets import on_every_isa
from tests.ops.written_cases import ALL, factor_of, hard_numbers, kind_of
from tests.together import together


def given_factor(format: str) -> float | None:
    return factor_of(format) if kind_of(format).takes_factor else None


def assert_bytes(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint8).reshape(expected.shape), expected)


def assert_numbers(got: Any, expected: Any) -> None:
    """Compare bit for bit, except that every NaN is equal."""
    width = f"u{expected.itemsize}"
    if np.array_equal(got.view(width), expected.view(width)):
        return
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(width)[~nan], expected.view(width)[~nan])


@functools.lru_cache(16)
def known_rows(count: int, dim: int, dtype: str, format: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return rows of hard numbers, and by the twin their codes, scales and numbers in each dtype."""
    x, factor = hard_numbers(count, dim, dtype), given_factor(format) or 1.0
    codes, scales = twin.quantize_row(x, format, factor)
    numbers = twin.dequantize_row(codes, format, scales, factor)
    with np.errstate(over="ignore", invalid="ignore"):
        return x, codes, scales, {out: numbers.astype(DTYPES[out]) for out in DTYPES}


@pytest.mark.slow
@together("format", ["fp4_block16", "mxfp8", "nvfp4"])
@on_every_isa
def test_every_bfloat16_up_to_the_largest_of_a_group(format):
    """The scale is 1. Groups in the order of their numbers: some have normal codes and zeros, others small numbers."""
    group, largest = (32, 0x43E0) if format == "mxfp8" else (16, 0x40C0)  # 448 or 6
    is_first = np.arange(128) % group == 0
    words = np.full((largest // 112, 128), largest, np.uint16)
    words[:, ~is_first] = np.resize(np.arange(largest + 1), words[:, ~is_first].shape)
    words[:, 5::11] = 0
    words[:, ::2] |= 0x8000
    x = words.view(ml_dtypes.bfloat16)
    codes, scales = pagecore.quantize(x, format)
    expected_codes, expected_scales = twin.quantize_row(x.astype(np.float32), format)
    assert_bytes(codes, expected_codes)
    assert_bytes(scales, expected_scales)


@together("format", ["fp4_block16", "mxfp8", "nvfp4"])
@together("exponent", [0, -8, -9, -12, -13, -16])
@on_every_isa
def test_every_float16_up_to_the_largest_of_a_group(exponent, format):
    """The scale is 2**exponent. Subnormal numbers, whose bits have another meaning, have codes if it is small."""
    group, largest = (32, 448.0) if format == "mxfp8" else (16, 6.0)
    most = int(np.float16(largest * 2.0**exponent).view(np.uint16))
    words = np.full((most // 112 + 1, 128), most, np.uint16)
    is_first = np.arange(128) % group == 0
    words[:, ~is_first] = np.resize(np.arange(most + 1), words[:, ~is_first].shape)
    words[:, 5::11] = 0
    words[:, ::2] |= 0x8000
    x, factor = words.view(np.float16), 2.0**exponent if format == "nvfp4" else None
    codes, scales = pagecore.quantize(x, format, factor)
    expected_codes, expected_scales = twin.quantize_row(x.astype(np.float32), format, factor or 1.0)
    assert_bytes(codes, expected_codes)
    assert_bytes(scales, expected_scales)


@together("format", ALL)
@together("dtype", DTYPES)
@together("dim", [32, 128, 480])
@on_every_isa
def test_codes_scales_and_numbers_are_the_twins(dim, dtype, format):
    x, expected_codes, expected_scales, numbers = known_rows(400, dim, dtype, format)
    factor = given_factor(format)
    codes, scales = pagecore.quantize(x, format, factor)
    assert codes.dtype == kind_of(format).dtype.numpy
    assert_bytes(codes, expected_codes)
    if scales is None:
        assert expected_scales.size == 0
    else:
        assert scales.dtype == kind_of(format).scale_dtype.numpy
        assert_bytes(scales, expected_scales)
    for out in DTYPES:
        assert_numbers(pagecore.dequantize(codes, format, scales, factor, dtype=out), numbers[out])


@together("format", ALL)
@together("dtype", DTYPES)
@on_every_isa
def test_rows_that_end_within_vectors(dtype, format):
    """Rows are quantised by whole vectors, of which the last overlaps the one before it or is padded."""
    kind = kind_of(format)
    step = kind.group or kind.codes_per_byte  # group 0 is a row
    for dim in sorted({-(-least // step) * step for least in (1, 8, 15, 24, 40, 48, 65, 72, 96, 112, 129, 176, 272)}):
        x, expected_codes, expected_scales, _ = known_rows(80, dim, dtype, format)
        codes, scales = pagecore.quantize(x, format, given_factor(format))
        assert_bytes(codes, expected_codes)
        if scales is not None:
            assert_bytes(scales, expected_scales)


@together("format", FORMATS)
@on_every_isa
def test_every_code_with_every_kind_of_scale_is_read(format):
    """Codes and scales that no write gives: NaN, zero, negative, the smallest and the largest."""
    kind = FORMATS[format]
    codes = np.tile(np.arange(256, dtype=np.uint8), (64, 1))
    dim = 256 * kind.codes_per_byte
    scales = None
    if kind.scale_dtype is not None:
        rng = np.random.default_rng(0)
        shape = 64, kind.row_scales(dim)
        scales = rng.integers(0, 256, (shape[0], shape[1] * kind.scale_dtype.itemsize), dtype=np.uint8)
        scales[0], scales[1], scales[2] = 0, 255, 127
        scales = scales.view(kind.scale_dtype.numpy)
    factor = given_factor(format)
    expected = twin.dequantize_row(codes, format, scales, factor or 1.0)
    with np.errstate(all="ignore"):
        assert_numbers(pagecore.dequantize(codes.view(kind.dtype.numpy), format, scales, factor), expected)


@together("format", ["float8_e4m3fn", "float8_e5m2"])
@on_every_isa
def test_dense_float32_around_every_tie(format):
    table = twin.E4M3 if format == "float8_e4m3fn" else twin.E5M2
    finite = np.unique(table[np.isfinite(table)]).astype(np.float32)
    ties = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([np.nextafter(ties, -np.inf), ties, np.nextafter(ties, np.inf), finite]).astype(np.float32)
    assert_bytes(pagecore.quantize(x, format)[0], twin.quantize_row(x, format)[0])


@together("factor", [1.0, 0.7, 1.37e-3, 3.1e-30, 2.9e30])
@together("format", ["nvfp4", "nvfp4_4over6"])
@on_every_isa
def test_quotients_around_every_tie_are_rounded_as_divisions(format, factor):
    random = np.random.default_rng(3)
    divisor = twin.E4M3[random.integers(8, 120, (400, 1))].astype(np.float32) * np.float32(factor)
    x = twin.E2M1_BOUNDS.astype(np.float32)[random.integers(0, 7, (400, 128))] * divisor
    for _ in range(2):
        limit = np.where(random.random(x.shape) < 0.5, 0, np.inf).astype(np.float32)
        x = np.where(random.random(x.shape) < 0.5, x, np.nextafter(x, limit))
    x = (x * random.choice([-1, 1], x.shape)).astype(np.float32)
    x[:, ::16] = 6 * divisor
    codes, scales = pagecore.quantize(x, format, factor)
    expected_codes, expected_scales = twin.quantize_row(x, format, factor)
    assert_bytes(codes, expected_codes)
    assert_bytes(scales, expected_scales)


@together("dtype", DTYPES)
@together("factor", [1.0, 0.25, 2.0**-12, 2.0**-61, 0.7])
@on_every_isa
def test_numbers_at_and_next_to_ties_by_every_scale(factor, dtype):
    """Quotients by a power of two times e4m3 are compared with ties without being rounded as divisions."""
    number, word = DTYPES[dtype], f"u{DTYPES[dtype].itemsize}"
    divisor = twin.E4M3[1:127, None].astype(np.float32) * np.float32(factor)
    ties = (twin.E2M1_BOUNDS.astype(np.float32) * divisor).astype(number).view(word).astype(np.int64)
    near = np.maximum(ties[..., None] + np.arange(-2, 3), 0).astype(word).reshape(len(ties), -1)
    x = np.random.default_rng(4).choice(near, 128, axis=1).view(number)
    x[:, 1::2] *= -1
    x[:, ::16] = 6 * divisor
    codes, scales = pagecore.quantize(x, "nvfp4", factor)
    expected_codes, expected_scales = twin.quantize_row(x.astype(np.float32), "nvfp4", factor)
    assert_bytes(codes, expected_codes)
    assert_bytes(scales, expected_scales)


@together("format", ALL)
@together("change", ["empty", "one row", "strided", "reversed", "transposed", "offset"])
def test_any_leading_axes_and_strides(change, format):
    x = hard_numbers(96, 64).reshape(2, 3, 16, 64)
    x = {
        "empty": lambda: x[:, :0],
        "one row": lambda: x[0, 0, 10],
        "strided": lambda: x[:, ::2, ::3],
        "reversed": lambda: x[::-1, :, ::-1],
        "transposed": lambda: x.transpose(2, 0, 1, 3),
        "offset": lambda: x[:, :, :, 32:],
    }[change]()
    factor = given_factor(format)
    codes, scales = pagecore.quantize(x, format, factor)
    expected_codes, expected_scales = twin.quantize_row(x, format, factor or 1.0) if x.size else (codes, scales)
    if x.size:
        assert_bytes(codes, expected_codes)
    assert codes.shape[:-1] == x.shape[:-1]
    assert codes.flags.c_contiguous
    assert scales is None or scales.shape == (*x.shape[:-1], kind_of(format).row_scales(x.shape[-1]))
    read = pagecore.dequantize(codes, format, scales, factor)
    assert read.shape == x.shape
    if x.size:
        assert_numbers(read, twin.dequantize_row(expected_codes, format, expected_scales, factor or 1.0))


def test_the_blocks_of_a_cache_in_any_layout_can_be_read():
    x = hard_numbers(96, 32).reshape(4, 6, 4, 32)
    codes, scales = pagecore.quantize(x, "int4_token")
    wide = np.full((4, 6, 4, 40), 7, np.uint8)
    wide[..., 3:19] = codes
    blocks = np.ascontiguousarray(scales.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    expected = pagecore.dequantize(codes, "int4_token", scales)
    assert_numbers(pagecore.dequantize(wide[..., 3:19], "int4_token", blocks), expected)
    assert_numbers(pagecore.dequantize(wide[..., 3:19], "int4_token", blocks[..., 0]), expected)


def test_each_head_has_its_own_factor():
    x = np.random.default_rng(0).normal(size=(5, 3, 32)).astype(np.float32)
    factors = np.array([0.5, 2.0, 0.1], np.float32)
    for format in ("float8_e4m3fn", "float8_e5m2", "nvfp4"):
        codes, scales = pagecore.quantize(x, format, factors)
        read = pagecore.dequantize(codes, format, scales, factors)
        for head, factor in enumerate(factors):
            one, of_one = pagecore.quantize(x[:, head], format, float(factor))
            np.testing.assert_array_equal(codes[:, head].view(np.uint8), one.view(np.uint8))
            assert_numbers(read[:, head].copy(), pagecore.dequantize(one, format, of_one, float(factor)))


def test_arrays_of_torch_come_back_as_torch():
    torch = pytest.importorskip("torch")
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    codes, scales = pagecore.quantize(x, "mxfp8")
    assert codes.dtype is torch.float8_e4m3fn
    assert scales.dtype is torch.uint8
    read = pagecore.dequantize(codes, "mxfp8", scales, dtype="bfloat16")
    assert read.dtype is torch.bfloat16
    assert (read - x).abs().max() <= 0.0625 * x.abs().max()


X = np.ones((4, 3, 32), np.float32)
SHAPE, DTYPE, OPTION = errors.ShapeError, errors.UnsupportedDtype, errors.UnsupportedOption


@together(
    ("arguments", "error", "message"),
    [
        ((X, "int8"), OPTION, "format is 'int8'; use one of float8_e4m3fn.*nvfp4_4over6, fp8_ds_mla.*, kivi4"),
        ((X, None), OPTION, "format is None"),
        ((X.astype(np.float64), "mxfp8"), DTYPE, "x is float64"),
        ((X.astype(np.int8), "mxfp8"), DTYPE, "x is int8"),
        ((X[..., :24], "mxfp8"), SHAPE, "multiple of 32"),
        ((X[..., :24], "nvfp4"), SHAPE, "multiple of 16"),
        ((X[..., :3], "int4_token"), SHAPE, "multiple of 2"),
        ((X[..., :0], "int8_token"), SHAPE, "at least 1"),
        ((X[..., ::2], "int8_token"), SHAPE, "last axis must be contiguous"),
        ((np.array(1, np.float32), "int8_token"), SHAPE, "no axes"),
        ((X, "int8_token", 0.5), OPTION, "'int8_token' computes its scales"),
        ((X, "float8_e4m3fn", 0.0), OPTION, "scale holds 0.0"),
        ((X, "float8_e4m3fn", [1.0, 2.0]), SHAPE, "scale has shape"),
        ((X, "nvfp4", -2.0), OPTION, "scale holds -2.0.*above 0"),
    ],
)
def test_quantize_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        pagecore.quantize(*arguments)


CODES, SCALES = pagecore.quantize(X, "nvfp4")


@together(
    ("arguments", "error", "message"),
    [
        ({"format": "int4"}, OPTION, "format is 'int4'"),
        ({"format": "int8_token"}, DTYPE, "codes is uint8; the codes of 'int8_token' are int8"),
        ({"format": "fp4_block16"}, DTYPE, "scales is float8_e4m3fn; the scales of 'fp4_block16' are uint8"),
        ({"scales": None}, OPTION, "format 'nvfp4' stores scales"),
        ({"scales": SCALES.view(np.uint8)}, DTYPE, "are float8_e4m3fn: view them as that dtype"),
        ({"scales": SCALES[..., :1]}, SHAPE, r"scales has shape \(4, 3, 1\); codes \(4, 3, 16\) need \(4, 3, 2\)"),
        ({"scales": SCALES[:2]}, SHAPE, "scales has shape"),
        ({"codes": CODES[..., :12]}, SHAPE, "multiple of 16"),
        ({"codes": CODES[..., ::2]}, SHAPE, "last axis must be contiguous"),
        ({"dtype": "int8"}, DTYPE, "dtype is int8; use float32"),
        ({"scale": 0.0}, OPTION, "scale holds 0.0"),
    ],
)
def test_dequantize_refuses(arguments, error, message):
    given = {"codes": CODES, "format": "nvfp4", "scales": SCALES} | arguments
    with pytest.raises(error, match=message):
        pagecore.dequantize(**given)


def test_dequantize_refuses_scales_of_a_format_that_stores_none():
    codes, _ = pagecore.quantize(X, "float8_e5m2")
    with pytest.raises(OPTION, match="'float8_e5m2' stores no scales; pass its factor as scale"):
        pagecore.dequantize(codes, "float8_e5m2", np.ones((4, 3, 1), np.float32))
