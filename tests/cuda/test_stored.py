"""paged_attention over quantised caches on a CUDA device, against float64 over the dequantised cache.

Slots that no query attends to have codes and scales that read as NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagecore.arrays.dtypes.formats import FORMATS
from pagecore.ops import paged_attention, plan_attention
from tests.cuda.attention_cases import LIMITS, SINKS, SLOPES
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.ops.cases import LAYOUTS, Shape, assert_lse_close, assert_output_close, random_mask
from tests.ops.format_cases import FormatCase, make_format_case
from tests.reference import attention as reference
from tests.thinning import in_turn, interleaved

# Formats with a scale for each row.
ROW_SCALES = ["float8_token", "int8_token", "int4_token"]
LENS = {"seq_lens": (140, 40, 5, 0, 90), "query_lens": (33, 40, 1, 0, 2)}
DECODE = {"seq_lens": (150, 1, 17, 0, 63, 16, 33)}
HEADS = (8, 2)
OPTIONS: dict[str, dict[str, Any]] = {
    "not causal": {"causal": False},
    "window": {"window": 33},
    "chunk": {"chunk": 48},
    "sink tokens": {"window": 33, "sink_tokens": 5},
    "both sides": {"causal": False, "window": (40, 9)},
    "sinks": {"sinks": SINKS},
    "negative scale": {"scale": -0.1},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": SLOPES},
    "everything": {"window": 50, "sinks": SINKS, "softcap": 20.0, "alibi_slopes": SLOPES},
}


def run(cuda: Kit, case: FormatCase, *, plan: bool = False, **more: Any) -> tuple[Any, Any]:
    """Call paged_attention into a poisoned output; return output and lse on the host."""
    plain = case.plain
    arguments: dict[str, Any] = dict(plain.options)
    if plan:
        heads = {"num_query_heads": plain.query.shape[1], "num_kv_heads": case.key.codes.shape[2]}
        kinds = {name: arguments[name] for name in LIMITS if name in arguments}
        cu = arguments.get("cu_query_lens")
        arguments["plan"] = plan_attention(cu, plain.seq_lens, device=cuda.device, **heads, **kinds, **more)
    arguments |= {"key_scale": case.key.scale, "value_scale": case.value.scale}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            arguments[name] = cuda.put(value)
    arguments |= {"key_global_scale": case.key.global_scale, "value_global_scale": case.value.global_scale}
    query, _, _, table, lens = plain.arrays
    out = cuda.empty((*query.shape[:2], case.value.numbers.shape[3]), str(query.dtype))
    arrays = (query, case.key.codes, case.value.codes, table, lens)
    _, lse = paged_attention(*map(cuda.put, arrays), out=out, return_lse=True, **arguments)
    return cuda.get(out), cuda.get(lse)


def check(cuda: Kit, case: FormatCase, *, cancels: bool = False, **more: Any) -> None:
    """Run a case and compare it with the oracle over the dequantised cache.

    `cancels`: errors are relative to the sums of the magnitudes of all contributions.
    """
    out, lse = run(cuda, case, **more)
    query, _, _, table, lens = case.plain.arrays
    arrays = (query, case.key.numbers, case.value.numbers, table, lens)
    expected = reference.paged_attention(*arrays, **case.plain.options)
    size = None
    if cancels:
        size = reference.paged_attention(*arrays[:2], np.abs(arrays[2]), *arrays[3:], **case.plain.options)[0]
    assert_output_close(out, expected[0], size)
    assert_lse_close(lse, expected[1], str(query.dtype))


EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)
DTYPES = ["float32", "float16", "bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), interleaved(FORMATS, DTYPES))
def test_prompts_and_decode(cuda, name, dtype):
    check(cuda, make_format_case(name, shape=Shape(heads=HEADS, dims=(128, 128), query_dtype=dtype, **LENS)))


@pytest.mark.parametrize(("name", "dtype"), interleaved(FORMATS, DTYPES, first=1))
def test_decode(cuda, name, dtype):
    check(cuda, make_format_case(name, shape=Shape(heads=HEADS, dims=(128, 128), query_dtype=dtype, **DECODE)))


DIMS = [(64, 64), (256, 256), (96, 192), (32, 160), (192, 128), (288, 32), (512, 512)]


@pytest.mark.parametrize(("name", "dims"), interleaved(FORMATS, DIMS))
def test_dims(cuda, name, dims):
    check(cuda, make_format_case(name, shape=Shape(heads=HEADS, dims=dims, query_dtype="bfloat16", **DECODE)))


@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (256, 128)])
@EVERY_FORMAT
def test_dims_with_padding(cuda, name, dims):
    shape = Shape(heads=HEADS, dims=dims, query_dtype="float16", **DECODE)
    check(cuda, make_format_case(name, shape=shape))


# A prompt of more rows than a tile, and of more keys than two; one that the last tile splits.
PROMPTS = {"seq_lens": (150, 33, 65), "query_lens": (36, 33, 20)}


PROMPT_CASES = cases([((256, 256), "bfloat16"), ((192, 128), "float16")], [
    (dims, dtype)
    for dims in [(64, 64), (128, 64), (96, 192), (160, 32), (192, 128), (256, 256)]
    for dtype in ("float16", "bfloat16")
])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), in_turn(FORMATS, over=[PROMPT_CASES]), ids=str)
def test_prompts_of_any_dims(cuda, name, case):
    dims, dtype = case
    shape = Shape(heads=HEADS, dims=dims, query_dtype=dtype, **PROMPTS)
    check(cuda, make_format_case(name, shape=shape))
    one = replace(shape, seq_lens=(90,), query_lens=(36,), heads=(4, 1))
    check(cuda, make_format_case(name, shape=one, softcap=5.0, window=40))


@pytest.mark.parametrize(("name", "layout"), interleaved(FORMATS, LAYOUTS))
def test_layouts(cuda, name, layout):
    shape = Shape(heads=(4, 2), dims=(64, 64), block_size=5, query_dtype="bfloat16", layout=layout, **DECODE)
    check(cuda, make_format_case(name, shape=shape))


@pytest.mark.parametrize(("name", "option"), interleaved(FORMATS, OPTIONS))
def test_options(cuda, name, option):
    shape = Shape(heads=HEADS, dims=(64, 64), query_dtype="bfloat16", **LENS)
    check(cuda, make_format_case(name, shape=shape, **OPTIONS[option]))


@EVERY_FORMAT
def test_masks(cuda, name):
    for lens in (LENS, DECODE):
        shape = Shape(heads=HEADS, dims=(64, 64), query_dtype="bfloat16", **lens)
        check(cuda, make_format_case(name, shape=shape, mask=random_mask(shape)))


@EVERY_FORMAT
def test_several_queries_of_a_sequence_in_decode(cuda, name):
    """Queries of one item attend to different keys, so that weights of 0 meet scales."""
    shape = Shape(seq_lens=(70, 33, 17), query_lens=(4, 3, 2), heads=HEADS, dims=(128, 128), query_dtype="bfloat16")
    check(cuda, make_format_case(name, shape=shape))
    check(cuda, make_format_case(name, shape=shape, window=9))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "nvfp4"])
def test_given_factors(cuda, name):
    shape = Shape(heads=HEADS, dims=(64, 64), query_dtype="bfloat16", **LENS)
    check(cuda, make_format_case(name, shape=shape, factors=(0.25, 3.0)))
    if name != "nvfp4":
        factors = (np.array([0.3, 2.0], np.float32), np.array([5.0, 0.01], np.float32))
        check(cuda, make_format_case(name, shape=shape, factors=factors))


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        (None, "int4_token"),
        ("nvfp4", None),
        ("int8_token", "fp4_block16"),
        ("float8_e4m3fn", "mxfp8"),
        ("float8_token", "int8_token"),
        ("mxfp8", "int8_token"),
        ("int4_token", "nvfp4"),
    ],
)
def test_keys_and_values_of_different_formats(cuda, names):
    for lens, dim, dtype in ((LENS, 64, "bfloat16"), (LENS, 64, "float16"), (DECODE, 128, "float16")):
        shape = Shape(heads=HEADS, dims=(dim, dim), query_dtype=dtype, cache_dtype="bfloat16", **lens)
        check(cuda, make_format_case(*names, shape=shape))


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=["plan", "batch-invariant"])
@EVERY_FORMAT
def test_plans(cuda, name, options):
    shape = Shape(seq_lens=(1300, 2100), query_lens=(1, 3), heads=(4, 1), dims=(64, 64), query_dtype="bfloat16")
    check(cuda, make_format_case(name, shape=shape), plan=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=["plan", "batch-invariant"])
@pytest.mark.parametrize("name", cases(["int4_token"], ROW_SCALES))
def test_plans_of_prompts_with_scales_of_any_magnitude(cuda, name, options):
    """Splits and folds of prompts: each piece has sums relative to a unit of its own."""
    shape = Shape(seq_lens=(2100, 1100), query_lens=(40, 3), heads=(4, 1), dims=(64, 64), query_dtype="float16")
    check(cuda, scaled_values(make_format_case(name, shape=shape), -6), plan=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(["int8_token", "mxfp8"], list(FORMATS)))
def test_a_row_of_a_batch_invariant_prompt_has_the_same_bits_split_and_folded(cuda, name):
    shape = Shape(seq_lens=(2100,), query_lens=(40,), heads=(4, 1), dims=(128, 128), query_dtype="bfloat16")
    assert_same_bits_split_and_folded(cuda, make_format_case(name, shape=shape))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(["int8_token"], ROW_SCALES))
def test_units_of_a_piece_do_not_depend_on_the_pieces_before(cuda, name):
    shape = Shape(seq_lens=(2100,), query_lens=(40,), heads=(4, 1), dims=(64, 64), query_dtype="float16")
    case = make_format_case(name, shape=shape)
    factors = np.full(case.value.scale.shape, 2.0**-12, np.float32)
    factors[case.plain.block_table[0, 3]] = 2.0**10
    assert_same_bits_split_and_folded(cuda, multiply_scales(case, factors))


def assert_same_bits_split_and_folded(cuda: Kit, case: FormatCase) -> None:
    runs = [run(cuda, case, plan=True, batch_invariant=True, num_workers=number) for number in (1, 12)]
    for folded, split in zip(*runs, strict=True):
        np.testing.assert_array_equal(folded, split)


@pytest.mark.parametrize(("dtype", "exponent"), [("float16", -8), ("bfloat16", -24), ("bfloat16", 12)])
@pytest.mark.parametrize("name", ROW_SCALES)
def test_scales_of_rows_of_any_magnitude(cuda, name, dtype, exponent):
    """Weights times scales leave the range of halves unless they are relative to the largest scale."""
    for lens in (DECODE, LENS):
        shape = Shape(heads=HEADS, dims=(64, 64), query_dtype=dtype, **lens)
        check(cuda, scaled_values(make_format_case(name, shape=shape), exponent))


def scaled_values(case: FormatCase, exponent: int, spread: int = 3) -> FormatCase:
    """Multiply the scale of each row of values by a power of two, 2^(exponent - spread) to 2^(exponent + spread)."""
    exponents = exponent + np.random.default_rng(3).integers(-spread, spread + 1, case.value.scale.shape)
    return multiply_scales(case, np.exp2(exponents).astype(np.float32))


def multiply_scales(case: FormatCase, factors: Any) -> FormatCase:
    """Multiply the scales of rows of values, float32 ``[blocks, block_size, heads, 1]``, by powers of two."""
    zero_points = case.value.scale.view(np.uint32) & 15
    case.value.scale[...] = case.value.scale * factors
    if case.value.codes.shape[3] < case.value.numbers.shape[3]:  # int4_token
        bits = case.value.scale.view(np.uint32)
        bits[...] = bits & ~np.uint32(15) | zero_points
    case.value.numbers *= factors
    return case


# Numbers of bfloat16 results may be of any magnitude, those of float16 results from 2^-14 to 2^15.
SPREADS = {"bfloat16": (-7, 20), "float16": (-4, 10)}
# Softmax of scores near one another and far apart: in the latter case the largest score grows in steps of many powers
# of two, and the contribution of a large scale becomes negligible.
SHARPNESS = {"flat": {}, "sharp": {"scale": 3.0}, "softcap": {"scale": 2.0, "softcap": 30.0}}


SPREAD_LENS = {"decode": DECODE, "drafts": {**DECODE, "query_lens": (4, 1, 3, 0, 2, 4, 1)}, "prompts": LENS}
SPREAD_CASES = in_turn(ROW_SCALES, SPREADS, SHARPNESS, SPREAD_LENS, over=[[{}, {"window": 9}, {"causal": False}]])


@pytest.mark.parametrize(("name", "dtype", "sharpness", "lens", "more"), SPREAD_CASES, ids=str)
def test_scales_that_differ_between_tokens(cuda, name, dtype, sharpness, lens, more):
    """Each row is as exact as its own largest contribution allows, whatever the scales of other tokens are."""
    shape = Shape(heads=(4, 1), dims=(64, 64), query_dtype=dtype, **SPREAD_LENS[lens])
    case = make_format_case(name, shape=shape, **SHARPNESS[sharpness], **more)
    check(cuda, scaled_values(case, *SPREADS[dtype]), cancels=True)


PIECES = {
    "whole": {},
    "split": {"plan": True, "num_workers": 12},
    "folded": {"plan": True, "batch_invariant": True, "num_workers": 1},
    "split in pieces": {"plan": True, "batch_invariant": True, "num_workers": 12},
}


HIGH_SCALES = in_turn([0, 1023, 1024, 1090, 1099], PIECES, cases([1, 20], [1, 3, 20]), over=[[None, 300]])


@pytest.mark.parametrize(("where", "pieces", "queries", "window"), HIGH_SCALES)
@pytest.mark.parametrize("name", cases(["int8_token"], ROW_SCALES))
def test_one_scale_far_above_all_others(cuda, name, where, pieces, queries, window):
    """The scale of one token is 2^22 times the others: of the first and last of a piece, and where few rows attend."""
    shape = Shape(seq_lens=(1100,), query_lens=(queries,), heads=(4, 1), dims=(64, 64), query_dtype="float16")
    case = make_format_case(name, shape=shape, window=window)
    factors = np.full(case.value.scale.shape, 2.0**-12, np.float32)
    if window is None or where // 16 >= (1100 - queries - window) // 16:  # else no block of the table
        factors[case.plain.block_table[0, where // 16], where % 16] = 2.0**10
    check(cuda, multiply_scales(case, factors), cancels=True, **PIECES[pieces])


def low_scores_first(name: str, queries: int) -> FormatCase:
    """Scales of the first tokens 2^50 times those of the last ones, whose scores are higher by far more than that."""
    shape = Shape(seq_lens=(150,), query_lens=(queries,), heads=(4, 1), dims=(64, 64), query_dtype="float16")
    case = make_format_case(name, shape=shape, scale=1.0)
    tokens = np.arange(150)
    where = case.plain.block_table[0, tokens // 16], tokens % 16
    case.plain.query[...] = case.key.numbers[where][100]
    factors = np.full(case.value.scale.shape, 2.0**-12, np.float32)
    factors[where] = np.where(tokens < 64, 2.0**38, 2.0**-12).astype(np.float32)[:, None, None]
    return multiply_scales(case, factors)


@pytest.mark.parametrize("queries", [4, 40], ids=["decode", "prompts"])
@pytest.mark.parametrize("name", ROW_SCALES)
def test_a_large_scale_whose_weight_becomes_negligible(cuda, name, queries):
    check(cuda, low_scores_first(name, queries))


@pytest.mark.parametrize("queries", [4, 40], ids=["decode", "prompts"])
@pytest.mark.parametrize("name", cases(["int4_token"], ROW_SCALES))
def test_a_scale_in_a_tile_does_not_change_the_bits_of_rows_that_do_not_attend_to_it(cuda, name, queries):
    shape = Shape(seq_lens=(77,), query_lens=(queries,), heads=HEADS, dims=(128, 128), query_dtype="float16")
    case = make_format_case(name, shape=shape)
    expected = run(cuda, case)[0]
    last = case.plain.block_table[0, 76 // 16], 76 % 16
    for scale in (1e30, 1e-30, -4.0, np.inf, np.nan):
        case.value.scale[last] = scale
        np.testing.assert_array_equal(run(cuda, case)[0][:-1], expected[:-1])


def test_queries_of_any_magnitude(cuda):
    """Queries of bfloat16 become halves, times a power of two for each row."""
    shape = Shape(heads=HEADS, dims=(64, 64), query_dtype="bfloat16", **DECODE)
    case = make_format_case("float8_e4m3fn", shape=shape)
    exponents = np.random.default_rng(4).integers(-60, -20, case.plain.query.shape[:2])
    case.plain.query[...] = case.plain.query * np.exp2(exponents)[..., None].astype(np.float32)
    case.plain.options["scale"] = 2.0**20
    check(cuda, case)
    case.plain.query[...] = case.plain.query * np.float32(2.0**80)
    case.plain.options["scale"] = 2.0**-60
    check(cuda, case)


@pytest.mark.parametrize("queries", [4, 12], ids=["decode", "prompts"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8_token", "int4_token", "nvfp4", "mxfp8", "fp4_block16"])
def test_nan_reaches_only_the_rows_that_attend_to_it(cuda, name, queries):
    shape = Shape((40, 40), (queries, 1), heads=HEADS, dims=(128, 128), query_dtype="bfloat16")
    case = make_format_case(name, shape=shape)
    block = case.plain.block_table[0, 2]
    # Position 38: the last two queries of the first sequence attend to it.
    if FORMATS[name].group is None or name == "mxfp8":
        case.value.codes[block, 6] = np.nan
    else:
        case.value.scale[block, 6] = 255 if name == "fp4_block16" else np.nan
    out, _ = run(cuda, case)
    rows = np.isnan(out.astype(np.float32)).any((1, 2))
    np.testing.assert_array_equal(rows, [*[False] * (queries - 2), True, True, False])
