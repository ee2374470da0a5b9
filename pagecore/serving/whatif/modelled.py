"""Hits of a model with windows, several kinds of attention or recurrent states, by serving the trace at each size.

The blocks that such a model keeps do not follow from stack distances: a window releases blocks while its prompt is
computed, memory is divided among groups, and a prefix is found only up to a cached state. The scheduler and the cache
of `pagecore replay` therefore serve the prompts, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagecore.serving.replay import ReplayOptions
from pagecore.serving.replay.build import build_cache
from pagecore.serving.replay.trace import TraceSummary
from pagecore.serving.scheduling.request import Request, RequestError
from pagecore.serving.whatif.lru import Hits
from pagecore.serving.whatif.options import LRU, WhatIfOptions
from pagecore.serving.whatif.requests import Requests
from pagecore.serving.whatif.simulate import paths_of

__all__ = ["ModelledTrace", "Served"]


@dataclass(frozen=True, slots=True)
class Served:
    """Result of serving a trace.

    Attributes
    ----------
    hits : ndarray
        int64 ``[requests]``: tokens that each request found; 0 if it was refused.
    fits : ndarray
        bool ``[requests]``: False for a request that the cache cannot hold.
    cached_states : int
        Recurrent states that the prefix cache holds at the end.
    """

    hits: NDArray[np.int64]
    fits: NDArray[np.bool_]
    cached_states: int


class ModelledTrace:
    """A trace that a model serves at any size; each size and policy is simulated once.

    Parameters
    ----------
    chunks : sequence of Requests
    options : WhatIfOptions
        With a `model`.
    block_size : int
    """

    def __init__(self, chunks: Sequence[Requests], options: WhatIfOptions, block_size: int) -> None:
        self.options, self.block_size = options, block_size
        self.chunks = chunks
        self.tokens = np.concatenate([chunk.tokens for chunk in chunks])
        computed = int(self.tokens.sum())
        blocks = int((-(-self.tokens // block_size)).sum())
        self.summary = TraceSummary(len(self.tokens), computed, int(self.tokens.max()), blocks)
        self._served: dict[tuple[str, int | None], Served] = {}

    def served(self, policy: str = LRU, memory: int | None = None) -> Served:
        """Return the result for a size; None evicts nothing."""
        key = policy, memory
        if key not in self._served:
            self._served[key] = self._serve(self.options.replayed(memory, self.block_size, policy))
        return self._served[key]

    def hits(self, policy: str, sizes: Sequence[int]) -> Hits:
        """Return the totals for several sizes."""
        served = [self.served(policy, size) for size in sizes]
        fits = [each.fits for each in served]
        return Hits(
            blocks=np.array([each.hits.sum() / self.block_size for each in served], float),
            query_tokens=np.array([self.tokens[each].sum() for each in fits], np.int64),
            num_requests=np.array([each.sum() for each in fits], np.int64),
            num_refused=np.array([(~each).sum() for each in fits], np.int64),
        )

    def fitting(self, memory: int) -> ModelledTrace:
        """Return the trace without the requests that a size refuses."""
        fits = self.served(LRU, memory).fits
        ends = np.cumsum([len(chunk) for chunk in self.chunks])[:-1]
        kept = [_kept(chunk, part) for chunk, part in zip(self.chunks, np.split(fits, ends), strict=True)]
        return ModelledTrace([chunk for chunk in kept if len(chunk)], self.options, self.block_size)

    def _serve(self, options: ReplayOptions) -> Served:
        num_blocks = self.summary.num_blocks + 1 if options.is_unbounded else options.num_blocks
        cache, scheduler = build_cache(options, num_blocks, self.summary)
        hits, fits = np.zeros(len(self.tokens), np.int64), np.ones(len(self.tokens), np.bool_)
        for number, (path, first, reusable, tokens) in enumerate(paths_of(self.chunks)):
            before = scheduler.reuse.prefix_hit_tokens
            try:
                scheduler.add(Request(number, _prompt(path, tokens, self.block_size), 0))
            except RequestError:
                fits[number] = False
                continue
            while (step := scheduler.schedule()) is not None:
                scheduler.commit(step)
                scheduler.accept(step, np.zeros(len(step.outputs), np.int32))
            found = scheduler.reuse.prefix_hit_tokens - before
            hits[number] = max(0, min(found, reusable * self.block_size) - first * self.block_size)
        return Served(hits, fits, cache.stats().num_cached_states if options.states else 0)


def _prompt(path: NDArray[np.int32], tokens: int, block_size: int) -> NDArray[np.int32]:
    """Return token ids whose blocks are equal where those of the trace are."""
    prompt = np.zeros(tokens, np.int32)
    count = min(len(path), tokens // block_size)
    prompt[: count * block_size] = np.repeat(path[:count], block_size)
    return prompt


def _kept(chunk: Requests, fits: NDArray[np.bool_]) -> Requests:
    counts = np.diff(chunk.starts)
    return replace(
        chunk,
        blocks=chunk.blocks[np.repeat(fits, counts)],
        starts=np.concatenate([[0], np.cumsum(counts[fits])]),
        **{name: getattr(chunk, name)[fits] for name in ("first", "reusable", "tokens", "seconds")},
    )
