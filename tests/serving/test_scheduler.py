"""The scheduler over the plain-Python fake cache and over the real cache."""

import gc
from collections import defaultdict
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.errors import InvalidSequence, OutOfBlocks, ShapeError, UnsupportedDtype
from pagecore.serving.scheduling.request import Request, RequestError, State
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import AttentionSpec
from tests.faults import is_full
from tests.serving.fake_cache import FakeCache, FakeSpace
from tests.serving.runs import advance, drain, expected, request, sampled
from tests.together import together


@st.composite
def workloads(draw):
    block_size = draw(st.integers(1, 5))
    num_blocks = draw(st.integers(2, 14))
    max_running = draw(st.integers(1, 6))
    max_tokens = draw(st.integers(1, 24))
    longest = (num_blocks - 1) * block_size
    shared, namespaces = st.sampled_from([0, 0, 3, 8, longest]), st.sampled_from([None, None, "tenant"])
    lengths = st.tuples(st.integers(1, longest + 2), st.integers(0, 12), st.integers(1, 4), shared, namespaces)
    shapes = draw(st.lists(lengths, min_size=1, max_size=12))
    return block_size, num_blocks, max_running, max_tokens, shapes


EVICTABLE = ("lru", "lfu", "fifo", "mru", "filo", "slru")
# Blocks of the swap space, the null block counted; None for a scheduler without one.
SPACES = st.sampled_from([None, 1, 2, 3, 5, 9, 40])


