"""Chunked local attention: key j is seen by p iff j // C == p // C; against float64 on every instruction set."""

import numpy as np
import pytest

from pagecore import AttentionPlan, ShapeError, UnsupportedOption, paged_attention, plan_attention
from tests.ops.instruction_sets import on_every_isa
from tests.reference.attention import allowed
from tests.reference.attention import paged_attention as reference
from tests.together import together


def case(seed, seq_lens, query_lens, *, heads=(4, 2), dim=64, block_size=16, dtype=np.float32):
    rng = np.random.default_rng(seed)
    blocks = sum(-(-length // block_size) for length in seq_lens)
    key, value = (rng.normal(size=(blocks + 1, block_size, heads[1], dim)).astype(dtype) for _ in range(2))
    order = rng.permutation(np.arange(1, blocks + 1)).tolist()
    table = np.zeros((len(seq_lens), max(1, *(-(-length // block_size) for length in seq_lens))), np.int32)
    for i, length in enumerate(seq_lens):
        for at in range(-(-length // block_size)):
            table[i, at] = order.pop()
    query = rng.normal(size=(sum(query_lens), heads[0], dim)).astype(dtype)
    cu = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return query, key, value, table, np.array(seq_lens, np.int32), cu


def check(arguments, cu, tolerance=2e-5, known=None, **options):
    out, lse = paged_attention(*arguments, cu_query_lens=cu, return_lse=True, **options)
    options.pop("plan", None)
    expected, expected_lse = known or reference(*arguments, cu_query_lens=cu, **options)
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=tolerance, atol=tolerance)


@together("chunk", [1, 4, 7, 16, 64, 100, 129, 1000])
@together("causal", [True, False])
@on_every_isa
def test_chunks_agree_with_the_reference(chunk, causal):
    lens = [(150, 37), (1, 1), (64, 64), (300, 1), (129, 5), (100, 0)]
    *arguments, cu = case(chunk, [n for n, _ in lens], [q for _, q in lens])
    check(arguments, cu, chunk=chunk, causal=causal)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128, 80])
@on_every_isa
def test_prompts_of_half_precision(dtype, dim):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.dtype(getattr(ml_dtypes, dtype)) if dtype == "bfloat16" else np.dtype(dtype)
    *arguments, cu = case(5, [200, 130], [70, 130], dim=dim, dtype=kind)
    out = paged_attention(*arguments, cu_query_lens=cu, chunk=48)
    expected, _ = reference(
        *(np.asarray(each, np.float32) for each in arguments[:3]), *arguments[3:], cu_query_lens=cu, chunk=48
    )
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2e-2, atol=2e-2)


@together("option", ["sinks", "softcap", "alibi", "mask", "plan", "invariant"])
@on_every_isa
def test_chunks_combine_with_other_options(option):
    lens = [(150, 37), (90, 90), (77, 1)]
    *arguments, cu = case(3, [n for n, _ in lens], [q for _, q in lens])
    options = {
        "sinks": {"sinks": np.linspace(-1, 2, 4, dtype=np.float32)},
        "softcap": {"softcap": 5.0},
        "alibi": {"alibi_slopes": np.linspace(0.01, 0.2, 4, dtype=np.float32)},
        "mask": {"mask": np.random.default_rng(0).random(sum(n * q for n, q in lens)) < 0.7},
        "plan": {"plan": plan(cu, arguments[4])},
        "invariant": {"plan": plan(cu, arguments[4], batch_invariant=True)},
    }[option]
    check(arguments, cu, chunk=32, **options)


def plan(cu, lens, **options):
    return plan_attention(cu, lens, **{"num_query_heads": 4, "num_kv_heads": 2, "chunk": 32} | options)


@on_every_isa
def test_keys_of_other_chunks_are_not_read():
    *arguments, cu = case(9, [100], [3])
    for cache in arguments[1:3]:
        blocks = arguments[3][0]
        for token in range(100):
            if token // 40 != 2 or token > 99:
                cache[blocks[token // 16], token % 16] = np.nan
        cache[0] = np.nan
    out = paged_attention(*arguments, cu_query_lens=cu, chunk=40)
    assert np.isfinite(out).all()


def test_worked_example_c2_a_query_sees_its_chunk():
    seen = [np.flatnonzero(row).tolist() for row in allowed(9, 9, chunk=4)]
    assert seen[5] == [4, 5]
    assert seen[8] == [8]


@on_every_isa
def test_worked_example_c3_local_virtual_batches_give_the_same():
    """A sequence cut into its chunks is a batch of sequences that see all keys."""
    query, key, value, _, lens, cu = case(1, [6, 17, 9], [4, 10, 5], block_size=2)
    table = np.zeros((3, 9), np.int32)
    rng = np.random.default_rng(1)
    key, value = (rng.normal(size=(27, 2, 2, 64)).astype(np.float32) for _ in range(2))
    table[:] = np.arange(27).reshape(3, 9)
    out = paged_attention(query, key, value, table, lens, cu_query_lens=cu, chunk=4)
    virtual = np.array([[0, 1], [2, 3], [11, 12], [13, 14], [15, 16], [17, 17], [20, 21], [22, 23]], np.int32)
    virtual_cu = np.concatenate([[0], np.cumsum([2, 2, 1, 4, 4, 1, 4, 1])]).astype(np.int32)
    expected = paged_attention(query, key, value, virtual, [4, 2, 4, 4, 4, 1, 4, 1], cu_query_lens=virtual_cu)
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)


@together(
    ("options", "message"),
    [
        ({"chunk": 0}, "chunk is 0; it must be at least 1"),
        ({"chunk": -4}, "chunk is -4"),
        ({"chunk": "four"}, "chunk is 'four'"),
        ({"chunk": 1.5}, "chunk is 1.5"),
        ({"chunk": [1, 2]}, r"chunk is \[1, 2\]; it counts keys and must be an integer or None"),
        ({"chunk": 4, "window": 4}, "chunk is 4 and window is 4; use one of them"),
    ],
)
def test_invalid_chunks_are_refused(options, message):
    *arguments, cu = case(0, [20], [3])
    out = np.full((3, 4, 64), np.nan, np.float32)
    with pytest.raises(UnsupportedOption, match=message):
        paged_attention(*arguments, cu_query_lens=cu, out=out, **options)
    with pytest.raises(UnsupportedOption, match=message):
        AttentionPlan(num_query_heads=4, num_kv_heads=2, **options)
    assert np.isnan(out).all()


def test_a_plan_for_other_chunks_is_refused():
    *arguments, cu = case(0, [20], [3])
    made = plan(cu, arguments[4])
    assert (made.chunk, made.window) == (32, (-1, -1))
    assert plan(cu, arguments[4], chunk=None).chunk is None
    for options in ({}, {"chunk": 16}, {"window": 32}):
        with pytest.raises(ShapeError, match="the plan is for causal=1 and chunk 32, the call has"):
            paged_attention(*arguments, cu_query_lens=cu, plan=made, **options)


def test_chunks_longer_than_any_sequence_are_none():
    *arguments, cu = case(0, [20], [3])
    for chunk in (2**31 - 1, 2**31, 2**62):
        np.testing.assert_array_equal(
            paged_attention(*arguments, cu_query_lens=cu, chunk=chunk), paged_attention(*arguments, cu_query_lens=cu)
        )
