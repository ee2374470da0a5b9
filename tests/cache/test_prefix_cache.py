"""The prefix cache: the blocks that it keeps, the prefixes that sequences reuse, and eviction."""

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    OutOfBlocks,
    PagedCacheConfig,
    PagedKVCache,
    make_cache,
)
from tests.cache.caches import SPEC, WINDOWED, advance, make
from tests.cache.prefixes import ALIKE, computed, kept
from tests.cache.swaps import content, fill
from tests.together import together


@together("length", [0, 1, 3, 4, 5, 8, 9, 11, 12, 13])
def test_whole_blocks_below_the_last_token_are_reused(length):
    cache = make()
    kept(cache, ALIKE[:12])
    sequence = cache.add_sequence(ALIKE[:length])
    expected = max(0, length - 1) // 4 * 4
    assert sequence.num_cached_tokens == sequence.num_computed_tokens == expected
    assert cache.match_length(ALIKE[:length]) == expected
    cache.check_invariants()


def test_a_reused_block_is_the_same_block_and_is_not_written_again():
    cache = make()
    first = computed(cache, ALIKE[:10])
    before = content(cache, first)
    second = cache.add_sequence([*ALIKE[:8], 99])
    blocks = cache.block_table().numpy()
    assert blocks[second.row, :2].tolist() == blocks[first.row, :2].tolist()
    fill(cache, [second], 1, seed=5)
    assert content(cache, first) == before
    assert cache.stats().num_used_blocks == 3 + 1
    cache.check_invariants()


def test_cached_blocks_outlive_their_sequence_and_are_evicted_before_a_refusal():
    cache = make(num_blocks=6, max_tokens_per_sequence=64)
    kept(cache, ALIKE[:12])
    stats = cache.stats()
    assert (stats.num_used_blocks, stats.num_evictable_blocks, stats.num_free_blocks) == (0, 3, 2)
    assert (stats.num_cached_blocks, stats.num_evicted_blocks, stats.utilization) == (3, 0, 0.0)
    assert cache.num_available == 5
    other = computed(cache, range(50, 66))
    assert cache.stats().num_evicted_blocks == 2
    assert cache.num_available == 1
    assert cache.match_length(ALIKE) == 4  # the tail was evicted first
    with pytest.raises(OutOfBlocks, match="2 blocks are needed and 1 are available") as short:
        cache.prepare([other], 5)
    assert (short.value.requested, short.value.available) == (2, 1)
    assert cache.match_length(ALIKE) == 4
    assert cache.try_prepare([other], 4) is not None
    assert cache.match_length(ALIKE) == 0


def test_statistics_count_hits_and_misses():
    cache = make()
    kept(cache, ALIKE[:12])
    cache.add_sequence([])
    cache.add_sequence(ALIKE[:10])
    cache.add_sequence([7, *ALIKE[:10]])
    stats = cache.stats()
    assert (stats.prefix_hits, stats.prefix_misses) == (1, 3)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (12 + 0 + 10 + 11, 8)


def test_no_more_than_max_tokens_are_reused():
    cache = make()
    kept(cache, ALIKE)
    assert [cache.match_length(ALIKE, max_tokens=most) for most in (0, 3, 4, 9, 10**6)] == [0, 0, 4, 8, 36]
    assert cache.add_sequence(ALIKE, max_tokens=9).num_cached_tokens == 8


def test_a_cache_without_prefix_cache_keeps_nothing():
    cache = make(prefix_cache=False)
    assert not cache.has_prefix_cache
    kept(cache, ALIKE)
    assert cache.match_length(ALIKE) == cache.add_sequence(ALIKE).num_cached_tokens == 0
    assert cache.stats().num_free_blocks == cache.num_available == 16
    assert cache.clear_prefix_cache() == 0
    assert make().has_prefix_cache


