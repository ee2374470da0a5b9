"""Verified drafts: the accepted tokens of each row, as an engine passes them to `commit` and `accept`."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from pagecore.errors import ShapeError, UnsupportedDtype
from pagecore.serving.checks import as_array
from pagecore.serving.scheduling.request import join_ids, token_ids
from pagecore.storage.checks import shown

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from pagecore.cache import Sequence
    from pagecore.serving.scheduling.request import Run
    from pagecore.serving.scheduling.step import Step

__all__ = [
    "Accepted",
    "is_table",
    "read_accepted",
    "read_id_rows",
    "read_id_table",
    "sort_id_rows",
    "sort_id_table",
]


class Accepted:
    """The accepted tokens of a step.

    Attributes
    ----------
    counts : list of int
        Tokens that each output gains: its accepted drafts and one more.
    gained : int64 array
        The same numbers.
    by_row : array of int or None
        Computed tokens of each row of the batch that stay; None if all do, or with `paths`.
    paths : list or None
        For a step with trees, the accepted path of each row; None for a row that is accepted whole.
    """

    __slots__ = ("by_row", "counts", "gained", "paths")

    def __init__(
        self, gained: NDArray[np.int64], by_row: NDArray[np.int64] | None = None, paths: list[Any] | None = None
    ) -> None:
        self.gained = gained
        self.counts: list[int] = gained.tolist()
        self.by_row = by_row
        self.paths = paths


def read_accepted(step: Step, accepted: ArrayLike | None, accepted_path: Listed[ArrayLike | None] | None) -> Accepted:
    """Check the arguments of `commit` for a step.

    Raises
    ------
    ShapeError
        Not one number or path for each output, a number that its row cannot have, or none for a step that needs them.
    UnsupportedDtype
        The numbers are not integers.
    """
    has_trees = step.parents is not None
    if has_trees or accepted_path is not None:
        if accepted is not None:
            raise ShapeError(
                "the step has trees, and accepted is given; pass accepted_path alone"
                if has_trees
                else "accepted and accepted_path are both given; use one of them"
            )
        if accepted_path is None:
            raise ShapeError("the step has trees of drafts; pass accepted_path, the accepted tokens of each output")
        return _read_paths(step, accepted_path)
    if accepted is None:
        if step.has_drafts:
            raise ShapeError("the step has drafts; pass accepted, the number of tokens that each output gains")
        return Accepted(np.ones(len(step.outputs), np.int64))
    given = _integers(accepted, "accepted")
    if len(given) != len(step.outputs):
        raise ShapeError(f"accepted has {len(given)} numbers; expected one for each of {len(step.outputs)} outputs")
    most = np.ones(len(given), np.int64)
    if step._num_drafts is not None:
        most[: step.num_decodes] += step._num_drafts
    wrong = np.flatnonzero((given < 1) | (given > most))
    if len(wrong):
        place = wrong[0]
        raise ShapeError(
            f"accepted[{place}] is {given[place]}; that output has {most[place] - 1} drafts and gains 1 to "
            f"{most[place]} tokens: count the accepted drafts and the token after them"
        )
    gained = given.astype(np.int64)
    if not step.has_drafts:
        return Accepted(gained)
    prompts = step.counts[step.num_decodes :]
    return Accepted(gained, np.append(gained[: step.num_decodes], prompts) if prompts else gained)


def _read_paths(step: Step, accepted_path: Listed[ArrayLike | None]) -> Accepted:
    if not isinstance(accepted_path, list | tuple) or len(accepted_path) != len(step.outputs):
        raise ShapeError(
            f"accepted_path is {shown(accepted_path)}; expected a list with one path for each of {len(step.outputs)} "
            "outputs"
        )
    counts: list[int] = []
    paths: list[Any] = [None] * len(step.runs)
    for place, given in enumerate(accepted_path):
        drafts = step.counts[place] - 1 if place < step.num_decodes else 0
        if given is None:
            if drafts:
                raise ShapeError(
                    f"accepted_path[{place}] is None, and that output has {drafts} drafts; give the indices of its "
                    "accepted tokens, from 0 on"
                )
            counts.append(1)
            continue
        path: list[int] = _integers(given, f"accepted_path[{place}]").tolist()
        if not path or path[0] != 0 or (len(path) > 1 and not drafts):
            raise ShapeError(
                f"accepted_path[{place}] is {shown(given)}; that output has {drafts} drafts: begin with 0, the token "
                "before them, and go on with accepted ones"
            )
        if place < step.num_decodes:
            paths[place] = path
        counts.append(len(path))
    return Accepted(np.array(counts, np.int64), None, paths)


def _integers(given: ArrayLike, name: str) -> NDArray[np.integer]:
    array = as_array(name, given, "an array of integers")
    if array.ndim != 1:
        raise ShapeError(f"{name} has shape {array.shape}; expected a 1-D array of integers")
    if array.size and array.dtype.kind not in "iu":
        raise UnsupportedDtype(f"{name} has dtype {array.dtype}; expected integers")
    return array


# -- the ids of accepted tokens ----------------------------------------------------------------------------------------


def is_table(ids: object) -> bool:
    """Return True for ids of several tokens an output: a list of lists or arrays, or a 2-D array."""
    if isinstance(ids, list | tuple):
        return len(ids) > 0 and (isinstance(ids[0], list | tuple) or getattr(ids[0], "ndim", 0) > 0)
    return getattr(ids, "ndim", 1) == 2


def read_id_table(ids: Any, step: Step) -> NDArray[np.int32]:
    """Return an array of ids with a row for each output; what follows its accepted tokens is not read.

    Raises
    ------
    ShapeError, UnsupportedDtype
        As `Scheduler.accept`.
    """
    _require_rows(ids, step)
    table = as_array("ids", ids, "an array of integers")
    flat = token_ids(table.reshape(-1), "ids").reshape(table.shape)
    most = 1 if step.accepted is None else max(step.accepted, default=0)
    if len(step.outputs) and table.shape[1] < most:
        raise ShapeError(f"ids has shape {table.shape}; an output has {most} accepted tokens")
    return flat


def _require_rows(ids: Any, step: Step) -> None:
    count = len(step.outputs)
    if not is_table(ids) and count:
        raise ShapeError("the step has drafts; give ids as a list of ids for each output, or as a 2-D array")
    if len(ids) != count:
        raise ShapeError(f"ids has {len(ids)} rows; expected one for each of {count} outputs")


def read_id_rows(
    ids: list[Any] | tuple[Any, ...], step: Step, flags: NDArray[np.bool_] | None
) -> list[list[int]] | NDArray[np.int32]:
    """Return the ids that each output gains; as a table if the list has all ids of all outputs.

    The list has exactly the ids of each output, or fewer for an output whose flag is set: it ends with the last one.

    Raises
    ------
    ShapeError, UnsupportedDtype
        As `Scheduler.accept`.
    """
    _require_rows(ids, step)
    counts = step.accepted or [1] * len(step.outputs)
    joined, lengths = join_ids(ids, "ids[{}]".format)
    if lengths == counts:
        table = np.full((len(counts), max(counts, default=0)), -1, np.int32)
        table[np.arange(table.shape[1]) < np.array(counts)[:, None]] = joined
        return table
    flat_ids = joined.tolist()
    rows = [flat_ids[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]
    for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if len(row) == count or step.outputs[place].held is None:
            continue
        if flags is None or not flags[place] or not 1 <= len(row) < count:
            raise ShapeError(
                f"ids[{place}] has {len(row)} ids, and {count} tokens of that output are accepted; give {count} ids, "
                "or fewer with finished"
            )
    return rows


def sort_id_rows(
    step: Step, rows: list[list[int]], flags: NDArray[np.bool_] | None
) -> tuple[list[Sequence], list[list[int]], dict[Run, NDArray[np.int32]]]:
    """Return the sequences that learn ids, these ids, and the complete tokens of each run that finishes.

    A run ends at the first of its ids that ends it, and the ids after that are dropped. Its sequence learns the ids
    before the last one, which are computed, so that the prefix cache can keep them.
    """
    learning: list[Sequence] = []
    learned: list[list[int]] = []
    finished: dict[Run, NDArray[np.int32]] = {}
    ends = [False] * len(rows) if flags is None else flags.tolist()
    for run, given, is_last in zip(step.outputs, rows, ends, strict=True):
        held, ids = run.held, given
        if held is None:  # cancelled, or finished by an earlier step
            continue
        if is_last or held.num_tokens + len(given) >= run.last_length or not run.stops.isdisjoint(given):
            kept = _last_ids(run, held.num_tokens, given, is_last)
            if kept is not None:
                finished[run] = np.append(held.tokens, np.array(kept, np.int32))
                ids = kept[:-1]
        if ids:
            learning.append(held)
            learned.append(ids)
    _finish_unsampled(step, finished)
    return learning, learned, finished


def sort_id_table(
    step: Step, table: NDArray[np.int32], flags: NDArray[np.bool_] | None, stop_ids: set[int], least_left: int
) -> tuple[list[Sequence], NDArray[np.int32], NDArray[np.int64], dict[Run, NDArray[np.int32]]]:
    """Return what `sort_id_rows` does for a table, with the number of the ids that each of its rows begins with.

    `stop_ids` are those of all runs, and no run has fewer than `least_left` tokens before its end. Only rows that may
    end their runs are looked at one by one.
    """
    counts = np.ones(len(table), np.int64) if step._gained is None else step._gained
    going: list[Sequence | None] = [run.held for run in step.outputs]
    if all(going) and counts.max(initial=0) < least_left:
        may_end = np.zeros(len(counts), np.bool_)
    else:
        lefts = [0 if (one := run.held) is None else run.last_length - one.num_tokens for run in step.outputs]
        may_end = counts >= np.array(lefts, np.int64)
    if flags is not None:
        may_end |= flags
    if stop_ids:
        may_end |= np.isin(table, list(stop_ids)).any(axis=1)
    finished: dict[Run, NDArray[np.int32]] = {}
    places = may_end.nonzero()[0].tolist()
    if places:
        counts = counts.copy()
        for place in places:
            run, given = step.outputs[place], table[place, : counts[place]]
            held = run.held
            if held is None:  # cancelled, or finished by an earlier step
                counts[place] = 0
                continue
            kept = _last_ids(run, held.num_tokens, given.tolist(), flags is not None and bool(flags[place]))
            if kept is not None:
                finished[run] = np.append(held.tokens, given[: len(kept)])
                counts[place] = len(kept) - 1
        rows = counts.nonzero()[0]
        going, table, counts = [going[row] for row in rows.tolist()], table[rows], counts[rows]
    _finish_unsampled(step, finished)
    return going, table, counts, finished  # type: ignore[return-value]  # runs without a sequence have no count


def _finish_unsampled(step: Step, finished: dict[Run, NDArray[np.int32]]) -> None:
    for run in step.unsampled:
        if run.held is not None:
            finished[run] = np.asarray(run.held.tokens)


def _last_ids(run: Run, known: int, given: list[int], is_last: bool) -> list[int] | None:
    """Return the ids up to the one that ends a run; None if it goes on."""
    length = _end_of(run, known, given)
    return given[: length or len(given)] if length or is_last else None


def _end_of(run: Run, known: int, ids: list[int]) -> int:
    """Return the number of ids up to the first one that ends the run; 0 if none does."""
    for number, token in enumerate(ids, 1):
        if known + number >= run.last_length or (token in run.stops and known + number >= run.stops_from):
            return number
    return 0
