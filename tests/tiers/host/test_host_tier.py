"""The host tier: refusals, per-layer copies, spans, partial promotion, and shared swap memory."""

import numpy as np
import pytest

from pagecore import AttentionSpec, CrossSpec, NotEnoughMemory, PagedKVCache, ShapeError, StateSpec, UnsupportedOption
from pagecore.cache import SwapSpace
from pagecore.errors import DeviceError, DoubleFree, InvalidBlock, InvalidSequence
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.tiers import Tiers
from tests.cache.hybrid_models import CONV
from tests.cache.swaps import fill
from tests.tiers.host.caches import SPEC, cached, serve
from tests.tiers.memory_store import MemoryStore
from tests.together import together


@together(
    ("options", "error", "words"),
    [
        ({}, ShapeError, "exactly one of"),
        ({"num_blocks": 4, "ratio": 2}, ShapeError, "exactly one of"),
        ({"num_blocks": 1}, ShapeError, "num_blocks"),
        ({"num_blocks": [4, 4]}, ShapeError, "groups"),
        ({"memory": 5000}, NotEnoughMemory, "give more memory"),
        ({"ratio": 0}, ShapeError, "above 0"),
        ({"ratio": float("nan")}, ShapeError, "above 0"),
        ({"ratio": 1e30}, ShapeError, "smaller ratio"),
        ({"num_blocks": 4, "num_states": 3}, UnsupportedOption, "keeps a state"),
        ({"num_blocks": 4, "policy": "clock"}, UnsupportedOption, "lru"),
    ],
)
def test_sizes_are_checked(options, error, words):
    with pytest.raises(error, match=words):
        HostTier(cached(), **options)


def test_objects_without_prefixes_are_refused():
    with pytest.raises(UnsupportedOption, match="prefix_cache=False"):
        HostTier(cached(prefix_cache=False), num_blocks=4)
    with pytest.raises(UnsupportedOption, match="PagedKVCache"):
        HostTier(3, num_blocks=4)
    cache, other = cached(), cached()
    tier = HostTier(cache, num_blocks=4)
    with pytest.raises(UnsupportedOption, match="HostTier of this cache"):
        Tiers(other, tier)
    with pytest.raises(UnsupportedOption, match="through"):
        Tiers(cache, tier, write="never")
    with pytest.raises(UnsupportedOption, match="needs 'lru'"):
        Tiers(cache, HostTier(cache, num_blocks=4, policy="lfu"), write="on_evict")
    with Tiers(cache, tier), pytest.raises(UnsupportedOption, match="has tiers already"):
        Tiers(cache, HostTier(cache, num_blocks=4))
    with pytest.raises(UnsupportedOption, match="closed"):
        tier.promote(range(9))
    with pytest.raises(InvalidSequence):
        HostTier(cache, num_blocks=4).backup(other.add_sequence(range(9)))


@pytest.mark.parametrize(("ratio", "expected"), [(1, 9), (2, 17), (0.5, 5), (0.001, 2)])
def test_a_ratio_scales_the_blocks(ratio, expected):
    assert HostTier(cached(9), ratio=ratio).num_blocks == (expected,)


def test_a_memory_is_not_exceeded():
    specs = [StateSpec((CONV,), chunk=4, interval=8), SPEC, AttentionSpec(1, 8, dtype="float32", window=8)]
    cache = PagedKVCache(specs, num_blocks=40, num_states=9, block_size=4, max_sequences=4)
    tier = HostTier(cache, memory=2**20, huge_pages=False)
    assert 2**19 < tier.nbytes <= 2**20
    assert min(tier.num_blocks) >= 2
    tier.close()


def test_a_prefix_longer_than_the_device_has_room_for_comes_in_part():
    cache = cached(9)
    tier = HostTier(cache, num_blocks=40)
    with cache.add_sequence(range(32)) as sequence:
        cache.commit(cache.prepare([sequence], 32))
        tier.backup(sequence)
    cache.clear_prefix_cache()
    other = cache.add_sequence(range(100, 120))
    cache.commit(cache.prepare([other], 20))  # holds 5 of 8 blocks
    assert tier.match(range(40)) == 32
    assert tier.promote(range(40)) == cache.match_length(range(40)) == 12
    cache.check_invariants()
    tier.check_invariants()