def test_ids_that_come_late_are_published_when_they_are_known():
    cache = make()
    sequence = cache.add_sequence(ALIKE[:6])
    advance(cache, [sequence], 9)
    assert cache.match_length(ALIKE) == 4  # 6 ids are known, 9 tokens computed
    cache.append_tokens([sequence], [ALIKE[6:9]])
    assert cache.match_length(ALIKE) == 4
    advance(cache, [sequence], 1)
    assert cache.match_length(ALIKE) == 8
    advance(cache, [sequence], 2)
    cache.append_tokens([sequence], [ALIKE[9:12]])
    cache.remove(sequence)
    assert cache.match_length(ALIKE) == 12
    cache.check_invariants()


def test_rejected_drafts_are_never_found():
    cache = make()
    sequence = cache.add_sequence(ALIKE[:12])
    batch = cache.prepare([sequence], 12)
    assert cache.match_length(ALIKE) == 0
    cache.commit(batch, accepted=[7])
    assert cache.match_length(ALIKE) == 4
    batch = cache.prepare([sequence], 5)
    cache.abandon(batch)
    assert cache.match_length(ALIKE) == 4
    cache.check_invariants()


def test_namespaces_share_nothing_and_differ_by_type():
    cache = make(num_blocks=40)
    names = [None, "a", b"a", 1, True, 1.0, ("a",), (1,), (True,)]
    for name in names:
        assert cache.match_length(ALIKE, namespace=name) == 0
        computed_ = computed(cache, ALIKE[:9], namespace=name)
        assert computed_.num_cached_tokens == 0
        cache.remove(computed_)
    assert [cache.match_length(ALIKE, namespace=name) for name in names] == [8] * len(names)


def test_a_running_sequence_keeps_publishing_in_its_namespace():
    cache = make()
    sequence = computed(cache, ALIKE[:9], namespace=("tenant", 7))
    cache.append_tokens([sequence], [ALIKE[9:20]])
    fill(cache, [sequence], 11)
    assert cache.match_length(ALIKE, namespace=("tenant", 7)) == 20
    assert cache.match_length(ALIKE) == 0


def test_spans_key_only_the_blocks_that_they_overlap():
    cache = make()
    kept(cache, ALIKE[:16], spans=[(5, 7, b"cat")])
    assert cache.match_length(ALIKE[:17]) == 4
    assert cache.match_length(ALIKE[:17], spans=[(5, 7, b"dog")]) == 4
    assert cache.match_length(ALIKE[:17], spans=[(5, 7, b"cat")]) == 16
    sequence = cache.add_sequence(ALIKE[:17], spans=iter([(5, 7, b"cat")]))
    assert sequence.num_cached_tokens == 16
    fill(cache, [sequence], 1)
    cache.append_tokens([sequence], [ALIKE[17:20]])
    fill(cache, [sequence], 3)
    assert cache.match_length(ALIKE[:21], spans=[(5, 7, b"cat")]) == 20
    cache.check_invariants()


def test_a_window_is_reused_where_its_last_blocks_are_cached():
    cache = make([SPEC, WINDOWED], num_blocks=[17, 9], device="none", max_tokens_per_sequence=64)
    kept(cache, ALIKE[:24])
    assert cache.match_length(ALIKE) == 24
    sequence = cache.add_sequence(ALIKE)
    assert sequence.num_cached_tokens == 24
    # A window of 6 sees the 5 tokens before the next: the last two of the 6 blocks.
    assert np.count_nonzero(cache.block_table(1).numpy()[sequence.row]) == 2
    assert np.count_nonzero(cache.block_table(0).numpy()[sequence.row]) == 6
    cache.check_invariants()


def test_an_evicted_window_shortens_the_prefix_and_a_recomputed_one_extends_it():
    cache = make([SPEC, WINDOWED], num_blocks=[40, 9], device="none", max_tokens_per_sequence=64)
    kept(cache, ALIKE[:24])
    kept(cache, range(100, 132))
    # All eight blocks of the window's group were evicted; those of the full group stay.
    assert cache.match_length(ALIKE) < 24
    assert cache._parts.prefix.tree.match(ALIKE).num_full_tokens == 24
    kept(cache, ALIKE[:24])
    assert cache.match_length(ALIKE) == 24
    cache.check_invariants()


