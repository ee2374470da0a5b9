"""Truncation inside sealed blocks: the kept tokens of the block return to the tail, with the numbers that it has."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from pagecore import AttentionSpec, OutOfBlocks, PagedKVCache, SwapSpace, UnsupportedOption
from pagecore.cache.memory import sealer
from tests.cache.marked import compute, numbers_of
from tests.cache.sealing import BLOCK, RESIDUAL, SPEC, Driver, numbers
from tests.cache.swaps import poison
from tests.ops import kivi_twin
from tests.together import together

FORMATS = {"2 bits": {}, "4 bits": {"format": "kivi4", "group_size": 16}, "both": {"value_format": "kivi4"}}


@together("name", FORMATS)
def test_tokens_of_a_cut_block_are_plain_again(name):
    driver = Driver(replace(SPEC, **FORMATS[name]), layers=2, num_blocks=16)
    sequence = driver.add()
    driver.step(sequence, 150)
    assert sequence.num_sealed_tokens == 96
    driver.truncate(sequence, 100)
    driver.step(sequence, 3)
    driver.truncate(sequence, 97)
    assert (sequence.num_sealed_tokens, sequence.num_computed_tokens) == (96, 97)
    driver.step(sequence, 20)
    driver.truncate(sequence, 70)
    assert (sequence.num_sealed_tokens, driver.used()) == (64, [3, 1])
    driver.truncate(sequence, 66)
    driver.step(sequence, 1)
    driver.step(sequence, 80)  # seals the restored tokens again
    assert sequence.num_sealed_tokens == 96
    driver.truncate(sequence, 65)
    driver.truncate(sequence, 31)
    assert (sequence.num_sealed_tokens, driver.used()) == (0, [1, 1])
    driver.step(sequence, 120)
    driver.truncate(sequence, 64)
    assert (sequence.num_sealed_tokens, driver.used()) == (64, [2, 0])
    driver.step(sequence, 60)
    driver.truncate(sequence, 0)
    driver.step(sequence, 40)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_restored_numbers_are_those_of_the_block_rounded_to_the_dtype(dtype):
    spec = replace(SPEC, dtype=dtype, residual=0)
    cache = PagedKVCache(spec, num_blocks=6)
    sequence = cache.add_sequence([])
    batch = cache.prepare([sequence], 2 * BLOCK)
    cache.write(0, *(numbers(part, 2 * BLOCK, 2, dim) for part, dim in enumerate((64, 32))), batch)
    cache.commit(batch)
    at = cache.block_table(0).numpy()[sequence.row, 1]
    planes = [cache.sealed_planes(0)[i].numpy()[at] for i in range(4)]
    cache.truncate(sequence, BLOCK + 5)
    block = cache.block_table(1).numpy()[sequence.row, 1]
    key = (
        kivi_twin.dequantize(planes[0], "kivi2", planes[2], -2).swapaxes(0, 1).astype(getattr(ml_dtypes, dtype, dtype))
    )
    value = kivi_twin.dequantize(planes[1], "kivi2", planes[3]).astype(key.dtype)
    np.testing.assert_array_equal(cache.plane("key", 0).numpy()[block], key)
    np.testing.assert_array_equal(cache.plane("value", 0).numpy()[block], value)


def test_forks_of_a_sequence_that_is_cut_keep_the_block():
    driver = Driver(num_blocks=24, prefix_cache=False)
    parent = driver.add()
    driver.step(parent, 150)
    first, second = driver.fork(parent), driver.fork(parent)
    driver.truncate(parent, 75)
    child = driver.fork(parent)
    for each in (first, parent, child, second, parent):
        driver.step(each, 7)
    assert [each.num_sealed_tokens for each in (first, second)] == [96, 96]
    driver.truncate_all([first, second], [65, 50])
    assert [each.num_sealed_tokens for each in (first, second)] == [64, 32]
    for each in (second, child, first):
        driver.step(each, 50)


def test_prefixes_end_before_a_block_that_was_cut():
    """Sealing restored numbers again adds an error, so that no other sequence reads the result."""
    driver = Driver(num_blocks=30)
    first = driver.add(range(400))
    driver.step(first, 150)
    known = list(driver.stored[first][0])
    driver.truncate(first, 75)
    driver.cache.append_tokens(first, range(75, 400))
    driver.step(first, 150)
    assert first.num_sealed_tokens == 160
    fork = driver.fork(first)
    driver.step(fork, 1)
    # The block that was cut is still cached, with its first numbers.
    other = driver.cache.add_sequence(range(98))
    assert other.num_cached_tokens == 96
    driver.stored[other] = [[side[:96] for side in known]]
    driver.step(other, 2)
    for each in (first, fork, other):
        driver.cache.remove(each)
    assert driver.cache.match_length(range(400)) == 96
    assert driver.cache.clear_prefix_cache() == 3
    assert driver.used() == [0, 0]


def test_a_sequence_that_is_cut_before_that_block_publishes_again():
    driver = Driver(num_blocks=30)
    first = driver.add(range(400))
    driver.step(first, 150)
    driver.truncate(first, 75)
    driver.cache.clear_prefix_cache()
    driver.step(first, 100)
    assert driver.cache.match_length(range(75)) == 64
    driver.truncate(first, 64)
    driver.cache.append_tokens(first, range(64, 400))
    driver.step(first, 100)
    driver.cache.remove(first)
    assert driver.cache.match_length(range(400)) == 160


def test_swapped_sequences_keep_restored_tokens():
    driver = Driver(num_blocks=12)
    sequence = driver.add(range(200))
    driver.step(sequence, 110)
    driver.truncate(sequence, 35)
    driver.cache.swap_out([sequence], SwapSpace(driver.cache, num_blocks=8))
    driver.cache.clear_prefix_cache()
    poison(driver.cache, np.nan)
    other = driver.add()
    driver.step(other, 33)
    driver.cache.swap_in([sequence])
    assert sequence.num_sealed_tokens == 32
    driver.step(sequence, 60)


def test_without_a_block_of_the_tail_nothing_is_cut():
    driver = Driver(num_blocks=[20, 6])
    first, second = driver.add(range(110)), driver.add()
    driver.step(first, 110)
    driver.step(second, 50)
    driver.step(third := driver.add(), 20)
    assert driver.used()[1] == 5
    before, stats = driver.cache.block_table(0).numpy().copy(), driver.cache.stats()
    message = r"1 blocks are needed and 0 are free in group 1; .* give lengths that are multiples of block_size, 32"
    with pytest.raises(OutOfBlocks, match=message) as raised:
        driver.cache.truncate([first], 40)
    assert (raised.value.requested, raised.value.available) == ((0, 1), (12, 0))
    assert (first.num_computed_tokens, first.num_sealed_tokens) == (110, 64)
    np.testing.assert_array_equal(driver.cache.block_table(0).numpy(), before)
    assert driver.cache.stats() == stats
    driver.cache.remove(third)
    driver.truncate(first, 40)
    driver.step(first, 3)


def test_a_tail_without_blocks_gives_back_those_of_another():
    cache = PagedKVCache([SPEC, replace(SPEC, format="kivi4")], num_blocks=[20, 20, 8, 5], prefix_cache=False)
    first, second = cache.add_sequence([]), cache.add_sequence([])
    for sequence, counts in ((first, (100, 30, 30)), (second, (20,))):
        for count in counts:
            cache.commit(cache.prepare([sequence], count))
    cache.commit(cache.prepare([cache.add_sequence([])], 20))
    free = tuple(pool.num_free for pool in cache._parts.tables.pools)
    with pytest.raises(OutOfBlocks) as raised:
        cache.truncate(first, 70)
    assert (raised.value.requested, raised.value.available) == ((0, 0, 1, 1), free)
    assert (free[2], tuple(pool.num_free for pool in cache._parts.tables.pools)) == (3, free)
    cache.check_invariants()


def test_a_cut_whose_restoring_fails_changes_nothing(monkeypatch):
    driver = Driver(layers=2, num_blocks=16)
    sequence = driver.add(range(150))
    driver.step(sequence, 150)
    calls, restores, used = [], sealer.unseal_kv, driver.used()

    def fail(*arrays, **options):
        calls.append(restores(*arrays, **options))
        if len(calls) == 2:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(sealer, "unseal_kv", fail)
        with pytest.raises(MemoryError):
            driver.cache.truncate(sequence, 75)
    driver.cache.check_invariants()
    assert (sequence.num_computed_tokens, sequence.num_sealed_tokens, driver.used()) == (150, 96, used)
    driver.step(sequence, 1)
    driver.truncate(sequence, 75)
    driver.step(sequence, 1)


@pytest.mark.parametrize("change", ["shorten", "remove another", "reorder"])
def test_a_cache_that_changes_while_blocks_are_restored(monkeypatch, change):
    """Code of the caller can run there, a finaliser for example."""
    driver = Driver(num_blocks=20)
    cache, restores = driver.cache, sealer.unseal_kv
    sequence, other = driver.add(range(150)), driver.add()
    driver.step(sequence, 150)
    driver.step(other, 100)

    def change_within(*arrays, **options):
        restores(*arrays, **options)
        monkeypatch.setattr(sealer, "unseal_kv", restores)
        if change == "shorten":
            cache.truncate(sequence, 96)
        elif change == "remove another":
            cache.remove(other)
        else:
            cache.reorder([other], [sequence])

    monkeypatch.setattr(sealer, "unseal_kv", change_within)
    driver.truncate(sequence, 75)
    assert (sequence.num_computed_tokens, sequence.num_sealed_tokens) == (75, 64)
    driver.step(sequence, 90)
    cache.remove(sequence)


def test_a_cache_without_bytes_cuts_at_whole_blocks():
    cache = PagedKVCache([AttentionSpec(2, 64), SPEC], num_blocks=9, device="none")
    sequence = cache.add_sequence([])
    cache.commit(cache.prepare([sequence], 150))
    message = "length is 70, but the first 96 tokens .* device='none' cannot restore; give 64, .*, or 96 or more"
    with pytest.raises(UnsupportedOption, match=message):
        cache.truncate([sequence], 70)
    cache.truncate([sequence], 64)
    assert sequence.num_sealed_tokens == 64


def test_a_block_of_another_namespace_is_overwritten_completely():
    cache = PagedKVCache(replace(SPEC, residual=0), num_blocks=4, scrub=True)
    with cache.add_sequence(range(100, 120), namespace="a") as other:
        compute(cache, [other], 20, 7.0)
        (block,) = cache._parts.tables.blocks(other.row, 1)
    sequence = cache.add_sequence(range(64), namespace="b")
    batch = cache.prepare([sequence], 64)
    cache.write(0, *(np.ones((64, 2, dim), np.float32) for dim in (64, 32)), batch)
    cache.commit(batch)
    cache.clear_prefix_cache()
    cache.truncate(sequence, 40)
    cache.check_invariants()
    assert cache._parts.tables.blocks(sequence.row, 1)[1] == block
    assert 7.0 not in numbers_of(cache, sequence)
    compute(cache, [sequence], 1, 5.0)


def test_tokens_that_a_window_still_sees_are_restored():
    driver = Driver(replace(SPEC, window=50, lookahead=30), num_blocks=14)
    sequence = driver.add(range(400))
    driver.step(sequence, 250)
    sealed = sequence.num_sealed_tokens
    with pytest.raises(UnsupportedOption, match="have left the window of 50 tokens"):
        driver.cache.truncate(sequence, sealed - 70)
    driver.truncate(sequence, sealed - 20)
    assert sequence.num_sealed_tokens == sealed - BLOCK
    driver.step(sequence, RESIDUAL + 40)
