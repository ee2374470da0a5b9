"""The planner: each pair of a query row and an attended key is in one item, within bounds, in stable splits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore.errors import DeviceError, PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.ops import AttentionPlan, plan_attention

HEADS = {"num_query_heads": 8, "num_kv_heads": 2}
FIXED_SPLIT = 1024
SPLIT_FLOOR = 512


@st.composite
def batches(draw):
    """Draw cu_query_lens (or None), seq_lens and the options of a plan."""
    seq_lens = draw(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 6000)), max_size=6))
    if draw(st.booleans()):
        queries = draw(st.lists(st.integers(0, 150), min_size=len(seq_lens), max_size=len(seq_lens)))
        cu = [0, *np.cumsum(queries, dtype=int).tolist()]
    else:
        cu = None
    side = st.one_of(st.just(-1), st.integers(0, 70), st.integers(0, 3000))
    group = draw(st.sampled_from([1, 2, 3, 4, 7, 16, 64, 100]))
    kv_heads = draw(st.integers(1, 4))
    options = {
        "num_query_heads": group * kv_heads,
        "num_kv_heads": kv_heads,
        "causal": draw(st.booleans()),
        "window": draw(st.one_of(st.none(), st.integers(1, 3000), st.tuples(side, side))),
        "batch_invariant": draw(st.booleans()),
        "num_workers": draw(st.sampled_from([None, 1, 2, 3, 8, 132])),
    }
    return cu, seq_lens, options


def attended(position: int, length: int, causal: bool, window: object) -> range:
    """Return the keys of one query, by the contract."""
    left, right = window if isinstance(window, tuple) else ((-1, -1) if window is None else (window - 1, -1))
    keys = [
        j
        for j in range(length)
        if (not causal or j <= position) and (left < 0 or j >= position - left) and (right < 0 or j <= position + right)
    ]
    return range(keys[0], keys[-1] + 1) if keys else range(0)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(batches())
def test_every_row_meets_every_key_that_it_may_attend_to_exactly_once(batch):
    cu, seq_lens, options = batch
    items = plan_attention(cu, seq_lens, **options).items
    offsets = list(range(len(seq_lens) + 1)) if cu is None else cu
    for sequence, length in enumerate(seq_lens):
        begin, end = offsets[sequence], offsets[sequence + 1]
        met = np.zeros((end - begin, length), np.int8)
        rows = np.zeros(end - begin, bool)
        for item in items[items["sequence"] == sequence]:
            first = item["query_begin"] - begin
            assert first >= 0
            assert item["query_count"] >= 1
            assert first + item["query_count"] <= end - begin
            assert 0 <= item["key_begin"] <= item["key_end"] <= length
            met[first : first + item["query_count"], item["key_begin"] : item["key_end"]] += 1
            rows[first : first + item["query_count"]] = True
        assert rows.all()
        assert met.max(initial=0) <= 1
        for row in {0, (end - begin) // 2, end - begin - 1} if end > begin else ():
            keys = attended(length - (end - begin) + row, length, options["causal"], options["window"])
            assert met[row, keys.start : keys.stop].all()


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(batches())
def test_splits_are_adjacent_numbered_and_own_their_partial_rows(batch):
    cu, seq_lens, options = batch
    plan = plan_attention(cu, seq_lens, **options)
    owned = np.zeros(plan.num_partial_rows, int)
    items = plan.items
    at = 0
    while at < len(items):
        first = items[at]
        tile = items[at : at + first["num_splits"]]
        assert tile["split"].tolist() == list(range(first["num_splits"]))
        for name in ("sequence", "query_begin", "query_count", "num_splits"):
            assert (tile[name] == first[name]).all()
        assert (tile["key_begin"][1:] == tile["key_end"][:-1]).all()
        assert (tile["key_begin"][1:] % SPLIT_FLOOR == 0).all()
        if first["num_splits"] == 1:
            assert first["partial"] == -1
        for item in tile if first["num_splits"] > 1 else ():
            assert item["partial"] == first["partial"] + item["split"] * first["query_count"]
            owned[item["partial"] : item["partial"] + item["query_count"]] += 1
        at += len(tile)
    assert (owned == 1).all()


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(batches(), st.data())
def test_batch_invariant_items_depend_on_the_sequence_alone(batch, data):
    cu, seq_lens, options = batch
    if not seq_lens:
        return
    options["batch_invariant"] = True
    items = plan_attention(cu, seq_lens, **options).items
    sequence = data.draw(st.integers(0, len(seq_lens) - 1))
    offsets = list(range(len(seq_lens) + 1)) if cu is None else cu
    queries = offsets[sequence + 1] - offsets[sequence]
    options["num_workers"] = data.draw(st.sampled_from([1, 5, 200]))
    alone = plan_attention([0, queries], [seq_lens[sequence]], **options).items
    among = items[items["sequence"] == sequence]
    for name in ("query_count", "key_begin", "key_end", "split", "num_splits"):
        assert among[name].tolist() == alone[name].tolist()
    assert (among["query_begin"] - offsets[sequence]).tolist() == alone["query_begin"].tolist()


def test_one_worker_gets_no_splits():
    plan = plan_attention(None, [100_000, 3, 0], **HEADS, num_workers=1)
    assert plan.num_items == 3
    assert plan.num_partial_rows == 0


def test_fixed_splits_have_the_fixed_length():
    items = plan_attention(None, [3000, 1024, 1025], **HEADS, batch_invariant=True).items
    assert items["key_end"].tolist() == [1024, 2048, 3000, 1024, 1024, 1025]
    assert items["num_splits"].tolist() == [3, 3, 3, 1, 2, 2]


def test_many_workers_share_one_long_sequence():
    plan = plan_attention(None, [16384], **HEADS, num_workers=16)
    lengths = plan.items["key_end"] - plan.items["key_begin"]
    assert plan.num_items * HEADS["num_kv_heads"] >= 16
    assert lengths.max() <= 16384 * HEADS["num_kv_heads"] // 16
    assert lengths.min() >= SPLIT_FLOOR


def test_workers_do_not_split_short_sequences():
    assert plan_attention(None, [SPLIT_FLOOR] * 3, **HEADS, num_workers=64).num_partial_rows == 0


def test_a_batch_of_none_has_no_items():
    plan = plan_attention([0], [], **HEADS)
    assert plan.num_sequences == 0
    assert plan.num_items == 0
    assert plan.items.shape == (0,)


def test_a_query_without_keys_has_an_item_all_the_same():
    items = plan_attention([0, 2, 3], [0, 5], **HEADS).items
    assert items["query_count"].tolist() == [2, 1]
    assert items["key_end"].tolist() == [0, 5]


def test_out_is_planned_anew_in_its_own_buffers():
    plan = plan_attention(None, [5000] * 64, **HEADS, num_workers=64)
    held = plan.nbytes
    again = plan_attention([0, 3], [7], num_query_heads=4, num_kv_heads=4, causal=False, window=(2, 3), out=plan)
    assert again is plan
    assert (plan.num_query_heads, plan.causal, plan.window, plan.num_sequences) == (4, False, (2, 3), 1)
    assert plan.nbytes == held
    assert plan.items["query_count"].sum() == 3


@pytest.mark.parametrize(
    ("cu_query_lens", "seq_lens"),
    [
        ([0, 1], [-1]),
        ([1, 2], [5]),
        ([0, 3, 2], [5, 5]),
        ([0, 1, 2], [5]),
        ([0], [5]),
        ([], []),
        (None, [2**31]),
        ([0, 2**31], [5]),
        (None, [[1, 2]]),
        (None, 3),
    ],
)
def test_invalid_lengths_are_refused_and_out_keeps_its_plan(cu_query_lens, seq_lens):
    plan = plan_attention(None, [10, 20], **HEADS)
    before = plan.items
    with pytest.raises(ShapeError):
        plan_attention(cu_query_lens, seq_lens, num_query_heads=6, num_kv_heads=3, out=plan)
    assert plan.items.tolist() == before.tolist()
    assert plan.num_query_heads == HEADS["num_query_heads"]


def test_a_plan_of_too_many_partial_rows_is_refused_without_making_its_items():
    """There would be billions of items: even to count them one by one would take ten seconds."""
    plan = plan_attention(None, [10, 20], **HEADS)
    before = plan.items.tolist()
    with pytest.raises(ShapeError, match=r"the plan has [0-9]{10,} partial rows; the limit is 2147483647"):
        plan_attention(np.arange(33) * 2**20, [2**31 - 1] * 32, **HEADS, num_workers=2**31 - 1, out=plan)
    assert plan.items.tolist() == before


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"num_query_heads": np.zeros(2, int)}, ShapeError),
        ({"window": np.zeros((2, 2), int)}, PagecoreError),
        ({"num_query_heads": 3}, ShapeError),
        ({"num_query_heads": 0}, ShapeError),
        ({"num_kv_heads": -2}, ShapeError),
        ({"num_kv_heads": 2**70}, ShapeError),
        ({"num_kv_heads": 2.0}, ShapeError),
        ({"num_kv_heads": None}, ShapeError),
        ({"num_workers": 0}, UnsupportedOption),
        ({"num_workers": "all"}, UnsupportedOption),
        ({"window": 0}, PagecoreError),
        ({"window": (1, 2, 3)}, PagecoreError),
        ({"window": "wide"}, PagecoreError),
        ({"out": object()}, UnsupportedOption),
    ],
)
def test_invalid_options_are_refused(changed, error):
    with pytest.raises(error):
        plan_attention(None, [10], **{**HEADS, **changed})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_sequences": 3}, ShapeError, "max_sequences"),
        ({"max_sequences": 0, "max_tokens": 4, "device": "cuda"}, ShapeError, "max_sequences is 0"),
        ({"max_sequences": 4, "max_tokens": 0, "device": "cuda"}, ShapeError, "max_tokens is 0"),
        ({"device": "cuda:9999"}, DeviceError, "CUDA"),
    ],
)
def test_options_that_are_refused_change_nothing(options, error, message):
    plan = plan_attention(None, [3000], **HEADS, window=(63, 0), num_workers=2)
    before = (plan.num_query_heads, plan.window, plan.device, plan.num_sequences, plan.items.tolist())
    with pytest.raises(error, match=message):
        plan.__init__(num_query_heads=64, num_kv_heads=1, num_workers=5, **options)
    assert (plan.num_query_heads, plan.window, plan.device, plan.num_sequences, plan.items.tolist()) == before
    assert plan_attention(None, [3000], **HEADS, window=(63, 0), num_workers=2, out=plan).items.tolist() == before[-1]


def test_lengths_that_are_not_integers_are_refused():
    with pytest.raises(UnsupportedDtype):
        plan_attention(None, np.array([1.5, 2.5]), **HEADS)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint32, np.int64])
def test_any_integers_that_fit_are_lengths(dtype):
    plan = plan_attention(np.array([0, 2, 3], dtype), np.array([100, 0, 50], dtype)[::2], **HEADS)
    assert plan.items["key_end"].tolist() == [100, 50]


def test_a_new_plan_is_empty_and_has_its_options():
    plan = AttentionPlan(**HEADS, window=5)
    assert plan.num_items == 0
    assert plan.window == (4, -1)
    assert repr(plan) == "AttentionPlan(0 sequences, 0 items, 8/2 heads)"
