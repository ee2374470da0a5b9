"""Requests of recorded traffic, as blocks: traces in four formats, plain or compressed.

    Mooncake      {"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}
    token ids     {"timestamp": 0, "token_ids": [5, 6, 7], "namespace": "tenant"}
    KV events     [1700000000.5, [{"type": "BlockStored", ...}, ...], 0]        payloads of vLLM, SGLang or pagecore
    CSV           TIMESTAMP,ContextTokens,GeneratedTokens                       BurstGPT, Azure: prompts share nothing

The first line decides the format. Files that end in .gz or .zst are decompressed. Lines with hash ids, token ids or
lengths may have the units of `TraceUnits`; times of events are always seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.index import chain_hashes
from pagecore.serving.checks import as_instance
from pagecore.serving.replay.trace_csv import CsvTrace, csv_trace
from pagecore.serving.replay.trace_fields import (
    has_token_ids,
    is_array,
    not_an_object,
    parse_json,
    request_of_fields,
    request_of_token_ids,
    text_field,
    text_refusal,
)
from pagecore.serving.replay.trace_file import TraceError, open_trace_file
from pagecore.serving.replay.trace_request import SkippedRows, TraceRequest, TraceUnits
from pagecore.serving.replay.trace_source import LINE_BYTES_MAX, Trace, TracePlace, trace_lines, trace_name
from pagecore.serving.whatif._stack import Numbers
from pagecore.serving.whatif.stored import StoredChains
from pagecore.storage.checks import require_int, shown

# Blocks of requests that are handed on together.
CHUNK_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Requests:
    """Consecutive requests of a trace, in blocks.

    Attributes
    ----------
    blocks : ndarray
        int32: numbers of the full blocks of all requests. Equal numbers are equal prefixes; -1 is not in the sample.
    starts : ndarray
        int64 ``[n + 1]``: where each request begins in `blocks`.
    first, reusable : ndarray
        int64 ``[n]``: blocks [first, reusable) of each request are looked up. The block with the last token is not.
    tokens : ndarray
        int64 ``[n]``: tokens of each prompt.
    seconds : ndarray
        float64 ``[n]``: time of arrival.
    """

    blocks: NDArray[np.int32]
    starts: NDArray[np.int64]
    first: NDArray[np.int64]
    reusable: NDArray[np.int64]
    tokens: NDArray[np.int64]
    seconds: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: hashes of its full blocks, and its number of tokens.

    `first` is the first block that is looked up; the blocks before it belong to the same request.
    """

    seconds: float
    hashes: NDArray[np.uint64]
    tokens: int
    first: int = 0


def read_requests(
    path: Trace,
    block_size: int = 16,
    limit: int | None = None,
    *,
    rate: float = 1.0,
    units: TraceUnits | None = None,
    skipped: SkippedRows | None = None,
) -> Iterator[Requests]:
    """Read a trace as chunks of requests, in constant memory.

    Parameters
    ----------
    path : str, Path or sequence
        A regular file in one of the formats above, or its JSON values as a list.
    block_size : int
        Tokens of a block. Traces of KV events have the block size of the engine that wrote them.
    limit : int, optional
        Maximum number of requests; lines after them are not read.
    rate : float
        Share of the blocks that get a number.
    units : TraceUnits, optional
        Tokens of a hash id, and the unit of timestamps, if they are not those of Mooncake.
    skipped : SkippedRows, optional
        Counts the rows of CSV without prompt tokens.

    Yields
    ------
    Requests

    Raises
    ------
    TraceError
        The file cannot be read or has no requests, or a line is malformed; the message names line and reason.
    ShapeError
        `block_size` or `limit` is out of range.
    UnsupportedOption
        `units` are not TraceUnits.
    """
    size = require_int("block_size", block_size)
    most = None if limit is None else min(require_int("limit", limit, 0, max=None), sys.maxsize)
    units = TraceUnits() if units is None else as_instance("units", units, TraceUnits)
    numbers = Numbers(rate)
    prompts: list[Prompt] = []
    blocks = count = 0
    for prompt in islice(_prompts(path, size, units, skipped or SkippedRows()), most):
        count += 1
        prompts.append(prompt)
        blocks += len(prompt.hashes)
        if blocks >= CHUNK_BLOCKS:
            yield _chunk(prompts, numbers, size)
            prompts, blocks = [], 0
    if prompts:
        yield _chunk(prompts, numbers, size)
    if count == 0 and most != 0:
        raise TraceError(
            f"trace {trace_name(path)} contains no request; expected one on each line, or BlockStored events of medium "
            "'GPU' and group 0"
        )


