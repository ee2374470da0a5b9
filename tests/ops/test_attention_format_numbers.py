"""Numbers of quantised caches: every code, extreme scales and magnitudes, infinities and NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import ops
from pagecore.arrays.dtypes.formats import FORMATS
from tests.ops import formats_twin as twin
from tests.ops.cases import DTYPES, Shape, assert_output_close, make_case
from tests.ops.format_cases import DECODE, EVERY_FORMAT, FormatCase, make_format_case, store
from tests.ops.instruction_sets import on_every_isa
from tests.reference import attention as reference
from tests.together import together

pytestmark = pytest.mark.slow


@on_every_isa
def test_int8_codes_of_minus_128():
    """No write makes them, but a cache may hold them: they share bits with 0."""
    case = make_format_case("int8_token", shape=Shape(dims=(64, 64), query_dtype="bfloat16", **DECODE))
    for planes in (case.key, case.value):
        held = ~np.isnan(planes.numbers)
        codes = np.random.default_rng(1).choice(np.array([-128, -127, -1, 0, 1, 127], np.int8), planes.codes.shape)
        planes.codes[held] = codes[held]
        planes.numbers[held] = (codes.astype(np.float32) * planes.scale)[held]
    case.check()


@together("dtype", DTYPES)
@on_every_isa
def test_infinite_scales_of_int4_values_never_give_finite_outputs(dtype):
    """No write makes them, but a cache may hold them."""
    random = np.random.default_rng(2)
    key, value = random.normal(size=(2, 40, 1, 64)).astype(np.float32)
    codes, scales = np.zeros((2, 4, 16, 1, 32), np.uint8), np.zeros((2, 4, 16, 1, 1), np.float32)
    ops.write_kv(key, value, *codes, np.arange(16, 56), key_scale=scales[0], value_scale=scales[1])
    scales[1, 1, 3] = np.inf
    query = random.normal(size=(1, 2, 64)).astype(DTYPES[dtype])
    out = ops.paged_attention(query, *codes, [[1, 2, 3]], [40], key_scale=scales[0], value_scale=scales[1])
    assert not np.isfinite(out.astype(np.float32)).any()


@together("format", ["float8_token", "int8_token", "int4_token"])
@on_every_isa
def test_scales_of_rows_with_infinities_and_the_largest_numbers_are_finite(format):
    largest = np.finfo(np.float32).max
    x = np.array([[np.inf] * 64, [-np.inf, np.inf] * 32, [largest, -largest] * 32, [np.inf, 1] * 32], np.float32)
    assert np.isfinite(ops.quantize(x, format)[1]).all()


@EVERY_FORMAT
@together("dtype", DTYPES)
@on_every_isa
def test_tokens_of_very_different_magnitudes(format, dtype):
    """Weights are rounded to integers next to the largest of their tile, scales of values included."""
    shape = Shape(dims=(64, 128), query_dtype=dtype, **DECODE)
    plain = make_case(replace(shape, layout="NHD"))
    magnitudes = np.float32(10) ** np.random.default_rng(3).uniform(-2, 2, (*plain.value_cache.shape[:3], 1))
    plain.value_cache[...] = (plain.value_cache.astype(np.float32) * magnitudes).astype(plain.value_cache.dtype)
    plain.query[::2] = (plain.query[::2].astype(np.float32) * np.float32(1e-3)).astype(plain.query.dtype)
    plain.query[..., 5] *= 20
    FormatCase(plain, store(plain.key_cache, format, "HND"), store(plain.value_cache, format, "HND")).check()


@together("format", ["fp4_block16", "mxfp8"])
@on_every_isa
def test_groups_of_values_of_very_different_magnitudes(format):
    """The integers of a group of values are as exact as those of a group that is 4,096 times as large."""
    shape = Shape(dims=(64, 128), query_dtype="bfloat16", **DECODE)
    plain = make_case(replace(shape, layout="NHD"))
    magnitudes = np.repeat(np.float32(2) ** np.array([0, -12, -4, 3], np.float32), 32)
    plain.value_cache[...] = (plain.value_cache.astype(np.float32) * magnitudes).astype(plain.value_cache.dtype)
    case = FormatCase(plain, store(plain.key_cache, format, "HND"), store(plain.value_cache, format, "HND"))
    query, _, _, table, lens = plain.arrays
    numbers = case.key.numbers, case.value.numbers
    expected, _ = reference.paged_attention(query, *numbers, table, lens, **plain.options)
    out = case.run()
    for first in range(0, 128, 32):
        assert_output_close(out[..., first : first + 32], expected[..., first : first + 32])


@together("ratio", [1e2, 1e3, 1e5])
@together("format", ["fp4_block16", "nvfp4", "mxfp8"])
@on_every_isa
def test_a_group_that_is_large_in_a_token_of_little_weight(format, ratio):
    """Weights times scales have a range within a group that is wider than that of the integers of a row."""
    shape = Shape(seq_lens=(150,), query_lens=(1,), heads=(2, 2), dims=(128, 128), query_dtype="bfloat16")
    plain = make_case(replace(shape, layout="NHD"))
    place, query = (plain.block_table[0, 70 // 16], 70 % 16), plain.query[0].astype(np.float32)
    score = -np.log(ratio) * 128**0.5
    plain.key_cache[place] = (query * (score / (query**2).sum(-1, keepdims=True))).astype(plain.key_cache.dtype)
    plain.value_cache[place][:, :32] *= plain.value_cache.dtype.type(ratio)
    factor = float(np.nanmax(plain.value_cache.astype(np.float32))) / (6 * 448) if format == "nvfp4" else 1.0
    value = store(plain.value_cache, format, "HND", factor)
    FormatCase(plain, store(plain.key_cache, format, "HND"), value).check()


@EVERY_FORMAT
@together("number", [np.nan, np.inf, 1e-35])
@together("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_a_query_of_any_number_leaves_the_others_as_they_are(format, dtype, number):
    shape = Shape(seq_lens=(200,), query_lens=(3,), heads=(2, 2), dims=(64, 64), query_dtype=dtype)
    case = make_format_case(format, shape=shape)
    expected = case.run().astype(np.float32)
    case.plain.query[1] = number
    out = case.run().astype(np.float32)
    np.testing.assert_allclose(out[[0, 2]], expected[[0, 2]], rtol=2e-2, atol=2e-2 if dtype == "bfloat16" else 1e-5)
    assert np.isnan(out[1]).all() if np.isnan(number) else np.isinf(number) or np.isfinite(out[1]).all()


def every_code(format: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of all codes, with all scale bytes of groups, or with some scales of tokens, as bytes."""
    kind = FORMATS[format]
    codes = np.arange(256, dtype=np.uint8)
    if kind.codes_per_byte == 2:
        codes = np.tile(np.arange(16, dtype=np.uint8), 4)
        codes = codes[::2] | codes[1::2] << 4
    if kind.group is None:
        return codes[None], np.zeros((1, 0), np.uint8)
    if kind.group == 0:
        scales = np.asarray([0.3, 1e-6, 7.0, 2.0**-20, 1000.0, *np.linspace(0.1, 3, 27)], np.float32)
        if format == "int4_token":
            scales = (scales.view(np.uint32) & ~np.uint32(15) | np.arange(32, dtype=np.uint32) % 16).view(np.float32)
        return np.tile(codes, (32, 1)), scales.view(np.uint8).reshape(32, 4)
    groups = codes.size * kind.codes_per_byte // kind.group
    # The smallest e4m3 numbers times the smallest scales are below the range of bfloat16.
    scales = np.arange(16 if format == "mxfp8" else 0, 256, dtype=np.uint8)
    return np.tile(codes, (scales.size, 1)), np.repeat(scales[:, None], groups, 1)


