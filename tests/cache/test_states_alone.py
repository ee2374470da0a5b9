"""Caches whose layers all keep states (Mamba): slots and lengths, and a prefix tree of tokens and states alone."""

from dataclasses import replace

import numpy as np
import pytest

from pagecore import PagedKVCache, Plane, ShapeError, StateSpec, SwapSpace, UnsupportedOption
from pagecore.errors import NotEnoughMemory, OutOfBlocks
from pagecore.serving import Request, Scheduler

STATE = StateSpec((Plane("temporal", (2, 4), "float32", per="sequence"),), chunk=4, interval=8)


def make(num_states=12, **options):
    return PagedKVCache([STATE] * 3, **{"num_states": num_states, "block_size": 4, "max_sequences": 4} | options)


def compute(cache, sequence, count):
    """Compute a step: the state is the sum of the ids before it."""
    batch = cache.prepare([sequence], count)
    new = batch.host.token_ids.numpy()[:count]
    for layer in range(cache.num_layers):
        state = cache.plane("temporal", layer).numpy()
        before = state[batch.state_read.numpy()[0]].copy()
        kept = batch.checkpoint_lengths.numpy()[0] - sequence.num_computed_tokens
        if kept > 0:
            state[batch.checkpoint_write.numpy()[0]] = before + new[:kept].sum()
        state[batch.state_write.numpy()[0]] = before + new.sum()
    cache.commit(batch)
    assert (cache.plane("temporal", 1).numpy()[batch.state_write.numpy()[0]] == sequence.tokens.sum()).all()
    cache.check_invariants()


def test_a_prefix_is_reused_up_to_the_deepest_state_and_branches_get_one():
    cache = make()
    compute(cache, cache.add_sequence(range(30)), 30)
    assert cache.match_length(range(30)) == 28
    second = cache.add_sequence([*range(17), *range(90, 103)])
    assert (second.num_computed_tokens, second.num_matched_tokens) == (0, 16)  # the tree has tokens, and no state
    assert cache.stats().prefix_shared_tokens == 0
    compute(cache, second, 30)
    third = cache.add_sequence([*range(17), 7, 7])
    assert third.num_cached_tokens == 16
    compute(cache, third, 3)
    stats = cache.stats()
    assert (stats.num_blocks, stats.utilization, stats.num_cached_states) == (0, 0.0, 2)


def test_rows_are_forked_cut_swapped_and_abandoned():
    cache = make()
    first = cache.add_sequence(range(22))
    compute(cache, first, 22)
    child = cache.fork(first)
    cache.append_tokens([child], [[5]])
    compute(cache, child, 1)
    cache.reorder([child], [first])
    assert (child.num_computed_tokens, child.capacity) == (22, cache.max_tokens_per_sequence)
    cache.truncate([child], [20])
    space = SwapSpace(cache, num_states=5)
    cache.swap_out([child, first], space)
    space.check_invariants()
    assert (space.num_available, cache.stats().num_free_states) == (2, 10)
    cache.swap_in([child, first])
    cache.check_invariants()
    cache.append_tokens([child], [[1, 2]])
    compute(cache, child, 2)
    cache.append_tokens([first], [[3]])
    cache.abandon(cache.prepare([first], 1))
    assert first.num_computed_tokens == 20
    for sequence in (first, child):
        cache.remove(sequence)
    assert cache.clear_prefix_cache() == 0
    assert cache.stats().num_free_states == 11


def test_slots_run_out_by_name():
    cache = make(num_states=3, prefix_cache=False)
    kept = [cache.add_sequence([1]) for _ in range(3)]
    with pytest.raises(OutOfBlocks, match="3 state slots are needed and 2 are available"):
        cache.prepare(kept, 1)
    cache.commit(cache.prepare(kept[:2], 1))
    cache.check_invariants()


def test_sizes_follow_memory_or_slots():
    assert make(None, memory="1KiB").num_states == 1024 // (3 * STATE.nbytes)
    assert make(None).num_states == 9
    cache = make(max_tokens_per_sequence=100)
    assert (cache.max_length, cache.max_step_tokens, cache.num_available) == (100, 100, 100)
    assert make().max_tokens_per_sequence == 1 << 20
    with pytest.raises(ShapeError):
        cache.add_sequence(range(101))


def test_a_swap_space_keeps_to_its_memory():
    cache, one = make(), 3 * STATE.nbytes
    assert (SwapSpace(cache, memory=7 * one).nbytes, SwapSpace(cache, memory=2 * one, num_states=2).num_states) == (
        7 * one,
        2,
    )
    quantised = replace(STATE, checkpoint_format="int8")
    small = 3 * quantised.checkpoint_nbytes
    compact = PagedKVCache([quantised] * 3, num_states=12, block_size=4, max_sequences=4)
    space = SwapSpace(compact, memory=5 * one + 9 * small, num_checkpoints=9)
    assert (space.num_states, space.num_checkpoints, space.nbytes) == (5, 9, 5 * one + 9 * small)
    for each, options in (
        (cache, {"memory": 2 * one - 1}),
        (cache, {"memory": 8 * one, "num_states": 9}),
        (compact, {"memory": one, "num_checkpoints": 9}),
    ):
        with pytest.raises(NotEnoughMemory, match="do not fit in a memory of"):
            SwapSpace(each, **options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_blocks": 9}, UnsupportedOption, "num_blocks is 9, but every layer keeps a state"),
        ({"layout": "layerwise"}, UnsupportedOption, "layout is 'layerwise', but every layer"),
        ({"buffers": np.zeros(99)}, UnsupportedOption, "(?s)buffers is .*, but every layer"),
        ({"num_states": None, "memory": 4096, "state_ratio": 0.5}, UnsupportedOption, "state_ratio is 0.5, but no"),
        ({"num_states": None, "memory": 100}, NotEnoughMemory, "at least two state slots"),
        ({"num_states": 500, "memory": 9984}, NotEnoughMemory, "gives 104 state slots of 96 bytes; needed are 500"),
    ],
)
def test_options_of_blocks_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        make(**options)


def test_groups_and_blocks_are_refused_by_name():
    cache = make()
    with pytest.raises(ShapeError, match="the cache has no groups"):
        cache.block_map(0)
    with pytest.raises(UnsupportedOption, match="num_blocks is 4, but every layer"):
        SwapSpace(cache, num_blocks=4)
    with pytest.raises(NotEnoughMemory, match="9 state slots of 96 bytes do not fit in a memory of 800 bytes"):
        SwapSpace(cache, num_states=9, memory=800)
    assert SwapSpace(cache, num_states=9, memory=864).num_states == 9
    batch = cache.make_batch(1, 1)
    with pytest.raises(UnsupportedOption, match="keeps a state and has no slot mapping"):
        batch.group(0)


@pytest.mark.parametrize("slots", [9, 40])
def test_a_scheduler_serves_it(slots):
    cache = make(slots, device="none", max_sequences=8)
    scheduler = Scheduler(cache, max_running=6, max_tokens_per_step=16, swap_space=SwapSpace(cache, num_states=30))
    for number in range(12):
        scheduler.add(Request(number, [*range(20), number], 6))
    done = 0
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step)
        done += len(scheduler.accept(step, np.ones(len(step.outputs), np.int32)))
        cache.check_invariants()
    assert done == 12
    assert cache.stats().prefix_hit_tokens > 0
