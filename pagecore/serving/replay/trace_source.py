"""Lines of a recorded trace: those of a file or the standard input, or the records of a list."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias, TypeGuard

from pagecore.serving.replay.trace_file import TraceError, checked_path, open_trace

__all__ = ["LINE_BYTES_MAX", "Trace", "TracePlace", "is_records", "trace_lines", "trace_name"]

Trace: TypeAlias = str | os.PathLike[str] | Sequence[Any]
# No format of traces has longer lines.
LINE_BYTES_MAX = 1 << 26


@dataclass(frozen=True, slots=True)
class TracePlace:
    """A line of a file, or a record of a list, counted from 1; for messages."""

    trace: str
    number: int
    unit: str = "line"

    def refusal(self, reason: str) -> TraceError:
        """Return the error of this line."""
        return TraceError(f"trace {self.trace}, {self.unit} {self.number}: {reason}")


def is_records(trace: object) -> TypeGuard[Sequence[Any]]:
    """Return True if a trace is a list of parsed records and not a path."""
    return isinstance(trace, Sequence) and not isinstance(trace, str | bytes | bytearray)


def trace_name(trace: Trace) -> str:
    """Return the name of a trace for messages and reports: its path, or its number of records."""
    if is_records(trace):
        return f"of {len(trace)} record{'' if len(trace) == 1 else 's'}"
    return checked_path(trace)


def trace_lines(
    trace: Trace,
    most_bytes: int,
    opened: Callable[[str], AbstractContextManager[BinaryIO]] = open_trace,
    remedy: str = "pass a readable file, or '-' for the standard input",
) -> Iterator[tuple[TracePlace, Any]]:
    """Yield the place of each line with its text as bytes, or of each record with the record; skip blank lines.

    Raises
    ------
    TraceError
        The file cannot be read, or a line is longer than `most_bytes`.
    """
    name = trace_name(trace)
    if is_records(trace):
        for number, record in enumerate(trace, 1):
            yield TracePlace(name, number, "record"), record
        return
    number = 0
    try:
        with opened(name) as file:
            while text := file.readline(most_bytes + 1):
                number += 1
                place = TracePlace(name, number)
                if len(text) > most_bytes:
                    raise place.refusal(f"longer than {most_bytes} bytes; expected one request on each line")
                if not text.isspace():
                    yield place, text
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"trace {name} cannot be read: {reason}; {remedy}") from error
