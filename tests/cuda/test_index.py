"""The sparse indexer on CUDA: keys, scores and slots, against the plain twin."""

from __future__ import annotations

import hashlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagecore import debug, errors, index_scores, slots_of, write_index
from pagecore.arrays import strided
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.cuda.memory import calls_of
from tests.reference import latent as reference

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": BF16}


def twin_key(key: Any) -> tuple[bytes, float]:
    """Return the codes and the scale of a key."""
    size = np.abs(key[~np.isnan(key)]).max(initial=np.float32(1e-4))
    scale = reference.power_above(float(min(size, np.finfo(np.float32).max) / np.float32(448)))
    return bytes(reference.e4m3(float(x) / scale) for x in key), scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [128, 40, 7])
def test_keys_equal_the_twin(cuda, dim, dtype):
    rng = np.random.default_rng(dim)
    rows = np.clip(rng.standard_normal((11, dim)) * 10.0 ** rng.integers(-6, 5, (11, 1)), -6e4, 6e4)
    rows[4], rows[5, 3], rows[6, 2] = 0, np.nan, -np.inf
    rows = rows.astype(DTYPES[dtype])
    slots = rng.permutation(15)[:11]
    slots[7] = -2
    keys, scales = np.full((5, 3, dim), 7, E4M3), np.full((5, 3, 1), 7, np.float32)
    device = [cuda.put(keys), cuda.put(scales)]
    write_index(cuda.put(rows), *device, cuda.put(slots))
    for token, slot in enumerate(slots):
        if slot >= 0:
            codes, scale = twin_key(rows[token].astype(np.float32))
            keys[divmod(slot, 3)], scales[divmod(slot, 3)] = np.frombuffer(codes, E4M3), scale
    assert cuda.get(device[0]).tobytes() == keys.tobytes()
    assert cuda.get(device[1]).tobytes() == scales.tobytes()


def test_worked_example_variants_a6_page_on_a_device(cuda):
    """Keys and scales are views of one page of bytes, in the order of DeepGEMM."""
    t, d = np.arange(64)[:, None], np.arange(128)[None]
    rows = ((((7 * d + 13 * t) % 101) - 50) / 25).astype(np.float32).astype(BF16)
    rows[3] = 0
    page = cuda.put(np.zeros((2, 64 * 132), np.uint8))
    keys = strided(page, (2, 64, 128), (8448, 128, 1), 0, "float8_e4m3fn")
    scales = strided(page, (2, 64, 1), (8448, 4, 4), 8192, "float32")
    write_index(cuda.put(rows), keys, scales, cuda.put(np.arange(64, 128)))
    stored = cuda.get(page)[1].tobytes()
    assert stored[:8].hex() == "f8f6f4f1eeeae2ca"
    assert hashlib.sha256(stored).hexdigest() == "63e658c7c67a7ca64c4eaafa309b2af4cd01d91a24a2e3ebe895084b91c8f2cf"


def test_worked_example_variants_a7_scores_on_a_device(cuda):
    query = np.array([[[1, 0], [0, 1]], [[1, 1], [-1, 1]]], np.float32)
    weights = np.array([[1, 2], [0.5, 1]], np.float32)
    keys = np.array([[1, 1], [-1, 2], [3, -1], [0, 0]], np.float32)[None]
    given = [cuda.put(array) for array in (query, weights, keys)]
    scores = index_scores(*given, None, [[0]], [4], cu_query_lens=[0, 2], causal=False)
    assert cuda.get(scores).tolist() == [[3, 4, 3, 0], [1, 3.5, 1, 0]]


def test_worked_example_variants_a8_slots_on_a_device(cuda):
    positions = cuda.put(np.array([[0, 63, 64, 130, -1]], np.int32))
    assert cuda.get(slots_of(positions, [[7, 3, 9]], 64)).tolist() == [[448, 511, 192, 578, -1]]


