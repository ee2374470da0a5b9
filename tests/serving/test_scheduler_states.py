"""Scheduler over hybrid caches: admission, preemption, forks, reuse and abandoned steps with recurrent states."""

import numpy as np
import pytest

from pagecore.cache import PagedKVCache
from pagecore.errors import OutOfBlocks, ShapeError, UnsupportedOption
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import AttentionSpec
from tests.faults import is_full
from tests.serving.stateful import StatefulEngine, request_of
from tests.thinning import in_turn

SHAPES = [(5, 9, 1, 0), (13, 6, 1, 8), (9, 12, 3, 8), (20, 4, 1, 8), (3, 15, 2, 0), (17, 0, 1, 8), (11, 7, 1, 8)]


def with_requests(shapes=SHAPES, **options):
    engine = StatefulEngine(**options)
    for number, (prompt, new, samples, shared) in enumerate(shapes):
        engine.add(request_of(number, prompt, new, samples, shared))
    return engine


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("num_states", [8, 12, 40])
def test_every_token_follows_from_its_state(num_states, in_place):
    engine = with_requests(num_states=num_states, in_place=in_place)
    engine.drain()
    engine.check_tokens()
    assert engine.scheduler.num_forks == 3
    assert engine.checkpoints > 0
    assert engine.cache.num_sequences == 0


def test_a_prompt_begins_with_the_state_of_a_shared_prefix():
    engine = with_requests([(13, 2, 1, 8)], max_tokens_per_step=8)
    engine.drain()
    computed = engine.computed
    engine.add(request_of(1, 13, 2, shared=8))
    engine.drain()
    assert engine.scheduler.reuse.prefix_hit_tokens == 8
    assert engine.computed - computed == computed - 8
    engine.check_tokens()


def test_runs_are_preempted_when_slots_are_short_and_blocks_are_not():
    engine = with_requests([(4, 20, 4, 0)], num_states=4, num_blocks=200)
    engine.drain()
    engine.check_tokens()
    assert engine.scheduler.num_preemptions > 0
    assert engine.cache.stats().num_evicted_blocks == 0


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"num_states": 4}, 3),
        ({"num_states": 7, "in_place": False}, 3),
        ({"num_states": 9, "states_per_run": 3}, 2),
        ({"num_states": 3, "states_per_run": 3}, 1),
    ],
)
def test_admission_leaves_slots_for_each_sequence(options, most):
    engine = with_requests([(6, 6, 1, 0)] * 5, num_blocks=200, **options)
    rows = []
    engine.drain(lambda step: rows.append(len(step.runs)))
    engine.check_tokens()
    assert max(rows) == most
    assert engine.scheduler.num_preemptions == 0


def test_tokens_that_a_part_of_a_prompt_leaves_go_to_the_next_prompt():
    """The second prompt's part ends where a checkpoint may be, 4 tokens of 6; the third prompt begins with the rest."""
    engine = with_requests([(8, 4, 1, 0), (40, 4, 1, 0), (5, 4, 1, 0)], max_tokens_per_step=14, num_blocks=200)
    counts = []
    engine.drain(lambda step: counts.append(list(step.counts)))
    engine.check_tokens()
    assert counts[0] == [8, 4, 2]


def test_admission_leaves_slots_for_samples_that_are_not_forked_yet():
    engine = with_requests([(30, 4, 3, 0), (4, 4, 1, 0), (4, 4, 2, 0)], num_states=5, num_blocks=200)
    runs = []
    engine.drain(lambda step: runs.append({run.request.id for run in step.runs}))
    engine.check_tokens()
    assert {0, 1} in runs
    assert not any({0, 2} <= ids for ids in runs)
    assert engine.scheduler.num_preemptions == 0


