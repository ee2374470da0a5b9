"""Recorded traffic: a Mooncake trace, read line by line in constant memory.

Each line is a JSON object: `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`, one id for
each 512 tokens of input. Equal hash ids mean equal content; the token ids made from them are equal wherever the
recorded prompts were equal (Mooncake trace release, FAST'25). `TraceUnits` reads the same lines with other units, such
as those of the Qwen-Bailian traces: ids of 16 tokens, and seconds.

A trace is a regular file, or "-" for the standard input. Limits: 1 MiB a line; 16,777,216 tokens a request, prompt and
answer together, whose ids take up to 64 MiB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from pagecore.errors import UnsupportedOption
from pagecore.serving.checks import as_instance
from pagecore.serving.replay.trace_file import STANDARD_INPUT, TraceError, checked_path, open_trace
from pagecore.storage.checks import INT32_MAX, flag, require_int, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "HASH_BLOCK",
    "TraceError",
    "TraceRequest",
    "TraceSummary",
    "TraceUnits",
    "parse_request",
    "read_trace",
    "scan_trace",
]

HASH_BLOCK = 512
HASH_BLOCK_MAX = 1 << 16
# Longer than the context of any model, and small enough to bound the memory of one line.
REQUEST_TOKENS_MAX = 1 << 24
LINE_BYTES_MAX = 1 << 20
# A line with more than this times the hash ids of prompt and answer counts ids of fewer tokens.
SURPLUS = 4
MILLISECONDS = {"ms": 1, "s": 1000}


@dataclass(frozen=True, slots=True)
class TraceUnits:
    """Units of the numbers in a trace.

    Parameters
    ----------
    hash_block : int
        Tokens that one hash id names, 1 to 65,536. A Mooncake trace has 512, a Qwen-Bailian trace 16.
    time_unit : {"ms", "s"}
        Unit of timestamps. A Mooncake trace has milliseconds, a Qwen-Bailian trace seconds.

    Raises
    ------
    ShapeError
        `hash_block` is out of range.
    UnsupportedOption
        `time_unit` is neither "ms" nor "s".
    """

    hash_block: int = HASH_BLOCK
    time_unit: str = "ms"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hash_block", require_int("hash_block", self.hash_block, 1, HASH_BLOCK_MAX))
        if not isinstance(self.time_unit, str) or self.time_unit not in MILLISECONDS:
            raise UnsupportedOption(f"time_unit is {shown(self.time_unit)}; expected 'ms' or 's'")

    @property
    def max_hash_id(self) -> int:
        """Largest hash id whose token ids fit int32."""
        return (INT32_MAX - (self.hash_block - 1)) // self.hash_block

    def milliseconds(self, timestamp: Any) -> float | None:
        """Return a timestamp in milliseconds; None if it is not a finite number of them, 0 or more."""
        if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
            return None
        # NaN and infinity fail the comparison too.
        return float(timestamp) * MILLISECONDS[self.time_unit] if 0 <= timestamp < 2**63 else None

    @property
    def time_name(self) -> str:
        """Name of the unit of timestamps, for messages."""
        return "milliseconds" if self.time_unit == "ms" else "seconds"


MOONCAKE = TraceUnits()


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace; `number` counts requests from 0, `line` counts lines from 1."""

    number: int
    line: int
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    hash_block: int = HASH_BLOCK

    def prompt(self) -> NDArray[np.int32]:
        """Return token ids, int32 `[input_length]`, such that equal prefixes have equal ids.

        The token at `offset` of a hash id has the id `hash id * hash_block + offset`.
        """
        offsets: NDArray[np.int32] = np.arange(self.hash_block, dtype=np.int32)
        starts = np.array(self.hash_ids, dtype=np.int32) * self.hash_block
        return (starts[:, None] + offsets).reshape(-1)[: self.input_length]


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
    path: str | Path,
    limit: int | None = None,
    *,
    prefill_only: bool = False,
    block_size: int = 16,
    units: TraceUnits = MOONCAKE,
) -> TraceSummary | None:
    """Validate a whole trace (or its first `limit` requests) before anything is replayed.

    Parameters
    ----------
    path, limit, prefill_only
        As for `read_trace`.
    block_size : int
        Tokens of a block.
    units : TraceUnits
        As for `read_trace`.

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
        `prefill_only` is not a bool, or `units` are not TraceUnits.
    """
    block_size, prefill_only = require_int("block_size", block_size, max=None), flag("prefill_only", prefill_only)
    if checked_path(path) == STANDARD_INPUT:
        return None
    requests = computed = longest = blocks = 0
    for request in read_trace(path, limit, prefill_only=prefill_only, units=units):
        length = request.input_length + max(request.output_length - 1, 0)
        requests += 1
        computed += length
        longest = max(longest, request.input_length + request.output_length)
        blocks += -(-length // block_size)
    return TraceSummary(requests, computed, longest, blocks)


def read_trace(
    path: str | Path, limit: int | None = None, *, prefill_only: bool = False, units: TraceUnits = MOONCAKE
) -> Iterator[TraceRequest]:
    """Stream the requests of a trace in the order of the file, which must be the order of arrival.

    Parameters
    ----------
    path : str or Path
        A regular file of JSON lines, or "-" for the standard input. A file that ends in .gz or .zst is decompressed.
        Blank lines are skipped, and unknown fields ignored.
    limit : int, optional
        Maximum number of requests; lines after them are not read.
    prefill_only : bool
        Set every `output_length` to 0.
    units : TraceUnits
        Tokens of a hash id, and the unit of timestamps.

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
        `prefill_only` is not a bool, or `units` are not TraceUnits.
    """
    name = checked_path(path)
    most = None if limit is None else require_int("limit", limit, 0, max=None)
    prefill_only, units = flag("prefill_only", prefill_only), as_instance("units", units, TraceUnits)
    number, latest = 0, 0.0
    try:
        with open_trace(name) as file:
            line = 0
            while most is None or number < most:
                text = file.readline(LINE_BYTES_MAX + 1)
                if not text:
                    break
                line += 1
                if text.isspace() and len(text) <= LINE_BYTES_MAX:
                    continue
                reader = _Line(name, line, units)
                request = reader.request(text, number)
                if request.timestamp_ms < latest:
                    reader.refuse(
                        f"timestamp {request.timestamp_ms:g} is earlier than {latest:g} on a previous line; "
                        "sort the trace by timestamp"
                    )
                latest = request.timestamp_ms
                number += 1
                yield replace(request, output_length=0) if prefill_only else request
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(
            f"trace {name} cannot be read: {reason}; pass a readable file, or '-' for the standard input"
        ) from error
    if number == 0 and most != 0:
        raise TraceError(f"trace {name} contains no request; expected one JSON object on each line")


class _Line:
    """Parser of one line, whose errors name the trace and the line."""

    def __init__(self, trace: str, line: int, units: TraceUnits) -> None:
        self.trace = trace
        self.line = line
        self.units = units

    def refuse(self, reason: str) -> NoReturn:
        raise TraceError(f"trace {self.trace}, line {self.line}: {reason}")

    def request(self, text: bytes, number: int) -> TraceRequest:
        fields = self._object(text)
        timestamp = self._field(fields, "timestamp")
        milliseconds = self.units.milliseconds(timestamp)
        if milliseconds is None:
            name = self.units.time_name
            self.refuse(f"timestamp is {shown(timestamp)}; expected a finite number of {name}, 0 or more")
        input_length = self._integer(fields, "input_length", 1)
        output_length = self._integer(fields, "output_length", 0)
        if input_length + output_length > REQUEST_TOKENS_MAX:
            self.refuse(
                f"input_length + output_length is {input_length + output_length}; "
                f"a request has at most {REQUEST_TOKENS_MAX} tokens"
            )
        hash_ids = self._hash_ids(fields, input_length, output_length)
        hash_block = self.units.hash_block
        return TraceRequest(number, self.line, milliseconds, input_length, output_length, hash_ids, hash_block)

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

    def _hash_ids(self, fields: dict[str, Any], input_length: int, output_length: int) -> tuple[int, ...]:
        """Return the ids of the input; some more are left out, but too many must have another `hash_block`."""
        ids = self._field(fields, "hash_ids")
        if not isinstance(ids, list):
            self.refuse(f"hash_ids is {shown(ids)}; expected a list of integers")
        size, largest = self.units.hash_block, self.units.max_hash_id
        needed, whole = -(-input_length // size), -(-(input_length + output_length) // size)
        if not needed <= len(ids) <= SURPLUS * (whole + 1):
            self.refuse(
                f"hash_ids has {len(ids)} ids; an input of this length needs {needed}, one for each {size} tokens; "
                "pass hash_block if an id names another number of tokens"
            )
        for value in ids:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
                self.refuse(
                    f"hash_ids contains {shown(value)}; expected integers between 0 and {largest}; renumber "
                    "the ids of a trace that has larger ones"
                )
        return tuple(ids[:needed])


def parse_request(text: bytes, trace: str, line: int, number: int, units: TraceUnits = MOONCAKE) -> TraceRequest:
    """Return the request of one line; raise TraceError, with the names of trace and line, if it is malformed."""
    return _Line(trace, line, units).request(text, number)
