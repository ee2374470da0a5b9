"""copy_blocks and transfer_blocks on a CUDA device, against loops over pairs, and rules of all block copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore.arrays import strided
from pagecore.errors import InvalidBlock, ShapeError
from tests.cuda.memory import assert_same_memory, calls_of, require_memory
from tests.cuda.move_cases import CASTS, PLACES, check_all, indices, put_all
from tests.ops.block_cases import ANY_DTYPE, batch_of, random_bytes, random_cache, random_numbers
from tests.ops.cases import DTYPES, LAYOUTS

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
    """Strides and addresses with an alignment of 1, 2, 4, 8 and 16 bytes."""
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
def test_a_later_pair_reads_the_result_of_earlier_pairs(cuda, chain, place):
    cache = np.arange(30 * 200, dtype=np.int32).reshape(30, 200)
    device = cuda.put(cache)
    copy_in_order(cache, CHAINS[chain])
    pagecore.copy_blocks(device, indices(cuda, CHAINS[chain], place))
    assert_same_memory(cuda.get(device), cache)


@pytest.mark.parametrize("seed", range(8))
def test_random_pairs_are_copied_in_their_order(cuda, seed):
    """More pairs than a launch holds, from independent pairs to pairs that nearly all depend on each other."""
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


def test_independent_pairs_are_one_launch_for_all_layers(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    layers = [cuda.put(random_numbers((40, 4, 2, 8), "bfloat16", i)) for i in range(20)]
    apart = [(i, i + 20) for i in range(20)]
    for pairs, launches in ((apart, 1), ([*apart, (20, 0)], 2), ([(i, i + 1) for i in range(30)], 1)):
        before = cuda.runtime.counts["launches"]
        pagecore.copy_blocks(layers, pairs)
        assert cuda.runtime.counts["launches"] == before + launches


def test_more_arrays_than_a_launch_holds_with_different_shapes(cuda):
    rng = np.random.default_rng(0)
    caches = [random_numbers((5, 4, int(rng.integers(1, 4)), 8), "float32", i) for i in range(130)]
    caches += [random_numbers((5, 2, 8), "float16", i) for i in range(113)]
    device = put_all(cuda, caches)
    for cache in caches:
        copy_in_order(cache, [(1, 4), (2, 3)])
    pagecore.copy_blocks(device, [(1, 4), (2, 3)])
    check_all(cuda, device, caches)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_invalid_pairs_on_the_device_are_skipped(cuda, index_dtype):
    big, small = random_numbers((9, 4, 8), "float32"), random_numbers((7, 4, 8), "float32", 1)
    info = np.iinfo(index_dtype)
    pairs = np.asarray([(-1, 2), (2, -1), (7, 2), (2, 8), (info.max, 1), (1, info.min), (3, 6), (6, 0)], index_dtype)
    device = put_all(cuda, (big, small))
    for cache in (big, small):
        copy_in_order(cache, [(3, 6), (6, 0)])
    pagecore.copy_blocks(device, cuda.put(pairs))
    check_all(cuda, device, (big, small))


@pytest.mark.parametrize("pair", [(-1, 2), (2, -1), (10, 2), (2, 10), (2**31 - 1, 1), (1, 2**40)])
def test_an_invalid_pair_on_the_host_leaves_every_cache_unchanged(cuda, pair):
    caches = [random_numbers((10, 4), "float32", i) for i in range(2)]
    device = put_all(cuda, caches)
    with pytest.raises(InvalidBlock, match=str(min(pair) if min(pair) < 0 else max(pair))):
        pagecore.copy_blocks(device, [(3, 4), pair])
    check_all(cuda, device, caches)


def test_nothing_to_copy(cuda):
    numbers = random_numbers((4, 4), "float32")
    cache = cuda.put(numbers)
    for pairs in ([], np.zeros((0, 2), np.int32), cuda.put(np.zeros((0, 2), np.int64))):
        pagecore.copy_blocks([cache, cuda.put(np.zeros((4, 0), np.float32))], pairs)
    assert (cuda.get(cache) == numbers).all()
    pagecore.copy_blocks([cuda.put(np.zeros((4, 0, 3), np.float32))], [(1, 2)])
    pagecore.copy_blocks([cuda.put(np.zeros((0, 3), np.float32))], cuda.put(np.asarray([(0, 1)])))


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
def test_the_last_of_several_pairs_with_one_target_wins(cuda, place):
    source, target = random_numbers((40, 4, 30), "float32"), random_numbers((40, 4, 30), "float32", 1)
    pairs = [(i, 1 + i % 3) for i in range(1, 40)]
    device = cuda.put(target)
    pagecore.transfer_blocks(cuda.put(source), device, indices(cuda, pairs, place))
    for a, b in pairs:
        target[b] = source[a]
    assert_same_memory(cuda.get(device), target)


def test_invalid_pairs_of_a_transfer_on_the_device_are_skipped(cuda):
    source, target = random_numbers((9, 4, 8), "float32"), random_numbers((7, 4, 8), "float32", 1)
    device = cuda.put(target)
    pairs = [(0, 2), (2, 0), (9, 2), (2, 7), (-1, 3), (3, -1), (8, 6), (2**31 - 1, 1)]
    pagecore.transfer_blocks(cuda.put(source), device, cuda.put(np.asarray(pairs, np.int32)))
    target[6] = source[8]
    assert_same_memory(cuda.get(device), target)
    with pytest.raises(InvalidBlock, match="the target of pair 0 is 0"):
        pagecore.transfer_blocks(cuda.put(source), device, [(2, 0)])


@pytest.mark.parametrize("place", PLACES)
def test_a_transfer_without_a_null_block_moves_block_0(cuda, place):
    source, target = random_numbers((9, 4, 8), "float32"), random_numbers((7, 4, 8), "float32", 1)
    device, pairs = cuda.put(target), [(0, 2), (8, 0), (3, 6)]
    pagecore.transfer_blocks(cuda.put(source), device, indices(cuda, pairs, place), null_block=False)
    for a, b in pairs:
        target[b] = source[a]
    assert_same_memory(cuda.get(device), target)


def test_invalid_pairs_of_a_transfer_without_a_null_block_are_skipped(cuda):
    source, target = random_numbers((9, 4, 8), "float32"), random_numbers((7, 4, 8), "float32", 1)
    device, pairs = cuda.put(target), [(-1, 2), (2, -1), (9, 2), (2, 7), (0, 6)]
    pagecore.transfer_blocks(cuda.put(source), device, cuda.put(np.asarray(pairs, np.int32)), null_block=False)
    target[6] = source[0]
    assert_same_memory(cuda.get(device), target)


def test_odd_addresses_move_as_bytes_and_are_not_cast(cuda):
    memory = np.random.default_rng(0).integers(0, 256, 9 * 4 * 8 + 1, dtype=np.uint8)
    source = memory[1:].view(np.float32).reshape(9, 4, 2)
    target = np.zeros((9, 4, 2), np.float32)
    device, odd = cuda.put(target), cuda.put(source)
    pagecore.transfer_blocks(odd, device, [(1, 2)])
    target[2] = source[1]
    assert_same_memory(cuda.get(device), target)
    with pytest.raises(ShapeError, match="not a multiple of 4 bytes; a cast on CUDA"):
        pagecore.transfer_blocks(odd, cuda.empty((9, 4, 2), "float16"), [(1, 2)])
    with pytest.raises(ShapeError, match="not a multiple of 4 bytes; a cast on CUDA"):
        pagecore.gather_blocks(odd, [[1]], [3], out=cuda.empty((3, 2), "float16"))


# with gather_blocks and scatter_blocks


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_blocks_past_2_to_the_31_elements_are_reached(cuda, layout):
    heads, dim, size = 8, 64, 12
    num_blocks = 2**32 // (size * heads * dim) + 3
    require_memory(cuda, 2 * 2**33)
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


def test_warm_calls_are_launches_and_nothing_else(cuda):
    """A graph can capture the calls: they allocate nothing, copy nothing and do not synchronize."""
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


def test_more_pairs_than_32_bits_count_are_refused(cuda):
    pairs = strided(cuda.put(np.asarray([1, 2], np.int32)), (2**32 + 1, 2), (0, 4))
    with pytest.raises(ShapeError, match="pairs holds 4294967297 pairs on the device; at most 2147483647"):
        pagecore.copy_blocks(cuda.empty((4, 4, 2)), pairs)
