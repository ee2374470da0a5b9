"""gather_blocks and scatter_blocks equal a loop over tokens bit for bit, in every layout, dtype and size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore import errors, ops
from pagecore.arrays import as_tensor, zeros
from pagecore.arrays.dtypes.dtype import as_dtype
from tests.ops.block_cases import (
    ANY_DTYPE,
    RANKS,
    batch_of,
    poisoned,
    random_bytes,
    random_cache,
    random_numbers,
    shuffled_axes,
    twin_of,
    untouched_beside,
)
from tests.ops.cases import DTYPES, LAYOUTS, snapshot
from tests.reference import blocks as reference
from tests.together import together


def check_gather(
    cache: Any, table: Any, lens: Any, *, dtype: str | None = None, offset: int = 0, **options: Any
) -> None:
    """Gather into an array inside a poisoned buffer; check its bits, and that no other byte changes."""
    kind = cache.dtype if dtype is None else as_dtype(dtype).numpy
    shape = (int(np.sum(lens)), *cache.shape[2:])
    expected = np.empty(shape, kind)
    reference.gather(cache, expected, table, list(lens), **options)
    out, buffer = poisoned(shape, kind)
    unchanged = snapshot(cache)
    assert ops.gather_blocks(cache, table, lens, out=out, **options) is out
    assert out.tobytes() == expected.tobytes()
    assert untouched_beside(out, buffer)
    assert unchanged()


def check_scatter(cache: Any, values: Any, table: Any, lens: Any, **options: Any) -> None:
    """Check that every slot of the batch is written, and that no other byte of the cache's memory changes."""
    memory, expected_memory, expected = twin_of(cache)
    reference.scatter(values, expected, table, list(lens), **options)
    unchanged = snapshot(values)
    ops.scatter_blocks(values, cache, table, lens, **options)
    assert memory.tobytes() == expected_memory
    assert unchanged()


@together("layout", LAYOUTS)
@together("cache_dtype", DTYPES)
@together("dtype", DTYPES)
def test_sequences_come_and_go_packed_and_cast_in_every_layout(layout, cache_dtype, dtype):
    lens = [5, 0, 13, 4, 1, 8]
    table, lens = batch_of(lens, 4, 20, holes=0.3)
    cache = random_cache(layout, (20, 4, 3, 8), cache_dtype)
    check_gather(cache, table, lens, dtype=dtype)
    check_scatter(cache, random_numbers((31, 3, 8), dtype, 1), table, lens)


@together("dtype", ANY_DTYPE)
@together("rest", RANKS)
def test_planes_of_any_dtype_and_rank_move_bit_for_bit(dtype, rest):
    table, lens = batch_of([7, 3, 0, 9], 3, 12, holes=0.2)
    check_gather(random_bytes((12, 3, *rest), dtype), table, lens)
    check_scatter(random_bytes((12, 3, *rest), dtype), random_bytes((19, *rest), dtype, 1), table, lens)