class Scored:
    """Keys of three sequences in a shuffled cache, the second of them empty, and six queries."""

    def __init__(self, heads: int, dim: int, dtype: str, keys: str = "float8_e4m3fn", block_size: int = 16) -> None:
        rng = np.random.default_rng(heads + dim)
        self.lens, self.cu, self.block_size = np.array([150, 0, 7], np.int32), np.array([0, 5, 5, 6]), block_size
        width = -(-160 // block_size)
        self.table = rng.permutation(np.arange(1, 3 * width + 1)).reshape(3, width).astype(np.int32)
        blocks = 3 * width + 1
        numbers = rng.standard_normal((blocks, block_size, dim)) * 4
        self.scales = None
        if keys == "float8_e4m3fn":
            self.keys = numbers.astype(E4M3)
            self.scales = np.exp2(rng.integers(-9, 9, (blocks, block_size, 1))).astype(np.float32)
        else:
            self.keys = numbers.astype(DTYPES[keys])
        self.query = (rng.standard_normal((6, heads, dim)) * 10.0 ** rng.integers(-3, 3, (6, heads, 1))).astype(
            DTYPES[dtype]
        )
        self.weights = rng.standard_normal((6, heads)).astype(DTYPES[dtype])
        self.poison()

    def poison(self) -> None:
        """Put NaN where no query looks."""
        used = np.zeros(self.keys.shape[:2], bool)
        for row, n in zip(self.table, self.lens, strict=True):
            used[row[np.arange(n) // self.block_size], np.arange(n) % self.block_size] = True
        self.keys[~used] = np.nan
        if self.scales is not None:
            self.scales[~used] = np.nan

    def arrays(self, cuda: Kit) -> list[Any]:
        given = (self.query, self.weights, self.keys, self.scales, self.table, self.lens)
        return [None if array is None else cuda.put(array) for array in given]

    def check(self, scores: Any, causal: bool = True) -> None:
        numbers = self.keys.astype(np.float64) * (1 if self.scales is None else self.scales)
        for i, n in enumerate(self.lens):
            flat = numbers[self.table[i]].reshape(-1, self.keys.shape[-1])[:n]
            for token in range(self.cu[i], self.cu[i + 1]):
                seen = flat[: n - (self.cu[i + 1] - 1 - token)] if causal else flat
                one = slice(token, token + 1)
                expected = reference.index_scores(self.query[one], self.weights[one], seen)[0]
                query, weights = np.abs(self.query[one].astype(np.float64)), np.abs(self.weights[one])
                bound = reference.index_scores(query, weights, np.abs(seen))[0] * 2e-6 + 1e-30
                assert (np.abs(scores[token, : len(seen)] - expected) <= bound).all()
                assert np.isneginf(scores[token, len(seen) :]).all()


SHAPES = [(64, 128), (1, 128), (17, 128), (32, 128), (33, 128), (65, 128), (3, 20), (2, 7)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", cases(SHAPES[:3] + SHAPES[5:], SHAPES), ids=str)
def test_scores_equal_the_twin(cuda, shape, dtype):
    case = Scored(*shape, dtype)
    query, weights, keys, scales, table, lens = case.arrays(cuda)
    out = cuda.empty((6, 161))
    options = {"cu_query_lens": cuda.put(case.cu), "out": out}
    assert index_scores(query, weights, keys, scales, table, lens, **options) is out
    case.check(cuda.get(out))


@pytest.mark.parametrize("keys", DTYPES)
def test_scores_of_plain_keys(cuda, keys):
    case = Scored(9, 24, "bfloat16", keys)
    query, weights, plane, _, table, _ = case.arrays(cuda)
    got = index_scores(query, weights, plane, None, table, case.lens, cu_query_lens=case.cu, causal=False)
    assert got.shape == (6, 150)
    case.check(cuda.get(got), causal=False)


@pytest.mark.parametrize("block_size", [1, 64, 100])
def test_scores_of_every_block_size(cuda, block_size):
    case = Scored(64, 128, "bfloat16", block_size=block_size)
    got = index_scores(*case.arrays(cuda)[:5], case.lens, rows=[0, 1, 2], cu_query_lens=case.cu)
    case.check(cuda.get(got))


def test_a_nan_reaches_only_the_scores_of_its_key(cuda):
    for shape in ((64, 128), (5, 128)):
        case = Scored(*shape, "bfloat16")
        case.keys[case.table[0, 2], 3, 9] = np.nan
        case.query[0, -1, 5] = np.nan
        got = cuda.get(index_scores(*case.arrays(cuda)[:5], case.lens, cu_query_lens=case.cu))
        expected = np.zeros((6, 150), bool)
        expected[:5, 35] = True
        expected[0, :146] = True
        assert (np.isnan(got) == expected).all()


def test_large_and_small_queries_keep_their_digits(cuda):
    """Numbers that a half does not hold, in queries of bfloat16 whose heads differ in magnitude."""
    case = Scored(64, 128, "bfloat16")
    case.query = (case.query.astype(np.float32) * np.float32(10.0) ** np.linspace(-30, 30, 64)[None, :, None]).astype(
        BF16
    )
    case.weights = (10.0 ** np.linspace(30, -30, 64)[None] * np.ones((6, 1))).astype(BF16)
    case.check(cuda.get(index_scores(*case.arrays(cuda)[:5], case.lens, cu_query_lens=case.cu)))


def test_tokens_without_a_sequence_see_nothing(cuda):
    case = Scored(4, 128, "bfloat16")
    query, weights, keys, scales, table, lens = case.arrays(cuda)
    cu, out = cuda.put(np.array([0, 2, 2, 3])), cuda.empty((6, 150))
    for rows, end in ((None, 3), (cuda.put(np.array([0, 1, 9])), 2)):
        index_scores(query, weights, keys, scales, table, lens, rows=rows, cu_query_lens=cu, out=out)
        got = cuda.get(out)
        assert np.isfinite(got[:2, :149]).all()
        assert np.isfinite(got[2, :7]).all() == (end == 3)
        assert np.isneginf(got[end:]).all()


def test_one_query_for_each_sequence(cuda):
    case = Scored(8, 128, "bfloat16")
    case.query, case.weights, case.cu = case.query[:3], case.weights[:3], np.arange(4)
    case.check(cuda.get(index_scores(*case.arrays(cuda)[:5], case.lens)))


def test_a_captured_call_follows_its_arrays(cuda):
    case = Scored(64, 128, "bfloat16")
    query, weights, keys, scales, table, lens = case.arrays(cuda)
    new, slots = cuda.put(case.query[:, 0]), cuda.put(np.array([-1] * 6))
    out, cu, positions = cuda.empty((6, 150)), cuda.put(case.cu), cuda.put(np.zeros((6, 2), np.int32))
    found = cuda.empty((6, 2), "int32")

    def work(stream):
        write_index(new, keys, scales, slots, stream=stream)
        index_scores(query, weights, keys, scales, table, lens, cu_query_lens=cu, out=out, stream=stream)
        assert slots_of(positions, table, 16, cu_query_lens=cu, out=found, stream=stream) is found

    work(0)
    replay = cuda.capture(work)
    case.lens[:] = [20, 0, 3]
    cuda.runtime.copy(lens.pointer, case.lens.ctypes.data, case.lens.nbytes, 0)
    moved = np.full((6, 2), 19, np.int32)
    cuda.runtime.copy(positions.pointer, moved.ctypes.data, moved.nbytes, 0)
    cuda.runtime.synchronize(0)
    replay()
    case.check(cuda.get(out))
    assert cuda.get(found)[:, 1].tolist() == (case.table[[0] * 5 + [2], 1] * 16 + 3).tolist()


def test_a_call_is_one_launch(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts launches")
    case = Scored(64, 128, "bfloat16")
    query, weights, keys, scales, table, lens = case.arrays(cuda)
    slots, cu, out = cuda.put(np.arange(6)), cuda.put(case.cu), cuda.empty((6, 150))
    new = cuda.put(case.query[:, 0])
    assert calls_of(cuda, lambda: write_index(new, keys, scales, slots)) == {"launches": 1}
    scored = calls_of(cuda, lambda: index_scores(query, weights, keys, scales, table, lens, cu_query_lens=cu, out=out))
    assert scored == {"launches": 1}


@pytest.mark.parametrize("wide", [True, False])
def test_slots_of_packed_queries(cuda, wide):
    table = np.array([[7, 3], [5, 1], [2, -9]], np.int64 if wide else np.int32)
    positions = np.array([[3, -1], [4, 0], [-9, 5], [8, 1], [1, 2]], np.int64 if wide else np.int32)
    rows, cu = cuda.put(np.array([2, 0, 5])), cuda.put(np.array([0, 2, 4, 4]))
    got = cuda.get(slots_of(cuda.put(positions), cuda.put(table), 4, rows=rows, cu_query_lens=cu))
    assert got.tolist() == [[11, -1], [-1, 8], [-1, 13], [-1, 29], [-1, -1]]


def test_slots_equal_those_of_the_host(cuda):
    rng = np.random.default_rng(0)
    table = rng.integers(0, 500, (5, 20)).astype(np.int32)
    positions = rng.integers(-20, 20 * 48, (5, 300)).astype(np.int32)
    expected = slots_of(positions, table, 48)
    assert cuda.get(slots_of(cuda.put(positions), table, 48)).tolist() == expected.tolist()


@pytest.mark.parametrize("on_device", [True, False])
def test_invalid_indices_raise_on_the_host_and_under_debug(cuda, on_device):
    def given(values):
        return cuda.put(np.array(values)) if on_device else values

    keys, scales = cuda.put(np.zeros((2, 4, 8), E4M3)), cuda.put(np.zeros((2, 4, 1), np.float32))
    row, query = cuda.put(np.zeros((1, 8), np.float32)), cuda.put(np.zeros((1, 2, 8), np.float32))
    weights, out = cuda.put(np.zeros((1, 2), np.float32)), cuda.empty((1, 8))
    debug(on_device)
    try:
        with pytest.raises(errors.InvalidBlock, match=r"slot_mapping\[0\] is 8"):
            write_index(row, keys, scales, given([8]))
        with pytest.raises(errors.InvalidBlock):
            index_scores(query, weights, keys, scales, given([[2]]), given([3]), out=out)
        with pytest.raises(errors.ShapeError):
            index_scores(query, weights, keys, scales, given([[1]]), given([5]), out=out)
        if on_device:
            with pytest.raises(errors.ShapeError, match="holds 4 tokens"):
                slots_of(given([[4]]), given([[1]]), 4)
    finally:
        debug(False)
    assert not cuda.get(keys).view(np.uint8).any()
    assert np.isnan(cuda.get(out)).all()


def test_refusals(cuda):
    case = Scored(2, 128, "bfloat16")
    query, weights, keys, scales, table, lens = case.arrays(cuda)
    cu = cuda.put(case.cu)
    with pytest.raises(errors.UnsupportedOption, match=r"seq_lens is on cuda:0.*pass out="):
        index_scores(query, weights, keys, scales, table, lens, cu_query_lens=cu)
    with pytest.raises(errors.ShapeError, match="out has 149 columns"):
        index_scores(query, weights, keys, scales, table, case.lens, cu_query_lens=cu, out=cuda.empty((6, 149)))
    with pytest.raises(errors.DeviceError, match="weights is on cpu"):
        index_scores(query, case.weights, keys, scales, table, case.lens, cu_query_lens=cu)
    with pytest.raises(errors.UnsupportedOption, match="have no stream"):
        slots_of([[1]], [[1, 2]], 4, stream=0)


@pytest.mark.parametrize("on_device", [True, False])
def test_empty_calls(cuda, on_device):
    def given(values):
        return cuda.put(np.array(values, np.int32)) if on_device else values

    keys, scales = cuda.put(np.full((2, 4, 128), 7, E4M3)), cuda.put(np.full((2, 4, 1), 7, np.float32))
    write_index(cuda.put(np.zeros((0, 128), np.float32)), keys, scales, given([]))
    query, weights = cuda.put(np.ones((3, 2, 128), BF16)), cuda.put(np.ones((3, 2), np.float32))
    no_table = given(np.zeros((0, 2), np.int32))
    out = cuda.empty((3, 5))
    index_scores(query, weights, keys, scales, no_table, given([]), cu_query_lens=given([0]), out=out)
    assert np.isneginf(cuda.get(out)).all()
    narrow = index_scores(query, weights, keys, scales, given([[1]] * 3), [0, 0, 0])
    assert narrow.shape == (3, 0)
    none = cuda.put(np.zeros((0, 2, 128), BF16)), cuda.put(np.zeros((0, 2), np.float32))
    assert index_scores(*none, keys, scales, no_table, np.zeros(0, np.int32)).shape == (0, 0)
    positions = cuda.put(np.zeros((0, 3), np.int32))
    assert slots_of(positions, no_table, 4).shape == (0, 3)
    assert (cuda.get(keys).view(np.uint8) == np.full(1, 7, E4M3).view(np.uint8)).all()
