"""`Scheduler.extend`: prompts that grow while their runs wait, run, or are preempted."""

import random

import numpy as np
import pytest

from pagecore.errors import InvalidSequence, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.serving import Request, RequestError, Scheduler
from pagecore.serving.scheduling.request import State
from tests.faults import PAGECORE, lines_of, raise_at
from tests.serving.fake_cache import FakeCache, FakeSpace
from tests.serving.runs import advance, drain, next_token
from tests.serving.runs import request as request_of
from tests.serving.served import Server, hashed

SERVING = PAGECORE / "serving"


def continued(text, count, sample=0):
    """Return a text and `count` tokens that the model of `Server` generates after it."""
    text = list(text)
    for _ in range(count):
        text.append(hashed(text, sample))
    return text


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
def test_new_tokens_follow_the_known_ones_and_the_answer_follows_them(steps, overlap):
    """A prompt of 7 tokens in parts of 3 is complete after three steps, and has generated after the third."""
    server = Server(overlap=overlap, chunked_prefill_size=3, max_tokens_per_step=8)
    run, other = server.add(Request(0, range(7), 9)), server.add(Request(1, [40, 41], 12))
    for _ in range(steps):
        server.turn()
    if server.previous is not None:
        server.accept()
    known = run.tokens.tolist() if run.held is None else run.held.tokens.tolist()
    generated, computed = run.num_generated, server.computed
    assert known == continued(range(7), generated)
    server.scheduler.extend(run, [90, 91, 92, 93, 94])
    assert (run.num_generated, run.request.max_new_tokens) == (0, 9 - generated)
    assert run.request.prompt.tolist() == [*known, 90, 91, 92, 93, 94]
    server.check()
    server.drain()
    assert run.tokens.tolist() == continued(run.request.prompt, 9 - generated)
    assert other.tokens.tolist() == continued([40, 41], 12)
    assert server.computed == 7 + 5 + 9 - 1 + 2 + 12 - 1, "nothing is repeated"
    assert server.computed > computed
    server.check_empty()


@pytest.mark.parametrize("swap_blocks", [None, 30])
@pytest.mark.parametrize("seed", range(12))
def test_random_extensions_under_preemption_change_no_answer(seed, swap_blocks):
    choice = random.Random(seed)
    server = Server(num_blocks=24, swap_blocks=swap_blocks, overlap=seed % 2 == 1, max_tokens_per_step=6)
    runs = [
        server.add(Request(number, [number] * choice.randint(1, 6), 8, samples=1 + number % 2)) for number in range(6)
    ]
    texts, rounds = {}, 0

    def is_forked(run):
        return run.held is not None or run in server.scheduler.waiting

    while server.turn():
        server.check()
        rounds += 1
        if choice.random() > 0.4:
            continue
        if server.previous is not None:
            server.accept()
        open_runs = [run for run in server.runs.values() if not run.has_ended and is_forked(run)]
        if not open_runs:
            continue
        run = choice.choice(open_runs)
        before = (run.tokens if run.held is None else run.held.tokens).tolist()
        if len(before) < 24:
            server.scheduler.extend(run, [100 + rounds] * choice.randint(1, 4), max_new_tokens=choice.randint(1, 8))
        server.check()
    for run in server.runs.values():
        assert run.state is State.FINISHED
        prompt = run.request.prompt.tolist()
        assert run.tokens.tolist() == continued(prompt, run.request.max_new_tokens, run.sample)
        texts[run.request.id, run.sample] = prompt
    assert len(texts) == 9
    assert any(len(run.request.prompt) > 6 for run in runs)
    server.check_empty()


def test_a_preempted_run_finds_its_prefix_and_computes_the_new_tokens():
    server = Server(block_size=4)
    run = server.add(Request(0, range(10), 8))
    for _ in range(3):
        server.turn()
    server.scheduler.preempt_all()
    server.scheduler.extend(run, range(50, 60))
    computed, known = server.computed, len(run.tokens)
    server.turn()
    assert server.computed - computed == known - 12  # 10 prompt tokens and 2 generated ones fill three blocks
    server.drain()
    assert run.tokens.tolist() == continued(run.request.prompt, 8 - 3)


def test_samples_that_are_not_forked_grow_together_and_later_ones_alone():
    server = Server(chunked_prefill_size=3)
    first = server.add(Request(0, range(7), 6, samples=3))
    server.turn()
    server.scheduler.extend(first, [50, 51])
    server.turn()
    server.turn()
    second = server.runs[0, 1]
    server.scheduler.extend(second, [70])
    assert (len(first.request.prompt), len(second.request.prompt)) == (9, 11)
    server.drain()
    assert [server.runs[0, sample].tokens.tolist() for sample in (0, 2)] == [
        continued([*range(7), 50, 51], 6, sample) for sample in (0, 2)
    ]
    assert second.tokens.tolist() == continued([*continued([*range(7), 50, 51], 1, 1), 70], 5, 1)
    server.check_empty()


def test_samples_of_a_step_that_was_abandoned_get_the_new_request_too():
    scheduler = Scheduler(FakeCache(40))
    run = scheduler.add(Request(0, range(5), 2, samples=2))
    step = scheduler.schedule()
    scheduler.abandon(step)
    with pytest.raises(InvalidSequence, match="not forked yet"):
        scheduler.extend(step.outputs[1], [1])
    scheduler.extend(run, [9])
    ended = drain(scheduler)
    assert [one.tokens.tolist()[:6] for one in ended] == [[*range(5), 9]] * 2
    assert [(len(one.tokens), one.num_generated) for one in ended] == [(8, 2)] * 2


