"""Resumable requests: runs that are idle between two turns, and what gives way to others."""

import random

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.errors import InvalidSequence, ShapeError, UnsupportedOption
from pagecore.serving import QueueFull, Request, Scheduler
from pagecore.serving.scheduling.request import State
from tests.faults import PAGECORE, is_full, lines_of, raise_at
from tests.serving.drafted import DraftServer, some_right
from tests.serving.fake_cache import FakeCache, FakeSpace
from tests.serving.runs import advance, drain, next_token
from tests.serving.served import Server, answer

SERVING = PAGECORE / "serving"
STOP = 900


def step_of(scheduler, *ids, drafts=None, accepted=None):
    """Run a step whose outputs gain `ids`; return the tokens of its rows."""
    step = scheduler.schedule(drafts)
    scheduler.commit(step, accepted)
    scheduler.accept(step, list(ids))
    return step.counts


def idle_run(scheduler, number=0, prompt=6, new=3, **options):
    """Return a run that has generated `new` tokens and is idle."""
    ids = np.arange(prompt) + 100 * number
    run = scheduler.add(Request(number, ids, new, resumable=True, **options))
    drain(scheduler)
    assert run.state is State.IDLE
    return run


def text_of(*turns, sample=0):
    """Return the tokens after turns of (input, generated tokens)."""
    text = []
    for given, count in turns:
        text += list(given)
        for _ in range(count):
            text.append(next_token(text, sample))
    return text


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


def test_a_sequence_with_drafts_after_the_end_of_its_turn_is_not_swapped_out():
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=40, block_size=4, device="none")
    scheduler = Scheduler(cache, swap_space=SwapSpace(cache, num_blocks=30))
    run = scheduler.add(Request(0, [1, 2, 3], 4, stop_token_ids=[11], resumable=True))
    step_of(scheduler, 10)
    step_of(scheduler, [11, 12, 13], drafts={run: [11, 12]}, accepted=[3])
    scheduler.preempt_all()
    assert (cache.stats().num_used_blocks, cache.stats().num_swapped_blocks) == (0, 0)
    scheduler.extend(run, [7, 8])
    assert step_of(scheduler, 20) == [3], "the first four tokens are cached"


def test_idle_runs_take_no_budget_and_no_place_among_the_running_ones():
    cache = FakeCache(100, max_sequences=8)
    scheduler = Scheduler(cache, max_running=2, max_tokens_per_step=2)
    idle = [idle_run(scheduler, number) for number in range(5)]
    assert (scheduler.idle, scheduler.num_idle, scheduler.num_running) == (tuple(idle), 5, 0)
    held = cache.num_available
    others = [scheduler.add(Request(number, [number] * 4, 2)) for number in range(10, 12)]
    assert step_of(scheduler) == [2]
    drain(scheduler)
    assert [run.num_generated for run in others] == [2, 2]
    assert (scheduler.num_reclaimed, scheduler.num_preemptions, cache.num_available) == (0, 0, held)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("swap_blocks", [None, 30])
def test_idle_runs_give_way_before_a_running_one_and_the_oldest_first(swap_blocks, prefix_cache):
    cache = FakeCache(11, prefix_cache=prefix_cache)
    space = swap_blocks and FakeSpace(cache, swap_blocks)
    scheduler = Scheduler(cache, headroom=0.0, swap_space=space)
    idle = [idle_run(scheduler, number) for number in range(3)]  # two blocks each
    runs = [scheduler.add(Request(number, [number], 10)) for number in (7, 8)]
    drain(scheduler, lambda _: scheduler.check_invariants())
    assert [run.num_generated for run in runs] == [10, 10]
    assert (scheduler.num_reclaimed, scheduler.num_preemptions) == (1, 0)
    assert [run in scheduler.holders for run in idle] == [False, True, True]
    scheduler.extend(idle[0], [5, 5])
    drain(scheduler)
    assert idle[0].tokens.tolist() == text_of((range(6), 3), ([5, 5], 3))


def test_an_admission_takes_blocks_and_rows_of_idle_runs():
    cache = FakeCache(9, max_sequences=3, prefix_cache=False)
    scheduler = Scheduler(cache, headroom=0.0)
    idle = [idle_run(scheduler, number) for number in range(3)]
    scheduler.add(Request(5, [5], 2))
    drain(scheduler)
    assert scheduler.num_reclaimed == 1, "a row was short"
    scheduler.add(Request(6, range(30), 1))
    drain(scheduler)
    assert scheduler.num_reclaimed == 3, "blocks were short"
    assert not scheduler.holders
    assert cache.num_available == 8
    assert scheduler.num_idle == len(idle)