@EVERY_FORMAT
@together("lone", [True, False])
@on_every_isa
def test_every_code_is_exact(format, lone):
    codes, scales = every_code(format)
    count, kind = len(codes), FORMATS[format]
    stored = codes.view(kind.dtype.numpy).reshape(count, 1, 1, -1)
    options: dict[str, Any] = {}
    if kind.scale_dtype is not None:
        options = {"value_scale": scales.view(kind.scale_dtype.numpy).reshape(count, 1, 1, -1)}
    # One key of each sequence: its value has the weight 1.
    heads = 1 if lone else 20
    query, key = np.ones((count, heads, 16), np.float32), np.ones((count, 1, 1, 16), np.float32)
    out = ops.paged_attention(query, key, stored, np.arange(count)[:, None], np.ones(count, np.int32), **options)
    expected = twin.dequantize_row(codes, format, scales)
    np.testing.assert_array_equal(out, np.repeat(expected[:, None], heads, 1))


@EVERY_FORMAT
@together("lone", [True, False])
@together("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_a_later_token_that_is_nan_does_not_reach_earlier_queries(format, lone, dtype):
    count = 3 if lone else 20
    shape = Shape(seq_lens=(70,), query_lens=(count,), heads=(2, 2), dims=(64, 64), query_dtype=dtype)
    case = make_format_case(format, shape=shape)
    expected = case.run()[: count - 1].tobytes()
    last = (case.plain.block_table[0, 69 // 16], 69 % 16)
    for stored in (case.key, case.value):
        raw = stored.codes.view(np.uint8)
        raw[last] = 0x7F
        if isinstance(stored.scale, np.ndarray):
            stored.scale[last] = 255 if stored.scale.dtype == np.uint8 else np.nan
    out = case.run()
    assert out[: count - 1].tobytes() == expected
    if format != "float8_e5m2":
        assert np.isnan(out[-1].astype(np.float32)).all()


@together("code", [0x7F, 0xFF])
@together("part", ["key", "value"])
@together(("format", "dim"), [("float8_e4m3fn", 80), ("float8_token", 96), ("mxfp8", 96)])
@on_every_isa
def test_one_nan_code_makes_nan_only_of_what_it_is_part_of(format, dim, part, code):
    """The bits of this NaN are those of a number in wider types: see code_floats.hpp."""
    shape = Shape(seq_lens=(130,), query_lens=(1,), heads=(6, 2), dims=(dim, dim), query_dtype="bfloat16")
    case = make_format_case(format, shape=shape)
    expected = case.run().astype(np.float32)
    getattr(case, part).codes.view(np.uint8)[case.plain.block_table[0, 70 // 16], 70 % 16, 1, dim - 1] = code
    expected[:, 3:, dim - 1 if part == "value" else slice(None)] = np.nan
    np.testing.assert_allclose(case.run().astype(np.float32), expected, rtol=2e-2, atol=2e-2)


@together("heads", [8, 16])
@together("dim", [512, 576, 2048])
@on_every_isa
def test_sums_of_the_largest_integers_do_not_overflow(dim, heads):
    """Every lane of a sum has the largest magnitudes, of one sign: see integer_scores.hpp."""
    keys, values = np.full((9, 16, 2, dim), 127, np.int8), np.full((9, 16, 2, 64), 1, np.int8)
    keys[:, ::2], values[:, ::2] = -128, -1
    ones = np.ones((9, 16, 2, 1), np.float32)
    query, table = np.ones((1, heads, dim), DTYPES["bfloat16"]), [range(1, 9)]
    options = {"key_scale": ones / (127 * dim), "value_scale": ones, "scale": 1.0}
    out = pagecore.paged_attention(query, keys, values, table, [128], **options)
    np.testing.assert_allclose(out.astype(np.float32), np.tanh(255 / 254), rtol=2e-2)


@together("heads", [6, 16])
@together("format", ["fp4_block16", "nvfp4", "mxfp8"])
@on_every_isa
def test_a_scale_that_is_nan_makes_nan_only_of_its_group(format, heads):
    shape = Shape(seq_lens=(130,), query_lens=(1,), heads=(heads, 2), dims=(128, 128), query_dtype="bfloat16")
    case = make_format_case(format, shape=shape)
    expected = case.run().astype(np.float32)
    scales = case.value.scale.view(np.uint8)
    group, size = 3, 128 // scales.shape[-1]
    scales[case.plain.block_table[0, 70 // 16], 70 % 16, 1, group] = 0x7F if format == "nvfp4" else 0xFF
    expected[:, heads // 2 :, group * size : (group + 1) * size] = np.nan
    np.testing.assert_allclose(case.run().astype(np.float32), expected, rtol=2e-2, atol=2e-2)


@together(("format", "scale"), [("fp4_block16", 251), ("mxfp8", 246)])
@on_every_isa
def test_a_weight_of_zero_stays_zero_with_the_largest_scales(format, scale):
    shape = Shape(seq_lens=(64,), query_lens=(1,), heads=(2, 2), dims=(128, 128), query_dtype="bfloat16")
    case = make_format_case(format, shape=shape)
    at = case.plain.block_table[0, 40 // 16], 40 % 16
    away = -30 * case.plain.query[0].astype(np.float32)
    case.key.codes[at], case.key.scale[at] = pagecore.quantize(away, format)
    expected = case.run().astype(np.float32)
    case.value.scale[at] = scale
    np.testing.assert_allclose(case.run().astype(np.float32), expected, rtol=1e-2, atol=1e-2)
