"""Layers with sink tokens in a cache: what is kept, released, attended to, reused, truncated, swapped and counted."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, ShapeError, SwapSpace, UnsupportedOption
from pagecore.cache.layers.groups import Group
from pagecore.cache.memory.demand import blocks_at_once, longest_step
from pagecore.index import RadixTree
from tests.cache.caches import advance
from tests.cache.test_chunks import prefix_codes
from tests.faults import is_full
from tests.reference.attention import allowed
from tests.together import together

FULL = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)


def spec(window=8, sink_tokens=4, lookahead=0):
    heads = {"dtype": "float32", "num_query_heads": 4}
    return AttentionSpec(2, 8, window=window, sink_tokens=sink_tokens, lookahead=lookahead, **heads)


def make(window=8, sink_tokens=4, lookahead=0, **options):
    given = {"block_size": 4, "num_blocks": 60, "max_sequences": 6, "device": "none"} | options
    return PagedKVCache([FULL, spec(window, sink_tokens, lookahead)], **given)


def row_of(cache, sequence, group=1):
    return np.asarray(cache.block_table(group))[sequence.row]


def test_worked_example_c6_sinks_and_window_keep_blocks_0_3_and_4():
    cache = make()
    sequence = cache.add_sequence(range(40))
    advance(cache, [sequence], 19)
    advance(cache, [sequence], 1)
    assert (row_of(cache, sequence)[:5] > 0).tolist() == [True, False, False, True, True]
    assert cache.held_from(sequence, 1) == 12
    cache.check_invariants()


def held_blocks(length, window, sink_tokens, block_size):
    """Return the blocks that hold a key that the next token sees."""
    seen = allowed(1, length + 1, window=window, sink_tokens=sink_tokens)[0][:length]
    return sorted({int(token) // block_size for token in np.flatnonzero(seen)})


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("window", "sink_tokens"), [(1, 1), (4, 4), (5, 3), (8, 2), (3, 9)])
def test_attention_of_a_cache_sees_sinks_and_window(window, sink_tokens, block_size):
    cache = make(window, sink_tokens, block_size=block_size, num_blocks=61, device="cpu")
    rng = np.random.default_rng(window)
    keys, values, queries = (rng.normal(size=(60, heads, 8)).astype(np.float32) for heads in (2, 2, 4))
    sequence = cache.add_sequence(range(60))
    first = 0
    for count in (2, 7, 1, 1, 12, 3, 1, 15, 18):
        batch = cache.prepare([sequence], count)
        step = slice(first, first + count)
        for layer in (0, 1):
            cache.write(layer, keys[step], values[step], batch)
        out = np.asarray(cache.attend(1, queries[step], batch))
        seen = allowed(count, first + count, window=window, sink_tokens=sink_tokens)
        for head in range(4):
            scores = queries[step, head] @ keys[: first + count, head // 2].T / np.sqrt(8)
            weights = np.exp(np.where(seen, scores, -np.inf) - scores.max())
            expected = weights / weights.sum(1, keepdims=True) @ values[: first + count, head // 2]
            np.testing.assert_allclose(out[:, head], expected, rtol=1e-4, atol=1e-4)
        cache.commit(batch)
        first += count
        row = row_of(cache, sequence)
        kept = held_blocks(first, window, sink_tokens, block_size)
        last = -(-first // block_size)
        if first % block_size and last - 1 not in kept:
            kept.append(last - 1)  # whole blocks are released
        assert np.flatnonzero(row[:last]).tolist() == kept
        cache.check_invariants()


@pytest.mark.parametrize("lookahead", [0, 2, 5])
def test_a_sequence_can_be_truncated_by_its_lookahead_and_into_its_sinks(lookahead):
    for length in range(14, 26):
        cache = make(5, 3, lookahead)
        sequence = cache.add_sequence(range(60))
        advance(cache, [sequence], length)
        kept = cache.held_from(sequence, 1)
        assert kept == max(0, length - lookahead - 4) // 4 * 4 or kept == 0
        if kept > 8:
            with pytest.raises(UnsupportedOption, match="left the window of 5 tokens"):
                cache.truncate(sequence, kept - 1)
        cache.truncate(sequence, length - lookahead)
        cache.check_invariants()
        cache.truncate(sequence, 3)  # the sinks are there
        cache.check_invariants()
        advance(cache, [sequence], 20)
        cache.check_invariants()


def demand_of(window, sink_tokens, lookahead, num_tokens, block_size, step_tokens):
    """Return the most blocks that a sequence holds in any division into steps of up to `step_tokens`."""
    most = 0
    for start in range(1, step_tokens + 1):
        computed, step = 0, start
        while computed < num_tokens:
            step = min(step, num_tokens - computed)
            first = max(0, computed - lookahead - (window - 1)) // block_size * block_size
            tokens = [*range(min(sink_tokens, computed + step)), *range(first, computed + step)]
            most = max(most, len({token // block_size for token in tokens}))
            computed, step = computed + step, step_tokens
    return most


@together("block_size", [1, 2, 3, 4])
@together("step_tokens", [1, 3, 8])
@together(("window", "sink_tokens", "lookahead"), [(1, 1, 0), (4, 4, 2), (5, 3, 0), (8, 2, 8)])
def test_the_demand_is_the_most_that_any_sequence_holds(window, sink_tokens, lookahead, step_tokens, block_size):
    group = Group(spec(window, sink_tokens, lookahead), 1)
    expected = max(
        demand_of(window, sink_tokens, lookahead, 150, block_size, step) for step in range(1, step_tokens + 1)
    )
    assert blocks_at_once(group, 150, block_size, step_tokens) == expected
    assert longest_step([group], [expected], block_size, 150) >= step_tokens


def test_a_pool_of_the_demand_serves_a_long_sequence():
    cache = PagedKVCache(spec(8, 6), block_size=4, num_blocks=1 + 2 + 3, device="none", max_tokens_per_sequence=400)
    sequence = cache.add_sequence(range(400))
    for _ in range(400):
        advance(cache, [sequence], 1)
    assert np.count_nonzero(row_of(cache, sequence, 0)) in (4, 5)
    assert cache.shortage([sequence], 0) == 0
    cache.check_invariants()


@pytest.mark.parametrize(
    ("flags", "hit"),
    [("T", 1), ("TF", 1), ("TFTT", 4), ("FFTT", 0), ("TTTT", 4), ("TFFFTTF", 6), ("TFFFFFTT", 8), ("FTTTTTTT", 0)],
)
def test_a_hit_needs_the_sinks_and_the_blocks_of_the_window(flags, hit):
    """Window of 4 tokens, 1 sink, blocks of 2: two blocks at the end, and the first."""
    tree = RadixTree(2, full=1, windows=[3], sinks=[1])
    tokens = list(range(2 * len(flags)))
    blocks = list(range(1, len(flags) + 1))
    lane = [block if flag == "T" else 0 for block, flag in zip(blocks, flags, strict=True)]
    tree.insert(tokens, (blocks, lane))
    found = tree.match(tokens)
    assert found.num_tokens == 2 * hit
    seen = [*range(1), *range(max(0, hit - 2), hit)] if hit else []
    assert found.blocks[1].tolist() == [blocks[i] if i in seen else 0 for i in range(hit)]


@pytest.mark.parametrize(("window", "sink_tokens"), [(1, 1), (4, 3), (6, 2), (3, 7)])
@pytest.mark.parametrize("seed", range(4))
def test_prefixes_are_reused_with_their_sinks(seed, window, sink_tokens):
    rng = np.random.default_rng(seed)
    lookahead = int(rng.integers(0, window + 1))
    cache = make(window, sink_tokens, lookahead, block_size=2, num_blocks=[60, 28], device="cpu")
    space = SwapSpace(cache, num_blocks=60)
    held = []
    for turn in range(60 if is_full() else 30):
        tokens = rng.integers(0, 2, int(rng.integers(1, 40)))
        if len(held) == 4:
            cache.remove(held.pop(int(rng.integers(0, 4))))
        sequence = cache.add_sequence(tokens)
        while sequence.num_computed_tokens < sequence.num_tokens:
            left = min(sequence.num_tokens - sequence.num_computed_tokens, 7)
            if cache.try_prepare([sequence], left, batch := cache.make_batch(1, 8)) is None:
                break
            codes = prefix_codes(tokens)[sequence.num_computed_tokens :][:left]
            rows = np.broadcast_to(codes[:, None, None], (len(codes), 2, 8)).astype(np.float32)
            for layer in (0, 1):
                cache.write(layer, rows, -rows, batch)
            cache.commit(batch)
        check_rows(cache, sequence, tokens, window, sink_tokens)
        if turn % 5 == 4 and cache.try_swap_out([sequence], space) and not cache.try_swap_in([sequence]):
            cache.remove(sequence)
        else:
            check_rows(cache, sequence, tokens, window, sink_tokens)
            if turn % 3 == 0 and len(held) < 3:
                held.append(cache.fork(sequence))
            held.append(sequence)
        cache.check_invariants()
    assert cache.stats().prefix_hit_tokens > 0


def check_rows(cache, sequence, tokens, window, sink_tokens):
    """Every key that the next token sees is in its block."""
    computed = sequence.num_computed_tokens
    row = row_of(cache, sequence)
    codes = prefix_codes(tokens)
    for token in np.flatnonzero(allowed(1, computed + 1, window=window, sink_tokens=sink_tokens)[0][:computed]):
        assert row[token // 2] > 0
        stored = np.asarray(cache.key(1))[row[token // 2], token % 2]
        np.testing.assert_array_equal(stored, codes[token])


def test_an_arrival_keeps_the_sinks():
    cache = make(num_blocks=[40, 20])
    received = cache.add_sequence(range(30))
    batch = cache.prepare_arrival(received, 30)
    assert (np.asarray(batch.group(1).slot_mapping)[:30] >= 0).all()
    cache.commit(batch)
    assert (row_of(cache, received)[:8] > 0).tolist() == [True] + [False] * 4 + [True] * 3
    cache.check_invariants()


def test_the_block_map_shows_the_sinks_and_the_hole():
    cache = make()
    sequence = cache.add_sequence(range(40))
    advance(cache, [sequence], 20)
    row = row_of(cache, sequence)
    shown = cache.block_map(1)
    assert np.flatnonzero(shown.owner == 0).tolist() == sorted(row[row > 0].tolist())


def test_layers_with_other_sinks_are_groups_of_their_own():
    cache = PagedKVCache([spec(8, 4), spec(8, 2), spec(8, 0), FULL, spec(8, 4)], num_blocks=9, device="none")
    assert [cache.group_of(layer) for layer in range(5)] == [0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sink_tokens": -1, "window": 4}, ShapeError, "sink_tokens is -1"),
        ({"sink_tokens": "four", "window": 4}, ShapeError, "sink_tokens is 'four'"),
        ({"sink_tokens": 4}, UnsupportedOption, "sink_tokens is 4 and there is no window"),
        ({"sink_tokens": 4, "chunk": 4}, UnsupportedOption, "sink_tokens is 4 and there is no window"),
    ],
)
def test_invalid_sink_tokens_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        AttentionSpec(2, 8, **options)


def test_a_spec_of_the_caller_with_sink_tokens_needs_a_window():
    class Own:
        planes = FULL.planes
        window = None
        sink_tokens = 3

    with pytest.raises(UnsupportedOption, match=r"an? Own has 3 sink tokens and no window"):
        PagedKVCache(Own(), num_blocks=9, device="none")


def test_eviction_gives_up_the_window_before_the_sinks():
    """The sinks serve every prefix of the path; of 5 blocks, 3 are held: 0, 3 and 4."""
    tree = RadixTree(4, full=1, windows=[7], sinks=[4])
    tokens = list(range(20))
    tree.insert(tokens, ([1, 2, 3, 4, 5], [1, 0, 0, 4, 5]))
    with tree.match_and_lock(tokens) as receipt:
        assert receipt.num_tokens == 20
        assert tree.evictable("window") == 0
    gone = tree.evict("window", 2)
    assert gone.blocks[1].tolist() == [4, 5]
    assert tree.held_blocks(1).tolist() == [1]
