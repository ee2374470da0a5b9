"""Layers with chunked local attention in a cache: what is released, reused, truncated, swapped and counted."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, SwapSpace, UnsupportedOption
from pagecore.cache.layers.groups import Group
from pagecore.cache.memory.demand import blocks_at_once, longest_step
from pagecore.errors import ShapeError
from pagecore.index import RadixTree
from tests.cache.caches import advance
from tests.reference.attention import allowed
from tests.together import together

FULL = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)


def spec(chunk, lookahead=0):
    return AttentionSpec(2, 8, dtype="float32", num_query_heads=4, chunk=chunk, lookahead=lookahead)


def make(chunk=4, lookahead=0, **options):
    given = {"block_size": 2, "num_blocks": 60, "max_sequences": 6, "device": "none"} | options
    return PagedKVCache([FULL, spec(chunk, lookahead)], **given)


def test_worked_example_c2_what_chunks_let_go():
    released = []
    for length in (0, 4, 6, 12):
        cache = make()
        sequence = cache.add_sequence(range(20))
        advance(cache, [sequence], length)
        released.append(cache.held_from(sequence, 1) // 2 if length else 0)
    assert released == [0, 2, 2, 6]
    cache = make(chunk=8)
    for length, first in ((13, 8), (8, 8), (7, 0)):
        sequence = cache.add_sequence([length] * 20, max_tokens=0)
        advance(cache, [sequence], length)
        assert cache.held_from(sequence, 1) == first


@together(
    ("flags", "hit"),
    [("T", 1), ("TF", 2), ("TT", 2), ("TTF", 2), ("TTT", 3), ("TTTF", 4)]
    + [
        (any8 + tail, hit)
        for any8 in ("F" * 8, "T" * 8, "FTFTFFTT")
        for tail, hit in (("T", 9), ("F", 8), ("TT", 10), ("FF", 10))
    ],
)
def test_worked_example_c5_the_longest_hit(flags, hit):
    tree = RadixTree(2, full=1, windows=[0], chunks=[4])
    tokens = list(range(2 * len(flags)))
    blocks = list(range(1, len(flags) + 1))
    tree.insert(tokens, (blocks, [block if flag == "T" else 0 for block, flag in zip(blocks, flags, strict=True)]))
    assert tree.match(tokens).num_tokens == 2 * hit


def test_worked_example_c7_chunk():
    assert blocks_at_once(Group(AttentionSpec(8, 128, chunk=8192), 1), 131072, 16, step_tokens=8192) == 1024


def most_held(chunk, num_tokens, block_size, step_tokens):
    most = 0
    for start in range(1, step_tokens + 1):
        computed, step = 0, start
        while computed < num_tokens:
            step = min(step, num_tokens - computed)
            first = computed // chunk * chunk // block_size
            most = max(most, len({token // block_size for token in range(first * block_size, computed + step)}))
            computed, step = computed + step, step_tokens
    return most


@together("block_size", [1, 2, 3, 4, 6])
@together("step_tokens", [1, 3, 8])
@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 6, 9])
def test_the_demand_is_the_most_that_any_sequence_holds(chunk, step_tokens, block_size):
    group = Group(spec(chunk), 1)
    expected = max(most_held(chunk, n, block_size, step) for n in (150,) for step in range(1, step_tokens + 1))
    assert blocks_at_once(group, 150, block_size, step_tokens) == expected
    assert longest_step([group], [expected], block_size, 150) >= step_tokens


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 4, 5, 8])
def test_attention_of_a_cache_sees_the_chunk(chunk, block_size):
    cache = make(chunk, block_size=block_size, device="cpu")
    rng = np.random.default_rng(chunk)
    keys, values, queries = (rng.normal(size=(40, heads, 8)).astype(np.float32) for heads in (2, 2, 4))
    sequence = cache.add_sequence(range(40))
    first = 0
    for count in (7, 1, 1, 12, 3, 1, 15):
        batch = cache.prepare([sequence], count)
        step = slice(first, first + count)
        for layer in (0, 1):
            cache.write(layer, keys[step], values[step], batch)
        out = np.asarray(cache.attend(1, queries[step], batch))
        seen = allowed(count, first + count, chunk=chunk)
        for head in range(4):
            scores = queries[step, head] @ keys[: first + count, head // 2].T / np.sqrt(8)
            weights = np.exp(np.where(seen, scores, -np.inf) - scores.max())
            expected = weights / weights.sum(1, keepdims=True) @ values[: first + count, head // 2]
            np.testing.assert_allclose(out[:, head], expected, rtol=1e-4, atol=1e-4)
        cache.commit(batch)
        first += count
        assert cache.held_from(sequence, 1) == min(first // chunk * chunk // block_size * block_size, first)
        cache.check_invariants()


@pytest.mark.parametrize("lookahead", [0, 2, 4])
def test_a_sequence_can_be_truncated_into_what_its_chunk_and_lookahead_keep(lookahead):
    for length in range(8, 20):
        cache = make(4, lookahead)
        sequence = cache.add_sequence(range(60))
        advance(cache, [sequence], length)
        kept = cache.held_from(sequence, 1)
        assert kept == (length - lookahead) // 4 * 4
        if kept > 0:
            with pytest.raises(UnsupportedOption, match="left the chunk of 4 tokens"):
                cache.truncate(sequence, kept - 1)
        cache.truncate(sequence, length - lookahead)
        cache.check_invariants()


@pytest.mark.parametrize("chunk", [1, 3, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_prefixes_are_reused_with_the_keys_of_their_last_chunk(seed, chunk):
    rng = np.random.default_rng(seed)
    cache = make(chunk, lookahead=int(rng.integers(0, chunk + 1)), num_blocks=[60, 25], device="cpu")
    space = SwapSpace(cache, num_blocks=60)
    held = []
    for turn in range(60):
        tokens = rng.integers(0, 2, int(rng.integers(1, 40)))
        if len(held) == 4:
            cache.remove(held.pop(int(rng.integers(0, 4))))
        sequence = cache.add_sequence(tokens)
        assert cache.held_from(sequence, 1) <= sequence.num_computed_tokens // chunk * chunk
        while sequence.num_computed_tokens < sequence.num_tokens:
            left = sequence.num_tokens - sequence.num_computed_tokens
            if cache.try_prepare([sequence], min(left, 7), batch := cache.make_batch(1, 8)) is None:
                break
            codes = prefix_codes(tokens)[sequence.num_computed_tokens :][: min(left, 7)]
            rows = np.broadcast_to(codes[:, None, None], (len(codes), 2, 8)).astype(np.float32)
            for layer in (0, 1):
                cache.write(layer, rows, -rows, batch)
            cache.commit(batch)
        check_rows(cache, sequence, tokens, chunk)
        if turn % 5 == 4 and cache.try_swap_out([sequence], space) and not cache.try_swap_in([sequence]):
            cache.remove(sequence)
        else:
            check_rows(cache, sequence, tokens, chunk)
            held.append(sequence)
        cache.check_invariants()
    assert cache.stats().prefix_hit_tokens > 0


def prefix_codes(tokens):
    """Return a number for each prefix, small enough for float32."""
    code, codes = 1, []
    for token in tokens.tolist():
        code = (code * 31 + token + 7) % 1_000_003
        codes.append(code)
    return np.array(codes, np.float32)


def check_rows(cache, sequence, tokens, chunk):
    computed = sequence.num_computed_tokens
    row = np.asarray(cache.block_table(1))[sequence.row]
    codes = prefix_codes(tokens)
    for token in range(computed // chunk * chunk, computed):
        stored = np.asarray(cache.key(1))[row[token // 2], token % 2]
        np.testing.assert_array_equal(stored, codes[token])


def test_an_arrival_takes_the_blocks_of_the_last_chunk():
    cache = make(8, num_blocks=[40, 6])
    received = cache.add_sequence(range(30))
    batch = cache.prepare_arrival(received, 30)
    row = np.asarray(cache.block_table(1))[received.row]
    assert (row[:12] == 0).all()
    assert (row[12:15] > 0).all()
    assert (np.asarray(batch.group(1).slot_mapping)[:24] == -1).all()
    cache.commit(batch)
    assert cache.held_from(received, 1) == 24
    cache.check_invariants()


def test_chunks_and_windows_are_groups_of_their_own():
    layers = [spec(4), AttentionSpec(2, 8, dtype="float32", num_query_heads=4, window=4), FULL, spec(4), spec(8)]
    cache = PagedKVCache(layers, num_blocks=9, device="none")
    assert [cache.group_of(layer) for layer in range(5)] == [0, 1, 2, 0, 3]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chunk": 0}, ShapeError, "chunk is 0"),
        ({"chunk": "four"}, ShapeError, "chunk is 'four'"),
        ({"chunk": 4, "window": 4}, UnsupportedOption, "window is 4 and chunk is 4; use one of them"),
        ({"chunk": 4, "lookahead": 5}, ShapeError, "the chunk has 4 tokens; use a lookahead of at most the chunk"),
    ],
)
def test_invalid_chunks_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        AttentionSpec(2, 8, **options)
