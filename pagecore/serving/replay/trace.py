"""Recorded traffic: a Mooncake trace, read line by line in constant memory.

Each line is a JSON object: `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`, one id for
each 512 tokens of input. Equal hash ids mean equal content; the token ids made from them are equal wherever the
recorded prompts were equal (Mooncake trace release, FAST'25).

A trace is a regular file, or "-" for the standard input. Limits: 1 MiB a line; 16,777,216 tokens a request, prompt and
answer together; 32,768 hash ids a request, whose prompt then takes up to 64 MiB.
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
from pagecore.storage.checks import INT32_MAX, flag, require_int, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["HASH_BLOCK", "TraceError", "TraceRequest", "TraceSummary", "parse_request", "read_trace", "scan_trace"]

HASH_BLOCK = 512
HASH_ID_MAX = (INT32_MAX - (HASH_BLOCK - 1)) // HASH_BLOCK
# Longer than the context of any model, and small enough to bound the memory of one line.
REQUEST_TOKENS_MAX = 1 << 24
HASH_IDS_MAX = REQUEST_TOKENS_MAX // HASH_BLOCK
LINE_BYTES_MAX = 1 << 20
STANDARD_INPUT = "-"
OFFSETS = np.arange(HASH_BLOCK, dtype=np.int32)


class TraceError(PagecoreError, ValueError):
    """A trace cannot be read, or a line is malformed; the message names file, line and reason."""


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
        """Return token ids, int32 `[input_length]`: `hash id * 512 + offset`, so that equal prefixes have equal ids."""
        starts = np.array(self.hash_ids, dtype=np.int32) * HASH_BLOCK
        return (starts[:, None] + OFFSETS).reshape(-1)[: self.input_length]


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Totals of a trace, from one pass over it.

    `num_computed_tokens` is the number of tokens that serving the trace computes if nothing is reused or recomputed;
    the last token that a request generates is never computed. `max_length` is the length of the longest request, input
    and output. `num_blocks` is the number of blocks that all computed tokens fill if none is evicted; the partial block
    of a request counts as one.
    """

    num_requests: int
    num_computed_tokens: int
    max_length: int
    num_blocks: int


def scan_trace(
    path: str | Path, limit: int | None = None, *, prefill_only: bool = False, block_size: int = 16
) -> TraceSummary | None:
    """Validate a whole trace (or its first `limit` requests) before anything is replayed.

    Parameters
    ----------
    path, limit, prefill_only
        As for `read_trace`.
    block_size : int
        Tokens of a block.

    Returns
    -------
    TraceSummary or None
        None for the standard input, which can be read only once.

    Raises
    ------
    TraceError
        As for `read_trace`.
    ShapeError
        `block_size` is below 1, or `limit` is negative.
    UnsupportedOption
        `prefill_only` is not a bool.
    """
    block_size, prefill_only = require_int("block_size", block_size, max=None), flag("prefill_only", prefill_only)
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
        A regular file of JSON lines, or "-" for the standard input. Blank lines are skipped, and unknown fields
        ignored.
    limit : int, optional
        Maximum number of requests; lines after them are not read.
    prefill_only : bool
        Set every `output_length` to 0.

    Yields
    ------
    TraceRequest

    Raises
    ------
    TraceError
        The file cannot be read or contains no request, or a line is malformed; raised when the line is reached.
    ShapeError
        `limit` is negative.
    UnsupportedOption
        `prefill_only` is not a bool.
    """
    name = _checked_path(path)
    most = None if limit is None else require_int("limit", limit, 0, max=None)
    prefill_only = flag("prefill_only", prefill_only)
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
                        f"timestamp {request.timestamp_ms:g} is earlier than {latest:g} on a previous line; "
                        "sort the trace by timestamp"
                    )
                latest = request.timestamp_ms
                number += 1
                yield replace(request, output_length=0) if prefill_only else request
    except OSError as error:
        reason = error.strerror or str(error)
        raise TraceError(
            f"trace {name} cannot be read: {reason}; pass a readable file, or '-' for the standard input"
        ) from error
    if number == 0 and most != 0:
        raise TraceError(f"trace {name} contains no request; expected one JSON object on each line")


def _checked_path(path: object) -> str:
    """Return a path as str; raise TraceError if it is not a path."""
    if not isinstance(path, str | os.PathLike):
        raise TraceError(f"expected the path of a trace, or '-' for the standard input, got {shown(path)}")
    name = os.fsdecode(path)
    try:
        if b"\0" not in os.fsencode(name):
            return name
    except UnicodeEncodeError:
        pass
    raise TraceError(f"expected the path of a trace, got {shown(name)}, which is not a path")


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """Open a trace; the standard input stays open."""
    if name != STANDARD_INPUT:
        with open_file(name) as file:
            yield file
        return
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise TraceError("trace - cannot be read: standard input is not open as bytes; pass the path of a file")
    yield stream


class _Line:
    """Parser of one line, whose errors name the trace and the line."""

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
            self.refuse(f"timestamp is {shown(timestamp)}; expected a finite number of milliseconds, 0 or more")
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
            self.refuse(f"longer than {LINE_BYTES_MAX} bytes; expected one JSON object on each line")
        try:
            fields = json.loads(text)
        except UnicodeDecodeError:
            packed = text.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd"))  # gzip, zstd
            self.refuse("not UTF-8 text" + ("; decompress it first, or pass '-' and pipe it in" if packed else ""))
        except RecursionError:
            self.refuse("JSON is nested too deeply")
        except ValueError as error:
            self.refuse(f"not JSON: {error}")
        if not isinstance(fields, dict):
            self.refuse(f"expected a JSON object, got {shown(fields)}")
        return fields

    def _field(self, fields: dict[str, Any], name: str) -> Any:
        if name not in fields:
            self.refuse(f"field {name!r} is missing")
        return fields[name]

    def _integer(self, fields: dict[str, Any], name: str, least: int) -> int:
        value = self._field(fields, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= REQUEST_TOKENS_MAX:
            self.refuse(f"{name} is {shown(value)}; expected an integer between {least} and {REQUEST_TOKENS_MAX}")
        return value

    def _hash_ids(self, fields: dict[str, Any], needed: int) -> tuple[int, ...]:
        ids = self._field(fields, "hash_ids")
        if not isinstance(ids, list):
            self.refuse(f"hash_ids is {shown(ids)}; expected a list of integers")
        if len(ids) > HASH_IDS_MAX:
            self.refuse(f"hash_ids has {len(ids)} ids; a request has at most {HASH_IDS_MAX}")
        if len(ids) < needed:
            self.refuse(f"hash_ids has {len(ids)} ids; an input of this length needs {needed}, one for each 512 tokens")
        for value in ids:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= HASH_ID_MAX:
                self.refuse(f"hash_ids contains {shown(value)}; expected integers between 0 and {HASH_ID_MAX}")
        return tuple(ids[:needed])


def parse_request(text: bytes, trace: str, line: int, number: int) -> TraceRequest:
    """Return the request of one line; raise TraceError, with the names of trace and line, if it is malformed."""
    return _Line(trace, line).request(text, number)
