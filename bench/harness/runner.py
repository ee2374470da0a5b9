"""Measurement of figures in rounds that interleave a subject with its controls, so that slow moments affect them all.

A round times the subject and every control once, in an order that reverses from round to round. A time is the median
over the rounds, with the minimum and the maximum. The ratio control / subject, the speed-up, is taken within each round
and has its own median and spread. The garbage collector is disabled meanwhile.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from bench.harness.figures import Control, Figure, Spread, table_of

Kind = Literal["full", "quick", "smoke"]
Work = Callable[[], object]
Timer = Callable[[Work], float]
T = TypeVar("T")


class Case(Protocol):
    """A case of a bench: its sizes, under a title."""

    @property
    def title(self) -> str: ...


C = TypeVar("C", bound=Case)


def _nothing() -> None:
    """No untimed part."""


@dataclass(frozen=True, slots=True)
class Job:
    """Work with untimed parts: `before` and `after` are called around every single call of `run`.

    If `run` makes several `calls` in a row, its time is divided by `calls`. `timer` runs the work and returns its
    seconds by another clock, such as a device's.
    """

    run: Work
    before: Work = _nothing
    after: Work = _nothing
    calls: int = 1
    timer: Timer | None = None


@dataclass(frozen=True, slots=True)
class Effort:
    """Duration of a figure: rounds until `figure_s` is spent, within limits.

    A plain call shorter than `sample_s` is timed as a loop of calls, since reading the clock costs about 50 ns.
    """

    figure_s: float = 1.0
    rounds_min: int = 9
    rounds_max: int = 201
    sample_s: float = 200e-6
    loops_max: int = 10_000


# A full run, a short run with valid figures, and a smoke run that only executes everything.
EFFORTS: Mapping[Kind, Effort] = {
    "full": Effort(),
    "quick": Effort(figure_s=0.4, rounds_min=7),
    "smoke": Effort(figure_s=0.0, rounds_min=2, sample_s=0.0),
}


class Bench:
    """Measures figures, prints each one at once, and keeps them for the JSON.

    Parameters
    ----------
    kind : "full", "quick" or "smoke"
        A quick run has fewer rounds with the same sizes, and a bench may omit figures without targets. A smoke run has
        two rounds of small sizes and no targets; its figures mean nothing.
    clock : callable
        Returns the time in seconds.
    write : callable
        Takes one line of text.
    on_change : callable
        Called after every figure and every failure, to save what `as_json` returns.
    """

    def __init__(
        self,
        *,
        kind: Kind = "full",
        clock: Callable[[], float] = time.perf_counter,
        write: Callable[[str], object] = print,
        on_change: Work = _nothing,
    ) -> None:
        self.kind = kind
        self.effort = EFFORTS[kind]
        self.figures: list[Figure] = []
        self.facts: dict[str, object] = {}
        self.notes: list[str] = []
        self.failures: list[dict[str, str]] = []
        self._figures_as_json: list[dict[str, Any]] = []
        self._clock = clock
        self._write = write
        self._on_change = on_change

    def pick(self, full: T, smoke: T, quick: T | None = None) -> T:
        """Return the size for the kind of run; a quick run without a size uses the full one."""
        return {"full": full, "quick": full if quick is None else quick, "smoke": smoke}[self.kind]

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Record an exception of the block as a failure of the case `name`, and continue."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failures.append({"name": name, "error": f"{type(error).__name__}: {error}"})
            self._write(f"  FAILED {name}: {type(error).__name__}: {error}")
            self._on_change()

    def each(self, cases: Iterable[C], run: Callable[[C], object]) -> None:
        """Run every case; the exception of one is recorded, and the next follows."""
        for case in cases:
            with self.case(case.title):
                run(case)

    def note(self, text: str) -> None:
        """Print and keep a note for readers of the figures, such as an omitted control."""
        self.notes.append(text)
        self._write(f"  note: {text}")

    def fact(self, name: str, value: float | str | list[float], unit: str = "") -> None:
        """Print and keep a count by the subject, without a control; a list has one entry for each run."""
        if isinstance(value, list):
            spread = Spread.of(value)
            kept: object = asdict(spread)
            shown = f"{_number(spread.median)} {unit}".rstrip()
            shown += f" ({_number(spread.min)} to {_number(spread.max)})"
        else:
            kept = value
            shown = f"{value if isinstance(value, str) else _number(value)} {unit}".rstrip()
        self.facts[f"{name}, {unit}" if unit else name] = kept
        self._write(f"  {name:<52} {shown}")

    def compare(
        self,
        name: str,
        subject: Work | Job,
        controls: Mapping[str, Work | Job],
        *,
        check: Work,
        at_least: Mapping[str, float] | None = None,
        rounds: int | None = None,
        **about: Any,
    ) -> Figure:
        """Time `subject` interleaved with its controls; print and return the figure.

        Parameters
        ----------
        name : str
            The timed call, with its sizes.
        subject, controls
            A call, which is repeated in a loop if it is short; or a Job, each call of which is timed alone.
        check : callable
            Called once before timing; raises if the results of subject and controls differ.
        at_least : mapping, optional
            Control -> target of the median ratio. A smoke run has no targets.
        rounds : int, optional
            Exact number of rounds, for work with a long setup; a smoke run ignores it.
        **about
            Fields of `Figure`: unit, per, each, nbytes, flop, at_most, gb_per_s_at_least, sizes.
        """
        if not controls:
            raise ValueError(
                f"{name!r} has no control; add one, because a time alone means nothing on a shared machine"
            )
        check()
        is_smoke = self.kind == "smoke"
        if is_smoke:
            at_least, about["at_most"], about["gb_per_s_at_least"] = None, None, None
        effort = self.effort
        if rounds is not None and not is_smoke:
            effort = replace(effort, figure_s=0.0, rounds_min=rounds)
        subject_s, *controls_s = self._rounds([subject, *controls.values()], effort)
        measured = {
            control: Control(Spread.of(times), Spread.of(_ratios(times, subject_s)), (at_least or {}).get(control))
            for control, times in zip(controls, controls_s, strict=True)
        }
        figure = Figure(name=name, subject=Spread.of(subject_s), controls=measured, rounds=len(subject_s), **about)
        self.figures.append(figure)
        for line in figure.lines():
            self._write(line)
        self._on_change()
        return figure

    def show_targets(self) -> None:
        """Print a table of the figures that have targets."""
        targets = [target for figure in self.figures for target in figure.targets()]
        for line in table_of(targets):
            self._write(line)

    def as_json(self) -> dict[str, Any]:
        """Return figures, facts, notes and failures as plain values; each figure is converted once."""
        self._figures_as_json += [figure.as_json() for figure in self.figures[len(self._figures_as_json) :]]
        return {
            "figures": list(self._figures_as_json),
            "facts": self.facts,
            "notes": self.notes,
            "failures": self.failures,
        }

    def _rounds(self, works: list[Work | Job], effort: Effort) -> list[list[float]]:
        """Return the seconds of a call of each work, round by round."""
        times: list[list[float]] = [[] for _ in works]
        with collector_at_rest():
            loops = [self._loops(work) for work in works]
            ahead = list(range(len(works)))
            start, done = self._clock(), 0
            while done < effort.rounds_min or (done < effort.rounds_max and self._clock() - start < effort.figure_s):
                for i in ahead if done % 2 == 0 else reversed(ahead):
                    times[i].append(self._sample(works[i], loops[i]))
                done += 1
        return times

    def _loops(self, work: Work | Job) -> int:
        """Return the number of calls in a sample of sufficient length; measuring it warms the work up."""
        loops = 1
        taken = self._sample(work, loops)
        while not isinstance(work, Job) and taken * loops < self.effort.sample_s and loops < self.effort.loops_max:
            loops *= 4
            taken = self._sample(work, loops)
        return loops

    def _sample(self, work: Work | Job, loops: int) -> float:
        """Return the seconds of a call: the mean of `loops` calls in a row."""
        if isinstance(work, Job):
            work.before()
            seconds = (work.timer or self._seconds)(work.run)
            work.after()
            return seconds / work.calls
        repeat = range(loops)
        start = self._clock()
        for _ in repeat:
            work()
        return (self._clock() - start) / loops

    def _seconds(self, run: Work) -> float:
        """Return the seconds of one call by the clock of the bench."""
        start = self._clock()
        run()
        return self._clock() - start


def _ratios(control: list[float], subject: list[float]) -> list[float]:
    return [theirs / ours for theirs, ours in zip(control, subject, strict=True)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:,.3g}"


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Disable garbage collection."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