def _chunk(prompts: list[Prompt], numbers: Numbers, block_size: int) -> Requests:
    counts = np.array([len(prompt.hashes) for prompt in prompts], np.int64)
    tokens = np.array([prompt.tokens for prompt in prompts], np.int64)
    return Requests(
        blocks=numbers.of(np.concatenate([prompt.hashes for prompt in prompts])),
        starts=np.concatenate([[0], np.cumsum(counts)]),
        first=np.array([prompt.first for prompt in prompts], np.int64),
        reusable=(tokens - 1) // block_size,
        tokens=tokens,
        seconds=np.array([prompt.seconds for prompt in prompts]),
    )


def _prompts(path: Trace, block_size: int, units: TraceUnits, skipped: SkippedRows) -> Iterator[Prompt]:
    table: CsvTrace | None = None
    reader: Any = None
    number, latest = 0, 0.0
    for place, line in trace_lines(path, LINE_BYTES_MAX, open_trace_file, "pass a readable file"):
        if reader is None and (table := csv_trace(place, line, units)) is not None:
            reader = _Lengths(block_size, table, skipped)
            continue
        content = parse_json(place, line) if table is None else line
        reader = reader or _reader(place, content, block_size, units)
        for prompt in reader.read(place, content, number):
            if prompt.seconds < latest:
                raise place.refusal(
                    f"time {prompt.seconds:g} s is earlier than {latest:g} s on a line before; sort the trace"
                )
            latest = prompt.seconds
            number += 1
            yield prompt


def _reader(place: TracePlace, content: Any, block_size: int, units: TraceUnits) -> Any:
    """Return the reader of the format that the first line has."""
    if isinstance(content, Mapping) and "hash_ids" in content:
        return _Mooncake(block_size, units)
    if has_token_ids(content):
        return _TokenIds(block_size, units)
    if is_array(content):
        raise not_an_object(place, content)
    if isinstance(content, list) or (isinstance(content, Mapping) and "events" in content):
        return _Events(block_size)
    if isinstance(content, Mapping) and (name := text_field(content)) is not None:
        raise text_refusal(place, name)
    raise place.refusal(
        f"unknown format: got {shown(content)}; expected an object with hash_ids (Mooncake) or token_ids, a batch "
        "of KV events, or the header of a CSV file"
    )


class _Mooncake:
    def __init__(self, block_size: int, units: TraceUnits) -> None:
        self.block_size = block_size
        self.units = units

    def read(self, place: TracePlace, content: Any, number: int) -> Iterable[Prompt]:
        return [_prompt(request_of_fields(place, content, number, self.units), self.block_size)]


class _Lengths:
    def __init__(self, block_size: int, table: CsvTrace, skipped: SkippedRows) -> None:
        self.block_size = block_size
        self.table = table
        self.skipped = skipped

    def read(self, place: TracePlace, text: bytes, number: int) -> Iterable[Prompt]:
        request = self.table.request(place, text, number)
        if request is None:
            self.skipped.count += 1
            return []
        return [_prompt(request, self.block_size)]


def _prompt(request: TraceRequest, block_size: int) -> Prompt:
    hashes = chain_hashes(request.prompt(), block_size, namespace=request.namespace)
    return Prompt(request.timestamp_ms / 1000, hashes, request.input_length)


class _TokenIds:
    def __init__(self, block_size: int, units: TraceUnits) -> None:
        self.block_size = block_size
        self.units = units

    def read(self, place: TracePlace, content: Any, number: int) -> Iterable[Prompt]:
        request = request_of_token_ids(place, content, number, self.units, has_answer=False)
        return [_prompt(request, self.block_size)]


class _Events:
    def __init__(self, block_size: int) -> None:
        self.chains = StoredChains(block_size)

    def read(self, place: TracePlace, content: Any, _number: int) -> Iterable[Prompt]:
        try:
            found = self.chains.read(content)
        except ValueError as error:
            raise place.refusal(str(error)) from None
        return [Prompt(seconds, hashes, tokens, first) for seconds, hashes, tokens, first in found]
