"""Sink tokens: key j is seen by p iff j < S or p - W < j <= p; against float64 on every instruction set."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pagecore
from pagecore import AttentionPlan, ShapeError, UnsupportedOption, paged_attention, plan_attention
from pagecore.errors import InvalidBlock
from tests.ops.cases import Shape, make_case, random_mask
from tests.ops.instruction_sets import on_every_isa
from tests.ops.test_chunked_attention import case, check
from tests.reference.attention import allowed
from tests.reference.attention import paged_attention as reference
from tests.together import together

LENS = [(150, 37), (1, 1), (64, 64), (300, 1), (129, 5), (100, 0), (3, 3), (20, 20)]


@functools.cache
def known_case(seed):
    return case(seed, [n for n, _ in LENS], [q for _, q in LENS])


@functools.cache
def known_results(sink_tokens, window, causal):
    """Results of the oracle, which every instruction set shares."""
    *arguments, cu = known_case(sink_tokens)
    return reference(*arguments, cu_query_lens=cu, sink_tokens=sink_tokens, window=window, causal=causal)


@pytest.mark.slow
@together("sink_tokens", [1, 4, 16, 63, 64, 70, 500])
@together("window", [1, 8, 64, 90, (30, 7)])
@on_every_isa
def test_sink_tokens_agree_with_the_reference(sink_tokens, window):
    for causal in (True, False):
        *arguments, cu = known_case(sink_tokens)
        options = {"sink_tokens": sink_tokens, "window": window, "causal": causal}
        check(arguments, cu, known=known_results(**options), **options)


@together("dtype", ["float16", "bfloat16"])
@together("dim", [64, 128, 80])
@on_every_isa
def test_half_precision(dtype, dim):
    for query_lens in ((70, 130, 1), (1, 1, 1)):
        shape = Shape(
            (200, 130, 700),
            query_lens,
            heads=(8, 2),
            dims=(dim, dim),
            query_dtype=dtype,
            cache_dtype=dtype,
        )
        make_case(shape, window=50, sink_tokens=4).check()


@together("format", ["float8_e4m3fn", "int8_token", "int4_token", "nvfp4", "mxfp8"])
@on_every_isa
def test_quantised_caches(format):
    rng = np.random.default_rng(0)
    planes = [rng.standard_normal((12, 16, 2, 64)).astype(np.float32) for _ in range(2)]
    factor = {} if "float8_e" not in format else {"scale": 0.5}
    coded = [pagecore.quantize(plane, format, **factor) for plane in planes]
    numbers = [pagecore.dequantize(codes, format, scales, **factor) for codes, scales in coded]
    query = rng.standard_normal((6, 4, 64)).astype(np.float32)
    table, lens, cu = rng.permutation(12)[None], [190], [0, 6]
    options = {"cu_query_lens": cu, "window": 40, "sink_tokens": 5}
    scales = {
        f"{name}_scale": each[1] if not factor else 0.5 for name, each in zip(("key", "value"), coded, strict=True)
    }
    got = paged_attention(query, coded[0][0], coded[1][0], table, lens, **options, **scales)
    expected, _ = reference(query, *(np.asarray(each) for each in numbers), table, lens, **options)
    np.testing.assert_allclose(got, expected, rtol=2e-2, atol=2e-2)


OPTIONS = {
    "sinks": {"sinks": np.linspace(-1, 2, 4, dtype=np.float32)},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": np.linspace(-0.1, 0.2, 4, dtype=np.float32)},
    "mask": {"mask": np.random.default_rng(0).random(150 * 37 + 90 * 90 + 77) < 0.7},
}


@together("option", OPTIONS)
@together("planned", [None, False, True])
@on_every_isa
def test_sink_tokens_combine_with_other_options(option, planned):
    lens = [(150, 37), (90, 90), (77, 1)]
    *arguments, cu = case(3, [n for n, _ in lens], [q for _, q in lens])
    options = dict(OPTIONS[option])
    if planned is not None:
        options["plan"] = plan(cu, arguments[4], batch_invariant=planned)
    check(arguments, cu, window=32, sink_tokens=6, **options)


def plan(cu, lens, **options):
    given = {"num_query_heads": 4, "num_kv_heads": 2, "window": 32, "sink_tokens": 6} | options
    return plan_attention(cu, lens, **given)


def test_worked_example_c6_a_query_sees_sinks_and_window():
    assert np.flatnonzero(allowed(1, 20, window=8, sink_tokens=4)[0]).tolist() == [*range(4), *range(12, 20)]


@on_every_isa
def test_keys_between_sinks_and_window_are_not_read():
    """Blocks of the hole may be any block of the cache, and even of none."""
    *arguments, cu = case(9, [100], [3])
    _, key, value, table, _ = arguments
    seen = allowed(3, 100, window=20, sink_tokens=5).any(axis=0)
    for cache in (key, value):
        for token in np.flatnonzero(~seen):
            cache[table[0, token // 16], token % 16] = np.nan
    out = paged_attention(*arguments, cu_query_lens=cu, window=20, sink_tokens=5)
    assert np.isfinite(out).all()
    for garbage in (0, -7, 10**6):
        table[0, 1:4] = garbage
        again = paged_attention(*arguments, cu_query_lens=cu, window=20, sink_tokens=5)
        np.testing.assert_array_equal(again, out)
    table[0, 0] = -1
    with pytest.raises(InvalidBlock, match=r"block_table\[0, 0\] is -1"):
        paged_attention(*arguments, cu_query_lens=cu, window=20, sink_tokens=5)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_batch_keeps_the_bounds(data):
    lens = data.draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), min_size=1, max_size=4))
    shape = Shape(
        [n for n, _ in lens],
        data.draw(st.sampled_from([None, [q for _, q in lens]])),
        heads=data.draw(st.sampled_from([(2, 2), (6, 2), (16, 1)])),
        dims=(64, 64),
        block_size=data.draw(st.integers(1, 40)),
        query_dtype=data.draw(st.sampled_from(["float32", "bfloat16"])),
        cache_dtype="bfloat16",
    )
    options = {
        "window": data.draw(st.one_of(st.integers(1, 150), st.tuples(st.integers(0, 90), st.integers(0, 9)))),
        "sink_tokens": data.draw(st.integers(0, 150)),
        "causal": data.draw(st.booleans()),
    }
    if data.draw(st.booleans()):
        options["mask"] = random_mask(shape, density=0.8)
    made = make_case(shape, seed=data.draw(st.integers(0, 2**20)), **options)
    kinds = {name: value for name, value in options.items() if name != "mask"}
    plans = {
        "num_query_heads": shape.heads[0],
        "num_kv_heads": shape.heads[1],
        "num_workers": data.draw(st.sampled_from([1, 3, 64])),
        "batch_invariant": data.draw(st.booleans()),
    }
    made.check(plan=plan_attention(made.options.get("cu_query_lens"), made.seq_lens, **plans, **kinds))
    made.check()


@together("sizes", [(1,) * 4 + (66,), (33, 37), (69, 1)])
@on_every_isa
def test_invariant_bits_do_not_depend_on_the_steps_of_a_prompt(sizes):
    shape = Shape((2600,), (70,), heads=(4, 1), dims=(64, 64), query_dtype="bfloat16", cache_dtype="bfloat16")
    whole = make_case(shape, window=1100, sink_tokens=9)
    kinds = {"num_query_heads": 4, "num_kv_heads": 1, "window": 1100, "sink_tokens": 9, "batch_invariant": True}

    def run(rows, length):
        cu = np.array([0, rows.stop - rows.start], np.int32)
        arrays = (whole.query[rows], whole.key_cache, whole.value_cache, whole.block_table)
        made = plan_attention(cu, [length], **kinds)
        options = {"cu_query_lens": cu, "window": 1100, "sink_tokens": 9}
        return np.asarray(paged_attention(*arrays, [length], plan=made, **options)).view(np.uint16)

    expected, begin = run(slice(0, 70), 2600), 0
    for size in sizes:
        rows = slice(begin, begin + size)
        np.testing.assert_array_equal(run(rows, 2530 + begin + size), expected[rows])
        begin += size


@together(
    ("options", "message"),
    [
        ({"sink_tokens": -1, "window": 4}, "sink_tokens is -1; it must be at least 0"),
        ({"sink_tokens": 1.5, "window": 4}, "sink_tokens is 1.5"),
        ({"sink_tokens": "four", "window": 4}, "sink_tokens is 'four'"),
        ({"sink_tokens": [4], "window": 4}, r"sink_tokens is \[4\]; it counts keys and must be an integer or None"),
        ({"sink_tokens": 4}, "sink_tokens is 4 and the window is unbounded to the left"),
        ({"sink_tokens": 4, "window": (None, 3)}, "sink_tokens is 4 and the window is unbounded to the left"),
        ({"sink_tokens": 4, "chunk": 4}, "sink_tokens is 4 and chunk is 4; sink tokens belong to a window"),
    ],
)
def test_invalid_sink_tokens_are_refused(options, message):
    *arguments, cu = case(0, [20], [3])
    out = np.full((3, 4, 64), np.nan, np.float32)
    with pytest.raises(UnsupportedOption, match=message):
        paged_attention(*arguments, cu_query_lens=cu, out=out, **options)
    with pytest.raises(UnsupportedOption, match=message):
        AttentionPlan(num_query_heads=4, num_kv_heads=2, **options)
    assert np.isnan(out).all()


def test_a_selection_lists_the_sinks_itself():
    *arguments, cu = case(0, [20], [3])
    with pytest.raises(UnsupportedOption, match="sink_tokens is 4 and blocks is given"):
        paged_attention(*arguments, cu_query_lens=cu, window=4, sink_tokens=4, blocks=np.zeros((1, 2, 1), np.int32))


def test_a_plan_for_other_sink_tokens_is_refused():
    *arguments, cu = case(0, [20], [3])
    made = plan(cu, arguments[4])
    assert (made.sink_tokens, made.window) == (6, (31, -1))
    for options in ({}, {"sink_tokens": 5}, {"sink_tokens": 0}):
        with pytest.raises(ShapeError, match=r"and window \(31, -1\) with 6 sink tokens, the call has"):
            paged_attention(*arguments, cu_query_lens=cu, plan=made, window=32, **options)


def test_a_plan_reads_sinks_and_window_only():
    """A decode step of a long sequence has S + W keys, of which the items name those of the window."""
    made = plan_attention(None, [100_000], num_query_heads=4, num_kv_heads=1, window=1024, sink_tokens=4)
    assert (made.items["key_end"] - made.items["key_begin"]).sum() == 1024
