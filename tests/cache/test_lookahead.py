"""Speculation: keys kept before a window for shorter sequences, and prefix hits that give up their last block."""

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    PagedCacheConfig,
    PagedKVCache,
    ShapeError,
    SwapSpace,
    UnsupportedOption,
    make_cache,
)
from pagecore.cache.layers.groups import Group
from pagecore.cache.memory.demand import blocks_at_once
from tests.cache.caches import advance
from tests.together import together

FULL = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)


def spec(window, lookahead=0):
    return AttentionSpec(2, 8, dtype="float32", num_query_heads=4, window=window, lookahead=lookahead)


def make(window=10, lookahead=0, **options):
    given = {"block_size": 4, "num_blocks": 60, "max_sequences": 6, "device": "none"} | options
    return PagedKVCache([FULL, spec(window, lookahead)], **given)


@pytest.mark.parametrize("lookahead", [0, 1, 3, 4, 10])
@pytest.mark.parametrize("window", [10, 11, 12, 13])
def test_a_sequence_can_be_truncated_by_its_lookahead_at_every_length(window, lookahead):
    for length in range(window + lookahead, window + lookahead + 9):
        cache = make(window, lookahead)
        sequence = cache.add_sequence(range(100))
        advance(cache, [sequence], length)
        kept = cache.held_from(sequence, 1)
        assert kept == max(0, length - lookahead - (window - 1)) // 4 * 4
        cache.truncate(sequence, length - lookahead)
        cache.check_invariants()
        advance(cache, [sequence], 1)
        if kept - 4 >= 0:
            with pytest.raises(
                UnsupportedOption, match=rf"left the window of {window} tokens.*up to the spec's lookahead"
            ):
                cache.truncate(sequence, max(1, kept - 1))


@together("forks", [False, True])
@together("length", [17, 20, 22])
@together("block_size", [1, 2, 3])
def test_a_cut_sequence_holds_no_blocks_that_its_row_has_released(block_size, length, forks):
    """The path of the shorter sequence has keys for its window, of which the row released some when it was longer."""
    cache = PagedKVCache(spec(9, 9), block_size=block_size, num_blocks=40, max_sequences=4, device="none")
    sequence = cache.add_sequence(range(30))
    for count in (10, 10, 3):
        advance(cache, [sequence], count)
    sequences = [sequence, cache.fork(sequence)] if forks else [sequence]
    cache.truncate(sequence, length)
    used = {block for one in sequences for block in cache.block_table().numpy()[one.row].tolist()} - {0}
    assert cache.num_available == 39 - len(used)
    taker = cache.add_sequence([])
    cache.abandon(cache.prepare([taker], min(cache.num_available * block_size, 17)))
    cache.check_invariants()
    held = cache.held_from(sequence)
    assert cache.clear_prefix_cache() >= 0
    assert cache.held_from(sequence) == held
    advance(cache, [sequence], 3)
    cache.check_invariants()


def test_attention_sees_the_window_and_not_the_lookahead():
    rng = np.random.default_rng(0)
    outputs = []
    for lookahead in (0, 5):
        cache = make(6, lookahead, device="cpu")
        sequence = cache.add_sequence(range(30))
        rng = np.random.default_rng(0)
        for count in (20, 1):
            batch = cache.prepare([sequence], count)
            for layer in (0, 1):
                key, value = (rng.normal(size=(count, 2, 8)).astype(np.float32) for _ in range(2))
                cache.write(layer, key, value, batch)
            outputs.append(np.asarray(cache.attend(1, rng.normal(size=(count, 4, 8)).astype(np.float32), batch)))
            cache.commit(batch)
    np.testing.assert_array_equal(outputs[0], outputs[2])
    np.testing.assert_array_equal(outputs[1], outputs[3])


def test_layers_of_different_lookahead_are_different_groups_only_with_windows():
    cache = PagedKVCache([spec(8), spec(8, 2), spec(None), spec(None, 2)], num_blocks=9, device="none")
    assert [cache.group_of(layer) for layer in range(4)] == [0, 1, 2, 2]


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("lookahead", [0, 1, 4, 7])
def test_demand_counts_the_lookahead(lookahead, block_size):
    cache = make(8, lookahead, block_size=block_size, num_blocks=120, prefix_cache=False)
    group = Group(spec(8, lookahead), 1)
    assert cache._parts.groups[1].attended == group.attended
    most = 0
    for start in range(1, 6):
        sequence = cache.add_sequence(range(100))
        advance(cache, [sequence], start)
        while sequence.num_computed_tokens < 60:
            batch = cache.prepare([sequence], 5)
            most = max(most, cache._parts.tables.pools[1].num_used)
            cache.commit(batch)
        cache.remove(sequence)
    assert most == blocks_at_once(group, 64, block_size, step_tokens=5)


