"""Sequences gathered and scattered on a CUDA device, against loops over tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore.arrays import as_dtype, strided
from pagecore.errors import InvalidBlock, InvalidSequence, ShapeError, UnsupportedOption
from tests.cuda.kit import Kit
from tests.cuda.memory import assert_same_memory, require_memory
from tests.cuda.move_cases import CASTS, PLACES, check_all, indices, put_all
from tests.ops.block_cases import ANY_DTYPE, RANKS, batch_of, random_bytes, random_cache, random_numbers
from tests.ops.cases import DTYPES, LAYOUTS


def tokens_of(table: Any, lens: Any, rows: Any, block_size: int, num_blocks: int) -> list[tuple[int, int]]:
    """Return (block, offset) of all tokens of a batch in order; block 0 for a hole."""
    found = []
    for i, length in enumerate(lens):
        row = int(rows[i]) if rows is not None else i
        for t in range(min(max(int(length), 0), table.shape[1] * block_size)):
            block = int(table[row, t // block_size]) if 0 <= row < len(table) else 0
            found.append((block if 0 < block < num_blocks else 0, t % block_size))
    return found


def gathered(cache: Any, places: list[tuple[int, int]], dtype: Any) -> Any:
    packed = np.zeros((len(places), *cache.shape[2:]), dtype)
    for i, (block, offset) in enumerate(places):
        if block:
            packed[i] = cache[block, offset].astype(dtype)
    return packed


def scatter(packed: Any, cache: Any, places: list[tuple[int, int]]) -> None:
    for i, (block, offset) in enumerate(places):
        if block:
            cache[block, offset] = packed[i].astype(cache.dtype)


def round_trip(cuda: Kit, cache: Any, batch: Any, packed_dtype: Any, place: str = "host", rows: Any = None) -> None:
    """Gather sequences and scatter them into a cache of other numbers; compare both with loops over tokens."""
    table, lens = batch
    places = tokens_of(table, lens, rows, cache.shape[1], cache.shape[0])
    args = [indices(cuda, table, place), indices(cuda, lens, place)]
    picked = None if rows is None else indices(cuda, rows, place)
    expected = gathered(cache, places, packed_dtype)
    out = cuda.empty(expected.shape, packed_dtype)
    device = cuda.put(cache)
    assert pagecore.gather_blocks(device, *args, rows=picked, out=out) is out
    assert_same_memory(cuda.get(out), expected)
    if place == "host" and packed_dtype == cache.dtype:
        made = pagecore.gather_blocks(device, *args, rows=picked)
        assert_same_memory(cuda.get(made), expected)
    cache[...] = np.asarray(77).astype(cache.dtype)
    device = cuda.put(cache)
    scatter(expected, cache, places)
    pagecore.scatter_blocks(out, device, *args, rows=picked)
    assert_same_memory(cuda.get(device), cache)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_are_gathered_and_scattered_in_every_layout(cuda, layout, place):
    batch = batch_of([7, 0, 12, 1, 4], 4, 20, holes=0.2)
    round_trip(cuda, random_cache(layout, (20, 4, 3, 16), "bfloat16"), batch, DTYPES["bfloat16"], place)


@pytest.mark.parametrize("casts", CASTS, ids="-".join)
@pytest.mark.parametrize("layout", ["NHD", "HND", "padded"])
def test_numbers_are_cast_on_the_way(cuda, layout, casts):
    for dim in (16, 20, 5):
        batch = batch_of([7, 3], 4, 9, holes=0.3, seed=dim)
        round_trip(cuda, random_cache(layout, (9, 4, 3, dim), casts[0]), batch, DTYPES[casts[1]])


@pytest.mark.parametrize("dtype", ANY_DTYPE)
@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_planes_of_any_dtype_and_rank_keep_their_bits(cuda, rank, dtype):
    cache = random_bytes((9, 4, *rank), dtype)
    table, lens = batch_of([5, 9], 4, 9)
    places = tokens_of(table, lens, None, 4, 9)
    device, expected = cuda.put(cache), gathered(cache.view(f"u{cache.itemsize}"), places, f"u{cache.itemsize}")
    got = cuda.get(pagecore.gather_blocks(device, table.tolist(), lens.tolist()))
    assert got.dtype == as_dtype(dtype).numpy
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("block_size", [1, 3, 16, 17, 64, 256])
def test_sequences_around_the_edges_of_blocks(cuda, block_size):
    lens = [0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size]
    batch = batch_of(lens, block_size, 20)
    round_trip(cuda, random_numbers((20, block_size, 2, 8), "float16"), batch, DTYPES["float16"], "int32")


@pytest.mark.parametrize("dim", [1, 3, 5])
def test_tokens_shorter_than_a_vector_in_partial_blocks(cuda, dim):
    """A whole block is a multiple of 16 bytes; the tokens that a sequence uses of it are not."""
    round_trip(cuda, random_numbers((9, 8, 1, dim), "float16"), batch_of([3, 8, 13, 1], 8, 9), DTYPES["float16"])


@pytest.mark.parametrize("place", PLACES)
def test_rows_pick_sequences_of_a_larger_table(cuda, place):
    table, _ = batch_of([8, 8, 8, 8, 8], 4, 20)
    round_trip(
        cuda,
        random_numbers((20, 4, 2, 8), "float32"),
        (table, np.asarray([3, 8, 5])),
        DTYPES["float32"],
        place,
        [4, 0, 2],
    )


@pytest.mark.slow
def test_offsets_of_many_sequences_are_summed(cuda):
    """More sequences than a block of threads sums in one round."""
    lens = np.random.default_rng(0).integers(0, 6, 300)
    batch = batch_of(lens, 2, 800)
    round_trip(cuda, random_numbers((800, 2, 3), "float32"), batch, DTYPES["float32"], "int64")


@pytest.mark.slow
def test_sequences_of_more_blocks_than_the_grid(cuda):
    """Two sequences share 2^15 thread blocks, so each thread block copies every 2^14th block of a sequence."""
    cache = random_numbers((2**14 + 50, 1, 3), "float32")
    table, lens = batch_of([3, 2**14 + 40], 1, 2**14 + 50)
    got = pagecore.gather_blocks(cuda.put(cache), cuda.put(table), lens)
    np.testing.assert_array_equal(cuda.get(got), cache[np.concatenate([table[0, :3], table[1, : lens[1]]]), 0])


def test_caches_of_a_list_share_a_table(cuda):
    table, lens = batch_of([5, 6], 4, 9)
    caches = [random_numbers((9, 4, 2, 8), "float32", i) for i in range(3)]
    caches += [random_cache("HND", (9 + i, 4, 2, 12), "bfloat16", i) for i in range(2)]
    places = tokens_of(table, lens, None, 4, 9)
    device = put_all(cuda, caches)
    made = pagecore.gather_blocks(device, table, lens)
    expected = [gathered(cache, places, cache.dtype) for cache in caches]
    check_all(cuda, made, expected)
    for cache, packed in zip(caches, expected, strict=True):
        cache[...] = 5
        scatter(packed, cache, places)
    again = [cuda.put(np.full_like(cache, 5)) for cache in caches]
    again[3:] = [
        cuda.put(np.full_like(cache.transpose(0, 2, 1, 3), 5, order="C").transpose(0, 2, 1, 3)) for cache in caches[3:]
    ]
    pagecore.scatter_blocks(made, again, table, lens)
    check_all(cuda, again, caches)


def test_invalid_blocks_rows_and_lengths_on_the_device_are_read_as_holes(cuda):
    """Blocks out of range are holes, rows out of range hold only holes, lengths are clamped to the table."""
    cache = random_numbers((9, 4, 2, 8), "float32")
    table = np.asarray([[3, -1, 2], [9, 4, 2**31 - 1], [-(2**31), 0, 5], [1, 6, 7]], np.int32)
    lens = np.asarray([7, 12, 2**31 - 1, -4, 5, 2**40, -(2**40), 1])
    rows = np.asarray([0, 1, 2, 3, 4, -1, 2, 3])
    places = tokens_of(table, lens, rows, 4, 9)
    args = [cuda.put(table), cuda.put(lens)]
    expected = gathered(cache, places, cache.dtype)
    for length in (len(places), len(places) + 3, len(places) - 9, 8, 1, 0):
        out = cuda.empty((length, 2, 8))
        before = cuda.get(out)
        device = cuda.put(cache)
        pagecore.gather_blocks(device, *args, rows=cuda.put(rows), out=out)
        before[: len(places)] = expected[:length]
        assert_same_memory(cuda.get(out), before)
        values = random_numbers((length, 2, 8), "float32", 3)
        want = cache.copy()
        scatter(values, want, places[:length])
        pagecore.scatter_blocks(cuda.put(values), device, *args, rows=cuda.put(rows))
        assert_same_memory(cuda.get(device), want)


@pytest.mark.parametrize("place", PLACES)
def test_without_a_null_block_block_0_holds_tokens(cuda, place):
    cache, values = random_numbers((9, 4, 2, 8), "float32"), random_numbers((17, 2, 8), "float32", 1)
    table, lens = np.asarray([[0, 8, 3], [5, 0, 0], [7, 0, 1]], np.int32), np.asarray([12, 3, 2])
    if place != "host":
        table[0, 1], table[2, 0] = 9, -1  # holes
    batch = [indices(cuda, table, place), indices(cuda, lens, place)]
    device, out = cuda.put(cache), cuda.empty((17, 2, 8))
    pagecore.gather_blocks(device, *batch, null_block=False, out=out)
    got = cuda.get(out)
    pagecore.scatter_blocks(cuda.put(values), device, *batch, null_block=False)
    slots = [(table[i, t // 4], t % 4) for i in range(3) for t in range(lens[i])]
    for (block, offset), row, value in zip(slots, got, values, strict=True):
        exists = 0 <= block < 9
        np.testing.assert_array_equal(row, cache[block, offset] if exists else 0)
        if exists:
            cache[block, offset] = value
    assert_same_memory(cuda.get(device), cache)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_negative_lengths_count_as_zero(cuda, index_dtype):
    cache = random_numbers((9, 4, 2), "float32")
    table, lens = cuda.put(np.asarray([[1, 2], [3, 4], [5, 6]])), np.asarray([-1, 5, -(2**31)], index_dtype)
    out = cuda.empty((5, 2))
    pagecore.gather_blocks(cuda.put(cache), table, cuda.put(lens), out=out)
    np.testing.assert_array_equal(cuda.get(out), np.concatenate([cache[3], cache[4, :1]]))


def test_a_cache_without_blocks_holds_only_holes(cuda):
    cache, out = cuda.put(np.zeros((0, 4, 2), np.float32)), cuda.empty((5, 2))
    args = cuda.put(np.asarray([[1, 2]])), cuda.put(np.asarray([5]))
    pagecore.gather_blocks(cache, *args, out=out)
    assert not cuda.get(out).any()
    pagecore.scatter_blocks(out, cache, *args)


def test_indices_on_the_host_are_checked(cuda):
    cache = cuda.put(random_numbers((9, 4, 2), "float32"))
    with pytest.raises(InvalidBlock, match=r"block_table\[0, 1\] is 9 and the cache has 9 blocks; sequence 0"):
        pagecore.gather_blocks(cache, [[3, 9]], [5])
    with pytest.raises(InvalidSequence, match="sequence 0 is row 1 of a block table of 1 rows"):
        pagecore.gather_blocks(cache, [[3, 2]], [5], rows=[1])
    with pytest.raises(ShapeError, match=r"seq_lens\[0\] is 9, which is more than 2 blocks"):
        pagecore.gather_blocks(cache, cuda.put(np.asarray([[3, 2]])), [9])
    with pytest.raises(ShapeError, match=r"values has shape \(4, 2\); axis 0 must have length 5"):
        pagecore.scatter_blocks(cuda.empty((4, 2)), cache, [[3, 2]], [5])


def test_gathering_without_out_requires_lengths_on_the_host(cuda):
    cache = cuda.put(random_numbers((9, 4, 2), "float32"))
    table, lens = cuda.put(np.asarray([[3, 2]])), cuda.put(np.asarray([5]))
    with pytest.raises(UnsupportedOption, match=r"seq_lens is on cuda:0; the host cannot sum it.*out="):
        pagecore.gather_blocks(cache, table, lens)
    with pytest.raises(ShapeError, match=r"out\[1\] has shape \(4, 2\); axis 0 must have length 5: as out\[0\] has"):
        pagecore.gather_blocks([cache, cache], table, lens, out=[cuda.empty((5, 2)), cuda.empty((4, 2))])
    assert pagecore.gather_blocks(cache, table, [5]).shape == (5, 2)


def test_no_sequences(cuda):
    cache = cuda.put(random_numbers((9, 4, 2), "float32"))
    assert pagecore.gather_blocks(cache, [], []).shape == (0, 2)
    assert pagecore.gather_blocks(cache, [[], []], [0, 0]).shape == (0, 2)
    empty = cuda.put(np.zeros((0, 3), np.int32)), cuda.put(np.zeros(0, np.int32))
    pagecore.gather_blocks(cache, *empty, out=cuda.empty((0, 2)))
    pagecore.scatter_blocks(cuda.empty((0, 2)), cache, *empty)


@pytest.mark.slow
def test_packed_arrays_past_2_to_the_31_bytes_are_reached(cuda):
    """A sequence of holes needs no blocks, and the packed array is a view that overlaps itself."""
    length = 2**20
    require_memory(cuda, 2**33)
    packed = strided(cuda.empty((2**31 + 64,), "float16"), (length, 16), (4096, 2))
    table = np.zeros((2, length // 256), np.int32)
    table[1, 0] = 2
    lens = np.asarray([length - 200, 200])
    cache = cuda.put(random_numbers((3, 256, 16), "float16"))
    pagecore.scatter_blocks(packed[-200:], cache, cuda.put(table[1:]), cuda.put(lens[1:]))
    values = cuda.get(cache)[2, :200]
    blank = cuda.put(np.zeros((3, 256, 16), np.float16))
    pagecore.scatter_blocks(packed, blank, cuda.put(table), cuda.put(lens))
    np.testing.assert_array_equal(cuda.get(blank)[2, :200].view(np.uint16), values.view(np.uint16))


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_threads_does_not_change_the_result(cuda, seed):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it chooses the order of threads")
    cuda.runtime.seed = seed
    batch = batch_of([7, 300, 12], 4, 90, holes=0.2)
    round_trip(cuda, random_cache("HND", (90, 4, 3, 16), "bfloat16"), batch, DTYPES["float32"], "int32")


def test_a_table_may_have_more_rows_than_32_bits_count(cuda):
    cache = random_numbers((4, 4, 2), "float32")
    table = strided(cuda.put(np.asarray([2, 3], np.int32)), (2**32 + 1, 2), (0, 4))
    got = pagecore.gather_blocks(cuda.put(cache), table, cuda.put(np.asarray([5])), rows=[9], out=cuda.empty((5, 2)))
    np.testing.assert_array_equal(cuda.get(got), cache[2:].reshape(8, 2)[:5])


def test_more_sequences_than_32_bits_count_are_refused(cuda):
    count = 2**32 + 1
    cache, table = cuda.empty((4, 4, 2)), strided(cuda.put(np.zeros(2, np.int32)), (count, 2), (0, 4))
    lens = strided(cuda.put(np.zeros(1, np.int32)), (count,), (0,))
    with pytest.raises(ShapeError, match=f"seq_lens holds {count} sequences; on CUDA at most 2147483647"):
        pagecore.gather_blocks(cache, table, lens, out=cuda.empty((5, 2)))
