"""paged_attention with sealed blocks on a CUDA device, against float64 over the dequantised numbers.

Caches have NaN in the place of sealed tokens; sealed planes have NaN in blocks that no sequence has.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pagecore
from tests.cuda.attention_cases import BF16, OPTIONS
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.cuda.sealed_calls import check, expect, plan_of, run
from tests.ops.cases import DTYPES, LAYOUTS, Shape, assert_lse_close, assert_output_close, random_mask
from tests.ops.sealed_cases import SealedCase, keep_sealed, make_sealed_case
from tests.thinning import in_turn

LENS: dict[str, dict[str, Any]] = {
    "prompts": {"seq_lens": (136, 40, 5, 0, 96), "query_lens": (33, 40, 1, 0, 2)},
    "decode": {"seq_lens": (150, 1, 17, 0, 64, 16, 33)},
}
HEADS = (8, 2)


DIMS = [(64, 64), (128, 128), (96, 192), (256, 256), (16, 80)]


@pytest.mark.parametrize(
    ("lens", "dims", "dtype", "bits"), in_turn(LENS, DIMS, over=[DTYPES, [(2, 2), (4, 4), (2, 4)]])
)
def test_sealed_and_new_tokens(cuda, lens, dims, dtype, bits):
    heads = HEADS if max(dims) <= 128 else (4, 2)
    shape = Shape(heads=heads, dims=dims, query_dtype=dtype, cache_dtype=dtype, **LENS[lens])
    check(cuda, make_sealed_case(shape, bits, (16, 16)))


# Dims of an instance and dims that it pads, with rows of values that are not whole units of 16 bytes: 20, 24 and 28.
MATRIX_DIMS = {
    (64, 64): "64,Plain",
    (80, 80): "96,Plain",
    (96, 96): "96,Plain",
    (112, 112): "128,Plain",
    (128, 128): "128,Plain",
    (80, 160): "192,Plain",
    (192, 128): "192,Plain,128",
    (176, 112): "192,Plain,128",
    (192, 192): "192,Plain",
    (224, 240): "256,Plain",
    (256, 256): "256,Plain",
}
EVERY_MATRIX = list(
    itertools.product(MATRIX_DIMS, itertools.product((2, 4), (2, 4)), ["float16", "bfloat16"], ["same", "float32"])
)
ELEMENTS = {"float16": "pc_half", "bfloat16": "pc_bfloat16"}


def check_kernel(cuda: Kit, case: SealedCase, kernel: str, **more: Any) -> None:
    """Check a call, and that a kernel of the emulator has served it."""
    if cuda.is_emulated:
        cuda.runtime.launched.clear()
    check(cuda, case, **more)
    if cuda.is_emulated:
        assert kernel in cuda.runtime.launched


def with_scales(case: SealedCase, *planes: str) -> SealedCase:
    """Return the case with scales of float32."""
    scales = {name: getattr(case.sealed, name).astype(np.float32) for name in planes}
    return replace(case, sealed=case.sealed._replace(**scales))


DECODE = cases(
    [
        ((64, 64), (4, 2), "bfloat16", "same"),
        ((64, 64), (2, 4), "bfloat16", "float32"),
        ((80, 80), (2, 2), "bfloat16", "same"),
        ((80, 80), (4, 4), "bfloat16", "float32"),
        ((96, 96), (2, 4), "bfloat16", "same"),
        ((112, 112), (4, 2), "float16", "float32"),
        ((128, 128), (4, 4), "float16", "same"),
        ((128, 128), (2, 2), "float16", "float32"),
        ((192, 128), (4, 2), "bfloat16", "float32"),
        ((176, 112), (2, 4), "bfloat16", "same"),
        ((224, 240), (2, 4), "bfloat16", "same"),
        ((256, 256), (4, 2), "bfloat16", "float32"),
    ],
    EVERY_MATRIX,
)


@pytest.mark.parametrize(("dims", "bits", "dtype", "scales"), DECODE)
def test_decode_by_matrix_instructions(cuda, dims, bits, dtype, scales):
    """Several queries of a sequence, and groups of two tiles, or of one; values of halves need scales of halves."""
    kernel = f"decode_sealed<{ELEMENTS[dtype]},{MATRIX_DIMS[dims]}>"
    wide = dims[1] if dims[1] % 32 else 32
    blocks = ((32, (32, wide)), (16, (16, 16)), (32, (16, dims[1])))
    for lens in (LENS["decode"], {"seq_lens": (90, 70, 33), "query_lens": (4, 3, 1)}):
        for size, groups in blocks[: 1 if lens is LENS["decode"] and max(dims) > 64 else 3]:
            shape = Shape(heads=(4, 1), dims=dims, block_size=size, query_dtype=dtype, cache_dtype=dtype, **lens)
            case = make_sealed_case(shape, bits, groups)
            if scales == "float32":
                case = with_scales(case, "key_scale", *["value_scale"][: dtype == "bfloat16"])
            check_kernel(cuda, case, kernel)


PROMPTS = cases(
    [
        ((64, 64), (2, 2), "float16", "same"),
        ((64, 64), (4, 4), "bfloat16", "float32"),
        ((80, 80), (2, 2), "bfloat16", "same"),
        ((80, 80), (2, 4), "bfloat16", "float32"),
        ((96, 96), (4, 2), "bfloat16", "same"),
        ((112, 112), (4, 2), "float16", "same"),
        ((128, 128), (4, 4), "float16", "same"),
        ((128, 128), (2, 2), "bfloat16", "float32"),
        ((192, 128), (4, 2), "bfloat16", "float32"),
        ((176, 112), (2, 4), "bfloat16", "same"),
        ((80, 160), (2, 2), "bfloat16", "same"),
        ((192, 192), (4, 4), "bfloat16", "float32"),
        ((224, 240), (2, 4), "bfloat16", "same"),
        ((256, 256), (4, 2), "bfloat16", "float32"),
    ],
    EVERY_MATRIX,
)


@pytest.mark.parametrize(("dims", "bits", "dtype", "scales"), PROMPTS)
def test_prompts_by_matrix_instructions(cuda, dims, bits, dtype, scales):
    """Tiles with sealed rows alone, with rows of both kinds, and with rows of the caches alone; short last tiles."""
    wide = dims[1] if dims[1] % 32 else 32
    blocks = ((48, (16, wide)), (32, (32, 16)), (16, (16, dims[1])))
    for lens in ({"seq_lens": (150, 70, 40), "query_lens": (33, 70, 7)}, {"seq_lens": (130,), "query_lens": (5,)}):
        for size, groups in blocks[: 1 if len(lens["seq_lens"]) == 1 or max(dims) > 128 else 3]:
            shape = Shape(heads=(4, 1), dims=dims, block_size=size, query_dtype=dtype, cache_dtype=dtype, **lens)
            case = make_sealed_case(shape, bits, groups)
            if scales == "float32" and dtype == "bfloat16":
                case = with_scales(case, "key_scale", "value_scale")
            check_kernel(cuda, case, f"prefill_sealed<{ELEMENTS[dtype]},{MATRIX_DIMS[dims]}>")


def test_prompts_of_halves_with_other_scales_are_computed_in_float32(cuda):
    """A scale of float32 can make keys of any magnitude; decode has these keys as bfloat16 times the query."""
    shape = Shape((90, 40), (20, 1), heads=(4, 1), query_dtype="float16", cache_dtype="float16")
    case = make_sealed_case(shape, scale=2.0**-24)
    case.sealed = case.sealed._replace(key_scale=case.sealed.key_scale.astype(np.float32) * np.float32(2.0**20))
    case.key_numbers[...] = case.key_numbers * np.float32(2.0**20)
    for i, length in enumerate(case.sealed.lens):  # the caches hold no such numbers
        case.plain.seq_lens[i] = length
    case.plain.options["cu_query_lens"] = np.array([0, 20, 21], np.int32)
    check(cuda, case)
    if cuda.is_emulated:
        assert {name.partition("<")[0] for name in cuda.runtime.launched} >= {"decode_sealed", "general_sealed"}


def test_scores_and_values_of_any_magnitude(cuda):
    """Keys times scales exceed halves, and queries are small or large."""
    shape = Shape((90, 33, 40), heads=(4, 1), query_dtype="bfloat16", cache_dtype="bfloat16")
    for power in (-40, 30):
        case = make_sealed_case(shape, scale=2.0**-power / 8)
        factor = np.float32(2.0**power)
        case.sealed.key_scale[...] = case.sealed.key_scale * factor
        for numbers in (case.key_numbers, case.plain.key_cache):
            numbers[...] = numbers * factor
        check(cuda, case)


@pytest.mark.parametrize("query_lens", [(4, 3, 1), (20, 70, 5)])
@pytest.mark.parametrize("bits", [2, 4])
def test_the_largest_values_of_halves_stay_finite(cuda, bits, query_lens):
    """The rounded scale of a group from -1 to 65504 reads its last value as 65567 or more."""
    lens = {"seq_lens": (90, 70, 33), "query_lens": query_lens}
    shape = Shape(heads=(4, 1), dims=(64, 64), block_size=16, query_dtype="float16", cache_dtype="float16", **lens)
    case = make_sealed_case(shape, (bits, bits), (16, 16))
    case.sealed.value[...] = -1  # the largest codes
    case.sealed.value_scale[...] = 0
    case.sealed.value_scale[:, 0] = [{2: 21856, 4: 4372}[bits], -1]
    for numbers in (case.value_numbers, case.plain.value_cache):
        numbers[...] = 0
        numbers[:, 0] = 65504
    check(cuda, case)


@pytest.mark.parametrize("bits", [2, 4])
def test_nan_reaches_only_the_rows_that_attend_to_it(cuda, bits):
    """Token 28 is in the window of the first two queries, at 66 and 67, and its tile in that of all four."""
    shape = Shape((70, 40), (4, 1), heads=(4, 1), query_dtype="bfloat16", cache_dtype="bfloat16")
    case = make_sealed_case(shape, (bits, bits), window=40)
    block = case.sealed.block_table[0, 1]
    expected = run(cuda, case)[0]
    for number in (0, 1):  # the scale, and the least number
        case.sealed.value_scale[block, 12, 0, 1, number] = [np.nan, np.inf][number]
        out = run(cuda, case)[0].astype(np.float32)
        rows = ~np.isfinite(out).all((1, 2))
        np.testing.assert_array_equal(rows, [True, True, False, False, False])
        np.testing.assert_allclose(out[:2, :, :32], expected[:2, :, :32].astype(np.float32), atol=0.02)
        case.sealed.value_scale[block, 12, 0, 1, number] = 0.5
    case.sealed.key_scale[block, 0, 0, 0, 3] = np.nan  # of tokens 16 to 31
    rows = np.isnan(run(cuda, case)[0].astype(np.float32)).any((1, 2))
    np.testing.assert_array_equal(rows, [True, True, True, True, False])


@pytest.mark.parametrize("bits", [2, 4])
def test_nan_in_a_sealed_block_reaches_only_the_rows_of_a_prompt_that_attend_to_it(cuda, bits):
    """Token 45 is in the windows of queries 70 to 84, and tokens 32 to 47 in those of 70 to 86."""
    shape = Shape((90, 40), (20, 7), heads=(4, 1), query_dtype="bfloat16", cache_dtype="bfloat16")
    case = make_sealed_case(shape, (bits, bits), window=40)
    block = case.sealed.block_table[0, 2]
    expected = run(cuda, case)[0]
    for number in (0, 1):  # the scale, and the least number
        case.sealed.value_scale[block, 13, 0, 1, number] = [np.nan, np.inf][number]
        out = run(cuda, case)[0].astype(np.float32)
        rows = ~np.isfinite(out).all((1, 2))
        np.testing.assert_array_equal(rows, np.arange(27) < 15)
        np.testing.assert_allclose(out[:20, :, :32], expected[:20, :, :32].astype(np.float32), atol=0.02)
        case.sealed.value_scale[block, 13, 0, 1, number] = 0.5
    case.sealed.key_scale[block, 0, 0, 0, 3] = np.nan
    rows = np.isnan(run(cuda, case)[0].astype(np.float32)).any((1, 2))
    np.testing.assert_array_equal(rows, np.arange(27) < 17)


@pytest.mark.parametrize("lens", LENS)
def test_groups_and_block_sizes(cuda, lens):
    """Groups of 4 tokens within a word of 2 bits; blocks of 8 tokens, half a tile; groups of 48 channels."""
    shape = Shape(heads=(3, 1), dims=(80, 96), block_size=48, cache_dtype="float16", **LENS[lens])
    check(cuda, make_sealed_case(shape, (2, 4), (4, 48)))
    check(cuda, make_sealed_case(replace(shape, block_size=8), (4, 2), (8, 96)))
    check(cuda, make_sealed_case(replace(shape, block_size=32), (4, 2), (32, 16)))


def test_large_dims(cuda):
    shape = Shape(heads=HEADS, dims=(512, 512), query_dtype="bfloat16", cache_dtype="bfloat16", **LENS["decode"])
    check(cuda, make_sealed_case(shape))


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")], ids=str)
def test_queries_and_caches_of_different_dtypes(cuda, dtypes):
    for lens in LENS.values():
        check(cuda, make_sealed_case(Shape(heads=HEADS, query_dtype=dtypes[0], cache_dtype=dtypes[1], **lens)))


CHOSEN = {name: options for name, options in OPTIONS.items() if "mask" not in options}


@pytest.mark.parametrize(("option", "lens"), in_turn(CHOSEN, over=[LENS]))
def test_options_count_in_positions_of_the_whole_sequence(cuda, option, lens):
    shape = Shape(heads=HEADS, query_dtype="bfloat16", cache_dtype="bfloat16", **LENS[lens])
    check(cuda, make_sealed_case(shape, **OPTIONS[option]))


@pytest.mark.parametrize("lens", LENS)
def test_masks(cuda, lens):
    shape = Shape(heads=HEADS, cache_dtype="bfloat16", **LENS[lens])
    check(cuda, make_sealed_case(shape, mask=random_mask(shape), window=100))


@pytest.mark.parametrize("queries", [1, 20])
def test_selections_of_tokens_and_blocks(cuda, queries):
    """Selected tokens of one tile are in sealed blocks and in the caches."""
    shape = Shape((96, 150), (queries, 1), heads=HEADS, cache_dtype="float16")
    case = make_sealed_case(shape)
    tokens = np.array([[0, 3, 5, 40, 60, 75], [1, 2, 90, 131, 147, -1]])
    for unit, listed in ((1, tokens), (16, np.array([[0, 2, 4], [1, 9, -1]]))):
        mask = [np.zeros((rows, length), bool) for rows, length in ((queries, 96), (1, 150))]
        for part, row in zip(mask, listed, strict=True):
            for entry in row[row >= 0]:
                part[:, entry * unit : entry * unit + unit] = True
        lists = np.repeat(listed[:, None], 2, 1).astype(np.int32)
        out, lse = run(cuda, case, **{"indices" if unit == 1 else "blocks": lists})
        expected = expect(case, mask=np.concatenate([part.reshape(-1) for part in mask]))
        assert_output_close(out, expected[0])
        assert_lse_close(lse, expected[1], "float32")


SELECTED = cases(
    [((64, 64), (4, 2), 16), ((48, 64), (2, 4), 32)],
    list(itertools.product(((64, 64), (96, 80), (192, 128), (256, 256)), ((4, 2), (2, 4)), (16, 32))),
)


@pytest.mark.parametrize(("dims", "bits", "size"), SELECTED)
def test_blocks_selected_for_matrix_instructions(cuda, dims, bits, size):
    """Lists that differ between key heads, of sealed blocks alone, of blocks of the caches alone, and of both."""
    shape = Shape((200, 150, 40), (3, 1, 2), heads=(4, 2), dims=dims, block_size=size, **BF16)
    case = make_sealed_case(shape, bits, (16, 16))
    case = keep_sealed(case, 0, 128)
    rng = np.random.default_rng(0)
    cu = case.plain.options["cu_query_lens"]
    counts = np.array([[4, 3], [1, 2], [1, 0]], np.int32)
    lists = np.full((3, 2, 5), -1, np.int32)
    for (i, head), count in np.ndenumerate(counts):
        lists[i, head, :count] = np.sort(rng.permutation(-(-int(case.plain.seq_lens[i]) // size))[:count])
    lists[0, 1, :3] = [128 // size - 1, 128 // size, 199 // size]
    results = [run(cuda, case, blocks=lists, **more) for more in ({}, {"block_counts": counts})]
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    out, lse = results[0]
    if cuda.is_emulated:
        dim = 64 if max(dims) <= 64 else 128 if max(dims) <= 128 else 256
        assert f"decode_sealed<pc_bfloat16,{dim},Selected>" in cuda.runtime.launched
    for head in range(2):
        parts = []
        for i, length in enumerate(case.plain.seq_lens):
            part = np.zeros((cu[i + 1] - cu[i], int(length)), bool)
            for entry in lists[i, head, : counts[i, head]]:
                part[:, entry * size : (entry + 1) * size] = True
            parts.append(part.reshape(-1))
        expected = expect(case, mask=np.concatenate(parts))
        assert_output_close(out[:, 2 * head : 2 * head + 2], expected[0][:, 2 * head : 2 * head + 2])
        assert_lse_close(lse[:, 2 * head : 2 * head + 2], expected[1][:, 2 * head : 2 * head + 2], "bfloat16")


@pytest.mark.parametrize("queries", [4, 30])
def test_trees_of_drafts(cuda, queries):
    parents = [-1, 0, 0, *range(2, queries - 1)]
    case = make_sealed_case(Shape((70,), (queries,), heads=HEADS, cache_dtype="bfloat16"))
    bits = pagecore.tree_mask(parents)
    mask = np.zeros((queries, 70), bool)
    mask[:, : 70 - queries] = True
    for row in range(queries):
        token = row
        while token >= 0:
            mask[row, 70 - queries + token] = True
            token = parents[token]
    out, lse = run(cuda, case, tree_mask=bits)
    expected = expect(case, mask=mask.reshape(-1))
    assert_output_close(out, expected[0])
    assert_lse_close(lse, expected[1], "float32")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(cuda, layout):
    shape = Shape(heads=HEADS, layout=layout, shuffle_rows=True, index_dtype="int64", **LENS["decode"])
    case = make_sealed_case(shape, (2, 4))
    sealed = case.sealed
    case.sealed = sealed._replace(
        key=np.ascontiguousarray(sealed.key.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3),
        value=np.ascontiguousarray(sealed.value.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        key_scale=np.ascontiguousarray(sealed.key_scale[:, ::-1])[:, ::-1],
        value_scale=np.asfortranarray(sealed.value_scale),
    )
    check(cuda, case)


@pytest.mark.slow
@pytest.mark.parametrize("planned", [{}, {"batch_invariant": True}], ids=["plan", "batch-invariant"])
def test_plans_and_splits(cuda, planned):
    """Items begin within sealed blocks, and end within them."""
    shape = Shape(
        seq_lens=(1300, 2100), query_lens=(1, 3), heads=(4, 1), query_dtype="bfloat16", cache_dtype="bfloat16"
    )
    check(cuda, make_sealed_case(shape), planned=planned)


@pytest.mark.slow
def test_a_row_of_a_batch_invariant_call_has_the_same_bits_alone_and_split(cuda):
    shape = Shape(seq_lens=(1300, 70), query_lens=(3, 20), heads=(4, 1), query_dtype="bfloat16", cache_dtype="bfloat16")
    case = make_sealed_case(shape)
    outs = [run(cuda, case, plan=plan_of(cuda, case, batch_invariant=True, num_workers=n))[0] for n in (1, 12)]
    np.testing.assert_array_equal(*outs)
