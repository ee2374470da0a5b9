"""Host tiers, stores and keys of caches with sealed blocks: a prefix is sealed blocks, and comes back bit for bit."""

from dataclasses import replace

import numpy as np
import pytest

from pagecore import AttentionSpec, OutOfBlocks, PagedKVCache, ShapeError, SwapSpace, UnsupportedOption
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.tiers import Tiers
from tests.cache.sealing import BLOCK, SPEC, Driver, numbers
from tests.cache.swaps import poison
from tests.tiers.memory_store import MemoryStore


def forgotten(driver):
    """Clear the prefix cache, and overwrite every free block."""
    driver.cache.clear_prefix_cache()
    poison(driver.cache, np.nan)


def go_on(driver, stored, count, tiers=None):
    """Add the prompt again, and compute its other tokens; return the tokens that were reused."""
    sequence = (driver.cache if tiers is None else tiers).add_sequence(range(200))
    reused = sequence.num_cached_tokens
    assert sequence.num_sealed_tokens == reused
    driver.stored[sequence] = [[side[:reused] for side in each] for each in stored]
    driver.step(sequence, count)
    return reused


@pytest.mark.parametrize("layers", [1, 2])
def test_sealed_blocks_come_back_from_a_host_tier(layers):
    driver = Driver(layers=layers, num_blocks=20)
    tier = HostTier(driver.cache, num_blocks=20)
    assert (tier.num_groups, tier.num_lanes) == (1, 1)
    sequence = driver.add(range(150))
    driver.step(sequence, 150)
    assert tier.backup(sequence) == 3
    stored = driver.stored.pop(sequence)
    driver.cache.remove(sequence)
    forgotten(driver)
    assert driver.cache.match_length(range(200)) == 0
    assert tier.promote(range(200)) == 96
    driver.cache.check_invariants()
    tier.check_invariants()
    assert go_on(driver, stored, 70) == 96


def test_a_cache_that_scrubs_takes_sealed_blocks_from_a_host_tier():
    driver = Driver(num_blocks=20, scrub=True)
    tier = HostTier(driver.cache, num_blocks=20)
    sequence = driver.add(range(150))
    driver.step(sequence, 150)
    assert tier.backup(sequence) == 3
    stored = driver.stored.pop(sequence)
    driver.cache.remove(sequence)
    driver.cache.clear_prefix_cache()
    assert tier.promote(range(200)) == 96
    driver.cache.check_invariants()
    assert go_on(driver, stored, 70) == 96


def test_a_tier_has_the_blocks_that_a_removal_seals():
    driver = Driver(num_blocks=20)
    with Tiers(driver.cache, HostTier(driver.cache, num_blocks=20)) as tiers:
        sequence = driver.add(range(150))
        driver.step(sequence, 150)
        stored = driver.stored.pop(sequence)
        driver.cache.remove(sequence)
        forgotten(driver)
        assert go_on(driver, stored, 72, tiers) == 128


def test_evicted_prefixes_move_to_the_host():
    driver = Driver(num_blocks=[8, 8])
    with Tiers(driver.cache, HostTier(driver.cache, num_blocks=20), write="on_evict") as tiers:
        sequence = driver.add(range(150))
        driver.step(sequence, 150)
        stored = driver.stored.pop(sequence)
        driver.cache.remove(sequence)
        other = driver.add(range(300, 500))
        driver.step(other, 200)
        driver.cache.remove(other)
        assert go_on(driver, stored, 72, tiers) == 128
        assert tiers.stats().hit_tokens["CPU"] > 0
        tiers.check_invariants()


def test_windows_next_to_sealed_blocks_come_back_with_them():
    window = AttentionSpec(2, 64, dtype="float32", num_query_heads=4, window=20)
    cache = PagedKVCache([window, SPEC], num_blocks=12)
    tier = HostTier(cache, num_blocks=12)
    sequence = cache.add_sequence(range(150))
    batch = cache.prepare([sequence], 120)
    for layer, dim in enumerate((64, 32)):
        cache.write(layer, numbers(0, 120, 2, 64), numbers(1, 120, 2, dim), batch)
    cache.commit(batch)
    planes = [cache.plane(name, 0).numpy().copy() for name in ("key", "value")]
    before = cache.block_table(0).numpy()[sequence.row].copy()
    assert tier.backup(sequence) > 0
    cache.remove(sequence)
    cache.clear_prefix_cache()
    poison(cache, np.nan)
    assert tier.promote(range(200)) == 64
    again = cache.add_sequence(range(200))
    assert again.num_sealed_tokens == 64
    after = cache.block_table(0).numpy()[again.row]
    for name, plane in zip(("key", "value"), planes, strict=True):
        # The window of the token after the sealed blocks.
        np.testing.assert_array_equal(cache.plane(name, 0).numpy()[after[1], 13:], plane[before[1], 13:])


