"""Resumable requests: turns that continue a run, their tokens, spans and figures, and what is refused."""

import random

import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.errors import InvalidSequence, ShapeError, UnsupportedOption
from pagecore.serving import QueueFull, Request, Scheduler
from pagecore.serving.scheduling.request import State
from tests.serving.drafted import DraftServer, some_right
from tests.serving.fake_cache import FakeCache
from tests.serving.runs import advance, drain
from tests.serving.served import Server, answer
from tests.serving.turns import STOP, idle_run, step_of, text_of


@pytest.mark.parametrize(("drops", "prompt", "count"), [(True, [1, 2, 3, 10, 4, 5], 2), (False, None, 3)])
def test_the_next_turn_computes_its_input_and_the_last_token_unless_that_is_dropped(drops, prompt, count):
    """Tokens, and counts with `drop_last`, as in vLLM's test_streaming_e2e_lifecycle; SGLang keeps the last token."""
    cache = FakeCache(40, block_size=16)
    scheduler = Scheduler(cache)
    run = scheduler.add(Request(0, [1, 2, 3], 16, stop_token_ids=[STOP], resumable=True))
    assert step_of(scheduler, 10) == [3]
    assert step_of(scheduler, STOP) == [1]
    assert (run.state, run.tokens.tolist(), run.generated.tolist()) == (State.IDLE, [1, 2, 3, 10, STOP], [10, STOP])
    assert scheduler.schedule() is None
    scheduler.extend(run, [4, 5], drop_last=drops)
    assert run.request.prompt.tolist() == (prompt or [1, 2, 3, 10, STOP, 4, 5])
    assert (run.request.max_new_tokens, run.state, run.num_generated) == (16, State.WAITING, 0)
    assert step_of(scheduler, 20) == [count]
    assert run.state is State.RUNNING


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("is_real", [False, True])
def test_a_turn_that_ends_within_accepted_drafts_leaves_no_later_token(is_real, drops):
    """Tokens as in vLLM's test_next_chunk_fully_computed_after_stop_on_accepted_draft."""
    spec = AttentionSpec(1, 8)
    cache = PagedKVCache(spec, num_blocks=40, block_size=4, device="none") if is_real else FakeCache(40)
    scheduler = Scheduler(cache)
    run = scheduler.add(Request(0, [1, 2, 3], 4, stop_token_ids=[11], resumable=True))
    step_of(scheduler, 10)
    step_of(scheduler, [11, 12, 13], drafts={run: [11, 12]}, accepted=[3])
    assert (run.state, run.tokens.tolist()) == (State.IDLE, [1, 2, 3, 10, 11])
    assert cache.sequences[run].num_computed_tokens == 6, "both drafts were computed"
    scheduler.extend(run, [7, 8], drop_last=drops)
    assert run.request.prompt.tolist() == ([1, 2, 3, 10, 7, 8] if drops else [1, 2, 3, 10, 11, 7, 8])
    assert step_of(scheduler, 20) == [2], "the last token was computed, too"
    scheduler.check_invariants()


@pytest.mark.parametrize("spans", [[], ()])
@pytest.mark.parametrize("at", ["idle", "running"])
def test_empty_spans_do_not_cost_a_run_its_sequence(at, spans):
    scheduler = Scheduler(FakeCache(40))
    run = idle_run(scheduler) if at == "idle" else scheduler.add(Request(0, range(6), 9))
    if at == "running":
        advance(scheduler, 2)
    scheduler.extend(run, [7, 8], spans=spans)
    assert (scheduler.schedule().counts, scheduler.num_preemptions) == ([3], 0)


def test_finish_ends_an_idle_run_at_once_and_another_with_its_turn():
    cache = FakeCache(40)
    scheduler = Scheduler(cache)
    idle, running = idle_run(scheduler), scheduler.add(Request(1, [1], 3, samples=2, resumable=True))
    assert scheduler.finish(idle)
    assert (idle.state, len(idle.tokens), scheduler.num_idle) == (State.FINISHED, 9, 0)
    assert not scheduler.finish(idle)
    assert not scheduler.finish(running)
    ended = drain(scheduler)
    assert [(run.request.id, run.sample, run.state) for run in ended] == [(1, s, State.FINISHED) for s in (0, 1)]
    assert not cache.sequences
    with pytest.raises(InvalidSequence, match="has ended"):
        scheduler.extend(idle, [1])
    with pytest.raises(InvalidSequence, match="finish it there"):
        Scheduler(FakeCache(9)).finish(idle)


