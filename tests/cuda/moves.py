"""Blocks copied, gathered, scattered and transferred on a CUDA device, against loops over tokens and pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore.arrays import as_dtype, strided
from pagecore.errors import InvalidBlock, InvalidSequence, ShapeError, UnsupportedOption
from tests.cuda.kit import Kit
from tests.cuda.memory import assert_same_memory, calls_of, want_memory
from tests.ops.block_cases import ANY_DTYPE, RANKS, batch_of, random_bytes, random_cache, random_numbers
from tests.ops.cases import DTYPES, LAYOUTS

PLACES = ["host", "int32", "int64"]
CASTS = [(a, b) for a in DTYPES for b in DTYPES if a != b]


def indices(cuda: Kit, values: Any, place: str) -> Any:
    """Index arrays on the host as lists, or on the device with gaps between rows."""
    if place == "host":
        return np.asarray(values).tolist() if len(values) else np.asarray(values)
    array = np.asarray(values, place)
    spaced = np.full((array.shape[0], 2, *array.shape[1:]), -7, place)
    spaced[:, 1] = array
    return cuda.put(spaced[:, 1])


def put_all(cuda: Kit, arrays: Any) -> list[Any]:
    return [cuda.put(array) for array in arrays]


def check_all(cuda: Kit, got: Any, expected: Any) -> None:
    for tensor, array in zip(got, expected, strict=True):
        assert_same_memory(cuda.get(tensor), array)


# copy_blocks


def copy_in_order(cache: Any, pairs: Any) -> None:
    for source, target in pairs:
        if 0 <= source < len(cache) and 0 <= target < len(cache):
            cache[target] = cache[source]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_copied_whole_in_every_layout_and_nothing_else(cuda, layout, place):
    made = [random_cache(layout, (10, 5, 3, dim), "float16", dim) for dim in (8, 3, 40)]
    device = put_all(cuda, made)
    pairs = [(1, 7), (3, 2), (1, 9), (4, 4)]
    for cache in made:
        copy_in_order(cache, pairs)
    pagecore.copy_blocks(device, indices(cuda, pairs, place))
    check_all(cuda, device, made)


@pytest.mark.parametrize("dtype", ANY_DTYPE)
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 4, 2), (6, 4, 2, 3), (6, 2, 4, 2, 3), (6, 2, 1, 2, 3, 2, 1, 2)])
def test_planes_of_any_dtype_and_rank_are_copied_bit_for_bit(cuda, shape, dtype):
    cache = random_bytes(shape, dtype)
    device = cuda.put(cache)
    cache[4], cache[0] = cache[1].copy(), cache[5].copy()
    pagecore.copy_blocks(device, [(1, 4), (5, 0)])
    assert_same_memory(cuda.get(device), cache)


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("width", [2, 6, 12, 40, 64])
def test_blocks_at_any_address_are_copied(cuda, offset, width):
    """Strides and addresses that allow 1, 2, 4, 8 and 16 bytes at once."""
    memory = np.random.default_rng(0).integers(0, 256, 8 * width * 2 + 32, dtype=np.uint8)
    cache = memory[offset : offset + 8 * width * 2].reshape(8, 2, width)[:, ::-1]
    device = cuda.put(cache)
    cache[[3, 7]] = cache[[1, 2]]
    pagecore.copy_blocks(device, [(1, 3), (2, 7)])
    assert_same_memory(cuda.get(device), cache)


CHAINS = {
    "apart": [(1, 20), (2, 21), (1, 22)],
    "chain": [(1, 2), (2, 3), (3, 4), (0, 1)],
    "long chain": [(i, i + 1) for i in range(29)],
    "cycle": [(1, 2), (3, 1), (2, 3), (5, 5), (3, 5)],
    "same target": [(1, 9), (2, 9), (3, 9), (9, 4)],
    "read, then written": [(1, 2), (3, 1), (4, 3)],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_later_pair_sees_what_earlier_ones_wrote(cuda, chain, place):
    cache = np.arange(30 * 200, dtype=np.int32).reshape(30, 200)
    device = cuda.put(cache)
    copy_in_order(cache, CHAINS[chain])
    pagecore.copy_blocks(device, indices(cuda, CHAINS[chain], place))
    assert_same_memory(cuda.get(device), cache)


@pytest.mark.parametrize("seed", range(8))
def test_random_pairs_are_copied_in_their_order(cuda, seed):
    """More than a launch takes, from pairs that have nothing to do with each other to such as nearly all do."""
    rng = np.random.default_rng(seed)
    num_blocks = int(rng.choice([3, 20, 300, 5000]))
    cache = np.arange(num_blocks * 3, dtype=np.int64).reshape(num_blocks, 3)
    pairs = rng.integers(0, num_blocks, (300, 2))
    device = [cuda.put(cache), cuda.put(cache)]
    cuda.runtime.seed = seed
    pagecore.copy_blocks(device[0], pairs)
    pagecore.copy_blocks(device[1], cuda.put(pairs))
    copy_in_order(cache, pairs)
    check_all(cuda, device, [cache, cache])


def test_pairs_that_lie_apart_are_one_launch_for_all_layers_however_many_waves_others_take(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    layers = [cuda.put(random_numbers((40, 4, 2, 8), "bfloat16", i)) for i in range(20)]
    apart = [(i, i + 20) for i in range(20)]
    for pairs, launches in ((apart, 1), ([*apart, (20, 0)], 2), ([(i, i + 1) for i in range(30)], 1)):
        before = cuda.runtime.counts["launches"]
        pagecore.copy_blocks(layers, pairs)
        assert cuda.runtime.counts["launches"] == before + launches


def test_more_arrays_than_a_launch_takes_and_of_many_shapes(cuda):
    rng = np.random.default_rng(0)
    caches = [random_numbers((5, 4, int(rng.integers(1, 4)), 8), "float32", i) for i in range(130)]
    caches += [random_numbers((5, 2, 8), "float16", i) for i in range(113)]
    device = put_all(cuda, caches)
    for cache in caches:
        copy_in_order(cache, [(1, 4), (2, 3)])
    pagecore.copy_blocks(device, [(1, 4), (2, 3)])
    check_all(cuda, device, caches)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_pairs_on_the_device_that_make_no_sense_are_left_out(cuda, index_dtype):
    big, small = random_numbers((9, 4, 8), "float32"), random_numbers((7, 4, 8), "float32", 1)
    info = np.iinfo(index_dtype)
    pairs = np.asarray([(-1, 2), (2, -1), (7, 2), (2, 8), (info.max, 1), (1, info.min), (3, 6), (6, 0)], index_dtype)
    device = put_all(cuda, (big, small))
    for cache in (big, small):
        copy_in_order(cache, [(3, 6), (6, 0)])
    pagecore.copy_blocks(device, cuda.put(pairs))
    check_all(cuda, device, (big, small))


@pytest.mark.parametrize("pair", [(-1, 2), (2, -1), (10, 2), (2, 10), (2**31 - 1, 1), (1, 2**40)])
def test_one_bad_pair_on_the_host_leaves_every_cache_as_it_was(cuda, pair):
    caches = [random_numbers((10, 4), "float32", i) for i in range(2)]
    device = put_all(cuda, caches)
    with pytest.raises(InvalidBlock, match=str(min(pair) if min(pair) < 0 else max(pair))):
        pagecore.copy_blocks(device, [(3, 4), pair])
    check_all(cuda, device, caches)


def test_nothing_to_copy(cuda):
    cache = cuda.put(random_numbers((4, 4), "float32"))
    for pairs in ([], np.zeros((0, 2), np.int32), cuda.put(np.zeros((0, 2), np.int64))):
        pagecore.copy_blocks([cache, cuda.put(np.zeros((4, 0), np.float32))], pairs)
    pagecore.copy_blocks([cuda.put(np.zeros((4, 0, 3), np.float32))], [(1, 2)])
    pagecore.copy_blocks([cuda.put(np.zeros((0, 3), np.float32))], cuda.put(np.asarray([(0, 1)])))


# gather_blocks and scatter_blocks


def tokens_of(table: Any, lens: Any, rows: Any, block_size: int, num_blocks: int) -> list[tuple[int, int]]:
    """(block, offset) of all tokens of a batch in order; block 0 where there is none."""
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
    """Gathers, and scatters into a cache of other numbers."""
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


def test_many_sequences_find_where_they_begin(cuda):
    """More than a block of threads adds up in one step."""
    lens = np.random.default_rng(0).integers(0, 6, 300)
    batch = batch_of(lens, 2, 800)
    round_trip(cuda, random_numbers((800, 2, 3), "float32"), batch, DTYPES["float32"], "int64")


def test_sequences_of_more_blocks_than_are_worked_on_at_once(cuda):
    """Two of them share 2^15 blocks of threads, which then take every 2^14th block."""
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


def test_of_tables_and_lengths_on_the_device_only_what_makes_sense_is_read(cuda):
    """Blocks out of range are holes, rows out of range have none but holes, lengths end where the table does."""
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


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_negative_lengths_are_none(cuda, index_dtype):
    cache = random_numbers((9, 4, 2), "float32")
    table, lens = cuda.put(np.asarray([[1, 2], [3, 4], [5, 6]])), np.asarray([-1, 5, -(2**31)], index_dtype)
    out = cuda.empty((5, 2))
    pagecore.gather_blocks(cuda.put(cache), table, cuda.put(lens), out=out)
    np.testing.assert_array_equal(cuda.get(out), np.concatenate([cache[3], cache[4, :1]]))


def test_a_cache_without_blocks_holds_nothing_but_holes(cuda):
    cache, out = cuda.put(np.zeros((0, 4, 2), np.float32)), cuda.empty((5, 2))
    args = cuda.put(np.asarray([[1, 2]])), cuda.put(np.asarray([5]))
    pagecore.gather_blocks(cache, *args, out=out)
    assert not cuda.get(out).any()
    pagecore.scatter_blocks(out, cache, *args)


def test_the_host_checks_what_it_sees(cuda):
    cache = cuda.put(random_numbers((9, 4, 2), "float32"))
    with pytest.raises(InvalidBlock, match=r"block_table\[0, 1\] is 9 and the cache has 9 blocks; sequence 0"):
        pagecore.gather_blocks(cache, [[3, 9]], [5])
    with pytest.raises(InvalidSequence, match="sequence 0 is row 1 of a block table of 1 rows"):
        pagecore.gather_blocks(cache, [[3, 2]], [5], rows=[1])
    with pytest.raises(ShapeError, match=r"seq_lens\[0\] is 9, which is more than 2 blocks"):
        pagecore.gather_blocks(cache, cuda.put(np.asarray([[3, 2]])), [9])
    with pytest.raises(ShapeError, match=r"values has shape \(4, 2\); axis 0 must have length 5"):
        pagecore.scatter_blocks(cuda.empty((4, 2)), cache, [[3, 2]], [5])


def test_a_result_wants_lengths_that_the_host_can_add_up(cuda):
    cache = cuda.put(random_numbers((9, 4, 2), "float32"))
    table, lens = cuda.put(np.asarray([[3, 2]])), cuda.put(np.asarray([5]))
    with pytest.raises(UnsupportedOption, match=r"seq_lens is on cuda:0, where their sum is not known.*out="):
        pagecore.gather_blocks(cache, table, lens)
    with pytest.raises(ShapeError, match=r"out\[1\] has shape \(4, 2\); axis 0 must have length 5: as out\[0\] has"):
        pagecore.gather_blocks([cache, cache], table, lens, out=[cuda.empty((5, 2)), cuda.empty((4, 2))])
    assert pagecore.gather_blocks(cache, table, [5]).shape == (5, 2)


def test_no_sequences_no_tokens(cuda):
    cache = cuda.put(random_numbers((9, 4, 2), "float32"))
    assert pagecore.gather_blocks(cache, [], []).shape == (0, 2)
    assert pagecore.gather_blocks(cache, [[], []], [0, 0]).shape == (0, 2)
    empty = cuda.put(np.zeros((0, 3), np.int32)), cuda.put(np.zeros(0, np.int32))
    pagecore.gather_blocks(cache, *empty, out=cuda.empty((0, 2)))
    pagecore.scatter_blocks(cuda.empty((0, 2)), cache, *empty)


# transfer_blocks


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "layouts", [("NHD", "HND"), ("HND", "blockwise"), ("reversed", "interleaved"), ("NHD", "padded")]
)
def test_blocks_reach_caches_of_other_layouts_and_sizes(cuda, layouts, place):
    sources = [random_cache(layouts[0], (9, 4, 3, dim), "float16", dim) for dim in (16, 5)]
    targets = [random_cache(layouts[1], (20, 4, 3, dim), "float16", dim + 1) for dim in (16, 5)]
    pairs = [(1, 19), (8, 2), (3, 3), (1, 7)]
    device = put_all(cuda, targets)
    pagecore.transfer_blocks(put_all(cuda, sources), device, indices(cuda, pairs, place))
    for source, target in zip(sources, targets, strict=True):
        for a, b in pairs:
            target[b] = source[a]
    check_all(cuda, device, targets)


@pytest.mark.parametrize("casts", CASTS, ids="-".join)
def test_blocks_are_cast_on_the_way(cuda, casts):
    for dim, layouts in ((32, ("NHD", "NHD")), (12, ("HND", "NHD")), (5, ("NHD", "HND"))):
        source = random_cache(layouts[0], (9, 4, 3, dim), casts[0])
        target = random_cache(layouts[1], (9, 4, 3, dim), casts[1], 1)
        device = cuda.put(target)
        pagecore.transfer_blocks(cuda.put(source), device, [(1, 8), (8, 2)])
        target[8], target[2] = source[1].astype(target.dtype), source[8].astype(target.dtype)
        assert_same_memory(cuda.get(device), target)


@pytest.mark.parametrize("place", PLACES)
def test_of_equal_targets_the_later_pair_stays(cuda, place):
    source, target = random_numbers((40, 4, 30), "float32"), random_numbers((40, 4, 30), "float32", 1)
    pairs = [(i, 1 + i % 3) for i in range(1, 40)]
    device = cuda.put(target)
    pagecore.transfer_blocks(cuda.put(source), device, indices(cuda, pairs, place))
    for a, b in pairs:
        target[b] = source[a]
    assert_same_memory(cuda.get(device), target)


def test_pairs_of_a_transfer_on_the_device_that_make_no_sense_are_left_out(cuda):
    source, target = random_numbers((9, 4, 8), "float32"), random_numbers((7, 4, 8), "float32", 1)
    device = cuda.put(target)
    pairs = [(0, 2), (2, 0), (9, 2), (2, 7), (-1, 3), (3, -1), (8, 6), (2**31 - 1, 1)]
    pagecore.transfer_blocks(cuda.put(source), device, cuda.put(np.asarray(pairs, np.int32)))
    target[6] = source[8]
    assert_same_memory(cuda.get(device), target)
    with pytest.raises(InvalidBlock, match="the target of pair 0 is 0"):
        pagecore.transfer_blocks(cuda.put(source), device, [(2, 0)])


def test_odd_addresses_move_as_bytes_and_are_not_cast(cuda):
    memory = np.random.default_rng(0).integers(0, 256, 9 * 4 * 8 + 1, dtype=np.uint8)
    source = memory[1:].view(np.float32).reshape(9, 4, 2)
    target = np.zeros((9, 4, 2), np.float32)
    device, odd = cuda.put(target), cuda.put(source)
    pagecore.transfer_blocks(odd, device, [(1, 2)])
    target[2] = source[1]
    assert_same_memory(cuda.get(device), target)
    with pytest.raises(ShapeError, match="no multiple of 4 bytes; where dtypes differ"):
        pagecore.transfer_blocks(odd, cuda.empty((9, 4, 2), "float16"), [(1, 2)])
    with pytest.raises(ShapeError, match="no multiple of 4 bytes; where dtypes differ"):
        pagecore.gather_blocks(odd, [[1]], [3], out=cuda.empty((3, 2), "float16"))


# all of them


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_blocks_past_two_to_the_31_elements_are_reached(cuda, layout):
    heads, dim, size = 8, 64, 12
    num_blocks = 2**32 // (size * heads * dim) + 3
    want_memory(cuda, 2 * 2**33)
    cache = cuda.empty((num_blocks, size, heads, dim), "bfloat16")
    if layout == "HND":
        cache = cache.reshape(num_blocks, heads, size, dim).transpose(0, 2, 1, 3)
    last, middle = num_blocks - 1, num_blocks // 2 + 1
    values = random_numbers((17, heads, dim), "float32")
    table, lens = cuda.put(np.asarray([[last, middle]])), cuda.put(np.asarray([17]))
    pagecore.scatter_blocks(cuda.put(values), cache, table, lens)
    pagecore.copy_blocks(cache, [(last, 1), (middle, last - 1)])
    pagecore.copy_blocks(cache, cuda.put(np.asarray([(1, last - 2)])))
    got = pagecore.gather_blocks(cache, [[last - 2, last - 1]], [17])
    np.testing.assert_array_equal(cuda.get(got), values.astype(DTYPES["bfloat16"]))
    other = cuda.empty((3, size, heads, dim), "float32")
    pagecore.transfer_blocks(cache, other, [(last, 1), (middle, 2)])
    np.testing.assert_array_equal(
        cuda.get(other)[1:].reshape(-1, heads, dim)[:17], values.astype(DTYPES["bfloat16"]).astype(np.float32)
    )


def test_packed_arrays_past_two_to_the_31_bytes_are_reached(cuda):
    """A sequence of holes takes no memory of the cache, and the packed array is a view that overlaps itself."""
    length = 2**20
    want_memory(cuda, 2**33)
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
def test_no_order_of_threads_changes_what_is_moved(cuda, seed):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: a GPU takes its own order")
    cuda.runtime.seed = seed
    batch = batch_of([7, 300, 12], 4, 90, holes=0.2)
    round_trip(cuda, random_cache("HND", (90, 4, 3, 16), "bfloat16"), batch, DTYPES["float32"], "int32")


def test_warm_calls_are_launches_and_nothing_else(cuda):
    """So that a graph can hold them: no memory is asked for, nothing copied, nothing waited for."""
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    caches = put_all(cuda, [random_numbers((9, 4, 8), "float32", i) for i in range(2)])
    others = put_all(cuda, [random_numbers((9, 4, 8), "float16", i) for i in range(2)])
    table, lens = (cuda.put(array) for array in batch_of([5, 6], 4, 9))
    out = [cuda.empty((11, 8)), cuda.empty((11, 8))]
    pairs = cuda.put(np.asarray([(1, 2)], np.int32))
    calls = [
        lambda: pagecore.copy_blocks(caches, pairs),
        lambda: pagecore.copy_blocks(caches, [(1, 2), (3, 4)]),
        lambda: pagecore.transfer_blocks(caches, others, pairs),
        lambda: pagecore.gather_blocks(caches, table, lens, out=out),
        lambda: pagecore.scatter_blocks(out, caches, table, lens),
    ]
    for call in calls:
        assert calls_of(cuda, call) == {"launches": 1}
