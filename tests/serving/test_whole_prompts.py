"""`Scheduler(whole_prompts=True)`: each prompt is computed in one step."""

import random

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec
from pagecore.errors import UnsupportedOption
from pagecore.serving import DraftTree, Request, RequestError, Scheduler
from tests.serving.fake_cache import FakeCache
from tests.serving.runs import advance, drain
from tests.serving.runs import request as request_of
from tests.serving.served import Server, add_random_requests, answer

FULL, WINDOW = AttentionSpec(1, 8), AttentionSpec(1, 8, window=6)
STATE = StateSpec((Plane("temporal", (1,), "float32", per="sequence"),), chunk=4, interval=8)


@pytest.mark.parametrize(("whole", "first"), [(True, [800]), (False, [800, 224])])
def test_a_long_prompt_is_neither_cut_nor_passed_by_short_ones(whole, first):
    """vLLM's `test_schedule_order`: 1,024 tokens a step, prompts of 800, 800, 10 and 10."""
    scheduler = Scheduler(FakeCache(1000, 16), max_tokens_per_step=1024, max_running=3, whole_prompts=whole)
    for number, length in enumerate((800, 800, 10, 10)):
        scheduler.add(Request(number, np.arange(length) + 1000 * number, 4))
    step = scheduler.schedule()
    assert step.counts == first
    scheduler.commit(step)
    scheduler.accept(step, [1] * len(step.outputs))
    assert scheduler.schedule().counts == ([1, 800, 10] if whole else [1, 576, 10])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("swap_blocks", [None, 9])
@pytest.mark.parametrize("seed", range(6))
def test_every_part_ends_its_prompt_and_answers_are_the_same(seed, swap_blocks, overlap):
    server = Server(num_blocks=14, swap_blocks=swap_blocks, overlap=overlap, whole_prompts=True, max_tokens_per_step=26)
    requests = add_random_requests(server, random.Random(seed), 8)
    schedule = server.scheduler.schedule

    def checked():
        step = schedule()
        if step is not None:
            for run, count in list(zip(step.runs, step.counts, strict=True))[step.num_decodes :]:
                assert run.sequence.num_computed_tokens + count == len(run.tokens)
        return step

    server.scheduler.schedule = checked
    server.drain()
    for one in requests:
        for sample in range(one.samples if one.max_new_tokens else 1):
            assert server.ended[one.id, sample] == answer(one, sample)
    server.check_empty()


@pytest.mark.parametrize(
    ("specs", "num_blocks"),
    [([FULL, WINDOW], [41, 11]), ([FULL, WINDOW], [17, 17]), ([FULL, STATE], [14]), ([FULL, STATE], [33])],
)
def test_prompts_of_windows_and_states_are_computed_at_once(specs, num_blocks):
    states = {"num_states": 9} if STATE in specs else {}
    cache = PagedKVCache(specs, block_size=4, num_blocks=num_blocks, max_sequences=4, device="none", **states)
    scheduler = Scheduler(cache, whole_prompts=True, max_tokens_per_step=64, headroom=0.0)
    for number in range(6):
        scheduler.add(request_of(number, 12 + 3 * number, 4, 1, 8))

    def check(step):
        for run, count in list(zip(step.runs, step.counts, strict=True))[step.num_decodes :]:
            assert run.sequence.num_computed_tokens + count == len(run.tokens)

    assert len(drain(scheduler, check)) == 6
    assert scheduler.reuse.prefix_hit_tokens > 0
    cache.check_invariants()


def test_a_prompt_waits_until_decodes_and_trees_leave_room():
    cache = PagedKVCache(AttentionSpec(1, 8), block_size=4, num_blocks=65, max_sequences=4, device="none")
    scheduler = Scheduler(cache, whole_prompts=True, max_tokens_per_step=16, max_tree_tokens=8)
    first = scheduler.add(Request(0, range(4), 3))
    advance(scheduler)
    second = scheduler.add(Request(1, range(50, 62), 3))
    step = scheduler.schedule({first: DraftTree([-1, 0])})
    assert (step.num_drafts, step.counts) == ([0], [1, 12]), "the row of a tree has 8 tokens: the step has no drafts"
    scheduler.commit(step)
    scheduler.accept(step, [1, 1])
    third = scheduler.add(Request(2, range(80, 95), 1))
    assert advance(scheduler, 2) == [[first, second], [second, third]]
    assert scheduler.schedule() is None


def test_a_preempted_run_waits_for_room_for_its_generated_tokens_too():
    scheduler = Scheduler(FakeCache(40, prefix_cache=False), whole_prompts=True, max_tokens_per_step=16)
    run = scheduler.add(request_of(0, 8, 8))
    others = [scheduler.add(request_of(number, 1, 12)) for number in range(1, 5)]
    advance(scheduler, 5)
    assert scheduler.preempt([run]) == [run]
    assert (len(run.tokens), advance(scheduler)) == (13, [others])
    scheduler.cancel(others[0])
    assert advance(scheduler) == [[*others[1:], run]]
    assert len(drain(scheduler)) == 4


def test_requests_that_no_step_could_compute_are_refused():
    scheduler = Scheduler(FakeCache(40), whole_prompts=True, max_tokens_per_step=16, max_encoder_tokens=10)
    assert scheduler.add(Request(0, range(10), 7)).request.num_slots == 16
    with pytest.raises(RequestError, match="up to 17 tokens to compute in one step"):
        scheduler.add(Request(1, range(10), 8))
    spans = [(0, 4, b"a"), (4, 8, b"b"), (8, 12, b"a"), (12, 15, b"c")]
    with pytest.raises(RequestError, match="needs 11 encoder tokens in one step"):
        scheduler.add(Request(2, range(15), 1, spans=spans))
    run = scheduler.add(Request(3, range(12), 1, spans=spans))
    with pytest.raises(RequestError, match="up to 17 tokens"):
        scheduler.extend(run, range(5))
    assert sorted(len(one.tokens) for one in drain(scheduler)) == [13, 17]
    hybrid = PagedKVCache([AttentionSpec(1, 8), STATE], block_size=4, num_blocks=9, num_states=5, device="none")
    with pytest.raises(UnsupportedOption, match="prompt_checkpoints is 2 with whole_prompts"):
        Scheduler(hybrid, whole_prompts=True, prompt_checkpoints=2)
    with pytest.raises(UnsupportedOption, match="whole_prompts is 1"):
        Scheduler(FakeCache(9), whole_prompts=1)
