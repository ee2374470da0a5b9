"""write_kv and copy_blocks: written slots, skipped slots, and no other changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagecore import errors, ops
from pagecore.arrays.dtypes.dtype import as_dtype
from tests.ops.block_cases import ANY_DTYPE
from tests.ops.cases import DTYPES, LAYOUTS, empty_cache, snapshot
from tests.reference import attention as reference
from tests.together import together


def caches(
    layout: str = "NHD", dtype: str = "float32", block_size: int = 4, dims: tuple[int, int] = (8, 8), blocks: int = 10
) -> tuple[Any, Any]:
    """Return two caches of three heads, filled with a number that no test writes."""
    made = [empty_cache(layout, (blocks, block_size, 3, dim), DTYPES[dtype]) for dim in dims]
    for cache in made:
        cache[...] = 77
    return made[0], made[1]


def new_tokens(count: int, dtype: str = "float32", dims: tuple[int, int] = (8, 8), seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    key, value = (rng.standard_normal((count, 3, dim)).astype(DTYPES[dtype]) for dim in dims)
    return key, value


def assert_same(got: Any, expected: Any) -> None:
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


@together("dtype", DTYPES)
@together("layout", ["NHD", "HND"])
def test_worked_example_10_head_major_input_lands_in_its_slots(dtype, layout):
    heads, dim = 32, 128
    key, value = (
        np.random.default_rng(i).standard_normal((heads, 5, dim)).astype(DTYPES[dtype]).transpose(1, 0, 2)
        for i in (0, 1)
    )
    key_cache, value_cache = (empty_cache(layout, (16, 16, heads, dim), DTYPES[dtype]) for _ in range(2))
    key_cache[...], value_cache[...] = 3, 5
    ops.write_kv(key, value, key_cache, value_cache, np.asarray([80, 81, 195, 196, 127]))
    places = [(5, 0), (5, 1), (12, 3), (12, 4), (7, 15)]
    for cache, new, before in ((key_cache, key, 3), (value_cache, value, 5)):
        for i, place in enumerate(places):
            assert_same(cache[place], new[i])
            cache[place] = before
        assert (cache == before).all()


@together("layout", LAYOUTS)
@together("dtype", DTYPES)
@together("cache_dtype", DTYPES)
def test_tokens_are_cast_to_the_cache_as_numpy_casts_them(layout, dtype, cache_dtype):
    key, value = new_tokens(7, dtype)
    key_cache, value_cache = caches(layout, cache_dtype)
    expected_key, expected_value = key_cache.copy(), value_cache.copy()
    slots = [5, 39, -1, 6, 0, 20, 4]
    reference.write_kv(key, expected_key, slots)
    reference.write_kv(value, expected_value, slots)
    ops.write_kv(key, value, key_cache, value_cache, slots)
    assert_same(key_cache, expected_key)
    assert_same(value_cache, expected_value)


@together("cache_dtype", DTYPES)
@together("dtype", DTYPES)
def test_casts_round_to_even_and_keep_infinities_and_nan(dtype, cache_dtype):
    """Return every 16-bit pattern, or for float32 random patterns and the ties between two 16-bit numbers."""
    if dtype == "float32":
        bits = np.random.default_rng(0).integers(0, 2**32, 2**15, dtype=np.uint32)
        ties = np.arange(2**15, dtype=np.uint32) * 2
        source = np.concatenate([bits, (ties << 16) | 0x8000, (ties << 16) | 0x18000, (ties << 15) | 0x1000]).view(
            np.float32
        )
    else:
        source = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype])
    key = source.reshape(-1, 1, 32)
    shape = (key.shape[0], 1, 1, 32)
    key_cache, value_cache = np.zeros(shape, DTYPES[cache_dtype]), np.zeros(shape, DTYPES[cache_dtype])
    ops.write_kv(key, key, key_cache, value_cache, np.arange(key.shape[0]))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = source.astype(np.float32).astype(DTYPES[cache_dtype])
        nan = np.isnan(expected)
    for cache in (key_cache, value_cache):
        got = cache.reshape(-1)
        with np.errstate(invalid="ignore"):  # signalling NaN
            assert np.isnan(got[nan]).all()
        width = f"u{expected.itemsize}"
        np.testing.assert_array_equal(got[~nan].view(width), expected[~nan].view(width))


def test_key_and_value_may_differ_in_dim_dtype_and_layout():
    key, value = new_tokens(3, "float16", (16, 5))
    key_cache, value_cache = caches("HND", "bfloat16", dims=(16, 5))[0], caches("padded", "float32", dims=(16, 5))[1]
    value = value.astype(np.float32)
    ops.write_kv(key, value, key_cache, value_cache, [1, 2, 3])
    assert_same(key_cache[0, 1:], key.astype(DTYPES["bfloat16"]))
    assert_same(value_cache[0, 1:], value)


@together("dtype", DTYPES)
@together("head_dim", [1, 3, 7, 8, 33, 64, 100, 129])
def test_every_head_dim_is_written_completely(dtype, head_dim):
    key, value = new_tokens(6, dtype, (head_dim, head_dim + 1))
    key_cache, value_cache = caches("padded", dtype, dims=(head_dim, head_dim + 1))
    ops.write_kv(key, value, key_cache, value_cache, np.arange(8, 14))
    assert_same(key_cache[2:].reshape(-1, 3, head_dim)[:6], key)
    assert_same(value_cache[2:].reshape(-1, 3, head_dim + 1)[:6], value)


@together("count", [0, 1, 2, 63, 64, 1000])
def test_any_number_of_tokens(count):
    key, value = new_tokens(count)
    key_cache, value_cache = caches(blocks=300)
    slots = np.random.default_rng(1).permutation(1200)[:count]
    expected = key_cache.copy()
    reference.write_kv(key, expected, slots)
    ops.write_kv(key, value, key_cache, value_cache, slots)
    assert_same(key_cache, expected)


@together("slots", [[], [3], [3, 9], (3, 9), np.asarray([3, 9], np.int16), np.asarray([9, 0, 3])[::-2]])
def test_a_slot_mapping_may_be_shorter_than_the_tokens_and_of_any_kind(slots):
    key, value = new_tokens(5)
    key_cache, value_cache = caches()
    expected = key_cache.copy()
    reference.write_kv(key, expected, slots)
    ops.write_kv(key, value, key_cache, value_cache, slots)
    assert_same(key_cache, expected)


@together("index_dtype", [np.int32, np.int64])
def test_negative_slots_write_nothing(index_dtype):
    key, value = new_tokens(5)
    key_cache, value_cache = caches()
    lowest = np.iinfo(index_dtype).min
    ops.write_kv(key, value, key_cache, value_cache, np.asarray([-1, 7, -5, lowest, -(2**31)], index_dtype))
    assert_same(key_cache[1, 3], key[1])
    key_cache[1, 3] = 77
    assert (key_cache == 77).all()


def test_the_null_block_is_legal_to_write():
    key, value = new_tokens(2)
    key_cache, value_cache = caches()
    ops.write_kv(key, value, key_cache, value_cache, [0, 3])
    assert_same(value_cache[0, [0, 3]], value)


def test_of_equal_slots_the_last_token_wins():
    key, value = new_tokens(200)
    key_cache, value_cache = caches()
    slots = np.random.default_rng(0).integers(-1, 40, 200)
    expected = value_cache.copy()
    reference.write_kv(value, expected, slots)
    ops.write_kv(key, value, key_cache, value_cache, slots)
    assert_same(value_cache, expected)


@together("bad", [40, 41, 2**31 - 1, 2**31, 2**62])
@together("place", [0, 150, 299])
def test_one_bad_slot_leaves_both_caches_as_they_were(bad, place):
    key, value = new_tokens(300)
    key_cache, value_cache = caches()
    slots = np.random.default_rng(0).integers(0, 40, 300)
    slots[place] = bad
    unchanged = snapshot(key_cache, value_cache)
    with pytest.raises(errors.InvalidBlock, match=str(bad)):
        ops.write_kv(key, value, key_cache, value_cache, slots)
    assert unchanged()


@together("scale", [0.5, 3.0, [0.5, 2.0, 3.0], np.asarray([0.25, 1, 4], np.float16), np.float32([3])])
@together("cache_dtype", DTYPES)
def test_a_stored_number_times_its_scale_is_the_number_given(scale, cache_dtype):
    key, value = new_tokens(6)
    key_cache, value_cache = caches(dtype=cache_dtype)
    ops.write_kv(key, value, key_cache, value_cache, np.arange(6), key_scale=scale, value_scale=2.0)
    factor = np.broadcast_to(np.asarray(scale, np.float32), 3)[:, None]
    rounding = {"float32": 3e-7, "float16": 6e-4, "bfloat16": 5e-3}[cache_dtype]
    stored = key_cache.reshape(-1, 3, 8)[:6].astype(np.float32)
    np.testing.assert_allclose(stored * factor, key, rtol=rounding, atol=1e-6)
    np.testing.assert_allclose(
        value_cache.reshape(-1, 3, 8)[:6].astype(np.float32) * 2, value, rtol=rounding, atol=1e-6
    )


def test_attention_reads_what_was_written():
    key, value = new_tokens(21, dims=(64, 64))
    key_cache, value_cache = caches("HND", "bfloat16", dims=(64, 64))
    table = np.asarray([[7, 2, 9, 1, 4, 3]], np.int32)
    slots = (table[0][:, None] * 4 + np.arange(4)).reshape(-1)[:21]
    scales = {"key_scale": [0.5, 1.0, 2.0], "value_scale": 0.125}
    ops.write_kv(key, value, key_cache, value_cache, slots, **scales)
    query = np.random.default_rng(5).standard_normal((1, 6, 64)).astype(np.float32)
    out = ops.paged_attention(query, key_cache, value_cache, table, [21], **scales)
    rounded = [x.astype(DTYPES["bfloat16"]).astype(np.float32).reshape(1, 21, 3, 64) for x in (key, value)]
    expected = reference.paged_attention(query, *rounded, np.zeros((1, 1), int), [21])[0]
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)  # powers of two: scaling rounds nothing


@together("factor", [1.0, 0.125])
def test_an_array_of_one_factor_is_that_of_the_layer(factor):
    key, value = new_tokens(21)
    query = np.random.default_rng(5).standard_normal((1, 6, 8)).astype(np.float32)
    results = []
    for given in (factor, [factor], np.asarray([factor]), np.asarray([factor, 1.0], np.float16)[:1]):
        key_cache, value_cache = caches()
        scales = {"key_scale": given, "value_scale": given}
        ops.write_kv(key, value, key_cache, value_cache, np.arange(4, 25), **scales)
        out = ops.paged_attention(query, key_cache, value_cache, [[1, 2, 3, 4, 5, 6]], [21], **scales)
        results.append((key_cache, value_cache, out))
    for other in results[1:]:
        for mine, first in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(mine, first)


def test_an_array_of_one_factor_is_checked_as_a_number_is():
    key, value = new_tokens(2)
    key_cache, value_cache = caches()
    unchanged = snapshot(key_cache, value_cache)
    with pytest.raises(errors.UnsupportedOption, match=r"value_scale holds 0\.0; .* not 0 to be divided by"):
        ops.write_kv(key, value, key_cache, value_cache, [4, 5], value_scale=[0.0])
    assert unchanged()


def test_bytes_that_may_be_float8_codes_are_refused_with_the_view_to_take():
    key, value = new_tokens(2)
    codes = np.zeros((2, 4, 4, 3, 8), np.uint8)
    with pytest.raises(errors.UnsupportedOption, match="view bytes that are float8 codes as float8_e4m3fn"):
        ops.write_kv(key, value, *codes, [4, 5], key_scale=0.5, value_scale=0.5)
    assert not codes.any()


# copy_blocks


@together("layout", LAYOUTS)
def test_blocks_are_copied_whole_in_every_layout_and_nothing_else(layout):
    rng = np.random.default_rng(0)
    made = caches(layout, "float16", block_size=5, dims=(8, 3))
    for cache in made:
        cache[...] = rng.standard_normal(cache.shape)
    expected = [cache.copy() for cache in made]
    for cache in expected:
        cache[[7, 2, 9]] = cache[[1, 3, 1]]
    ops.copy_blocks(list(made), np.asarray([[1, 7], [3, 2], [1, 9]], np.int32))
    for cache, want in zip(made, expected, strict=True):
        np.testing.assert_array_equal(cache, want)


@together("dtype", ANY_DTYPE)
@together("shape", [(6,), (6, 3), (6, 4, 2), (6, 4, 2, 3), (6, 2, 4, 2, 3)])
def test_planes_of_any_dtype_and_rank_are_copied_bit_for_bit(dtype, shape):
    kind = as_dtype(dtype).numpy
    size = int(np.prod(shape)) * kind.itemsize
    cache = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).view(kind).reshape(shape)
    expected = cache.copy()
    expected[4], expected[0] = cache[1], cache[5]
    ops.copy_blocks(cache, [(1, 4), (5, 0)])
    assert cache.tobytes() == expected.tobytes()


def test_caches_at_odd_addresses_are_copied():
    memory = np.random.default_rng(0).integers(0, 256, 4 * 3 * 4 + 1, dtype=np.uint8)
    expected = memory.copy()
    expected[1 + 36 :] = memory[1 + 12 : 1 + 24]
    ops.copy_blocks(memory[1:].view(np.float32).reshape(4, 3), [(1, 3)])
    assert memory.tobytes() == expected.tobytes()


def test_pairs_in_the_memory_of_the_cache_are_refused():
    cache = np.arange(24, dtype=np.int32).reshape(6, 4)
    cache[1:3] = [[1, 2, 3, 1], [2, 5, 4, 4]]
    before = cache.copy()
    with pytest.raises(errors.UnsupportedOption, match="caches shares memory with pairs"):
        ops.copy_blocks(cache, cache[1:3].reshape(4, 2))
    np.testing.assert_array_equal(cache, before)


def test_pairs_are_copied_in_their_order():
    cache = np.arange(5, dtype=np.float32).reshape(5, 1, 1, 1).copy()
    ops.copy_blocks([cache], [(1, 2), (2, 3), (4, 4), (0, 1)])
    assert cache.reshape(-1).tolist() == [0, 0, 1, 1, 4]


@together("pairs", [[], np.zeros((0, 2), np.int32), np.zeros((0, 2), np.int64)])
def test_no_pairs_copy_nothing(pairs):
    key_cache, value_cache = caches()
    ops.copy_blocks([key_cache, value_cache], pairs)
    ops.copy_blocks([], pairs)
    assert (key_cache == 77).all()


@together("pair", [(-1, 2), (2, -1), (10, 2), (2, 10), (2**31 - 1, 1), (1, 2**40)])
def test_one_bad_pair_leaves_every_cache_as_it_was(pair):
    key_cache, value_cache = caches()
    key_cache[3] = 1
    unchanged = snapshot(key_cache, value_cache)
    with pytest.raises(errors.InvalidBlock, match=str(min(pair) if min(pair) < 0 else max(pair))):
        ops.copy_blocks([key_cache, value_cache], [(3, 4), pair])
    assert unchanged()


def test_a_block_must_exist_in_every_cache():
    big, small = np.arange(6.0, dtype=np.float32).reshape(6, 1), np.zeros((4, 1), np.float32)
    unchanged = snapshot(big, small)
    with pytest.raises(errors.InvalidBlock):
        ops.copy_blocks([big, small], [(5, 1)])
    assert unchanged()
