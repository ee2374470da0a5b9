"""Policies and limits of the scheduler, and equal decisions of ranks."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagecore.cache import PagedKVCache
from pagecore.errors import ShapeError
from pagecore.serving.scheduling.queue import Queue
from pagecore.serving.scheduling.request import QueueFull, Request, State
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import AttentionSpec
from tests.serving.fake_cache import FakeCache
from tests.serving.runs import advance, drain, request, sampled
from tests.serving.served import Server, answer

ROOT = Path(__file__).parents[2]


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


def test_lpm_looks_prefixes_up_again_after_prompts_but_not_after_decodes(monkeypatch):
    cache = FakeCache(17, block_size=4)
    scheduler = Scheduler(cache, policy="lpm", headroom=0.0)
    asked, match_length = [], cache.match_length
    monkeypatch.setattr(cache, "match_length", lambda ids, **options: asked.append(ids) or match_length(ids, **options))
    for number, prompt in enumerate([36, *[50] * 9]):
        scheduler.add(request(number, prompt, 12))
    lookups = []
    for _ in range(6):
        asked.clear()
        advance(scheduler)
        lookups.append(len(asked))
    assert scheduler.num_waiting == 9  # they do not fit
    assert min(lookups[:2]) >= 9
    assert lookups[2:] == [1, 1, 1, 1]  # the next one is looked up alone


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


@pytest.mark.slow
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


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_full_queue_refuses_a_request_and_changes_nothing(policy):
    scheduler = Scheduler(FakeCache(90), policy=policy, max_running=1, max_queued=2)
    runs = [scheduler.add(Request(number, np.arange(9) + 20 * number, 4)) for number in range(2)]
    with pytest.raises(QueueFull, match="request 2 was not added: 2 requests wait"):
        scheduler.add(Request(2, np.arange(50, 59), 4))
    assert (scheduler.waiting, scheduler.figures().num_waiting_tokens) == (tuple(runs), 18)
    assert (scheduler.num_refused, scheduler.figures().num_refused, scheduler.num_displaced) == (1, 1, 0)
    advance(scheduler)
    assert scheduler.add(Request(2, np.arange(50, 59), 4)).displaced is None  # one of them runs
    assert len(drain(scheduler)) == 3


def test_a_larger_priority_takes_the_place_of_the_smallest_the_newest_of_equal_ones():
    scheduler = Scheduler(FakeCache(90), policy="priority", max_running=1, max_queued=3, headroom=0.0)
    runs = [
        scheduler.add(Request(number, np.arange(9) + 20 * number, 4, priority=priority))
        for number, priority in enumerate((1, 0, 0))
    ]
    large = scheduler.add(Request(3, np.arange(100, 104), 4, priority=1))
    assert large.displaced is runs[2]
    assert (runs[2].state, runs[2].has_ended) == (State.CANCELLED, True)
    assert (scheduler.figures().num_waiting, scheduler.figures().num_waiting_tokens) == (3, 22)
    with pytest.raises(QueueFull):
        scheduler.add(Request(4, np.arange(3), 4))
    assert (scheduler.num_displaced, scheduler.figures().num_displaced, scheduler.num_refused) == (1, 1, 1)
    scheduler.check_invariants()
    assert len(drain(scheduler)) == 3


def test_preempted_and_late_runs_keep_their_places():
    scheduler = Scheduler(
        FakeCache(8, block_size=4), policy="priority", preemption_threshold=0, max_queued=1, max_wait_steps=3
    )
    low = scheduler.add(Request(0, np.arange(20), 8))
    advance(scheduler)
    high = scheduler.add(Request(1, np.arange(100, 120), 8, priority=2))
    advance(scheduler)
    assert (scheduler.running, scheduler.waiting, low.num_preemptions) == ((high,), (low,), 1)
    middle = scheduler.add(Request(2, np.arange(200, 212), 8, priority=1))
    assert middle.displaced is None
    advance(scheduler, 3)
    with pytest.raises(QueueFull):
        scheduler.add(Request(3, np.arange(300, 304), 8, priority=9))
    assert len(drain(scheduler)) == 3


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "1"])
def test_a_foreign_limit_of_the_queue_is_refused(number):
    with pytest.raises(ShapeError, match="max_queued is"):
        Scheduler(FakeCache(8), max_queued=number)