def test_limits_count_from_the_new_tokens():
    stop = hashed([*continued(range(4), 2), 9], 0)
    server = Server()
    run = server.add(Request(0, range(4), 8, stop_token_ids=[stop], min_new_tokens=5))
    server.turn()
    server.turn()
    assert run.num_generated == 2
    server.scheduler.extend(run, [9], max_new_tokens=1)
    assert (run.request.min_new_tokens, run.request.max_new_tokens) == (1, 1)
    server.drain()
    assert run.generated.tolist() == [stop]
    other = server.add(Request(1, range(4), 8, stop_token_ids=[stop]))
    server.turn()
    server.turn()
    server.scheduler.extend(other, [9])
    server.drain()
    assert other.generated.tolist() == [stop], "a stop id ends it although 6 tokens were left"


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_waiting_prompt_grows_in_its_place(policy):
    cache = FakeCache(9, prefix_cache=False)
    scheduler = Scheduler(cache, policy=policy, max_running=1)
    runs = [scheduler.add(Request(number, range(4), 3, priority=number)) for number in range(3)]
    order = list(scheduler.waiting)
    waiting = scheduler.num_waiting_tokens
    scheduler.extend(runs[1], range(5))
    scheduler.check_invariants()
    assert (scheduler.num_waiting_tokens, list(scheduler.waiting)) == (waiting + 5, order)
    assert {len(run.tokens) for run in drain(scheduler)} == {7, 12}


def test_extensions_that_are_refused_change_nothing():
    cache = FakeCache(9)
    scheduler = Scheduler(cache)
    run, ended = scheduler.add(Request(0, range(8), 4)), scheduler.add(Request(1, [1], 1))
    several, silent = scheduler.add(Request(2, [1], 4, samples=2)), scheduler.add(Request(3, [1], 0, samples=2))
    step = scheduler.schedule()
    with pytest.raises(InvalidSequence, match="has a row in an open step; accept or abandon"):
        scheduler.extend(run, [1])
    scheduler.abandon(step)
    scheduler.cancel(ended)
    for chosen, tokens, options, error, message in [
        (ended, [1], {}, InvalidSequence, "has ended; add a request whose prompt begins with the tokens of the run"),
        (run, [], {}, ShapeError, "tokens is empty"),
        (run, [[1]], {}, ShapeError, "tokens has shape"),
        (run, [1.5], {}, UnsupportedDtype, "tokens has dtype"),
        (run, [2**31], {}, ShapeError, "ids must fit int32"),
        (run, range(22), {}, RequestError, "needs 33 slots"),
        (run, [1], {"max_new_tokens": -1}, ShapeError, "max_new_tokens is -1"),
        (run, [1], {"max_new_tokens": 40}, RequestError, "needs 48 slots"),
        (several, [1], {"max_new_tokens": 0}, UnsupportedOption, "a request of 2 samples"),
        (silent, [1], {"max_new_tokens": 1}, UnsupportedOption, "a request of 2 samples"),
        (None, [1], {}, InvalidSequence, "expected a Run"),
        (Scheduler(cache).add(Request(0, [1], 1)), [1], {}, InvalidSequence, "belongs to another scheduler; extend it"),
    ]:
        with pytest.raises(error, match=message):
            scheduler.extend(chosen, tokens, **options)
    assert (len(run.request.prompt), run.request.max_new_tokens) == (8, 4)
    scheduler.check_invariants()
    assert sorted(len(one.tokens) for one in drain(scheduler)) == [1, 5, 5, 12]


def test_an_extension_longer_than_what_is_free_preempts_others():
    cache = FakeCache(9, prefix_cache=False)
    scheduler = Scheduler(cache, headroom=0.0)
    first, second = (scheduler.add(request_of(number, 8, 8)) for number in range(2))
    advance(scheduler)
    scheduler.extend(first, range(14))
    ended = drain(scheduler)
    assert (second.num_preemptions, first.num_preemptions) == (1, 0)
    assert [len(run.tokens) for run in ended] == [8 + 8 + 14, 8 + 8]
    text = ended[0].tokens.tolist()
    assert text[-1] == next_token(text[:-1], 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["waiting", "pinned", "prefilling", "decoding", "swapped"])
def test_an_interrupted_extension_has_happened_or_not(how):
    """An exception at each event of the call; the call is repeated if it has not happened."""

    def made():
        cache = FakeCache(30)
        scheduler = Scheduler(cache, swap_space=FakeSpace(cache, 30), max_tokens_per_step=4, max_running=2)
        run, _ = scheduler.add(request_of(0, 6, 5)), scheduler.add(request_of(1, 5, 5))
        if how not in ("waiting", "pinned"):
            advance(scheduler, 1 if how == "prefilling" else 4)
        if how == "pinned":
            scheduler._roster.pin(run)
        if how == "swapped":
            scheduler.preempt_all()
        return scheduler, run

    def extend():
        scheduler, run = made()
        return scheduler, run, (run.tokens if run.held is None else run.sequence.tokens).tolist()

    scheduler, run, _ = extend()
    events = lines_of(lambda: scheduler.extend(run, [7, 8, 9]), SERVING)
    assert events > 20
    happened = set()
    for event in range(1, events + 1):
        scheduler, run, known = extend()
        raise_at(lambda scheduler=scheduler, run=run: scheduler.extend(run, [7, 8, 9]), event, SERVING)
        scheduler.check_invariants()
        happened.add(len(run.request.prompt) == len(known) + 3)
        if run.request.prompt.tolist() != [*known, 7, 8, 9]:
            scheduler.extend(run, [7, 8, 9])
        assert run.request.prompt.tolist() == [*known, 7, 8, 9]
        ended = drain(scheduler)
        assert np.array_equal(run.tokens[: len(known) + 3], [*known, 7, 8, 9])
        assert len(ended) == 2
        assert run.num_generated == run.request.max_new_tokens
    assert happened == {False, True}
