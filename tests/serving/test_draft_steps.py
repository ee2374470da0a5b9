"""Steps with drafts: which drafts are granted, what commit and accept take, and what is refused."""

import numpy as np
import pytest

from pagecore import PagedKVCache
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.serving import DraftTree, Speculation
from pagecore.serving.scheduling.request import Request, State
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.serving.scheduling.step import StepState
from pagecore.storage import AttentionSpec, Plane, StateSpec
from tests.serving.drafted import SPEC, decoding, real
from tests.serving.fake_cache import FakeCache
from tests.serving.runs import advance, request

# -- what a step grants ------------------------------------------------------------------------------------------------


def test_every_decoding_run_brings_its_token_and_its_drafts():
    scheduler, runs = decoding(5, 6)
    step = scheduler.schedule(3)
    assert (step.runs, step.counts, step.num_decodes, step.num_drafts) == (runs, [4, 4], 2, [3, 3])
    assert step.has_drafts
    assert step.draft_positions.tolist() == [1, 2, 3, 5, 6, 7]
    assert [step.batch.token_ids[place] for place in step.draft_positions] == [-1] * 6
    assert step.outputs == runs
    assert repr(step) == "Step(scheduled, 2 rows, 2 of them decode, 6 drafts, 8 tokens, 2 outputs)"


def test_runs_may_bring_different_numbers_of_drafts_or_their_ids():
    scheduler, runs = decoding(5, 6, 7)
    step = scheduler.schedule({runs[0]: [90, 91], runs[2]: np.int64(1)})
    assert step.num_drafts == [2, 0, 1]
    known = [run.held.tokens[-1] for run in runs]
    assert step.batch.token_ids == [known[0], 90, 91, known[1], known[2], -1]
    assert [run.num_generated for run in runs] == [1, 1, 1]


def test_prompts_share_a_step_with_drafts_and_get_the_tokens_that_these_leave():
    scheduler, (run,) = decoding(5, max_tokens_per_step=16)
    prompt = scheduler.add(request(7, 30, 2))
    step = scheduler.schedule(4)
    assert (step.runs, step.counts, step.outputs) == ([run, prompt], [5, 11], [run])
    scheduler.commit(step, [3])
    scheduler.accept(step, [[1, 2, 3]])
    assert scheduler.schedule({}).counts == [1, 15]


def test_drafts_fill_the_step_in_order_of_admission():
    scheduler, _ = decoding(5, 5, 5, max_tokens_per_step=6, max_running=3)
    assert scheduler.schedule(2).counts == [3, 2, 1]


def test_no_draft_goes_past_the_last_token_of_a_run():
    scheduler, runs = decoding(5, new=4)
    step = scheduler.schedule(9)
    assert step.counts == [3]  # one token is generated, and three may follow
    scheduler.commit(step, [2])
    scheduler.accept(step, [[1, 2]])
    step = scheduler.schedule(9)
    assert step.counts == [1]
    assert not step.has_drafts
    scheduler.commit(step)
    assert scheduler.accept(step, [[3]]) == runs
    assert runs[0].generated.tolist()[1:] == [1, 2, 3]


def test_drafts_of_runs_that_do_not_decode_are_not_used():
    scheduler, (run, ended) = decoding(5, 6, max_tokens_per_step=8, max_running=3)
    prompt = scheduler.add(request(7, 30, 2))
    waiting = scheduler.add(request(8, 30, 2))
    scheduler.cancel(ended)
    step = scheduler.schedule({prompt: 2, waiting: 2, ended: 2, run: 1})
    assert (step.runs, step.num_drafts) == ([run, prompt], [1])


def test_blocks_that_are_short_cost_drafts_and_no_run():
    scheduler, runs = decoding(4, 4, cache=FakeCache(5), new=12, headroom=0.0)
    assert scheduler.cache.num_available == 2
    step = scheduler.schedule(9)
    assert (step.runs, step.counts) == (runs, [4, 4])  # one more block each
    assert scheduler.num_preemptions == 0


