"""Attention over quantised caches on the host, against float64 over the dequantised cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors, ops
from pagecore.arrays.dtypes.formats import FORMATS
from tests.ops import formats_twin as twin
from tests.ops.cases import DTYPES, LAYOUTS, Shape, make_case, random_mask
from tests.ops.format_cases import DECODE, DIMS, EVERY_FORMAT, MIXED, FormatCase, check_format_case, make_format_case
from tests.ops.instruction_sets import ISAS, by_case, instruction_set, on_every_isa
from tests.ops.test_attention_options import OPTIONS
from tests.thinning import in_turn
from tests.together import together

pytestmark = pytest.mark.slow


LENS = together("lens", [MIXED, DECODE])


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
