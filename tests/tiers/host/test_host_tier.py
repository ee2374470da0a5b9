"""The host tier: refusals, per-layer copies, spans, partial promotion, shared swap memory, and hits like one LRU."""

import numpy as np
import pytest

from pagecore import AttentionSpec, CrossSpec, NotEnoughMemory, PagedKVCache, ShapeError, StateSpec, UnsupportedOption
from pagecore.cache import SwapSpace
from pagecore.errors import DeviceError, DoubleFree, InvalidBlock, InvalidSequence
from pagecore.tiers.host.operations import _operations
from pagecore.tiers.host.operations._operations import version_of
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.tiers import Tiers
from tests.cache.hybrid_models import CONV
from tests.cache.swaps import fill
from tests.tiers.memory_store import MemoryStore
from tests.together import together

SPEC = AttentionSpec(1, 8, dtype="float32")


def cached(num_blocks=9, **options):
    return PagedKVCache(SPEC, **({"num_blocks": num_blocks, "block_size": 4, "device": "none"} | options))


def serve(cache, ids, **options):
    """Compute what a prompt lacks, remove it, and return the tokens that it reused."""
    sequence = cache.add_sequence(ids, **options)
    reused = sequence.num_cached_tokens
    cache.commit(cache.prepare([sequence], len(ids) - reused))
    cache.remove(sequence)
    return reused


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


def test_changed_sequences_are_asked_for_with_a_number_each():
    cache = cached(20)
    tier = HostTier(cache, num_blocks=9)
    sequence = cache.add_sequence(range(9))
    cache.commit(cache.prepare([sequence], 9))
    assert tier.list_changed(sequence, max_tokens=[2**70]) == [sequence]
    for limits in (8, ["x"], [-1], [], [8, 8]):
        with pytest.raises(ShapeError, match="max_tokens"):
            tier.list_changed([sequence], max_tokens=limits)
    for sequences in (3, [3], [None], "x"):
        with pytest.raises(InvalidSequence, match="expected a Sequence"):
            tier.list_changed(sequences)


def test_numbers_of_any_size_are_limits():
    cache = cached(20)
    with Tiers(cache, HostTier(cache, num_blocks=20), write="explicit", min_tokens=2**70) as tiers:
        sequence = cache.add_sequence(range(9))
        cache.commit(cache.prepare([sequence], 9))
        assert tiers.save(sequence, max_tokens=2**70) == 2
        assert tiers.host.backup(sequence, max_tokens=2**70) == 0
        assert tiers.host.unsaved(sequence, 2**70, 2**70) == (0, 0)
        tiers.host.hold(range(9), max_tokens=2**70).release()
        staged = tiers.host.stage(range(9), 0, 2**70)
        assert (staged.num_blocks, tiers.host.stage(range(9), 2**70, 2**70).num_blocks) == (2, 0)
        staged.release()
        for begin, end in ((-1, 2), (0, -1), (0.5, 2)):
            with pytest.raises(ShapeError, match="begin" if begin else "end"):
                tiers.host.stage(range(9), begin, end)
        for limits in ((-1, 0), (9, -1)):
            with pytest.raises(ShapeError, match="at least 0"):
                tiers.host.unsaved(sequence, *limits)
        assert not tiers.host.make_room([2**70])
        cache.remove(sequence)
        cache.clear_prefix_cache()
        assert cache.add_sequence(range(9)).num_cached_tokens == 0
        assert tiers.host.promote(range(9), max_tokens=2**70, min_tokens=2**70) == 0


def test_a_list_with_a_sequence_of_another_cache_copies_nothing():
    cache, other = cached(20), cached(20)
    sequence, foreign = cache.add_sequence(range(8)), other.add_sequence(range(8))
    cache.commit(cache.prepare([sequence], 8))
    tier = HostTier(cache, num_blocks=20)
    with Tiers(cache, tier, write="explicit") as tiers:
        for call in (tier.backup, tiers.save):
            with pytest.raises(InvalidSequence):
                call([sequence, foreign])
        assert tier.match(range(9)) == 0


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


