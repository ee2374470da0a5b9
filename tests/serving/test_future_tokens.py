"""Room for future tokens: its ratio, admission and retraction, and the options of a scheduler."""

import numpy as np
import pytest

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.serving.scheduling.request import Request
from pagecore.serving.scheduling.scheduler import Scheduler
from tests.serving.fake_cache import FakeCache
from tests.serving.runs import advance, drain, expected, request
from tests.together import together


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
    assert seen[-1] == seen[600] == pytest.approx(first * 0.14)
    # Nothing is left to run.
    assert scheduler.figures().new_token_ratio == first


@pytest.mark.parametrize(("ratio", "ignore_eos", "admitted"), [(None, False, 4), (0.5, False, 2), (0.5, True, 1)])
def test_admission_leaves_room_for_future_tokens(ratio, ignore_eos, admitted):
    # 160 slots; a request has 8 tokens of prompt and generates up to 100.
    cache = FakeCache(41, block_size=4, max_sequences=8)
    scheduler = Scheduler(cache, headroom=0.0, new_token_ratio=ratio, max_running=4)
    for number in range(4):
        scheduler.add(Request(number, np.arange(8) + 100 * number, 100, ignore_eos=ignore_eos))
    assert len(scheduler.schedule().runs) == admitted


@pytest.mark.parametrize(("num_blocks", "admitted"), [(8, 1), (9, 2)])
def test_each_sample_needs_blocks_of_its_own_after_the_whole_blocks_of_the_prompt(num_blocks, admitted):
    # The first request takes 4 blocks. The other shares one block of its prompt, and each sample writes one more.
    scheduler = Scheduler(FakeCache(num_blocks, block_size=4), headroom=0.0, new_token_ratio=1.0)
    scheduler.add(Request(0, np.arange(5), 9, ignore_eos=True))
    scheduler.add(Request(1, np.arange(5) + 100, 2, 3, ignore_eos=True))
    assert len(advance(scheduler)[0]) == admitted
    assert len(drain(scheduler)) == 4
    assert not scheduler.num_preemptions


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


@together(
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