def test_samples_have_turns_of_their_own():
    cache = FakeCache(60)
    scheduler = Scheduler(cache)
    scheduler.add(Request(0, range(6), 2, samples=3, resumable=True))
    runs = drain(scheduler)
    assert [run.state for run in runs] == [State.IDLE] * 3
    assert scheduler.cancel(runs[1])
    assert runs[1].state is State.CANCELLED
    scheduler.extend(runs[2], [8], max_new_tokens=4)
    drain(scheduler)
    assert runs[2].tokens.tolist() == text_of((range(6), 2), ([8], 4), sample=2)
    assert scheduler.finish(runs[0])
    assert list(cache.sequences) == [runs[2]]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_a_turn_joins_the_queue_like_a_new_request_but_is_never_refused(policy):
    cache = FakeCache(60)
    scheduler = Scheduler(cache, policy=policy, max_running=1, max_queued=1, share_prompts=False)
    idle = idle_run(scheduler, prompt=12, priority=-1)
    scheduler.add(Request(5, [5], 3))
    advance(scheduler)
    waiting = scheduler.add(Request(6, range(200, 205), 3))
    scheduler.extend(idle, [1, 2])
    assert scheduler.waiting == (waiting, idle)
    with pytest.raises(QueueFull):
        scheduler.add(Request(7, [7], 1))
    if policy == "priority":
        assert scheduler.add(Request(8, [8], 1, priority=5)).displaced is waiting, "not the run with a turn"
        return
    scheduler.cancel(waiting)
    waiting = scheduler.add(Request(9, range(200, 205), 3))
    assert drain(scheduler)[1:] == [idle, waiting]


def test_a_turn_counts_no_prefix_query_and_keeps_the_figures_of_the_first():
    cache = FakeCache(60)
    scheduler = Scheduler(cache)
    run = idle_run(scheduler, prompt=12)
    before = scheduler.reuse
    scheduler.extend(run, range(20))
    drain(scheduler)
    assert scheduler.reuse == before
    assert (run.num_reused_tokens, run.num_preemptions) == (0, 0)
    assert scheduler.figures().num_idle == 1


def test_with_overlap_the_row_ahead_is_computed_and_its_id_dropped():
    cache = FakeCache(40)
    scheduler = Scheduler(cache, overlap=True)
    run = scheduler.add(Request(0, [1, 2, 3], 9, stop_token_ids=[STOP], resumable=True))
    first = scheduler.schedule()
    scheduler.commit(first)
    ahead = scheduler.schedule()
    assert scheduler.accept(first, [STOP]) == [run]
    assert run.state is State.IDLE
    with pytest.raises(InvalidSequence, match="has a row in an open step"):
        scheduler.extend(run, [4])
    scheduler.commit(ahead)
    assert scheduler.accept(ahead, [77]) == []
    held = cache.sequences[run]
    assert (run.tokens.tolist(), held.num_computed_tokens) == ([1, 2, 3, STOP], 4)
    assert held.num_tokens == 4, "the ids of computed tokens are known, so that their blocks are published"
    scheduler.check_invariants()
    scheduler.extend(run, [4, 5])
    assert scheduler.schedule().counts == [2], "the last token was computed in the step ahead"


