"""Drafts, accepted numbers and ids that are refused; nothing is changed."""

import numpy as np
import pytest

from pagecore.errors import InvalidSequence, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.serving import DraftTree
from pagecore.serving.scheduling.request import State
from pagecore.serving.scheduling.step import StepState
from tests.serving.drafted import decoding, real


@pytest.mark.parametrize(
    ("drafts", "error", "message"),
    [
        (-1, ShapeError, "drafts is -1; it must be at least 0"),
        (True, UnsupportedOption, "drafts is True; expected a number for all runs"),
        (1.5, UnsupportedOption, "drafts is 1.5; expected a number for all runs"),
        ([1, 2], UnsupportedOption, "or a mapping from runs to numbers, ids or trees"),
        ({3: 1}, InvalidSequence, "drafts are given for 3, which is not a run of this scheduler"),
        (DraftTree([-1]), UnsupportedOption, "no room for trees; make it with max_tree_tokens=2 or more"),
    ],
)
def test_wrong_drafts_are_refused_and_nothing_is_scheduled(drafts, error, message):
    scheduler, _ = decoding(5)
    with pytest.raises(error, match=message):
        scheduler.schedule(drafts)
    assert scheduler.step is None
    assert scheduler.schedule(2).counts == [3]


@pytest.mark.parametrize(
    ("proposed", "error", "message"),
    [
        (-2, ShapeError, "is -2; it must be at least 0"),
        ("abc", UnsupportedOption | ShapeError | UnsupportedDtype, "abc|shape"),
        ([1.5], UnsupportedDtype, "expected a number, token ids, or a DraftTree"),
        ([2**31], ShapeError, "ids must fit int32"),
        ([[1, 2]], ShapeError, "has shape"),
        ([[1], [2, 3]], ShapeError, "is not a 1-D array of token ids: setting an array element"),
        (DraftTree(range(-1, 8)), ShapeError, "a tree of 9 drafts; with the token before them it may have 8"),
    ],
)
def test_wrong_drafts_of_a_run_are_refused(proposed, error, message):
    scheduler, (run,) = decoding(5, cache=real(), max_tree_tokens=8)
    kinds = error if isinstance(error, type) else error.__args__
    with pytest.raises(kinds, match=message):
        scheduler.schedule({run: proposed})
    assert scheduler.step is None


def test_drafts_for_a_run_of_another_scheduler_are_refused():
    scheduler, _ = decoding(5)
    _, (foreign,) = decoding(5)
    with pytest.raises(InvalidSequence, match="not a run of this scheduler"):
        scheduler.schedule({foreign: 2})


@pytest.mark.parametrize(
    ("accepted", "error", "message"),
    [
        (None, ShapeError, "the step has drafts; pass accepted, the number of tokens that each output gains"),
        ([1], ShapeError, "accepted has 1 numbers; expected one for each of 2 outputs"),
        ([0, 1], ShapeError, r"accepted\[0\] is 0; that output has 2 drafts and gains 1 to 3 tokens"),
        ([4, 1], ShapeError, r"accepted\[0\] is 4"),
        ([1, 2], ShapeError, r"accepted\[1\] is 2; that output has 0 drafts and gains 1 to 1 tokens"),
        ([1.0, 1.0], UnsupportedDtype, "accepted has dtype float64; expected integers"),
        (2, ShapeError, r"accepted has shape \(\); expected a 1-D array"),
        ([[1], [1, 2]], ShapeError, "accepted is not an array of integers"),
    ],
)
def test_wrong_numbers_of_accepted_tokens_are_refused_and_the_step_stays_open(accepted, error, message):
    scheduler, (run, _) = decoding(5, 6)
    step = scheduler.schedule({run: 2})
    with pytest.raises(error, match=message):
        scheduler.commit(step, accepted)
    with pytest.raises(ShapeError, match="accepted and accepted_path are both given"):
        scheduler.commit(step, [1, 1], accepted_path=[[0], None])
    assert step.state is StepState.SCHEDULED
    scheduler.commit(step, [3, 1])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2], "give ids as a list of ids for each output, or as a 2-D array"),
        ([[1, 2, 3]], "ids has 1 rows; expected one for each of 2 outputs"),
        ([[1, 2], [3]], r"ids\[0\] has 2 ids, and 3 tokens of that output are accepted; give 3 ids, or fewer with"),
        ([[1, 2, 3, 4], [3]], r"ids\[0\] has 4 ids"),
        ([[1, 2, 3], []], r"ids\[1\] has 0 ids"),
        (np.zeros((2, 2), int), "has 3 accepted tokens"),
        ([[1, 2, 2**40], [3]], "ids must fit int32"),
        ([[[1], [2], [3]], [3]], r"ids\[0\] has shape"),
    ],
)
def test_wrong_ids_of_accepted_tokens_are_refused_and_nothing_is_changed(ids, message):
    scheduler, runs = decoding(5, 6)
    step = scheduler.schedule({runs[0]: 2})
    scheduler.commit(step, [3, 1])
    with pytest.raises(ShapeError, match=message):
        scheduler.accept(step, ids)
    assert step.is_committed
    assert [run.num_generated for run in runs] == [1, 1]
    scheduler.accept(step, [[1, 2, 3], [4]])
    assert all(run.state is State.RUNNING for run in runs)


@pytest.mark.parametrize(
    ("parents", "ids", "error", "message"),
    [
        ([0], None, ShapeError, r"parents\[0\] is 0; a parent is an earlier draft, below 0, or -1"),
        ([-1, -2], None, ShapeError, r"parents\[1\] is -2"),
        ([[-1]], None, ShapeError, "parents has shape"),
        ([-1.0], None, UnsupportedDtype, "parents has dtype"),
        ([-1, 0], [1], ShapeError, "ids has 1 ids for 2 parents; give one for each draft"),
    ],
)
def test_trees_that_are_none_are_refused(parents, ids, error, message):
    with pytest.raises(error, match=message):
        DraftTree(parents, ids)