def test_a_failed_copy_is_counted_and_costs_only_hits(monkeypatch):
    cache = PagedKVCache(SPEC, num_blocks=9, block_size=4)
    tiers = Tiers(cache, HostTier(cache, num_blocks=40, huge_pages=False), min_tokens=1)

    def broken(*_args, **_options):
        raise DeviceError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(tiers.host._transfers.copies, "run", broken)
        assert serve(cache, range(16)) == 0
        assert tiers.stats().host.num_failed == 2, "one for the commit, one for the removal"
    assert serve(cache, range(16)) == 12
    cache.clear_prefix_cache()
    with monkeypatch.context() as patch:
        patch.setattr(tiers.host._transfers.copies, "run", broken)
        assert serve(cache, range(16)) == 0
    assert serve(cache, range(16)) == 12
    tiers.check_invariants()
    tiers.close()


def test_a_copy_that_fails_after_the_call_is_made_again():
    cache = PagedKVCache(SPEC, num_blocks=9, block_size=4)
    tier = HostTier(cache, num_blocks=40, huge_pages=False)
    sequence = cache.add_sequence(range(16))
    cache.commit(cache.prepare([sequence], 16))
    running = _operations.back_up(cache._parts.state, tier._index, sequence, 16, lambda _: True)
    assert (running.num_blocks, tier.backup(sequence)) == (4, 0)
    running.give_up()
    assert tier.match(range(16)) == 0
    assert (tier.backup(sequence), tier.match(range(17))) == (4, 16)
    tier.check_invariants()


@pytest.mark.parametrize(
    ("ends", "copied_again"), [(["give_up", "finish"], 0), (["finish", "give_up"], 2), (["give_up", "give_up"], 4)]
)
def test_a_copy_that_fails_costs_nothing_that_a_later_one_has_copied(ends, copied_again):
    cache = PagedKVCache(SPEC, num_blocks=20, block_size=4)
    tier = HostTier(cache, num_blocks=40, huge_pages=False)
    sequence = cache.add_sequence(range(24))
    running = []
    for _ in range(2):
        cache.commit(cache.prepare([sequence], 8))
        running.append(_operations.back_up(cache._parts.state, tier._index, sequence, 99, lambda _: True))
    for one, end in zip(running, ends, strict=True):
        getattr(one, end)()
    assert tier.list_changed(sequence) == ([sequence] if copied_again else [])
    assert tier.backup(sequence) == copied_again
    assert tier.match(range(24)) == 16
    tier.check_invariants()


def test_other_evictions_do_not_repeat_a_copy_that_runs():
    cache = PagedKVCache(SPEC, num_blocks=20, block_size=4)
    tier = HostTier(cache, num_blocks=40, huge_pages=False)
    other, sequence = cache.add_sequence(range(50, 58)), cache.add_sequence(range(16))
    cache.commit(cache.prepare([other, sequence], [8, 16]))
    assert tier.backup(other) == 2
    running = _operations.back_up(cache._parts.state, tier._index, sequence, 16, lambda _: True)
    assert (running.num_blocks, tier.evict_prefix(range(50, 58)), tier.backup(sequence)) == (4, 2, 0)
    running.finish()
    assert (tier.match(range(17)), tier.backup(sequence)) == (16, 0)
    tier.clear()
    assert [tier.backup(sequence), tier.backup(sequence)] == [4, 0], "what was evicted after the copy is copied again"
    tier.check_invariants()


@pytest.mark.parametrize("closes", [True, False])
def test_another_tier_of_the_cache_gets_its_own_copies(closes):
    cache = PagedKVCache(SPEC, num_blocks=20, block_size=4)
    first = HostTier(cache, num_blocks=10, huge_pages=False)
    sequence = cache.add_sequence(range(16))
    cache.commit(cache.prepare([sequence], 16))
    assert first.backup(sequence) == 4
    if closes:
        first.close()
    second = HostTier(cache, num_blocks=10, huge_pages=False)
    assert second.list_changed([sequence]) == [sequence]
    assert second.unsaved(sequence, 99) == (0, 16)
    assert [second.backup(sequence), second.backup(sequence)] == [4, 0]
    assert (second.match(range(17)), second.list_changed([sequence])) == (16, [])


