"""Recorded traffic, read line by line in constant memory: hash ids (Mooncake), token ids, and CSV with lengths only.

Each line of a Mooncake trace is a JSON object: `timestamp` (ms), `input_length` and `output_length` (tokens), and
`hash_ids`, one id for each 512 tokens of input. Equal hash ids mean equal content; the token ids made from them are
equal wherever the recorded prompts were equal (Mooncake trace release, FAST'25). `TraceUnits` reads the same lines with
other units, such as those of the Qwen-Bailian traces: ids of 16 tokens, and seconds. A line may also have the
`token_ids` of its prompt and an `output_length`. `trace_csv` describes the CSV files, whose prompts share nothing.

A trace is a regular file, "-" for the standard input, or a list of such JSON objects as dicts. Limits: 64 MiB a line;
16,777,216 tokens a request, prompt and answer together, whose ids take up to 64 MiB.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from pagecore.serving.checks import as_instance
from pagecore.serving.replay.trace_csv import CsvTrace, csv_trace
from pagecore.serving.replay.trace_fields import has_token_ids, parse_json, request_of_fields, request_of_token_ids
from pagecore.serving.replay.trace_file import STANDARD_INPUT, TraceError
from pagecore.serving.replay.trace_request import (
    HASH_BLOCK,
    MILLISECONDS,
    SkippedRows,
    TraceRequest,
    TraceUnits,
)
from pagecore.serving.replay.trace_source import LINE_BYTES_MAX, Trace, TracePlace, trace_lines, trace_name
from pagecore.storage.checks import flag, require_int

__all__ = [
    "HASH_BLOCK",
    "MILLISECONDS",
    "SkippedRows",
    "Trace",
    "TraceError",
    "TraceRequest",
    "TraceSummary",
    "TraceUnits",
    "read_trace",
    "scan_trace",
]

MOONCAKE = TraceUnits()


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
    path: Trace,
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
    if trace_name(path) == STANDARD_INPUT:
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
    path: Trace,
    limit: int | None = None,
    *,
    prefill_only: bool = False,
    units: TraceUnits = MOONCAKE,
    skipped: SkippedRows | None = None,
) -> Iterator[TraceRequest]:
    """Stream the requests of a trace in the order of the file, which must be the order of arrival.

    Parameters
    ----------
    path : str, Path or sequence of mappings
        A regular file of JSON lines or of CSV, or "-" for the standard input. A file that ends in .gz or .zst is
        decompressed. Blank lines and rows of CSV without prompt tokens are skipped, and unknown fields ignored. Or the
        JSON objects themselves, as a list of dicts.
    limit : int, optional
        Maximum number of requests; lines after them are not read.
    prefill_only : bool
        Set every `output_length` to 0.
    units : TraceUnits
        Tokens of a hash id, and the unit of timestamps.
    skipped : SkippedRows, optional
        Counts the rows without prompt tokens.

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
    name = trace_name(path)
    most = None if limit is None else min(require_int("limit", limit, 0, max=None), sys.maxsize)
    prefill_only, units = flag("prefill_only", prefill_only), as_instance("units", units, TraceUnits)
    latest = -1.0
    for place, request in islice(_requests(path, units, skipped or SkippedRows()), most):
        if request.timestamp_ms < max(latest, 0.0):
            raise place.refusal(
                f"the request is {latest - request.timestamp_ms:g} ms earlier than a previous one; sort the trace by "
                "time"
            )
        latest = request.timestamp_ms
        yield replace(request, output_length=0) if prefill_only else request
    if latest < 0 and most != 0:
        raise TraceError(f"trace {name} contains no request; expected one on each line")


def _requests(trace: Trace, units: TraceUnits, skipped: SkippedRows) -> Iterator[tuple[TracePlace, TraceRequest]]:
    """Yield the requests with their places; the first line decides the format."""
    table: CsvTrace | None = None
    has_ids: bool | None = None
    number = 0
    for i, (place, line) in enumerate(trace_lines(trace, LINE_BYTES_MAX)):
        if i == 0 and (table := csv_trace(place, line, units)) is not None:
            continue
        if table is not None:
            request = table.request(place, line, number)
            if request is None:
                skipped.count += 1
                continue
            yield place, request
        else:
            fields = parse_json(place, line)
            has_ids = has_token_ids(fields) if has_ids is None else has_ids
            read = request_of_token_ids if has_ids else request_of_fields
            yield place, read(place, fields, number, units)
        number += 1
