"""Backups of the host tier: sequences that changed, copies that failed, and blocks that the host evicted."""

import pytest

from pagecore import AttentionSpec, PagedKVCache, ShapeError, StateSpec
from pagecore.errors import DeviceError, InvalidSequence
from pagecore.tiers.host.operations import _operations
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers
from tests.cache.hybrid_models import CONV
from tests.tiers.host.caches import SPEC, cached, serve


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


def test_tiers_that_were_closed_push_out_no_note_of_one_in_use():
    cache = PagedKVCache(SPEC, num_blocks=20, block_size=4)
    used = HostTier(cache, num_blocks=10, huge_pages=False)
    sequence = cache.add_sequence(range(16))
    cache.commit(cache.prepare([sequence], 16))
    assert used.backup(sequence) == 4
    for _ in range(6):
        with HostTier(cache, num_blocks=10, huge_pages=False) as tier:
            tier.backup(sequence)
        assert used.list_changed([sequence]) == []


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
