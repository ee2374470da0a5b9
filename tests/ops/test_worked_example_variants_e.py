"""Worked examples E1 and E2 of sparse selection, bit for bit, on every instruction set. E3 is in tests/cache."""

from __future__ import annotations

import numpy as np
import pytest

import pagecore
from tests.ops.instruction_sets import on_every_isa
from tests.reference import sparse

KEYS = [[1, 0], [0, 1.25], [3, -1], [-2, 1], [1, 1], [2, 2], [0, -3], [1, 0], [5, 5]]
QUERIES = np.array([[[1, 1], [-1, 2]]], np.float32)


def write(keys, slots, dtype=np.float32, **planes):
    new = np.array(keys, dtype).reshape(len(keys), 1, -1)
    cache = np.full((8, planes.pop("block_size", 2), 1, new.shape[2]), np.nan, dtype)
    pagecore.write_kv(new, new, cache, cache.copy(), slots, **planes)


def bounds_of_quest(slots):
    low, high = (np.full((8, 1, 2), np.nan, np.float32) for _ in range(2))
    write(KEYS, slots, key_min=low, key_max=high)
    return low, high


@pytest.mark.parametrize("table", [[0, 1, 2, 3, 4], [5, 2, 7, 1, 4]], ids=["in order", "shuffled"])
@on_every_isa
def test_worked_example_variants_e1_quest(table):
    slots = [table[i // 2] * 2 + i % 2 for i in range(9)]
    low, high = bounds_of_quest(slots)
    assert low[table, 0].tolist() == [[0, 0], [-2, -1], [1, 1], [0, -3], [5, 5]]
    assert high[table, 0].tolist() == [[1, 1.25], [3, 1], [2, 2], [1, 0], [5, 5]]
    for head, expected in enumerate([[2.25, 4, 4, 1, 10], [2.5, 4, 3, 0, 5]]):
        one = pagecore.score_blocks(QUERIES[:, [head]], low, high, [table], [9], block_size=2)
        assert one.tolist() == [[expected]]
    most = pagecore.score_blocks(QUERIES, low, high, [table], [9], block_size=2)
    assert most.tolist() == [[[2.5, 4, 4, 1, 10]]]
    mean = pagecore.score_blocks(QUERIES, low, high, [table], [9], block_size=2, group="mean")
    assert mean.tolist() == [[[1.875, 1.5, 3, 0, 7.5]]]
    assert pagecore.select(most, 2, lens=[5], recent=1)[0].tolist() == [[[1, 2, 4]]]
    assert pagecore.select(mean, 2, lens=[5], recent=1)[0].tolist() == [[[0, 2, 4]]]


@on_every_isa
def test_worked_example_variants_e1_first_slot_starts_the_bounds_anew():
    low, high = bounds_of_quest(list(range(9)))
    write([[0.5, 0.25]], [2], key_min=low, key_max=high)
    assert low[1, 0].tolist() == high[1, 0].tolist() == [0.5, 0.25]
    write([[-1, 3]], [3], key_min=low, key_max=high)
    assert (low[1, 0].tolist(), high[1, 0].tolist()) == ([-1, 0.25], [0.5, 3])


@pytest.mark.parametrize("block_size", [3, 8])
@on_every_isa
def test_worked_example_variants_e2_double_sparsity(block_size):
    labels = [[0, 1], [2, 0], [-1, 1], [1, 1], [0, 3], [-2, 0], [1, -1], [0, 0]]
    queries = np.array([[[1, -3, 2, 0], [2, 1, -1, 4]]], np.float32)
    table = [6, 3, 5]
    slots = [table[i // block_size] * block_size + i % block_size for i in range(8)]
    plane = np.full((8, block_size, 1, 2), np.nan, np.float32)
    keys = [[9, a, b, -9] for a, b in labels]
    write(keys, slots, block_size=block_size, label=plane, label_channels=[[1, 2]])
    assert plane.reshape(-1, 2)[slots].tolist() == labels
    budget = {"lens": [8], "sinks": 1, "recent": 2}
    for reduce, scores, positions in (
        ("max_abs", [2, -6, 5, -1, 6, 6, -5], [0, 4, 5, 6, 7]),
        ("mean", [0.5, -2, 1.5, -0.5, 1.5, 2, -1.5], [0, 2, 5, 6, 7]),
    ):
        got = pagecore.score_tokens(queries, plane, [[1, 2]], [table], [8], reduce=reduce)
        assert got.tolist() == [[[*scores, -np.inf]]]
        assert pagecore.select(got, 2, **budget)[0].tolist() == [[positions]]
    assert pagecore.select(got, 2, **budget, threshold=9)[0].tolist() == [[list(range(8))]]
    assert pagecore.select(got, 2, **budget, threshold=8)[1].tolist() == [[5]]


def test_worked_example_variants_e_twin():
    low, high = (np.full((5, 1, 2), np.nan) for _ in range(2))
    sparse.write_bounds(np.array(KEYS)[:, None], low, high, range(9), 2)
    table = np.arange(5)[None]
    scores = sparse.score_blocks(QUERIES, low, high, table, [9], block_size=2)
    assert scores.tolist() == [[[2.5, 4, 4, 1, 10]]]
    assert sparse.select_row(scores[0, 0], 2, 5, recent=1) == [1, 2, 4]


def test_worked_example_variants_e3_pooled_scores_are_kept_with_the_window():
    """The sums of two observing queries over six older keys, max-pooled over three; ties go to the lower position."""
    sums = np.array([0.15, 0.55, 0.1, 0.3, 0.3, 0.2], np.float32)
    padded = np.concatenate([[-np.inf], sums, [-np.inf]])
    pooled = np.lib.stride_tricks.sliding_window_view(padded, 3).max(axis=1).astype(np.float32)
    assert pooled.tolist() == np.array([0.55, 0.55, 0.55, 0.3, 0.3, 0.3], np.float32).tolist()
    scores = np.append(pooled, [0, 0]).astype(np.float32)
    assert pagecore.select(scores, 3, lens=8, recent=2)[0].tolist() == [0, 1, 2, 6, 7]
