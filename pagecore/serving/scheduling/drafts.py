"""Drafts: tokens that an engine proposes for running requests, and that the next step verifies.

A decoding run brings its last token and its drafts to a step, all in one row. The scheduler grants the first drafts of
a run: fewer than proposed if `max_new_tokens`, the tokens of the step or the blocks of the pool do not suffice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pagecore.errors import InvalidSequence, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.serving.scheduling.request import Run, join_ids, token_ids
from pagecore.storage.checks import require_int, shown

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from pagecore.serving.scheduling.limits import Limits

__all__ = ["DraftTree", "Drafts", "Proposal", "Proposed", "fitted_limits", "read_drafts"]


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Drafts of a run that form a tree; the step verifies all of its branches.

    A step that cannot verify all of them verifies the first ones, which are a tree, too.

    Parameters
    ----------
    parents : array_like of int [k]
        For each draft the index of its parent among the drafts, less than its own; -1 for a draft that follows the last
        token of the run. Kept as int64.
    ids : array_like of int [k], optional
        Token ids of the drafts; kept as int32, and aliased if they are an int32 array. Without them the engine writes
        the ids to ``step.batch.token_ids``.

    Raises
    ------
    ShapeError
        `parents` is not 1-D, a parent does not come before its child, or `ids` has another length or ids that int32
        cannot hold.
    UnsupportedDtype
        `parents` or `ids` are not integers.
    """

    parents: NDArray[np.int64]
    ids: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        parents = token_ids(self.parents, "parents").astype(np.int64)
        wrong = np.flatnonzero((parents < -1) | (parents >= np.arange(len(parents))))
        if len(wrong):
            raise ShapeError(
                f"parents[{wrong[0]}] is {parents[wrong[0]]}; a parent is an earlier draft, below {wrong[0]}, or -1 "
                "for the last token of the run"
            )
        object.__setattr__(self, "parents", parents)
        if self.ids is None:
            return
        object.__setattr__(self, "ids", token_ids(self.ids, "ids"))
        if len(self.ids) != len(parents):
            raise ShapeError(f"ids has {len(self.ids)} ids for {len(parents)} parents; give one for each draft")

    def __repr__(self) -> str:
        return f"DraftTree({len(self.parents)} drafts{'' if self.ids is None else ' with ids'})"


# Drafts of a run as an engine gives them: their number, their ids, or a tree.
Proposed: TypeAlias = "int | ArrayLike | DraftTree"
WITHOUT_IDS = (DraftTree, int, np.integer)


@dataclass(slots=True)
class Proposal:
    """Drafts of one run; nothing changes them.

    Attributes
    ----------
    count : int
    ids : int32 array [count] or None
        None if the scheduler does not know them.
    parents : int64 array [1 + count] or None
        Parents of the tokens of the row, the token before the drafts included; None for a chain.
    """

    count: int
    ids: NDArray[np.int32] | None = None
    parents: NDArray[np.int64] | None = None


class Drafts:
    """The proposals for a step: one for all decoding runs, or one for each run that has any.

    Parameters
    ----------
    common : Proposal or None
    listed : dict of Run to Proposal
    """

    __slots__ = ("_has_ids", "_has_trees", "common", "listed")

    def __init__(self, common: Proposal | None, listed: dict[Run, Proposal]) -> None:
        self.common = common
        self.listed = listed
        given = listed.values() if common is None else (common,)
        self._has_ids = any(proposal.ids is not None for proposal in given)
        self._has_trees = any(proposal.parents is not None for proposal in given)

    def find(self, runs: list[Run]) -> list[Proposal | None]:
        """Return the proposal for each run; None for a run without drafts."""
        if self.common is not None:
            return [self.common] * len(runs)
        return list(map(self.listed.get, runs))

    def count(self, runs: list[Run]) -> int | list[int]:
        """Return the number of drafts of each run, or that of all runs."""
        if self.common is not None:
            return self.common.count
        return [0 if proposal is None else proposal.count for proposal in self.find(runs)]

    def has_trees(self, runs: Iterable[Run]) -> bool:
        """Return True if one of the runs decodes and has a tree."""
        if not self._has_trees:
            return False
        found = self.find([run for run in runs if not run.prefilling])
        return any(proposal is not None and proposal.parents is not None for proposal in found)

    def options(self, runs: list[Run], counts: list[int]) -> dict[str, list[Any]]:
        """Return the options of `prepare` for decodes with `counts` tokens: the ids and trees that are known."""
        if not self._has_ids and not self._has_trees:
            return {}
        ids: list[Any] = [None] * len(runs)
        parents: list[Any] = [None] * len(runs)
        for place, (proposal, count) in enumerate(zip(self.find(runs), counts, strict=True)):
            if proposal is not None and count > 1:
                is_whole = count > proposal.count
                ids[place] = proposal.ids if is_whole or proposal.ids is None else proposal.ids[: count - 1]
                parents[place] = None if proposal.parents is None else proposal.parents[:count]
        options = {"draft_ids": ids, "parents": parents}
        return {name: listed for name, listed in options.items() if any(each is not None for each in listed)}


