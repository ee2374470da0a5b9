"""Tests on every instruction set of this machine."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pagecore.ops.cpu import _cpu

# Errors of a test; pytest.fail raises a BaseException.
FAILURES = (Exception, pytest.fail.Exception)
ISAS = _cpu.available_isas()


@contextmanager
def instruction_set(name: str) -> Iterator[str]:
    """Use an instruction set; an error says on which one it was raised."""
    before = _cpu.isa()
    try:
        yield _cpu.set_isa(name)
    except FAILURES as error:
        error.add_note(f"on {name}")
        raise
    finally:
        _cpu.set_isa(before)


def on_every_isa(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on each instruction set, as one item: what its cases have in common is computed once.

    A failure on one of them does not prevent the others. The error is that of the first, and names all that failed. A
    test that skips itself is skipped on all of them.
    """

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        errors: dict[str, BaseException] = {}
        for name in ISAS:
            try:
                with instruction_set(name):
                    test(*arguments, **fixtures)
            except FAILURES as error:
                errors[name] = error
            except pytest.skip.Exception:
                if not errors:
                    raise
        for error in errors.values():
            error.add_note(f"failed on {', '.join(errors)}")
            raise error

    return run


def by_case(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Group cases that end with an instruction set and an option in turn; each group ends with a list of these."""
    groups = itertools.groupby(cases, key=lambda case: case[:-2])
    return [(*case, [each[-2:] for each in same]) for case, same in groups]