def test_blocks_of_rejected_drafts_are_returned_before_a_run_is_preempted():
    scheduler, runs = decoding(4, 4, cache=FakeCache(7), new=12, headroom=0.0)
    step = scheduler.schedule({runs[0]: 8})
    assert step.counts == [9, 1]
    scheduler.commit(step, [1, 1])
    scheduler.accept(step, [[1], [2]])
    assert (scheduler.cache.num_available, runs[0].held.capacity) == (0, 16)
    for _ in range(3):
        advance(scheduler)
    step = scheduler.schedule()
    assert step.runs == runs
    assert scheduler.num_preemptions == 0
    assert runs[0].held.capacity == 12


def test_an_admission_leaves_blocks_for_the_drafts_of_its_step():
    scheduler, (run,) = decoding(4, cache=FakeCache(5), new=12, headroom=0.0)
    waiting = scheduler.add(request(7, 8, 1))
    step = scheduler.schedule(6)
    assert (step.runs, step.counts) == ([run], [7])
    scheduler.abandon(step)
    assert scheduler.schedule(2).runs == [run, waiting]


def test_drafts_that_fill_a_step_do_not_shield_a_run_from_a_larger_priority():
    scheduler, (run,) = decoding(
        5, max_running=1, max_tokens_per_step=6, policy="priority", preemption_threshold=0, cache=FakeCache(64)
    )
    urgent = scheduler.add(Request(7, np.arange(3), 2, priority=1))
    step = scheduler.schedule(5)
    assert (step.runs, run.state) == ([urgent], State.WAITING)


def test_windows_release_blocks_for_accepted_tokens_only():
    cache = PagedKVCache(
        [AttentionSpec(1, 8, window=4), SPEC], num_blocks=17, block_size=2, device="none", prefix_cache=False
    )
    scheduler, (run,) = decoding(6, cache=cache, new=16)
    for accepted in (1, 3, 5, 2):
        step = scheduler.schedule(4)
        scheduler.commit(step, [accepted])
        scheduler.accept(step, [list(range(accepted))])
        cache.check_invariants()
    assert run.num_generated == 12


