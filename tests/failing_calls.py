"""Fail native allocations of calls in a separate process, which they may crash.

A module of cases has `CASES`, a dictionary of `Case`. ``python -m tests.failing_calls MODULE MOST`` reads the names of
cases from standard input, one per line, with the first point. Standard output has a line of JSON before and after each
point, and one after each case.
"""

import importlib
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagecore import set_num_threads
from tests.cache.verdicts import spread, wrong_error
from tests.faults import HUNG, NativeAllocations, fail_allocation, is_full, with_failing_malloc

# Crashes after which a case is left.
MOST_CRASHES = 3


@dataclass(frozen=True)
class Case:
    """A call that is done, or raises MemoryError and changes nothing.

    Attributes
    ----------
    make : callable
        Returns a new state with `signature()`, which is called once, after the call. It returns what is observable.
    call : callable
        Takes the state.
    may_be_done : bool
        The call may have been done although it raised: it had no memory for its result.
    checks_itself : bool
        `signature()` raises AssertionError if anything is wrong, and always returns None.
    smaller : callable, optional
        A call that changes nothing, made before each call in a new thread, which then makes the call. The native
        workspaces that a thread keeps are then too small for the call. (glibc ends the process if it cannot allocate
        the workspaces of a thread's first call.)
    every : bool
        Fail every allocation in turn, not a sample of them.
    """

    make: Callable[[], Any]
    call: Callable[[Any], object]
    may_be_done: bool = False
    checks_itself: bool = False
    smaller: Callable[[Any], object] | None = None
    every: bool = False

    def run(self, state: Any, function: Callable[[], Any]) -> Any:
        """Return the result of a function that makes the call."""
        if self.smaller is None:
            return function()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.smaller, state).result()
            return pool.submit(function).result()


@dataclass
class Outcome:
    """Points of all cases of a module, and problems."""

    points: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def run_cases(folder: Path, module: str, most: int) -> Outcome:
    """Fail `most` native allocations of each case of a module, evenly spaced; all with ``PAGECORE_FAULTS=full``."""
    waiting = [(name, 1) for name in importlib.import_module(module).CASES]
    outcome, crashes = Outcome(dict.fromkeys(dict(waiting), 0)), dict.fromkeys(dict(waiting), 0)
    while waiting:
        text = "".join(json.dumps(one) + "\n" for one in waiting)
        command = ["-m", "tests.failing_calls", module, str(most)]
        ran = with_failing_malloc(folder, command, timeout=7200 if is_full() else 300, text=text)
        done = point = 0
        for line in ran.stdout.splitlines():
            what, value = json.loads(line)
            name = waiting[min(done, len(waiting) - 1)][0]
            if what == "point":
                point = value
            elif what == "verdict":
                outcome.points[name] += 1
                outcome.problems += [f"{name}, allocation {point}: {value}"] if value else []
            else:
                done, point = done + 1, 0
        if done == len(waiting):
            break
        assert point, ran.stderr
        name = waiting[done][0]
        end = "hung" if ran.returncode == HUNG else f"crashed, exit status {ran.returncode}"
        errors = " / ".join(ran.stderr.strip().splitlines()[:6])
        outcome.problems.append(f"{name}, allocation {point}: {end}: {errors}")
        crashes[name] += 1
        rest = [(name, point + 1)] if crashes[name] < MOST_CRASHES else []
        waiting = [*rest, *waiting[done + 1 :]]
    return outcome


def main(module: str, most: int) -> None:
    set_num_threads(1)
    cases, native = importlib.import_module(module).CASES, NativeAllocations()
    for line in sys.stdin:
        name, first = json.loads(line)
        case, turn = cases[name], list(cases).index(name)
        before = None if case.checks_itself else case.make().signature()
        done = case.make()
        total = case.run(done, lambda done=done, case=case: native.count(lambda: case.call(done)))
        after = done.signature()
        for n in spread(total, total if case.every else most, turn):
            if n >= first:
                report("point", n)
                report("verdict", verdict(case, n, native, before, after))
        report("end", name)


def verdict(case: Case, n: int, native: NativeAllocations, before: object, after: object) -> str:
    """Run the call of a new state with a failing allocation; return the problem or an empty text."""
    state = case.make()
    run = case.run(state, lambda: fail_allocation(lambda: case.call(state), n, allocations=native))
    if problem := wrong_error(run, may_lack_memory=True):
        return problem
    try:
        now = state.signature()
    except Exception as error:
        return f"broken: {type(error).__name__}: {error}"
    if now == after and (run.finished or case.may_be_done):
        return ""
    if now == before and not run.finished:
        return ""
    return f"{'the call returned' if run.finished else 'the call raised'}: {difference(now, after, before)}"


def difference(now: object, after: object, before: object) -> str:
    """Return the first parts in which a state differs from those after and before the call."""
    if not all(isinstance(each, tuple | list) for each in (now, after, before)):
        return f"{now!r}; {after!r} after the call, {before!r} before"[:600]
    for each in zip(now, after, before, strict=False):  # type: ignore[call-overload]
        if each[0] != each[1] and each[0] != each[2]:
            return difference(*each)
    return f"{now!r}; {after!r} after the call, {before!r} before"[:600]


def report(kind: str, value: object) -> None:
    print(json.dumps([kind, value]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
