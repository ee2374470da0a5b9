"""Invariants of a roster."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from pagecore.errors import PagecoreError
from pagecore.serving.scheduling.request import State
from pagecore.serving.scheduling.step import StepState

if TYPE_CHECKING:
    from pagecore.serving.scheduling.roster import Roster

__all__ = ["check_roster"]


def check_roster(roster: Roster) -> None:
    """Check R1 to R5, I1, I2, L1 and every count; raise `PagecoreError` if one does not hold."""
    _check(roster.is_settled, "a transition is open")
    for run in roster.running:
        is_held = run.held is not None and run.held is roster.found(run) and not run.held.is_swapped
        if not is_held or run.state is not State.RUNNING:
            _refuse(f"{run!r} is running without its sequence in the cache")
        if run.last_length - run.sequence.num_tokens < roster.least_left.bound:
            _refuse(f"{run!r} has fewer tokens before its end than {roster.least_left=}")
    for run in roster.waiting:
        is_kept = run in roster.pinned or run in roster.continuing
        is_held = run.held is not None and (run.held.is_swapped or is_kept)
        is_right = is_held if roster.found(run) is not None and run not in roster.loading else run.held is None
        if not is_right or run.state is not State.WAITING:
            _refuse(f"{run!r} is waiting but holds {run.held!r}")
    for run in roster.continuing:
        if run.held is not None and not np.array_equal(np.asarray(run.held.tokens), run.tokens):
            _refuse(f"{run!r} continues with a sequence of other tokens")
    _check(roster.waiting.keys() >= roster.new.keys(), "a new run is not in the queue")
    _check(roster.waiting.keys() >= roster.pinned.keys(), "a pinned run is not in the queue")
    _check(roster.waiting.keys() >= roster.continuing.keys(), "a run that continues is not in the queue")
    _check_idle(roster)
    fresh = [run.arrival for run in roster.waiting if not run.goes_first]
    is_ordered = all(first < second for first, second in pairwise(fresh))
    _check(is_ordered, f"the queue is not in order of arrival: {fresh}")
    ranks = [not run.goes_first for run in roster.waiting]
    _check(ranks == sorted(ranks), "a preempted run is not at the front of the queue")
    if roster.by_priority is not None:
        order = sorted(roster.waiting, key=lambda run: run.rank)
        _check(roster.by_priority == order, "the queue is not in order of priority")
    tokens = sum(run.num_tokens_left for run in roster.waiting)
    _check(roster.num_waiting_tokens == tokens, f"{roster.num_waiting_tokens=}, counted {tokens}")
    for step in roster.steps[:-1]:
        if step.state is not StepState.COMMITTED:
            _refuse(f"{step!r} is open before a newer step")
    _check(not roster.must_accept or len(roster.steps) == 1, "no step is left to accept")
    is_scheduled = roster.step is not None and roster.step.state is StepState.SCHEDULED
    if roster.batch.in_flight != is_scheduled:
        _refuse(f"{roster.batch.in_flight=} for {roster.step!r}")


def _check_idle(roster: Roster) -> None:
    for run, held in roster.idle.items():
        if held is not roster.found(run) or run.state is not State.IDLE or run.held is not None:
            _refuse(f"{run!r} is idle but holds {held!r} or {run.held!r}")
        if held is not None and not np.array_equal(held.tokens, run.tokens[: held.num_tokens]):
            _refuse(f"the sequence of {run!r} has other tokens")
    parked = [run for run, held in roster.idle.items() if held is not None and not held.is_swapped]
    _check(list(roster.parked) == parked, f"{roster.parked=}, counted {parked}")
    _check(
        roster.waiting.keys() >= roster.loading.keys() | roster.loaded.keys(), "a run that loads is not in the queue"
    )
    _check(not roster.loading.keys() & roster.loaded.keys(), "a run waits for a load that has ended")
    rows = sum(run.samples for run in roster.running) + len(roster.pinned.keys() - roster.continuing.keys())
    # An import may take a row that samples need later: `commit` reclaims it, or raises.
    kept = sum(
        run.held is not None and not run.held.is_swapped for run in roster.continuing if run not in roster.loaded
    )
    _check(rows + kept + len(parked) <= roster.cache.max_sequences, "idle runs hold rows that others need")


def _check(holds: bool, message: str) -> None:
    if not holds:
        _refuse(message)


def _refuse(message: str) -> NoReturn:
    raise PagecoreError(f"inconsistent scheduler state: {message}")
