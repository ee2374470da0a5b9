"""`Scheduler.preempt_all` and `preempt`: the runs hold nothing in the cache afterwards, and continue later."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.errors import InvalidSequence, ShapeError, UnsupportedOption
from pagecore.serving import Request, Scheduler
from tests.serving.fake_cache import FakeCache, FakeSpace
from tests.serving.runs import advance, drain, expected, request
from tests.serving.served import Server, answer


def started(swap_blocks=None, **options):
    """Return a scheduler in which two requests decode, one has a part of its prompt, and one waits; and its runs."""
    cache = FakeCache(60, block_size=2)
    space = None if swap_blocks is None else FakeSpace(cache, swap_blocks)
    scheduler = Scheduler(cache, max_running=3, max_tokens_per_step=12, swap_space=space, **options)
    runs = [scheduler.add(request(number, length, 8)) for number, length in enumerate((4, 5, 9, 3))]
    advance(scheduler, 2)
    assert [run.prefilling for run in runs] == [False, False, False, True]
    return scheduler, runs


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("swap_blocks", [None, 5, 40])
def test_runs_return_to_the_queue_in_their_order_and_finish(swap_blocks, swap, policy):
    scheduler, runs = started(swap_blocks, policy=policy)
    assert scheduler.preempt_all(swap=swap) == runs[:3]
    scheduler.check_invariants()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_preemptions) == (0, 4, 3)
    assert list(scheduler.waiting) == runs
    assert not scheduler.holders
    assert scheduler.num_swaps == {None: 0, 5: 1, 40: 3}[swap_blocks] * swap
    assert all(held.is_swapped for held in scheduler.cache.sequences.values())
    finished = {run.request.id: run.tokens.tolist() for run in drain(scheduler)}
    assert finished == {run.request.id: expected(run.request, 0) for run in runs}


def test_without_swapping_runs_that_are_swapped_out_compute_everything_again():
    scheduler, runs = started(40)
    scheduler.preempt_all()
    assert [run.held is not None for run in runs] == [True, True, True, False]
    assert scheduler.preempt_all(swap=False) == []
    assert not scheduler.cache.sequences
    assert scheduler.num_waiting_tokens == sum(len(run.tokens) for run in runs)
    scheduler.check_invariants()
    assert len(drain(scheduler)) == 4


def test_the_share_of_future_tokens_stays():
    scheduler, _ = started(new_token_ratio=0.7)
    ratio = scheduler.new_token_ratio
    scheduler.preempt_all()
    assert scheduler.new_token_ratio == ratio


def test_open_steps_are_accepted_or_abandoned_first():
    scheduler, runs = started()
    step = scheduler.schedule()
    with pytest.raises(InvalidSequence, match="a step is open; accept or abandon it, then preempt"):
        scheduler.preempt_all()
    scheduler.abandon(step)
    assert scheduler.preempt_all() == runs[:3]
    with pytest.raises(UnsupportedOption, match="swap is 1; use True or False"):
        scheduler.preempt_all(swap=1)


def test_memory_is_released_between_two_steps():
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=40, block_size=4, memory_saver=True)
    space = SwapSpace(cache, num_blocks=5)
    scheduler = Scheduler(cache, max_running=4, swap_space=space)
    runs = [scheduler.add(Request(number, np.arange(9) + 50 * number, 6)) for number in range(3)]
    advance(scheduler, 2)
    with pytest.raises(UnsupportedOption, match="hold 9 blocks"):
        cache.release_memory()
    scheduler.preempt_all()
    assert cache.release_memory() > 0
    late = scheduler.add(Request(3, np.arange(5) + 500, 2))
    cache.resume_memory()
    assert {run.request.id: run.tokens.tolist() for run in drain(scheduler)} == {
        run.request.id: expected(run.request, 0) for run in [*runs, late]
    }


@pytest.mark.parametrize("swap", [False, True])
def test_a_request_that_waits_for_room_gives_its_cached_prefix_up(swap):
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=13, block_size=4, memory_saver=True)
    scheduler = Scheduler(cache, max_running=4, swap_space=SwapSpace(cache, num_blocks=12))
    first = scheduler.add(Request(0, np.arange(24), 8))
    advance(scheduler, 2)
    second = scheduler.add(Request(1, np.concatenate([np.arange(16), np.arange(24) + 100]), 2))
    advance(scheduler, 1)
    assert second.held is not None
    assert second.held.num_cached_tokens == 16
    scheduler.preempt_all(swap=swap)
    assert second.held is None
    scheduler.check_invariants()
    assert cache.release_memory() > 0
    cache.resume_memory()
    assert {run.request.id: run.tokens.tolist() for run in drain(scheduler)} == {
        run.request.id: expected(run.request, 0) for run in (first, second)
    }


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_stay_equal(overlap, swap):
    server = Server(num_blocks=24, max_running=4, max_tokens_per_step=9, swap_blocks=12, overlap=overlap)
    requests = [Request(number, np.arange(6) + 100 * number, 9, samples=1 + number % 2) for number in range(6)]
    for one in requests:
        server.add(one)
    turns = 0
    while server.turn():
        turns += 1
        if turns % 4 == 0:
            if server.previous is not None:
                server.accept()
            server.scheduler.preempt_all(swap=swap)
        server.check()
    assert server.scheduler.num_preemptions > 6
    assert server.ended == {(one.id, n): answer(one, n) for one in requests for n in range(one.samples)}
    server.check_empty()


@pytest.mark.parametrize("swap", [False, True])
def test_some_runs_return_to_the_queue(swap):
    scheduler, runs = started(40)
    assert scheduler.preempt([runs[2], runs[3], runs[0], runs[0]], swap=swap) == [runs[0], runs[2]]
    scheduler.check_invariants()
    assert (list(scheduler.running), list(scheduler.waiting)) == ([runs[1]], [runs[0], runs[2], runs[3]])
    assert scheduler.num_swaps == 2 * swap
    assert scheduler.preempt(iter(runs), swap=False) == [runs[1]]
    assert not scheduler.cache.sequences
    assert len(drain(scheduler)) == 4
    assert scheduler.preempt(runs) == []  # they have ended
    for strange in (None, "run", [7], [*runs, started()[1][0]]):
        with pytest.raises((InvalidSequence, ShapeError), match=r"(?i)run"):
            scheduler.preempt(strange)


@pytest.mark.parametrize("swap_blocks", [None, 24])
@pytest.mark.parametrize("overlap", [False, True])
def test_runs_compute_again_what_was_revoked(overlap, swap_blocks):
    server = Server(num_blocks=24, max_running=4, max_tokens_per_step=9, swap_blocks=swap_blocks, overlap=overlap)
    prompts = [np.append(np.arange(6), [100 * number] * 3) for number in range(6)]
    requests = [Request(number, prompt, 9, samples=1 + number % 2) for number, prompt in enumerate(prompts)]
    for one in requests:
        server.add(one)
    turns = num_affected = 0
    while server.turn():
        turns += 1
        if turns % 5 == 0 and server.previous is not None:
            server.accept()
        held = [run.held for run in server.scheduler.running if run.held.num_computed_tokens > 3]
        if turns % 5 == 0 and held:
            block = np.asarray(server.cache.block_table())[held[0].row, 1]
            server.plane.reshape(-1, 2)[block] = 999
            affected = [sequence.id for sequence in server.cache.revoke_blocks([block])]
            num_affected += len(server.scheduler.preempt(affected))
        server.check()
    assert num_affected > 3
    assert server.ended == {(one.id, n): answer(one, n) for one in requests for n in range(one.samples)}
    server.check_empty()
