"""Attention over quantised caches on the host, against float64 over the dequantised cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors, ops
from pagecore.arrays.dtypes.formats import FORMATS
from tests.ops import formats_twin as twin
from tests.ops.cases import DTYPES, LAYOUTS, Shape, assert_output_close, make_case, random_mask
from tests.ops.format_cases import DIMS, FormatCase, check_format_case, make_format_case, store
from tests.ops.instruction_sets import ISAS, by_case, instruction_set, on_every_isa
from tests.ops.test_attention_options import OPTIONS
from tests.reference import attention as reference
from tests.thinning import in_turn
from tests.together import together

pytestmark = pytest.mark.slow

MIXED: dict[str, Any] = {"seq_lens": (70, 33, 1, 16, 300, 0), "query_lens": (7, 1, 1, 16, 40, 2)}
DECODE: dict[str, Any] = {"seq_lens": (70, 33, 1, 300, 0)}
LENS = together("lens", [MIXED, DECODE])
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)


@LENS
@EVERY_FORMAT
@together("dtype", DTYPES)
@on_every_isa
def test_every_format_on_every_instruction_set(lens, format, dtype):
    check_format_case(format, shape=Shape(dims=DIMS, query_dtype=dtype, **lens))


@LENS
@together("byte", [0, 1])
@together("dtype", ["float32", "bfloat16"])
@together("format", ["mxfp8", "fp4_block16"])
@on_every_isa
def test_the_least_ue8m0_scales(lens, format, dtype, byte):
    """The byte 0 is 2^-127, which only a subnormal float32 holds."""
    case = make_format_case(format, shape=Shape(dims=DIMS, query_dtype=dtype, **lens), scale=2.0**20)
    # Instructions for bfloat16 read subnormal numbers as 0: products of keys here, and of weights with these values.
    for planes in (case.key, case.value) if dtype == "float32" else (case.key,):
        planes.scale[planes.scale != 255] = byte
        if format == "fp4_block16":
            planes.codes |= 0x44  # 2 to 6
        planes.numbers[...] = twin.dequantize_row(planes.codes, format, planes.scale)
    case.plain.query[...] = case.plain.query.astype(np.float32) * np.float32(2.0**95)
    case.check()


@LENS
@EVERY_FORMAT
@together("layout", LAYOUTS)
def test_every_layout(lens, format, layout):
    shape = Shape(dims=DIMS, layout=layout, block_size=5, query_dtype="bfloat16", **lens)
    check_format_case(format, shape=shape)


TILES = [
    ("HND", 16, 64, 5),
    ("HND", 16, 128, 5),
    ("HND", 16, 192, 7),
    ("HND", 16, 256, 5),
    ("HND", 64, 128, 6),
    ("HND", 24, 128, 5),
    ("NHD", 16, 128, 3),
]


@together(("format", "tile", "isa"), in_turn(FORMATS, TILES, over=[ISAS]))
def test_whole_tiles_with_scales_in_contiguous_rows_and_apart(isa, format, tile):
    """Scales of 16 tokens that are contiguous are loaded as vectors; products take query rows by 4, 2 and 1."""
    layout, block_size, dim, group = tile
    heads = (2 * group, 2)
    shape = Shape(dims=(dim, dim), heads=heads, layout=layout, block_size=block_size, query_dtype="bfloat16", **DECODE)
    with instruction_set(isa):
        check_format_case(format, shape=shape)


@together("format", [name for name, format in FORMATS.items() if format.group])
@together("dim", [64, 128])
@together("rows", [1, 4, 5, 8, 9, 16])
def test_query_rows_that_share_tiles_of_sums(format, dim, rows):
    """With AMX, groups of dims share tiles if a head has up to 4 or 8 query rows."""
    shape = Shape(dims=(dim, dim), heads=(2 * rows, 2), query_dtype="bfloat16", **DECODE)
    with instruction_set(ISAS[0]):
        check_format_case(format, shape=shape)


@EVERY_FORMAT
@together("window", [None, (20, 0)])
@together("heads", [(1, 1), (4, 2)])
@on_every_isa
def test_few_queries_around_the_end_of_a_tile(format, window, heads):
    """Only the last queries attend to the last tile, and only the first to the first tile of a window."""
    lens = {"seq_lens": (66, 84, 130, 65), "query_lens": (4, 3, 3, 2)}
    shape = Shape(dims=(64, 128), heads=heads, query_dtype="bfloat16", **lens)
    check_format_case(format, shape=shape, window=window)


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


PRODUCTS = ["float32", "bfloat16"]  # dtypes of queries, which products have too
FORMAT_OPTIONS = [name for name in OPTIONS if "scale" not in name or name == "negative scale"]


@together(("format", "name", "lens", "dtype"), in_turn(FORMATS, FORMAT_OPTIONS, over=[[MIXED, DECODE], PRODUCTS]))
def test_every_option(lens, format, dtype, name):
    options = {key: value for key, value in OPTIONS[name].items() if key not in ("key_scale", "value_scale")}
    check_format_case(format, shape=Shape(dims=DIMS, query_dtype=dtype, **lens), **options)


@LENS
@EVERY_FORMAT
@together("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_tokens_hidden_by_a_mask_are_not_read(lens, format, dtype):
    shape = Shape(dims=DIMS, query_dtype=dtype, **lens)
    check_format_case(format, shape=shape, mask=random_mask(shape))


@together(
    ("format", "window", "turns"),
    by_case(in_turn(FORMATS, [1, 3, 30, 65, (40, 2)], ISAS, over=[["float32", "bfloat16"]])),
)
def test_windows_that_begin_within_a_tile(format, window, turns):
    for isa, dtype in turns:
        shape = Shape(dims=(64, 64), query_dtype=dtype, **DECODE)
        with instruction_set(isa):
            check_format_case(format, shape=shape, window=window)


@LENS
@together("dtype", ["float32", "bfloat16"])
@together("cache_dtype", ["float32", "bfloat16"])
@together(
    "formats",
    [(None, "int8_token"), ("int4_token", None), ("nvfp4", "mxfp8"), ("float8_e5m2", "fp4_block16"), (None, "nvfp4")],
)
@on_every_isa
def test_keys_and_values_of_different_formats(lens, dtype, cache_dtype, formats):
    shape = Shape(dims=(64, 128), query_dtype=dtype, cache_dtype=cache_dtype, **lens)
    check_format_case(formats[0], formats[1], shape)


SMALLEST_DIM = {name: format.group or format.codes_per_byte for name, format in FORMATS.items()}


@together(
    ("format", "units", "lens", "dtype"),
    in_turn(FORMATS, [(1, 1), (5, 3), (3, 17), (8, 7)], over=[[MIXED, DECODE], PRODUCTS]),
)
@on_every_isa
def test_every_dim_that_the_groups_divide(lens, format, dtype, units):
    unit, heads = SMALLEST_DIM[format], (5, 5) if units[0] % 2 else (6, 1)
    dims = (unit * units[0], unit * units[1])
    check_format_case(format, shape=Shape(dims=dims, heads=heads, query_dtype=dtype, **lens))


@together(
    ("format", "dims", "turns"),
    by_case(
        in_turn(
            ["float8_e4m3fn", "float8_e5m2", "float8_token", "int8_token"],
            [(80, 112), (112, 48), (16, 144)],
            ISAS,
            over=[PRODUCTS],
        )
    ),
)
def test_dims_that_are_no_whole_vectors_of_codes(format, dims, turns):
    for isa, dtype in turns:
        with instruction_set(isa):
            check_format_case(format, shape=Shape(dims=dims, heads=(14, 2), query_dtype=dtype, **DECODE))


HEADS = [(2, 2), (4, 2), (12, 4), (8, 2), (10, 2), (14, 2), (16, 2), (40, 2)]


@together(("format", "heads", "turns"), by_case(in_turn(FORMATS, HEADS, ISAS, over=[PRODUCTS])))
def test_every_number_of_query_heads(format, heads, turns):
    for isa, dtype in turns:
        with instruction_set(isa):
            check_format_case(format, shape=Shape(dims=(128, 128), heads=heads, query_dtype=dtype, **DECODE))


@LENS
@together("dtype", ["float32", "bfloat16"])
@together(
    ("format", "factors"),
    [
        ("float8_e4m3fn", (0.5, 3.0)),
        ("float8_e5m2", (np.asarray([0.3, 2.0], np.float32), np.asarray([1.0, 0.25], np.float32))),
        ("nvfp4", (0.01, 0.7)),
    ],
)
@on_every_isa
def test_given_factors(lens, dtype, format, factors):
    check_format_case(format, shape=Shape(dims=DIMS, query_dtype=dtype, **lens), factors=factors, softcap=4.0)


FEW_ROWS = [("float16", (4, 2)), ("bfloat16", (14, 2)), ("float32", (8, 2)), ("float16", (3, 1)), ("bfloat16", (7, 1))]
LONG_DIMS = [(64, 64), (128, 128), (192, 64), (256, 192), (96, 320), (320, 160)]


@together(("format", "few", "dims"), in_turn(FORMATS, FEW_ROWS, over=[LONG_DIMS]))
@on_every_isa
def test_few_query_rows_of_every_dtype(format, few, dims):
    """Their products take codes as integers or floats, by the dtype of the queries."""
    dtype, heads = few
    check_format_case(format, shape=Shape(dims=dims, heads=heads, query_dtype=dtype, **DECODE))


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


@together(("format", "threads", "dtype"), in_turn(FORMATS, [1, 2, 5], over=[PRODUCTS]))
def test_splits_and_plans(format, dtype, threads):
    before = pagecore.num_threads()
    pagecore.set_num_threads(threads)
    try:
        case = make_format_case(format, shape=Shape(seq_lens=(3000, 70, 1500), dims=DIMS, query_dtype=dtype))
        case.check()
        for invariant in (False, True):
            plan = ops.plan_attention(
                None, [3000, 70, 1500], num_query_heads=4, num_kv_heads=2, batch_invariant=invariant
            )
            case.check(plan=plan)
    finally:
        pagecore.set_num_threads(before)


@EVERY_FORMAT
@together("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_batch_invariant_bits(format, dtype):
    case = make_format_case(format, shape=Shape(seq_lens=(700, 70, 1500), dims=DIMS, query_dtype=dtype))
    query, _, _, table, lens = case.plain.arrays
    whole = run_invariant(case, query, table, lens)
    for i in range(3):
        alone = run_invariant(case, query[i : i + 1], table[i : i + 1], lens[i : i + 1])
        assert alone.tobytes() == whole[i : i + 1].tobytes()


def run_invariant(case: FormatCase, query: Any, table: Any, lens: Any) -> Any:
    plan = ops.plan_attention(None, lens, num_query_heads=4, num_kv_heads=2, batch_invariant=True)
    scales = {"key_scale": case.key.scale, "value_scale": case.value.scale}
    return ops.paged_attention(query, case.key.codes, case.value.codes, table, lens, plan=plan, **scales)


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


def test_rows_with_a_plane_of_three_axes():
    case = make_format_case("int8_token")
    expected = case.run().tobytes()
    case.key.scale, case.value.scale = case.key.scale[..., 0], case.value.scale[..., 0]
    assert case.run().tobytes() == expected


def test_refusals_name_the_plane_and_the_remedy():
    case = make_format_case("int8_token")
    query, _, _, table, lens = case.plain.arrays

    def run(**more: Any) -> Any:
        scales = {"key_scale": case.key.scale, "value_scale": case.value.scale}
        return ops.paged_attention(query, case.key.codes, case.value.codes, table, lens, **(scales | more))

    with pytest.raises(errors.ShapeError, match=r"key_scale has shape .* pass the plane of the same pool"):
        run(key_scale=case.key.scale[1:])
    with pytest.raises(errors.UnsupportedOption, match="value_cache is int8 and value_scale is not an array of stored"):
        run(value_scale=None)
    with pytest.raises(errors.UnsupportedOption, match=r"key_global_scale is 2\.0 .* only nvfp4"):
        run(key_global_scale=2.0)
    out = case.key.scale.view(np.float32).reshape(-1)[: query.shape[0] * 4 * DIMS[1]]
    if out.size == query.shape[0] * 4 * DIMS[1]:
        with pytest.raises(errors.ShapeError, match="out overlaps key_scale"):
            run(out=out.reshape(query.shape[0], 4, DIMS[1]))
    packed = make_format_case("int4_token")
    with pytest.raises(errors.ShapeError, match=r"key_cache has shape .* holds 64 numbers in a row"):
        ops.paged_attention(
            np.ones((2, 4, 32), np.float32),
            packed.key.codes,
            packed.value.codes,
            table,
            lens,
            key_scale=packed.key.scale,
            value_scale=packed.value.scale,
        )


def test_formats_of_values_leave_the_scores_as_they_are():
    shape = Shape(dims=(64, 64), query_dtype="bfloat16", cache_dtype="bfloat16", **DECODE)
    lse = make_case(shape).run(return_lse=True)[1]
    stored = make_format_case(None, "int8_token", shape).run(return_lse=True)[1]
    np.testing.assert_allclose(stored, lse, rtol=1e-6, atol=1e-6)