def test_sealed_blocks_come_back_from_a_store():
    data = {}
    for is_first in (True, False):
        driver = Driver(num_blocks=20)
        host = HostTier(driver.cache, num_blocks=20)
        fingerprint = Fingerprint.of(driver.cache, model="m")
        with Tiers(driver.cache, host, [MemoryStore(data=data)], fingerprint=fingerprint, min_tokens=1) as tiers:
            if is_first:
                sequence = driver.add(range(150))
                driver.step(sequence, 150)
                stored = driver.stored.pop(sequence)
                driver.cache.remove(sequence)
                assert tiers.drain(20.0)
                assert len(data) == 4
                continue
            request = tiers.request(range(200))
            tiers.wait(request, 20.0)
            assert go_on(driver, stored, 72, tiers) == 128
            request.release()


def test_fingerprints_differ_if_sealed_bytes_do():
    def digest(spec):
        return Fingerprint.of(PagedKVCache(spec, num_blocks=4), model="m").digest

    assert digest(SPEC) == digest(replace(SPEC))
    changes = [{"residual": 50}, {"group_size": 16}, {"format": "kivi4"}, {"value_format": "kivi4"}]
    others = [replace(SPEC, **change) for change in changes]
    # Planes of equal shapes.
    others.append(AttentionSpec(2, 32, 32, dtype="float32", num_query_heads=4, format="kivi4", value_format="kivi2"))
    assert len({digest(spec) for spec in [SPEC, *others]}) == 1 + len(others)


def test_sizes_count_the_sealed_group_alone():
    cache = PagedKVCache(SPEC, num_blocks=[20, 6])
    for options in ({"num_blocks": [20]}, {"ratio": 1.0}):
        tier = HostTier(cache, **options)
        assert tier.num_blocks == (20,)
        tier.close()
    with pytest.raises(ShapeError, match="num_blocks"):
        HostTier(cache, num_blocks=[20, 6])
    tier = HostTier(cache, memory="64MiB")
    assert tier.num_blocks[0] * sum(plane.nbytes for plane in SPEC.planes) > 2**25
    assert cache.block_size == BLOCK


@pytest.mark.parametrize("sizes", [{}, {"num_blocks": 6}])
def test_a_swap_space_in_the_memory_of_a_tier_has_tails_of_its_own(sizes):
    driver = Driver(num_blocks=[30, 12])
    tier = HostTier(driver.cache, num_blocks=10)
    space = SwapSpace(driver.cache, host=tier, **sizes)
    assert space.num_blocks == (10, sizes.get("num_blocks", 12))
    assert space.num_available == min(9, space.num_blocks[1] - 1)
    first, second = driver.add(range(150)), driver.add(range(300, 390))
    driver.step(first, 150)
    driver.step(second, 90)
    assert tier.backup(first) == 3
    own, used = (pool.num_used for pool in (space.block_pools[1], tier.block_pools[0]))
    assert (own, used) == (0, 3)
    driver.cache.swap_out([first, second], space)  # evicts what the tier has cached
    assert [pool.num_used for pool in space.block_pools] == [9, 4]
    assert (space.num_used_blocks, space.num_sequences) == (12, 2)
    for checked in (driver.cache, tier, space):
        checked.check_invariants()
    forgotten(driver)
    driver.cache.swap_in([second, first])
    assert (first.num_sealed_tokens, second.num_sealed_tokens) == (96, 32)
    driver.step(first, 60)
    driver.step(second, 3)
    assert space.num_used_blocks == 0
    if sizes:
        third = driver.add(range(500, 600))
        driver.step(third, 100)
        with pytest.raises(OutOfBlocks, match="group 1"):
            driver.cache.swap_out([first, third, second], space)
    driver.cache.swap_out([first], space)
    driver.cache.remove(first)
    assert space.num_used_blocks == 0
    space.check_invariants()


def test_options_of_a_swap_space_in_the_memory_of_a_tier():
    plain = PagedKVCache(AttentionSpec(2, 64), num_blocks=9)
    with pytest.raises(UnsupportedOption, match="host is given, and num_blocks too"):
        SwapSpace(plain, host=HostTier(plain, num_blocks=9), num_blocks=4)
    cache = PagedKVCache(SPEC, num_blocks=9)
    with pytest.raises(UnsupportedOption, match="host is given, and memory too"):
        SwapSpace(cache, host=HostTier(cache, num_blocks=9), memory="1MiB")
    with pytest.raises(ShapeError, match="num_blocks"):
        SwapSpace(cache, host=HostTier(cache, num_blocks=9), num_blocks=[4, 4])


@pytest.mark.parametrize("options", [{"format": "kivi2", "residual": 40}, {"format": "int4_token"}])
def test_fingerprints_differ_if_other_layers_have_a_format(options):
    plain = AttentionSpec(2, 64, 32, dtype="float32", num_query_heads=4)
    stored = replace(plain, **options)

    def digest(*layers):
        return Fingerprint.of(PagedKVCache(list(layers), num_blocks=2, device="none"), model="m").digest

    assert digest(stored, plain, stored) == digest(stored, plain, stored)
    assert len({digest(stored, plain, stored), digest(stored, stored, plain), digest(plain, stored, stored)}) == 3