@pytest.mark.slow
@settings(max_examples=600 if is_full() else 150, deadline=None)
@given(
    workload=workloads(),
    headroom=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    swap_blocks=SPACES,
    prefix_cache=st.sampled_from([True, True, False]),
    share_prompts=st.booleans(),
)
def test_every_feasible_request_gets_exactly_its_tokens_and_all_blocks_are_freed(
    workload, headroom, swap_blocks, prefix_cache, share_prompts
):
    block_size, num_blocks, max_running, max_tokens, shapes = workload
    cache = FakeCache(num_blocks, block_size, max_sequences=max_running, prefix_cache=prefix_cache)
    space = None if swap_blocks is None else FakeSpace(cache, swap_blocks)
    scheduler = Scheduler(
        cache, max_running=max_running, max_tokens_per_step=max_tokens, headroom=headroom, swap_space=space,
        share_prompts=share_prompts,
    )  # fmt: skip
    accepted = []
    for number, (prompt, new, samples, *rest) in enumerate(shapes):
        one = request(number, prompt, new, samples, *rest)
        slots = prompt + max(new - 1, 0)
        if slots > (num_blocks - 1) * block_size or samples > min(max_running, max_tokens):
            with pytest.raises(RequestError):
                scheduler.add(one)
        else:
            scheduler.add(one)
            accepted.append(one)

    oldest = {}
    computed = {}

    def observe(step):
        assert sum(step.counts) == step.batch.num_tokens <= max_tokens
        assert len(step.runs) <= max_running
        assert step.counts[: step.num_decodes] == [1] * step.num_decodes
        # Runs are in order of arrival, unless some wait for equal prompts. The first has a token in every step, and
        # keeps its sequence while it runs.
        ages = [run.request.id for run in scheduler.running]
        assert share_prompts or ages == sorted(ages)
        head = scheduler.running[0]
        assert head in step.runs
        assert oldest.setdefault(head, head.sequence) is head.sequence
        assert not any(run.sequence.is_swapped for run in scheduler.running)
        # Only the next run of the queue may hold a sequence in the cache, with its cached prefix and no other blocks.
        # The swap space holds only sequences of waiting runs.
        scheduler.check_invariants()
        waiting = list(scheduler.waiting)
        pinned = [run for run in waiting if run.held and not run.held.is_swapped]
        assert pinned in ([], waiting[:1]) or (share_prompts and len(pinned) == 1)
        for run in pinned:
            assert len(run.held.blocks) * block_size == run.held.num_computed_tokens == run.held.num_cached_tokens
        saved = [run for run in waiting if run.held and run.held.is_swapped]
        assert set(space.held if space else ()) == {run.held for run in saved}
        assert scheduler.num_waiting_tokens == sum(run.num_tokens_left for run in waiting)
        assert all(left >= 1 for left in (run.num_tokens_left for run in waiting))
        # Computed tokens that the cache or the swap space holds are not recomputed.
        for run in (*scheduler.running, *saved):
            assert run.held.num_computed_tokens >= computed.get(run.held, 0)
            computed[run.held] = run.held.num_computed_tokens

    finished = drain(scheduler, observe)
    by_request = defaultdict(dict)
    for run in finished:
        assert run.state is State.FINISHED
        assert run.sample not in by_request[run.request.id]
        by_request[run.request.id][run.sample] = list(run.tokens)
    assert by_request == {
        one.id: {sample: expected(one, sample) for sample in range(one.samples if one.max_new_tokens else 1)}
        for one in accepted
    }
    assert cache.num_available == num_blocks - 1
    assert prefix_cache or len(cache.free) == num_blocks - 1
    assert not cache.sequences
    assert not cache.holds.total()
    assert not (space and space.held)
    reuse = scheduler.reuse
    assert reuse.prefix_query_tokens == sum(len(one.prompt) for one in accepted)
    assert reuse.prefix_query_blocks == sum((len(one.prompt) - 1) // block_size for one in accepted)
    assert reuse.prefix_hit_tokens == reuse.prefix_hit_blocks * block_size
    assert reuse.prefix_hit_blocks <= (reuse.prefix_query_blocks if prefix_cache else 0)
    assert reuse.num_recovered_tokens == 0 or (prefix_cache and scheduler.num_preemptions > 0)
    assert scheduler.num_running == scheduler.num_waiting == scheduler.num_waiting_tokens == 0
    assert 0 <= scheduler.num_swaps <= scheduler.num_preemptions
    if swap_blocks in (None, 1):
        assert scheduler.num_swaps == 0


@pytest.mark.slow
@settings(max_examples=300 if is_full() else 75, deadline=None)
@given(
    workload=workloads(),
    window=st.integers(1, 9),
    swap_blocks=SPACES.filter(lambda blocks: blocks != 1),
    policy=st.sampled_from([None, *EVICTABLE]),
)
def test_the_real_cache_with_two_groups_serves_all_requests_and_frees_all_blocks(workload, window, swap_blocks, policy):
    block_size, num_blocks, max_running, max_tokens, shapes = workload
    specs = [AttentionSpec(1, 8), AttentionSpec(1, 8, window=window)]
    cache = PagedKVCache(
        specs,
        block_size=block_size,
        num_blocks=num_blocks,
        max_sequences=max_running,
        device="none",
        prefix_cache=policy is not None,
        eviction_policy=policy or "lru",
    )
    space = None if swap_blocks is None else SwapSpace(cache, num_blocks=swap_blocks)
    scheduler = Scheduler(cache, max_running=max_running, max_tokens_per_step=max_tokens, swap_space=space)
    accepted = [request(number, *shape) for number, shape in enumerate(shapes)]
    accepted = [
        one for one in accepted if one.num_slots <= scheduler.max_length and one.samples <= scheduler.max_running
    ]
    for one in accepted:
        scheduler.add(one)
    finished = drain(scheduler, lambda step: cache.check_invariants())
    texts = {(run.request.id, run.sample): run.tokens.tolist() for run in finished}
    assert texts == {
        (one.id, sample): expected(one, sample)
        for one in accepted
        for sample in range(one.samples if one.max_new_tokens else 1)
    }
    assert cache.num_available == num_blocks - 1
    assert cache.stats().num_used_blocks == cache.num_sequences == 0
    assert cache.stats().num_swapped_blocks == 0
    cache.clear_prefix_cache()
    assert cache.stats().num_free_blocks == 2 * (num_blocks - 1)


def test_each_step_is_full_while_there_is_prompt_left():
    scheduler = Scheduler(FakeCache(64), max_running=8, max_tokens_per_step=10)
    for number in range(3):
        scheduler.add(request(number, 7, 1))
    totals = []
    drain(scheduler, lambda step: totals.append(sum(step.counts)))
    assert totals == [10, 10, 1]


def test_decodes_come_before_prompts():
    scheduler = Scheduler(FakeCache(64), max_running=8, max_tokens_per_step=6)
    scheduler.add(request(0, 4, 8))
    scheduler.add(request(1, 12, 8))
    steps = []
    drain(scheduler, lambda step: steps.append((step.num_decodes, list(step.counts))))
    assert steps[:4] == [(0, [4, 2]), (1, [1, 5]), (1, [1, 5]), (2, [1, 1])]


def test_the_youngest_run_is_preempted_and_resumes_first():
    cache = FakeCache(7, block_size=2, max_sequences=3)
    scheduler = Scheduler(cache, max_running=3, max_tokens_per_step=32, headroom=0.0)
    runs = [scheduler.add(request(number, 4, 8)) for number in range(3)]
    finished = drain(scheduler)
    assert [run.request.id for run in finished] == [0, 1, 2]
    assert scheduler.num_preemptions > 0
    assert [list(run.tokens) for run in runs] == [expected(run.request, 0) for run in runs]


def test_a_request_that_fits_alone_to_the_last_slot_finishes():
    cache = FakeCache(4, block_size=4)
    scheduler = Scheduler(cache, max_running=2, max_tokens_per_step=8)
    scheduler.add(request(0, 9, 4))
    (run,) = drain(scheduler)
    assert list(run.generated) == expected(run.request, 0)[9:]


def test_generated_tokens_are_those_so_far():
    cache = FakeCache(40)
    scheduler = Scheduler(cache, swap_space=FakeSpace(cache, 40))
    run = scheduler.add(request(0, 9, 6))
    whole, seen = expected(run.request, 0)[9:], []
    while not run.has_ended:
        seen.append(run.generated.tolist())
        advance(scheduler)
        if run.num_generated == 3:
            scheduler.preempt_all()
            assert run.generated.tolist() == whole[:3]
    assert [*seen, run.generated.tolist()] == [whole[:number] for number in range(7)]


@pytest.mark.parametrize(("prompt", "new", "samples"), [(9, 5, 1), (13, 0, 1), (1, 1, 3)])
def test_a_request_that_can_never_fit_is_refused_at_once(prompt, new, samples):
    scheduler = Scheduler(FakeCache(4, block_size=4), max_running=2, max_tokens_per_step=8)
    with pytest.raises(RequestError, match="request 0 "):
        scheduler.add(request(0, prompt, new, samples))
    assert scheduler.num_waiting == 0
    assert scheduler.schedule() is None


def test_the_length_of_rows_limits_a_request():
    scheduler = Scheduler(FakeCache(64, block_size=4, max_tokens_per_sequence=8), max_running=2)
    scheduler.add(request(0, 8, 1))
    with pytest.raises(RequestError, match="holds 8"):
        scheduler.add(request(1, 8, 2))


def test_samples_share_the_blocks_of_their_prompt():
    cache = FakeCache(8, block_size=4)
    scheduler = Scheduler(cache, max_running=4, max_tokens_per_step=32)
    scheduler.add(request(0, 10, 3, samples=4))
    step = scheduler.schedule()
    assert [run.sample for run in step.outputs] == [0, 1, 2, 3]
    scheduler.commit(step)
    assert cache.num_available == 7 - 3
    assert scheduler.num_forks == 3
    scheduler.accept(step, sampled(step))
    drain(scheduler)
    assert cache.copies > 0


def test_an_abandoned_step_is_scheduled_again():
    cache = FakeCache(32)
    scheduler = Scheduler(cache, max_running=4, max_tokens_per_step=8)
    scheduler.add(request(0, 6, 4, samples=2))
    scheduler.abandon(scheduler.schedule())
    finished = drain(scheduler)
    assert sorted(list(run.tokens) for run in finished) == sorted(expected(request(0, 6, 4), s) for s in range(2))


def test_blocks_held_outside_raise_an_error_instead_of_an_endless_wait():
    cache = FakeCache(4, block_size=4)
    scheduler = Scheduler(cache, max_running=2, max_tokens_per_step=8)
    scheduler.add(request(0, 12, 1))
    cache.free.pop()
    with pytest.raises(OutOfBlocks, match="held outside"):
        scheduler.schedule()


def test_a_request_that_is_alone_may_use_the_headroom():
    cache = FakeCache(5, block_size=4)
    scheduler = Scheduler(cache, max_running=2, max_tokens_per_step=8, headroom=1.0)
    scheduler.add(request(0, 12, 1))
    cache.free.pop()
    assert len(drain(scheduler)) == 1


def test_blocks_lost_while_running_are_an_error():
    cache = FakeCache(4, block_size=4)
    scheduler = Scheduler(cache, max_running=2, max_tokens_per_step=8)
    scheduler.add(request(0, 12, 1))
    step = scheduler.schedule()
    scheduler.commit(step)
    scheduler.accept(step, [])
    cache.lose()
    with pytest.raises(OutOfBlocks):
        scheduler.schedule()


@pytest.mark.parametrize(
    "ids", [[], [1, 2], [[1, 2]], [[]], [[1], [2]], [[[1]]], np.zeros((1, 0), int), np.zeros((1, 1, 1), int)]
)
def test_accept_requires_one_id_for_each_output(ids):
    scheduler = Scheduler(FakeCache(32), max_running=4)
    scheduler.add(request(0, 6, 4))
    step = scheduler.schedule()
    scheduler.commit(step)
    with pytest.raises(ShapeError, match=r"one (id )?for each of 1|give 1 ids|has 1 accepted|token ids \[n\]"):
        scheduler.accept(step, ids)
    assert step.is_committed


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([1.7], UnsupportedDtype),
        ([None], UnsupportedDtype),
        (["7"], UnsupportedDtype),
        ([True], UnsupportedDtype),
        ([2**31], ShapeError),
        (np.array([2**40 + 5]), ShapeError),
        (np.array([2**31], np.uint32), ShapeError),
    ],
)
def test_ids_that_int32_cannot_hold_are_refused_and_nothing_is_changed(ids, error):
    scheduler = Scheduler(FakeCache(8))
    scheduler.add(request(0, 3, 2))
    step = scheduler.schedule()
    scheduler.commit(step)
    with pytest.raises(error):
        scheduler.accept(step, ids)
    (run,) = scheduler.running
    assert (run.num_generated, len(run.sequence.tokens)) == (0, 3)
    assert scheduler.accept(step, [5]) == []
    assert run.sequence.tokens[-1] == 5