def test_a_prompt_waits_for_no_idle_run_while_others_run():
    cache = FakeCache(9, prefix_cache=False)
    scheduler = Scheduler(cache, headroom=0.0)
    idle_run(scheduler)
    first = scheduler.add(Request(1, [1], 9))
    advance(scheduler)
    second = scheduler.add(Request(2, range(24), 1))
    assert scheduler.schedule().runs == [first, second]
    assert scheduler.num_reclaimed == 1


def test_idle_runs_give_way_before_drafts_are_cut():
    cache = FakeCache(6, prefix_cache=False)
    scheduler = Scheduler(cache, headroom=0.0)
    idle_run(scheduler)
    run = scheduler.add(Request(1, range(11), 9))
    advance(scheduler)
    step = scheduler.schedule({run: 5})
    assert (step.counts, scheduler.num_reclaimed) == ([6], 1)


def test_a_run_that_waits_for_its_next_turn_gives_way_after_the_idle_ones():
    cache = FakeCache(9, prefix_cache=False)
    scheduler = Scheduler(cache, headroom=0.0, max_running=1)
    early, late = idle_run(scheduler), idle_run(scheduler, 1)
    first = scheduler.add(Request(2, [2], 30))
    advance(scheduler)
    scheduler.extend(early, [7])
    assert (scheduler.waiting, scheduler.holders) == ((early,), (first, late, early))
    for reclaimed, holders in ((1, (first, early)), (2, (first,))):
        while scheduler.num_reclaimed < reclaimed:
            advance(scheduler)
        assert scheduler.holders == holders
        scheduler.check_invariants()
    assert (scheduler.waiting, scheduler.num_preemptions) == ((early,), 0)
    drain(scheduler)
    assert early.tokens.tolist() == text_of((range(6), 3), ([7], 3))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_runs_with_a_further_turn_give_way_in_reverse_order_of_the_queue(policy):
    scheduler = Scheduler(FakeCache(60), policy=policy, max_running=1)
    idle = [idle_run(scheduler, number, priority=priority) for number, priority in enumerate([0, 5, 1])]
    scheduler.add(Request(9, [9], 30, priority=9))
    advance(scheduler)
    for run in idle:
        scheduler.extend(run, [7])
    order = {"fcfs": [2, 1, 0], "priority": [0, 2, 1]}[policy]
    assert list(scheduler.holders[1:]) == [idle[number] for number in order]


def test_idle_runs_keep_their_place_in_the_swap_space_if_a_run_does_not_fit_it():
    cache = FakeCache(20, prefix_cache=False)
    space = FakeSpace(cache, 5)
    scheduler = Scheduler(cache, headroom=0.0, swap_space=space)
    idle = [idle_run(scheduler, number) for number in range(2)]
    scheduler.preempt_all()
    scheduler.add(Request(5, range(30), 3))
    advance(scheduler, 2)
    scheduler.preempt_all()
    assert [run in cache.sequences for run in idle] == [True, True]


def test_reuse_does_not_fall_if_an_admission_is_repeated_and_finds_less():
    cache = FakeCache(20)
    scheduler = Scheduler(cache)
    idle_run(scheduler, prompt=20, new=1)
    scheduler.finish(scheduler.idle[0])
    run, seen = scheduler.add(Request(1, range(24), 3)), []
    scheduler.abandon(scheduler.schedule())
    seen.append(scheduler.reuse)
    scheduler.preempt([run])
    cache.lose()
    cache.free += range(19, 0, -1)  # everything was evicted meanwhile
    for block in cache.free:
        cache.holders[block] = 0
    scheduler.commit(scheduler.schedule())
    seen.append(scheduler.reuse)
    assert [reuse.prefix_query_tokens for reuse in seen] == [20, 44]
    assert [reuse.prefix_hit_tokens for reuse in seen] == [0, 0]


@pytest.mark.parametrize("spans", [[], ()])
@pytest.mark.parametrize("at", ["idle", "running"])
def test_empty_spans_do_not_cost_a_run_its_sequence(at, spans):
    scheduler = Scheduler(FakeCache(40))
    run = idle_run(scheduler) if at == "idle" else scheduler.add(Request(0, range(6), 9))
    if at == "running":
        advance(scheduler, 2)
    scheduler.extend(run, [7, 8], spans=spans)
    assert (scheduler.schedule().counts, scheduler.num_preemptions) == ([3], 0)


def test_preempted_runs_take_the_place_of_idle_ones_in_the_swap_space():
    cache = FakeCache(9, prefix_cache=False)
    space = FakeSpace(cache, 5)
    scheduler = Scheduler(cache, headroom=0.0, swap_space=space)
    idle = [idle_run(scheduler, number) for number in range(2)]
    assert scheduler.preempt_all() == []
    assert (space.num_free, scheduler.num_reclaimed, scheduler.num_idle) == (0, 2, 2)
    run = scheduler.add(Request(5, range(9), 3))
    advance(scheduler, 2)
    assert scheduler.preempt_all() == [run]
    assert run.held is not None
    assert [cache.sequences.get(one) for one in idle] == [None, None]
    scheduler.extend(idle[1], [4])
    drain(scheduler)
    assert idle[1].tokens.tolist() == text_of((range(100, 106), 3), ([4], 3))
    scheduler.preempt_all(swap=False)
    assert not cache.sequences


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


