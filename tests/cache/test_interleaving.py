"""Concurrent calls of one cache: under any interleaving each sequence stores and attends to its own values.

A long call runs in one thread while another thread changes the cache. The other thread waits for bytes that the long
call has written, and so runs in the middle of it. `remove`, `commit` and `abandon` wait until other threads have left
`write` and `attend` with the batch; a thread that is itself in such a call gets an error.
"""

import threading
import time

import numpy as np
import pytest

from pagecore import AttentionSpec, InvalidSequence, OutOfBlocks, PagedKVCache, num_threads, set_num_threads
from tests.reference.dense import dense_attention

BLOCK = 16
LONG = 8192
HEADS, DIM = 8, 64
SPEC = AttentionSpec(HEADS, DIM, dtype="float32", num_query_heads=HEADS)
SMALL = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)
SMALL_WINDOWED = AttentionSpec(2, 8, dtype="float32", num_query_heads=4, window=7)
ROUNDS = 5
LIMIT = 60.0  # seconds after which threads count as deadlocked


@pytest.fixture(autouse=True)
def one_thread():
    """Let calls run single-threaded in their own thread, so that threads of the pool are free for other calls."""
    before = num_threads()
    set_num_threads(1)
    yield
    set_num_threads(before)


def start(call):
    """Run a call in a thread; return a function that waits for its end and returns its result."""
    results, errors = [], []

    def run():
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join(LIMIT)
        assert not thread.is_alive(), "the threads wait for each other for ever"
        if errors:
            raise errors[0]
        return results[0]

    return join


def together(*calls):
    """Run calls concurrently, each in a thread, from a common start; return their results."""
    barrier = threading.Barrier(len(calls))

    def after_start(call):
        barrier.wait(LIMIT)
        return call()

    return [join() for join in [start(lambda call=call: after_start(call)) for call in calls]]


def full(number, tokens):
    return np.full((tokens, HEADS, DIM), number, np.float32)


def prepared(cache, tokens):
    sequence = cache.add_sequence(range(tokens))
    return sequence, cache.prepare([sequence], tokens)


