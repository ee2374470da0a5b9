"""Pins of cached prefixes without a sequence."""

import copy
import pickle

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, ShapeError, StateSpec, UnsupportedDtype, UnsupportedOption
from pagecore.cache import PrefixPin
from pagecore.errors import InvalidSequence, OutOfBlocks
from pagecore.serving import Request, Scheduler
from pagecore.storage.state_shapes import delta_planes
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers
from tests.cache.test_evict_prefix import CHAT, OTHER, SPEC, SYSTEM, cached, make


def test_a_pinned_prefix_stays_until_the_last_pin_is_released():
    cache = cached(make(), CHAT, OTHER)
    first, second = cache.pin_prefix(CHAT[:12]), cache.pin_prefix([*CHAT[:8], 99, 99, 99, 99])
    assert (first.num_tokens, second.num_tokens) == (12, 8)
    assert cache.num_available == 32 - 3
    assert cache.clear_prefix_cache() == 3 + 2
    assert (cache.match_length(CHAT), cache.match_length(OTHER)) == (12, 8)
    cache.check_invariants()
    first.release()
    assert (first.num_tokens, cache.num_available) == (0, 32 - 2)
    first.release()
    assert cache.evict_prefix(CHAT) == 1
    second.release()
    assert (cache.evict_prefix(CHAT), cache.num_available) == (2, 32)
    cache.check_invariants()


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pin_is_neither_copied_nor_pickled(take):
    cache = cached(make(), CHAT)
    with cache.pin_prefix(CHAT) as pin, pytest.raises(TypeError, match="PrefixPin"):
        take(pin)
    cache.check_invariants()


def test_a_step_does_not_take_what_is_pinned():
    cache = cached(make(num_blocks=13), CHAT)
    with cache.pin_prefix(CHAT) as pin:
        assert pin.num_tokens == 24
        sequence = cache.add_sequence(range(100, 128))
        assert cache.shortage([sequence], [28]) == 1
        assert cache.try_prepare([sequence], [28]) is None
        cache.commit(cache.prepare([sequence], 24))
        assert (cache.num_available, cache.match_length([*CHAT, 0])) == (0, 24)
        cache.check_invariants()
    cache.commit(cache.prepare([sequence], 4))
    assert cache.match_length([*CHAT, 0]) == 20


def test_nothing_is_pinned_of_what_is_not_cached():
    for cache in (make(), make(prefix_cache=False), cached(make(), CHAT, namespace="tenant")):
        with cache.pin_prefix(CHAT) as pin:
            assert (pin.num_tokens, repr(pin)) == (0, "PrefixPin(0 tokens)")
            cache.check_invariants()
    with cache.pin_prefix(CHAT, namespace="tenant", max_tokens=13) as pin:
        assert (pin.num_tokens, cache.clear_prefix_cache()) == (12, 3)


def test_windows_and_states_are_pinned_with_the_prefix():
    window = AttentionSpec(1, 8, dtype="float32", window=6)
    state = StateSpec(delta_planes(1, 1, 4, 4), chunk=4, interval=8)
    cache = cached(make([SPEC, window, state], num_states=5, num_blocks=[33, 33]), CHAT)
    reusable = cache.match_length([*CHAT, 0])
    assert reusable > 0
    with cache.pin_prefix(CHAT) as pin:
        assert pin.num_tokens == reusable
        cache.clear_prefix_cache()
        cache.check_invariants()
        assert cache.match_length([*CHAT, 0]) == reusable
        for start in (100, 200, 300):  # other sequences use up the states, and windows run past their prefixes
            cached(cache, range(start, start + 40))
            assert cache.match_length([*CHAT, 0]) == reusable
            cache.check_invariants()
        with cache.add_sequence([*CHAT, *range(50, 60)]) as reader:
            assert reader.num_cached_tokens == reusable
            cache.commit(cache.prepare([reader], len(CHAT) + 10 - reusable))
            cache.clear_prefix_cache()
            assert cache.match_length([*CHAT, 0]) == reusable
            cache.check_invariants()
    cache.clear_prefix_cache()
    stats = cache.stats()
    assert (stats.num_used_blocks, stats.num_cached_blocks, stats.num_cached_states) == (0, 0, 0)
    assert stats.num_free_states == stats.num_states


def test_a_revoked_prefix_shortens_its_pin():
    cache = cached(make(), CHAT)
    with cache.pin_prefix(CHAT) as pin:
        assert cache.revoke_prefix(CHAT, valid=8) == {}
        assert (pin.num_tokens, cache.match_length([*CHAT, 0])) == (8, 8)
        cached(cache, CHAT)
        assert cache.match_length([*CHAT, 0]) == 24
        cache.check_invariants()
    cache.clear_prefix_cache()
    assert cache.num_available == cache.stats().num_free_blocks == 32


def test_what_a_host_tier_has_is_brought_to_the_device():
    cache = cached(make(), [1])
    with Tiers(cache, HostTier(cache, num_blocks=65), min_tokens=4) as tiers:
        cached(cache, CHAT)
        tiers.drain()
        cache.clear_prefix_cache()
        with cache.pin_prefix(CHAT) as pin:
            assert pin.num_tokens == 24
            assert cache.clear_prefix_cache() == 0
            tiers.check_invariants()


def test_admissions_leave_out_what_is_pinned():
    cache = cached(make(device="none", num_blocks=13, prefix_cache=True), CHAT)
    scheduler = Scheduler(cache, headroom=0.0, share_prompts=False)
    pin = cache.pin_prefix(CHAT)  # 6 of 12 blocks
    for number in range(2):
        scheduler.add(Request(number, np.arange(13) + 100 * number + 100, 4))
    step = scheduler.schedule()
    while step is not None:
        assert len(step.runs) == 1
        scheduler.commit(step)
        scheduler.accept(step, [5] * len(step.outputs))
        step = scheduler.schedule()
    assert (scheduler.num_preemptions, pin.num_tokens) == (0, 24)
    scheduler.add(Request(2, np.arange(300, 328), 2))
    with pytest.raises(OutOfBlocks):
        scheduler.schedule()
    pin.release()
    assert scheduler.schedule() is not None


def test_memory_is_not_released_under_a_pin():
    cache = cached(PagedKVCache(SPEC, block_size=4, num_blocks=9, memory_saver=True), SYSTEM)
    with cache.pin_prefix(SYSTEM), pytest.raises(UnsupportedOption, match="pins or transfers hold 2 blocks"):
        cache.release_memory()
    cache.release_memory()


@pytest.mark.parametrize(
    ("tokens", "options", "error"),
    [
        (CHAT, {"max_tokens": -1}, ShapeError),
        ([[1]], {}, ShapeError),
        (["a"], {}, UnsupportedDtype),
        (CHAT, {"namespace": []}, UnsupportedDtype),
        (CHAT, {"spans": [(5, 3, b"x")]}, ShapeError),
        (CHAT, {"cross_digest": True}, UnsupportedDtype),
    ],
)
def test_foreign_arguments_pin_nothing(tokens, options, error):
    cache = cached(make(), CHAT)
    with pytest.raises(error):
        cache.pin_prefix(tokens, **options)
    assert cache.clear_prefix_cache() == 6


def test_a_collected_pin_is_released():
    cache = cached(make(), CHAT)
    pin = cache.pin_prefix(CHAT)
    assert (pin.num_tokens, cache.num_available) == (24, 26)
    del pin
    assert cache.num_available == 32
    cache.check_invariants()


def test_a_pin_is_made_by_a_cache_only():
    with pytest.raises(InvalidSequence, match="pin_prefix"):
        PrefixPin()
