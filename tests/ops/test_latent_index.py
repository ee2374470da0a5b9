"""The indexer: scores, the best positions and their slots, against the plain twin."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pagecore import errors, index_scores, select_topk, slots_of, write_index
from tests.ops.instruction_sets import on_every_isa
from tests.reference import latent as reference
from tests.together import together


@on_every_isa
def test_worked_example_variants_a7_index_scores():
    query = np.array([[[1, 0], [0, 1]], [[1, 1], [-1, 1]]], np.float32)
    weights = np.array([[1, 2], [0.5, 1]], np.float32)
    keys = np.array([[1, 1], [-1, 2], [3, -1], [0, 0]], np.float32)[None]
    scores = index_scores(query, weights, keys, None, [[0]], [4], cu_query_lens=[0, 2], causal=False)
    assert scores.tolist() == [[3, 4, 3, 0], [1, 3.5, 1, 0]]
    assert select_topk(scores, 2, [3, 4]).tolist() == [[1, 0], [1, 0]]


def test_worked_example_variants_a8_slots_of_positions():
    assert slots_of([[0, 63, 64, 130, -1]], [[7, 3, 9]], 64).tolist() == [[448, 511, 192, 578, -1]]


@together("dtype", [np.float32, ml_dtypes.bfloat16])
@together("heads", [1, 17, 64])
@on_every_isa
def test_quantised_keys(dtype, heads):
    rng = np.random.default_rng(0)
    lens, queries = np.array([150, 0, 7], np.int32), np.array([0, 5, 5, 6], np.int32)
    table = rng.permutation(np.arange(1, 31)).reshape(3, 10).astype(np.int32)
    keys = np.full((31, 16, 128), np.nan, ml_dtypes.float8_e4m3fn)
    scales = np.full((31, 16, 1), np.nan, np.float32)
    for row, n in zip(table, lens, strict=True):
        slots = row[np.arange(n) // 16] * 16 + np.arange(n) % 16
        write_index(rng.standard_normal((n, 128)).astype(np.float32), keys, scales, slots)
    query = rng.standard_normal((6, heads, 128)).astype(dtype)
    weights = rng.standard_normal((6, heads)).astype(np.float32)
    out = np.full((6, 160), np.nan, np.float32)
    assert index_scores(query, weights, keys, scales, table, lens, cu_query_lens=queries, out=out) is out
    numbers = keys.astype(np.float64) * scales
    for i, n in enumerate(lens):
        flat = numbers[table[i]].reshape(-1, 128)[:n]
        for token in range(queries[i], queries[i + 1]):
            seen = n - (queries[i + 1] - 1 - token)
            expected = reference.index_scores(query[token : token + 1], weights[token : token + 1], flat[:seen])[0]
            size = np.abs(weights[token]).sum() * 12
            np.testing.assert_allclose(out[token, :seen], expected, atol=1e-6 * size)
            assert np.isneginf(out[token, seen:]).all()


@together("k", [1, 7, 64, 300])
def test_best_positions(k):
    rng = np.random.default_rng(k)
    scores = rng.integers(0, 20, (9, 200)).astype(np.float32)  # many ties
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    scores[0, :5] = np.nan
    lens = rng.integers(0, 201, 9)
    got = select_topk(scores, k, lens)
    assert got.dtype == np.int32
    scores = np.where(np.isnan(scores), -np.inf, scores)
    assert got.tolist() == [reference.select_topk(row, k, n) for row, n in zip(scores, lens, strict=True)]


def test_slots_of_packed_queries():
    table = np.array([[7, 3], [5, 1], [2, 9]], np.int64)
    got = slots_of([[3, -1], [4, 0], [-9, 5]], table, 4, rows=[2, 0], cu_query_lens=[0, 2, 3])
    assert got.tolist() == [[11, -1], [36, 8], [-1, 13]]
    out = np.full((3, 2), 7, np.int32)
    assert slots_of([[3, -1], [4, 0], [-9, 5]], table, 4, rows=[2, 0], cu_query_lens=[0, 2, 3], out=out) is out
    assert (out == got).all()


@together(
    ("call", "error", "words"),
    [
        (lambda: slots_of([[8]], [[1, 2]], 4), errors.ShapeError, "holds 8 tokens"),
        (lambda: slots_of([[1]], [[-1, 2]], 4), errors.InvalidBlock, "is -1"),
        (lambda: slots_of([[1]], [[1, 2]], 0), errors.ShapeError, "block_size is 0"),
        (lambda: slots_of([[1]], [[1, 2]], 4, out=np.zeros((2, 1), np.int32)), errors.ShapeError, "must be (1, 1)"),
        (
            lambda: slots_of([[1]], [[1, 2]], 4, out=np.zeros((1, 1), np.float32)),
            errors.UnsupportedDtype,
            "must be int32",
        ),
        (
            lambda: slots_of([[1], [1]], [[1], [2]], 4, out=np.zeros((2, 2), np.int32)[:, ::2]),
            errors.ShapeError,
            "C-contiguous",
        ),
        (lambda: slots_of([[1], [1]], [[1, 2]], 4), errors.ShapeError, "one row for each sequence"),
        (lambda: select_topk(np.zeros((1, 4), np.float32), 0), errors.ShapeError, "k is 0"),
        (lambda: select_topk(np.zeros((1, 4), np.float32), 2, [5]), errors.ShapeError, "lens[0] is 5"),
        (lambda: select_topk(np.zeros((1, 4), np.float16), 2), errors.UnsupportedDtype, "float32"),
    ],
)
def test_refusals(call, error, words):
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)


def test_scores_need_a_column_for_each_key():
    keys = np.zeros((2, 4, 8), np.float32)
    query = np.zeros((1, 2, 8), np.float32)
    with pytest.raises(errors.ShapeError, match="out has 3 columns"):
        index_scores(query, np.zeros((1, 2), np.float32), keys, None, [[1]], [4], out=np.zeros((1, 3), np.float32))