def test_namespaces_and_spans_stay_apart():
    cache = cached(40)
    tier = HostTier(cache, num_blocks=40)
    keys = [{}, {"namespace": "a"}, {"spans": [(0, 2, b"image")]}, {"spans": [(0, 2, b"other")]}]
    for options in keys[:3]:
        with cache.add_sequence(range(16), **options) as sequence:
            cache.commit(cache.prepare([sequence], 16))
            assert tier.backup(sequence) == 4
    cache.clear_prefix_cache()
    assert [tier.match(range(17), **options) for options in keys] == [16, 16, 16, 0]
    assert tier.promote(range(17), spans=[(0, 2, b"image")]) == 16
    assert [cache.match_length(range(17), **options) for options in keys] == [0, 0, 16, 0]
    ended = tier.poll()
    assert [each.namespace for each in ended] == [None, "a", None]
    assert ended[2].spans == ((0, 2, b"image"),)


def test_cross_attention_is_left_out_and_prefixes_are_kept_by_digest():
    cache = PagedKVCache([SPEC, CrossSpec(1, 8, dtype="float32", max_tokens=4)], num_blocks=[20, 9], block_size=4)
    tiers = Tiers(cache, HostTier(cache, num_blocks=20, huge_pages=False), min_tokens=1)
    assert tiers.host.num_lanes == 1
    assert serve(cache, range(16), cross_tokens=4, cross_digest=b"a") == 0
    assert serve(cache, range(16), cross_tokens=4) == 0
    cache.clear_prefix_cache()
    assert tiers.host.match(range(17), cross_digest=b"a") == 16
    assert tiers.host.match(range(17), cross_digest=b"b") == tiers.host.match(range(17)) == 0
    assert serve(cache, range(16), cross_tokens=4, cross_digest=b"a") == 12
    assert serve(cache, range(16), cross_tokens=0) == 0
    cache.clear_prefix_cache()
    assert [serve(cache, range(16), cross_tokens=tokens) for tokens in (0, 4)] == [12, 0]
    assert tiers.host.match(range(17)) == 16
    with pytest.raises(UnsupportedOption, match="cross-attention"):
        SwapSpace(cache, host=tiers.host)
    with pytest.raises(UnsupportedOption, match="cross attention"):
        tiers.host.load_to_device_per_layer(1, [1], [1])
    tiers.close()


def test_layers_are_copied_one_by_one():
    specs = [StateSpec((CONV,), chunk=4, interval=8), SPEC, SPEC]
    cache = PagedKVCache(specs, num_blocks=9, num_states=5, block_size=4, max_sequences=2)
    tier = HostTier(cache, num_blocks=9, huge_pages=False)
    for layer in (1, 2):
        cache.key(layer).numpy()[...] = layer
        cache.value(layer).numpy()[...] = -layer
    cache.plane("conv", 0).numpy()[...] = 5
    tier.backup_from_device_all_layers([3, 4], [7, 8])
    tier.backup_from_device_all_layers([2], [4], lane=1)
    for layer in (1, 2):
        cache.key(layer).numpy()[...] = np.nan
    cache.plane("conv", 0).numpy()[...] = np.nan
    tier.load_to_device_per_layer(1, [7, 8], [1, 2])
    assert (cache.key(1).numpy()[[1, 2]] == 1).all()
    assert np.isnan(cache.key(1).numpy()[3:]).all()
    assert np.isnan(cache.key(2).numpy()).all()
    tier.load_to_device_per_layer(0, [4], [3])
    assert (cache.plane("conv", 0).numpy()[3] == 5).all()
    for wrong in ([0], [99]):
        with pytest.raises(InvalidBlock):
            tier.load_to_device_per_layer(1, wrong, [1])
    with pytest.raises(ShapeError, match="one for each"):
        tier.load_to_device_per_layer(1, [1, 2], [1])
    with pytest.raises(ShapeError, match="lane"):
        tier.backup_from_device_all_layers([1], [1], lane=2)
    with pytest.raises(UnsupportedOption, match="streams"):
        tier.load_to_device_per_layer(1, [1], [1], stream=5)
    tier.close()