def test_slots_left_for_checkpoints_keep_more_of_them():
    engines = [
        with_requests([(29, 12, 1, 0)] * 6, num_states=4, num_blocks=200, states_per_run=slots) for slots in (None, 3)
    ]
    for engine in engines:
        engine.drain()
        engine.check_tokens()
    assert engines[0].checkpoints < engines[1].checkpoints


def test_a_scheduler_refuses_slots_for_states_that_the_cache_has_not():
    with pytest.raises(UnsupportedOption, match="the cache has no states; leave it out"):
        Scheduler(PagedKVCache(AttentionSpec(1, 8), num_blocks=9, device="none"), states_per_run=2)
    with pytest.raises(ShapeError, match="states_per_run is 1"):
        StatefulEngine(in_place=False, states_per_run=1)


def test_slots_held_outside_of_the_scheduler_are_reported():
    engine = StatefulEngine(num_states=3)
    for _ in range(2):
        engine.cache.commit(engine.cache.prepare([engine.cache.add_sequence([1, 2, 3])], [3]))
    engine.add(request_of(0, 5, 2))
    with pytest.raises(OutOfBlocks, match="blocks or state slots are held outside the scheduler"):
        engine.scheduler.schedule()


@pytest.mark.parametrize("in_place", [True, False])
def test_an_abandoned_step_computes_again_what_its_states_lost(in_place):
    engine = with_requests([(9, 12, 1, 0), (5, 12, 2, 0)], in_place=in_place)
    abandoned = recomputed = 0
    for number in range(1000):
        step = engine.scheduler.schedule()
        if step is None:
            break
        lengths = {run: run.sequence.num_computed_tokens for run in step.runs}
        if number % 3 == 1:
            engine.spoil(step)
            engine.scheduler.abandon(step)
            abandoned += 1
            recomputed += sum(run.sequence.num_computed_tokens < length for run, length in lengths.items())
        else:
            engine.finish(step)
        engine.check()
    engine.check_tokens()
    assert abandoned > 5
    assert recomputed > 0 if in_place else recomputed == 0


def test_states_travel_with_swapped_runs():
    engine = with_requests(num_blocks=24, swap=True)
    engine.drain()
    engine.check_tokens()
    assert engine.scheduler.num_swaps > 0


@pytest.mark.parametrize(
    ("seed", "windows", "in_place", "swap"),
    in_turn(range(6 if is_full() else 4), [(None,), (6,), (None, 6)], [True, False], over=[[False, True]]),
)
def test_random_operations_serve_every_token(seed, in_place, swap, windows):
    random = np.random.default_rng(seed)
    engine = StatefulEngine(
        num_blocks=int(random.integers(34, 60)), num_states=int(random.integers(8, 20)), in_place=in_place, swap=swap,
        prefix_cache=bool(seed % 3), windows=windows, states_per_run=[None, 3][seed % 2],
    )  # fmt: skip
    scheduler, cancelled, runs = engine.scheduler, set(), []
    for number in range(400):
        choice = random.random()
        if choice < 0.25 and len(engine.requests) < 25:
            shape = random.integers(1, 34), random.integers(0, 20), random.choice([1, 1, 1, 2, 3])
            one = request_of(len(engine.requests), *map(int, shape), shared=int(random.choice([0, 8, 16, 30])))
            runs.append(engine.add(one))
        elif choice < 0.28 and runs:
            run = runs[random.integers(len(runs))]
            if scheduler.cancel(run):
                cancelled.add(run.request.id)
        else:
            step = scheduler.schedule()
            if step is None:
                continue
            if choice < 0.4:
                if choice < 0.35:
                    engine.spoil(step)
                scheduler.abandon(step)
            else:
                if choice < 0.42 and runs:
                    run = runs[random.integers(len(runs))]
                    if scheduler.cancel(run):
                        cancelled.add(run.request.id)
                engine.finish(step)
        if number % 4 == 0:
            engine.check()
    engine.drain()
    engine.check_tokens(cancelled)
    assert engine.cache.num_sequences == 0
    assert engine.checkpoints > 0