@pytest.mark.parametrize("kind", ["plain", "overlap", "swap", "drafts", "overlapped drafts"])
@pytest.mark.parametrize("seed", range(4))
def test_random_turns_under_preemption_have_the_answers_of_whole_prompts(kind, seed):
    choice = random.Random(seed)
    options = {"num_blocks": 24, "swap_blocks": 20 if kind == "swap" else None, "overlap": "overlap" in kind}
    options |= {"max_tokens_per_step": 12, "headroom": 0.0}
    stops = lambda _, token: token % 5 == 0  # noqa: E731
    server = (
        DraftServer(propose=some_right(choice, 3), ends=stops, **options)
        if "drafts" in kind
        else Server(ends=stops, **options)
    )
    runs = [server.add(Request(number, [number] * 5, 6, resumable=True)) for number in range(8)]
    prompts, turns = {run: run.request.prompt.tolist() for run in runs}, 0
    for _ in range(600):
        is_over = not server.turn()
        server.check()
        for run in server.scheduler.idle:
            text = answer(run.request, ends=stops)
            assert run.tokens.tolist() == text
            assert text[: len(prompts[run])] == prompts[run]
            if any(run in step.runs for step in server.scheduler.steps) or choice.random() < 0.4:
                continue
            drops = choice.random() < 0.5
            new = [choice.randint(1, 99) for _ in range(choice.randint(1, 5))]
            if len(text) > 30 or choice.random() < 0.1:
                server.scheduler.finish(run)
                continue
            server.scheduler.extend(run, new, drop_last=drops)
            del server.ended[run.request.id, 0]
            prompts[run] = text[: -1 if drops and run.num_generated else None][: len(run.request.prompt) - len(new)]
            prompts[run] += new
            turns += 1
            assert run.request.prompt.tolist() == prompts[run]
            server.check()
        if is_over and not server.scheduler.idle and not server.scheduler.waiting:
            break
    else:
        raise AssertionError("the scheduler makes no progress")
    assert turns > 5
    assert server.scheduler.num_reclaimed
    server.check_empty()


@pytest.mark.parametrize("at", ["idle", "running"])
def test_spans_of_a_turn_count_from_its_input(at):
    caches = [PagedKVCache(AttentionSpec(1, 8), num_blocks=40, block_size=4, device="none") for _ in range(2)]
    chat, whole = (Scheduler(cache) for cache in caches)
    run = chat.add(Request(0, range(9), 3 if at == "idle" else 9, spans=[(1, 3, b"first")], resumable=at == "idle"))
    if at == "idle":
        drain(chat)
    else:
        advance(chat, 3)
    known = (run.tokens if run.held is None else run.held.tokens).tolist()
    chat.extend(run, [7] * 8, max_new_tokens=2, spans=[(2, 6, b"second")])
    spans = ((1, 3, b"first"), (14, 18, b"second"))
    assert run.request.spans == spans
    step = chat.schedule()
    assert step.counts == [12], "two blocks of the first turn are cached"
    assert [(span.start, span.end) for span in step.encoder_spans] == [(14, 18)]
    chat.abandon(step)
    drain(chat)
    other = whole.add(Request(0, [*known, *[7] * 8], 2, spans=spans))
    drain(whole)
    assert run.tokens.tolist() == other.tokens.tolist()
    lengths = {(len(run.tokens), digest): cache.match_length(run.tokens, spans=[spans[0], (14, 18, digest)])
               for cache in caches for digest in (b"second", b"third")}  # fmt: skip
    assert set(lengths.values()) == {20, 12}


def test_turns_that_are_refused_change_nothing():
    scheduler = Scheduler(FakeCache(9), max_encoder_tokens=4)
    run, other = idle_run(scheduler), scheduler.add(Request(1, [1], 9))
    for tokens, options, error, message in [
        ([], {}, ShapeError, "tokens is empty"),
        ([1] * 30, {}, ShapeError, "needs 41 slots"),
        ([1], {"drop_last": 1}, UnsupportedOption, "drop_last is 1"),
        ([1], {"spans": [(0, 2, b"a")]}, ShapeError, "ends after the 1 new tokens"),
        ([1] * 6, {"spans": [(0, 6, b"a")]}, ShapeError, "needs 6 encoder tokens"),
        ([1], {"max_new_tokens": -1}, ShapeError, "max_new_tokens is -1"),
    ]:
        with pytest.raises(error, match=message):
            scheduler.extend(run, tokens, **options)
        assert run.state is State.IDLE
    with pytest.raises(UnsupportedOption, match="drop_last is True, and"):
        scheduler.extend(other, [1], drop_last=True)
    with pytest.raises(UnsupportedOption, match="resumable is 1"):
        Request(0, [1], 1, resumable=1)
    scheduler.check_invariants()
    assert (len(run.tokens), run.request.max_new_tokens) == (9, 3)
