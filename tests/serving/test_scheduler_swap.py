"""The scheduler with a swap space: preempted runs wait there and continue where they were."""

import pytest

from pagecore.errors import OutOfBlocks, UnsupportedOption
from pagecore.serving.scheduling.scheduler import Scheduler
from tests.serving.fake_cache import FakeCache, FakeSpace
from tests.serving.runs import drain, expected, request, sampled


def space_content(scheduler):
    """Return the swapped-out runs and the number of computed tokens of each."""
    return [(run, run.held.num_computed_tokens) for run in scheduler.waiting if run.held and run.held.is_swapped]


def test_a_swapped_out_run_continues_where_it_was():
    cache = FakeCache(7, block_size=2, max_sequences=3)
    space = FakeSpace(cache, 20)
    scheduler = Scheduler(cache, max_running=3, max_tokens_per_step=32, headroom=0.0, swap_space=space)
    runs = [scheduler.add(request(number, 4, 8)) for number in range(3)]
    computed, swapped = 0, []

    def observe(step):
        nonlocal computed
        computed += sum(step.counts)
        swapped.append([run.request.id for run, _ in space_content(scheduler)])

    finished = drain(scheduler, observe)
    assert [run.request.id for run in finished] == [0, 1, 2]
    assert [list(run.tokens) for run in runs] == [expected(run.request, 0) for run in runs]
    assert scheduler.num_swaps == scheduler.num_preemptions > 0
    assert [1, 2] in swapped
    assert computed == 3 * (4 + 7)  # no token is recomputed


def test_a_full_swap_space_falls_back_to_recomputation():
    cache = FakeCache(7, block_size=2, max_sequences=3)
    space = FakeSpace(cache, 4)
    scheduler = Scheduler(cache, max_running=3, max_tokens_per_step=32, headroom=0.0, swap_space=space)
    runs = [scheduler.add(request(number, 4, 8)) for number in range(3)]
    drain(scheduler)
    assert [list(run.tokens) for run in runs] == [expected(run.request, 0) for run in runs]
    assert 0 < scheduler.num_swaps < scheduler.num_preemptions


def test_a_partially_computed_prompt_is_swapped_out_and_completed():
    cache = FakeCache(7, block_size=2, max_sequences=3)
    space = FakeSpace(cache, 20)
    scheduler = Scheduler(cache, max_running=3, max_tokens_per_step=3, headroom=0.0, swap_space=space)
    # Two decoding runs leave one token a step to the youngest, whose prompt is incomplete when blocks run short.
    runs = [scheduler.add(request(0, 2, 10)), scheduler.add(request(1, 2, 10)), scheduler.add(request(2, 6, 2))]
    saved = []
    drain(scheduler, lambda step: saved.extend((run.request.id, n) for run, n in space_content(scheduler)))
    assert {number for number, computed in saved if number == 2 and 0 < computed < 6} == {2}
    assert scheduler.num_swaps == scheduler.num_preemptions
    assert [list(run.tokens) for run in runs] == [expected(run.request, 0) for run in runs]


def test_an_abandoned_step_with_a_swap_in_is_scheduled_again():
    cache = FakeCache(7, block_size=2, max_sequences=3)
    scheduler = Scheduler(cache, max_running=3, max_tokens_per_step=32, headroom=0.0, swap_space=FakeSpace(cache, 20))
    runs = [scheduler.add(request(number, 4, 8)) for number in range(3)]
    finished = []
    while (step := scheduler.schedule()) is not None:
        scheduler.abandon(step)
        step = scheduler.schedule()
        scheduler.commit(step)
        finished += scheduler.accept(step, sampled(step))
    assert scheduler.num_swaps > 0
    assert [list(run.tokens) for run in runs] == [expected(run.request, 0) for run in runs]


def test_a_swap_space_of_another_cache_is_refused():
    cache, other = FakeCache(7), FakeCache(7)
    for wrong in (FakeSpace(other, 5), 16, "16GiB"):
        with pytest.raises(UnsupportedOption, match=r"swap_space .* does not belong to this cache"):
            Scheduler(cache, swap_space=wrong)


def test_blocks_lost_while_a_run_is_swapped_out_are_an_error():
    cache = FakeCache(7, block_size=2, max_sequences=3)
    space = FakeSpace(cache, 20)
    scheduler = Scheduler(cache, max_running=3, max_tokens_per_step=32, headroom=0.0, swap_space=space)
    for number in range(2):
        scheduler.add(request(number, 4, 8))
    while scheduler.num_running or not space.held:
        step = scheduler.schedule()
        scheduler.commit(step)
        scheduler.accept(step, sampled(step))
    cache.lose()
    with pytest.raises(OutOfBlocks, match=r"request 1 needs . blocks for . tokens; 0 are available"):
        scheduler.schedule()
