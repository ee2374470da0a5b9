"""Schedules of vLLM's and SGLang's own tests, with their inputs and numbers, where the schedulers agree."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, UnsupportedOption
from pagecore.serving import DraftTree, Request, Scheduler, State
from pagecore.serving.scheduling.admission import Admission
from pagecore.tiers import HostTier, Tiers


def made(num_blocks=10_000, prefix_cache=True, **options):
    cache = PagedKVCache(
        AttentionSpec(1, 8), num_blocks=num_blocks, block_size=16, max_sequences=16, device="none",
        prefix_cache=prefix_cache,
    )  # fmt: skip
    return Scheduler(cache, **options)


def asked(number, prompt, new, **options):
    return Request(number, np.full(prompt, number, np.int32), new, **options)


def overlapped(scheduler, between=lambda: None):
    """Serve with one step ahead; return the tokens of each step."""
    totals, last = [], None
    while True:
        step = scheduler.schedule()
        if step is None and last is None:
            return totals
        if last is not None:
            between()
            scheduler.accept(last, np.arange(len(last.outputs)))
        if step is not None:
            totals.append(step.batch.num_tokens)
            scheduler.commit(step)
        last = step


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_long_prompts_are_computed_together_in_chunks(prefix_cache):
    scheduler = made(max_tokens_per_step=1024, chunked_prefill_size=400, prefix_cache=prefix_cache)
    for number in range(3):
        scheduler.add(asked(number, 800, 16))
    counts = []
    for _ in range(3):
        step = scheduler.schedule()
        counts.append(step.counts)
        scheduler.commit(step)
        scheduler.accept(step, [0] * len(step.outputs))
    assert counts == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_a_long_prompt_is_not_passed_by_short_ones():
    scheduler = made(max_tokens_per_step=1024, max_running=3)
    runs = [scheduler.add(asked(number, length, 16)) for number, length in enumerate((800, 800, 10, 10))]
    step = scheduler.schedule()
    assert (step.runs, step.counts) == (runs[:2], [800, 224])


@pytest.mark.parametrize("new", [1, 2, 3, 5])
def test_overlap_computes_no_token_past_the_last(new):
    scheduler = made(overlap=True)
    runs = [scheduler.add(asked(number, 10, new)) for number in range(2)]
    assert sum(overlapped(scheduler)) == 2 * (10 + new - 1)
    assert [run.num_generated for run in runs] == [new, new]


def test_runs_cancelled_one_a_step_keep_the_tokens_of_the_steps_before():
    scheduler = made(overlap=True)
    runs = [scheduler.add(asked(number, 10, 20)) for number in range(10)]
    order = [0, 8, 3, 1, 6, 4, 2, 5, 7, 9]
    left = list(order)

    def cancel():
        if left:
            scheduler.cancel(runs[left.pop(0)])

    overlapped(scheduler, cancel)
    assert [run.num_generated for run in runs] == [order.index(number) for number in range(10)]
    assert all(run.state is State.CANCELLED for run in runs)


def test_the_next_turn_of_a_chat_computes_what_follows_the_last_full_block():
    scheduler = made(overlap=True, max_tokens_per_step=1000)
    runs = [scheduler.add(asked(number, 100, 200)) for number in range(5)]
    overlapped(scheduler)
    for number, run in enumerate(runs):
        scheduler.add(Request(number, run.tokens, 200))
    assert scheduler.schedule().counts == [300 % 16] * 5


def test_a_request_that_waits_for_blocks_counts_its_prompt_once():
    scheduler = made(num_blocks=7, headroom=0.0)
    seed = scheduler.add(asked(5, 32, 2))
    serve(scheduler)
    assert seed.state is State.FINISHED
    before = scheduler.reuse
    running = scheduler.add(asked(1, 64, 2))
    step = scheduler.schedule()
    waiting = scheduler.add(asked(5, 48, 1))
    scheduler.commit(step)
    scheduler.accept(step, [0])
    step = scheduler.schedule()
    assert (step.runs, waiting.state) == ([running], State.WAITING)
    scheduler.commit(step)
    scheduler.accept(step, [0])
    serve(scheduler)
    assert scheduler.reuse.prefix_query_tokens - before.prefix_query_tokens == 64 + 48
    assert scheduler.reuse.prefix_hit_tokens - before.prefix_hit_tokens <= 32


def test_the_smaller_priority_gives_way_when_blocks_run_out_and_resumes_with_its_tokens():
    scheduler = made(num_blocks=5, headroom=0.0, policy="priority", max_running=2, max_tokens_per_step=200)
    low = scheduler.add(asked(0, 30, 16))
    one_step(scheduler)
    high = scheduler.add(asked(1, 32, 16, priority=1))
    one_step(scheduler)
    assert scheduler.cache.num_available == 0
    step = scheduler.schedule()
    assert (step.runs, low.state, low.num_preemptions) == ([high], State.WAITING, 1)
    scheduler.commit(step)
    scheduler.accept(step, [0])
    scheduler.cancel(high)
    step = scheduler.schedule()
    assert step.runs == [low]
    assert len(low.tokens) == 32


@pytest.mark.parametrize(
    ("new", "priority", "victims"),
    [(49, 1, [0]), (49, 0, []), (110, 1, []), (110, 2, [0, 1]), (110, 3, [0, 1]), (200, 3, [0, 1, 2])],
)
def test_a_larger_priority_takes_the_room_that_is_reserved_for_the_tokens_of_smaller_ones(new, priority, victims):
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=230, block_size=1, max_sequences=8, device="none")
    scheduler = Scheduler(cache, headroom=0.0, policy="priority", new_token_ratio=0.7, preemption_threshold=0)
    for number, reserved in enumerate((50, 75, 100)):
        scheduler.add(asked(number, 1, reserved, priority=number, ignore_eos=True))
    one_step(scheduler)
    run = scheduler.add(asked(9, 1, new, priority=priority, ignore_eos=True))
    one_step(scheduler)
    assert sorted(each.request.id for each in scheduler.waiting if each is not run) == victims
    assert scheduler.new_token_ratio > 0.69  # a retraction would set it to less
    assert (run in scheduler.running) == bool(victims)


def one_step(scheduler):
    step = scheduler.schedule()
    scheduler.commit(step)
    scheduler.accept(step, [0] * len(step.outputs))


def serve(scheduler):
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step)
        scheduler.accept(step, [0] * len(step.outputs))


# -- drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "ids", "expected"),
    [
        ([[1, 2, 3]], [[1, 2, 3, 4]], (1, 3, 3, (1, 1, 1))),
        ([[1, 2, 3]], [[1, 5]], (1, 3, 1, (1, 0, 0))),
        ([[1, 2], [3]], [[1, 2, 5], [3, 4]], (2, 3, 3, (2, 1))),
        ([[1]], [[1, 2]], (1, 1, 1, (1,))),
        ([[]], [[5]], (0, 0, 0, ())),
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7], [4, 8]], (2, 6, 3, (2, 1, 0))),
    ],
)
def test_drafts_are_counted_as_in_vllm(drafts, ids, expected):
    scheduler = made()
    runs = [scheduler.add(asked(number, 1, 16)) for number in range(len(drafts))]
    step = scheduler.schedule()
    scheduler.commit(step)
    scheduler.accept(step, [0] * len(runs))
    step = scheduler.schedule(dict(zip(runs, drafts, strict=True)))
    assert step.counts == [1 + len(listed) for listed in drafts]
    scheduler.commit(step, [len(gained) for gained in ids])
    scheduler.accept(step, ids)
    figures = scheduler.speculation
    counted = figures.num_drafts, figures.num_draft_tokens, figures.num_accepted_tokens
    assert (*counted, figures.accepted_per_position) == expected


def test_a_prompt_in_chunks_takes_no_drafts():
    scheduler = made(max_tokens_per_step=50)
    run = scheduler.add(asked(0, 80, 16))
    counts = []
    for drafts in (None, {run: [1, 2, 3]}, {run: [1, 2, 3]}):
        step = scheduler.schedule(drafts)
        counts.append((step.counts, step.has_drafts))
        scheduler.commit(step, [1] * len(step.outputs) if step.outputs else None)
        scheduler.accept(step, [[0]] * len(step.outputs))
    assert counts == [([50], False), ([30], False), ([4], True)]


STOP = 2


@pytest.mark.parametrize(
    ("ids", "new", "kept"),
    [
        ([12, STOP, 20], 5, [12, STOP]),  # the stop id and the last token fall into one step
        ([12, STOP, 20], 100, [12, STOP]),
        ([12, STOP], 100, [12, STOP]),
        ([STOP, 10, 11], 100, [STOP]),
    ],
)
def test_a_stop_id_comes_before_the_limit_of_tokens(ids, new, kept):
    scheduler = made()
    run = scheduler.add(asked(0, 4, new, stop_token_ids=(STOP,)))
    for token in (10, 11):
        step = scheduler.schedule()
        scheduler.commit(step)
        scheduler.accept(step, [token])
    step = scheduler.schedule(len(ids) - 1)
    scheduler.commit(step, [len(ids)])
    assert scheduler.accept(step, [ids]) == [run]
    assert run.generated.tolist() == [10, 11, *kept]


def test_ids_of_the_end_of_a_text_are_ignored_on_request():
    scheduler = made()
    run = scheduler.add(asked(0, 4, 10, stop_token_ids=(STOP,), ignore_eos=True))
    step = scheduler.schedule()
    scheduler.commit(step)
    scheduler.accept(step, [0])
    step = scheduler.schedule({run: [STOP, 10]})
    scheduler.commit(step, [3])
    assert scheduler.accept(step, [[STOP, 10, 11]]) == []
    assert run.held.tokens.tolist()[-3:] == [STOP, 10, 11]


def counts_of(scheduler, **options):
    """Serve one step; return its tokens by request."""
    step = scheduler.schedule(**options)
    scheduler.commit(step)
    scheduler.accept(step, np.arange(len(step.outputs)))
    return {run.request.id: count for run, count in zip(step.runs, step.counts, strict=True)}


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_are_held_back_only_while_others_decode(overlap):
    scheduler = made(max_tokens_per_step=50, overlap=overlap)
    scheduler.add(asked(0, 4, 3))
    assert counts_of(scheduler, hold_prompts=True) == {0: 4}
    scheduler.add(asked(1, 80, 1))
    assert counts_of(scheduler) == {0: 1, 1: 49}
    scheduler.add(asked(2, 8, 1))
    assert counts_of(scheduler, hold_prompts=True) == {0: 1}  # neither the second part nor the new request
    assert counts_of(scheduler, hold_prompts=True) == {1: 31, 2: 8}
    assert scheduler.schedule(hold_prompts=True) is None
    with pytest.raises(UnsupportedOption, match="hold_prompts"):
        scheduler.schedule(hold_prompts=1)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_requests_with_one_token_left_are_admitted_while_prompts_are_held_back(policy):
    """As in vLLM, whose throttled steps admit requests up to the first with more tokens to compute."""
    scheduler = made(max_tokens_per_step=50, policy=policy, share_prompts=False)
    shared = np.arange(33)
    scheduler.add(Request(0, shared, 9))
    assert counts_of(scheduler) == {0: 33}
    scheduler.add(Request(1, shared, 9))
    scheduler.add(Request(2, [7], 9))
    scheduler.add(asked(3, 2, 9))
    scheduler.add(Request(4, shared, 9))
    assert counts_of(scheduler, hold_prompts=True) == {0: 1, 1: 1, 2: 1} | ({4: 1} if policy == "lpm" else {})
    assert counts_of(scheduler) == {0: 1, 1: 1, 2: 1, 3: 2, 4: 1}
    scheduler.check_invariants()


def test_a_held_prompt_keeps_its_room_from_requests_with_one_token_left():
    """8 blocks: 2 of a decode, 6 that the held prompt needs, of which it has 2."""
    scheduler = made(num_blocks=9, max_tokens_per_step=64, chunked_prefill_size=32, prefix_cache=False, headroom=0.0)
    scheduler.add(asked(0, 20, 9))
    scheduler.add(asked(1, 96, 1))
    assert counts_of(scheduler) == {0: 20, 1: 32}
    scheduler.add(asked(2, 1, 9))
    assert counts_of(scheduler, hold_prompts=True) == {0: 1}
    assert [counts_of(scheduler) for _ in range(3)] == [{0: 1, 1: 32}, {0: 1, 1: 32}, {0: 1, 2: 1}]
    assert scheduler.num_preemptions == 0


def test_a_prompt_whose_cached_prefix_is_gone_is_held_back():
    """ "lpm" has looked both prompts up before the cache is cleared."""
    scheduler = made(policy="lpm")
    first, second = np.arange(100, 133), np.arange(200, 297)
    scheduler.add(asked(0, 1, 99))
    scheduler.add(Request(1, first, 1))
    scheduler.add(Request(2, second, 1))
    assert counts_of(scheduler) == {0: 1, 1: 33, 2: 97}
    longer = scheduler.add(Request(3, np.append(second, [1, 2]), 1))
    scheduler.add(Request(4, first, 1))
    assert counts_of(scheduler, hold_prompts=True) == {0: 1}
    scheduler.cancel(longer)
    scheduler.cache.clear_prefix_cache()
    assert counts_of(scheduler, hold_prompts=True) == {0: 1}
    assert counts_of(scheduler) == {0: 1, 4: 33}


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_prompt_of_which_the_pool_has_no_room_for_all_that_a_tier_has_is_held_back(is_pinned):
    """10 blocks: 6 of an idle run or of a pin, and 1 of a decode; the tier has 4 blocks of the prompt; 3 fit."""
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=11, block_size=4, max_sequences=8)
    scheduler, prompt = Scheduler(cache, headroom=0.0), np.arange(100, 117)
    with Tiers(cache, HostTier(cache, num_blocks=40), write="through", min_tokens=1) as tiers:
        scheduler.add(Request(0, prompt, 1))
        counts_of(scheduler)
        tiers.poll()
        cache.clear_prefix_cache()
        idle = scheduler.add(asked(1, 24, 1, resumable=True))
        counts_of(scheduler)
        if is_pinned:
            pin = cache.pin_prefix(idle.tokens)
            scheduler.cancel(idle)
        scheduler.add(asked(2, 2, 9))
        counts_of(scheduler)
        assert cache.match_length(prompt) == 16
        scheduler.add(Request(3, prompt, 2))
        assert counts_of(scheduler, hold_prompts=True) == {2: 1}
        scheduler.check_invariants()
        pin.release() if is_pinned else scheduler.cancel(idle)
        assert counts_of(scheduler, hold_prompts=True) == {2: 1, 3: 1}


class Calls:
    """Counts the calls of methods of an object, which it replaces."""

    def __init__(self, patch, owner, *names):
        self.counts = dict.fromkeys(names, 0)
        for name in names:
            patch.setattr(owner, name, self.counting(name, getattr(owner, name)))

    def counting(self, name, method):
        def call(*args, **options):
            self.counts[name] += 1
            return method(*args, **options)

        return call


@pytest.mark.parametrize(("length", "most", "looked_up"), [(34, None, 0), (48, None, 0), (33, 31, 0), (33, None, 4)])
def test_a_held_prompt_is_looked_up_only_if_all_but_one_of_its_tokens_may_be_cached(
    monkeypatch, length, most, looked_up
):
    scheduler = made(max_tokens_per_step=99)  # blocks of 16 tokens
    scheduler.add(asked(0, 4, 99))
    counts_of(scheduler)
    scheduler.add(Request(1, np.arange(length), 1, max_reused_tokens=most))
    calls = Calls(monkeypatch, PagedKVCache, "match_length", "add_sequence")
    for _ in range(4):
        assert counts_of(scheduler, hold_prompts=True) == {0: 1}
    assert calls.counts == {"match_length": looked_up, "add_sequence": 0}


@pytest.mark.parametrize("news", ["room", "none"])
def test_a_prompt_that_was_pinned_and_held_back_is_pinned_again_after_news_alone(monkeypatch, news):
    """The tier has 4 blocks of the prompt, of which 3 fit: steps that hold it back promote them once."""
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=11, block_size=4, max_sequences=8)
    scheduler, prompt = Scheduler(cache, headroom=0.0), np.arange(100, 117)
    with Tiers(cache, HostTier(cache, num_blocks=40), write="through", min_tokens=1) as tiers:
        scheduler.add(Request(0, prompt, 1))
        counts_of(scheduler)
        tiers.poll()
        cache.clear_prefix_cache()
        idle = scheduler.add(asked(1, 24, 1, resumable=True))
        counts_of(scheduler)
        scheduler.add(asked(2, 2, 9))
        counts_of(scheduler)
        calls = Calls(monkeypatch, PagedKVCache, "add_sequence")
        scheduler.add(Request(3, prompt, 2))
        for _ in range(3):
            assert counts_of(scheduler, hold_prompts=True) == {2: 1}
            cache.clear_prefix_cache()
        assert (calls.counts, tiers.host.stats().num_promotions) == ({"add_sequence": 1}, 1)
        if news == "room":
            scheduler.cancel(idle)
            assert counts_of(scheduler, hold_prompts=True) == {2: 1, 3: 1}
        else:
            assert counts_of(scheduler) == {2: 1, 3: 9}
        scheduler.check_invariants()


def test_a_prompt_whose_prefix_is_gone_once_it_is_pinned_again_is_held_back(monkeypatch):
    """Two of four runs fit, and meanwhile the cached prefix of the third is evicted."""
    scheduler = made(max_tokens_per_step=999)
    prompts = [np.arange(100 * number, 100 * number + 33) for number in range(8)]
    for prompt in prompts:
        scheduler.add(Request(int(prompt[0]), prompt, 1))
    scheduler.add(asked(7, 1, 99))
    counts_of(scheduler)
    for number, prompt in enumerate(prompts):
        scheduler.add(Request(number, prompt, 9))

    def fits(_, runs):
        if len(runs) == 2 and runs[0].request.id == 3:
            scheduler.cache.clear_prefix_cache()
        return len(runs) < 4

    with monkeypatch.context() as patch:
        patch.setattr(Admission, "_fits", fits)
        assert counts_of(scheduler, hold_prompts=True) == {7: 1, 0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    scheduler.check_invariants()
    assert counts_of(scheduler, hold_prompts=True) == {7: 1, 0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    assert counts_of(scheduler)[5] == 33


def test_no_decode_gives_way_to_a_priority_while_prompts_are_held_back():
    scheduler = made(max_tokens_per_step=1, policy="priority", preemption_threshold=0)
    scheduler.add(asked(0, 1, 9))
    counts_of(scheduler)
    scheduler.add(asked(1, 1, 1, priority=1))
    assert counts_of(scheduler, hold_prompts=True) == {0: 1}
    assert counts_of(scheduler) == {1: 1}
    assert scheduler.num_preemptions == 1
    assert counts_of(scheduler, hold_prompts=True) == {0: 1}  # no run decodes: the first one computes its prompt again


@pytest.mark.parametrize(("drafts", "count"), [(3, 4), (DraftTree([-1, -1, 0]), 4), (60, 50)])
def test_decodes_bring_their_drafts_while_prompts_are_held_back(drafts, count):
    scheduler = made(max_tokens_per_step=50, max_tree_tokens=8)
    scheduler.add(asked(0, 4, 99))
    counts_of(scheduler)
    scheduler.add(asked(1, 80, 1))
    step = scheduler.schedule(drafts, hold_prompts=True)
    assert step.counts == [count]
    scheduler.abandon(step)
    assert counts_of(scheduler) == {0: 1, 1: 49}


def test_a_prompt_that_was_held_back_goes_on_when_the_last_decode_gives_way():
    scheduler = made(num_blocks=10, max_tokens_per_step=64, chunked_prefill_size=32, prefix_cache=False)
    scheduler.add(asked(0, 100, 1))
    scheduler.add(asked(1, 30, 100))
    assert counts_of(scheduler) == {0: 32, 1: 30}
    served = [counts_of(scheduler, hold_prompts=True) for _ in range(83)]
    assert served == [{1: 1}] * 82 + [{0: 32}]  # 112 tokens fill the blocks that the prompt does not have yet
    assert scheduler.num_preemptions == 1