def test_layers_that_all_have_windows_reuse_prefixes_too():
    cache = make(WINDOWED)
    sequence = computed(cache, ALIKE[:30])
    assert cache.num_available == 16 - 2
    cache.remove(sequence)
    assert cache.match_length(ALIKE) == 28
    assert cache.num_available == 16
    again = cache.add_sequence(ALIKE)
    assert again.num_cached_tokens == 28
    cache.remove(again)
    cache.check_invariants()
    cache.clear_prefix_cache()
    assert cache.stats().num_free_blocks == 16
    assert cache._parts.prefix.tree.num_nodes == 0


def test_a_config_makes_a_cache_with_its_policy():
    config = PagedCacheConfig(block_size=4, num_blocks=9, device="none", eviction_policy="slru")
    assert make_cache(config, SPEC).eviction_policy == "slru"
    assert make_cache(config, SPEC).has_prefix_cache
    assert not make_cache(PagedCacheConfig(num_blocks=9, prefix_cache=False), SPEC).has_prefix_cache


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_computed_and_unevicted_prefix_is_found(block_size, seed):
    """Compare with a dictionary of block prefixes: chats that grow and branch, in a pool that holds them all."""
    random = np.random.default_rng(seed)
    cache = PagedKVCache(
        AttentionSpec(1, 8), block_size=block_size, num_blocks=20_000 // block_size, device="none", max_sequences=4
    )
    known, chats = set(), [[]]
    for _ in range(80):
        start = chats[random.integers(len(chats))]
        tokens = [*start[: random.integers(len(start) + 1)], *random.integers(0, 3, random.integers(1, 60)).tolist()]
        prefixes = [tuple(tokens[:end]) for end in range(block_size, len(tokens) + 1, block_size)]
        expected = sum(prefix in known for prefix in prefixes[: (len(tokens) - 1) // block_size]) * block_size
        sequence = cache.add_sequence(tokens)
        assert sequence.num_cached_tokens == expected
        while sequence.num_computed_tokens < len(tokens):
            advance(cache, [sequence], min(17, len(tokens) - sequence.num_computed_tokens))
        cache.remove(sequence)
        known.update(prefixes)
        chats.append(tokens)
    assert cache.stats().num_evicted_blocks == 0
    cache.check_invariants()


def test_a_window_needs_only_the_blocks_that_the_next_token_sees():
    cache = make([SPEC, AttentionSpec(2, 8, dtype="float32", window=5)], num_blocks=[40, 9], device="none")
    kept(cache, ALIKE[:16])
    kept(cache, range(100, 128))  # takes all but the last of four blocks of the window's group
    assert np.count_nonzero(cache.block_map(1).cached) == 8
    assert cache.match_length(ALIKE[:17]) == 16
    for start in range(200, 250, 10):  # blocks that the end of the second prompt does not need, and one another
        kept(cache, range(start, start + 4))
        assert cache.match_length(ALIKE[:17]) == 16
    kept(cache, range(300, 304))
    assert cache.match_length(ALIKE[:17]) == 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru"])
@pytest.mark.parametrize("generated", [0, 1, 30])
def test_prompts_that_come_again_in_turn_are_found_although_a_window_cannot_keep_all_of_them(policy, generated):
    spec = AttentionSpec(2, 8, dtype="float32", window=32)
    cache = make([SPEC, spec], num_blocks=[400, 170], device="none", eviction_policy=policy)
    prompts = [[*range(start, start + 200)] for start in range(0, 6000, 1000)]
    for _ in range(3):
        found = []
        for prompt in prompts:
            found.append(cache.match_length(prompt))
            with cache.add_sequence([*prompt, *range(generated)]) as sequence:
                while sequence.num_computed_tokens < len(prompt) + generated:
                    advance(cache, [sequence], min(20, len(prompt) + generated - sequence.num_computed_tokens))
    assert found == [196] * 6
    cache.check_invariants()


def test_spans_do_not_change_with_the_callers_list():
    digest = bytearray(b"cat")
    span = [0, 4, digest]
    cache = make()
    sequence = cache.add_sequence(ALIKE[:8], spans=[span])
    digest[:], span[1] = b"dog", -5
    advance(cache, [sequence], 8)
    assert cache.match_length(ALIKE, spans=[(0, 4, b"cat")]) == 8