@pytest.mark.parametrize("lookahead", [0, 3])
def test_windows_with_lookahead_serve_drafts(lookahead):
    specs = [AttentionSpec(1, 8, window=4, lookahead=lookahead), SPEC]
    cache = PagedKVCache(specs, num_blocks=[12, 41], block_size=2, device="none")
    scheduler, runs = decoding(9, 5, cache=cache, new=30, headroom=0.0)
    while scheduler.num_running:
        step = scheduler.schedule(3)
        accepted = [1 + count // 2 for count in step.num_drafts] + [1] * (len(step.outputs) - step.num_decodes)
        if step.has_drafts:
            scheduler.commit(step, accepted)
            scheduler.accept(step, [[5] * count for count in accepted])
        else:
            scheduler.commit(step)
            scheduler.accept(step, [5] * len(step.outputs))
        cache.check_invariants()
    assert [run.num_generated for run in runs] == [30, 30]


# -- commit and accept -------------------------------------------------------------------------------------------------


def test_a_run_gains_its_accepted_drafts_and_one_more_token():
    scheduler, runs = decoding(5, 6, cache=real())
    step = scheduler.schedule(3)
    scheduler.commit(step, [3, 1])
    assert step.accepted == [3, 1]
    assert scheduler.speculation == Speculation()  # counted by `accept`, for which no device waits
    assert scheduler.accept(step, [[7, 8, 9], [4]]) == []
    assert [run.num_generated for run in runs] == [4, 2]
    assert [run.held.num_tokens - run.held.num_computed_tokens for run in runs] == [1, 1]
    assert scheduler.speculation == Speculation(2, 6, 2, (1, 1, 0))
    assert scheduler.figures().speculation is scheduler.speculation
    assert (scheduler.speculation.acceptance_rate, scheduler.speculation.mean_tokens) == (1 / 3, 2.0)


def test_a_rectangular_array_is_read_up_to_the_accepted_tokens():
    scheduler, runs = decoding(5, 6)
    step = scheduler.schedule(2)
    scheduler.commit(step, np.array([3, 1]))
    scheduler.accept(step, np.array([[7, 8, 9], [4, -1, -1]], np.int32))
    assert [run.held.ids[-3:] for run in runs] == [[7, 8, 9], [*runs[1].request.prompt[-1:], runs[1].held.ids[-2], 4]]


@pytest.mark.parametrize("form", ["lists", "table"])
def test_runs_end_at_the_same_ids_of_a_table_and_of_lists(form):
    """By a stop id, too early for `min_new_tokens`, at `max_new_tokens`, by a flag, cancelled, or not at all."""
    scheduler = Scheduler(real(), max_running=6, share_prompts=False)
    options = [{"stop_token_ids": (77,)}, {"stop_token_ids": (77,), "min_new_tokens": 4}, {}, {}, {}, {}]
    news = [20, 20, 4, 20, 20, 20]
    runs = [
        scheduler.add(Request(number, np.arange(5 + number), new, **given))
        for number, (new, given) in enumerate(zip(news, options, strict=True))
    ]
    advance(scheduler)
    step = scheduler.schedule(3)
    counts = [3, 3, 3, 2, 3, 1]
    scheduler.commit(step, counts)
    scheduler.cancel(runs[4])
    ids = np.array([[10, 77, 11, 77], [12, 77, 13, 77], [1, 2, 3, 4], [5, 6, 8, 7], [8, 9, 9, 9], [77, 77, 77, 77]])
    given = ids if form == "table" else [row[:count].tolist() for row, count in zip(ids, counts, strict=True)]
    ended = scheduler.accept(step, given, [number == 3 for number in range(6)])
    assert ended == [runs[0], runs[2], runs[3]]
    last = [(run.tokens if run.held is None else run.held.tokens).tolist()[-4:] for run in runs]
    first = [run.generated[0] for run in runs]
    assert last == [
        [4, first[0], 10, 77], [first[1], 12, 77, 13], [first[2], 1, 2, 3], [7, first[3], 5, 6],
        [6, 7, 8, first[4]], [8, 9, first[5], 77],
    ]  # fmt: skip
    scheduler.check_invariants()
    scheduler.cache.check_invariants()


def test_the_prefix_cache_gets_accepted_tokens_only():
    scheduler, (run,) = decoding(8, cache=real(), new=9)
    text = run.held.tokens.tolist()
    step = scheduler.schedule({run: [50, 51, 52, 53, 54]})
    scheduler.commit(step, [2])
    scheduler.accept(step, [[50, 99]])
    step = scheduler.schedule({run: [98, 97, 55]})
    scheduler.commit(step, [3])
    scheduler.accept(step, [[98, 97, 96]])
    text += [50, 99, 98, 97, 96]
    assert run.held.tokens.tolist() == text
    scheduler.cancel(run)
    find = scheduler.cache.match_length
    assert (find([*text, 0]), find([*text[:9], 50, 51, 52, 53])) == (12, 8)


def test_a_stop_id_among_accepted_tokens_ends_the_run_and_drops_the_ids_after_it():
    cache = real()
    scheduler = Scheduler(cache)
    run = scheduler.add(Request(0, np.arange(7), 20, stop_token_ids=(77,)))
    advance(scheduler)
    step = scheduler.schedule(4)
    scheduler.commit(step, [5])
    text = [*run.held.tokens.tolist(), 11, 12, 13, 77]
    assert scheduler.accept(step, [[11, 12, 13, 77, 14]]) == [run]
    assert run.tokens.tolist() == text
    # The ids before the last one are computed, and stay cached.
    assert cache.match_length([*text[:-1], 5, 6]) == 8
    assert cache.stats().num_used_blocks == 0
    cache.check_invariants()


def test_stop_ids_before_the_least_number_of_tokens_end_nothing():
    scheduler = Scheduler(real())
    run = scheduler.add(Request(0, np.arange(7), 20, stop_token_ids=(77,), min_new_tokens=4))
    advance(scheduler)
    step = scheduler.schedule(3)
    scheduler.commit(step, [4])
    assert scheduler.accept(step, [[77, 77, 77, 5]]) == [run]
    assert run.generated.tolist()[1:] == [77, 77, 77]


def test_a_run_that_the_engine_ends_takes_the_ids_up_to_its_end():
    scheduler, runs = decoding(5, 6, cache=real())
    step = scheduler.schedule(3)
    scheduler.commit(step, [4, 4])
    assert scheduler.accept(step, [[1, 2], [3, 4, 5, 6]], finished=[True, False]) == [runs[0]]
    assert runs[0].generated.tolist()[1:] == [1, 2]
    assert runs[1].num_generated == 5


def test_samples_bring_drafts_of_their_own():
    scheduler = Scheduler(real())
    scheduler.add(request(0, 7, 9, samples=2))
    advance(scheduler)
    first, second = scheduler.running
    step = scheduler.schedule({first: [1, 2], second: [3]})
    assert step.counts == [3, 2]
    scheduler.commit(step, [3, 1])
    scheduler.accept(step, [[1, 2, 4], [5]])
    assert [run.held.tokens.tolist()[8:] for run in (first, second)] == [[1, 2, 4], [5]]
    scheduler.cache.check_invariants()


def test_a_run_cancelled_in_flight_may_have_any_ids():
    scheduler, runs = decoding(5, 6)
    step = scheduler.schedule(2)
    scheduler.cancel(runs[0])
    scheduler.commit(step, [1, 3])
    scheduler.accept(step, [[], [7, 8, 9]])
    assert (runs[0].num_generated, runs[1].num_generated) == (1, 4)
    assert scheduler.speculation == Speculation(1, 2, 2, (1, 1))


def test_drafts_of_a_run_that_takes_none_of_its_ids_are_not_counted():
    scheduler, runs = decoding(5, 6)
    step = scheduler.schedule(2)
    scheduler.commit(step, [2, 3])
    for run in runs:
        scheduler.cancel(run)
    scheduler.accept(step, [[1, 2], [7, 8, 9]])
    assert scheduler.speculation == Speculation()


def test_an_abandoned_step_forgets_its_drafts():
    scheduler, (run,) = decoding(4, cache=real())
    held = run.held.tokens.tolist()
    step = scheduler.schedule({run: [1, 2, 3, 4, 5]})
    used = scheduler.cache.stats().num_used_blocks
    scheduler.abandon(step)
    assert run.held.tokens.tolist() == held
    assert scheduler.cache.stats().num_used_blocks == used - 2
    assert scheduler.schedule().counts == [1]
    assert scheduler.speculation == Speculation()


# -- overlap -----------------------------------------------------------------------------------------------------------


def test_a_step_ahead_continues_after_the_accepted_tokens():
    scheduler, runs = decoding(5, 6, overlap=True)
    first = scheduler.schedule(3)
    scheduler.commit(first, [3, 1])
    second = scheduler.schedule({runs[0]: 2, runs[1]: [70]})
    assert second.counts == [3, 2]
    assert (second.unknown_positions.tolist(), second.unknown_outputs.tolist()) == ([0, 3], [0, 1])
    assert second.draft_positions.tolist() == [1, 2, 4]
    assert second.batch.token_ids == [-1, -1, -1, -1, 70]
    scheduler.accept(first, [[1, 2, 3], [4]])
    scheduler.commit(second, [1, 2])
    scheduler.accept(second, [[5], [70, 6]])
    assert [run.held.ids[-2:] for run in runs] == [[3, 5], [70, 6]]
    scheduler.check_invariants()


def test_nothing_is_scheduled_ahead_for_a_run_that_accepted_tokens_end():
    scheduler, (run,) = decoding(5, new=5, overlap=True)
    step = scheduler.schedule(3)
    scheduler.commit(step, [4])
    assert scheduler.schedule(3) is None
    assert scheduler.accept(step, [[1, 2, 3, 4]]) == [run]


# -- states ------------------------------------------------------------------------------------------------------------


def hybrid(draft_tokens, num_states=12):
    states = StateSpec((Plane("hash", (1,), "int32", per="sequence"),), chunk=4, interval=8, draft_tokens=draft_tokens)
    return PagedKVCache(
        [SPEC, states], num_blocks=33, block_size=2, num_states=num_states, max_sequences=4, device="none"
    )


def test_states_without_slots_for_drafts_refuse_them():
    scheduler, (run,) = decoding(5, cache=hybrid(0))
    for drafts in (1, {run: [7]}):
        with pytest.raises(UnsupportedOption, match="1 drafts, and the layers that keep states have slots for 0"):
            scheduler.schedule(drafts)
    assert scheduler.step is None


def test_drafts_go_up_to_the_slots_of_the_states():
    scheduler, (run,) = decoding(5, cache=hybrid(3))
    with pytest.raises(UnsupportedOption, match="4 drafts, and the layers that keep states have slots for 3; propose"):
        scheduler.schedule(4)
    step = scheduler.schedule(3)
    assert np.asarray(step.batch.draft_write)[0].all()
    scheduler.commit(step, [2])
    scheduler.accept(step, [[1, 2]])
    assert run.num_generated == 3
    scheduler.cache.check_invariants()


def test_state_slots_that_are_short_cost_drafts_where_there_are_no_blocks():
    state = StateSpec((Plane("state", (1,), "int32", per="sequence"),), draft_tokens=1)
    scheduler = Scheduler(PagedKVCache([state], num_states=5, block_size=2, max_tokens_per_sequence=80))
    scheduler.add(request(0, 3, 12, samples=3))
    advance(scheduler)
    step = scheduler.schedule({scheduler.running[0]: 1})
    assert step.counts == [2, 1, 1]
    scheduler.commit(step, [1, 1, 1])
    scheduler.accept(step, [[7], [8], [9]])
    assert scheduler.schedule(1).counts == [1, 1, 1]
    assert scheduler.num_preemptions == 0


# -- trees -------------------------------------------------------------------------------------------------------------


def test_a_tree_is_committed_along_its_path():
    scheduler, (run, other) = decoding(5, 6, cache=real(), max_tree_tokens=8)
    step = scheduler.schedule({run: DraftTree([-1, -1, 0, 1, 1], [10, 11, 12, 13, 14]), other: [20]})
    assert step.counts == [6, 2]
    assert step.parents[0].tolist() == [-1, 0, 0, 1, 2, 2]
    assert np.asarray(step.batch.tree_mask)[:6].tolist() == [1, 3, 5, 11, 21, 37]
    scheduler.commit(step, accepted_path=[[0, 2, 5], [0]])
    assert step.accepted == [3, 1]
    scheduler.accept(step, [[11, 14, 15], [9]])
    assert run.held.tokens.tolist()[-3:] == [11, 14, 15]
    assert scheduler.speculation == Speculation(2, 6, 2, (1, 1))
    scheduler.cache.check_invariants()


def test_one_tree_serves_every_run_and_is_cut_to_its_first_drafts():
    scheduler, runs = decoding(5, 6, cache=real(), max_tree_tokens=64, max_tokens_per_step=7, max_running=2)
    step = scheduler.schedule(DraftTree([-1, 0, 0, -1]))
    assert step.counts == [5, 2]
    assert [parents.tolist() for parents in step.parents] == [[-1, 0, 1, 1, 0], [-1, 0]]
    assert step.runs == runs


def test_prompts_bring_no_more_tokens_to_a_step_with_trees_than_its_bits_allow():
    scheduler, (run,) = decoding(5, cache=real(), max_tree_tokens=64)
    scheduler.add(request(7, 100, 2))
    assert scheduler.schedule({run: DraftTree([-1])}).counts == [2, 64]
    scheduler.abandon(scheduler.step)
    assert scheduler.schedule({run: [8] * 3}).counts == [4, 100]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (None, "the step has trees of drafts; pass accepted_path"),
        ([[0]], r"accepted_path is \[\[0\]\]; expected a list with one path for each of 2 outputs"),
        ([None, None], r"accepted_path\[0\] is None, and that output has 2 drafts"),
        ([[], None], r"accepted_path\[0\] is \[\]; that output has 2 drafts: begin with 0"),
        ([[1], None], "begin with 0, the token before them"),
        ([[0, 1, 2], None], r"accepted_path\[0\]\[2\] is 2, which is a child of token 0"),
        ([[0, 3], None], "is 3; the step brought 3 tokens"),
        ([[0], [0, 1]], r"accepted_path\[1\] is \[0, 1\]; that output has 0 drafts"),
    ],
)
def test_wrong_paths_are_refused_and_the_step_stays_open(paths, message):
    scheduler, (run, _) = decoding(5, 6, cache=real(), max_tree_tokens=8)
    step = scheduler.schedule({run: DraftTree([-1, -1], [1, 2])})
    with pytest.raises(ShapeError, match=message):
        scheduler.commit(step, accepted_path=paths)
    with pytest.raises(ShapeError, match="the step has trees, and accepted is given; pass accepted_path alone"):
        scheduler.commit(step, [1, 1])
    assert step.state is StepState.SCHEDULED
    scheduler.commit(step, accepted_path=[[0, 2], None])
    scheduler.accept(step, [[2, 3], [4]])
    scheduler.check_invariants()