def test_a_backup_to_one_tier_leaves_what_another_knows_of_the_sequence():
    cache = PagedKVCache(SPEC, num_blocks=20, block_size=4)
    tiers = [HostTier(cache, num_blocks=10, huge_pages=False) for _ in range(2)]
    sequence = cache.add_sequence(range(16))
    cache.commit(cache.prepare([sequence], 16))
    assert [tier.backup(sequence) for tier in tiers] == [4, 4]
    assert [tier.list_changed([sequence]) for tier in tiers] == [[], []]
    cache.append_tokens(sequence, range(16, 20))
    cache.commit(cache.prepare([sequence], 4))
    assert [tier.list_changed([sequence]) for tier in tiers] == [[sequence]] * 2
    assert tiers[1].backup(sequence) == 1
    assert [tier.list_changed([sequence]) for tier in tiers] == [[sequence], []]
    cache.truncate(sequence, 12)
    assert [tier.list_changed([sequence]) for tier in tiers] == [[], []]
    cache.append_tokens(sequence, range(50, 54))
    cache.commit(cache.prepare([sequence], 4))
    assert [tier.backup(sequence) for tier in tiers] == [1, 1]
    cache.revoke_prefix(range(4))
    assert [tier.unsaved(sequence, 99)[1] for tier in tiers] == [0, 0]


def test_a_sequence_is_backed_up_to_any_number_of_tiers_one_after_the_other():
    cache = PagedKVCache(SPEC, num_blocks=20, block_size=4)
    sequence = cache.add_sequence(range(16))
    cache.commit(cache.prepare([sequence], 16))
    for _ in range(10):
        with HostTier(cache, num_blocks=10, huge_pages=False) as tier:
            assert [tier.backup(sequence), tier.backup(sequence)] == [4, 0]
            assert tier.list_changed([sequence]) == []


def test_a_failed_copy_of_one_tier_leaves_the_note_of_another():
    cache = PagedKVCache(SPEC, num_blocks=20, block_size=4)
    first, second = (HostTier(cache, num_blocks=10, huge_pages=False) for _ in range(2))
    sequence = cache.add_sequence(range(16))
    cache.commit(cache.prepare([sequence], 16))
    running = _operations.back_up(cache._parts.state, first._index, sequence, 16, lambda _: True)
    assert second.backup(sequence) == 4
    running.give_up()
    assert (second.list_changed([sequence]), first.list_changed([sequence])) == ([], [sequence])


EVICTIONS = {
    "clear": lambda tier: tier.clear(),
    "evict_prefix": lambda tier: tier.evict_prefix(range(16)),
    "evict_namespace": lambda tier: tier.evict_namespace(None),
    "revoke_prefix": lambda tier: tier.revoke_prefix(range(16)),
    "make_room": lambda tier: tier.make_room([9]),
}


@pytest.mark.parametrize("evict", EVICTIONS.values(), ids=EVICTIONS)
def test_what_the_host_has_evicted_is_copied_again(evict):
    cache = PagedKVCache(SPEC, num_blocks=20, block_size=4)
    tier = HostTier(cache, num_blocks=10, huge_pages=False)
    sequence = cache.add_sequence(range(16))
    cache.commit(cache.prepare([sequence], 16))
    assert [tier.backup(sequence), tier.backup(sequence)] == [4, 0]
    evict(tier)
    assert tier.match(range(17)) == 0
    assert [tier.backup(sequence), tier.backup(sequence)] == [4, 0]
    assert tier.match(range(17)) == 16
    tier.check_invariants()


