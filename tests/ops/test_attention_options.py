"""Every option of paged_attention against the float64 oracle, alone and combined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagecore import ops
from tests.ops.cases import DTYPES, Shape, assert_lse_close, assert_output_close, make_case, random_mask
from tests.reference import attention as reference
from tests.together import together

pytestmark = pytest.mark.slow

LENS = {"seq_lens": (70, 33, 1, 16, 300), "query_lens": (7, 1, 1, 16, 40)}
DECODE = {"seq_lens": (70, 33, 1, 300)}
BATCHES = pytest.mark.parametrize("lens", [LENS, DECODE], ids=["mixed", "decode"])
SLOPES = np.asarray([0.5, 0.25, 0.125, 0.0625], np.float32)
SINKS = np.asarray([1.5, -2.0, 4.0, 0.0], np.float32)

OPTIONS: dict[str, dict[str, Any]] = {
    "not causal": {"causal": False},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.1},
    "zero scale": {"scale": 0.0},
    "window": {"window": 20},
    "softcap": {"softcap": 30.0},
    "strong softcap": {"softcap": 0.7},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi_slopes": SLOPES},
    "key scale": {"key_scale": 0.37},
    "value scale": {"value_scale": 2.5},
    "scales by head": {"key_scale": [0.5, 2.0], "value_scale": np.asarray([3.0, 0.1])},
    "gemma": {"window": 24, "softcap": 50.0, "scale": 0.11},
    "gpt-oss": {"window": 16, "sinks": SINKS},
    "all": {
        "window": (30, 3),
        "causal": False,
        "softcap": 5.0,
        "sinks": SINKS,
        "alibi_slopes": SLOPES,
        "key_scale": [0.5, 2.0],
        "value_scale": 0.7,
        "scale": 0.2,
    },
}


@BATCHES
@together("dtype", DTYPES)
@together("name", OPTIONS)
def test_every_option_keeps_the_bounds(lens, dtype, name):
    make_case(Shape(query_dtype=dtype, cache_dtype=dtype, **lens), **OPTIONS[name]).check()


WINDOWS: list[tuple[bool, Any]] = [
    (True, 1),
    (True, 2),
    (True, 15),
    (True, 16),
    (True, 17),
    (True, 100),
    (True, 5000),
    (True, 2**31 - 1),
    (True, 2**40),
    (True, (0, 0)),
    (True, (5, 7)),
    (True, (None, 0)),
    (True, (-1, -1)),
    (True, (20, None)),
    (False, 1),
    (False, 20),
    (False, (0, 0)),
    (False, (5, 7)),
    (False, (40, 1)),
    (False, (None, 3)),
    (False, (-1, 90)),
    (False, (3, -1)),
    (False, (None, None)),
    (False, (2**31, 2**33)),
    (False, (2**31 - 1, 2**31 - 1)),
    (False, [9, 2]),
    (False, (np.int64(9), np.int32(2))),
]


@BATCHES
@together("layout", ["NHD", "HND"])
@together(("causal", "window"), WINDOWS)
def test_windows_attend_to_their_keys_and_read_no_others(lens, layout, causal, window):
    oracle_window = tuple(window) if isinstance(window, list) else window
    case = make_case(Shape(layout=layout, **lens), causal=causal, window=oracle_window)
    expected = case.expect()
    case.options["window"] = window
    out, lse = case.run(return_lse=True)
    assert_output_close(out, expected[0])
    assert_lse_close(lse, expected[1], "float32")


@together("window", [1, 7, 64, (10, 0)])
def test_a_decode_step_reads_nothing_in_front_of_its_window(window):
    """All table entries before the block of the window are garbage, as after release_before."""
    case = make_case(Shape(seq_lens=(1763, 40, 6)), window=window)
    first = (1763 - (window if isinstance(window, int) else 11)) // 16
    assert set(case.block_table[0, :first].tolist()) <= {-1, 2**31 - 1}
    case.check()


@together("causal", [True, False])
@together("query_len", [8, 40])
def test_windows_of_queries_longer_than_their_sequence(causal, query_len):
    for window in (1, 4, (2, 2), (None, 4), (30, None), (0, 30)):
        make_case(Shape(seq_lens=(3, 17), query_lens=(query_len, query_len)), window=window, causal=causal).check()


MASK_EXTRAS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"window": 20},
    {"causal": False, "window": (10, 5)},
    {"sinks": SINKS},
    {"softcap": 20.0, "alibi_slopes": SLOPES},
]


@BATCHES
@together("extra", MASK_EXTRAS)
@together("density", [0.0, 0.05, 0.6, 1.0])
def test_masks_combine_with_causality_and_windows(lens, extra, density):
    shape = Shape(**lens)
    make_case(shape, mask=random_mask(shape, density=density), **extra).check()


@together("dtype", ["float16", "bfloat16"])
def test_masks_with_padding_rows_and_sixteen_bits(dtype):
    shape = Shape(query_dtype=dtype, cache_dtype=dtype, padding=5, shuffle_rows=True, **LENS)
    make_case(shape, mask=random_mask(shape)).check()


def test_a_mask_of_a_query_longer_than_its_sequence():
    shape = Shape(seq_lens=(3, 0, 17), query_lens=(8, 4, 40))
    make_case(shape, mask=random_mask(shape), causal=False).check()


def test_a_tree_of_drafts_is_a_mask():
    """Speculative decoding: each of seven drafts in a tree attends to the context, its ancestors and itself."""
    parents = [-1, 0, 0, 1, 1, 2, 4]
    context, drafts = 25, len(parents)
    mask = np.zeros((drafts, context + drafts), dtype=bool)
    mask[:, :context] = True
    for i, parent in enumerate(parents):
        mask[i, context + i] = True
        if parent >= 0:
            mask[i] |= mask[parent]
    case = make_case(Shape(seq_lens=(context + drafts,), query_lens=(drafts,)), mask=mask.reshape(-1))
    case.check()


@together("kind", ["list", "float64", "float16", "bfloat16", "int64", "strided"])
def test_numbers_by_head_may_be_of_any_kind(kind):
    def convert(values: list[float]) -> Any:
        if kind == "list":
            return values
        if kind == "strided":
            return np.repeat(np.asarray(values, np.float32), 2)[::2]
        return np.asarray(values).astype(DTYPES.get(kind, kind))

    numbers = {"sinks": [1, -2, 4, 0], "alibi_slopes": [2, 1, 0, 1], "key_scale": [1, 2], "value_scale": [3, 1]}
    case = make_case(Shape(**LENS), **{name: convert(values) for name, values in numbers.items()})
    case.check()


@together("scale", [0.5, 1, np.float32(0.5), np.float64(0.25), np.asarray(0.5), np.asarray([0.5, 0.25])])
def test_scales_may_be_numbers_of_any_kind(scale):
    make_case(Shape(**LENS), key_scale=scale, value_scale=scale).check()


def test_scale_one_and_none_give_the_same_bits():
    case = make_case(Shape(**LENS))
    np.testing.assert_array_equal(case.run(), case.run(key_scale=1.0, value_scale=1.0))


def test_a_sink_of_minus_infinity_has_no_effect():
    case = make_case(Shape(**LENS))
    plain, sunk = case.run(return_lse=True), case.run(return_lse=True, sinks=np.full(4, -np.inf))
    np.testing.assert_allclose(sunk[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(sunk[1], plain[1], rtol=1e-6)


@together("sink", [np.inf, 3e38])
def test_a_sink_beyond_all_scores_leaves_no_weight_to_keys(sink):
    case = make_case(Shape(**LENS))
    plain, sunk = (case.run(return_lse=True, sinks=[first, 0, -1, 2]) for first in (0, sink))
    assert (sunk[0][:, 0] == 0).all()
    assert (sunk[1][:, 0] == np.float32(sink)).all()
    np.testing.assert_array_equal(sunk[0][:, 1:], plain[0][:, 1:])
    case.key_cache[case.block_table[0, 0], 0] = np.nan  # all queries of the first sequence attend to it
    out, lse = case.run(return_lse=True, sinks=[sink, 0, -1, 2])
    first = slice(LENS["query_lens"][0])
    assert np.isnan(lse[first]).all()
    assert np.isnan(out[first]).all()


def test_a_query_with_a_sink_and_no_keys_has_the_sink_as_lse():
    case = make_case(Shape(seq_lens=(0, 4), query_lens=(2, 6)), sinks=SINKS)
    out, lse = case.run(return_lse=True)
    np.testing.assert_array_equal(lse[:4], np.broadcast_to(SINKS, (4, 4)))
    assert (out[:4] == 0).all()


@together("magnitude", [1e3, 1e-3])
def test_large_and_small_scores_neither_overflow_nor_vanish(magnitude):
    case = make_case(Shape(**LENS), scale=magnitude)
    expected = case.expect()
    out, lse = case.run(return_lse=True)
    assert np.isfinite(out).all()
    # The rounding error of a score grows with the scale. If the softmax is a step function, only the lse is stable.
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5, atol=1e-5 * max(1.0, magnitude))
    if magnitude < 1:
        assert_output_close(out, expected[0])


def test_results_are_the_same_with_and_without_lse_and_out():
    case = make_case(Shape(**LENS), sinks=SINKS, window=20)
    plain = case.run()
    out = np.full_like(plain, np.nan)
    np.testing.assert_array_equal(case.run(return_lse=True)[0], plain)
    np.testing.assert_array_equal(case.run(out=out), plain)
    np.testing.assert_array_equal(case.run(causal=True, scale=1 / 8, softcap=0, mask=None, stream=None), plain)


@together("slope", [1.0, 0.003, -0.003, 0.0])
@together("causal", [True, False])
def test_alibi_over_a_long_context_keeps_the_bounds_of_its_small_terms(slope, causal):
    slopes = np.asarray([slope, slope / 2, slope / 4, 0.5], np.float32)
    make_case(Shape(seq_lens=(5000, 77), query_lens=(3, 1)), alibi_slopes=slopes, causal=causal, sinks=SINKS).check()


@together("bad", [np.nan, np.inf])
@together("plane", ["key", "value", "both"])
@together(("how", "place"), [("causal", 69), ("window", 65), ("left window", 65), ("mask", 66), ("causal mask", 67)])
@together("query_len", [3, 9, 60])
@together("dtype", ["float32", "bfloat16"])
def test_a_nan_in_the_cache_reaches_only_the_queries_that_attend_to_it(bad, plane, how, place, query_len, dtype):
    seq_len = 70
    shape = Shape(seq_lens=(seq_len,), query_lens=(query_len,), query_dtype=dtype, cache_dtype=dtype)
    options: dict[str, Any] = {"causal": "causal" in how}
    if "window" in how:
        options["window"] = (2, -1) if "left" in how else (2, 1)
    if "mask" in how:
        options["mask"] = random_mask(shape)
    case = make_case(shape, **options)
    clean = case.run()
    for name, cache in (("key", case.key_cache), ("value", case.value_cache)):
        if plane in (name, "both"):
            cache[case.block_table[0, place // 16], place % 16] = bad
    mask = options["mask"].reshape(query_len, seq_len) if "mask" in how else None
    reached = reference.allowed(query_len, seq_len, causal=options["causal"], window=options.get("window"), mask=mask)
    reached = reached[:, place]
    assert 0 < reached.sum() < query_len
    out = case.run()
    assert not np.isfinite(out[reached]).any()
    np.testing.assert_array_equal(out[~reached], clean[~reached])


@together("dtype", DTYPES)
@together(("seq_len", "window", "place"), [(67, None, 66), (70, 5, 65)])
def test_an_infinite_value_makes_its_outputs_infinite(dtype, seq_len, window, place):
    """At the odd end of a range of keys one token of a pair is not attended to."""
    case = make_case(Shape(seq_lens=(seq_len,), query_dtype=dtype, cache_dtype=dtype), window=window)
    expected = case.run()
    case.value_cache[case.block_table[0, place // 16], place % 16, 1, 5] = np.inf
    expected[:, 2:, 5] = np.inf
    np.testing.assert_array_equal(case.run(), expected)


def test_weights_are_not_rounded_to_one_side():
    """The mean of equal values is that value, to the last bit of bfloat16."""
    case = make_case(Shape(seq_lens=(3000,), query_dtype="bfloat16", cache_dtype="bfloat16"))
    case.value_cache[...] = 1
    assert (case.run() == 1).all()


def test_equal_keys_make_the_output_the_mean_of_the_attended_values():
    key_cache = np.ones((3, 8, 1, 4), np.float32)
    value_cache = np.arange(3 * 8, dtype=np.float32).reshape(3, 8, 1, 1)
    query = np.ones((4, 2, 4), np.float32)
    out = ops.paged_attention(query, key_cache, value_cache, [[2, 1]], [12], cu_query_lens=[0, 4])
    slots = np.concatenate([np.arange(16, 24), np.arange(8, 12)])
    for i in range(4):
        np.testing.assert_allclose(out[i], slots[: 9 + i].mean(), rtol=1e-6)


def test_the_oracle_agrees_with_attention_worked_out_by_hand():
    """Two keys whose scores are 0 and log 3, a sink of log 4: weights 1/8 and 3/8."""
    query, key_cache = np.ones((1, 1, 1)), np.log([[[[1.0]], [[3.0]]]])
    value_cache = np.asarray([[[[8.0]], [[16.0]]]])
    table = np.zeros((1, 1), int)
    out, lse = reference.paged_attention(query, key_cache, value_cache, table, [2], sinks=[np.log(4.0)])
    np.testing.assert_allclose(out[0, 0], [1.0 + 6.0])
    np.testing.assert_allclose(lse[0, 0], np.log(8.0))
    out, lse = reference.paged_attention(query, key_cache, value_cache, table, [2], alibi_slopes=[np.log(3.0)])
    np.testing.assert_allclose(out[0, 0], [8.0 / 10 + 16.0 * 9 / 10])  # the older key is weighed down by 3
    np.testing.assert_allclose(lse[0, 0], np.log(10 / 3))
    out, _ = reference.paged_attention(query, key_cache, value_cache, table, [2], window=1)
    np.testing.assert_allclose(out[0, 0], [16.0])
    out, _ = reference.paged_attention(query, key_cache, value_cache, table, [2], softcap=1.0)
    weight = 1 / (1 + np.exp(np.tanh(np.log(3.0))))
    np.testing.assert_allclose(out[0, 0], [8 * weight + 16 * (1 - weight)])
