"""Early ends, equal prompts, future tokens, policies and limits of the scheduler, and equal decisions of ranks."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagecore.cache import PagedKVCache
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.serving.scheduling.queue import Queue
from pagecore.serving.scheduling.request import Request, State
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import AttentionSpec
from tests.serving.fake_cache import FakeCache
from tests.serving.runs import drain, expected, request, sampled
from tests.serving.served import Server, answer

ROOT = Path(__file__).parents[2]


def advance(scheduler, steps=1):
    """Run some steps; return the runs of each."""
    runs = []
    for _ in range(steps):
        step = scheduler.schedule()
        scheduler.commit(step)
        scheduler.accept(step, sampled(step))
        runs.append(step.runs)
    return runs


class OnDevice:
    """A tensor that NumPy cannot read, like one of torch on a CUDA device."""

    def __array__(self, *_arguments, **_options):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


# -- ending early -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_id_ends_a_run_unless_it_is_ignored(ignore_eos, overlap):
    plain = Request(0, [1, 2, 3], 12)
    stop = answer(plain)[7]
    server = Server(overlap=overlap)
    one = Request(0, [1, 2, 3], 12, stop_token_ids={stop, 2000}, ignore_eos=ignore_eos)
    run = server.add(one)
    other = server.add(Request(1, [4, 5], 12))
    server.drain()
    whole = answer(plain)
    assert run.tokens.tolist() == (whole if ignore_eos else whole[: whole.index(stop, 3) + 1])
    assert other.num_generated == 12
    assert run.state is State.FINISHED
    server.check_empty()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("least", [0, 1, 4, 5, 12])
def test_stop_ids_end_nothing_before_the_minimum(least, overlap):
    whole = answer(Request(0, [1, 2, 3], 12))
    server = Server(overlap=overlap, num_blocks=9)  # some are preempted
    runs = [
        server.add(Request(number, [1, 2, 3], 12, stop_token_ids=whole[4:], min_new_tokens=least)) for number in (0, 1)
    ]
    server.drain()
    assert [run.num_generated for run in runs] == [max(2, least)] * 2
    server.check_empty()


def test_flags_end_runs_with_their_id_and_free_their_blocks():
    cache = FakeCache(20, prefix_cache=False)
    scheduler = Scheduler(cache)
    runs = [scheduler.add(request(number, 5, 8)) for number in range(3)]
    step = scheduler.schedule()
    scheduler.commit(step)
    assert scheduler.accept(step, [7, 8, 9], np.array([True, False, True])) == [runs[0], runs[2]]
    assert [run.tokens[5:].tolist() for run in (runs[0], runs[2])] == [[7], [9]]
    assert len(cache.sequences) == 1
    assert cache.num_available == 19 - 2


@pytest.mark.parametrize(
    ("flags", "error", "reason"),
    [
        ([True], ShapeError, "finished has shape (1,); expected one flag for each of 2 outputs"),
        ([[True, False]], ShapeError, "finished has shape (1, 2)"),
        ([[True], [False, True]], ShapeError, "finished is not a 1-D array of booleans"),
        ([0, 1], UnsupportedDtype, "finished has dtype int64; expected booleans"),
        (OnDevice(), ShapeError, "finished is not a 1-D array of booleans: can't convert"),
    ],
)
def test_wrong_flags_are_refused_and_change_nothing(flags, error, reason):
    scheduler = Scheduler(FakeCache(20))
    for number in range(2):
        scheduler.add(request(number, 3, 3))
    step = scheduler.schedule()
    scheduler.commit(step)
    with pytest.raises(error) as caught:
        scheduler.accept(step, [1, 2], flags)
    assert reason in str(caught.value)
    assert scheduler.accept(step, sampled(step), [False, False]) == []


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"stop_token_ids": [1.5]}, UnsupportedDtype, "stop_token_ids has dtype float64"),
        ({"stop_token_ids": ["</s>"]}, UnsupportedDtype, "stop_token_ids has dtype"),
        ({"stop_token_ids": [True]}, UnsupportedDtype, "stop_token_ids has dtype bool"),
        ({"stop_token_ids": 3}, ShapeError, "stop_token_ids has shape"),
        ({"stop_token_ids": None}, ShapeError, "stop_token_ids has shape"),
        ({"stop_token_ids": OnDevice()}, ShapeError, "stop_token_ids is not a 1-D array of token ids: can't convert"),
        ({"stop_token_ids": "12"}, ShapeError, "stop_token_ids has shape"),
        ({"stop_token_ids": [2**31]}, ShapeError, "stop_token_ids has token id 2147483648"),
        ({"min_new_tokens": -1}, ShapeError, "min_new_tokens is -1; expected an integer"),
        ({"min_new_tokens": 2}, ShapeError, "min_new_tokens is 2, but max_new_tokens is 1"),
        ({"ignore_eos": 1}, UnsupportedOption, "ignore_eos is 1"),
        ({"priority": "high"}, ShapeError, "priority is 'high'; expected an integer"),
        ({"priority": True}, ShapeError, "priority is True"),
        ({"priority": 0.5}, ShapeError, "priority is 0.5"),
        ({"priority": None}, ShapeError, "priority is None"),
    ],
)
def test_wrong_options_of_a_request_are_refused(options, error, reason):
    with pytest.raises(error) as caught:
        Request(0, [1], 1, **options)
    assert reason in str(caught.value)


def test_stop_ids_are_a_sorted_tuple():
    for given in ([3, 1, 3], (3, 1), {1, 3}, np.array([3, 1]), range(1, 4, 2), {3: "a", 1: "b"}.keys(), iter([3, 1])):
        assert Request(0, [1], 1, stop_token_ids=given).stop_token_ids == (1, 3)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int64])
def test_numbers_of_numpy_are_kept_as_integers_of_python(kind):
    one = Request(0, np.arange(200), kind(100), kind(1), priority=kind(3))
    assert [type(value) for value in (one.max_new_tokens, one.samples, one.priority)] == [int] * 3
    scheduler = Scheduler(FakeCache(200), policy="priority", max_running=1)
    runs = [scheduler.add(Request(number, [1, 2], 3, priority=kind(number))) for number in (0, 1)]
    assert scheduler.schedule().runs == [runs[1]]
    assert scheduler.add(one).last_length == 300


# -- equal prompts ----------------------------------------------------------------------------------------------------


def heads(scheduler, number=16, own=27, new=2):
    return [
        scheduler.add(Request(one, np.append(np.arange(320), np.full(own, 1000 + one)), new)) for one in range(number)
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_head_of_prompts_that_arrive_together_is_computed_once(overlap):
    server = Server(num_blocks=1000, block_size=16, max_sequences=16, overlap=overlap)
    runs = heads(server.scheduler)
    server.drain()
    assert server.computed == 752 + 16
    assert [run.tokens.tolist() for run in runs] == [answer(run.request) for run in runs]
    assert server.scheduler.reuse.prefix_hit_tokens == 15 * 320


def test_without_sharing_each_prompt_is_computed():
    scheduler = Scheduler(FakeCache(1000, 16, max_sequences=16), share_prompts=False)
    heads(scheduler)
    step = scheduler.schedule()
    assert step.counts == [347] * 16


def test_requests_after_the_waiting_ones_are_not_delayed():
    scheduler = Scheduler(FakeCache(200, 16, max_sequences=16))
    first, second = heads(scheduler, 2)
    other = scheduler.add(request(7, 20, 3))
    assert advance(scheduler, 2) == [[first, other], [first, other, second]]
    assert (second.num_reused_tokens, other.num_reused_tokens) == (320, 0)


def test_a_request_waits_for_each_chunk_of_the_common_head():
    scheduler = Scheduler(FakeCache(200, 16, max_sequences=16), chunked_prefill_size=96)
    first, second = heads(scheduler, 2)
    rows = advance(scheduler, 5)
    assert rows[:4] == [[first]] * 4
    assert rows[4] == [first, second]
    assert second.num_reused_tokens == 320


@pytest.mark.parametrize("namespace", [None, "tenant"])
def test_requests_wait_only_for_prompts_of_their_namespace(namespace):
    scheduler = Scheduler(FakeCache(50))
    for number, space in enumerate(("tenant", namespace)):
        scheduler.add(request(number, 12, 2, shared=9, namespace=space))
    assert len(scheduler.schedule().runs) == (1 if namespace else 2)


def test_a_request_waits_once_where_the_blocks_cannot_be_reused():
    class Forgetful(FakeCache):
        """A cache that publishes nothing, like one of states without a checkpoint."""

        def _publish(self, sequence):
            pass

    scheduler = Scheduler(Forgetful(200, 16, max_sequences=16))
    runs = heads(scheduler, 5)
    assert advance(scheduler, 2) == [runs[:1], runs]


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_wait_again_after_an_abandoned_step(overlap):
    scheduler = Scheduler(FakeCache(500, 16, max_sequences=16), overlap=overlap)
    runs = heads(scheduler, 4)
    for _ in range(3):
        step = scheduler.schedule()
        assert step.runs == runs[:1]
        scheduler.abandon(step)
    assert advance(scheduler, 2) == [runs[:1], runs]
    assert [run.num_reused_tokens for run in runs] == [0, 320, 320, 320]


def test_requests_wait_again_if_the_step_was_not_ready():
    cache = FakeCache(20, block_size=2, max_sequences=4)
    scheduler = Scheduler(cache, overlap=True, headroom=0.0)
    old = scheduler.add(request(0, 2, 9))
    step = scheduler.schedule()
    scheduler.commit(step)
    prompts = [scheduler.add(Request(number, np.append(np.arange(100, 106), number), 1)) for number in (1, 2)]
    prepare, cache.try_prepare = cache.try_prepare, lambda *_, **__: None
    assert scheduler.schedule() is None
    cache.try_prepare = prepare
    scheduler.accept(step, sampled(step))
    assert scheduler.schedule().runs == [old, prompts[0]]


def test_a_step_delays_at_most_as_many_requests_as_may_run():
    scheduler = Scheduler(FakeCache(200, 16, max_sequences=4), max_running=4)
    runs = heads(scheduler, 9)
    other = scheduler.add(request(99, 20, 3))
    added, add_sequence = [], scheduler.cache.add_sequence
    scheduler.cache.add_sequence = lambda *given, id, **options: (
        added.append(id) or add_sequence(*given, id=id, **options)
    )
    assert scheduler.schedule().runs == runs[:1]
    assert added == runs[:5]
    assert other.num_generated == 0


# -- future tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("conservativeness", "first"), [(1.0, 0.7), (1.3, 0.7 * 1.3), (2, 1.0), (0.5, 0.35)])
def test_the_ratio_decays_linearly_to_a_share_of_its_start_in_600_steps(conservativeness, first):
    scheduler = Scheduler(FakeCache(4000), new_token_ratio=0.7, conservativeness=conservativeness)
    scheduler.add(request(0, 3, 800))
    seen = []
    drain(scheduler, lambda step: seen.append(scheduler.new_token_ratio))
    first = min(first, 1.0)
    assert seen[0] == pytest.approx(first - first * 0.86 / 600)
    assert seen[299] == pytest.approx(first * (1 - 0.86 / 2))
    assert seen[598] > seen[599] == pytest.approx(first * 0.14)
    assert seen[-1] == seen[600] == scheduler.figures().new_token_ratio == pytest.approx(first * 0.14)


@pytest.mark.parametrize(("ratio", "ignore_eos", "admitted"), [(None, False, 4), (0.5, False, 2), (0.5, True, 1)])
def test_admission_leaves_room_for_future_tokens(ratio, ignore_eos, admitted):
    # 160 slots; a request has 8 tokens of prompt and generates up to 100.
    cache = FakeCache(41, block_size=4, max_sequences=8)
    scheduler = Scheduler(cache, headroom=0.0, new_token_ratio=ratio, max_running=4)
    for number in range(4):
        scheduler.add(Request(number, np.arange(8) + 100 * number, 100, ignore_eos=ignore_eos))
    assert len(scheduler.schedule().runs) == admitted


def test_a_run_alone_is_admitted_whatever_it_may_generate():
    scheduler = Scheduler(FakeCache(4, block_size=4), headroom=1.0, new_token_ratio=1.0)
    run = scheduler.add(request(0, 9, 4))
    assert drain(scheduler) == [run]


def test_retraction_takes_the_run_with_the_fewest_generated_tokens_and_sets_the_ratio():
    cache = FakeCache(13, block_size=2, max_sequences=4, prefix_cache=False)
    scheduler = Scheduler(cache, headroom=0.0, new_token_ratio=0.0)
    old = scheduler.add(request(0, 3, 12))
    advance(scheduler, 2)
    long, short = scheduler.add(request(1, 6, 12)), scheduler.add(request(2, 4, 12))
    while not scheduler.num_preemptions:
        advance(scheduler)
    # Both generated the same number of tokens: the longer prompt gave way, although it came first.
    assert scheduler.running == (old, short)
    assert scheduler.waiting == (long,)
    generated = old.num_generated + short.num_generated - 2  # before the step that retracted
    assert scheduler.new_token_ratio == pytest.approx(min(1.0, (generated + 20 * 2) / (24 + 1)))
    assert scheduler.new_token_ratio == 1.0
    assert len(drain(scheduler)) == 3
    assert list(long.tokens) == expected(long.request, 0)


def test_the_ratio_after_a_retraction_counts_what_the_remaining_runs_generated():
    cache = FakeCache(26, block_size=2, max_sequences=4, prefix_cache=False)
    scheduler = Scheduler(cache, headroom=0.0, new_token_ratio=0.0)
    runs = [scheduler.add(Request(number, np.arange(6), 40, ignore_eos=False)) for number in range(3)]
    before = 0
    while not scheduler.num_preemptions:
        before = sum(run.num_generated for run in scheduler.running[:2])
        advance(scheduler)
    assert len(scheduler.running) == 2
    assert scheduler.new_token_ratio == pytest.approx((before + 40) / 81)
    assert scheduler.new_token_ratio < 1
    assert len(drain(scheduler)) == len(runs)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"new_token_ratio": 1.1}, ShapeError, "new_token_ratio is 1.1; expected a share"),
        ({"new_token_ratio": -0.1}, ShapeError, "new_token_ratio is -0.1"),
        ({"new_token_ratio": float("nan")}, ShapeError, "new_token_ratio is nan"),
        ({"new_token_ratio": "0.7"}, ShapeError, "new_token_ratio is '0.7'; expected a number"),
        ({"conservativeness": -1}, ShapeError, "conservativeness is -1.0"),
        ({"conservativeness": float("inf")}, ShapeError, "conservativeness is inf"),
        ({"policy": "sjf"}, UnsupportedOption, "policy is 'sjf'; expected one of fcfs, lpm, priority"),
        ({"policy": None}, UnsupportedOption, "policy is None"),
        ({"policy": ["fcfs"]}, UnsupportedOption, "policy is"),
        ({"max_wait_steps": 0}, ShapeError, "max_wait_steps is 0"),
        ({"max_prefill_tokens": 0}, ShapeError, "max_prefill_tokens is 0"),
        ({"chunked_prefill_size": 1.5}, ShapeError, "chunked_prefill_size is 1.5"),
        ({"share_prompts": 1}, UnsupportedOption, "share_prompts is 1"),
        ({"preemption_threshold": 1}, UnsupportedOption, "given with the policy 'fcfs'; it needs 'priority'"),
        ({"preemption_threshold": -1, "policy": "priority"}, ShapeError, "preemption_threshold is -1"),
        ({"preemption_threshold": True, "policy": "lpm"}, UnsupportedOption, "it needs 'priority'"),
        ({"preemption_threshold": 0.5, "policy": "priority"}, ShapeError, "preemption_threshold is 0.5"),
    ],
)
def test_wrong_options_of_a_scheduler_are_refused(options, error, reason):
    with pytest.raises(error) as caught:
        Scheduler(FakeCache(8), **options)
    assert reason in str(caught.value)


# -- policies and limits ----------------------------------------------------------------------------------------------


def test_the_longest_cached_prefix_goes_first_and_is_looked_up_again():
    cache = FakeCache(100, block_size=4)
    scheduler = Scheduler(cache, policy="lpm", max_running=1)
    scheduler.add(request(0, 17, 1, shared=16))
    drain(scheduler)
    texts = [np.arange(20) + 900, np.append(np.arange(5000, 5008), np.arange(9)), np.arange(5000, 5016)]
    texts.append(np.append(texts[0], [1, 2, 3]))
    runs = [scheduler.add(Request(number, text, 1)) for number, text in enumerate(texts, start=1)]
    # Matches of 0, 8, 12 and 0 tokens; when the first run has computed its prompt, the last one finds 20.
    assert advance(scheduler, 2) == [[runs[2]], [runs[1]]]
    late = scheduler.add(request(9, 8, 1))
    assert advance(scheduler, 3) == [[runs[0]], [runs[3]], [late]]
    assert runs[3].num_reused_tokens == 20


def test_the_largest_priority_goes_first_and_the_smallest_is_preempted():
    cache = FakeCache(9, block_size=2, max_sequences=3, prefix_cache=False)
    scheduler = Scheduler(cache, policy="priority", max_running=2, headroom=0.0)
    low, middle, high = (
        scheduler.add(Request(number, np.arange(4) + 100 * number, 9, priority=priority))
        for number, priority in enumerate((-5, 0, 7))
    )
    assert advance(scheduler) == [[high, middle]]
    assert scheduler.waiting == (low,)
    while not scheduler.num_preemptions:
        advance(scheduler)
    assert scheduler.running == (high,)
    assert scheduler.waiting == (middle, low)
    assert [run.request.id for run in drain(scheduler)][-1] == low.request.id


@pytest.mark.parametrize(("threshold", "first"), [(None, [0]), (5, [0]), (4, [1]), (0, [1])])
def test_a_larger_priority_preempts_for_its_admission_beyond_the_threshold(threshold, first):
    scheduler = Scheduler(FakeCache(8, block_size=4), policy="priority", preemption_threshold=threshold)
    runs = [scheduler.add(Request(0, np.arange(20), 8))]
    advance(scheduler, 2)
    runs.append(scheduler.add(Request(1, np.arange(100, 120), 8, priority=5)))
    assert [run.request.id for run in advance(scheduler)[0]] == first
    assert scheduler.num_preemptions == runs[0].num_preemptions == (first == [1])
    scheduler.check_invariants()
    assert len(drain(scheduler)) == 2
    assert [run.num_generated for run in runs] == [8, 8]


def test_no_run_gives_way_if_all_of_smaller_priorities_would_free_too_little():
    scheduler = Scheduler(FakeCache(11, block_size=4), policy="priority", preemption_threshold=0, headroom=0.0)
    for number, priority in enumerate((1, 0)):
        scheduler.add(Request(number, np.arange(16) + 50 * number, 4, priority=priority))
    advance(scheduler)
    large = scheduler.add(Request(2, np.arange(500, 528), 4, priority=1))  # 7 blocks; the small priority has 5
    advance(scheduler)
    assert (scheduler.num_preemptions, large.state) == (0, State.WAITING)
    assert len(drain(scheduler)) == 3


def test_rows_are_freed_for_a_larger_priority_the_newest_of_equal_ones_first():
    scheduler = Scheduler(FakeCache(90), policy="priority", preemption_threshold=0, max_running=3)
    runs = [
        scheduler.add(Request(number, np.arange(9) + 20 * number, 6, priority=priority))
        for number, priority in enumerate((0, 1, 0))
    ]
    advance(scheduler)
    scheduler.add(Request(3, np.arange(100, 109), 6, priority=2))
    assert [run.request.id for run in advance(scheduler)[0]] == [1, 0, 3]
    assert [run.num_preemptions for run in runs] == [0, 0, 1]
    assert len(drain(scheduler)) == 4


def test_a_larger_priority_takes_the_row_of_a_decode_in_a_step_that_decodes_fill():
    scheduler = Scheduler(
        FakeCache(90), policy="priority", preemption_threshold=0, max_running=2, max_tokens_per_step=2
    )
    for number in range(2):
        scheduler.add(Request(number, np.arange(1) + 10 * number, 20))
    assert [run.request.id for run in advance(scheduler, 2)[-1]] == [0, 1]
    scheduler.add(Request(2, np.arange(100, 103), 3, priority=1))
    assert [[run.request.id for run in runs] for runs in advance(scheduler, 2)] == [[0, 2], [0, 2]]
    assert len(drain(scheduler)) == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_do_not_depend_on_preemptions_by_priority(overlap):
    server = Server(overlap=overlap, policy="priority", preemption_threshold=0, max_running=2)
    requests = [Request(number, [number + 1, 2, 3], 9, priority=number) for number in range(5)]
    runs = []
    for one in requests:
        runs.append(server.add(one))
        server.turn()
    server.drain()
    assert server.scheduler.num_preemptions >= 3
    assert [run.tokens.tolist() for run in runs] == [answer(one) for one in requests]
    server.check_empty()


@pytest.mark.parametrize("size", [90, 9])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_run_that_came_late_is_not_preempted_for_its_priority(size, samples):
    """Larger priorities never end, in a cache that keeps no prefix: the run would compute its first chunk for ever."""
    scheduler = Scheduler(
        FakeCache(size, block_size=4), policy="priority", preemption_threshold=0, max_wait_steps=4, headroom=0.0,
        max_running=samples, max_tokens_per_step=6, share_prompts=False,
    )  # fmt: skip
    low = scheduler.add(Request(0, np.arange(20), 5, samples=samples))
    for number in range(1, 60):
        scheduler.add(Request(number, 100 * number + np.arange(12), 3, priority=1))
        advance(scheduler)
        scheduler.check_invariants()
    assert low.state is State.FINISHED
    assert scheduler.num_waiting
    assert low.num_preemptions == 0


def test_a_run_that_came_late_gives_way_last_when_blocks_run_short():
    scheduler = Scheduler(
        FakeCache(11, block_size=4), policy="priority", max_wait_steps=2, max_running=2, headroom=0.0
    )  # fmt: skip
    scheduler.add(Request(0, np.arange(4), 4, priority=1))
    large = scheduler.add(Request(1, np.arange(100, 108), 24, priority=1))
    advance(scheduler)
    low = scheduler.add(Request(2, np.arange(200, 208), 24))
    drain(scheduler)
    assert low.came_late
    assert (large.num_preemptions, low.num_preemptions) == (1, 0)


def test_a_run_of_a_small_priority_goes_first_after_the_bound():
    scheduler = Scheduler(FakeCache(200, max_sequences=2), policy="priority", max_running=1, max_wait_steps=7)
    starving, order = scheduler.add(request(0, 6, 1)), []
    for number in range(1, 12):
        scheduler.add(Request(number, np.arange(9), 1, priority=1))
        order += advance(scheduler)[0]
    assert order.index(starving) == 7


def test_lpm_does_not_starve_a_run_without_a_cached_prefix():
    cache = FakeCache(200, block_size=4, max_sequences=2)
    scheduler = Scheduler(cache, policy="lpm", max_running=1, max_wait_steps=6)
    scheduler.add(request(1000, 9, 1, shared=9))
    advance(scheduler)
    starving, order = scheduler.add(request(0, 6, 1)), []
    for number in range(1, 12):
        scheduler.add(request(number, 10, 1, shared=9))
        order += [run.request.id for run in advance(scheduler)[0]]
    assert order[:8] == [1, 2, 3, 4, 5, 6, starving.request.id, 7]


@pytest.mark.parametrize("policy", ["lpm", "priority"])
def test_the_bound_holds_while_more_preferred_requests_arrive_than_are_served(policy):
    scheduler = Scheduler(FakeCache(200, max_sequences=2), policy=policy, max_running=1, max_wait_steps=6)
    scheduler.add(request(1000, 9, 1, shared=9))
    advance(scheduler)
    starving, order = None, []
    for number in range(0, 60, 2):
        if number == 10:
            starving = scheduler.add(Request(999, np.arange(6) + 5000, 1))
            before = scheduler.num_waiting - 1
        for each in (number, number + 1):
            scheduler.add(Request(each, np.append(np.arange(9), each), 1, priority=1))
        order += advance(scheduler)[0]
    # The runs that came before it are late when it is; those that came after it are not preferred then.
    assert order.index(starving) <= 5 + max(before, 6)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_step_without_admissions_reads_a_bounded_part_of_the_queue(policy, monkeypatch):
    class Counting(FakeCache):
        matched = 0

        def match_length(self, *arguments, **options):
            self.matched += 1
            return super().match_length(*arguments, **options)

    cache, asked, is_late = Counting(8), [], Queue.is_late
    scheduler = Scheduler(cache, policy=policy, headroom=0.0)
    for number in range(400):
        scheduler.add(Request(number, np.arange(16) + 100 * number, 8, priority=number % 3))
    advance(scheduler)
    monkeypatch.setattr(Queue, "is_late", lambda queue, run: asked.append(run) or is_late(queue, run))
    cache.matched = 0
    advance(scheduler)
    assert scheduler.num_waiting == 399
    assert cache.matched <= 129
    assert len(asked) <= 128 + 4


def test_a_step_has_at_most_the_limits_of_prompt_tokens():
    scheduler = Scheduler(FakeCache(200), max_prefill_tokens=10, chunked_prefill_size=6)
    old = scheduler.add(request(0, 3, 9))
    advance(scheduler)
    runs = [scheduler.add(request(number, 9, 1)) for number in (1, 2)]
    step = scheduler.schedule()
    assert step.runs == [old, *runs]
    assert step.counts == [1, 6, 4]
    scheduler.commit(step)
    scheduler.accept(step, sampled(step))
    step = scheduler.schedule()
    assert step.counts == [1, 3, 5]
    scheduler.commit(step)
    assert scheduler.accept(step, sampled(step)) == runs
    assert drain(scheduler) == [old]


def test_admission_is_linear_in_the_number_of_requests():
    """Count what the scheduler asks the cache for, in one step with 200 and one with 800 new requests."""

    class Counting(FakeCache):
        rows = 0

        def shortage(self, sequences, counts, step_tokens=None):
            self.rows += len(sequences)
            return 0

        def add_sequence(self, *arguments, **options):
            self.rows += 1
            return super().add_sequence(*arguments, **options)

    rows = []
    for number in (200, 800):
        cache = Counting(8 * number, max_sequences=number)
        scheduler = Scheduler(cache, max_running=number, max_tokens_per_step=100_000, headroom=0.0)
        for one in range(number):
            scheduler.add(request(one, 5, 2))
        assert len(scheduler.schedule().runs) == number
        rows.append(cache.rows)
    assert rows[1] <= 4 * rows[0] * 1.1
    assert rows[1] <= 5 * 800


# -- ranks ------------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, hashlib, random
sys.path.insert(0, {root!r})
import numpy as np
from pagecore.serving import Request
from tests.serving.served import Server
digest, choice = hashlib.sha256(), random.Random(3)
server = Server(num_blocks=18, block_size=2, overlap=True, policy="lpm", new_token_ratio=0.0, headroom=0.0)
launch = server.launch
def record(step):
    rows = [(run.request.id, run.sample, count) for run, count in zip(step.runs, step.counts)]
    digest.update(repr((rows, np.asarray(step.batch.host.slot_mappings[0]).tolist())).encode())
    return launch(step)
server.launch = record
for number in range(40):
    text = np.arange(choice.randint(1, 20)) + 50 * choice.randrange(4)
    tenant = choice.choice([None, "a", "b"])
    server.add(Request(number, text, choice.randint(0, 9), choice.randint(1, 3), tenant, stop_token_ids=set(range(90))))
server.drain()
print(digest.hexdigest(), server.scheduler.num_preemptions > 0)
"""


def test_ranks_with_other_hashes_make_the_same_decisions():
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(root=str(ROOT))],
            env={**os.environ, "PYTHONHASHSEED": seed},
            text=True,
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    outputs = [program.communicate(timeout=60)[0].split() for program in programs]
    assert outputs[0] == outputs[1]
    assert outputs[0][1] == "True"


def test_two_schedulers_with_the_same_calls_return_the_same_steps():
    def steps():
        cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=14, block_size=2, max_sequences=5, device="none")
        scheduler = Scheduler(cache, headroom=0.0, new_token_ratio=0.2)
        for number in range(9):
            scheduler.add(request(number, 3 + number, 7, samples=1 + number % 2, shared=6))
        rows = []
        drain(scheduler, lambda step: rows.append([(run.request.id, run.sample, *step.counts) for run in step.runs]))
        return rows, scheduler.num_preemptions

    first, second = steps(), steps()
    assert first == second
    assert first[1] > 0