@pytest.mark.parametrize("counts", [[], [1, 1]])
def test_counts_have_an_entry_for_each_lane(counts):
    tier = HostTier(cached(), num_blocks=9)
    for call in (tier.make_room, tier.spill):
        with pytest.raises(ShapeError, match=f"has {len(counts)} entries; give 1"):
            call(counts)


@pytest.mark.parametrize("counts", [5, "1", ["x"], [1.5], [-1], [True], [[1]]])
def test_counts_are_integers_of_at_least_0(counts):
    tier = HostTier(cached(), num_blocks=9)
    for call in (tier.make_room, tier.spill):
        with pytest.raises(ShapeError, match=r"counts|missing"):
            call(counts)


def test_leases_are_used_once():
    tier = HostTier(cached(), num_blocks=9)
    with pytest.raises(ShapeError, match="each of 1 lanes"):
        tier.reserve([[0], [1]])
    lease = tier.reserve([[0, 1]])
    with pytest.raises(ShapeError, match="fill 1 blocks"):
        tier.adopt(lease, range(4))
    with pytest.raises(ShapeError, match="ok has"):
        tier.adopt(lease, range(8), ok=[np.ones(3, bool)])
    for ok in ([[True]], [[True] * 3], [], [[True] * 2] * 2):
        with pytest.raises(ShapeError, match="ok has"):
            tier.deliver(tier.reserve([[0, 1]]), range(8), ok=ok)
    assert tier.num_leases == 1
    assert tier.adopt(lease, range(8)) == 8
    with pytest.raises(DoubleFree):
        tier.adopt(lease, range(8))
    assert tier.reserve([range(9)]) is None
    far = tier.reserve([[2**32]])
    with pytest.raises(ShapeError, match="fill 1 blocks"):
        tier.adopt(far, range(4))
    far.release()
    twice = tier.reserve([[0, 0]])
    with pytest.raises(ShapeError, match="twice"):
        tier.adopt(twice, range(8))
    twice.release()
    with tier.hold(range(8)) as held:
        positions, pieces = held.entries(0)
        assert positions.tolist() == [0, 1]
        assert pieces[:, 0].tolist() == [0, 0]
        assert tier.reserve([range(7)]) is None, "pinned entries are not evicted"
    assert tier.reserve([range(7)]) is not None
    tier.check_invariants()


@pytest.mark.parametrize("step", ["drain", "poll", "clear", "pool.close"])
def test_a_close_that_failed_is_repeated(step, monkeypatch):
    tier = HostTier(cached(device="cpu"), num_blocks=9, shared=True)
    tier.adopt(tier.reserve([[0, 1]]), range(8))

    def fails(*_):
        raise DeviceError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(f"pagecore.tiers.host.tier.Host{'Pool.close' if step == 'pool.close' else f'Tier.{step}'}", fails)
        with pytest.raises(DeviceError, match="planted"):
            tier.close()
    for _ in range(2):
        tier.close()
        assert (tier.is_closed, tier.pool.memory.fd, tier.block_pools[0].num_used) == (True, None, 0)
    tier.check_invariants()


def test_a_tier_that_is_closed_ends_its_leases_and_holds():
    cache = cached()
    tier = HostTier(cache, num_blocks=9)
    tier.adopt(tier.reserve([[0, 1]]), range(8))
    hold, lease = tier.hold(range(8)), tier.reserve([[2, 3]])
    tier.close()
    assert (tier.num_leases, tier.num_holds, lease.is_held) == (0, 0, False)
    assert [pool.num_used for pool in tier.block_pools] == [0]
    tier.check_invariants()
    with pytest.raises(UnsupportedOption, match="the host tier is closed"):
        tier.adopt(lease, range(16))
    hold.release()
    lease.release()
    tier.check_invariants()
    cache.check_invariants()


