"""Hit curves of a trace: exact or sampled for LRU, simulated for other policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pagecore.serving.checks import as_instance
from pagecore.serving.replay.trace import SkippedRows, Trace
from pagecore.serving.replay.trace_source import is_records, trace_name
from pagecore.serving.whatif.lru import Hits, Timeline, fitting, lru_hits, lru_timeline, sampled_hits, timeline_of
from pagecore.serving.whatif.modelled import ModelledTrace
from pagecore.serving.whatif.options import LRU, WhatIfOptions
from pagecore.serving.whatif.report import Curve, TierHits, WhatIf
from pagecore.serving.whatif.requests import Requests, read_requests
from pagecore.serving.whatif.simulate import simulated_hits
from pagecore.storage import parse_memory

# Sizes whose hits over time are reported.
TIMELINE_SIZES = 4
UNBOUNDED = 1 << 62


def what_if(path: Trace, options: WhatIfOptions | None = None) -> WhatIf:
    """Compute the hits of a trace for every size of the cache.

    The model is a cache that serves one prompt after another and computes nothing else: a prompt reuses the longest
    cached prefix of whole blocks before its last token. The curve of "lru" equals ``pagecore replay --prefill-only
    --max-running 1`` at every size. For a model with windows or recurrent states, the curves are simulated: the cache
    of the model serves the trace at up to 12 sizes of a range, or at each of a list.

    Parameters
    ----------
    path : str, Path or sequence
        A trace; see `read_requests`.
    options : WhatIfOptions, optional
        By default ``WhatIfOptions()``, sizes from 8 GiB to 1 TiB.

    Returns
    -------
    WhatIf

    Raises
    ------
    TraceError
        The trace cannot be read, or a line is malformed.
    UnsupportedOption
        `options` are not WhatIfOptions.
    """
    options = WhatIfOptions() if options is None else as_instance("options", options, WhatIfOptions)
    if options.sample < 1:
        return _sampled(path, options)
    curves: list[Curve] = []
    first: WhatIf | None = None
    for block_size in options.block_sizes:
        skipped = SkippedRows()
        chunks = list(read_requests(path, block_size, options.requests, units=options.units, skipped=skipped))
        modelled = ModelledTrace(chunks, options, block_size) if options.is_simulated else None
        curves += [_curve(chunks, modelled, options, block_size, policy) for policy in options.policies]
        first = first or replace(_summary(path, chunks, modelled, options, block_size), num_skipped=skipped.count)
    assert first is not None
    first.curves.extend(curves)
    return first


def _short_name(path: Trace) -> str:
    """Return the name of a trace in the report."""
    name = trace_name(path)
    return name.removeprefix("of ") if is_records(path) else Path(name).name


def _curve(
    chunks: Sequence[Requests], trace: ModelledTrace | None, options: WhatIfOptions, block_size: int, policy: str
) -> Curve:
    if trace is not None:
        sizes = options.simulated_sizes()
        return _curve_of(options, block_size, policy, "simulated", sizes, trace.hits(policy, sizes))
    sizes = options.sizes if policy == LRU else options.simulated_sizes()
    capacities = [options.capacity(size, block_size) for size in sizes]
    hits = lru_hits(chunks, block_size, capacities)
    if policy == LRU:
        return _curve_of(options, block_size, policy, "exact", sizes, hits)
    blocks = [simulated_hits(chunks, block_size, capacity, policy) for capacity in capacities]
    found = Hits(np.array(blocks, float), hits.query_tokens, hits.num_requests, hits.num_refused)
    return _curve_of(options, block_size, policy, "simulated", sizes, found)


def _curve_of(
    options: WhatIfOptions,
    block_size: int,
    policy: str,
    method: Literal["exact", "sampled", "simulated"],
    sizes: list[int],
    hits: Hits,
) -> Curve:
    tokens = hits.blocks * block_size
    return Curve(
        policy=policy,
        block_size=block_size,
        method=method,
        memory=sizes,
        blocks=[options.capacity(size, block_size) for size in sizes],
        hit_tokens=[round(each) for each in tokens],
        query_tokens=hits.query_tokens.tolist(),
        hit_rate=(tokens / np.maximum(hits.query_tokens, 1)).tolist(),
        saved_seconds=(tokens / options.prefill_rate).tolist(),
        refused=hits.num_refused.tolist(),
    )


def _summary(
    path: Trace, chunks: list[Requests], modelled: ModelledTrace | None, options: WhatIfOptions, block_size: int
) -> WhatIf:
    """Return all but the curves, for the first block size."""
    tokens = sum(int(chunk.tokens.sum()) for chunk in chunks)
    distinct = 1 + max(int(chunk.blocks.max(initial=-1)) for chunk in chunks)
    longest = max(int(chunk.tokens.max()) for chunk in chunks)
    found, states = _unbounded(chunks, modelled, block_size)
    timeline, memory = _timeline(chunks, modelled, options, block_size, -(-longest // block_size))
    return WhatIf(
        trace=_short_name(path),
        num_requests=sum(len(chunk) for chunk in chunks),
        prompt_tokens=tokens,
        bytes_per_token=options.token_bytes,
        prefill_rate=options.prefill_rate,
        unbounded_hit_rate=found / tokens,
        unbounded_memory=distinct * block_size * options.token_bytes + states * options.state_bytes,
        longest_request=longest * options.token_bytes + options.state_bytes,
        curves=[],
        tiers=_tiers(chunks, modelled, options, block_size),
        timeline=timeline,
        timeline_memory=memory,
    )


def _unbounded(chunks: list[Requests], trace: ModelledTrace | None, block_size: int) -> tuple[float, int]:
    """Return the tokens found, and the states kept, by a cache that evicts nothing."""
    if trace is not None:
        served = trace.served()
        return float(served.hits.sum()), served.cached_states
    return float(lru_hits(chunks, block_size, [UNBOUNDED]).blocks[0] * block_size), 0


def _timeline(
    chunks: list[Requests], trace: ModelledTrace | None, options: WhatIfOptions, block_size: int, needed: int
) -> tuple[Timeline | None, list[int]]:
    """Return the hits over time at a few of the sizes that hold every request."""
    sizes = options.sizes if trace is None else options.simulated_sizes()
    if trace is None:
        fitting_sizes = [size for size in sizes if options.capacity(size, block_size) >= needed]
    else:
        policy = options.policies[0]
        fitting_sizes = [size for size in sizes if trace.served(policy, size).fits.all()]
    if not fitting_sizes:
        return None, []
    which = np.unique(np.linspace(0, len(fitting_sizes) - 1, TIMELINE_SIZES).round().astype(int))
    memory = [fitting_sizes[i] for i in which]
    capacities = [options.capacity(size, block_size) for size in memory]
    if trace is None:
        return lru_timeline(chunks, block_size, capacities), memory
    hits = np.stack([trace.served(policy, size).hits for size in memory], axis=1)
    distinct = np.concatenate([[0], *(_largest(chunk) for chunk in chunks)])
    return timeline_of(chunks, hits, np.maximum.accumulate(distinct)[1:], capacities), memory


def _largest(chunk: Requests) -> NDArray[np.int64]:
    """Return one more than the largest number of a block of each request: blocks are numbered as they appear."""
    ends = [chunk.blocks[a:b].max(initial=-1) for a, b in pairwise(chunk.starts.tolist())]
    return 1 + np.array(ends, np.int64)


def _tiers(
    chunks: Sequence[Requests], trace: ModelledTrace | None, options: WhatIfOptions, block_size: int
) -> list[TierHits]:
    """Return the hits of each tier: what its size finds and the smaller ones do not."""
    if not options.tiers:
        return []
    sizes = [parse_memory(size) for size in options.tiers.values()]
    if trace is not None:
        fitting_trace = trace.fitting(sizes[0])
        if not fitting_trace.chunks:
            return _tier_hits(options, sizes, np.zeros(len(sizes)), 1)
        # A smaller cache may find more by chance; a tier then finds nothing that the faster ones do not.
        found = np.maximum.accumulate(fitting_trace.hits(LRU, sizes).blocks * block_size)
        return _tier_hits(options, sizes, found, int(fitting_trace.tokens.sum()))
    capacities = [options.capacity(size, block_size) for size in sizes]
    served = [each for chunk in chunks if len(each := fitting(chunk, block_size, capacities[0]))]
    if not served:
        return _tier_hits(options, sizes, np.zeros(len(sizes)), 1)
    hits = lru_hits(served, block_size, capacities)
    return _tier_hits(options, sizes, hits.blocks * block_size, int(hits.query_tokens[0]))


def _tier_hits(options: WhatIfOptions, sizes: list[int], found: NDArray[np.float64], asked: int) -> list[TierHits]:
    tokens = np.diff(found, prepend=0)
    return [
        TierHits(medium=name, memory=size, hit_tokens=round(got), hit_rate=float(got / asked))
        for name, size, got in zip(options.tiers, sizes, tokens, strict=True)
    ]


def _sampled(path: Trace, options: WhatIfOptions) -> WhatIf:
    """Return estimates; each block size reads the trace once, in constant memory."""
    curves = []
    facts, skipped = _Facts(), SkippedRows()
    for block_size in options.block_sizes:
        facts, skipped = _Facts(), SkippedRows()
        capacities = [options.capacity(size, block_size) for size in options.sizes]
        requests = read_requests(
            path, block_size, options.requests, rate=options.sample, units=options.units, skipped=skipped
        )
        chunks = facts.watch(requests)
        hits = sampled_hits(chunks, [*capacities, UNBOUNDED], options.sample)
        unbounded = float(hits.blocks[-1] * block_size / facts.tokens)
        memory = round(facts.distinct / options.sample) * block_size * options.token_bytes
        kept = Hits(*(getattr(hits, name)[:-1] for name in Hits.__slots__))
        curves.append(_curve_of(options, block_size, LRU, "sampled", options.sizes, kept))
    return WhatIf(
        trace=_short_name(path),
        num_requests=facts.requests,
        prompt_tokens=facts.tokens,
        bytes_per_token=options.token_bytes,
        prefill_rate=options.prefill_rate,
        unbounded_hit_rate=unbounded,
        unbounded_memory=memory,
        longest_request=facts.longest * options.token_bytes,
        curves=curves,
        num_skipped=skipped.count,
    )


class _Facts:
    """Totals of chunks that are read once."""

    def __init__(self) -> None:
        self.requests = self.tokens = self.longest = self.distinct = 0

    def watch(self, chunks: Iterator[Requests]) -> Iterator[Requests]:
        for chunk in chunks:
            self.requests += len(chunk)
            self.tokens += int(chunk.tokens.sum())
            self.longest = max(self.longest, int(chunk.tokens.max()))
            self.distinct = max(self.distinct, 1 + int(chunk.blocks.max(initial=-1)))
            yield chunk
