"""Room of runs that are idle between two turns: what gives way to others, in which order, and the swap space."""

import pytest

from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.serving import Request, Scheduler
from tests.serving.fake_cache import FakeCache, FakeSpace
from tests.serving.runs import advance, drain
from tests.serving.turns import idle_run, step_of, text_of


def test_a_sequence_with_drafts_after_the_end_of_its_turn_is_not_swapped_out():
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=40, block_size=4, device="none")
    scheduler = Scheduler(cache, swap_space=SwapSpace(cache, num_blocks=30))
    run = scheduler.add(Request(0, [1, 2, 3], 4, stop_token_ids=[11], resumable=True))
    step_of(scheduler, 10)
    step_of(scheduler, [11, 12, 13], drafts={run: [11, 12]}, accepted=[3])
    scheduler.preempt_all()
    assert (cache.stats().num_used_blocks, cache.stats().num_swapped_blocks) == (0, 0)
    scheduler.extend(run, [7, 8])
    assert step_of(scheduler, 20) == [3], "the first four tokens are cached"


def test_idle_runs_take_no_budget_and_no_place_among_the_running_ones():
    cache = FakeCache(100, max_sequences=8)
    scheduler = Scheduler(cache, max_running=2, max_tokens_per_step=2)
    idle = [idle_run(scheduler, number) for number in range(5)]
    assert (scheduler.idle, scheduler.num_idle, scheduler.num_running) == (tuple(idle), 5, 0)
    held = cache.num_available
    others = [scheduler.add(Request(number, [number] * 4, 2)) for number in range(10, 12)]
    assert step_of(scheduler) == [2]
    drain(scheduler)
    assert [run.num_generated for run in others] == [2, 2]
    assert (scheduler.num_reclaimed, scheduler.num_preemptions, cache.num_available) == (0, 0, held)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("swap_blocks", [None, 30])
def test_idle_runs_give_way_before_a_running_one_and_the_oldest_first(swap_blocks, prefix_cache):
    cache = FakeCache(11, prefix_cache=prefix_cache)
    space = swap_blocks and FakeSpace(cache, swap_blocks)
    scheduler = Scheduler(cache, headroom=0.0, swap_space=space)
    idle = [idle_run(scheduler, number) for number in range(3)]  # two blocks each
    runs = [scheduler.add(Request(number, [number], 10)) for number in (7, 8)]
    drain(scheduler, lambda _: scheduler.check_invariants())
    assert [run.num_generated for run in runs] == [10, 10]
    assert (scheduler.num_reclaimed, scheduler.num_preemptions) == (1, 0)
    assert [run in scheduler.holders for run in idle] == [False, True, True]
    scheduler.extend(idle[0], [5, 5])
    drain(scheduler)
    assert idle[0].tokens.tolist() == text_of((range(6), 3), ([5, 5], 3))


def test_an_admission_takes_blocks_and_rows_of_idle_runs():
    cache = FakeCache(9, max_sequences=3, prefix_cache=False)
    scheduler = Scheduler(cache, headroom=0.0)
    idle = [idle_run(scheduler, number) for number in range(3)]
    scheduler.add(Request(5, [5], 2))
    drain(scheduler)
    assert scheduler.num_reclaimed == 1, "a row was short"
    scheduler.add(Request(6, range(30), 1))
    drain(scheduler)
    assert scheduler.num_reclaimed == 3, "blocks were short"
    assert not scheduler.holders
    assert cache.num_available == 8
    assert scheduler.num_idle == len(idle)


def test_a_prompt_waits_for_no_idle_run_while_others_run():
    cache = FakeCache(9, prefix_cache=False)
    scheduler = Scheduler(cache, headroom=0.0)
    idle_run(scheduler)
    first = scheduler.add(Request(1, [1], 9))
    advance(scheduler)
    second = scheduler.add(Request(2, range(24), 1))
    assert scheduler.schedule().runs == [first, second]
    assert scheduler.num_reclaimed == 1


def test_idle_runs_give_way_before_drafts_are_cut():
    cache = FakeCache(6, prefix_cache=False)
    scheduler = Scheduler(cache, headroom=0.0)
    idle_run(scheduler)
    run = scheduler.add(Request(1, range(11), 9))
    advance(scheduler)
    step = scheduler.schedule({run: 5})
    assert (step.counts, scheduler.num_reclaimed) == ([6], 1)