def test_swapped_sequences_evict_what_the_tier_caches():
    cache = PagedKVCache(SPEC, num_blocks=20, block_size=4)
    tier = HostTier(cache, num_blocks=7, huge_pages=False)
    space = SwapSpace(cache, host=tier)
    with cache.add_sequence(range(20)) as sequence:
        fill(cache, [sequence], 20)
        tier.backup(sequence)
    assert tier.match(range(21)) == 20
    other = cache.add_sequence(range(100, 116))
    fill(cache, [other], 16)
    before = [cache.key(0).numpy()[block].copy() for block in cache.block_table().numpy()[other.row][:4]]
    cache.swap_out([other], space)
    assert tier.match(range(21)) == 8
    assert (space.num_used_blocks, space.num_available) == (4, 2)
    cache.check_invariants()
    cache.swap_in([other])
    after = [cache.key(0).numpy()[block] for block in cache.block_table().numpy()[other.row][:4]]
    assert all(np.array_equal(one, two) for one, two in zip(before, after, strict=True))
    with pytest.raises(UnsupportedOption, match="leave it out"):
        SwapSpace(cache, host=tier, num_blocks=4)
    with pytest.raises(UnsupportedOption, match="HostTier of this cache"):
        SwapSpace(cached(), host=tier)
    long = cache.add_sequence(range(200, 228))
    fill(cache, [long], 28)
    assert not cache.try_swap_out([long], space), "7 blocks of 6"
    tier.close()


def test_swap_spaces_refuse_a_host_tier_that_is_closed():
    cache = cached(20)
    tier = HostTier(cache, num_blocks=20)
    space = SwapSpace(cache, host=tier)
    sequence = cache.add_sequence(range(8))
    cache.commit(cache.prepare([sequence], 8))
    tier.close()
    with pytest.raises(UnsupportedOption, match="is closed; make another"):
        cache.swap_out([sequence], space)
    with pytest.raises(UnsupportedOption, match="is closed; make another"):
        SwapSpace(cache, host=tier)
    assert not sequence.is_swapped


def test_tiers_refuse_a_host_tier_that_is_closed():
    cache = PagedKVCache(SPEC, num_blocks=9, block_size=4)
    tier = HostTier(cache, num_blocks=40, huge_pages=False)
    tier.close()
    with pytest.raises(UnsupportedOption, match="closed; make another"):
        Tiers(cache, tier)
    tier = HostTier(cache, num_blocks=40, huge_pages=False)
    store, fingerprint = MemoryStore(), Fingerprint.of(cache, model="m")
    with pytest.raises(UnsupportedOption, match="listed twice"):
        Tiers(cache, tier, [store, store], fingerprint=fingerprint)
    store.close()
    with pytest.raises(UnsupportedOption, match="store 0, memory, is closed"):
        Tiers(cache, tier, [store], fingerprint=fingerprint)
    Tiers(cache, tier).close()


def test_released_memory_is_not_promoted_to():
    cache = PagedKVCache(SPEC, num_blocks=9, block_size=4, memory_saver=True)
    tiers = Tiers(cache, HostTier(cache, num_blocks=20), min_tokens=1)
    serve(cache, range(16))
    cache.release_memory()
    before = tiers.host.stats()
    with pytest.raises(DeviceError, match=r"resume_memory\(\)"):
        tiers.host.promote(range(17))
    with pytest.raises(DeviceError, match=r"resume_memory\(\)"):
        tiers.host.load_to_device_per_layer(0, [1], [1])
    assert cache.add_sequence(range(17)).num_cached_tokens == 0
    assert tiers.host.stats() == before
    cache.resume_memory()
    assert serve(cache, range(17)) == 16
    tiers.close()
