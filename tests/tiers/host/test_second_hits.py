"""Policy second_hit: the second prompt with a prefix copies it, and its own later tokens do not."""

import pytest

from pagecore import PagedKVCache, StateSpec
from pagecore.tiers.host.operations._operations import version_of
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers
from tests.cache.hybrid_models import CONV
from tests.tiers.host.caches import SPEC, cached, serve


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