def test_blocks_that_were_revoked_leave_an_idle_run():
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=40, block_size=4, device="none")
    scheduler = Scheduler(cache)
    run = idle_run(scheduler, prompt=20)
    (affected,) = cache.revoke_prefix(range(20), valid=6)
    assert scheduler.preempt([affected.id]) == []
    scheduler.extend(run, [1, 2])
    assert scheduler.schedule().counts == [20 + 3 + 2 - 4]


@pytest.mark.parametrize(("swap", "counts"), [(True, [3]), (False, [10 + 2 - 8])])
def test_a_turn_continues_from_the_swap_space_or_the_cached_prefix(swap, counts):
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=40, block_size=4, device="none")
    scheduler = Scheduler(cache, swap_space=SwapSpace(cache, num_blocks=30))
    run = idle_run(scheduler, prompt=7)
    scheduler.preempt_all(swap=swap)
    assert cache.stats().num_used_blocks == 0
    scheduler.extend(run, [1, 2])
    assert step_of(scheduler, 5) == counts
    assert scheduler.reuse.num_recovered_tokens == (0 if swap else 8)


def made_idle(how):
    """Return a scheduler and an idle run whose sequence is on the device, swapped or gone, or before its `accept`."""
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=40, block_size=4, device="none")
    scheduler = Scheduler(cache, swap_space=SwapSpace(cache, num_blocks=30), overlap=how == "ahead")
    if how == "ahead":
        run = scheduler.add(Request(0, range(6), 9, stop_token_ids=[next_token(range(6), 0)], resumable=True))
        scheduler.commit(scheduler.schedule())
        scheduler.commit(scheduler.schedule())
        return scheduler, run
    if how == "drafted":  # the sequence has computed a draft after the end of the turn
        run = scheduler.add(Request(0, [1, 2, 3], 4, stop_token_ids=[11], resumable=True))
        step_of(scheduler, 10)
        step_of(scheduler, [11, 12, 13], drafts={run: [11, 12]}, accepted=[3])
        return scheduler, run
    run = idle_run(scheduler)
    if how in ("swapped", "gone"):
        scheduler.preempt_all(swap=how == "swapped")
    return scheduler, run


EXTENSIONS = {
    "parked": {},
    "drafted": {},
    "dropped": {"drop_last": True},
    "swapped": {},
    "gone": {},
    "spans": {"spans": [(0, 1, 5)]},
}
CALLS = {
    "extend": lambda scheduler, run, how: scheduler.extend(
        run, [7, 8][: 1 if how == "drafted" else 2], **EXTENSIONS[how]
    ),
    "finish": lambda scheduler, run, _: scheduler.finish(run),
    "preempt_all": lambda scheduler, *_: scheduler.preempt_all(),
    "accept": lambda scheduler, *_: scheduler.accept(scheduler.steps[0], [next_token(range(6), 0)]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "how"),
    [*(("extend", how) for how in EXTENSIONS), ("finish", "parked"), ("finish", "swapped"), ("preempt_all", "parked"),
     ("accept", "ahead")],
)  # fmt: skip
def test_an_interrupted_call_has_happened_or_not(call, how):
    """An exception at each event of the call, or at every third; it is repeated if it has not happened."""
    scheduler, run = made_idle(how)
    events = lines_of(lambda: CALLS[call](scheduler, run, how), SERVING)
    end, happened = run.state, set()
    for event in range(1, events + 1, 1 if is_full() else 3):
        scheduler, run = made_idle(how)
        before = run.state
        raise_at(lambda scheduler=scheduler, run=run: CALLS[call](scheduler, run, how), event, SERVING)
        scheduler.check_invariants()
        scheduler.cache.check_invariants()
        happened.add(run.state)
        if run.state is before and (call != "accept" or len(scheduler.steps) == 2):
            CALLS[call](scheduler, run, how)
        assert run.state is end
        if call == "extend":
            drain(scheduler)
            first = text_of((range(6), 3))[: 8 if how == "dropped" else 9]
            whole = ([1, 2, 3, 10, 11, 7], 4) if how == "drafted" else ([*first, 7, 8], 3)
            assert run.tokens.tolist() == text_of(whole)
            assert scheduler.add(Request(7, [7], 1)).arrival > run.arrival, "no two runs have one arrival"
    assert happened == {before, end}
