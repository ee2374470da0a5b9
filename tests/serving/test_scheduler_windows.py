"""The scheduler over a cache whose windows have small pools: long prompts, prompts cut to a window, preemption."""

import numpy as np
import pytest

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.errors import OutOfBlocks
from pagecore.serving.planner import plan_memory
from pagecore.serving.scheduling.request import Request, RequestError
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import AttentionSpec
from tests.faults import is_full
from tests.serving.runs import drain, expected, request

# A Gemma 3 of 12 layers: every sixth layer sees all keys.
GEMMA = [AttentionSpec(4, 256, window=None if i % 6 == 5 else 1024) for i in range(12)]
SMALL = [AttentionSpec(1, 8, window=10), AttentionSpec(1, 8)]


def gemma(**size):
    return PagedKVCache(GEMMA, device="none", max_sequences=32, **size)


def small(num_blocks, **options):
    return PagedKVCache(SMALL, block_size=4, num_blocks=num_blocks, device="none", max_sequences=8, **options)


def sizes():
    plan = plan_memory(GEMMA, "2GiB", context=32768).contexts[0]
    return {"best": {"num_blocks": plan.best_num_blocks}, "memory": {"memory": "2GiB"}}


@pytest.mark.parametrize("by", ["best", "memory"])
def test_a_gemma_3_of_12_layers_with_2_gib_serves_a_request_of_30_000_tokens(by):
    cache = gemma(**sizes()[by])
    if by == "best":
        assert cache.num_blocks == (423, 12289)
    scheduler = Scheduler(cache)
    assert scheduler.max_length > 30_000
    run = scheduler.add(Request(0, np.arange(30_000), 4))
    counts = []
    (finished,) = drain(scheduler, lambda step: counts.append(sum(step.counts)))
    assert finished is run
    assert list(run.tokens) == expected(run.request, 0)
    assert sum(counts) == 30_003
    assert min(counts[: counts.index(1) - 1], default=8192) >= 512
    cache.check_invariants()


def test_windows_alone_serve_requests_longer_than_their_pools():
    spec = AttentionSpec(1, 8, window=10)
    cache = PagedKVCache(spec, block_size=4, num_blocks=12, max_tokens_per_sequence=500, device="none", max_sequences=8)
    scheduler = Scheduler(cache)
    assert scheduler.max_length == 500
    with pytest.raises(RequestError, match="the cache holds 500 for one sequence"):
        scheduler.add(Request("long", np.arange(400), 102))
    for i in range(4):
        scheduler.add(Request(i, np.arange(i * 1000, i * 1000 + 300), 101))
    finished = drain(scheduler)
    assert sorted(len(run.tokens) for run in finished) == [401] * 4
    cache.check_invariants()


@pytest.mark.slow
def test_the_best_split_runs_the_planned_number_of_requests_at_once():
    plan = plan_memory(GEMMA, "2GiB", context=8192).contexts[0]
    scheduler = Scheduler(gemma(num_blocks=plan.best_num_blocks), headroom=0.0)
    for i in range(plan.best_requests + 4):
        scheduler.add(Request(i, np.arange(i * 10_000, i * 10_000 + 8150), 40))
    most = 0

    def observe(step):
        nonlocal most
        most = max(most, scheduler.num_running)

    assert len(drain(scheduler, observe)) == plan.best_requests + 4
    assert plan.best_requests <= most <= plan.best_requests + 4


@pytest.mark.slow
def test_a_memory_divided_by_the_cache_runs_the_planned_number_of_requests():
    plan = plan_memory(GEMMA, "2GiB", context=8192)
    planned = plan.contexts[0].requests
    scheduler = Scheduler(gemma(memory="2GiB"), headroom=0.0)
    for i in range(planned):
        scheduler.add(Request(i, np.arange(i * 10_000, i * 10_000 + 8150), 40))
    most = 0

    def observe(step):
        nonlocal most
        most = max(most, scheduler.num_running)

    drain(scheduler, observe)
    assert most == planned > 2
    assert scheduler.num_preemptions == 0


def test_a_prompt_is_cut_to_what_its_window_holds_at_once():
    # 6 blocks of the window: 9 keys before a step of 12 tokens lie in at most 6 blocks.
    cache = small([7, 41])
    assert (cache.max_length, cache.max_step_tokens) == (160, 12)
    scheduler = Scheduler(cache, max_tokens_per_step=100)
    run = scheduler.add(request(0, 150, 5))
    counts = []
    drain(scheduler, lambda step: counts.append(step.counts[0]))
    assert list(run.tokens) == expected(run.request, 0)
    assert counts[0] == 24
    assert counts[1:-5] == [12] * 10  # the next token sees keys of three blocks; three are left
    assert counts[-5:] == [6, 1, 1, 1, 1]
    assert scheduler.num_preemptions == 0


def test_a_request_longer_than_the_group_without_a_window_is_refused():
    scheduler = Scheduler(small([7, 41]))
    with pytest.raises(RequestError, match="the cache holds 160 for one sequence"):
        scheduler.add(request(0, 160, 2))
    scheduler.add(request(1, 160, 1))
    with pytest.raises(RequestError, match="the cache holds 12 for one sequence"):
        Scheduler(small([4, 41])).add(request(0, 13, 1))


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("seed", range(6 if is_full() else 4))
def test_random_requests_finish_with_their_tokens(seed, prefix_cache, is_swapped):
    rng = np.random.default_rng(seed)
    cache = small([int(rng.integers(5, 14)), int(rng.integers(16, 40))], prefix_cache=prefix_cache)
    space = SwapSpace(cache, num_blocks=20) if is_swapped else None
    scheduler = Scheduler(cache, max_tokens_per_step=int(rng.integers(8, 60)), swap_space=space)
    runs = []
    for i in range(12):
        new = int(rng.integers(1, 20))
        prompt = int(rng.integers(1, scheduler.max_length - new))
        shared = int(rng.integers(0, prompt))
        runs.append(scheduler.add(request(i, prompt, new, samples=int(rng.integers(1, 3)), shared=shared)))

    def observe(step):
        cache.check_invariants()
        scheduler.check_invariants()

    finished = drain(scheduler, observe, steps_max=5000)
    assert len(finished) == sum(run.request.samples for run in runs)
    for run in finished:
        assert list(run.tokens) == expected(run.request, run.sample)


def test_blocks_of_a_window_held_outside_stop_the_scheduler_with_an_error():
    cache = small([7, 41])
    scheduler = Scheduler(cache)
    other = cache.add_sequence(range(20))
    cache.commit(cache.prepare([other], 20))
    scheduler.add(request(1, 100, 2))
    with pytest.raises(OutOfBlocks, match="blocks are held outside the scheduler"):
        scheduler.schedule()
    cache.remove(other)
    drain(scheduler)
