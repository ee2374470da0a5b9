"""Cases of a test in one item: as items, cases of a millisecond cost several times what they do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

# Errors of a case; pytest.fail raises a BaseException.
FAILURES = (Exception, pytest.fail.Exception)
Test = Callable[..., None]


def together(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test with each case, as one item; otherwise as ``pytest.mark.parametrize(names, cases)``.

    All cases run. The error is that of the first that failed, and names all that failed. Cases share their fixtures.
    """
    arguments = (names,) if isinstance(names, str) else names
    rows = [(case,) if len(arguments) == 1 else tuple(case) for case in cases]
    assert rows, f"no cases of {names}"

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        others = [each for name, each in signature.parameters.items() if name not in arguments]

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            errors: dict[str, BaseException] = {}
            for row in rows:
                try:
                    test(**dict(zip(arguments, row, strict=True)), **fixtures)
                except FAILURES as error:
                    errors[", ".join(map(repr, row))] = error
                except pytest.skip.Exception as skipped:  # would skip the cases that follow
                    errors[", ".join(map(repr, row))] = AssertionError(f"expected a case that runs, got: {skipped}")
            for error in errors.values():
                error.add_note(f"failed for {len(errors)} of {len(rows)} cases: {'; '.join(errors)}")
                raise error

        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate
