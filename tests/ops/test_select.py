"""score_blocks, score_tokens, select, and the summaries of write_kv, against the plain twin."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors, ops
from tests.ops.cases import DTYPES
from tests.ops.instruction_sets import on_every_isa
from tests.reference import sparse
from tests.together import together

RNG = np.random.default_rng


@pytest.fixture(params=[1, 3])
def threads(request):
    pagecore.set_num_threads(request.param)
    yield request.param
    pagecore.set_num_threads(None)


# ---- select


def expect_selection(scores: Any, budget: int, lens: Any, **options: Any) -> list[list[int]]:
    rows = scores.reshape(-1, scores.shape[-1])
    lengths = np.repeat(np.asarray(lens).reshape(-1), len(rows) // np.asarray(lens).size)
    return [sparse.select_row(row, budget, int(n), **options) for row, n in zip(rows, lengths, strict=True)]


def check_selection(scores: Any, budget: int, lens: Any, **options: Any) -> None:
    positions, counts = ops.select(scores, budget, lens=lens, **options)
    expected = expect_selection(scores, budget, lens, **options)
    width = max(budget + options.get("sinks", 0) + options.get("recent", 0), (options.get("threshold") or 0) - 1)
    assert positions.shape == (*scores.shape[:-1], width)
    assert positions.dtype == counts.dtype == np.int32
    assert counts.shape == scores.shape[:-1]
    assert counts.reshape(-1).tolist() == [len(row) for row in expected]
    for got, row in zip(positions.reshape(len(expected), width).tolist(), expected, strict=True):
        assert got == row + [-1] * (width - len(row))


@together("kind", ["normal", "few values", "equal", "extreme"])
@pytest.mark.parametrize(
    "options", [{}, {"sinks": 3}, {"recent": 5}, {"sinks": 2, "recent": 4, "threshold": 40}], ids=str
)
def test_selection_equals_the_twin(threads, kind, options):
    rng = RNG(1)
    scores = rng.standard_normal((7, 3, 200)).astype(np.float32)
    if kind == "few values":
        scores = rng.integers(-3, 3, scores.shape).astype(np.float32) / 4
    if kind == "equal":
        scores[...] = 0.5
    if kind == "extreme":
        special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38], np.float32)
        scores = rng.choice(special, scores.shape)
    for budget in (0, 1, 17, 200, 300):
        check_selection(scores, budget, [0, 1, 2, 39, 40, 199, 200], **options)


def test_lengths_are_given_for_all_rows_for_leading_axes_or_for_each_row():
    scores = RNG(2).standard_normal((4, 2, 9)).astype(np.float32)
    check_selection(scores, 3, 9)
    check_selection(scores, 3, [9, 0, 4, 8])
    check_selection(scores, 3, np.arange(8).reshape(4, 2))
    check_selection(scores[0, 0], 3, 7)
    check_selection(scores[::2, :, ::2], 3, [5, 2])
    assert ops.select(np.zeros((0, 2, 9), np.float32), 3, lens=np.zeros(0, int))[0].shape == (0, 2, 3)


def test_ties_go_to_the_lower_position():
    assert ops.select(np.array([1, 2, 2, 2, 1], np.float32), 2, lens=5)[0].tolist() == [1, 2]
    assert ops.select(np.array([0.0, -0.0, -1], np.float32), 1, lens=3)[0].tolist() == [0]
    assert ops.select(np.array([-0.0, 0.0, -1], np.float32), 1, lens=3)[0].tolist() == [0]


SELECT_REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "length": ({"lens": 5}, errors.ShapeError, "expected 0 to 4"),
    "negative length": ({"lens": -1}, errors.ShapeError, "expected 0 to 4"),
    "lengths": ({"lens": [1, 2, 3]}, errors.ShapeError, "leading axes"),
    "float lengths": ({"lens": 1.5}, errors.UnsupportedDtype, "integers"),
    "budget": ({"lens": 4, "budget": -1}, errors.ShapeError, "budget is -1"),
    "sinks": ({"lens": 4, "sinks": 0.5}, errors.ShapeError, "sinks is 0.5"),
    "dtype": ({"lens": 4, "scores": np.zeros(4)}, errors.UnsupportedDtype, "scores is float64; it must be float32, as"),
    "half": ({"lens": 4, "scores": np.zeros(4, np.float16)}, errors.UnsupportedDtype, "scores is float16; it must be"),
    "scalar": ({"lens": 4, "scores": np.float32(1)}, errors.PagecoreError, "scores"),
}


@together("name", SELECT_REFUSED)
def test_select_refuses(name):
    options, kind, message = SELECT_REFUSED[name]
    given: dict[str, Any] = {"scores": np.zeros((2, 4), np.float32), "budget": 1, **options}
    with pytest.raises(kind, match=message):
        ops.select(given.pop("scores"), given.pop("budget"), **given)


# ---- scores


def batch(mixed: bool, block_size: int, seed: int = 4) -> dict[str, Any]:
    """Return a shuffled table, lengths and query offsets; entries past the end are invalid."""
    rng = RNG(seed)
    lens, query_lens = ([70, 1, 33, 0, 16], [9, 1, 1, 0, 16]) if mixed else ([700, 1, 0, 33], [1] * 4)
    widths = [-(-n // block_size) for n in lens]
    free = iter(rng.permutation(np.arange(1, sum(widths) + 3)))
    table = np.full((len(lens) + 2, max(widths) + 1), -5, np.int64)
    rows = rng.permutation(len(lens) + 2)[: len(lens)]
    for row, width in zip(rows, widths, strict=True):
        table[row, :width] = [next(free) for _ in range(width)]
    cu = np.concatenate([[0], np.cumsum(query_lens)])
    return {"block_table": table, "seq_lens": np.array(lens), "rows": rows, "cu_query_lens": cu}


def assert_scores(got: Any, expected: Any) -> None:
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    nothing = np.isneginf(expected)
    assert np.array_equal(np.isneginf(got), nothing)
    assert np.allclose(got[~nothing], expected[~nothing], rtol=1e-5, atol=1e-4)


@functools.lru_cache(2)
def scored_blocks(dtypes: tuple[str, str], dim: int, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the query and planes, the batch, and the scores of the twin."""
    rng, given = RNG(5), batch(options.pop("mixed"), 4)
    planes = np.sort(rng.standard_normal((2, 200, 2, dim)), axis=0).astype(DTYPES[dtypes[1]])
    query = rng.standard_normal((given["cu_query_lens"][-1] + 2, 6, dim)).astype(DTYPES[dtypes[0]])
    return (query, *planes), given, sparse.score_blocks(query, *planes, **given, block_size=4, **options)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@together("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")])
@together("dim", [1, 64, 100])
@together("group", ["max", "mean"])
@together("mixed", [False, True])
@on_every_isa
def test_scores_of_blocks_equal_the_twin(threads, dtypes, dim, group, mixed):
    for causal in (True, False):
        arrays, given, expected = scored_blocks(dtypes, dim, group=group, causal=causal, mixed=mixed)
        assert_scores(ops.score_blocks(*arrays, **given, block_size=4, causal=causal, group=group), expected)


@pytest.mark.slow
@together("dtypes", [("float32", "float32"), ("bfloat16", "float16")])
@together("reduce", ["max_abs", "mean"])
@together("mixed", [False, True])
@together("num_channels", [1, 16, 21])
@on_every_isa
def test_scores_of_tokens_equal_the_twin(threads, dtypes, reduce, mixed, num_channels):
    rng, given = RNG(6), batch(mixed, 4)
    label = rng.standard_normal((200, 4, 2, num_channels)).astype(DTYPES[dtypes[1]])
    channels = rng.integers(0, 64, (2, num_channels))
    query = rng.standard_normal((given["cu_query_lens"][-1], 6, 64)).astype(DTYPES[dtypes[0]])
    options = dict(given)
    got = ops.score_tokens(
        query, label, channels, options.pop("block_table"), options.pop("seq_lens"), **options, reduce=reduce
    )
    assert_scores(got, sparse.score_tokens(query, label, channels, **given, reduce=reduce))


