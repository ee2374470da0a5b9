"""write_kv on a CUDA device: written slots, skipped slots, and no change to any other byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore.errors import InvalidBlock, ShapeError
from tests.cuda.kit import Kit
from tests.cuda.memory import assert_same_memory, calls_of, require_memory, spaced
from tests.ops.cases import DTYPES, LAYOUTS, empty_cache
from tests.reference import attention as reference


def numbers(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Any:
    return (4 * np.random.default_rng(seed).standard_normal(shape)).astype(DTYPES[dtype])


def caches(layout: str, shape: tuple[int, int, int, int], dtype: str, value_dim: int | None = None) -> tuple[Any, Any]:
    """Return two caches filled with NaN, gaps included."""
    value_shape = (*shape[:3], value_dim or shape[3])
    return empty_cache(layout, shape, DTYPES[dtype]), empty_cache(layout, value_shape, DTYPES[dtype])


def slots_of(count: int, num_slots: int, seed: int = 0) -> Any:
    """Return distinct slots, a few of them negative, which write nothing."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(num_slots)[:count].astype(np.int64)
    slots[rng.random(count) < 0.1] = -1
    return slots


def check(cuda: Kit, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, **options: Any) -> None:
    """Write, and compare every byte that the caches span with the reference."""
    device = [cuda.put(array) for array in (key, value, key_cache, value_cache)]
    on_device = {name: cuda.put(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    pagecore.write_kv(*device, cuda.put(slots) if isinstance(slots, np.ndarray) else slots, **on_device)
    limit = key_cache.shape[0] * key_cache.shape[1]
    kept = np.asarray([-1 if slot >= limit else slot for slot in np.asarray(slots).tolist()], np.int64)
    with np.errstate(over="ignore"):
        reference.write_kv(key, key_cache, kept, options.get("key_scale"))
        reference.write_kv(value, value_cache, kept, options.get("value_scale"))
    assert_same_memory(cuda.get(device[2]), key_cache)
    assert_same_memory(cuda.get(device[3]), value_cache)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_cast_to_the_cache_as_numpy_casts_them(cuda, dtype, cache_dtype, layout):
    key, value = numbers((9, 3, 16), dtype), numbers((9, 3, 24), dtype, 1)
    check(cuda, key, value, *caches(layout, (5, 4, 3, 16), cache_dtype, 24), slots_of(9, 20))


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_round_to_even_and_keep_infinities_and_nan(cuda, dtype, cache_dtype):
    """Every 16-bit pattern; for float32, random bit patterns and the ties between two 16-bit numbers."""
    if dtype == "float32":
        ties = np.arange(2**14, dtype=np.uint32) * 4
        bits = [np.random.default_rng(0).integers(0, 2**32, 2**14, dtype=np.uint32)]
        bits += [(ties << 16) | 0x8000, (ties << 16) | 0x18000, (ties << 15) | 0x1000]
        source = np.concatenate(bits).view(np.float32)
    else:
        source = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype])
    key = source.reshape(-1, 4, 64)
    cache = np.zeros((key.shape[0] // 16, 16, 4, 64), DTYPES[cache_dtype])
    k, new = cuda.put(cache), cuda.put(key)
    pagecore.write_kv(new, new, k, cuda.put(cache), cuda.put(np.arange(key.shape[0])))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = source.astype(np.float32).astype(DTYPES[cache_dtype])
        got, nan = cuda.get(k).reshape(-1), np.isnan(expected)
        assert np.isnan(got[nan]).all()
    bits_of = f"u{expected.itemsize}"
    same = got.view(bits_of) == expected.view(bits_of)
    assert (same | nan).all()
    if dtype == cache_dtype:  # a copy without arithmetic: NaN keep their payloads
        assert (got.view(bits_of) == source.view(bits_of)).all()


@pytest.mark.parametrize("layout", ["NHD", "HND", "padded", "reversed"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")])
@pytest.mark.parametrize("head_dim", [1, 3, 8, 20, 64, 80, 128, 192])
def test_every_head_dim_is_written_whole(cuda, head_dim, dtypes, layout):
    key, value = numbers((6, 3, head_dim), dtypes[0]), numbers((6, 3, head_dim + 1), dtypes[0], 1)
    check(cuda, key, value, *caches(layout, (4, 4, 3, head_dim), dtypes[1], head_dim + 1), slots_of(6, 16))


@pytest.mark.parametrize("block_size", [1, 3, 16, 17, 64, 256])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_every_block_size(cuda, block_size, index_dtype):
    key = numbers((40, 2, 8), "bfloat16")
    slots = slots_of(40, 60 * block_size).astype(index_dtype)
    check(cuda, key, key[::-1], *caches("HND", (60, block_size, 2, 8), "bfloat16"), slots)


@pytest.mark.parametrize("count", [0, 1, 2, 8, 33, 700])
def test_any_number_of_tokens(cuda, count):
    key, value = numbers((count, 2, 64), "float16"), numbers((count, 2, 64), "float16", 1)
    check(cuda, key, value, *caches("NHD", (50, 16, 2, 64), "float16"), slots_of(count, 800))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_more_units_than_threads_are_written_in_rounds(cuda, dtype):
    """Two, three and four units per thread; with gaps between heads, a thread's units are not a multiple of a row."""
    threads = 2048 * cuda.runtime.properties(0).num_multiprocessors
    if not cuda.is_emulated:
        threads = 2048 * 4
    for turns in (2, 3, 5):
        count = threads * turns // (2 * 5 * 3) + 7  # planes, heads, units per head
        key, value = numbers((count, 5, 24), dtype), numbers((count, 5, 24), dtype, 1)
        check(cuda, key, value, *caches("HND", (count // 7 + 1, 7, 5, 24), "bfloat16"), slots_of(count, count))


@pytest.mark.parametrize(
    "slots",
    [
        [],
        [3],
        [3, 9],
        (9, 3),
        np.asarray([3, 9], np.int32),
        np.asarray([9, 0, 3])[::-2],
        np.asarray([[3, 1], [9, 1], [0, 1]], np.int32)[:, 0],
    ],
)
def test_a_slot_mapping_may_be_shorter_than_the_tokens_and_of_any_stride(cuda, slots):
    key = numbers((5, 3, 8))
    check(cuda, key, key, *caches("NHD", (10, 4, 3, 8), "float32"), slots)


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("block_size", [4, 3])
def test_slots_that_are_negative_or_past_the_cache_write_nothing(cuda, index_dtype, block_size):
    key = numbers((9, 3, 8))
    info = np.iinfo(index_dtype)
    limit = 10 * block_size
    slots = np.asarray([-1, 7, limit, info.min, info.max, limit - 1, -(2**31), 2**31 - 1, limit + 1], index_dtype)
    check(cuda, key, key, *caches("NHD", (10, block_size, 3, 8), "float32"), slots)


def test_a_slot_past_the_cache_in_a_host_array_is_refused(cuda):
    key = cuda.put(numbers((3, 3, 8)))
    caches = [cuda.put(np.zeros((10, 4, 3, 8), np.float32)) for _ in range(2)]
    with pytest.raises(InvalidBlock, match=r"slot_mapping\[1\] is 40 and the cache has 40 slots"):
        pagecore.write_kv(key, key, *caches, [4, 40, 2])
    assert not any(cuda.get(cache).any() for cache in caches)


def test_a_cache_without_blocks_ignores_all_tokens(cuda):
    key, cache = cuda.put(numbers((2, 3, 8))), cuda.put(np.zeros((0, 4, 3, 8), np.float32))
    pagecore.write_kv(key, key, cache, cache, cuda.put(np.asarray([0, -1])))


SCALES: list[Any] = [0.5, 3.0, 1, [0.5, 2.0, 3.0], np.asarray([0.3, 1, 4], np.float32)]


@pytest.mark.parametrize("scale", SCALES, ids=["0.5", "3.0", "1", "list", "device"])
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_divided_by_their_scale_before_they_are_rounded(cuda, dtype, cache_dtype, scale):
    key, value = numbers((6, 3, 16), dtype), numbers((6, 3, 16), dtype, 1)
    check(
        cuda, key, value, *caches("NHD", (5, 4, 3, 16), cache_dtype), slots_of(6, 20), key_scale=scale, value_scale=0.7
    )


def test_key_and_value_may_differ_in_dim_dtype_and_layout(cuda):
    key, value = numbers((3, 2, 16), "float16"), numbers((3, 2, 5), "float32")
    key_cache, value_cache = caches("HND", (4, 4, 2, 16), "bfloat16")[0], caches("padded", (4, 4, 2, 5), "float32")[0]
    check(cuda, key, value, key_cache, value_cache, np.asarray([1, 14, 3]))


@pytest.mark.parametrize("dims", [(64, 8), (8, 64)])
def test_key_and_value_of_one_launch_may_differ_in_dim(cuda, dims):
    key, value = (numbers((90, 3, dim), "bfloat16") for dim in dims)
    check(cuda, key, value, *caches("NHD", (25, 4, 3, dims[0]), "bfloat16", dims[1]), slots_of(90, 100))


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_may_begin_at_any_element(cuda, dtype, offset):
    """Addresses with an alignment of 2, 4, 8 and 16 bytes, on one side and on both."""
    shape, size = (4, 4, 2, 32), 4 * 4 * 2 * 32
    base = np.full(size + 32, np.nan, DTYPES[dtype])
    key = numbers((7 * 2 * 32 + 32,), dtype)
    for mine, theirs in ((offset, 0), (0, offset), (offset, offset)):
        new = key[mine : mine + 7 * 2 * 32].reshape(7, 2, 32)
        made = [base.copy()[theirs : theirs + size].reshape(shape) for _ in range(2)]
        check(cuda, new, new[::-1], *made, slots_of(7, 16))


@pytest.mark.parametrize("place", ["rows", "cache"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("heads", [1, 2])
def test_any_stride_may_be_odd(cuda, heads, axis, place):
    key, cache = numbers((7, heads, 32), "bfloat16"), np.zeros((4, 4, heads, 32), DTYPES["bfloat16"])
    if place == "rows":
        key = spaced(key, min(axis, 1))
    else:
        cache = spaced(cache, axis)
    check(cuda, key, key, cache, cache.copy(), slots_of(7, 16))


def test_new_rows_may_have_any_strides(cuda):
    rng = np.random.default_rng(2)
    packed = rng.standard_normal((7, 4, 3, 40)).astype(np.float32)  # query, key and value heads of a token
    key, value = packed[:, 1, ::-1, 4:36], packed[::-1, 2, :, 8:40]
    check(cuda, key, value, *caches("HND", (4, 4, 3, 32), "float16"), slots_of(7, 16))
    key = np.broadcast_to(packed[:1, 0, :, :32], (7, 3, 32))
    check(cuda, key, key, *caches("NHD", (4, 4, 3, 32), "float16"), slots_of(7, 16))


@pytest.mark.parametrize("block_size", [16, 12])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_elements_past_2_to_the_31_are_reached(cuda, layout, block_size):
    """The pool is larger than memory: only the pages that are written are committed."""
    heads, dim = 8, 64
    per_block = block_size * heads * dim
    num_blocks = 2**33 // per_block + 9
    require_memory(cuda, 2**35)
    cache, other = (cuda.empty((num_blocks, block_size, heads, dim), "bfloat16") for _ in range(2))
    if layout == "HND":
        cache = cache.reshape(num_blocks, heads, block_size, dim).transpose(0, 2, 1, 3)
    last = num_blocks - 1
    blocks = [2**31 // per_block, 2**31 // per_block + 1, 2**32 // per_block, last, last, 1]
    offsets = [3, 1, block_size - 1, block_size - 2, 0, 5]
    slots = np.asarray([block * block_size + offset for block, offset in zip(blocks, offsets, strict=True)])
    key, value = numbers((6, heads, dim), "bfloat16"), numbers((6, heads, dim), "bfloat16", 1)
    pagecore.write_kv(cuda.put(key), cuda.put(value), cache, other, cuda.put(slots))
    for i, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
        np.testing.assert_array_equal(cuda.get(cache[block, offset]), key[i])
        np.testing.assert_array_equal(cuda.get(other[block, offset]), value[i])


def test_slots_past_2_to_the_31_are_reached(cuda):
    """Blocks of 3 and of 4 tokens; only the blocks that are written are committed."""
    for block_size in (3, 4):
        num_blocks = 2**33 // block_size
        require_memory(cuda, 2**35)
        caches = [cuda.empty((num_blocks, block_size, 1, 1), "float16") for _ in range(2)]
        slots = np.asarray([2**31 - 1, 2**31, 2**32 + 5, num_blocks * block_size - 1, 7])
        written = [numbers((5, 1, 1), "float16", seed) for seed in range(2)]
        pagecore.write_kv(*map(cuda.put, written), *caches, cuda.put(slots))
        for cache, expected in zip(caches, written, strict=True):
            for slot, number in zip(slots.tolist(), expected.reshape(-1), strict=True):
                block, offset = divmod(slot, block_size)
                assert cuda.get(cache[block, offset]).item() == number


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_threads_does_not_change_the_result(cuda, seed):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it chooses the order of threads")
    cuda.runtime.seed = seed
    key, value = numbers((33, 3, 24), "float32"), numbers((33, 3, 24), "float32", 1)
    check(cuda, key, value, *caches("NHD", (12, 3, 3, 24), "bfloat16"), slots_of(33, 36))


def test_a_warm_write_is_one_launch_and_nothing_else(cuda):
    """A graph can capture the call: it allocates nothing, copies nothing and does not synchronize."""
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    key = cuda.put(numbers((4, 2, 8)))
    caches = [cuda.put(np.zeros((4, 4, 2, 8), np.float16)) for _ in range(2)]
    slots, scales = cuda.put(np.arange(4)), cuda.put(np.ones(2, np.float32))
    call = lambda: pagecore.write_kv(key, key, *caches, slots, key_scale=0.5, value_scale=scales)  # noqa: E731
    assert calls_of(cuda, call) == {"launches": 1}


def test_a_token_with_more_units_than_int32_is_refused(cuda):
    require_memory(cuda, 2**34)
    key = pagecore.arrays.strided(cuda.empty((2**12,), "bfloat16"), (1, 2**20, 2**12), (0, 0, 2))
    caches = [cuda.empty((1, 1, 2**20, 2**12), "bfloat16") for _ in range(2)]
    with pytest.raises(ShapeError, match="1048576 heads of 4096"):
        pagecore.write_kv(key, key, *caches, cuda.put(np.arange(1)))