def fitted_limits(limits: Limits, drafts: Drafts | None, running: Iterable[Run]) -> Limits:
    """Return the limits of a step; each row of a step with trees has at most the tokens that the batch has bits for."""
    if drafts is None or not drafts.has_trees(running):
        return limits
    return replace(
        limits,
        parts=replace(limits.parts, tree_tokens=limits.tree_tokens),
        max_drafts=min(limits.max_drafts, limits.tree_tokens - 1),
    )


def read_drafts(given: Proposed | Mapping[Run, Proposed] | None, owner: object, limits: Limits) -> Drafts | None:
    """Check the drafts of a step; None without drafts. The errors are those of `Scheduler.schedule`."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return _read_listed(given, owner, limits)
    if not isinstance(given, WITHOUT_IDS) or isinstance(given, bool):
        raise UnsupportedOption(
            f"drafts is {shown(given)}; expected a number for all runs, a DraftTree, or a mapping from runs to "
            "numbers, ids or trees"
        )
    common = _read(given, limits, "drafts")
    return Drafts(common, {}) if common.count else None


def _read_listed(given: Mapping[Run, Proposed], owner: object, limits: Limits) -> Drafts | None:
    listed: dict[Run, Proposal] = {}
    with_ids: dict[Run, ArrayLike] = {}
    for run, proposed in given.items():
        if not isinstance(run, Run) or run.owner is not owner:
            raise InvalidSequence(f"drafts are given for {shown(run)}, which is not a run of this scheduler")
        if type(proposed) is int and 0 <= proposed <= limits.max_drafts:
            listed[run] = Proposal(proposed)  # without the name of the run, which takes longer than the rest
        elif isinstance(proposed, WITHOUT_IDS):
            listed[run] = _read(proposed, limits, f"drafts of {run!r}")
        else:
            with_ids[run] = proposed
    try:
        ids, lengths = join_ids(list(with_ids.values()), lambda place: f"drafts of {list(with_ids)[place]!r}")
    except UnsupportedDtype as error:
        raise UnsupportedDtype(f"{error}; expected a number, token ids, or a DraftTree") from error
    for run, length, end in zip(with_ids, lengths, accumulate(lengths), strict=True):
        listed[run] = Proposal(length, ids[end - length : end])
        if length > limits.max_drafts:
            _limited(listed[run], limits, f"drafts of {run!r}")
    return Drafts(None, listed) if any(proposal.count for proposal in listed.values()) else None


def _read(given: DraftTree | int | np.integer, limits: Limits, name: str) -> Proposal:
    if isinstance(given, DraftTree):
        if not limits.tree_tokens:
            raise UnsupportedOption(
                f"{name} is a tree, and the scheduler has no room for trees; make it with "
                f"max_tree_tokens={1 + len(given.parents)} or more"
            )
        if len(given.parents) >= limits.tree_tokens:
            raise ShapeError(
                f"{name} is a tree of {len(given.parents)} drafts; with the token before them it may have "
                f"{limits.tree_tokens}: propose fewer, or raise max_tree_tokens"
            )
        parents = np.append(-1, given.parents + 1)
        return _limited(Proposal(len(given.parents), given.ids, parents), limits, name)
    return _limited(Proposal(require_int(name, given, 0)), limits, name)


def _limited(proposal: Proposal, limits: Limits, name: str) -> Proposal:
    """Return the proposal; raise UnsupportedOption if the layers that keep states have no slots for its drafts."""
    if proposal.count > limits.max_drafts:
        raise UnsupportedOption(
            f"{name} has {proposal.count} drafts, and the layers that keep states have slots for {limits.max_drafts}; "
            "propose fewer, or make their StateSpec with more draft_tokens"
        )
    return proposal