def test_bounds_are_never_below_the_best_key_of_their_block():
    rng, size = RNG(7), 16
    key = rng.standard_normal((100, 2, 64)).astype(np.float32)
    cache = np.zeros((8, size, 2, 64), np.float32)
    low, high = np.full((2, 8, 2, 64), np.nan, np.float32)
    ops.write_kv(key, key, cache, cache.copy(), np.arange(100), key_min=low, key_max=high)
    query = rng.standard_normal((1, 8, 64)).astype(np.float32)
    scores = ops.score_blocks(query, low, high, [np.arange(8)], [100], block_size=size)
    exact = np.einsum("hgd,jhd->jhg", query[0].reshape(2, 4, 64), key).max(axis=2)
    for block in range(7):
        assert (scores[0, :, block] >= exact[block * size : (block + 1) * size].max(axis=0) - 1e-4).all()
    assert np.isneginf(scores[0, :, 7]).all()


def test_scores_refuse_what_does_not_match():
    planes = np.zeros((2, 4, 2, 8), np.float32)
    query = np.zeros((1, 4, 8), np.float32)
    with pytest.raises(errors.ShapeError, match="as key_min has"):
        ops.score_blocks(query, planes[0], planes[1, :3], [[0]], [1], block_size=4)
    with pytest.raises(errors.ShapeError, match="head_dim of query"):
        ops.score_blocks(query[..., :7].copy(), *planes, [[0]], [1], block_size=4)
    with pytest.raises(errors.ShapeError, match="multiple of the second"):
        ops.score_blocks(query[:, :3].copy(), *planes, [[0]], [1], block_size=4)
    with pytest.raises(errors.ShapeError, match="block_size is 0"):
        ops.score_blocks(query, *planes, [[0]], [1], block_size=0)
    with pytest.raises(errors.UnsupportedOption, match="'max' or 'mean'"):
        ops.score_blocks(query, *planes, [[0]], [1], block_size=4, group="sum")
    with pytest.raises(errors.InvalidBlock, match="is 4"):
        ops.score_blocks(query, *planes, [[4]], [1], block_size=4)
    with pytest.raises(errors.UnsupportedDtype, match="one dtype"):
        ops.score_blocks(query, planes[0], planes[1].astype(np.float16), [[0]], [1], block_size=4)
    label = np.zeros((4, 4, 2, 3), np.float32)
    with pytest.raises(errors.ShapeError, match=r"label_channels\[1, 0\] is 8"):
        ops.score_tokens(query, label, [[0, 1, 2], [8, 1, 2]], [[0]], [1])
    with pytest.raises(errors.ShapeError, match="channels of a head"):
        ops.score_tokens(query, label, [[0, 1], [0, 1]], [[0]], [1])


# ---- summaries


@together("dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")])
@together("dim", [3, 64, 72])
@together("block_size", [1, 4, 7])
@on_every_isa
def test_summaries_equal_the_twin_after_every_write(threads, dtypes, dim, block_size):
    rng = RNG(8)
    source, stored = (DTYPES[name] for name in dtypes)
    cache = np.zeros((40, block_size, 3, dim), np.float32)
    got = [np.full((40, 3, dim), np.nan, stored) for _ in range(2)]
    label = np.full((40, block_size, 3, 5), np.nan, stored)
    expected, expected_label = [plane.copy() for plane in got], label.copy()
    channels = rng.integers(0, dim, (3, 5))
    lengths = {int(block): 0 for block in rng.permutation(40)[:6]}
    for _ in range(12):
        slots = []
        for block in rng.choice(list(lengths), 4, replace=False):
            count = min(int(rng.integers(1, 5)), block_size - lengths[block])
            slots += [block * block_size + lengths[block] + i for i in range(count)]
            lengths[block] = (lengths[block] + count) % block_size
        slots = [*slots, -1]
        key = rng.standard_normal((len(slots) + 1, 3, dim)).astype(source)
        key[len(slots) - 1 :] = np.nan
        ops.write_kv(
            key, key, cache, cache.copy(), slots, key_min=got[0], key_max=got[1], label=label, label_channels=channels
        )
        sparse.write_bounds(key, *expected, slots, block_size)
        sparse.write_labels(key, expected_label, channels, slots)
    for plane, twin in zip([*got, label], [*expected, expected_label], strict=True):
        assert np.array_equal(plane.astype(np.float64), twin.astype(np.float64), equal_nan=True)