@pytest.mark.parametrize("lookahead", [0, 3, 8])
def test_prefixes_are_reused_and_shared_with_lookahead(lookahead):
    rng = np.random.default_rng(lookahead)
    cache = make(8, lookahead, num_blocks=[60, 30], block_size=2)
    space = SwapSpace(cache, num_blocks=60)
    held = []
    for turn in range(60):
        tokens = rng.integers(0, 2, int(rng.integers(1, 40)))
        if len(held) == 4:
            cache.remove(held.pop(int(rng.integers(0, 4))))
        sequence = cache.add_sequence(tokens)
        while sequence.num_computed_tokens < sequence.num_tokens:
            left = sequence.num_tokens - sequence.num_computed_tokens
            if cache.try_prepare([sequence], min(left, 7), batch := cache.make_batch(1, 8)) is None:
                break
            cache.commit(batch)
        computed = sequence.num_computed_tokens
        if computed > lookahead and turn % 3 == 0 and computed - lookahead >= sequence.num_cached_tokens:
            cache.truncate(sequence, computed - lookahead)
        if turn % 5 == 4 and cache.try_swap_out([sequence], space) and not cache.try_swap_in([sequence]):
            cache.remove(sequence)
        else:
            held.append(sequence)
        cache.check_invariants()
    assert cache.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4, "lookahead": 5}, "lookahead is 5, but the window has 4 tokens; use a lookahead of at most"),
        ({"window": 4, "lookahead": -1}, "lookahead is -1"),
        ({"window": 4, "lookahead": "two"}, "lookahead is 'two'"),
        ({"lookahead": 1.5}, "lookahead is 1.5"),
    ],
)
def test_invalid_lookaheads_are_refused(options, message):
    with pytest.raises(ShapeError, match=message):
        AttentionSpec(2, 8, **options)


def test_a_lookahead_of_the_whole_window_and_without_a_window_is_allowed():
    assert AttentionSpec(2, 8, window=4, lookahead=4).lookahead == 4
    cache = PagedKVCache(AttentionSpec(2, 8, lookahead=4), num_blocks=9, device="none")
    sequence = cache.add_sequence(range(20))
    advance(cache, [sequence], 20)
    cache.truncate(sequence, 1)


def test_one_lookahead_can_be_set_in_layers_with_and_without_a_window():
    caches = [PagedKVCache([spec(None, k), spec(4, 3)], block_size=2, num_blocks=20, device="none") for k in (0, 3)]
    for cache in caches:
        sequence = cache.add_sequence(range(12))
        advance(cache, [sequence], 12)
        cache.truncate(sequence, 9)
    assert caches[0].stats() == caches[1].stats()
    assert [caches[1].held_from(caches[1].sequences[0], group=group) for group in range(2)] == [0, 6]


# -- EAGLE ------------------------------------------------------------------------------------------------------------


def test_worked_example_f3_a_hit_gives_up_its_last_block():
    for recompute, expected in ((False, 64), (True, 48)):
        cache = PagedKVCache(FULL, num_blocks=30, device="none", recompute_last_block=recompute)
        first = cache.add_sequence(range(64))
        advance(cache, [first], 64)
        assert cache.match_length(range(80)) == expected
        assert cache.add_sequence(range(80)).num_cached_tokens == expected
        assert cache.stats().prefix_hit_tokens == expected
        cache.check_invariants()


@together("window", [1, 2, 4, 5, 6, 9, 12])
def test_a_repeated_prompt_finds_what_is_left_of_its_hit_after_eviction(window):
    cache = PagedKVCache(
        [AttentionSpec(1, 8), AttentionSpec(1, 8, window=window)],
        block_size=4, num_blocks=[80, 45], device="none", recompute_last_block=True,
    )  # fmt: skip
    prompts = [range(first, first + 48) for first in range(0, 6000, 1000)]
    for prompt in prompts:
        with cache.add_sequence(prompt) as sequence:
            advance(cache, [sequence], 48)
    assert [cache.match_length(prompt) for prompt in prompts] == [40] * 6


@together("length", [1, 15, 16, 17, 32, 33, 48, 63, 64, 65, 100])
def test_what_is_left_of_a_hit_is_a_hit_of_every_window(length):
    plain, eagle = (make(10, num_blocks=60, recompute_last_block=flag) for flag in (False, True))
    for cache in (plain, eagle):
        sequence = cache.add_sequence(range(100))
        for count in (16, 17, 31):
            advance(cache, [sequence], count)
    whole = plain.match_length(range(length))
    assert eagle.match_length(range(length)) == plain.match_length(range(length), max_tokens=max(0, whole - 4))
    again = eagle.add_sequence(range(length))
    assert again.num_cached_tokens == eagle.match_length(range(length))
    advance(eagle, [again], length - again.num_cached_tokens)
    eagle.check_invariants()


def test_the_option_is_part_of_a_config_and_a_flag():
    cache = make_cache(PagedCacheConfig(num_blocks=30, device="none", recompute_last_block=True), FULL)
    sequence = cache.add_sequence(range(64))
    advance(cache, [sequence], 64)
    assert cache.match_length(range(80)) == 48
    for wrong in (1, "yes", None):
        with pytest.raises(UnsupportedOption, match="recompute_last_block"):
            make(recompute_last_block=wrong)
        with pytest.raises(UnsupportedOption, match="recompute_last_block"):
            PagedCacheConfig(recompute_last_block=wrong)