def blocks_of(cache, sequence, tokens):
    return cache.block_table().numpy()[sequence.row][: -(-tokens // BLOCK)].copy()


def wait_for(cache, block, number):
    """Wait until a write has stored a number in a block."""
    stored = cache.key(0).numpy()[block]
    end = time.monotonic() + LIMIT
    while stored[0, 0, 0] != number:
        assert time.monotonic() < end
        time.sleep(0)


def make_long(tokens=LONG, **options):
    return PagedKVCache(SPEC, num_blocks=tokens // BLOCK + 1, prefix_cache=False, max_sequences=4, **options)


def wrong_tokens(cache, sequence, tokens, number):
    """Return the tokens of a sequence with a key or value other than this number."""
    blocks = blocks_of(cache, sequence, tokens)
    sides = [side.numpy()[blocks].reshape(-1, HEADS * DIM)[:tokens] for side in (cache.key(0), cache.value(0))]
    return int(sum((side != number).any(axis=1).sum() for side in sides))


# -- a write in one thread, the end of its step in another -------------------------------------------------------------

ENDS = {
    "remove": lambda cache, sequence, batch: cache.remove(sequence),
    "abandon": lambda cache, sequence, batch: (cache.abandon(batch), cache.remove(sequence)),
    "commit": lambda cache, sequence, batch: (cache.commit(batch), cache.remove(sequence)),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_blocks_that_a_step_gave_up_are_not_written_by_an_interleaved_write(end):
    found = []
    for turn in range(ROUNDS):
        cache = make_long()
        sequence, batch = prepared(cache, LONG)
        blocks = blocks_of(cache, sequence, LONG)
        old, new = full(1, LONG), full(2, LONG)
        join = start(lambda cache=cache, batch=batch, old=old: cache.write(0, old, old, batch))
        wait_for(cache, blocks[turn * len(blocks) // (2 * ROUNDS)], 1)
        ENDS[end](cache, sequence, batch)
        other, step = prepared(cache, LONG)
        cache.write(0, new, new, step)
        join()
        found.append(wrong_tokens(cache, other, LONG, 2))
        cache.commit(step)
        cache.check_invariants()
    assert found == [0] * ROUNDS, f"tokens with bytes of another sequence, round by round: {found}"


@pytest.mark.slow
def test_a_truncation_after_a_commit_waits_for_an_interleaved_write():
    found = []
    for _ in range(ROUNDS):
        cache = make_long()
        sequence, batch = prepared(cache, LONG)
        blocks = blocks_of(cache, sequence, LONG)
        old, new = full(1, LONG), full(2, LONG)
        join = start(lambda cache=cache, batch=batch, old=old: cache.write(0, old, old, batch))
        wait_for(cache, blocks[8], 1)
        cache.commit(batch, accepted=[0])
        cache.truncate(sequence, 0)
        other, step = prepared(cache, LONG)
        cache.write(0, new, new, step)
        join()
        found.append(wrong_tokens(cache, other, LONG, 2))
    assert found == [0] * ROUNDS, f"tokens with bytes of another sequence, round by round: {found}"


def test_an_interleaved_removal_leaves_the_rest_of_the_step_written():
    half = LONG // 2
    for _ in range(ROUNDS):
        cache = make_long()
        first, second = (cache.add_sequence(range(half)) for _ in range(2))
        batch = cache.prepare([first, second], half)
        blocks = blocks_of(cache, first, half)
        key = np.concatenate([full(1, half), full(3, half)])
        join = start(lambda cache=cache, batch=batch, key=key: cache.write(0, key, key, batch))
        wait_for(cache, blocks[4], 1)
        cache.remove(first)
        other, step = prepared(cache, half)
        cache.write(0, full(2, half), full(2, half), step)
        join()
        cache.commit(batch)
        cache.commit(step)
        assert (wrong_tokens(cache, second, half, 3), wrong_tokens(cache, other, half, 2)) == (0, 0)


# -- attention in one thread -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_attention_reads_what_its_step_holds_under_an_interleaved_end(end):
    """All values of a sequence are one number, so that every weighted average equals it."""
    tokens, rounds = 1024, 4
    found = []
    for _ in range(rounds):
        cache = make_long(2 * tokens)
        first, second = (cache.add_sequence(range(tokens)) for _ in range(2))
        batch = cache.prepare([first, second], tokens)
        key = np.concatenate([full(1, tokens), full(3, tokens)])
        cache.write(0, key, key, batch)
        started, output = threading.Event(), np.full_like(key, np.nan)

        def attend(cache=cache, key=key, batch=batch, output=output, started=started):
            started.set()
            return cache.attend(0, key, batch, out=output)

        join = start(attend)
        started.wait(LIMIT)
        end_of_wait = time.monotonic() + LIMIT
        while np.isnan(output[0, 0, 0]):
            assert time.monotonic() < end_of_wait
            time.sleep(0)
        ENDS[end](cache, first, batch)
        other, step = prepared(cache, tokens)
        cache.write(0, full(9, tokens), full(9, tokens), step)
        result = join()
        # After a removal only the output of its rows is meaningless; the rest of the step is in flight.
        rows, numbers = (result[tokens:], {3.0}) if end == "remove" else (result, {1.0, 3.0})
        found.append(sorted(set(np.unique(np.round(rows, 4)).tolist()) - numbers)[:3])
        assert wrong_tokens(cache, other, tokens, 9) == 0
    assert found == [[]] * rounds, f"attended numbers of other sequences: {found}"


# -- the same thread ---------------------------------------------------------------------------------------------------


class Reentrant:
    """An array that calls back when it is read."""

    def __init__(self, array, call):
        self._array, self._call = array, call

    @property
    def __array_interface__(self):
        self._call()
        return self._array.__array_interface__

    def __dlpack__(self, **options):
        self._call()
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("call", ["write", "attend"])
def test_the_end_of_a_step_within_its_own_calls_is_refused_and_not_interleaved_with_them(call, end):
    cache = make_long(64)
    sequence, batch = prepared(cache, 64)
    refused = []

    def end_it():
        with pytest.raises(InvalidSequence, match="within write or attend"):
            ENDS[end](cache, sequence, batch)
        refused.append(end)

    def run():
        array = Reentrant(full(1, 64), end_it)
        if call == "write":
            cache.write(0, array, array, batch)
        else:
            cache.attend(0, array, batch)

    start(run)()
    assert refused
    assert batch.in_flight
    cache.write(0, full(2, 64), full(2, 64), batch)
    cache.commit(batch)
    assert wrong_tokens(cache, sequence, 64, 2) == 0
    cache.check_invariants()


# -- engines -----------------------------------------------------------------------------------------------------------


def tokens_of(seed, length):
    """Return ids, and the key, value and query of each token in each of two layers."""
    random = np.random.default_rng(seed)
    arrays = {
        name: random.normal(size=(2, length, heads, 8)).astype(np.float32)
        for name, heads in (("key", 2), ("value", 2), ("query", 4))
    }
    return random.integers(1, 1000, length).tolist(), arrays


def expected(arrays, layer, start_at, end, window):
    key, value, query = (arrays[name][layer].astype(np.float64) for name in ("key", "value", "query"))
    return dense_attention(query[start_at:end], key[:end], value[:end], window=window)


def engine(cache, seed, steps=30):
    """Run steps of sequences of one thread, each checked against float64; return the number of checks."""
    random, mine, checked = np.random.default_rng(seed), [], 0
    batch = cache.make_batch(3, 48)
    for turn in range(steps):
        if len(mine) < 3:
            ids, arrays = tokens_of(turn % 4, 40)  # equal in every engine: they reuse each other's prefixes
            mine.append((cache.add_sequence(ids[:17], f"{seed} {turn}"), ids, arrays))
        counts = [int(random.integers(1, 10)) for _ in mine]
        ends = [one.num_computed_tokens + n for (one, _, _), n in zip(mine, counts, strict=True)]
        done = [one for one, end in zip(mine, ends, strict=True) if end > 40]
        if done:
            cache.remove(done[0][0])
            mine = [one for one in mine if one is not done[0]]
            continue
        try:
            cache.prepare([one for one, _, _ in mine], counts, out=batch)
        except OutOfBlocks:
            cache.remove(mine.pop()[0])
            continue
        spans = [(one.num_computed_tokens, end, arrays) for (one, _, arrays), end in zip(mine, ends, strict=True)]
        for layer, spec in enumerate((SMALL, SMALL_WINDOWED)):
            key, value, query = (
                np.concatenate([arrays[name][layer, first:end] for first, end, arrays in spans])
                for name in ("key", "value", "query")
            )
            cache.write(layer, key, value, batch)
            output = cache.attend(layer, query, batch)
            wanted = np.concatenate([expected(arrays, layer, *span, spec.window) for *span, arrays in spans])
            np.testing.assert_allclose(output, wanted, rtol=2e-5, atol=2e-5)
            checked += len(wanted)
        if random.integers(5) == 0:
            cache.abandon(batch)
        else:
            learned = [
                ids[one.num_tokens : max(one.num_tokens, end)] for (one, ids, _), end in zip(mine, ends, strict=True)
            ]
            cache.append_tokens([one for one, _, _ in mine], learned)
            cache.commit(batch)
        cache.stats()
    for one, _, _ in mine:
        cache.remove(one)
    return checked


def make_small(**options):
    layers = [SMALL, SMALL_WINDOWED]
    return PagedKVCache(layers, **{"block_size": 4, "num_blocks": 81, "max_sequences": 16} | options)


def test_engines_with_a_cache_each_compute_interleaved_what_they_compute_alone():
    caches = [make_small() for _ in range(3)]
    checked = together(*(lambda c=cache, i=i: engine(c, i) for i, cache in enumerate(caches)))
    assert min(checked) > 100
    for cache in caches:
        finish(cache)


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_engines_of_one_cache_interleave_and_compute_what_float64_does(prefix_cache):
    cache = make_small(prefix_cache=prefix_cache)
    stop = threading.Event()

    def watch():
        """Assert that all counts belong to one moment."""
        seen = 0
        while not stop.is_set():
            stats, group = cache.stats(), cache.block_map(1)
            counted = stats.num_free_blocks + stats.num_used_blocks + stats.num_evictable_blocks
            assert counted == stats.num_blocks
            assert group.owner.max() < len(group.sequences)
            cache.check_invariants()
            seen += 1
            time.sleep(0)
        return seen

    join = start(watch)
    try:
        checked = together(*(lambda i=i: engine(cache, i) for i in range(4)))
    finally:
        stop.set()
    assert join() > 0
    assert min(checked) > 0
    finish(cache)


def finish(cache):
    cache.clear_prefix_cache()
    cache.check_invariants()
    assert (cache.num_sequences, cache.stats().num_used_blocks, cache.num_available) == (0, 0, 80)
