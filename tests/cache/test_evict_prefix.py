"""Eviction of one prefix, from its end to the first block that is used or shared."""

import pytest

from pagecore import AttentionSpec, PagedKVCache, ShapeError, StateSpec, UnsupportedDtype
from pagecore.storage.state_shapes import delta_planes
from pagecore.tiers.events import Mirror
from pagecore.tiers.events.sources import sources_of
from pagecore.tiers.events.wire import Batch
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers

SPEC = AttentionSpec(1, 8, dtype="float32")
SYSTEM = [7] * 10
CHAT = [*SYSTEM, *range(20, 37)]  # 6 whole blocks of 4 tokens, of which 2 are the system prompt's
OTHER = [*SYSTEM, *range(40, 49)]


def make(layers=SPEC, **options):
    return PagedKVCache(layers, **{"block_size": 4, "num_blocks": 33, "max_sequences": 4, **options})


def cached(cache, *prompts, **options):
    """Compute and remove prompts, one after another."""
    for tokens in prompts:
        with cache.add_sequence(tokens, **options) as sequence:
            cache.commit(cache.prepare([sequence], len(tokens) - sequence.num_computed_tokens))
    return cache


def test_what_another_prefix_shares_stays():
    cache = cached(make(), CHAT, OTHER)
    assert cache.evict_prefix(CHAT) == 4
    assert (cache.match_length(CHAT), cache.match_length([*OTHER, 0])) == (8, 16)
    assert cache.evict_prefix(OTHER) == 4  # the system prompt is its own now
    assert cache.stats().num_cached_blocks == 0
    cache.check_invariants()


@pytest.mark.parametrize(("keep", "left"), [(0, 0), (1, 4), (4, 4), (5, 8), (23, 24), (24, 24), (10**30, 24)])
def test_whole_blocks_of_the_beginning_are_kept(keep, left):
    cache = cached(make(), CHAT)
    free = cache.stats().num_free_blocks
    assert cache.evict_prefix(CHAT, keep=keep) == (24 - left) // 4
    assert cache.stats().num_free_blocks == free + (24 - left) // 4
    assert cache.match_length([*CHAT, 0]) == left
    assert cache.evict_prefix(CHAT, keep=keep) == 0


def test_what_a_sequence_uses_stays():
    cache = cached(make(), CHAT)
    reader = cache.add_sequence(CHAT[:17])
    assert cache.evict_prefix(CHAT) == 2
    assert cache.match_length(CHAT) == 16
    cache.remove(reader)
    assert cache.evict_prefix(CHAT) == 4


def test_a_prefix_that_goes_on_is_not_the_end():
    cache = cached(make(), CHAT)
    assert cache.evict_prefix(CHAT[:12]) == 0
    assert cache.evict_prefix([*CHAT[:12], 99, 99, 99, 99]) == 0
    assert cache.evict_prefix([]) == 0
    assert cache.match_length([*CHAT, 0]) == 24
    assert cache.evict_prefix([*CHAT, *range(9)]) == 6  # tokens that were never cached do not matter


def test_namespaces_and_spans_name_their_own_prefix():
    cache = cached(cached(make(), CHAT, namespace="tenant"), CHAT, spans=[(3, 5, b"image")])
    assert cache.evict_prefix(CHAT) == cache.evict_prefix(CHAT, namespace="else") == 0
    assert cache.evict_prefix(CHAT, namespace="tenant") == 6
    assert cache.evict_prefix(CHAT, spans=[(3, 5, b"image")]) == 6
    cache.check_invariants()


def test_windows_and_states_go_with_their_blocks():
    window = AttentionSpec(1, 8, dtype="float32", window=6)
    state = StateSpec(delta_planes(1, 1, 4, 4), chunk=4, interval=8)
    cache = cached(make([SPEC, window, state], num_states=9, num_blocks=[33, 33]), CHAT)
    before = cache.stats()
    assert before.num_cached_states == 1
    freed = cache.evict_prefix(CHAT)
    after = cache.stats()
    assert (after.num_cached_blocks, after.num_cached_states) == (0, 0)
    assert freed == before.num_cached_blocks
    cache.check_invariants()


def test_events_report_what_went():
    cache = cached(make(device="none"))
    (source,) = sources_of(cache._parts, None, "GPU")
    source.tree.start_journal()
    mirror = Mirror()
    cached(cache, CHAT, OTHER)
    cache.evict_prefix(CHAT)
    mirror.apply(0, Batch(1.0, source.events_of(source.tree.take_changes().to_list()), 0))
    assert (mirror.match(CHAT), mirror.match(OTHER)) == (8, 16)


@pytest.mark.parametrize("write", ["through", "on_evict"])
def test_copies_in_a_host_tier_stay_and_none_is_made(write):
    cache = make()
    with Tiers(cache, HostTier(cache, num_blocks=65), write=write, min_tokens=4) as tiers:
        cached(cache, CHAT)
        assert cache.evict_prefix(CHAT) == 6
        tiers.drain()
        assert tiers.match_length([*CHAT, 0]) == (24 if write == "through" else 0)
        tiers.check_invariants()


def test_a_cache_without_prefixes_has_nothing_to_evict():
    assert cached(make(prefix_cache=False), CHAT).evict_prefix(CHAT) == 0


@pytest.mark.parametrize(
    ("tokens", "options", "error"),
    [
        (CHAT, {"keep": -1}, ShapeError),
        (CHAT, {"keep": 1.5}, ShapeError),
        ([[1]], {}, ShapeError),
        (["a"], {}, UnsupportedDtype),
        (CHAT, {"namespace": []}, UnsupportedDtype),
        (CHAT, {"spans": [(5, 3, b"x")]}, ShapeError),
        (CHAT, {"cross_digest": True}, UnsupportedDtype),
        (CHAT, {"cross_digest": 1.5}, UnsupportedDtype),
    ],
)
def test_foreign_arguments_change_nothing(tokens, options, error):
    cache = cached(make(), CHAT)
    with pytest.raises(error):
        cache.evict_prefix(tokens, **options)
    assert cache.match_length([*CHAT, 0]) == 24
