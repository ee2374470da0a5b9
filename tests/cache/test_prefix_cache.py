"""What a cache keeps of its sequences, what others reuse of it, and what it gives up when blocks are short."""

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    InvalidSequence,
    OutOfBlocks,
    OutOfRows,
    PagedCacheConfig,
    PagedKVCache,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
    make_cache,
)
from pagecore.cache import SwapSpace
from tests.cache.caches import SPEC, WINDOWED, advance, make
from tests.cache.swaps import content, fill, poison

ALIKE = list(range(40))


def computed(cache, tokens, **options):
    """A sequence whose every token is computed, by blocks of random content."""
    sequence = cache.add_sequence(tokens, **options)
    left = sequence.num_tokens - sequence.num_computed_tokens
    if cache.device == "cpu":
        fill(cache, [sequence], left, seed=sequence.num_tokens)
    else:
        advance(cache, [sequence], left)
    return sequence


def kept(cache, tokens, **options):
    """Compute a sequence and remove it."""
    cache.remove(computed(cache, tokens, **options))


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 9, 11, 12, 13])
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


def test_what_is_kept_outlives_its_sequence_and_comes_before_a_refusal():
    cache = make(num_blocks=6, max_tokens_per_sequence=64)
    kept(cache, ALIKE[:12])
    stats = cache.stats()
    assert (stats.num_used_blocks, stats.num_evictable_blocks, stats.num_free_blocks) == (0, 3, 2)
    assert (stats.num_cached_blocks, stats.num_evicted_blocks, stats.utilization) == (3, 0, 0.0)
    assert cache.num_available == 5
    other = computed(cache, range(50, 66))
    assert cache.stats().num_evicted_blocks == 2
    assert cache.num_available == 1
    assert cache.match_length(ALIKE) == 4  # the tail went first
    with pytest.raises(OutOfBlocks, match="2 blocks are needed and 1 can be had") as short:
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


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"namespace": []}, UnsupportedDtype, "no hash"),
        ({"namespace": float("nan")}, UnsupportedDtype, "not equal to itself"),
        ({"spans": [(0, 4, b"a"), (3, 5, b"b")]}, ShapeError, "before the end"),
        ({"spans": [(0, 4, None)]}, UnsupportedDtype, "digest"),
        ({"max_tokens": -1}, ShapeError, "max_tokens"),
        ({"max_tokens": "4"}, (ShapeError, UnsupportedDtype), "max_tokens"),
        ({"priority": 50}, UnsupportedOption, "'priority'"),
        ({"rank": 1.0}, UnsupportedOption, "'rank'"),
        ({"time_to_live": 5}, UnsupportedOption, "time_to_live"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(options, error, match):
    cache = make()
    kept(cache, ALIKE[:12])
    before = cache.stats()
    with pytest.raises(error, match=match):
        cache.add_sequence(ALIKE, id="new", **options)
    assert cache.stats() == before
    cache.check_invariants()
    cache.add_sequence(ALIKE, id="new")


@pytest.mark.parametrize("priority", [-1, 101, float("nan"), float("inf"), "high"])
def test_a_priority_is_a_number_from_0_to_100(priority):
    with pytest.raises((ShapeError, UnsupportedDtype), match="priority"):
        make(eviction_policy="priority").add_sequence(ALIKE, priority=priority)


def test_a_row_that_is_not_there_is_refused_before_anything_counts_as_used():
    cache = make(max_sequences=1)
    computed(cache, ALIKE[:9])
    before = cache.stats()
    with pytest.raises(OutOfRows):
        cache.add_sequence(ALIKE)
    assert cache.stats() == before
    cache.check_invariants()


def test_a_duplicate_stays_with_its_sequence_and_costs_no_more_than_without():
    cache = make()
    twins = [cache.add_sequence(ALIKE[:12]) for _ in range(2)]
    fill(cache, twins, 12)
    rows = cache.block_table().numpy()[[twin.row for twin in twins], :3].tolist()
    assert not set(rows[0]) & set(rows[1])
    cache.append_tokens([twins[1]], [ALIKE[12:20]])
    fill(cache, [twins[1]], 8)
    assert cache.match_length(ALIKE) == 20  # its own continuation is found all the same
    assert cache.num_available == 16 - 8
    cache.remove(twins[0])
    assert cache.num_available == 16 - 5
    taker = cache.add_sequence([])
    assert cache.try_prepare([taker], 4 * 11) is not None
    assert cache.block_table().numpy()[twins[1].row, :3].tolist() == rows[1]
    assert cache.match_length(ALIKE) == 20  # by the blocks of the one that goes on
    cache.check_invariants()


def test_a_sequence_cut_inside_a_kept_block_writes_into_a_copy():
    cache = make()
    sequence = computed(cache, ALIKE[:12])
    before = content(cache, sequence)
    cache.truncate(sequence, 6)
    cache.append_tokens([sequence], [[98, 99]])
    fill(cache, [sequence], 2, seed=9)
    cache.check_invariants()
    again = cache.add_sequence(ALIKE[:13])
    assert again.num_cached_tokens == 12
    assert content(cache, again) == before
    assert cache.match_length([*ALIKE[:6], 98, 99, 0]) == 8


def test_a_sequence_that_fills_the_cache_can_be_cut_and_go_on():
    cache = make(num_blocks=4, max_tokens_per_sequence=64)
    sequence = computed(cache, ALIKE[:12])
    cache.truncate(sequence, 10)
    assert cache.shortage([sequence], 2) == 0
    assert cache.shortage([sequence], 3) == 1
    assert cache.try_prepare([sequence], 3) is None
    cache.check_invariants()
    cache.append_tokens([sequence], [[98, 99]])
    fill(cache, [sequence], 2)
    assert cache.match_length([*ALIKE[:10], 98, 99, 0]) == 12
    assert cache.match_length(ALIKE) == 8
    cache.check_invariants()


def test_a_block_that_is_written_into_is_replaced_in_the_tree_by_a_copy_of_the_same():
    cache = make(num_blocks=9, max_sequences=5)
    first, double = (cache.add_sequence(ALIKE[:8]) for _ in range(2))
    fill(cache, [first, double], 8)
    child = cache.fork(first)
    cache.truncate(child, 6)
    cache.remove(first)
    filler = cache.add_sequence([])
    assert cache.try_prepare([filler], 4 * cache.num_available) is not None
    assert cache.num_available == 0
    assert cache.shortage([child], 2) == 0
    cache.append_tokens([child], [[98, 99]])
    fill(cache, [child], 2)  # in place: the tree goes on with the block that `double` has
    assert cache.match_length(ALIKE) == 8
    again = cache.add_sequence(ALIKE[:9])
    assert [plane[1] for plane in content(cache, again)] == [plane[1] for plane in content(cache, double)]
    cache.check_invariants()


def test_a_fork_holds_what_its_parent_published():
    cache = make(num_blocks=6)
    parent = computed(cache, ALIKE[:12])
    child = cache.fork(parent)
    assert child.num_cached_tokens == 0
    cache.remove(parent)
    assert cache.num_available == 2
    assert cache.stats().num_evictable_blocks == 0
    cache.remove(child)
    assert cache.stats().num_evictable_blocks == 3


def test_what_two_rows_share_and_only_one_can_name_is_not_published():
    cache = make()
    parent = cache.add_sequence(ALIKE[:4])
    advance(cache, [parent], 8)
    child = cache.fork(parent)
    cache.append_tokens([parent], [ALIKE[4:9]])
    advance(cache, [parent], 1)
    assert cache.match_length(ALIKE) == 4  # the child may yet say otherwise of the second block
    cache.remove(child)
    cache.remove(parent)
    assert cache.match_length(ALIKE) == 8
    assert cache.num_available == 16


def test_a_window_is_reused_where_its_last_blocks_are_there():
    cache = make([SPEC, WINDOWED], num_blocks=[17, 9], device="none", max_tokens_per_sequence=64)
    kept(cache, ALIKE[:24])
    assert cache.match_length(ALIKE) == 24
    sequence = cache.add_sequence(ALIKE)
    assert sequence.num_cached_tokens == 24
    # A window of 6 sees 5 tokens before the next: the last two blocks of the 6.
    assert np.count_nonzero(cache.block_table(1).numpy()[sequence.row]) == 2
    assert np.count_nonzero(cache.block_table(0).numpy()[sequence.row]) == 6
    cache.check_invariants()


def test_a_window_that_went_makes_the_prefix_shorter_and_its_return_longer():
    cache = make([SPEC, WINDOWED], num_blocks=[40, 9], device="none", max_tokens_per_sequence=64)
    kept(cache, ALIKE[:24])
    kept(cache, range(100, 132))
    # All eight blocks of the window's group went, while the full ones stay.
    assert cache.match_length(ALIKE) < 24
    assert cache._prefix.tree.match(ALIKE).num_full_tokens == 24
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
    assert cache._prefix.tree.num_nodes == 0


def test_what_comes_back_from_a_swap_space_is_kept_once():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    sequence = computed(cache, ALIKE[:12])
    before = content(cache, sequence)
    cache.swap_out(sequence, space)
    assert cache.match_length(ALIKE) == 12
    assert cache.stats().num_evictable_blocks == 3
    poison(cache)
    cache.swap_in(sequence)
    assert content(cache, sequence) == before
    assert cache.num_available == 13
    cache.check_invariants()


def test_swapping_in_evicts_before_it_refuses():
    cache = make(num_blocks=6)
    space = SwapSpace(cache, num_blocks=9)
    sequence = computed(cache, ALIKE[:12])
    cache.swap_out(sequence, space)
    kept(cache, range(50, 70))
    assert cache.stats().num_free_blocks == 0
    assert cache.shortage([sequence], 0) == 0
    cache.swap_in(sequence)
    assert cache.stats().num_evicted_blocks == 3 + 3
    cache.check_invariants()


@pytest.mark.parametrize(("policy", "left"), [("lru", [1, 3]), ("mru", [2, 3]), ("fifo", [2, 3]), ("lfu", [1, 3])])
def test_the_policy_says_what_goes_first(policy, left):
    cache = make(num_blocks=7, eviction_policy=policy, device="none")
    for first in (100, 200, 300):
        kept(cache, range(first, first + 8))
    for first in (300, 100):
        cache.remove(cache.add_sequence(range(first, first + 9)))
    computed(cache, [1, 2])
    computed(cache, [3, 4])
    found = [i for i, first in enumerate((100, 200, 300), 1) if cache.match_length(range(first, first + 9)) == 8]
    assert found == left


def test_a_priority_keeps_until_its_time_is_over():
    now = [0.0]
    cache = make(num_blocks=5, eviction_policy="priority", clock=lambda: now[0], device="none")
    kept(cache, range(100, 108), priority=90, time_to_live=10)
    kept(cache, range(200, 208))
    kept(cache, range(300, 304))
    assert cache.match_length(range(100, 109)) == 8
    now[0] = 11.0
    kept(cache, range(400, 412))
    assert cache.match_length(range(100, 109)) < 8


def test_a_rank_is_the_users_own_policy():
    cache = make(num_blocks=5, eviction_policy="rank", device="none")
    first, second = (computed(cache, range(start, start + 8), rank=rank) for start, rank in ((100, 2.0), (200, 1.0)))
    cache.remove(first)
    cache.remove(second, rank=3.0)
    kept(cache, [1, 2, 3, 4], rank=9.0)
    assert (cache.match_length(range(100, 109)), cache.match_length(range(200, 209))) == (4, 8)


def test_a_rank_that_is_refused_leaves_the_sequence():
    cache = make()
    sequence = computed(cache, ALIKE[:9])
    with pytest.raises(UnsupportedOption, match="rank"):
        cache.remove(sequence, rank=1.0)
    cache.remove(sequence)
    with pytest.raises(InvalidSequence):
        cache.remove(sequence)


def test_a_config_makes_a_cache_with_its_policy():
    config = PagedCacheConfig(block_size=4, num_blocks=9, device="none", eviction_policy="slru")
    assert make_cache(config, SPEC).eviction_policy == "slru"
    assert make_cache(config, SPEC).has_prefix_cache
    assert not make_cache(PagedCacheConfig(num_blocks=9, prefix_cache=False), SPEC).has_prefix_cache


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_prefix_that_was_computed_and_not_given_up_is_found(block_size, seed):
    """Against a dictionary of block prefixes: chats that grow and branch, in a pool that holds them all."""
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


def used_by_rows(cache, sequences):
    rows = cache.block_table().numpy()[[sequence.row for sequence in sequences]]
    return len(set(rows.ravel().tolist()) - {0})


def test_what_a_cut_sequence_has_copied_is_not_held_any_longer():
    cache = make()
    sequence = computed(cache, ALIKE[:12])
    cache.truncate(sequence, 6)
    cache.append_tokens([sequence], [[98]])
    assert cache.num_available == 16 - 2
    fill(cache, [sequence], 1)
    assert cache.stats().num_copied_blocks == 1
    assert cache.num_available == 16 - used_by_rows(cache, [sequence]) == 14
    cache.check_invariants()


def test_the_fork_of_a_duplicate_is_a_duplicate():
    cache = make()
    twins = [cache.add_sequence(ALIKE[:12]) for _ in range(2)]
    fill(cache, twins, 12)
    child = cache.fork(twins[1])
    for twin in twins:
        cache.remove(twin)
    assert cache.num_available == 16 - used_by_rows(cache, [child]) == 13
    taker = cache.add_sequence([])
    assert cache.try_prepare([taker], 4 * 13) is not None
    cache.check_invariants()


def test_beams_share_what_they_learned_late():
    cache = make()
    beams = [cache.add_sequence(ALIKE[:4]) for _ in range(2)]
    advance(cache, beams, [8, 4])
    cache.append_tokens([beams[0]], [ALIKE[4:8]])
    cache.reorder(beams, [beams[0]] * 2)
    assert cache.match_length(ALIKE) == 8
    for beam in beams:
        cache.append_tokens([beam], [[90]])
    advance(cache, beams, 1)
    cache.check_invariants()
    cache.remove(beams[0])
    assert cache.num_available == 16 - used_by_rows(cache, [beams[1]])


def test_a_window_needs_no_more_than_the_next_token_sees():
    cache = make([SPEC, AttentionSpec(2, 8, dtype="float32", window=5)], num_blocks=[40, 9], device="none")
    kept(cache, ALIKE[:16])
    kept(cache, range(100, 128))  # takes all but the last of four blocks of the window's group
    assert np.count_nonzero(cache.block_map(1).cached) == 8
    assert cache.match_length(ALIKE[:17]) == 16
    kept(cache, range(200, 204))
    assert cache.match_length(ALIKE[:17]) == 0


def test_those_that_share_blocks_and_come_back_together_publish_them_again():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = computed(cache, ALIKE[:12])
    pair = [parent, cache.fork(parent)]
    cache.swap_out(pair, space)
    cache.clear_prefix_cache()
    assert cache.match_length(ALIKE) == 0
    cache.swap_in(pair)
    assert cache.match_length(ALIKE) == 12
    cache.remove(parent)
    assert cache.num_available == 13
    cache.check_invariants()


def test_those_that_come_back_do_not_publish_what_one_of_them_cannot_name():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = cache.add_sequence(ALIKE[:4])
    advance(cache, [parent], 8)
    pair = [parent, cache.fork(parent)]
    cache.append_tokens([parent], [ALIKE[4:8]])
    cache.swap_out(pair, space)
    cache.clear_prefix_cache()
    cache.swap_in(pair)
    cache.remove(parent)
    assert cache.num_available == 16 - used_by_rows(cache, pair[1:]) == 14
    cache.check_invariants()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_rank_or_time_that_is_not_finite_is_refused_before_anything_changes(number):
    cache = make(eviction_policy="rank")
    with pytest.raises(ShapeError, match="rank"):
        cache.add_sequence(ALIKE, rank=number)
    sequence = computed(cache, ALIKE[:9])
    with pytest.raises(ShapeError, match="rank"):
        cache.remove(sequence, rank=number)
    cache.check_invariants()
    cache.remove(sequence)
    with pytest.raises(ShapeError, match="time_to_live"):
        make(eviction_policy="priority").add_sequence(ALIKE, priority=5, time_to_live=number)


@pytest.mark.parametrize("time", [float("nan"), "late", 10**400, RuntimeError("stopped")])
def test_a_clock_that_fails_leaves_everything_as_it_was(time):
    answers = [0.0]

    def clock():
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    cache = make(eviction_policy="priority", clock=clock)
    space = SwapSpace(cache, num_blocks=9)
    sequence, other = (computed(cache, ALIKE[:9], priority=50), cache.add_sequence(ALIKE[20:24]))
    batch = cache.prepare([other], 4)
    before = cache.stats()
    answers[0] = time
    for call in (
        lambda: cache.remove(sequence),
        lambda: cache.truncate(sequence, 2),
        lambda: cache.fork(sequence),
        lambda: cache.reorder([sequence], [sequence]),
        lambda: cache.swap_out(sequence, space),
        lambda: cache.prepare([sequence], 1),
        lambda: cache.commit(batch),
        lambda: cache.add_sequence(ALIKE),
        cache.clear_prefix_cache,
    ):
        with pytest.raises((ShapeError, UnsupportedDtype, RuntimeError)):
            call()
        assert cache.stats() == before
        cache.check_invariants()
    answers[0] = 1.0
    cache.commit(batch)
    cache.remove(sequence)


def test_a_clock_is_a_function():
    with pytest.raises(UnsupportedOption, match="clock"):
        make(clock=5)


def test_what_goes_on_from_a_worthy_prefix_is_worth_what_its_own_sequence_says():
    cache = make(num_blocks=7, block_size=4, eviction_policy="priority", device="none")
    kept(cache, ALIKE[:8], priority=90)
    kept(cache, ALIKE[:12])
    kept(cache, range(100, 108), priority=60)
    kept(cache, range(200, 208))  # two blocks, of which one is free
    assert (cache.match_length(ALIKE), cache.match_length(range(100, 109))) == (8, 8)


def test_what_a_swap_space_has_rounded_serves_nobody_else():
    cache = make()
    space = SwapSpace(cache, num_blocks=9, dtype="bfloat16")
    sequence = computed(cache, ALIKE[:12])
    cache.swap_out(sequence, space)
    cache.clear_prefix_cache()
    cache.swap_in(sequence)
    cache.append_tokens([sequence], [ALIKE[12:16]])
    fill(cache, [sequence], 4)
    assert cache.match_length(ALIKE) == 0
    cache.truncate(sequence, 6)
    child = cache.fork(sequence)
    cache.append_tokens([child], [ALIKE[6:12]])
    fill(cache, [child], 6)
    assert cache.match_length(ALIKE) == 0
    cache.truncate(child, 0)
    cache.append_tokens([child], [ALIKE[:8]])
    fill(cache, [child], 8)
    assert cache.match_length(ALIKE) == 8
    cache.check_invariants()


def test_spans_do_not_change_with_what_the_caller_gave():
    digest = bytearray(b"cat")
    span = [0, 4, digest]
    cache = make()
    sequence = cache.add_sequence(ALIKE[:8], spans=[span])
    digest[:], span[1] = b"dog", -5
    advance(cache, [sequence], 8)
    assert cache.match_length(ALIKE, spans=[(0, 4, b"cat")]) == 8


@pytest.mark.parametrize("spans", [5, [5], [(0, 4)], [(0, 4, None)], [(4, 0, 1)]])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_spans_that_are_none_are_refused_with_and_without_a_prefix_cache(spans, prefix_cache):
    cache = make(prefix_cache=prefix_cache)
    for call in (cache.add_sequence, cache.match_length):
        with pytest.raises((ShapeError, UnsupportedDtype), match="span"):
            call(ALIKE, spans=spans)


def test_a_fork_for_which_there_is_no_row_publishes_nothing():
    cache = make(max_sequences=1)
    sequence = cache.add_sequence([])
    advance(cache, [sequence], 8)
    cache.append_tokens([sequence], [ALIKE[:8]])
    with pytest.raises(OutOfRows):
        cache.fork(sequence)
    assert cache.match_length(ALIKE) == 0


def test_copies_that_are_taken_back_count_as_evicted():
    cache = make()
    twins = [cache.add_sequence(ALIKE[:8]) for _ in range(2)]
    fill(cache, twins, 8)
    cache.remove(twins[0])
    assert cache.stats().num_evictable_blocks == 2
    assert cache.clear_prefix_cache() == cache.stats().num_evicted_blocks == 2
    assert cache.match_length(ALIKE) == 8


def test_a_step_whose_blocks_cannot_be_kept_is_committed_all_the_same(monkeypatch):
    cache = make([SPEC, WINDOWED], num_blocks=[17, 17], device="none")
    sequence = cache.add_sequence(ALIKE[:20])
    batch = cache.prepare([sequence], 20)

    def fail(_sequences):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(cache._prefix, "publish", fail)
        with pytest.raises(MemoryError):
            cache.commit(batch)
    assert sequence.num_computed_tokens == 20
    cache.check_invariants()
    with pytest.raises(InvalidSequence):
        cache.commit(batch)
    cache.remove(sequence)
    assert cache.num_available == 16
