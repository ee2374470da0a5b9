"""Demand: the blocks that a sequence needs at once, and the pools, rows and shortages that follow from it."""

import numpy as np
import pytest

from pagecore import AttentionSpec, NotEnoughMemory, OutOfBlocks, PagedKVCache, ShapeError, SwapSpace
from pagecore.cache.layers.groups import Group, arrange
from pagecore.cache.memory.demand import (
    PROMPT_TOKENS,
    TYPICAL_TOKENS,
    block_limit,
    blocks_at_once,
    divide_memory,
    longest_sequence,
    longest_step,
)
from pagecore.storage import TensorParallel
from tests.cache.caches import advance
from tests.together import together

FULL = AttentionSpec(2, 8)


def group(window=None, layers=1):
    return Group(AttentionSpec(2, 8, window=window), layers)


def made(windows, **options):
    layers = [AttentionSpec(2, 8, window=window) for window in windows]
    return PagedKVCache(layers, **{"block_size": 4, "max_sequences": 8, "device": "none"} | options)


def held_most(window, num_tokens, block_size, step_tokens):
    """Return the most blocks held over all ways to begin, then in whole steps: a twin that counts token by token."""
    most = 0
    for start in range(1, min(step_tokens, num_tokens) + 1):
        computed, step = 0, start
        while computed < num_tokens:
            step = min(step, num_tokens - computed)
            first = 0 if window is None else max(0, computed - (window - 1)) // block_size
            most = max(most, len({token // block_size for token in range(first * block_size, computed + step)}))
            computed, step = computed + step, step_tokens
    return most


@together("block_size", [1, 3, 4])
@together("step_tokens", [1, 2, 5, 9, 50])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 9, 100])
def test_the_demand_is_the_most_that_any_sequence_holds(window, step_tokens, block_size):
    for num_tokens in (1, 4, 5, 9, 40, 61):
        expected = held_most(window, num_tokens, block_size, step_tokens)
        assert blocks_at_once(group(window), num_tokens, block_size, step_tokens) == expected


def test_worked_example_c7_window():
    assert blocks_at_once(group(1024), 131072, 16, step_tokens=8192) == 577


@pytest.mark.parametrize("windows", [(None, 10), (10, None, 7), (10, 6), (None,)])
@pytest.mark.parametrize("seed", range(4))
def test_the_longest_sequence_and_step_are_exactly_what_a_cache_holds(windows, seed):
    rng = np.random.default_rng(seed)
    blocks = [int(rng.integers(1, 8)) if window else int(rng.integers(8, 14)) for window in windows]
    cache = made(windows, num_blocks=[count + 1 for count in blocks])
    length, step = cache.max_length, cache.max_step_tokens
    groups = cache._parts.groups
    assert length == min(longest_sequence(groups, blocks, 4), 4 * max(blocks)) == cache.max_tokens_per_sequence
    assert step == longest_step(groups, blocks, 4, length)
    for start in range(1, step + 1):  # every place of the window in its blocks
        sequence = cache.add_sequence(np.zeros(length, np.int32), max_tokens=0)
        advance(cache, [sequence], start)
        while sequence.num_computed_tokens < length:
            advance(cache, [sequence], min(step, length - sequence.num_computed_tokens))
        cache.remove(sequence)
    cache.check_invariants()


@pytest.mark.parametrize("blocks", [(20, 5), (20, 4), (20, 3), (6, 30)])
def test_a_longer_step_does_not_always_fit(blocks):
    cache = made((None, 10), num_blocks=[count + 1 for count in blocks], prefix_cache=False)
    length, step = cache.max_length, cache.max_step_tokens
    refused = 0
    for start in range(1, min(step + 1, length) + 1):
        sequence = cache.add_sequence(np.zeros(length, np.int32))
        try:
            advance(cache, [sequence], start)
            while sequence.num_computed_tokens < length:
                advance(cache, [sequence], min(step + 1, length - sequence.num_computed_tokens))
        except OutOfBlocks:
            refused += 1
        cache.remove(sequence)
    assert (refused > 0) == (step < length)


@pytest.mark.parametrize("windows", [(10,), (10, 6)])
def test_windows_alone_do_not_limit_a_sequence(windows):
    cache = made(windows, num_blocks=6, max_tokens_per_sequence=100)
    assert (cache.max_length, cache.max_step_tokens) == (100, 8)
    for start in range(1, 9):
        sequence = cache.add_sequence(np.zeros(100, np.int32), max_tokens=0)
        advance(cache, [sequence], start)
        while sequence.num_computed_tokens < 100:
            advance(cache, [sequence], min(8, 100 - sequence.num_computed_tokens))
        cache.remove(sequence)


def test_max_length_counts_what_is_available_now():
    cache = made((None, 6), num_blocks=[11, 11])
    assert (cache.max_length, cache.max_step_tokens) == (40, 40)
    other = cache.add_sequence(range(24), max_tokens=0)
    advance(cache, [other], 24)  # 6 blocks, and 2 of the window
    assert (cache.max_length, cache.max_step_tokens) == (16, 16)
    cache.remove(other)
    assert cache.max_length == 40


# -- shortage ---------------------------------------------------------------------------------------------------------


def test_a_prompt_in_steps_needs_only_its_window_and_one_step():
    cache = made((None, 10), num_blocks=[31, 7])
    prompt = cache.add_sequence(range(100))
    assert cache.shortage([prompt], 100) == 25 - 6
    assert block_limit(cache._parts.groups[1], 4, 13) == 7
    assert cache.shortage([prompt], 100, step_tokens=13) == 1
    assert cache.shortage([prompt], 100, step_tokens=12) == cache.shortage([prompt], 100, step_tokens=1) == 0
    assert cache.shortage([prompt, cache.add_sequence([1] * 30)], [100, 24], step_tokens=1) == 4 + 4 - 6
    assert cache.shortage([prompt, cache.add_sequence([1] * 30)], [100, 28], step_tokens=8) == 2 * 5 - 6
    assert cache.shortage([prompt, cache.add_sequence([2] * 30)], [120, 8], step_tokens=1) == 2  # of the other group


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_is_not_short_of_blocks_can_be_computed_to_its_end(seed):
    rng = np.random.default_rng(seed)
    short = int(rng.integers(1, 14))
    windows = (None, short, short + int(rng.integers(1, 16)))
    cache = made(windows, num_blocks=[60, int(rng.integers(4, 20)), int(rng.integers(4, 30))])
    sequences, counts = [], []
    for i in range(int(rng.integers(1, 4))):
        tokens = rng.integers(0, 3, int(rng.integers(2, 60)))
        sequences.append(cache.add_sequence(tokens, max_tokens=0 if i else None))
        done = int(rng.integers(0, len(tokens)))
        for _ in range(done):
            if cache.try_prepare([sequences[-1]], 1, batch := cache.make_batch(1, 1)) is None:
                break
            cache.commit(batch)
        counts.append(len(tokens) - sequences[-1].num_computed_tokens)
    step = int(rng.integers(1, 20))
    if cache.shortage(sequences, counts, step_tokens=step):
        return
    left = list(counts)
    while any(left):
        each = [min(count, int(rng.integers(0, step + 1))) for count in left]
        advance(cache, sequences, each)
        left = [count - now for count, now in zip(left, each, strict=True)]
    cache.check_invariants()


def test_swapped_sequences_take_no_more_than_a_step_needs():
    cache = made((None, 10), num_blocks=[61, 9])
    space = SwapSpace(cache, num_blocks=61)
    out = cache.add_sequence(range(100))
    advance(cache, [out], 20)
    assert out.capacity == 20
    cache.swap_out([out], space)
    here = cache.add_sequence(range(200, 212), max_tokens=0)
    advance(cache, [here], 12)
    cache.clear_prefix_cache()
    # 3 blocks stored; 80 more tokens are 20 blocks, of which the window holds 4 at once with steps of one token.
    assert cache.shortage([out], 80) == 23 - 5
    assert cache.shortage([out], 80, step_tokens=1) == 0
    assert cache.shortage([out, here], [80, 60], step_tokens=1) == 0
    assert cache.shortage([out, here], [80, 60], step_tokens=8) == (5 + 5) - 8


@pytest.mark.parametrize("wrong", [0, -1, "two", 1.5, 2**40])
def test_invalid_step_tokens_are_refused(wrong):
    cache = made((None, 10), num_blocks=9)
    with pytest.raises(ShapeError, match="step_tokens is"):
        cache.shortage([], [], step_tokens=wrong)


# -- division of a memory ---------------------------------------------------------------------------------------------


def gemma_3_27b(layers=62):
    specs = [AttentionSpec(16, 128, window=None if i % 6 == 5 else 1024) for i in range(layers)]
    return arrange(specs, None, TensorParallel())[1]


def test_40_gib_hold_38_requests_of_8k_of_a_gemma_3_27b():
    windows, full = groups = gemma_3_27b()
    blocks = divide_memory(groups, 16, 40 * 2**30, 8192)
    needed = [blocks_at_once(each, 8192, 16) for each in (windows, full)]
    assert needed == [65, 512]
    assert min((n - 1) // count for n, count in zip(blocks, needed, strict=True)) == 38
    assert blocks[0] - 1 >= 38 * 65 + PROMPT_TOKENS // 16
    assert divide_memory(groups, 16, 40 * 2**30, None) == blocks
    assert divide_memory(groups, 16, 40 * 2**30, 131072) == blocks


@together("max_tokens", [1, 5, 64, 1000, 8192, None])
@together("windows", [(None,), (None, 10), (300, None, 7), (10, 6)])
def test_a_division_uses_the_memory_and_serves_one_sequence(windows, max_tokens):
    groups = [group(window, layers) for layers, window in enumerate(windows, start=1)]
    for memory in (30_000, 100_000, 3_456_789, 10**9):
        blocks = divide_memory(groups, 4, memory, max_tokens)
        used = sum(count * each.bytes_per_block(4) for count, each in zip(blocks, groups, strict=True))
        # Less than one block of every group, and than what one more sequence of a few tokens takes, is left.
        longest = longest_sequence(groups, [count - 1 for count in blocks], 4)
        assert used <= memory < used + 2 * sum(each.bytes_per_block(4) for each in groups) + 300 * (longest < 512)
        assert min(blocks) >= 2
        wanted = min(max_tokens or TYPICAL_TOKENS, TYPICAL_TOKENS, longest)
        assert longest_sequence(groups, [count - 1 for count in blocks], 4) >= wanted


def test_groups_without_windows_share_equally():
    groups = [group(None, 1), Group(AttentionSpec(1, 16, 4, dtype="float32"), 3)]
    one = sum(each.bytes_per_block(4) for each in groups)
    for memory in (2 * one, 3 * one - 1, 1234 * one + 5):
        assert divide_memory(groups, 4, memory, None) == [memory // one] * 2
    with pytest.raises(NotEnoughMemory, match="at least two blocks"):
        divide_memory(groups, 4, 2 * one - 1, None)


def test_a_row_is_as_long_as_the_pools_allow_by_default():
    assert made((None, 10), num_blocks=[41, 5]).max_tokens_per_sequence == 160
    assert made((None, 10), num_blocks=[41, 4]).max_tokens_per_sequence == 12
    assert made((10, 6), num_blocks=[11, 5]).max_tokens_per_sequence == 40
    assert made((None, 10), num_blocks=[41, 5], max_tokens_per_sequence=99).max_tokens_per_sequence == 99


def test_a_cache_of_40_gib_holds_38_sequences_of_8k_tokens_of_a_gemma_3_27b():
    specs = [AttentionSpec(16, 128, window=None if i % 6 == 5 else 1024) for i in range(62)]
    cache = PagedKVCache(specs, memory="40GiB", device="none", max_tokens_per_sequence=8192)
    for number in range(38):
        sequence = cache.add_sequence(np.full(8192, number))
        while sequence.num_computed_tokens < 8192:
            advance(cache, [sequence], PROMPT_TOKENS)
    assert cache.num_sequences == 38
    assert cache.max_length < 8192