@together("block_size", [1, 2, 5, 16, 33])
@together("ordered", [False, True])
@together("layout", ["NHD", "HND", "reversed"])
def test_every_length_around_the_edges_of_blocks(block_size, ordered, layout):
    lens = [n for k in (0, 1, 2) for n in range(k * block_size - 1, k * block_size + 2) if n >= 0]
    num_blocks = sum(-(-n // block_size) for n in lens) + 1
    table, lens = batch_of(lens, block_size, num_blocks, ordered=ordered)
    cache = random_cache(layout, (num_blocks, block_size, 2, 3), "float32")
    check_gather(cache, table, lens)
    check_scatter(cache, random_numbers((int(lens.sum()), 2, 3), "float32", 1), table, lens)


@together("dim", [1, 2, 3, 7, 8, 16, 31, 32, 33, 64, 100, 128, 129, 300])
@together("dtypes", [("float16", "float16"), ("bfloat16", "float32"), ("float32", "float16")])
def test_every_head_dim_is_moved_completely(dim, dtypes):
    table, lens = batch_of([6, 3], 4, 5)
    for layout in ("HND", "padded"):
        cache = random_cache(layout, (5, 4, 2, dim), dtypes[0])
        check_gather(cache, table, lens, dtype=dtypes[1])
        check_scatter(cache, random_numbers((9, 2, dim), dtypes[1], 1), table, lens)


def test_casts_are_those_of_numpy_for_every_bit_pattern():
    every = np.arange(2**16, dtype=np.uint16)
    rng = np.random.default_rng(0)
    sources = {
        "float16": every.view(np.float16),
        "bfloat16": every.view(DTYPES["bfloat16"]),
        "float32": rng.integers(0, 2**32, 2**16, dtype=np.uint32).view(np.float32),
    }
    for name, source in sources.items():
        cache = np.concatenate([source[:64], source]).reshape(-1, 8, 8)  # a null block, and then all
        table, lens = np.arange(1, cache.shape[0])[None], [2**13]
        for dtype in DTYPES.values():
            out = np.empty((2**13, 8), dtype)
            ops.gather_blocks(cache, table, lens, out=out)
            expected = reference.cast(source, dtype).reshape(out.shape)
            if dtype == source.dtype:
                assert out.tobytes() == expected.tobytes(), name
            with np.errstate(invalid="ignore"):  # signalling NaN
                nan = np.isnan(expected)
                assert np.isnan(out[nan]).all(), name
            bits = f"u{dtype.itemsize}"
            np.testing.assert_array_equal(out[~nan].view(bits), expected[~nan].view(bits), name)


def test_a_hole_gives_zeros_and_is_not_written():
    cache = np.full((4, 2, 3), np.nan, np.float32)
    cache[3] = 5
    table = np.asarray([[0, 3, 0]])
    np.testing.assert_array_equal(ops.gather_blocks(cache, table, [5])[:, 0], [0, 0, 5, 5, 0])
    ops.scatter_blocks(np.arange(15, dtype=np.float32).reshape(5, 3), cache, table, [5])
    np.testing.assert_array_equal(cache[3], [[6, 7, 8], [9, 10, 11]])
    assert np.isnan(cache[:3]).all()


@together("layout", LAYOUTS)
def test_without_a_null_block_block_0_holds_tokens(layout):
    cache = random_cache(layout, (7, 4, 2, 8), "float16")
    table, lens = np.asarray([[0, 1, 5], [2, 6, 0], [3, 0, 0]]), [9, 12, 3]
    check_gather(cache, table, lens, null_block=False)
    check_scatter(cache, random_numbers((24, 2, 8), "float16", 1), table, lens, null_block=False)


def test_values_for_holes_and_slots_past_the_length_are_left_alone():
    cache = np.full((4, 4, 2), 7, np.float32)
    values = np.full((6, 2), np.nan, np.float32)
    values[4:] = 1
    ops.scatter_blocks(values, cache, [[0, 2]], [6])
    np.testing.assert_array_equal(cache[2, :, 0], [1, 1, 7, 7])
    assert (cache[[0, 1, 3]] == 7).all()


def test_of_sequences_that_share_a_block_the_later_one_stays():
    cache = np.zeros((3, 2, 1), np.float32)
    ops.scatter_blocks(np.arange(1, 6, dtype=np.float32)[:, None], cache, [[1, 2], [1, 0]], [4, 1])
    np.testing.assert_array_equal(cache[..., 0], [[0, 0], [5, 2], [3, 4]])
    np.testing.assert_array_equal(ops.gather_blocks(cache, [[1], [1]], [2, 2])[:, 0], [5, 2, 5, 2])


@together("index_dtype", [np.int8, np.int32, np.uint32, np.int64])
def test_rows_pick_sequences_out_of_a_larger_table(index_dtype):
    table, lens = batch_of([9, 5, 12, 7], 4, 14)
    table = np.where((table < 0) | (table > 13), 0, table).astype(index_dtype)
    cache = random_cache("NHD", (14, 4, 2, 3), "float32")
    rows = np.asarray([3, 0, 3], index_dtype)
    check_gather(cache, table, lens[rows.astype(int)], rows=rows)
    check_scatter(cache, random_numbers((23, 2, 3), "float32"), table, lens[rows.astype(int)], rows=rows)


def test_index_arrays_may_be_strided_views_and_lists():
    cache = random_cache("NHD", (9, 2, 2, 3), "float32")
    expected = ops.gather_blocks(cache, np.asarray([[3, 8, 1], [2, 5, 7]], np.int32), np.asarray([5, 6], np.int32))
    wide = np.asarray([[2, 0, 5, 0, 7, 0], [3, 0, 8, 0, 1, 0]])[::-1, ::2]
    for table, lens in ((wide, (5, 6)), ([[3, 8, 1], [2, 5, 7]], np.asarray([6, 0, 5])[::-2])):
        assert ops.gather_blocks(cache, table, lens).tobytes() == expected.tobytes()


@together("table", [[], np.zeros((0, 4), np.int32), np.zeros((0, 0), np.int64)])
@together("rest", [(), (2, 3), (0, 3)])
def test_an_empty_batch_gives_nothing_and_writes_nothing(table, rest):
    cache = np.ones((3, 2, *rest), np.float32)
    assert ops.gather_blocks(cache, table, []).shape == (0, *rest)
    assert ops.gather_blocks(cache, [[1], [2]], [0, 0]).shape == (0, *rest)
    ops.scatter_blocks(np.ones((0, *rest), np.float32), cache, table, [])
    assert (cache == 1).all()


def test_planes_without_elements_are_served():
    cache = np.ones((3, 2, 0, 4), np.float16)
    assert ops.gather_blocks(cache, [[1]], [2]).shape == (2, 0, 4)
    ops.scatter_blocks(np.ones((2, 0, 4), np.float16), cache, [[1]], [2])


def test_a_list_of_caches_moves_together_each_in_its_own_shape_and_dtype():
    table, lens = batch_of([6, 9], 4, 8, holes=0.2)
    caches = [
        random_cache("HND", (8, 4, 2, 5), "bfloat16"),
        random_bytes((10, 4), "int8"),
        random_bytes((9, 4, 3), "int64"),
    ]
    gathered = ops.gather_blocks(caches, table, lens)
    assert isinstance(gathered, list)
    for cache, got in zip(caches, gathered, strict=True):
        expected = np.zeros((15, *cache.shape[2:]), cache.dtype)
        reference.gather(cache, expected, table, lens)
        assert got.dtype == cache.dtype
        assert got.tobytes() == expected.tobytes()
    targets = [np.zeros_like(cache) for cache in caches]
    expected_targets = [np.zeros_like(cache) for cache in caches]
    ops.scatter_blocks(tuple(gathered), targets, table, lens)
    for target, expected, values in zip(targets, expected_targets, gathered, strict=True):
        reference.scatter(values, expected, table, lens)
        assert target.tobytes() == expected.tobytes()
    outs = [np.zeros((15, 2, 5), np.float32), np.zeros(15, np.int8), np.zeros((15, 3), np.int64)]
    results = ops.gather_blocks(tuple(caches), table, lens, out=outs)
    assert all(result is out for result, out in zip(results, outs, strict=True))
    np.testing.assert_array_equal(outs[0], gathered[0].astype(np.float32))
    assert ops.gather_blocks([], table, lens) == []
    ops.scatter_blocks([], [], table, lens)


def test_a_result_may_be_strided_and_a_source_broadcast():
    cache = np.broadcast_to(np.arange(4, dtype=np.float32)[:, None, None], (4, 3, 5))
    out = np.zeros((4, 10), np.float32)[:, ::2]
    ops.gather_blocks(cache, [[2, 3]], [4], out=out)
    np.testing.assert_array_equal(out, [[2] * 5] * 3 + [[3] * 5])
    target = np.zeros((4, 5, 3), np.float32).transpose(0, 2, 1)
    ops.scatter_blocks(np.broadcast_to(np.float32(9), (4, 5)), target, [[2, 3]], [4])
    assert (target[2] == 9).all()
    assert target.sum() == 9 * 20


def test_packed_arrays_and_caches_at_odd_addresses_are_served():
    memory = np.zeros(4 * 2 * 3 * 4 + 1, np.uint8)
    cache = memory[1:].view(np.float32).reshape(4, 2, 3)
    values = np.arange(9, dtype=np.float32).reshape(3, 3)
    ops.scatter_blocks(values, cache, [[3, 1]], [3])
    assert ops.gather_blocks(cache, [[3, 1]], [3]).tobytes() == values.tobytes()


def test_far_blocks_of_a_huge_cache_are_reached():
    """Offsets past 2^31 bytes and blocks past 2^31 / block_size, by large strides over little memory."""
    memory = np.arange(64, dtype=np.float32)
    cache = np.lib.stride_tricks.as_strided(memory, (2**27, 16, 2), (0, 0, 4))
    assert ops.gather_blocks(cache, [[2**27 - 1]], [3]).tolist() == [[0, 1]] * 3
    table = zeros((3, 2**20, 8), "uint8").numpy()  # 24 MiB, of which a plane of one byte is used
    plane = table[:, :, :1]
    plane[2, -1] = 9
    assert ops.gather_blocks(plane, [[2]], [2**20])[-1] == 9


def test_results_share_no_memory():
    cache = random_cache("NHD", (4, 2, 2, 3), "float32")
    first = ops.gather_blocks(cache, [[1]], [2])
    second = ops.gather_blocks(cache, [[1]], [2])
    first[...] = 0
    assert not np.shares_memory(first, second)
    assert not np.shares_memory(second, cache)
    assert as_tensor(second).strides == (24, 12, 4)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_batch_with_any_strides_equals_a_loop_over_tokens(data):
    draw = data.draw
    block_size, num_blocks = draw(st.integers(1, 6)), draw(st.integers(2, 9))
    rest = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    lens = draw(st.lists(st.integers(0, 3 * block_size), max_size=4))
    width = max([-(-n // block_size) for n in lens], default=0) + draw(st.integers(0, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    table = rng.integers(0, num_blocks, (len(lens), width)).astype(draw(st.sampled_from([np.int32, np.int64])))
    dtype = draw(st.sampled_from([*DTYPES, "int8", "int64"]))
    other = draw(st.sampled_from([dtype, *DTYPES])) if dtype in DTYPES else dtype
    cache = shuffled_axes((num_blocks, block_size, *rest), as_dtype(dtype).numpy, draw, rng)
    packed = shuffled_axes((sum(lens), *rest), as_dtype(other).numpy, draw, rng)
    expected = packed.copy()
    reference.gather(cache, expected, table, lens)
    ops.gather_blocks(cache, table, lens, out=packed)
    assert packed.tobytes() == expected.tobytes()
    packed[...] = rng.integers(-100, 100, packed.shape)
    expected = cache.copy()
    reference.scatter(packed, expected, table, lens)
    ops.scatter_blocks(packed, cache, table, lens)
    assert cache.tobytes() == expected.tobytes()


@together("place", [0, 40, 90])
@together("bad", [-1, -(2**31), 30, 2**31 - 1])
def test_one_bad_block_leaves_everything_as_it_was(place, bad):
    table, lens = batch_of([50, 50], 2, 30 + 70)
    table = np.where((table < 0) | (table >= 30), table % 29 + 1, table)
    table[place // 50, place % 50 // 2] = bad
    caches = [random_cache("NHD", (100, 2, 2, 3), "float32"), random_cache("NHD", (30, 2, 2, 3), "float32")]
    packed = [random_numbers((100, 2, 3), "float32", seed) for seed in (1, 2)]
    unchanged = snapshot(*caches, *packed)
    with pytest.raises(errors.InvalidBlock, match=rf"block_table\[{place // 50}, {place % 50 // 2}\] is {bad} "):
        ops.scatter_blocks(packed, caches, table, lens)
    with pytest.raises(errors.InvalidBlock, match=str(bad)):
        ops.gather_blocks(caches, table, lens, out=packed)
    assert unchanged()