SUMMARY_REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "one bound": ({"key_min": np.zeros((2, 1, 8), np.float32)}, errors.UnsupportedOption, "without key_max"),
    "other bound": ({"key_max": np.zeros((2, 1, 8), np.float32)}, errors.UnsupportedOption, "without key_min"),
    "label alone": ({"label": np.zeros((2, 4, 1, 1), np.float32)}, errors.UnsupportedOption, "without label_channels"),
    "channels alone": ({"label_channels": [[0]]}, errors.UnsupportedOption, "without label"),
    "blocks": (
        {"key_min": np.zeros((3, 1, 8), np.float32), "key_max": np.zeros((3, 1, 8), np.float32)},
        errors.ShapeError,
        "the blocks of key_cache",
    ),
    "dtypes": (
        {"key_min": np.zeros((2, 1, 8), np.float32), "key_max": np.zeros((2, 1, 8), np.float16)},
        errors.UnsupportedDtype,
        "one dtype",
    ),
    "channel": (
        {"label": np.zeros((2, 4, 1, 1), np.float32), "label_channels": [[8]]},
        errors.ShapeError,
        "expected 0 to 7",
    ),
    "number of channels": (
        {"label": np.zeros((2, 4, 1, 2), np.float32), "label_channels": [[1]]},
        errors.ShapeError,
        "channels of a head",
    ),
    "no channels": (
        {"label": np.zeros((2, 4, 1, 1), np.float32), "label_channels": np.zeros((1, 0), int)},
        errors.ShapeError,
        "no channels",
    ),
}


@together("name", SUMMARY_REFUSED)
def test_a_write_refuses_summaries_before_it_writes(name):
    options, kind, message = SUMMARY_REFUSED[name]
    cache, key = np.full((2, 4, 1, 8), 7, np.float32), np.zeros((1, 1, 8), np.float32)
    with pytest.raises(kind, match=message):
        ops.write_kv(key, key, cache, np.zeros_like(cache), [0], **options)
    assert (cache == 7).all()


def test_summaries_may_not_overlap_what_the_call_reads_or_writes():
    cache, key = np.zeros((2, 4, 1, 8), np.float32), np.zeros((1, 1, 8), np.float32)
    bounds = np.zeros((2, 1, 8), np.float32)
    with pytest.raises(errors.UnsupportedOption, match="key_min"):
        ops.write_kv(key, key, cache, cache.copy(), [0], key_min=bounds, key_max=bounds)
    with pytest.raises(errors.UnsupportedOption, match="key_cache"):
        ops.write_kv(key, key, cache, cache.copy(), [0], key_min=cache[:, 0], key_max=bounds)
    read_only = bounds.copy()
    read_only.flags.writeable = False
    with pytest.raises(errors.UnsupportedOption, match="read-only"):
        ops.write_kv(key, key, cache, cache.copy(), [0], key_min=bounds, key_max=read_only)


def test_a_bad_slot_leaves_the_summaries_unchanged():
    cache, key = np.zeros((2, 4, 1, 8), np.float32), np.zeros((2, 1, 8), np.float32)
    low, high = np.full((2, 2, 1, 8), 7, np.float32)
    with pytest.raises(errors.InvalidBlock):
        ops.write_kv(key, key, cache, cache.copy(), [0, 8], key_min=low, key_max=high)
    assert (low == 7).all()
    assert (high == 7).all()


@together("dtype", ["float32", "bfloat16"])
@together("dim", [2, 70])
@on_every_isa
def test_a_query_component_of_zero_contributes_zero_to_infinite_bounds(dtype, dim):
    low, high = np.ones((2, 4, 1, dim), DTYPES[dtype])
    for block, bound in enumerate((np.inf, np.nan)):
        low[block, 0, 0], high[block, 0, 0] = -bound, bound
    low[2, 0, -1] = high[2, 0, -1] = np.inf
    query = np.zeros((4, 1, dim), DTYPES[dtype])
    query[0, 0, 1:] = 2
    query[1, 0, 1:] = -2
    query[2, 0, 0] = 1
    query[3, 0] = 3
    query[3, 0, -1] = -0.0
    scores = ops.score_blocks(query, low, high, np.tile(np.arange(4), (4, 1)), np.full(4, 16), block_size=4)[:, 0]
    rest = dim - 1
    infinite, nothing = np.inf, -np.inf
    expected = [
        [2 * rest, 2 * rest, infinite, 2 * rest],
        [-2 * rest, -2 * rest, nothing, -2 * rest],
        [infinite, nothing, 1, 1],
        [infinite, nothing, 3 * rest, 3 * rest],
    ]
    np.testing.assert_array_equal(scores, expected)