@pytest.mark.parametrize("short", ["states", "window"])
def test_what_a_host_has_no_room_for_is_copied_later(short):
    """The block is the last of the prefix, so that its other blocks are all there."""
    layers = [SPEC, StateSpec((CONV,), chunk=4) if short == "states" else AttentionSpec(1, 8, window=5)]
    sizes = {"num_blocks": 12, "num_states": 3} if short == "states" else {"num_blocks": [12, 4]}
    states = {"num_states": 20} if short == "states" else {}
    cache = PagedKVCache(layers, num_blocks=20, block_size=4, max_sequences=2, max_tokens_per_sequence=64, **states)
    tier = HostTier(cache, huge_pages=False, **sizes)
    lease = tier.reserve([[], list(range(tier.num_blocks[1] - 1))])
    sequence = cache.add_sequence(range(9))
    cache.commit(cache.prepare([sequence], 8))
    assert tier.backup(sequence) == 2
    assert tier.match(range(9)) == 0
    lease.release()
    assert tier.list_changed([sequence]) == [sequence]
    tier.backup(sequence)
    assert (tier.match(range(9)), tier.list_changed([sequence])) == (8, [])
    tier.clear()
    lease = tier.reserve([[], list(range(tier.num_blocks[1] - 1))])
    assert tier.backup(sequence) == 2, "a later backup for which the host has no room does not count either"
    assert (tier.match(range(9)), tier.list_changed([sequence])) == (0, [sequence])
    lease.release()
    tier.backup(sequence)
    assert (tier.match(range(9)), tier.list_changed([sequence])) == (8, [])
    tier.check_invariants()


def test_the_end_of_a_prefix_that_a_later_backup_has_no_room_for_is_unsaved():
    cache = PagedKVCache(SPEC, num_blocks=20, block_size=4)
    tier = HostTier(cache, num_blocks=10, huge_pages=False)
    sequence = cache.add_sequence(range(16))
    cache.commit(cache.prepare([sequence], 16))
    assert tier.backup(sequence) == 4
    tier.clear()
    with tier.reserve([range(8)]):
        assert (tier.backup(sequence), tier.match(range(17))) == (1, 4)
        assert tier.list_changed([sequence]) == [sequence]
        assert tier.unsaved(sequence, 99) == (4, 16)
    assert (tier.backup(sequence), tier.unsaved(sequence, 99)) == (3, (0, 0))
    tier.check_invariants()


def test_a_window_that_keeps_all_that_its_end_needs_counts_as_copied():
    cache = PagedKVCache([SPEC, AttentionSpec(1, 8, window=5)], num_blocks=20, block_size=4)
    tier = HostTier(cache, num_blocks=[12, 4], huge_pages=False)
    sequence = cache.add_sequence(range(32))
    cache.commit(cache.prepare([sequence], 32))
    assert tier.backup(sequence) == 8 + 3
    assert tier.list_changed([sequence]) == []
    tier.check_invariants()


def test_second_hits_are_copied_from_the_second_prompt_on():
    cache = cached(40)
    tiers = Tiers(cache, HostTier(cache, num_blocks=40), write="second_hit", min_tokens=1)
    serve(cache, range(16))
    assert tiers.host.match(range(20)) == 0
    serve(cache, [*range(8), *range(50, 62)])
    assert tiers.host.match(range(20)) == 8
    serve(cache, range(16))
    assert tiers.host.match(range(20)) == 16
    tiers.close()


@pytest.mark.parametrize("way", ["truncate", "reorder"])
def test_other_tokens_in_place_of_a_second_hit_are_none(way):
    cache = cached(40)
    with Tiers(cache, HostTier(cache, num_blocks=40), write="second_hit", min_tokens=1) as tiers:
        serve(cache, range(16))
        cache.clear_prefix_cache()
        sequence, other = cache.add_sequence(range(16)), cache.add_sequence(range(50, 66))
        cache.commit(cache.prepare([sequence, other], 16))
        assert tiers.host.match(range(17)) == 16
        if way == "truncate":
            cache.truncate([sequence], [8])
            cache.append_tokens([sequence], [range(58, 66)])
            cache.commit(cache.prepare([sequence], 8))
        else:
            cache.reorder([sequence], [other])
        tiers.host.clear()
        cache.remove(sequence)
        assert tiers.host.match([*range(8), *range(58, 66), 0]) == (8 if way == "truncate" else 0)
        assert tiers.host.match(range(50, 70)) == 0


