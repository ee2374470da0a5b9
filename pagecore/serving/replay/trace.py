"""Recorded traffic: a Mooncake trace, read line by line in constant memory.

One JSON object a line: `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`, one id for each
512 tokens of input. Equal ids mean equal content, so prompt ids made from them are equal wherever the recorded prompts
were (Mooncake trace release, FAST'25).

A trace is a regular file, or "-" for the standard input. A line has up to 1 MiB, a request up to 16,777,216 tokens,
prompt and answer together, and up to 32,768 hash ids; its prompt then takes up to 64 MiB.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np

from pagecore.errors import PagecoreError
from pagecore.models.files import open_file
from pagecore.serving.checks import as_flag
from pagecore.storage.checks import INT32_MAX, require_int

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["HASH_BLOCK", "TraceError", "TraceRequest", "TraceSummary", "read_trace", "scan_trace"]

HASH_BLOCK = 512
HASH_ID_MAX = (INT32_MAX - (HASH_BLOCK - 1)) // HASH_BLOCK
# More than any model has in its context; what one line asks for stays small.
REQUEST_TOKENS_MAX = 1 << 24
HASH_IDS_MAX = REQUEST_TOKENS_MAX // HASH_BLOCK
LINE_BYTES_MAX = 1 << 20
STANDARD_INPUT = "-"
OFFSETS = np.arange(HASH_BLOCK, dtype=np.int32)


class TraceError(PagecoreError, ValueError):
    """A trace cannot be read, or one of its lines is malformed; the message names file, line and reason."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace; `number` counts requests from 0, `line` counts lines from 1."""

    number: int
    line: int
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def prompt(self) -> NDArray[np.int32]:
        """Token ids, int32 `[input_length]`: `hash id * 512 + offset`, so that equal prefixes have equal ids."""
        starts = np.array(self.hash_ids, dtype=np.int32) * HASH_BLOCK
        return (starts[:, None] + OFFSETS).reshape(-1)[: self.input_length]


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What one pass over a trace tells.

    `num_computed_tokens` is what serving it computes when nothing is computed twice: the last token that a request
    generates never is. `max_length` is the longest request, input and output. `num_blocks` is what all that is computed
    fills if none of it is ever given up, a partial block of each request counted as one.
    """

    num_requests: int
    num_computed_tokens: int
    max_length: int
    num_blocks: int


def scan_trace(
    path: str | Path, limit: int | None = None, *, prefill_only: bool = False, block_size: int = 16
) -> TraceSummary | None:
    """Validate a whole trace (or its first `limit` requests) before anything is replayed.

    Parameters are those of `read_trace`, and the tokens of a block.

    Returns
    -------
    TraceSummary or None
        None for the standard input, which can be read only once.

    Raises
    ------
    TraceError
        As `read_trace`.
    ShapeError
        A `block_size` below 1, or a negative `limit`.
    UnsupportedOption
        A `prefill_only` that is not a bool.
    """
    block_size, prefill_only = require_int("block_size", block_size, max=None), as_flag("prefill_only", prefill_only)
    if _checked_path(path) == STANDARD_INPUT:
        return None
    requests = computed = longest = blocks = 0
    for request in read_trace(path, limit, prefill_only=prefill_only):
        length = request.input_length + max(request.output_length - 1, 0)
        requests += 1
        computed += length
        longest = max(longest, request.input_length + request.output_length)
        blocks += -(-length // block_size)
    return TraceSummary(requests, computed, longest, blocks)


def read_trace(path: str | Path, limit: int | None = None, *, prefill_only: bool = False) -> Iterator[TraceRequest]:
    """Stream the requests of a trace in the order of the file, which must be the order of arrival.

    Parameters
    ----------
    path : str or Path
        A regular file of JSON lines, or "-" for the standard input. Lines of white space are skipped; fields that are
        not named above are ignored.
    limit : int, optional
        Stop after this many requests; the lines after them are not read.
    prefill_only : bool
        Leave out what the requests generated: every `output_length` is 0.

    Yields
    ------
    TraceRequest

    Raises
    ------
    TraceError
        The file cannot be read or holds no request, or a line is malformed: raised when the line is reached.
    ShapeError
        A negative `limit`.
    UnsupportedOption
        A `prefill_only` that is not a bool.
    """
    name = _checked_path(path)
    most = None if limit is None else require_int("limit", limit, 0, max=None)
    prefill_only = as_flag("prefill_only", prefill_only)
    number, latest = 0, 0.0
    try:
        with _opened(name) as file:
            line = 0
            while most is None or number < most:
                text = file.readline(LINE_BYTES_MAX + 1)
                if not text:
                    break
                line += 1
                if text.isspace() and len(text) <= LINE_BYTES_MAX:
                    continue
                reader = _Line(name, line)
                request = reader.request(text, number)
                if request.timestamp_ms < latest:
                    reader.refuse(
                        f"timestamp {request.timestamp_ms:g} is earlier than the {latest:g} of a line before it; "
                        "sort the trace by timestamp"
                    )
                latest = request.timestamp_ms
                number += 1
                yield replace(request, output_length=0) if prefill_only else request
    except OSError as error:
        reason = error.strerror or str(error)
        raise TraceError(
            f"trace {name} cannot be read: {reason}; give a file that can be read, or '-' for the standard input"
        ) from error
    if number == 0 and most != 0:
        raise TraceError(f"trace {name} holds no request; one JSON object a line is expected")


def _checked_path(path: object) -> str:
    """Return a path as text."""
    if not isinstance(path, str | os.PathLike):
        raise TraceError(f"expected the path of a trace, or '-' for the standard input, got {_shown(path)}")
    name = os.fsdecode(path)
    try:
        if b"\0" not in os.fsencode(name):
            return name
    except UnicodeEncodeError:
        pass
    raise TraceError(f"expected the path of a trace, got {_shown(name)}, which is not a path")


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """Open a trace; the standard input stays open."""
    if name != STANDARD_INPUT:
        with open_file(name) as file:
            yield file
        return
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise TraceError("trace - cannot be read: there is no standard input of bytes; give the path of a file")
    yield stream


class _Line:
    """Checks the fields of one line and names the line in what it refuses."""

    def __init__(self, trace: str, line: int) -> None:
        self.trace = trace
        self.line = line

    def refuse(self, reason: str) -> NoReturn:
        raise TraceError(f"trace {self.trace}, line {self.line}: {reason}")

    def request(self, text: bytes, number: int) -> TraceRequest:
        fields = self._object(text)
        timestamp = self._field(fields, "timestamp")
        is_number = isinstance(timestamp, int | float) and not isinstance(timestamp, bool)
        # NaN and infinity fail the comparison too.
        if not is_number or not 0 <= timestamp < 2**63:
            self.refuse(f"timestamp is {_shown(timestamp)}, not a finite number of milliseconds, 0 or more")
        input_length = self._integer(fields, "input_length", 1)
        output_length = self._integer(fields, "output_length", 0)
        if input_length + output_length > REQUEST_TOKENS_MAX:
            self.refuse(
                f"input_length + output_length is {input_length + output_length}; "
                f"a request has at most {REQUEST_TOKENS_MAX} tokens"
            )
        hash_ids = self._hash_ids(fields, -(-input_length // HASH_BLOCK))
        return TraceRequest(number, self.line, float(timestamp), input_length, output_length, hash_ids)

    def _object(self, text: bytes) -> dict[str, Any]:
        if len(text) > LINE_BYTES_MAX:
            self.refuse(f"longer than {LINE_BYTES_MAX} bytes; one JSON object a line is expected")
        try:
            fields = json.loads(text)
        except UnicodeDecodeError:
            self.refuse("not UTF-8 text")
        except RecursionError:
            self.refuse("JSON is nested too deeply")
        except ValueError as error:
            self.refuse(f"not JSON: {error}")
        if not isinstance(fields, dict):
            self.refuse(f"{_shown(fields)} is not a JSON object")
        return fields

    def _field(self, fields: dict[str, Any], name: str) -> Any:
        if name not in fields:
            self.refuse(f"field {name!r} is missing")
        return fields[name]

    def _integer(self, fields: dict[str, Any], name: str, least: int) -> int:
        value = self._field(fields, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= REQUEST_TOKENS_MAX:
            self.refuse(f"{name} is {_shown(value)}, not an integer between {least} and {REQUEST_TOKENS_MAX}")
        return value

    def _hash_ids(self, fields: dict[str, Any], needed: int) -> tuple[int, ...]:
        ids = self._field(fields, "hash_ids")
        if not isinstance(ids, list):
            self.refuse(f"hash_ids is {_shown(ids)}, not a list of integers")
        if len(ids) > HASH_IDS_MAX:
            self.refuse(f"hash_ids holds {len(ids)} ids; a request has at most {HASH_IDS_MAX}")
        if len(ids) < needed:
            self.refuse(
                f"hash_ids holds {len(ids)} ids; an input of this length needs {needed}, one for each 512 tokens"
            )
        for value in ids:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= HASH_ID_MAX:
                self.refuse(f"hash_ids holds {_shown(value)}, not an integer between 0 and {HASH_ID_MAX}")
        return tuple(ids[:needed])


def _shown(value: Any) -> str:
    """A value as an error shows it: short, whatever the line held."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