def test_a_run_that_waits_for_its_next_turn_gives_way_after_the_idle_ones():
    cache = FakeCache(9, prefix_cache=False)
    scheduler = Scheduler(cache, headroom=0.0, max_running=1)
    early, late = idle_run(scheduler), idle_run(scheduler, 1)
    first = scheduler.add(Request(2, [2], 30))
    advance(scheduler)
    scheduler.extend(early, [7])
    assert (scheduler.waiting, scheduler.holders) == ((early,), (first, late, early))
    for reclaimed, holders in ((1, (first, early)), (2, (first,))):
        while scheduler.num_reclaimed < reclaimed:
            advance(scheduler)
        assert scheduler.holders == holders
        scheduler.check_invariants()
    assert (scheduler.waiting, scheduler.num_preemptions) == ((early,), 0)
    drain(scheduler)
    assert early.tokens.tolist() == text_of((range(6), 3), ([7], 3))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_runs_with_a_further_turn_give_way_in_reverse_order_of_the_queue(policy):
    scheduler = Scheduler(FakeCache(60), policy=policy, max_running=1)
    idle = [idle_run(scheduler, number, priority=priority) for number, priority in enumerate([0, 5, 1])]
    scheduler.add(Request(9, [9], 30, priority=9))
    advance(scheduler)
    for run in idle:
        scheduler.extend(run, [7])
    order = {"fcfs": [2, 1, 0], "priority": [0, 2, 1]}[policy]
    assert list(scheduler.holders[1:]) == [idle[number] for number in order]


def test_idle_runs_keep_their_place_in_the_swap_space_if_a_run_does_not_fit_it():
    cache = FakeCache(20, prefix_cache=False)
    space = FakeSpace(cache, 5)
    scheduler = Scheduler(cache, headroom=0.0, swap_space=space)
    idle = [idle_run(scheduler, number) for number in range(2)]
    scheduler.preempt_all()
    scheduler.add(Request(5, range(30), 3))
    advance(scheduler, 2)
    scheduler.preempt_all()
    assert [run in cache.sequences for run in idle] == [True, True]


def test_reuse_does_not_fall_if_an_admission_is_repeated_and_finds_less():
    cache = FakeCache(20)
    scheduler = Scheduler(cache)
    idle_run(scheduler, prompt=20, new=1)
    scheduler.finish(scheduler.idle[0])
    run, seen = scheduler.add(Request(1, range(24), 3)), []
    scheduler.abandon(scheduler.schedule())
    seen.append(scheduler.reuse)
    scheduler.preempt([run])
    cache.lose()
    cache.free += range(19, 0, -1)  # everything was evicted meanwhile
    for block in cache.free:
        cache.holders[block] = 0
    scheduler.commit(scheduler.schedule())
    seen.append(scheduler.reuse)
    assert [reuse.prefix_query_tokens for reuse in seen] == [20, 44]
    assert [reuse.prefix_hit_tokens for reuse in seen] == [0, 0]


def test_preempted_runs_take_the_place_of_idle_ones_in_the_swap_space():
    cache = FakeCache(9, prefix_cache=False)
    space = FakeSpace(cache, 5)
    scheduler = Scheduler(cache, headroom=0.0, swap_space=space)
    idle = [idle_run(scheduler, number) for number in range(2)]
    assert scheduler.preempt_all() == []
    assert (space.num_free, scheduler.num_reclaimed, scheduler.num_idle) == (0, 2, 2)
    run = scheduler.add(Request(5, range(9), 3))
    advance(scheduler, 2)
    assert scheduler.preempt_all() == [run]
    assert run.held is not None
    assert [cache.sequences.get(one) for one in idle] == [None, None]
    scheduler.extend(idle[1], [4])
    drain(scheduler)
    assert idle[1].tokens.tolist() == text_of((range(100, 106), 3), ([4], 3))
    scheduler.preempt_all(swap=False)
    assert not cache.sequences


def test_blocks_that_were_revoked_leave_an_idle_run():
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=40, block_size=4, device="none")
    scheduler = Scheduler(cache)
    run = idle_run(scheduler, prompt=20)
    (affected,) = cache.revoke_prefix(range(20), valid=6)
    assert scheduler.preempt([affected.id]) == []
    scheduler.extend(run, [1, 2])
    assert scheduler.schedule().counts == [20 + 3 + 2 - 4]


@pytest.mark.parametrize(("swap", "counts"), [(True, [3]), (False, [10 + 2 - 8])])
def test_a_turn_continues_from_the_swap_space_or_the_cached_prefix(swap, counts):
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=40, block_size=4, device="none")
    scheduler = Scheduler(cache, swap_space=SwapSpace(cache, num_blocks=30))
    run = idle_run(scheduler, prompt=7)
    scheduler.preempt_all(swap=swap)
    assert cache.stats().num_used_blocks == 0
    scheduler.extend(run, [1, 2])
    assert step_of(scheduler, 5) == counts
    assert scheduler.reuse.num_recovered_tokens == (0 if swap else 8)