def test_a_cut_inside_a_block_leaves_what_is_known_of_whole_blocks(monkeypatch):
    cache = cached(40)
    with Tiers(cache, HostTier(cache, num_blocks=40), write="second_hit", min_tokens=1):
        serve(cache, range(16))
        sequence = cache.add_sequence(range(20))
        cache.commit(cache.prepare([sequence], sequence.num_tokens - sequence.num_cached_tokens))
        again = cache._parts.state.observer._hits._again
        match, lengths = again.match, []

        def counted(ids, options):
            lengths.append(len(ids))
            return match(ids, options)

        monkeypatch.setattr(again, "match", counted)
        for drafts in range(1, 4):
            cache.append_tokens([sequence], [range(60, 60 + drafts)])
            cache.commit(cache.prepare([sequence], drafts))
            cache.truncate([sequence], [20])
        assert lengths == []
        cache.append_tokens([sequence], [range(60, 64)])
        cache.commit(cache.prepare([sequence], 4))
        cache.truncate([sequence], [23])
        cache.append_tokens([sequence], [[70]])
        cache.commit(cache.prepare([sequence], 1))
        assert lengths == [24, 24]


@pytest.mark.parametrize("way", ["compact", "abandon"])
def test_a_call_that_replaces_whole_blocks_renews_the_version(way):
    """A compaction to 9 of 16 tokens moves the last one; a step that is abandoned leaves the state after 8 tokens."""
    states = [StateSpec((CONV,), chunk=8)] if way == "abandon" else []
    sizes = {"max_sequences": 2, "max_tokens_per_sequence": 64, "num_states": 20} if states else {}
    cache = PagedKVCache([SPEC, *states], num_blocks=20, block_size=4, **sizes)
    sequence = cache.add_sequence(range(16))
    for count in [8, 7] if states else [16]:
        cache.commit(cache.prepare([sequence], count))
    before = version_of(sequence)
    if states:
        with pytest.raises(ArithmeticError), cache.prepare([sequence], 1):
            raise ArithmeticError
    else:
        cache.compact(sequence, [*range(8), 15])
    assert sequence.num_computed_tokens == (8 if states else 9)
    assert version_of(sequence) > before


def test_a_prompt_that_waits_for_room_is_no_second_hit():
    cache = cached(40)
    tiers = Tiers(cache, HostTier(cache, num_blocks=40), write="second_hit", min_tokens=1)
    for _ in range(3):
        cache.remove(cache.add_sequence(range(16)))
    sequence, other = cache.add_sequence(range(16)), cache.add_sequence(range(20, 30))
    cache.commit(cache.prepare([sequence, other], [0, 10]))
    cache.commit(cache.prepare([sequence, other], [16, 0]))
    assert tiers.host.match(range(20)) == 0
    cache.remove(sequence)
    assert serve(cache, range(20)) == 16
    assert tiers.host.match(range(20)) == 16
    tiers.close()


def test_a_preempted_sequence_that_is_computed_again_is_a_second_hit():
    cache = cached(40)
    with Tiers(cache, HostTier(cache, num_blocks=40), write="second_hit", min_tokens=1) as tiers:
        sequence = cache.add_sequence(range(20))
        cache.commit(cache.prepare([sequence], 20))
        assert tiers.host.match(range(30)) == 0
        cache.truncate(sequence, 0)
        cache.append_tokens(sequence, range(20))
        cache.commit(cache.prepare([sequence], 20))
        assert tiers.host.match(range(30)) == 20


def test_the_hits_of_a_sequence_count_once():
    cache = cached(40)
    with Tiers(cache, HostTier(cache, num_blocks=40), min_tokens=1) as tiers:
        serve(cache, range(16))
        sequence, other = cache.add_sequence(range(18)), cache.add_sequence(range(20, 30))
        for counts in ([0, 9], [0, 1], [2, 0]):
            cache.commit(cache.prepare([sequence, other], counts))
        assert tiers.stats().hit_tokens["GPU"] == 16


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
