"""The host tier of a cache on CUDA: backups on a stream of their own, promotions in the order of the cache's stream."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore.errors import DeviceError, InvalidBlock, UnsupportedOption
from pagecore.storage.memory.host_memory import HostMemory
from pagecore.storage.pools import host_pool
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers
from tests.cuda.caches import block_bytes, poison, random_step, requests_of, write_step
from tests.cuda.host_tiers import (
    LAYERS,
    WIDE,
    back_up_and_forget,
    computed,
    defer,
    ended,
    make,
    planes_of,
    tier_of,
)


@pytest.mark.parametrize("io", ["auto", "dma", "kernel"])
@pytest.mark.parametrize("layout", [None, "blockwise"])
def test_a_prefix_comes_back_bit_for_bit(cuda, layout, io):
    cache = make(cuda, layout=layout)
    tier = tier_of(cache, io=io)
    sequence, _ = computed(cuda, cache, range(13))
    cuda.runtime.synchronize(0)
    before = block_bytes(cuda, cache, sequence)
    assert tier.backup(sequence) > 0
    cache.check_invariants()
    tier.check_invariants()
    (backup,) = ended(tier)
    assert (backup.start, backup.stop, backup.error) == (0, 12, None)
    cache.remove(sequence)
    cache.clear_prefix_cache()
    poison(cuda, cache)
    assert tier.promote(range(13)) == 12
    cache.check_invariants()
    again = cache.add_sequence(range(13))
    assert again.num_cached_tokens == 12
    cuda.runtime.synchronize(0)
    assert tier.poll() == []
    tier.check_invariants()
    for old, new in zip(before, block_bytes(cuda, cache, again), strict=True):
        both = [(one, two) for one, two in zip(old, new, strict=False) if one is not None and two is not None]
        assert both
        assert all(one == two for one, two in both)
    tier.close()


@pytest.mark.parametrize("io", ["dma", "kernel"])
@pytest.mark.parametrize("number", [-1, 0, 12, 99])
def test_blocks_that_a_caller_names_are_checked_before_a_copy(cuda, io, number):
    """A copy engine would copy bytes next to the pool."""
    cache = make(cuda, LAYERS[:1], num_blocks=12)
    tier = tier_of(cache, io=io)
    before = planes_of(cuda, cache), tier.pool.memory.tensor("cpu").numpy().copy()
    good, bad = [2, 1], [3, number]
    with pytest.raises(InvalidBlock, match=f"target of pair 1 is {number} .* 12 blocks; expected 1 to 11 "):
        tier.load_to_device_per_layer(0, good, bad)
    with pytest.raises(InvalidBlock, match=f"source of pair 1 is {number} .* 12 blocks; expected 1 to 11 "):
        tier.backup_from_device_all_layers(bad, good)
    number += 8 * (number == 12)  # the host has 20 blocks
    with pytest.raises(InvalidBlock, match=f"source of pair 1 is {number} .* 20 blocks; expected 1 to 19 "):
        tier.load_to_device_per_layer(0, [3, number], good)
    with pytest.raises(InvalidBlock, match=f"target of pair 1 is {number} .* 20 blocks; expected 1 to 19 "):
        tier.backup_from_device_all_layers(good, [3, number])
    cuda.runtime.synchronize(0)
    assert planes_of(cuda, cache) == before[0]
    np.testing.assert_array_equal(tier.pool.memory.tensor("cpu").numpy(), before[1])
    tier.close()


def test_copies_by_dma_cross_no_border_of_registered_chunks(cuda, monkeypatch):
    """Of adjacent blocks in memory that is registered block by block, or two by two."""
    for limit in (4096, 8192):
        monkeypatch.setattr(host_pool, "CHUNK_BYTES", limit)
        cache = make(cuda, LAYERS[:2])
        tier = tier_of(cache, io="dma")
        assert len(tier.pool.chunk_starts(0)) == 81920 // limit - 1
        sequence, _ = computed(cuda, cache, range(33))
        before = block_bytes(cuda, cache, sequence)
        assert tier.backup(sequence) > 0
        assert ended(tier)[0].error is None
        cache.remove(sequence)
        cache.clear_prefix_cache()
        poison(cuda, cache)
        assert tier.promote(range(33)) == 32
        again = cache.add_sequence(range(33))
        cuda.runtime.synchronize(0)
        tier.poll()
        for old, new in zip(before, block_bytes(cuda, cache, again), strict=True):
            assert [one == other for one, other in zip(old[:8], new[:8], strict=True)] == [True] * 8
        tier.close()


def test_adjacent_blocks_go_in_one_copy_for_each_plane(cuda):
    cache = make(cuda, LAYERS[:2], num_blocks=40)
    tier = tier_of(cache, io="dma")
    sequence, _ = computed(cuda, cache, range(65))
    spent = requests_of(cuda, lambda: tier.backup(sequence))
    if spent:
        assert spent["copies"] == 4, "key and value of two layers, 16 blocks each"
    tier.drain()
    tier.close()


def test_large_fragments_go_by_dma(cuda):
    cache = make(cuda, WIDE, block_size=16, num_blocks=4)
    tier = HostTier(cache, num_blocks=4, huge_pages=False)
    assert tier.pool.memory.wait_registered(60)
    sequence, _ = computed(cuda, cache, range(33))
    spent = requests_of(cuda, lambda: tier.backup(sequence))
    if spent:
        assert spent["copies"] == 2, "two blocks, each of two planes"
        assert "launches" not in spent
    ended(tier)
    assert tier.match(range(33)) == 32
    tier.close()


def test_copies_run_in_order_and_the_host_does_not_wait(cuda):
    cache = make(cuda, LAYERS[:1])
    tier = tier_of(cache)
    sequence, kept = computed(cuda, cache, range(13))
    cuda.runtime.synchronize(0)
    before = block_bytes(cuda, cache, sequence)
    defer(cuda)
    spent = requests_of(cuda, lambda: tier.backup(sequence))
    assert tier.match(range(13)) == 0, "published when the copy is done, not before"
    assert tier.poll() == []
    cache.remove(sequence)
    assert cache.clear_prefix_cache() == 0, "the copy pins the device's blocks"
    cache.check_invariants()
    tier.check_invariants()
    assert len(ended(tier)) == 1
    assert cache.clear_prefix_cache() == 3
    other, more = computed(cuda, cache, range(100, 160), seed=1)  # overwrites every block
    cache.remove(other)
    spent |= requests_of(cuda, lambda: tier.promote(range(13)))
    assert not {"synchronizes", "event_synchronizes"} & set(spent)
    assert tier.stats().num_pending == 1
    tier.clear()
    assert tier.match(range(13)) == 12, "the copy pins the host's blocks"
    again = cache.add_sequence(range(13))
    cuda.runtime.streams.deferred = False
    cuda.runtime.synchronize(0)
    assert block_bytes(cuda, cache, again)[0][:3] == before[0][:3]
    tier.poll()
    assert tier.stats().num_pending == 0
    tier.clear()
    assert tier.match(range(13)) == 0
    tier.close()
    del kept, more


def test_a_backup_does_not_repeat_copies_that_have_ended(cuda):
    cache = make(cuda, LAYERS[:1])
    tier = tier_of(cache)
    sequence, first = computed(cuda, cache, range(8))
    assert tier.backup(sequence) == 2
    assert tier.drain()
    cache.append_tokens([sequence], [range(8, 16)])
    second = write_step(cache, [sequence], 8, random_step(cuda, cache, 8, seed=1))
    assert tier.backup(sequence) == 2, "the call publishes what has ended"
    assert [(one.start, one.stop) for one in ended(tier)] == [(0, 8), (8, 16)]
    assert tier.match(range(17)) == 16
    tier.check_invariants()
    tier.close()
    del first, second


def test_copies_that_run_are_queried_once_a_call(cuda):
    cache = make(cuda, LAYERS[:1], num_blocks=40, max_sequences=8)
    tier = tier_of(cache)
    made = [computed(cuda, cache, range(50 * i, 50 * i + 8), seed=i) for i in range(8)]
    defer(cuda)
    before = cuda.runtime.counts["event_queries"]
    for sequence, _ in made:
        tier.backup(sequence)
    assert tier.stats().num_pending == 8
    assert cuda.runtime.counts["event_queries"] - before == 7, (
        "one stream has all copies: only the first of those that run is queried"
    )
    cuda.runtime.streams.deferred = False
    assert len(ended(tier)) == 8
    tier.check_invariants()
    tier.close()


def test_a_backup_in_a_capture_is_refused_before_the_capture_ends(cuda):
    if not cuda.is_emulated:
        pytest.skip("only the emulator begins a capture here")
    cuda.runtime.stream = stream = cuda.runtime.make_stream(0)
    cache = make(cuda, LAYERS[:1])
    tier = tier_of(cache)
    sequence, kept = computed(cuda, cache, range(13))
    tier.backup(sequence, max_tokens=8)
    assert tier.stats().num_pending == 1
    cuda.runtime.finish()
    cuda.runtime.streams.begin_capture(stream)
    with pytest.raises(DeviceError, match="is being captured"):
        tier.backup(sequence)
    cuda.runtime.streams.end_capture(stream)
    assert tier.backup(sequence) == 1
    ended(tier)
    tier.close()
    del kept


CALLS = {
    "promote": lambda tier: tier.promote(range(13)),
    "load": lambda tier: tier.load_to_device_per_layer(0, [1], [2]),
    "back up": lambda tier: tier.backup_from_device_all_layers([1], [2]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_capture_does_not_wait_for_a_registration_that_waits_for_its_end(cuda, monkeypatch, call):
    if not cuda.is_emulated:
        pytest.skip("only the emulator begins a capture here")
    cuda.runtime.stream = stream = cuda.runtime.make_stream(0)
    cache = make(cuda, LAYERS[:1])
    tier = tier_of(cache)
    back_up_and_forget(cuda, cache, tier)
    cuda.runtime.streams.begin_capture(stream)
    with monkeypatch.context() as patch:
        patch.setattr(tier._transfers, "_is_ready", False)
        patch.setattr(HostMemory, "is_registered", lambda *_: False)
        patch.setattr(HostMemory, "wait_registered", lambda *_: pytest.fail("the call waits"))
        with pytest.raises(DeviceError, match="is being captured"):
            CALLS[call](tier)
    cuda.runtime.streams.end_capture(stream)
    CALLS[call](tier)
    cuda.runtime.synchronize(stream)
    tier.poll()
    tier.check_invariants()
    tier.close()


def test_tiers_serve_more_than_the_device_holds(cuda):
    cache = make(cuda, LAYERS[:1], num_blocks=9)
    tiers = Tiers(cache, tier_of(cache), write="on_evict", min_tokens=4)
    first, _ = computed(cuda, cache, range(21))
    cuda.runtime.synchronize(0)
    before = block_bytes(cuda, cache, first)
    cache.remove(first)
    other, _ = computed(cuda, cache, range(100, 128), seed=1)
    cache.remove(other)
    assert tiers.drain()
    tiers.poll()
    assert cache.match_length(range(21)) == 20
    again = cache.add_sequence(range(21))
    assert again.num_cached_tokens == 20
    cuda.runtime.synchronize(0)
    assert block_bytes(cuda, cache, again)[0][:5] == before[0][:5]
    tiers.poll()
    tiers.check_invariants()
    tiers.close()


def test_io_is_checked(cuda):
    with pytest.raises(UnsupportedOption, match="kernel"):
        HostTier(make(cuda), num_blocks=4, io="copy")
