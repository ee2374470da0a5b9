"""Equal prompts of one step: their common head is computed once, and nothing else waits."""

import numpy as np
import pytest

from pagecore.serving.scheduling import sharing
from pagecore.serving.scheduling.request import Request
from pagecore.serving.scheduling.scheduler import Scheduler
from tests.serving.fake_cache import FakeCache
from tests.serving.runs import advance, request, sampled
from tests.serving.served import Server, answer


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


def test_prompts_with_an_equal_block_after_other_ones_do_not_wait():
    scheduler = Scheduler(FakeCache(50))
    for number in (1, 2):
        scheduler.add(Request(number, [number] * 4 + [3], 1))
    assert len(advance(scheduler)[0]) == 2
    for number in (1, 2, 1):
        scheduler.add(Request(number, [number] * 4 + [9] * 8, 2))
    step = scheduler.schedule()
    assert [(run.request.id, count) for run, count in zip(step.runs, step.counts, strict=True)] == [(1, 8), (2, 8)]


def asked_of_documents(scheduler, numbers, question=(9,) * 8):
    """Queue a question about documents of one length, which are cached."""
    documents = {number: np.full(40, 100 + number) for number in numbers}
    for number, document in documents.items():
        scheduler.add(Request(number, document, 1))
    advance(scheduler)
    return [scheduler.add(Request(number, np.append(documents[number], question), 1)) for number in numbers]


def test_one_question_about_many_documents_compares_few_prompts(monkeypatch):
    scheduler = Scheduler(FakeCache(1000, 4, max_sequences=64))
    asked_of_documents(scheduler, range(40))
    compared, equal = [], np.array_equal
    with monkeypatch.context() as patch:
        patch.setattr(np, "array_equal", lambda *pair: compared.append(pair) or equal(*pair))
        step = scheduler.schedule()
    assert step.counts == [8] * 40
    assert len(compared) == 1


@pytest.mark.parametrize("collide", [False, True])
def test_of_one_question_about_many_documents_only_equal_prompts_wait(monkeypatch, collide):
    if collide:
        monkeypatch.setattr(sharing, "hash", lambda _: 0, raising=False)
    scheduler = Scheduler(FakeCache(1000, 4, max_sequences=64))
    runs = asked_of_documents(scheduler, range(6))
    for number in (4, 0, 5):
        scheduler.add(Request(10 + number, runs[number].tokens, 1))
    assert [run.request.id for run in scheduler.schedule().runs] == [0, 1, 2, 3, 4, 5]
    assert [run.request.id for run in scheduler.waiting] == [14, 10, 15]


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
