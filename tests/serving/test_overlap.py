"""Overlap by one step: the next step is scheduled before the ids of the last one are accepted."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore.errors import InvalidSequence, UnsupportedOption
from pagecore.serving.scheduling.request import Request, State
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.serving.scheduling.step import StepState
from tests.faults import is_full
from tests.serving.fake_cache import FakeCache
from tests.serving.runs import request
from tests.serving.served import Server, add_random_requests, answer
from tests.serving.stateful import StatefulEngine, expected, request_of


def ahead(**options):
    """Return a scheduler with overlap, and its first step, committed."""
    scheduler = Scheduler(FakeCache(64), overlap=True, **options)
    runs = [scheduler.add(request(number, 5, 6)) for number in range(3)]
    step = scheduler.schedule()
    scheduler.commit(step)
    return scheduler, step, runs


def test_a_step_ahead_names_the_ids_that_it_does_not_know():
    scheduler, first, runs = ahead()
    second = scheduler.schedule()
    assert scheduler.steps == (first, second)
    assert scheduler.step is second
    assert second.runs == runs
    assert second.batch.token_ids == [-1, -1, -1]
    assert second.unknown_positions.tolist() == second.unknown_outputs.tolist() == [0, 1, 2]
    assert second.unknown_positions.dtype == second.unknown_outputs.dtype == np.int64
    assert not first.unknown_positions.size
    assert first.batch is not second.batch


def test_outputs_of_completed_prompts_are_found_among_those_of_the_step_before():
    scheduler = Scheduler(FakeCache(64), overlap=True, max_tokens_per_step=8, share_prompts=False)
    old = scheduler.add(request(0, 3, 9))
    step = scheduler.schedule()
    scheduler.commit(step)
    scheduler.accept(step, [1])
    new = scheduler.add(request(1, 4, 9, samples=2))
    step = scheduler.schedule()
    assert step.outputs[:2] == [old, new]
    sample = step.outputs[2]
    scheduler.commit(step)
    scheduler.cancel(old)
    second = scheduler.schedule()
    assert second.runs == [new, sample]
    assert second.unknown_outputs.tolist() == [1, 2]


def test_a_second_unaccepted_step_is_refused():
    scheduler, first, _ = ahead()
    second = scheduler.schedule()
    for state in ("scheduled", "committed"):
        assert second.state.value == state
        with pytest.raises(InvalidSequence, match="two steps are open; accept the ids of the older one"):
            scheduler.schedule()
        if state == "scheduled":
            scheduler.commit(second)
    with pytest.raises(InvalidSequence, match="cannot accept a step before the older one"):
        scheduler.accept(second, [1, 2, 3])
    scheduler.accept(first, [1, 2, 3])
    scheduler.accept(second, [1, 2, 3])
    with pytest.raises(InvalidSequence, match="cannot accept a step that was already accepted"):
        scheduler.accept(first, [1, 2, 3])


def test_a_step_that_is_not_committed_allows_no_step_ahead():
    scheduler = Scheduler(FakeCache(64), overlap=True)
    scheduler.add(request(0, 5, 6))
    scheduler.schedule()
    with pytest.raises(InvalidSequence, match="the last step is scheduled and not committed; commit or abandon it"):
        scheduler.schedule()


def test_the_older_step_is_committed_already():
    scheduler, first, _ = ahead()
    scheduler.schedule()
    for verb in (scheduler.commit, scheduler.abandon):
        with pytest.raises(InvalidSequence, match="a step that is committed; accept the ids of its outputs"):
            verb(first)


@pytest.mark.parametrize("commits_first", [False, True])
def test_a_run_found_finished_drops_its_extra_token_and_frees_its_blocks_at_once(commits_first):
    scheduler, first, runs = ahead()
    second = scheduler.schedule()
    if commits_first:
        scheduler.commit(second)
    held = len(scheduler.cache.sequences)
    assert scheduler.accept(first, [11, 12, 13], [False, True, False]) == [runs[1]]
    assert len(scheduler.cache.sequences) == held - 1
    assert runs[1].tokens.tolist() == [*runs[1].request.prompt.tolist(), 12]
    assert runs[1].state is State.FINISHED
    if not commits_first:
        scheduler.commit(second)
    assert scheduler.accept(second, [21, 22, 23]) == []
    assert [run.num_generated for run in runs] == [2, 1, 2]
    scheduler.check_invariants()


def test_nothing_is_scheduled_ahead_for_runs_that_end_with_the_missing_id():
    scheduler = Scheduler(FakeCache(64), overlap=True)
    run = scheduler.add(request(0, 5, 1))
    step = scheduler.schedule()
    scheduler.commit(step)
    assert scheduler.schedule() is None
    assert scheduler.steps == (step,)
    assert scheduler.accept(step, [4]) == [run]
    assert scheduler.schedule() is None
    assert not scheduler.steps


def test_a_step_ahead_preempts_nothing_and_waits_for_the_ids():
    cache = FakeCache(5, block_size=2, prefix_cache=False)
    scheduler = Scheduler(cache, overlap=True, headroom=0.0)
    runs = [scheduler.add(request(number, 4, 4)) for number in range(2)]
    step = scheduler.schedule()
    scheduler.commit(step)
    assert scheduler.schedule() is None
    assert scheduler.num_preemptions == 0
    scheduler.accept(step, [1, 2], [True, False])
    assert scheduler.schedule().runs == [runs[1]]
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("accepts_first", [False, True])
def test_an_abandoned_step_ahead_is_repeated_after_the_ids(accepts_first):
    scheduler, first, runs = ahead()
    second = scheduler.schedule()
    if accepts_first:
        scheduler.accept(first, [1, 2, 3])
    scheduler.abandon(second)
    if not accepts_first:
        assert scheduler.schedule() is None
        scheduler.accept(first, [1, 2, 3])
    again = scheduler.schedule()
    assert again.runs == runs
    assert again.batch.token_ids == [1, 2, 3]
    assert not again.unknown_positions.size
    assert second.state is StepState.ABANDONED


def test_a_run_is_cancelled_between_its_two_open_steps():
    scheduler, first, runs = ahead()
    second = scheduler.schedule()
    assert scheduler.cancel(runs[0])
    assert scheduler.accept(first, [1, 2, 3]) == []
    scheduler.commit(second)
    assert scheduler.accept(second, [4, 5, 6]) == []
    assert runs[0].num_generated == 0
    assert runs[1].num_generated == runs[2].num_generated == 2


def test_calls_that_return_no_step_do_not_age_the_queue():
    cache = FakeCache(200, max_sequences=1)
    scheduler = Scheduler(cache, overlap=True, policy="priority", max_wait_steps=3)
    scheduler.add(request(0, 5, 1))
    step = scheduler.schedule()
    scheduler.commit(step)
    scheduler.add(request(1, 5, 1))
    high = scheduler.add(Request(2, np.arange(5), 1, priority=1))
    assert [scheduler.schedule() for _ in range(9)] == [None] * 9
    scheduler.accept(step, [4])
    assert scheduler.schedule().runs == [high]


def test_overlap_must_be_a_flag():
    with pytest.raises(UnsupportedOption, match="overlap is 1; use True or False"):
        Scheduler(FakeCache(8), overlap=1)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_states_are_right_with_overlap(in_place, swap):
    choice = random.Random(7)
    engine = StatefulEngine(in_place=in_place, swap=swap, num_blocks=14, num_states=10, overlap=True)
    for number in range(8):
        engine.add(request_of(number, choice.randint(3, 14), choice.randint(1, 9), shared=choice.choice([0, 8])))
    previous = ids = None
    for number in range(2000):
        step = engine.scheduler.schedule()
        if step is not None and number % 5 == 3:
            engine.spoil(step)
            engine.scheduler.abandon(step)
            step = None
        fresh = None
        if step is not None:
            engine.compute_ahead(step, previous, ids)
            fresh = engine.ids(step)
        if previous is not None:
            for run in engine.scheduler.accept(previous, ids):
                engine.ended[run.request.id, run.sample] = run.tokens.tolist()
        elif step is None and not engine.scheduler.num_running + engine.scheduler.num_waiting:
            break
        if step is not None:
            engine.scheduler.commit(step)
        previous, ids = step, fresh
        engine.check()
    for one in engine.requests:
        assert engine.ended[one.id, 0] == expected(one, 0)


WORK = st.tuples(st.integers(0, 2**32), st.sampled_from([None, 6, 40]), st.booleans(), st.sampled_from([5, 9, 30]))


@pytest.mark.slow
@settings(max_examples=400 if is_full() else 40, deadline=None)
@given(work=WORK)
def test_outputs_equal_those_without_overlap(work):
    seed, swap_blocks, prefix_cache, num_blocks = work
    choice = random.Random(seed)

    def ends(number, token):
        return (token * 7 + number) % 9 == 0

    server = Server(
        num_blocks=num_blocks, max_running=choice.randint(1, 5), max_tokens_per_step=choice.randint(2, 24),
        headroom=0.0, swap_blocks=swap_blocks, prefix_cache=prefix_cache, overlap=True, ends=ends,
    )  # fmt: skip
    requests = add_random_requests(server, choice, 9)
    cancelled = set()

    def disturb():
        if choice.random() < 0.03:
            run = choice.choice(list(server.runs.values()))
            if server.scheduler.cancel(run):
                cancelled.add(run)
                cancelled.update(each for each in server.runs.values() if each.state is State.CANCELLED)
        server.scheduler.check_invariants()

    ended = server.drain(disturb)
    for one in requests:
        for sample in range(one.samples if one.max_new_tokens else 1):
            whole = answer(one, sample, ends)
            run = server.runs.get((one.id, sample))
            if run is None or run.state is State.CANCELLED:
                assert run is None or run.tokens.tolist() == whole[: len(run.tokens)]
            else:
                assert ended[one.id, sample] == whole
    server.check_empty()
