"""paged_attention on CUDA arrays: decode, and the general kernel, which serves what the matrix kernels do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagecore import paged_attention
from pagecore.arrays import strided
from pagecore.errors import UnsupportedOption
from pagecore.ops import AttentionPlan, plan_attention
from tests.cuda.attention_cases import BF16, DeviceCase, check, compare
from tests.cuda.matrix import cases
from tests.ops.cases import LAYOUTS, Case, Shape, make_case, random_mask
from tests.reference import attention as reference

F16 = {"query_dtype": "float16", "cache_dtype": "float16"}
F32 = {"query_dtype": "float32", "cache_dtype": "float32"}
# Lengths around the ends of tiles of 8 and 16 keys, of rounds of 32 and 64 keys, and of the shortest splits.
LENS = (0, 1, 11, 12, 15, 16, 17, 63, 64, 65, 99, 257)
DECODE = Shape(seq_lens=(300, 33, 0, 129), heads=(8, 2), **BF16)
DRAFTS = replace(DECODE, seq_lens=(70, 33, 1, 300), query_lens=(4, 2, 1, 3))
GENERAL = replace(DECODE, **F32)
SHAPES = {"decode": DECODE, "drafts": DRAFTS, "general": GENERAL, "general drafts": replace(DRAFTS, **F32)}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=lambda dtype: dtype["cache_dtype"])

SINKS = np.linspace(-2, 3, 8, dtype=np.float32)
SLOPES = (2.0 ** -np.arange(1, 9)).astype(np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "not causal": {"causal": False},
    "window": {"window": 33},
    "both sides": {"causal": False, "window": (40, 9)},
    "sinks": {"sinks": SINKS},
    "sinks far from the scores": {"sinks": 100 * SINKS},
    "scales": {"key_scale": np.array([0.5, 2.0], np.float32), "value_scale": 0.7, "scale": 0.2},
    "negative scale": {"scale": -0.1},
    "zero scale": {"scale": 0.0},
    "negative scale of keys": {"key_scale": np.array([-0.5, 2.0], np.float32)},
    "softcap": {"softcap": 30.0},
    "strong softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": SLOPES},
    "mask": {"mask": None},
    "everything": {
        "causal": False,
        "window": (50, 3),
        "sinks": SINKS,
        "softcap": 20.0,
        "alibi_slopes": SLOPES,
        "mask": None,
        "key_scale": np.array([0.5, 2.0], np.float32),
        "value_scale": np.array([0.7, 1.3], np.float32),
    },
}


def case_of(shape: Shape, options: dict[str, Any], seed: int = 0) -> Case:
    """Return a case; a mask of None becomes a random mask of the right size."""
    options = {name: random_mask(shape) if name == "mask" else value for name, value in options.items()}
    return make_case(shape, seed=seed, **options)


@EVERY_DTYPE
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("group", cases([1, 4, 5, 8, 16], [1, 2, 4, 5, 6, 7, 8, 16]))
def test_groups_and_head_dims(cuda, dim, group, dtype):
    check(cuda, make_case(Shape(seq_lens=(70, 17, 300), heads=(2 * group, 2), dims=(dim, dim), **dtype)))
    if cuda.is_emulated:
        element = {"bfloat16": "pc_bfloat16", "float16": "pc_half"}.get(dtype["cache_dtype"])
        name = f"general<{dim},Plain>" if element is None else f"decode<{element},{dim},Plain>"
        assert cuda.runtime.launched[-1] == name


@EVERY_DTYPE
@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 17, 64])
def test_lengths_around_the_ends_of_tiles_and_blocks(cuda, block_size, dtype):
    check(cuda, make_case(Shape(seq_lens=LENS, heads=(4, 1), block_size=block_size, **dtype)))


@pytest.mark.parametrize("name", OPTIONS)
@EVERY_SHAPE
def test_every_option_keeps_the_bounds(cuda, shape, name):
    check(cuda, case_of(shape, OPTIONS[name]))


@pytest.mark.parametrize("layout", LAYOUTS)
@EVERY_SHAPE
def test_every_layout(cuda, shape, layout):
    check(cuda, make_case(replace(shape, layout=layout, index_dtype="int64", shuffle_rows=True)))


@pytest.mark.parametrize("layouts", [("NHD", "HND"), ("HND", "blockwise"), ("interleaved", "NHD")], ids=str)
@pytest.mark.parametrize(
    "shape", [*SHAPES.values(), replace(DRAFTS, query_lens=(40, 2, 1, 3))], ids=[*SHAPES, "prompts"]
)
def test_keys_and_values_of_different_layouts(cuda, shape, layouts):
    key, value = (make_case(replace(shape, layout=layout)) for layout in layouts)
    check(cuda, replace(key, value_cache=value.value_cache))


@pytest.mark.parametrize("num_workers", [1, 3, 64])
@EVERY_SHAPE
def test_any_number_of_workers(cuda, shape, num_workers):
    case = make_case(replace(shape, seq_lens=(300, 33, 1, 700)), sinks=SINKS, window=600)
    check(cuda, case, plan=True, num_workers=num_workers)


@EVERY_DTYPE
@pytest.mark.parametrize("query_len", [2, 3, 4, 5, 8, 16])
def test_drafts(cuda, query_len, dtype):
    heads = (16 // query_len, 1)
    shape = Shape(seq_lens=(99, 16, 300), query_lens=(query_len, query_len, 1), heads=heads, **dtype)
    check(cuda, make_case(shape))
    check(cuda, make_case(shape, mask=random_mask(shape), causal=False))


@EVERY_SHAPE
def test_padding_rows_are_cleared(cuda, shape):
    case = make_case(replace(shape, query_lens=shape.query_lens or (1,) * 4, padding=5), sinks=SINKS)
    check(cuda, case)
    check(cuda, case, on_host=("seq_lens", "cu_query_lens"))  # the general kernel alone


@EVERY_SHAPE
def test_rows_with_a_sink_and_no_keys_have_the_sink_as_lse(cuda, shape):
    case = make_case(replace(shape, seq_lens=(0, 4), query_lens=(2, 2)), sinks=SINKS, window=1)
    out, lse = DeviceCase(cuda, case).run()
    np.testing.assert_array_equal(lse[:2], np.broadcast_to(SINKS, (2, 8)))
    assert (out[:2] == 0).all()


@EVERY_SHAPE
def test_indices_in_strides(cuda, shape):
    case = make_case(replace(shape, shuffle_rows=True, index_dtype="int64", query_lens=shape.query_lens or (1,) * 4))
    for name in ("rows", "cu_query_lens"):
        case.options[name] = np.repeat(case.options[name], 3)[::3]
    case.seq_lens = np.repeat(case.seq_lens, 2)[::2]
    check(cuda, case)


@EVERY_DTYPE
def test_outputs_and_queries_in_strides(cuda, dtype):
    case = make_case(replace(DECODE, **dtype))
    case.query = np.repeat(case.query, 2, axis=1)[:, ::2]
    there = DeviceCase(cuda, case)
    wide = cuda.empty((4, 2, 8, 64), dtype["query_dtype"])
    out, lse = there.run(out=wide[:, 1])
    compare(case, (out, lse))
    assert (cuda.get(wide)[:, 0].view(np.uint8) == 0xFF).all()


@pytest.mark.parametrize("place", [(512, 64, 1), (513, 64, 0), (528, 65, 0)], ids=["offset", "token", "head"])
def test_an_output_of_the_general_path_may_lie_anywhere(cuda, place):
    token, head, offset = place
    out = strided(cuda.empty((4 * 600,)), (4, 8, 64), (4 * token, 4 * head, 4), 4 * offset)
    case = make_case(GENERAL)
    compare(case, DeviceCase(cuda, case).run(out=out))


GENERAL_DIMS = [(100, 100), (72, 41), (5, 3), (1, 1), (300, 64), (512, 512)]  # of any dtype


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [*((dims, dtype) for dims in GENERAL_DIMS for dtype in (BF16, F16, F32)), ((80, 80), F32), ((192, 128), F32)],
    ids=str,
)
def test_head_dims_of_the_general_path(cuda, dims, dtype):
    check(cuda, make_case(Shape(seq_lens=(37, 5, 130), heads=(4, 2), dims=dims, **dtype)))
    if cuda.is_emulated:
        assert cuda.runtime.launched[-1].startswith("general<")


def test_a_head_dim_that_is_not_served_is_refused(cuda):
    with pytest.raises(UnsupportedOption, match=r"head_dim is 520; .* at most 512.* by latent_attention"):
        check(cuda, make_case(Shape(seq_lens=(3,), dims=(64, 520))))


@pytest.mark.parametrize("query_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")], ids=str)
def test_query_key_and_value_of_different_types(cuda, query_dtype, dtypes):
    key, value = (make_case(replace(DRAFTS, query_dtype=query_dtype, cache_dtype=dtype)) for dtype in dtypes)
    check(cuda, Case(key.query, key.key_cache, value.value_cache, key.block_table, key.seq_lens, key.options))


@pytest.mark.parametrize("shape", [DRAFTS, replace(DRAFTS, **F32)], ids=["decode", "general"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("plane", ["key_cache", "value_cache"])
@pytest.mark.parametrize(("how", "place"), [("causal", 299), ("window", 295), ("mask", 120)])
def test_a_nan_in_the_cache_reaches_only_the_queries_that_attend_to_it(cuda, shape, bad, plane, how, place):
    shape = replace(shape, seq_lens=(300,), query_lens=(4,))
    options = {"causal": how == "causal"}
    options |= {"window": (2, 1)} if how == "window" else {}
    if how == "mask":
        options["mask"] = np.random.default_rng(1).random(4 * 300) < 0.6
        options["mask"].reshape(4, 300)[:, place] = [True, False, False, True]
    case = make_case(shape, **options)
    clean = DeviceCase(cuda, case).run()
    cache = getattr(case, plane)
    cache[case.block_table[0, place // 16], place % 16, :, 5] = bad
    mask = options["mask"].reshape(4, 300) if how == "mask" else None
    reached = reference.allowed(4, 300, causal=options["causal"], window=options.get("window"), mask=mask)[:, place]
    assert 0 < reached.sum() < 4
    out, lse = DeviceCase(cuda, case).run()
    bad_columns = ~np.isfinite(out.astype(np.float32))
    assert not bad_columns[~reached].any()
    if plane == "value_cache":  # only the dim of the NaN
        assert bad_columns[reached][..., 5].all()
        assert not np.delete(bad_columns[reached], 5, axis=-1).any()
    elif np.isnan(bad):
        assert bad_columns[reached].all()
    np.testing.assert_array_equal(out[~reached], clean[0][~reached])
    np.testing.assert_array_equal(lse[~reached], clean[1][~reached])


def test_a_nan_that_only_the_second_of_two_queries_attends_to(cuda):
    case = make_case(replace(DRAFTS, seq_lens=(300,), query_lens=(2,)))
    case.value_cache[case.block_table[0, 299 // 16], 299 % 16] = np.nan
    out, _ = DeviceCase(cuda, case).run()
    assert np.isnan(out.astype(np.float32)).any(axis=(1, 2)).tolist() == [False, True]


@pytest.mark.parametrize("plane", ["key_cache", "value_cache"])
def test_a_cache_of_the_general_path_may_begin_anywhere(cuda, plane):
    case = make_case(GENERAL)
    cache = getattr(case, plane)
    moved = np.full(cache.size + 1, np.nan, cache.dtype)[1:].reshape(cache.shape)
    moved[...] = cache
    check(cuda, replace(case, **{plane: moved}))


@EVERY_SHAPE
def test_invalid_indices_cause_no_access_outside(cuda, shape):
    """Blocks, rows and lengths of any value: the result is undefined, and no access lies outside of the arrays."""
    case = make_case(replace(shape, query_lens=shape.query_lens or (1,) * 4, shuffle_rows=True))
    for cache in (case.key_cache, case.value_cache):
        cache[np.isnan(cache.astype(np.float32))] = 0
    case.block_table = np.random.default_rng(0).integers(-(2**31), 2**31 - 1, case.block_table.shape).astype(np.int32)
    case.block_table[:, 1] = 2
    case.block_table[:, 2] = len(case.key_cache)
    there = DeviceCase(cuda, case)
    plan = there.plan()
    wrong = {
        "rows": np.array([-1, len(case.block_table), 2**31 - 1, 2], np.int32),
        "seq_lens": np.array([2**31 - 1, -5, 30, 10**6], np.int32),
        "cu_query_lens": np.array([-3, 4, 10**6, 2, 10], np.int32),
    }
    for names in (["rows"], ["seq_lens"], ["cu_query_lens"], list(wrong)):
        out, _ = there.run(plan=plan, **{name: cuda.put(wrong[name]) for name in names})
        assert out.shape == there.shape


@EVERY_SHAPE
def test_a_block_that_the_cache_does_not_have_is_the_null_block(cuda, shape):
    case = make_case(replace(shape, index_dtype="int64"))
    for cache in (case.key_cache, case.value_cache):
        cache[np.isnan(cache.astype(np.float32))] = 0
    got = []
    for block in (0, 2**32 + case.block_table[1, 0], -1):
        case.block_table[0, :2] = block
        got.append(DeviceCase(cuda, case).run()[0].astype(np.float32))
        np.testing.assert_array_equal(got[0], got[-1])


@EVERY_SHAPE
def test_a_plan_of_more_queries_or_sequences_than_the_call_causes_no_access_outside(cuda, shape):
    case = make_case(replace(shape, query_lens=(4, 2, 3, 1)))
    there = DeviceCase(cuda, case)
    heads = {"num_query_heads": shape.heads[0], "num_kv_heads": shape.heads[1], "device": cuda.device}
    plan = AttentionPlan(**heads, max_sequences=4, max_tokens=10)
    plan_attention(case.options["cu_query_lens"], case.seq_lens, **heads, out=plan)
    for num_tokens in (9, 5, 1):
        there.arrays["query"] = cuda.put(case.query[:num_tokens])
        assert there.run(out=None, plan=plan)[0].shape[0] == num_tokens
    for name, array in (("seq_lens", case.seq_lens), ("block_table", case.block_table)):
        there.arrays[name] = cuda.put(array[:1])
    there.arrays["cu_query_lens"] = cuda.put(case.options["cu_query_lens"][:2])
    # Only a graph can run with a plan of other sequences: a direct call would refuse it.
    out = cuda.empty((1, *there.shape[1:]), str(case.query.dtype))
    cuda.capture(lambda stream: paged_attention(**there.arrays, out=out, plan=plan, stream=stream))()


@EVERY_SHAPE
@pytest.mark.parametrize("more", [1, 200])
def test_a_plan_of_longer_sequences_serves_shorter_ones(cuda, shape, more):
    case = make_case(shape)
    longer = replace(case, seq_lens=case.seq_lens + more)
    compare(case, DeviceCase(cuda, case).run(plan=DeviceCase(cuda, longer).plan()))


def test_without_out_the_result_has_the_type_of_the_query(cuda):
    there = DeviceCase(cuda, make_case(DECODE))
    out = paged_attention(**there.arrays)
    assert out.shape == there.shape
    assert str(out.dtype) == "bfloat16"
