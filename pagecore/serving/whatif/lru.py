"""Hits of the policy "lru" at every capacity, by stack distances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecore.serving.whatif._stack import Stack
from pagecore.serving.whatif.requests import Requests

# Requests and blocks of one point of a timeline.
TIMELINE_POINTS = 240


@dataclass(frozen=True, slots=True)
class Hits:
    """Hits of caches of several capacities.

    Attributes
    ----------
    blocks : ndarray
        float64 ``[len(capacities)]``: blocks that were found.
    query_tokens, num_requests, num_refused : ndarray
        int64 ``[len(capacities)]``: tokens and number of the requests that fit, and number of those that do not.
    """

    blocks: NDArray[np.float64]
    query_tokens: NDArray[np.int64]
    num_requests: NDArray[np.int64]
    num_refused: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Trace in time, for a few capacities.

    Attributes
    ----------
    seconds : list of float
        End of each interval.
    num_blocks : list of int
        Distinct blocks up to then.
    hit_rates : list of list of float or None
        For each capacity the share of the prompt tokens of the interval that were found; None without requests.
    """

    capacities: list[int]
    seconds: list[float]
    num_blocks: list[int]
    hit_rates: list[list[float | None]]


def lru_hits(chunks: Sequence[Requests], block_size: int, capacities: Sequence[int]) -> Hits:
    """Return the exact hits of caches of `capacities` blocks.

    One pass serves all caches that hold the longest request. A smaller cache refuses requests, which changes the trace:
    each set of refused requests has a pass of its own.

    Parameters
    ----------
    chunks : sequence of Requests
    block_size : int
    capacities : sequence of int
        Blocks that can be used, ascending.
    """
    needed = np.concatenate([-(-chunk.tokens // block_size) for chunk in chunks])
    tokens = np.concatenate([chunk.tokens for chunk in chunks])
    most = int(needed.max())
    found = np.zeros(len(capacities))
    fits = [needed <= capacity for capacity in capacities]
    passes: dict[int, list[int]] = {}
    for i, capacity in enumerate(capacities):
        passes.setdefault(int(fits[i].sum()) if capacity < most else len(needed), []).append(i)
    for members in passes.values():
        limit = capacities[members[0]]
        stack = Stack()
        for chunk in chunks:
            _add(stack, chunk if limit >= most else fitting(chunk, block_size, limit))
        total = np.cumsum(stack.hits()) if len(stack.hits()) else np.zeros(1, np.int64)
        for i in members:
            found[i] = total[min(capacities[i], len(total) - 1)]
    return Hits(
        blocks=found,
        query_tokens=np.array([tokens[each].sum() for each in fits], np.int64),
        num_requests=np.array([each.sum() for each in fits], np.int64),
        num_refused=np.array([(~each).sum() for each in fits], np.int64),
    )


def sampled_hits(chunks: Iterable[Requests], capacities: Sequence[int], rate: float) -> Hits:
    """Return estimates of the hits from a share of the blocks, in memory in proportion to it; nothing is refused."""
    stack = Stack(rate)
    lookups = tokens = requests = 0
    for chunk in chunks:
        _add(stack, chunk)
        lookups += int(np.maximum(chunk.reusable - chunk.first, 0).sum())
        tokens += int(chunk.tokens.sum())
        requests += len(chunk)
    total = np.cumsum(stack.hits()) if len(stack.hits()) else np.zeros(1, np.int64)
    # A few blocks have a large share of all lookups. Whether the sample has them changes the number of its lookups; the
    # difference from the expected number belongs to the smallest distances.
    excess = lookups * rate - stack.num_lookups
    found = np.array([total[min(capacity, len(total) - 1)] for capacity in capacities], float)
    return Hits(
        blocks=np.clip((found + excess) / rate, 0, lookups),
        query_tokens=np.full(len(capacities), tokens),
        num_requests=np.full(len(capacities), requests),
        num_refused=np.zeros(len(capacities), np.int64),
    )


def lru_timeline(chunks: Sequence[Requests], block_size: int, capacities: Sequence[int]) -> Timeline:
    """Return the hits over time in caches that hold the longest request."""
    stack = Stack(1.0, sorted(capacities))
    parts = [_add(stack, chunk) for chunk in chunks]
    hits, blocks = (np.concatenate([part[i] for part in parts]) for i in range(2))
    return timeline_of(chunks, hits * block_size, blocks, capacities)


def timeline_of(
    chunks: Sequence[Requests], hits: NDArray[np.int64], distinct: NDArray[np.int64], capacities: Sequence[int]
) -> Timeline:
    """Return a timeline from the results of each request.

    Parameters
    ----------
    chunks : sequence of Requests
    hits : ndarray
        int64 ``[requests, len(capacities)]``: tokens found.
    distinct : ndarray
        int64 ``[requests]``: distinct blocks up to each request.
    capacities : sequence of int
        Ascending.
    """
    seconds = np.concatenate([chunk.seconds for chunk in chunks])
    tokens = np.concatenate([chunk.tokens for chunk in chunks])
    if seconds[-1] == seconds[0]:
        seconds = np.arange(len(seconds), dtype=float)  # a trace without times: by request
    edges = np.linspace(seconds[0], seconds[-1], TIMELINE_POINTS + 1)[1:]
    which = np.minimum(np.searchsorted(edges, seconds), TIMELINE_POINTS - 1)
    asked = np.bincount(which, tokens, TIMELINE_POINTS)
    rates: list[list[float | None]] = []
    for column in range(len(capacities)):
        got = np.bincount(which, hits[:, column], TIMELINE_POINTS)
        rates.append([float(a / b) if b else None for a, b in zip(got, asked, strict=True)])
    ends = np.searchsorted(seconds, edges, side="right") - 1
    return Timeline(sorted(capacities), edges.tolist(), distinct[np.maximum(ends, 0)].tolist(), rates)


def _add(stack: Stack, chunk: Requests) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    full = np.diff(chunk.starts)
    # The block with the last token is either partial or full; prompts of stored events have one token more.
    has_partial = (chunk.reusable >= full).astype(np.uint8)
    return stack.add(chunk.blocks, chunk.starts, chunk.first, chunk.reusable, has_partial)


def fitting(chunk: Requests, block_size: int, capacity: int) -> Requests:
    """Return the requests that a cache of `capacity` blocks can hold."""
    fits = -(-chunk.tokens // block_size) <= capacity
    counts = np.diff(chunk.starts)
    return Requests(
        blocks=chunk.blocks[np.repeat(fits, counts)],
        starts=np.concatenate([[0], np.cumsum(counts[fits])]),
        first=chunk.first[fits],
        reusable=chunk.reusable[fits],
        tokens=chunk.tokens[fits],
        seconds=chunk.seconds[fits],
    )
