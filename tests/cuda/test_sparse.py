"""Sparse selection on a CUDA device: summaries, scores and selections against the plain twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors, ops
from tests.cuda.kit import DeviceBytes, Kit
from tests.cuda.matrix import cases
from tests.cuda.memory import assert_same_memory, calls_of
from tests.ops.cases import DTYPES
from tests.ops.test_select import assert_scores, batch, expect_selection
from tests.reference import sparse

RNG = np.random.default_rng


def odd(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an array of ones at an odd address, which `Kit.put` keeps."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    array = np.zeros(size + 1, np.uint8)[1:].view(dtype).reshape(shape)
    array[...] = 1
    return array


def put_all(cuda: Kit, given: dict[str, Any]) -> dict[str, Any]:
    return {name: cuda.put(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}


# ---- summaries


def write_both(
    cuda: Kit, key: Any, planes: dict[str, Any], device: dict[str, Any], slots: Any, block_size: int
) -> None:
    """Write new keys with summaries on the device and by the twin; key and value caches are not compared."""
    blocks = planes["key_min"].shape[0]
    caches = [np.zeros((blocks, block_size, *key.shape[1:]), np.float32) for _ in range(2)]
    arrays = [cuda.put(array) for array in (key, key, *caches, np.asarray(slots))]
    pagecore.write_kv(*arrays, **device)
    sparse.write_bounds(key, planes["key_min"], planes["key_max"], slots, block_size)
    sparse.write_labels(key, planes["label"], planes["label_channels"], slots)


DTYPE_PAIRS = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")]


@pytest.mark.parametrize("dtypes", cases(DTYPE_PAIRS[1:], DTYPE_PAIRS))
@pytest.mark.parametrize(("dim", "block_size"), [(72, 1), (3, 4), (64, 7)])
def test_summaries_have_the_bits_of_the_twin_after_every_write(cuda, dtypes, dim, block_size):
    rng = RNG(8)
    source, stored = (DTYPES[name] for name in dtypes)
    planes = {name: np.full((40, 3, dim), 77, stored) for name in ("key_min", "key_max")}
    planes |= {"label": np.full((40, block_size, 3, 5), 77, stored), "label_channels": rng.integers(0, dim, (3, 5))}
    device = put_all(cuda, planes | {"label_channels": planes["label_channels"].astype(np.int32)})
    lengths = {int(block): 0 for block in rng.permutation(40)[:6]}
    for turn in range(6):
        slots: list[int] = []
        for block in rng.choice(list(lengths), 4, replace=False):
            count = min(int(rng.integers(1, 5)), block_size - lengths[block])
            slots += [block * block_size + lengths[block] + i for i in range(count)]
            lengths[block] = (lengths[block] + count) % block_size
        slots.insert(turn, -1)
        key = rng.standard_normal((len(slots) + 1, 3, dim)).astype(source)
        key[turn] = np.nan
        write_both(cuda, key, planes, device, slots, block_size)
    for name in ("key_min", "key_max", "label"):
        assert_same_memory(cuda.get(device[name]), planes[name])


def test_long_and_scattered_blocks_have_exact_bounds(cuda):
    """More than one stretch of slots, tokens of blocks that are not adjacent, and blocks that are extended."""
    rng, size, num_blocks = RNG(3), 200, 4
    planes = {name: np.zeros((num_blocks, 2, 8), np.float32) for name in ("key_min", "key_max")}
    planes |= {"label": np.zeros((num_blocks, size, 2, 1), np.float32), "label_channels": np.zeros((2, 1), np.int32)}
    device = put_all(cuda, planes)
    first = [block * size + i for block in (1, 2, 3) for i in range(60)]
    rest = rng.permutation([block * size + i for block in (1, 2) for i in range(60, size)]).tolist()
    for slots in (first, [*rest, *range(3 * size, 4 * size)]):
        write_both(cuda, rng.standard_normal((len(slots), 2, 8)).astype(np.float32), planes, device, slots, size)
    for name in ("key_min", "key_max", "label"):
        assert_same_memory(cuda.get(device[name]), planes[name])


def test_a_write_whose_summaries_are_refused_writes_nothing(cuda):
    """A label of 2^31 channels, whose memory is not there."""
    key, cache = cuda.put(np.ones((3, 1, 16), np.float32)), cuda.put(np.zeros((1, 4, 1, 16), np.float32))
    value, count = cuda.put(np.zeros((1, 4, 1, 16), np.float32)), 2**31
    planes = {"label": DeviceBytes(cuda.runtime, 16), "label_channels": DeviceBytes(cuda.runtime, 16)}
    far = planes["label"].address + 2**40
    planes["label"].__cuda_array_interface__ |= {"shape": (1, 4, 1, count), "typestr": "<f4", "data": (far, False)}
    far += 2**40
    planes["label_channels"].__cuda_array_interface__ |= {"shape": (1, count), "typestr": "<i4", "data": (far, False)}
    with pytest.raises(errors.ShapeError, match=r"fewer than \d+ numbers.*split the call"):
        pagecore.write_kv(key, key, cache, value, cuda.put(np.arange(3)), **planes)
    assert not cuda.get(cache).any()


def test_bounds_contain_the_keys_of_all_tokens_with_one_slot(cuda):
    """Tokens of a block number more than its slots, in several stretches of the call, and the block starts twice."""
    if cuda.is_emulated:
        cuda.runtime.may_overwrite = True  # in the caches
    rng, size = RNG(6), 4
    bounds = {name: np.zeros((4, 2, 8), np.float32) for name in ("key_min", "key_max")}
    device = put_all(cuda, bounds)
    extended = [5, 6, 7, 5, *range(8, 12), *[-1] * 150, 6, 7, 11, *[-1] * 150, 5]
    restarted = [6, 4, 5, *[-1] * 140, 6, 4, 7, 5, *[-1] * 140, 7]
    for slots in ([4], extended, restarted):
        key = rng.standard_normal((len(slots), 2, 8)).astype(np.float32)
        caches = [np.zeros((4, size, 2, 8), np.float32) for _ in range(2)]
        pagecore.write_kv(*map(cuda.put, (key, key, *caches, np.array(slots))), **device)
        sparse.write_bounds(key, bounds["key_min"], bounds["key_max"], slots, size)
        for name, expected in bounds.items():
            assert_same_memory(cuda.get(device[name]), expected)


def test_nan_zeros_and_infinities_give_the_bits_of_the_host(cuda):
    rng = RNG(4)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38, -2], np.float32)
    key = rng.choice(special, (64, 2, 16)).astype(np.float32)
    cache = np.zeros((4, 16, 2, 16), np.float32)
    host = [np.zeros((4, 2, 16), np.float32) for _ in range(2)]
    device = [cuda.put(plane) for plane in host]
    pagecore.write_kv(key, key, cache.copy(), cache.copy(), range(64), key_min=host[0], key_max=host[1])
    arrays = [cuda.put(array) for array in (key, key, cache, cache)]
    pagecore.write_kv(*arrays, cuda.put(np.arange(64)), key_min=device[0], key_max=device[1])
    for plane, expected in zip(device, host, strict=True):
        assert_same_memory(cuda.get(plane), expected)


def test_quantised_writes_keep_the_bounds_of_the_keys_before_they_are_rounded(cuda):
    key = RNG(5).standard_normal((8, 2, 16)).astype(np.float32)
    codes = [cuda.put(np.zeros((2, 4, 2, 16), np.int8)) for _ in range(2)]
    scales = [cuda.put(np.zeros((2, 4, 2, 1), np.float32)) for _ in range(2)]
    low, high = (cuda.put(np.zeros((2, 2, 16), np.float32)) for _ in range(2))
    new, slots = cuda.put(key), cuda.put(np.arange(8))
    given = {"key_scale": scales[0], "value_scale": scales[1], "key_min": low, "key_max": high}
    pagecore.write_kv(new, new, *codes, slots, **given)
    np.testing.assert_array_equal(cuda.get(low), key.reshape(2, 4, 2, 16).min(axis=1))
    np.testing.assert_array_equal(cuda.get(high), key.reshape(2, 4, 2, 16).max(axis=1))
    assert np.abs(cuda.get(codes[0])).max() == 127


def test_a_write_with_summaries_is_two_launches_and_can_be_captured(cuda):
    key, cache = np.ones((3, 2, 16), np.float32), np.zeros((2, 4, 2, 16), np.float32)
    arrays = [cuda.put(array) for array in (key, key, cache, cache, np.arange(3))]
    planes = {name: cuda.put(np.zeros((2, 2, 16), np.float32)) for name in ("key_min", "key_max")}
    pagecore.write_kv(*arrays, **planes)
    replay = cuda.capture(lambda stream: pagecore.write_kv(*arrays, **planes, stream=stream))
    replay()
    assert (cuda.get(planes["key_max"])[0] == 1).all()
    if cuda.is_emulated:
        assert calls_of(cuda, lambda: pagecore.write_kv(*arrays, **planes))["launches"] == 2


def test_channels_past_the_head_dim_are_clamped_on_the_device_and_refused_on_the_host(cuda):
    key, cache = np.arange(8, dtype=np.float32).reshape(1, 1, 8), np.zeros((2, 4, 1, 8), np.float32)
    arrays = [cuda.put(array) for array in (key, key, cache, cache, np.arange(1))]
    label = cuda.put(np.zeros((2, 4, 1, 2), np.float32))
    pagecore.write_kv(*arrays, label=label, label_channels=cuda.put(np.array([[-3, 99]], np.int32)))
    assert cuda.get(label)[0, 0, 0].tolist() == [0, 7]
    with pytest.raises(errors.ShapeError, match="expected 0 to 7"):
        pagecore.write_kv(*arrays, label=label, label_channels=[[0, 8]])
    with pytest.raises(errors.UnsupportedDtype, match="must be int32"):
        pagecore.write_kv(*arrays, label=label, label_channels=cuda.put(np.array([[1, 2]], np.int64)))
    with pytest.raises(errors.ShapeError, match=r"label_channels has strides .*all must be multiples of 4"):
        pagecore.write_kv(*arrays, label=label, label_channels=cuda.put(odd((1, 2), np.int32)))


# ---- scores

SCORED = [
    ("float32", "float32", 64),
    ("bfloat16", "bfloat16", 128),
    ("float16", "bfloat16", 100),
    ("float32", "float16", 1),
]


@pytest.mark.parametrize("dtypes", cases(SCORED[1:3], SCORED))
@pytest.mark.parametrize("mixed", [False, True])
def test_scores_of_blocks_equal_the_twin(cuda, dtypes, mixed):
    rng, size, given, dim = RNG(5), 4, batch(mixed, 4), dtypes[2]
    planes = np.sort(rng.standard_normal((2, 200, 2, dim)), axis=0).astype(DTYPES[dtypes[1]])
    query = rng.standard_normal((given["cu_query_lens"][-1] + 2, 6, dim)).astype(DTYPES[dtypes[0]])
    arrays, device = [cuda.put(array) for array in (query, *planes)], put_all(cuda, given)
    for causal, group in ((True, "max"), (False, "mean")):
        got = ops.score_blocks(*arrays, **device, block_size=size, causal=causal, group=group)
        expected = sparse.score_blocks(query, *planes, **given, block_size=size, causal=causal, group=group)
        assert_scores(cuda.get(got), expected)


@pytest.mark.parametrize("heads", [(1, 1), (33, 1), (40, 2)], ids=str)
def test_any_number_of_query_heads_shares_a_key_head(cuda, heads):
    rng = RNG(6)
    planes = np.sort(rng.standard_normal((2, 9, heads[1], 24)), axis=0).astype(np.float32)
    query = rng.standard_normal((2, heads[0], 24)).astype(np.float32)
    table, lens = rng.permutation(9)[:8].reshape(2, 4).astype(np.int32), np.array([13, 16])
    got = ops.score_blocks(*map(cuda.put, (query, *planes, table, lens)), block_size=4)
    assert_scores(cuda.get(got), sparse.score_blocks(query, *planes, table, lens, block_size=4))


@pytest.mark.parametrize("dtypes", cases([("bfloat16", "float16")], [("float32", "float32"), ("bfloat16", "float16")]))
@pytest.mark.parametrize(("num_channels", "reduce"), [(16, "max_abs"), (21, "mean"), (1, "max_abs")])
def test_scores_of_tokens_equal_the_twin(cuda, dtypes, reduce, num_channels):
    rng = RNG(6)
    for mixed in (False, True):
        given = batch(mixed, 4)
        label = rng.standard_normal((200, 4, 2, num_channels)).astype(DTYPES[dtypes[1]])
        channels = rng.integers(0, 64, (2, num_channels))
        query = rng.standard_normal((given["cu_query_lens"][-1], 6, 64)).astype(DTYPES[dtypes[0]])
        expected = sparse.score_tokens(query, label, channels, **given, reduce=reduce)
        arrays, device = [cuda.put(array) for array in (query, label)], put_all(cuda, given)
        got = ops.score_tokens(*arrays, channels, **device | {"seq_lens": given["seq_lens"]}, reduce=reduce)
        assert_scores(cuda.get(got), expected)
        on_device = cuda.put(channels.astype(np.int32))
        got = cuda.get(ops.score_tokens(*arrays, on_device, **device, reduce=reduce))
        assert got.shape[2] == given["block_table"].shape[1] * 4
        assert_scores(got[..., : expected.shape[2]], expected)
        assert np.isneginf(got[..., expected.shape[2] :]).all()
        assert ops.score_tokens(*arrays, on_device, **device, max_len=5).shape[2] == 5


def test_long_rows_take_several_blocks_of_threads(cuda):
    rng, pages = RNG(7), 700
    planes = np.sort(rng.standard_normal((2, pages + 1, 1, 8)), axis=0).astype(np.float32)
    table, query = rng.permutation(pages + 1)[None, :pages].astype(np.int32), rng.standard_normal((1, 2, 8))
    query = query.astype(np.float32)
    arrays = [cuda.put(array) for array in (query, *planes, table, np.array([2 * pages - 1]))]
    got = ops.score_blocks(*arrays, block_size=2)
    assert_scores(cuda.get(got), sparse.score_blocks(query, *planes, table, [2 * pages - 1], block_size=2))


def test_bounds_of_infinities_and_of_queries_with_zeros_or_nan(cuda):
    low = np.array([[[-np.inf, 1]], [[np.inf, 2]], [[np.nan, 3]]], np.float32)
    high = np.array([[[np.inf, 1]], [[np.inf, 2]], [[np.nan, 3]]], np.float32)
    query = np.array([[[0, 2]], [[-0.0, 3]], [[1, 1]], [[-1, 0]], [[0, np.nan]]], np.float32)
    expected = [[2, 4, 6], [3, 6, 9], [np.inf, np.inf, -np.inf], [np.inf, -np.inf, -np.inf], [-np.inf] * 3]
    arguments = (query, low, high, np.tile(np.arange(3), (5, 1)), np.full(5, 6))
    np.testing.assert_array_equal(ops.score_blocks(*arguments, block_size=2)[:, 0], expected)
    got = ops.score_blocks(*map(cuda.put, arguments), block_size=2)
    np.testing.assert_array_equal(cuda.get(got)[:, 0], expected)


def test_invalid_entries_of_device_arrays_read_nothing_outside(cuda):
    rng = RNG(9)
    planes = [cuda.put(rng.standard_normal((5, 2, 8)).astype(np.float32)) for _ in range(2)]
    query = cuda.put(rng.standard_normal((3, 2, 8)).astype(np.float32))
    table = cuda.put(np.array([[9, -4, 2**40], [1, 2, 3], [4, 4, 4]]))
    for lens, cu, rows in (([2**40, -5, 3], [0, 1, 2, 3], [0, 1, 2]), ([4, 4, 4], [3, -9, 2**33, 1], [-1, 7, 2**35])):
        given = {"rows": cuda.put(np.array(rows)), "cu_query_lens": cuda.put(np.array(cu)), "block_size": 4}
        ops.score_blocks(query, *planes, table, cuda.put(np.array(lens)), **given)
    cuda.runtime.synchronize(0)


def test_lengths_on_the_host_are_checked_and_debug_checks_those_on_the_device(cuda):
    planes = [cuda.put(np.zeros((5, 2, 8), np.float32)) for _ in range(2)]
    query = cuda.put(np.zeros((1, 2, 8), np.float32))
    with pytest.raises(errors.ShapeError, match=r"seq_lens\[0\] is 9, which is more than 2 blocks of 4 hold"):
        ops.score_blocks(query, *planes, [[1, 2]], [9], block_size=4)
    wide = [cuda.put(np.zeros((2, 1, 520), np.float32)) for _ in range(3)]
    with pytest.raises(errors.UnsupportedOption, match="at most 512"):
        ops.score_blocks(*wide, [[1], [1]], [4, 4], block_size=4)
    pagecore.debug(True)
    try:
        with pytest.raises(errors.InvalidBlock, match="is 5"):
            ops.score_blocks(query, *planes, cuda.put(np.array([[5]])), cuda.put(np.array([4])), block_size=4)
    finally:
        pagecore.debug(False)


# ---- selections


def check_selection(cuda: Kit, scores: Any, budget: int, lens: Any, **options: Any) -> None:
    expected = expect_selection(scores, budget, lens, **options)
    width = max(budget + options.get("sinks", 0) + options.get("recent", 0), (options.get("threshold") or 0) - 1)
    for given in (lens, lens if isinstance(lens, int) else cuda.put(np.asarray(lens))):
        positions, counts = (cuda.get(x) for x in ops.select(cuda.put(scores), budget, lens=given, **options))
        assert positions.shape == (*scores.shape[:-1], width)
        assert counts.reshape(-1).tolist() == [len(row) for row in expected]
        for got, row in zip(positions.reshape(len(expected), width).tolist(), expected, strict=True):
            assert got == row + [-1] * (width - len(row))


def some_scores(kind: str, shape: tuple[int, ...]) -> Any:
    rng = RNG(1)
    if kind == "few values":
        return rng.integers(-3, 3, shape).astype(np.float32) / 4
    if kind == "equal":
        return np.full(shape, 0.5, np.float32)
    if kind == "extreme":
        special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38], np.float32)
        return rng.choice(special, shape)
    return rng.standard_normal(shape).astype(np.float32)


KINDS = ["normal", "few values", "equal", "extreme"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"sinks": 2, "recent": 4, "threshold": 40}], ids=str)
def test_selections_equal_the_twin(cuda, kind, options):
    scores = some_scores(kind, (7, 2, 200))
    for budget in (0, 17, 300):
        check_selection(cuda, scores, budget, [0, 1, 2, 39, 40, 199, 200], **options)
    check_selection(cuda, scores[0, 0], 3, 9, **options)


@pytest.mark.parametrize("kind", cases(["normal", "few values"], KINDS))
def test_rows_longer_than_shared_memory_equal_the_twin(cuda, kind):
    """10,000 scores: the keys of the first digit are held, or, if most are equal, read again."""
    scores = some_scores(kind, (2, 10_000))
    check_selection(cuda, scores, 700, [10_000, 9_001], sinks=1, recent=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 5, 64, 300])
def test_the_best_are_those_of_the_host_in_their_order(cuda, kind, k):
    scores, lens = some_scores(kind, (6, 200)), np.array([0, 1, 5, 64, 199, 200])
    got = ops.select_topk(cuda.put(scores), k, cuda.put(lens))
    np.testing.assert_array_equal(cuda.get(got), ops.select_topk(scores, k, lens))
    got = ops.select_topk(cuda.put(np.ascontiguousarray(scores[:, ::-1]))[:, 20:], k)
    np.testing.assert_array_equal(cuda.get(got), ops.select_topk(np.ascontiguousarray(scores[:, ::-1][:, 20:]), k))


def test_worked_example_variants_a7_and_e3_ties_go_to_the_lower_position(cuda):
    scores = cuda.put(np.array([[3, 4, 3, 0], [1, 3.5, 1, 0]], np.float32))
    assert cuda.get(ops.select_topk(scores, 2, [3, 4])).tolist() == [[1, 0], [1, 0]]
    pooled = cuda.put(np.array([0.55, 0.55, 0.55, 0.3, 0.3, 0.3, 0, 0], np.float32))
    positions, count = ops.select(pooled, 3, lens=8, recent=2)
    assert cuda.get(positions).tolist() == [0, 1, 2, 6, 7]
    assert cuda.get(count) == 5


def test_worked_example_variants_e1_quest(cuda):
    key = np.array([[1, 0], [0, 1.25], [3, -1], [-2, 1], [1, 1], [2, 2], [0, -3], [1, 0], [5, 5]], np.float32)[:, None]
    low, high = (cuda.put(np.zeros((5, 1, 2), np.float32)) for _ in range(2))
    caches = [cuda.put(np.zeros((5, 2, 1, 2), np.float32)) for _ in range(2)]
    new = cuda.put(key)
    pagecore.write_kv(new, new, *caches, range(9), key_min=low, key_max=high)
    query = cuda.put(np.array([[[1, 1], [-1, 2]]], np.float32))
    scores = ops.score_blocks(query, low, high, [range(5)], [9], block_size=2)
    assert cuda.get(scores).tolist() == [[[2.5, 4, 4, 1, 10]]]
    assert cuda.get(ops.select(scores, 2, lens=5, recent=1)[0]).tolist() == [[[1, 2, 4]]]


def test_selections_refuse(cuda):
    scores = cuda.put(np.zeros((2, 4), np.float32))
    for message, kind, call in (
        ("expected 0 to 4", errors.ShapeError, lambda: ops.select(scores, 1, lens=5)),
        ("expected 0 to 4", errors.ShapeError, lambda: ops.select_topk(scores, 1, [4, 5])),
        ("leading axes", errors.ShapeError, lambda: ops.select(scores, 1, lens=cuda.put(np.zeros(3, np.int32)))),
        ("must be int32", errors.UnsupportedDtype, lambda: ops.select(scores, 1, lens=scores[:, 0])),
        ("contiguous", errors.ShapeError, lambda: ops.select(scores[:, ::2], 1, lens=1)),
    ):
        with pytest.raises(kind, match=message):
            call()
    misaligned = cuda.put(odd((2, 4), np.float32)), cuda.put(odd((2,), np.int32))
    for name, given, lens in (("scores", misaligned[0], 4), ("lens", scores, misaligned[1])):
        with pytest.raises(errors.ShapeError, match=rf"^{name} has strides .*all must be multiples of 4"):
            ops.select(given, 1, lens=lens)
    with pytest.raises(errors.UnsupportedOption, match="at most 4096"):
        ops.select_topk(cuda.put(np.zeros((1, 5000), np.float32)), 4097)