def test_a_step_is_accepted_once_and_only_after_its_commit():
    scheduler = Scheduler(FakeCache(8))
    run = scheduler.add(request(0, 3, 3, samples=2))
    step = scheduler.schedule()
    with pytest.raises(InvalidSequence, match="commit it"):
        scheduler.accept(step, [1, 2])
    scheduler.commit(step)
    scheduler.accept(step, [1, 2])
    with pytest.raises(InvalidSequence, match="once"):
        scheduler.accept(step, [1, 2])
    assert run.num_generated == 1
    assert len(drain(scheduler)) == 2


@together(
    ("prompt", "new", "samples", "error"),
    [
        ([], 1, 1, ShapeError),
        ([[1]], 1, 1, ShapeError),
        ([[1], [2, 3]], 1, 1, ShapeError),
        ([0.5], 1, 1, UnsupportedDtype),
        ([2**31], 1, 1, ShapeError),
        ([1], -1, 1, ShapeError),
        ([1], 1, 0, ShapeError),
        ([1], 1.5, 1, ShapeError),
        ([1], True, 1, ShapeError),
    ],
)
def test_a_malformed_request_is_refused(prompt, new, samples, error):
    with pytest.raises(error):
        Request(0, prompt, new, samples)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_running": 0},
        {"max_running": 1.5},
        {"max_running": None},
        {"max_tokens_per_step": 0},
        {"max_tokens_per_step": "8"},
        {"headroom": -0.1},
        {"headroom": 2},
        {"headroom": float("nan")},
        {"headroom": "0.1"},
    ],
)
def test_invalid_limits_are_refused(limits):
    with pytest.raises(ShapeError):
        Scheduler(FakeCache(8), **limits)


def test_runs_and_requests_can_be_keys_of_weak_mappings():
    scheduler = Scheduler(FakeCache(8))
    asked = Request("chat 7", [1, 2, 3], 2)
    of_runs, of_requests = WeakKeyDictionary(), WeakKeyDictionary()
    of_runs[scheduler.add(asked)], of_requests[asked] = 1, 2
    assert (len(of_runs), len(of_requests)) == (1, 1)
    del asked
    (run,) = drain(scheduler)
    del run, scheduler
    gc.collect()
    assert (len(of_runs), len(of_requests)) == (0, 0)
