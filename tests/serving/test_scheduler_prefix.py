"""The scheduler with a prefix cache: pinned prefixes, repeated matches, preemption, and statistics of reuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.errors import ShapeError, UnsupportedDtype
from pagecore.serving.scheduling.request import Request, State
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import AttentionSpec
from tests.faults import is_full
from tests.serving.fake_cache import FakeCache
from tests.serving.prefixes import count_hits
from tests.serving.runs import drain, expected, request, sampled


def advance(scheduler, steps=1):
    """Run some steps; return the finished runs."""
    finished = []
    for _ in range(steps):
        step = scheduler.schedule()
        scheduler.commit(step)
        finished += scheduler.accept(step, sampled(step))
    return finished


def texts(prompts):
    """Return requests whose prompts begin with a part of one of two common texts."""
    return [
        Request(number, np.append(np.arange(shared) + 1000 * family, np.arange(own) + 100 * number + 5000), new)
        for number, (family, shared, own, new) in enumerate(prompts)
    ]


PROMPTS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12
)


@pytest.mark.slow
@settings(max_examples=150 if is_full() else 80, deadline=None)
@given(prompts=PROMPTS, block_size=st.integers(1, 7), is_real=st.booleans(), budget=st.sampled_from([3, 500]))
def test_sequential_requests_reuse_the_blocks_of_a_dictionary_of_prefixes(prompts, block_size, is_real, budget):
    requests = texts(prompts)
    blocks = 1 + sum(-(-one.num_slots // block_size) for one in requests)
    if is_real:
        cache = PagedKVCache(AttentionSpec(1, 8), block_size=block_size, num_blocks=blocks, device="none")
    else:
        cache = FakeCache(blocks, block_size)
    scheduler = Scheduler(cache, max_running=1, max_tokens_per_step=budget)
    for one in requests:
        scheduler.add(one)
    computed = 0

    def observe(step):
        nonlocal computed
        computed += sum(step.counts)

    finished = drain(scheduler, observe)
    query, hits = count_hits([(one.prompt, expected(one, 0)[: one.num_slots]) for one in requests], block_size)
    reuse = scheduler.reuse
    assert (reuse.prefix_query_blocks, reuse.prefix_hit_blocks) == (query, hits)
    assert reuse.prefix_query_tokens == sum(len(one.prompt) for one in requests)
    assert reuse.prefix_hit_tokens == reuse.saved_prefill_tokens == hits * block_size
    assert sum(run.num_reused_tokens for run in finished) == reuse.prefix_hit_tokens
    assert computed + reuse.prefix_hit_tokens == sum(one.num_slots for one in requests)


@pytest.mark.parametrize(("most", "counts"), [(0, [20]), (7, [16]), (8, [12]), (None, [4])])
def test_a_request_reuses_at_most_the_tokens_that_it_allows(most, counts):
    scheduler = Scheduler(FakeCache(21, block_size=4), share_prompts=True)
    prompt = np.arange(20)
    scheduler.add(Request(0, prompt, 0))
    advance(scheduler)
    # The second one computes what the first one may not reuse, and waits for nothing.
    for number in (1, 2):
        scheduler.add(Request(number, prompt, 0, max_reused_tokens=most))
    step = scheduler.schedule()
    assert step.counts == 2 * counts
    scheduler.commit(step)
    assert [run.num_reused_tokens for run in scheduler.accept(step, [])] == 2 * [20 - counts[0]]


@pytest.mark.parametrize("most", [-1, True, 1.5, 2**40])
def test_a_limit_of_reuse_that_is_no_count_is_refused(most):
    with pytest.raises(ShapeError, match="max_reused_tokens is"):
        Request(0, [1], 1, max_reused_tokens=most)


def test_requests_wait_for_equal_prompts_only_up_to_what_they_may_reuse():
    scheduler = Scheduler(FakeCache(41, block_size=4), share_prompts=True)
    for number, most in enumerate([None, None, 0, 8]):
        scheduler.add(Request(number, np.arange(20), 0, max_reused_tokens=most))
    assert scheduler.schedule().counts == [20, 20]


def test_the_head_of_the_queue_keeps_its_prefix_while_other_prefixes_are_evicted():
    cache = FakeCache(11, block_size=4)
    scheduler = Scheduler(cache, max_tokens_per_step=64, headroom=0.0)
    scheduler.add(request(0, 9, 0, shared=8))
    scheduler.add(request(1, 9, 0))
    advance(scheduler)
    assert (cache.num_available, len(cache.free)) == (10, 6)
    long = scheduler.add(request(2, 24, 9))
    waits = scheduler.add(request(3, 32, 1, shared=8))
    advance(scheduler, 9)
    assert long.state is State.FINISHED
    assert cache.evicted > 0
    advance(scheduler)
    assert (waits.state, waits.num_reused_tokens) == (State.FINISHED, 8)


def test_the_prefix_of_the_head_is_released_before_a_run_is_preempted():
    cache = FakeCache(9, block_size=4)
    scheduler = Scheduler(cache, max_tokens_per_step=64, headroom=0.0)
    scheduler.add(request(0, 9, 0, shared=8))
    advance(scheduler)
    runs = [scheduler.add(request(number, 11, 6)) for number in (1, 2)]
    waits = scheduler.add(request(3, 16, 1, shared=8))
    advance(scheduler)
    assert waits.sequence.num_cached_tokens == 8
    assert scheduler.num_waiting_tokens == 16 - 8
    assert scheduler.holders == (*runs, waits)
    assert scheduler.running == tuple(runs)
    advance(scheduler)
    assert len(cache.evictable) == len(cache.free) == 0
    step = scheduler.schedule()
    # The two runs took the last two blocks, and the head of the queue has none.
    assert waits.held is None
    assert scheduler.num_waiting_tokens == 16
    assert scheduler.holders == scheduler.running
    assert cache.num_available == 0
    scheduler.commit(step)
    scheduler.accept(step, sampled(step))
    assert len(drain(scheduler)) == 3
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("namespace", [None, "tenant"])
def test_a_waiting_run_is_admitted_once_another_run_has_computed_its_prefix(namespace):
    cache = FakeCache(7, block_size=4)
    scheduler = Scheduler(cache, max_tokens_per_step=64, headroom=0.0, share_prompts=False)
    first = scheduler.add(request(0, 16, 5, shared=16, namespace=namespace))
    waits = scheduler.add(request(1, 20, 1, shared=16, namespace=namespace))
    advance(scheduler)
    assert waits.sequence.num_cached_tokens == 0
    assert scheduler.num_waiting_tokens == 20
    step = scheduler.schedule()
    assert step.runs == [first, waits]
    assert step.counts == [1, 4]
    assert (waits.num_reused_tokens, scheduler.num_waiting_tokens) == (16, 0)
    assert len(cache.sequences) == 2
    scheduler.commit(step)
    scheduler.accept(step, sampled(step))
    drain(scheduler)
    assert scheduler.reuse.prefix_query_tokens == 16 + 20


def test_a_waiting_run_reuses_the_tokens_that_another_run_generated():
    scheduler = Scheduler(FakeCache(10, block_size=4), max_tokens_per_step=64, headroom=0.0)
    first = request(0, 8, 5)
    scheduler.add(first)
    scheduler.add(request(1, 4, 5))
    waits = scheduler.add(Request(2, np.append(expected(first, 0)[:12], np.arange(16)), 0))
    assert len(advance(scheduler, 5)) == 2
    assert (waits.state, waits.sequence.num_cached_tokens) == (State.WAITING, 8)
    advance(scheduler)
    assert (waits.state, waits.num_reused_tokens) == (State.FINISHED, 12)


def test_tokens_restored_from_a_swap_space_do_not_count_as_recovered():
    cache = PagedKVCache(AttentionSpec(1, 8), block_size=2, num_blocks=14, device="none")
    space = SwapSpace(cache, num_blocks=40)
    scheduler = Scheduler(cache, max_tokens_per_step=32, headroom=0.0, swap_space=space)
    scheduler.add(request(0, 9, 1, shared=8))
    drain(scheduler)
    for number in (1, 2, 3):
        scheduler.add(request(number, 9, 12, shared=8))
    drain(scheduler)
    assert scheduler.num_swaps == scheduler.num_preemptions > 0
    assert (scheduler.reuse.prefix_hit_tokens, scheduler.reuse.num_recovered_tokens) == (24, 0)


def test_a_longer_match_is_searched_in_the_namespace_of_the_request():
    cache = FakeCache(7, block_size=4)
    scheduler = Scheduler(cache, max_tokens_per_step=64, headroom=0.0)
    scheduler.add(request(0, 16, 5, shared=16, namespace="a"))
    waits = scheduler.add(request(1, 20, 1, shared=16, namespace="b"))
    advance(scheduler, 2)
    assert waits.state is State.WAITING
    drain(scheduler)
    assert waits.num_reused_tokens == 0


@pytest.mark.parametrize(("first", "second", "hits"), [("a", "a", 8), ("a", "b", 0), (None, "a", 0), (1, 1, 8)])
def test_requests_reuse_prefixes_of_their_own_namespace_only(first, second, hits):
    cache = PagedKVCache(AttentionSpec(1, 8), block_size=4, num_blocks=20, device="none")
    scheduler = Scheduler(cache)
    for number, namespace in enumerate((first, second)):
        scheduler.add(request(number, 11, 1, shared=10, namespace=namespace))
        drain(scheduler)
    assert scheduler.reuse.prefix_hit_tokens == hits


@pytest.mark.parametrize("namespace", [[], {}, ("a", [1])])
def test_a_namespace_without_a_hash_is_refused(namespace):
    with pytest.raises(UnsupportedDtype, match="is not hashable"):
        Request(0, [1, 2], 1, namespace=namespace)


def preempting(cache, requests):
    scheduler = Scheduler(cache, max_running=3, max_tokens_per_step=32, headroom=0.0)
    runs = [scheduler.add(one) for one in requests]
    computed = 0

    def observe(step):
        nonlocal computed
        computed += sum(step.counts)

    drain(scheduler, observe)
    assert [list(run.tokens) for run in runs] == [expected(run.request, 0) for run in runs]
    return scheduler, runs, computed


def test_preempted_runs_reuse_their_own_tokens_and_count_them_separately():
    requests = [request(number, 4, 8) for number in range(3)]
    with_reuse, runs, less = preempting(FakeCache(8, block_size=2, max_sequences=3), requests)
    without, _, more = preempting(FakeCache(8, block_size=2, max_sequences=3, prefix_cache=False), requests)
    assert sum(run.num_preemptions for run in runs) == with_reuse.num_preemptions > 0
    reuse = with_reuse.reuse
    assert reuse.num_recovered_tokens > 0
    assert (reuse.prefix_query_tokens, reuse.prefix_hit_tokens) == (12, 0)
    assert reuse.saved_prefill_tokens == reuse.num_recovered_tokens
    assert without.reuse.saved_prefill_tokens == 0
    assert less < more


def test_samples_count_as_one_request():
    scheduler = Scheduler(FakeCache(40, block_size=4))
    scheduler.add(request(0, 10, 3, samples=4, shared=9))
    drain(scheduler)
    scheduler.add(request(1, 10, 3, samples=3, shared=9))
    finished = drain(scheduler)
    reuse = scheduler.reuse
    assert (reuse.prefix_query_tokens, reuse.prefix_hit_tokens) == (20, 8)
    assert (reuse.prefix_query_blocks, reuse.prefix_hit_blocks) == (4, 2)
    assert (reuse.token_hit_rate, reuse.block_hit_rate) == (0.4, 0.5)
    assert [run.num_reused_tokens for run in finished if run.sample == 0] == [8]


def test_rates_without_admissions_are_zero():
    reuse = Scheduler(FakeCache(8)).reuse
    assert reuse.token_hit_rate == reuse.block_hit_rate == 0


def test_the_budget_is_spent_on_uncached_tokens_only():
    cache = FakeCache(30, block_size=4)
    scheduler = Scheduler(cache, max_tokens_per_step=20)
    scheduler.add(request(0, 16, 0, shared=16))
    advance(scheduler)
    for number in (1, 2, 3):
        scheduler.add(request(number, 20, 0, shared=16))
    step = scheduler.schedule()
    assert step.counts == [4, 4, 4]


@pytest.mark.parametrize("namespace", [[], float("nan"), ("a", float("nan"))])
def test_a_namespace_that_cannot_be_compared_is_refused_with_its_request(namespace):
    with pytest.raises(UnsupportedDtype, match="namespace"):
        Request(1, [1, 2, 3], 2, namespace=namespace)
