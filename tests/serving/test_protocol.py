"""Protocol of a step: violations are refused by name, and cancelled runs free what they hold."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.errors import InvalidSequence, OutOfRows, ShapeError
from pagecore.serving.scheduling.request import State
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.serving.scheduling.step import StepState
from pagecore.storage import AttentionSpec
from tests.faults import is_full
from tests.serving.fake_cache import FakeCache, FakeSpace
from tests.serving.runs import drain, expected, request, sampled
from tests.together import together


def with_step(*requests, **limits):
    """Return a scheduler whose first step is scheduled, the step, and the runs."""
    scheduler = Scheduler(FakeCache(64), **limits)
    runs = [scheduler.add(one) for one in requests]
    return scheduler, scheduler.schedule(), runs


def advance(scheduler, steps):
    """Run some steps; return the finished runs."""
    finished = []
    for _ in range(steps):
        step = scheduler.schedule()
        scheduler.commit(step)
        finished += scheduler.accept(step, sampled(step))
    return finished


# -- steps ------------------------------------------------------------------------------------------------------------


def test_a_second_step_is_refused_until_the_first_is_accepted():
    scheduler, step, (run,) = with_step(request(0, 3, 3))
    with pytest.raises(InvalidSequence, match="the last step is scheduled and not accepted"):
        scheduler.schedule()
    scheduler.commit(step)
    with pytest.raises(InvalidSequence, match="the last step is committed and not accepted"):
        scheduler.schedule()
    assert scheduler.step is step
    scheduler.accept(step, sampled(step))
    assert scheduler.step is None
    drain(scheduler)
    assert list(run.tokens) == expected(run.request, 0)
    assert run.num_generated == 3


def test_objects_of_a_scheduler_are_shown_on_a_short_line_without_token_ids():
    scheduler, step, (run,) = with_step(request(0, 200, 3), max_tokens_per_step=128)
    assert repr(scheduler) == "Scheduler(1 running, 0 waiting, 1 open steps)"
    assert repr(step) == "Step(scheduled, 1 rows, 0 of them decode, 128 tokens, 0 outputs)"
    assert repr(run.request) == "Request(0, 200 tokens, max_new_tokens=3)"


@together("wrong", [None, 7, "step", [], object()])
@together("verb", ["commit", "abandon", "accept"])
def test_an_argument_that_is_not_a_step_is_refused(verb, wrong):
    scheduler, _, _ = with_step(request(0, 3, 3))
    with pytest.raises(InvalidSequence, match=r"expected a Step \(as returned by schedule\), got"):
        getattr(scheduler, verb)(wrong, *([[1]] if verb == "accept" else []))


@pytest.mark.parametrize("verb", ["commit", "abandon", "accept"])
def test_a_step_of_another_scheduler_is_refused(verb):
    scheduler, step, _ = with_step(request(0, 3, 3))
    _, other, _ = with_step(request(0, 3, 3))
    with pytest.raises(InvalidSequence, match=f"cannot {verb} a step that belongs to another scheduler"):
        getattr(scheduler, verb)(other, *([[1]] if verb == "accept" else []))
    assert (step.state, other.state) == (StepState.SCHEDULED,) * 2
    assert len(drain_open(scheduler, step)) == 1


def drain_open(scheduler, step):
    """Finish the open step, then all requests."""
    scheduler.commit(step)
    return scheduler.accept(step, sampled(step)) + drain(scheduler)


@pytest.mark.parametrize("verb", ["commit", "abandon", "accept"])
def test_a_finished_step_is_refused(verb):
    scheduler, step, _ = with_step(request(0, 3, 3))
    scheduler.commit(step)
    scheduler.accept(step, sampled(step))
    arguments = [[1]] if verb == "accept" else []
    with pytest.raises(InvalidSequence, match=f"cannot {verb} a step that was already accepted"):
        getattr(scheduler, verb)(step, *arguments)
    second = scheduler.schedule()
    with pytest.raises(InvalidSequence, match="was already accepted"):
        getattr(scheduler, verb)(step, *arguments)
    scheduler.abandon(second)
    with pytest.raises(InvalidSequence, match=f"cannot {verb} a step that was already abandoned"):
        getattr(scheduler, verb)(second, *arguments)
    assert len(drain(scheduler)) == 1


def test_a_committed_step_can_only_be_accepted():
    scheduler, step, _ = with_step(request(0, 3, 3))
    with pytest.raises(InvalidSequence, match="cannot accept a step that is scheduled; commit it first"):
        scheduler.accept(step, [1])
    scheduler.commit(step)
    for verb in (scheduler.commit, scheduler.abandon):
        with pytest.raises(InvalidSequence, match="a step that is committed; accept the ids of its outputs"):
            verb(step)
    assert len(drain_open_committed(scheduler, step)) == 1


def drain_open_committed(scheduler, step):
    return scheduler.accept(step, sampled(step)) + drain(scheduler)


def test_a_failed_forward_pass_loses_no_request():
    scheduler = Scheduler(FakeCache(20), max_tokens_per_step=8)
    runs = [scheduler.add(request(number, 6, 4, samples=2)) for number in range(3)]
    finished, failed = [], 0
    while (step := scheduler.schedule()) is not None:
        try:
            if failed < 40 and (failed % 2 == 0 or failed > 30):
                raise RuntimeError("the forward pass failed")
        except RuntimeError:
            scheduler.abandon(step)
            failed += 1
            scheduler.check_invariants()
            continue
        failed += 1
        scheduler.commit(step)
        finished += scheduler.accept(step, sampled(step))
    assert sorted((run.request.id, run.sample) for run in finished) == [(n, s) for n in range(3) for s in range(2)]
    assert all(list(run.tokens) == expected(run.request, run.sample) for run in finished)
    assert all(run in finished for run in runs)


def test_rows_held_outside_raise_out_of_rows_and_nothing_is_lost():
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=20, max_sequences=2, device="none")
    scheduler = Scheduler(cache)
    assert scheduler.max_running == 2
    others = [cache.add_sequence([1]), cache.add_sequence([2])]
    run = scheduler.add(request(0, 3, 2))
    with pytest.raises(OutOfRows):
        scheduler.schedule()
    scheduler.check_invariants()
    cache.remove(others[0])
    assert drain(scheduler) == [run]


def test_a_fork_without_a_free_row_is_completed_later():
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=20, max_sequences=2, device="none")
    scheduler = Scheduler(cache)
    scheduler.add(request(0, 3, 3, samples=2))
    step = scheduler.schedule()
    other = cache.add_sequence([1])
    with pytest.raises(OutOfRows):
        scheduler.commit(step)
    cache.remove(other)
    assert scheduler.step is step
    assert step.state is StepState.SCHEDULED  # nothing was committed
    scheduler.commit(step)
    finished = drain_open_committed(scheduler, step)
    assert sorted(list(run.tokens) for run in finished) == sorted(expected(request(0, 3, 3), s) for s in (0, 1))


# -- cancelling -------------------------------------------------------------------------------------------------------


def test_a_waiting_run_is_cancelled_before_its_first_step():
    scheduler = Scheduler(FakeCache(8), max_tokens_per_step=8)
    first, second = (scheduler.add(request(number, 6, 2)) for number in range(2))
    assert scheduler.cancel(second)
    assert (second.state, scheduler.num_waiting, scheduler.num_waiting_tokens) == (State.CANCELLED, 1, 6)
    assert drain(scheduler) == [first]
    assert list(second.tokens) == list(second.request.prompt)


def test_the_head_of_the_queue_is_cancelled_with_its_pinned_prefix():
    cache = FakeCache(7, block_size=4)
    scheduler = Scheduler(cache, max_tokens_per_step=64, headroom=0.0)
    scheduler.add(request(0, 16, 5, shared=16))
    waits = scheduler.add(request(1, 23, 1, shared=16))
    next_one = scheduler.add(request(2, 2, 1))
    advance(scheduler, 2)
    assert len(cache.sequences) == 2
    assert scheduler.cancel(waits)
    assert len(cache.sequences) == 1
    advance(scheduler, 1)
    assert next_one.state is State.FINISHED
    scheduler.check_invariants()


def test_a_swapped_out_run_is_cancelled():
    cache = FakeCache(7, block_size=2, max_sequences=3)
    space = FakeSpace(cache, 20)
    scheduler = Scheduler(cache, max_running=3, max_tokens_per_step=32, headroom=0.0, swap_space=space)
    runs = [scheduler.add(request(number, 4, 8)) for number in range(3)]
    while not space.held:
        advance(scheduler, 1)
    (gone,) = [run for run in runs if run.held in space.held]
    so_far = list(np.asarray(gone.sequence.tokens))
    assert scheduler.cancel(gone)
    assert not space.held
    assert list(gone.tokens) == so_far == expected(gone.request, 0)[: len(so_far)]
    assert len(drain(scheduler)) == 2


@pytest.mark.parametrize("when", ["scheduled", "committed"])
def test_the_id_of_a_run_cancelled_in_flight_is_dropped(when):
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=20, block_size=4, device="none")
    scheduler = Scheduler(cache)
    runs = [scheduler.add(request(number, 5, 4)) for number in range(3)]
    advance(scheduler, 1)
    step = scheduler.schedule()
    if when == "committed":
        scheduler.commit(step)
    assert scheduler.cancel(runs[1])
    assert cache.num_sequences == scheduler.num_running == 2
    if when == "scheduled":
        scheduler.commit(step)
    with pytest.raises(ShapeError, match="one id for each of 3 outputs"):
        scheduler.accept(step, [1, 2])
    ids = sampled(step)
    assert scheduler.accept(step, [ids[0], 2**31 - 1, ids[2]]) == []
    cache.check_invariants()
    assert runs[1].num_generated == 1
    assert list(runs[1].tokens) == expected(runs[1].request, 0)[:6]
    assert [list(run.tokens) for run in drain(scheduler)] == [expected(runs[n].request, 0) for n in (0, 2)]


def test_a_step_whose_runs_are_all_cancelled_is_still_accepted():
    scheduler, step, runs = with_step(request(0, 3, 1), request(1, 3, 0))
    assert all(scheduler.cancel(run) for run in runs)
    scheduler.commit(step)
    assert scheduler.accept(step, [5]) == []
    assert scheduler.schedule() is None
    assert not scheduler.cache.sequences


def test_cancelling_the_first_sample_before_the_fork_cancels_all():
    scheduler, step, (run,) = with_step(request(0, 3, 3, samples=3))
    samples = list(step.outputs)
    assert scheduler.cancel(run)
    assert [each.state for each in samples] == [State.CANCELLED] * 3
    scheduler.commit(step)
    assert scheduler.accept(step, [1, 2, 3]) == []
    assert scheduler.schedule() is None


@pytest.mark.parametrize("again", [False, True])
def test_a_sample_is_cancelled_before_its_fork_and_stays_cancelled_after_an_abandoned_step(again):
    scheduler, step, (run,) = with_step(request(0, 3, 3, samples=3))
    gone = step.outputs[1]
    assert scheduler.cancel(gone)
    if again:
        scheduler.abandon(step)
        step = scheduler.schedule()
        assert [each.sample for each in step.outputs] == [0, 2]
    scheduler.check_invariants()
    scheduler.commit(step)
    assert scheduler.num_forks == 1
    scheduler.accept(step, sampled(step))
    finished = drain(scheduler)
    assert [(each.sample, list(each.tokens)) for each in finished] == [(s, expected(run.request, s)) for s in (0, 2)]
    assert gone.state is State.CANCELLED


def test_a_forked_sample_is_cancelled_alone():
    scheduler, step, _ = with_step(request(0, 3, 5, samples=3))
    scheduler.commit(step)
    scheduler.accept(step, sampled(step))
    first = step.outputs[0]
    assert scheduler.cancel(first)
    assert scheduler.num_running == 2
    assert [run.sample for run in drain(scheduler)] == [1, 2]


def test_a_run_that_has_ended_is_not_cancelled_again():
    scheduler, _, (run, other) = with_step(request(0, 3, 1), request(1, 3, 9))
    (finished,) = drain_one(scheduler)
    assert finished is run
    assert not scheduler.cancel(run)
    assert run.state is State.FINISHED
    assert scheduler.cancel(other)
    assert not scheduler.cancel(other)


def drain_one(scheduler):
    step = scheduler.step
    scheduler.commit(step)
    return scheduler.accept(step, sampled(step))


@pytest.mark.parametrize("wrong", [None, 3, "run", request(0, 3, 1)])
def test_an_argument_that_is_not_a_run_cannot_be_cancelled(wrong):
    with pytest.raises(InvalidSequence, match=r"expected a Run \(as returned by add\)"):
        Scheduler(FakeCache(8)).cancel(wrong)


def test_a_run_of_another_scheduler_cannot_be_cancelled():
    run = Scheduler(FakeCache(8)).add(request(0, 3, 1))
    with pytest.raises(InvalidSequence, match="belongs to another scheduler"):
        Scheduler(FakeCache(8)).cancel(run)


@pytest.mark.slow
@settings(max_examples=400 if is_full() else 100, deadline=None)
@given(seed=st.integers(0, 2**32), is_real=st.booleans(), swap_blocks=st.sampled_from([None, 4, 30]))
def test_random_cancels_and_failures_do_not_change_other_runs(seed, is_real, swap_blocks):
    choice = random.Random(seed)
    block_size, num_blocks = choice.randint(1, 4), choice.randint(4, 14)
    if is_real:
        specs = [AttentionSpec(1, 8), AttentionSpec(1, 8, window=5)]
        cache = PagedKVCache(specs, block_size=block_size, num_blocks=num_blocks, max_sequences=5, device="none")
        space = swap_blocks and SwapSpace(cache, num_blocks=swap_blocks)
    else:
        cache = FakeCache(num_blocks, block_size, max_sequences=5)
        space = swap_blocks and FakeSpace(cache, swap_blocks)
    scheduler = Scheduler(cache, max_tokens_per_step=choice.randint(1, 20), headroom=0.0, swap_space=space)
    longest = scheduler.max_length
    runs = {}
    for number in range(choice.randint(1, 9)):
        prompt = choice.randint(1, longest)
        new = choice.randint(0, min(12, longest - prompt + 1))
        samples = choice.randint(1, min(3, scheduler.max_running))
        runs[number, 0] = scheduler.add(request(number, prompt, new, samples, shared=choice.choice([0, 0, 6])))
    finished = []

    def disturb():
        if choice.random() < 0.1:
            run = choice.choice(list(runs.values()))
            had_ended = run.has_ended
            assert scheduler.cancel(run) is not had_ended
        scheduler.check_invariants()

    while (step := scheduler.schedule()) is not None:
        runs |= {(run.request.id, run.sample): run for run in step.outputs}
        disturb()
        if choice.random() < 0.15:
            scheduler.abandon(step)
            disturb()
            continue
        scheduler.commit(step)
        disturb()
        finished += scheduler.accept(step, sampled(step))
        disturb()
    assert set(finished) == {run for run in runs.values() if run.state is State.FINISHED}
    assert all(run.has_ended for run in runs.values())
    for run in runs.values():
        whole = expected(run.request, run.sample)
        assert list(run.tokens) == whole[: len(run.tokens)]
        assert run.state is State.CANCELLED or len(run.tokens) == len(whole)
    assert cache.num_available == num_blocks - 1
    assert (cache.num_sequences if is_real else len(cache.sequences)) == 0
    if is_real:
        cache.check_invariants()
