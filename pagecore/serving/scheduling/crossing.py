"""Options of requests for the cache: encoder outputs, spans and retention, and what they mean for prefixes.

The keys of a decoder depend on the encoder output that it attends to. Requests share cached prefixes only if their
digests are equal; without a digest they share none, unless they have no encoder tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from pagecore.cache.prefix.retention import retention_options
from pagecore.errors import UnsupportedOption
from pagecore.serving.scheduling.request import RequestError
from pagecore.storage import CrossSpec
from pagecore.storage.checks import INT32_MAX, ceil_div

if TYPE_CHECKING:
    from pagecore.cache import PagedKVCache
    from pagecore.serving.scheduling.request import Request, Run

__all__ = ["add_options", "batch_tokens", "check_cross", "check_retention", "lacks_room", "match_options", "prefix_key"]


def check_cross(id: object, max_tokens: int | None, num_tokens: int | None) -> None:
    """Check the encoder tokens of a request for a cache that serves up to `max_tokens`; None without cross attention.

    Raises
    ------
    RequestError
        More encoder tokens than the cache serves.
    UnsupportedOption
        Encoder tokens for a cache without cross attention, or none for a cache with it.
    """
    if max_tokens is None:
        if num_tokens is not None:
            raise UnsupportedOption(
                f"request {id} has {num_tokens} encoder tokens, and the cache has no cross-attention layers; leave "
                "cross_tokens out"
            )
        return
    if num_tokens is None:
        raise UnsupportedOption(
            f"request {id} has no number of encoder tokens, and the cache has cross-attention layers; give "
            "cross_tokens, 0 for a request without an encoder's input"
        )
    if num_tokens > max_tokens:
        raise RequestError(
            f"request {id} has {num_tokens} encoder tokens; the cache serves {max_tokens} for one sequence: raise "
            "max_tokens of the CrossSpec or the number of blocks, or shorten the encoder's input"
        )


def check_retention(cache: PagedKVCache, request: Request) -> None:
    """Raise ShapeError or UnsupportedOption for a retention of a request that the cache does not serve."""
    if request.cache_priority is not None or request.cache_time_to_live is not None:
        retention_options(cache.eviction_policy, None, None, request.cache_priority, request.cache_time_to_live)


def batch_tokens(cache: PagedKVCache, max_running: int) -> int:
    """Return the encoder tokens for which the batch of a scheduler has room: all that one step can write."""
    most: int | None = getattr(cache, "max_cross_tokens", None)
    if most is None:
        return 0
    return min(max_running * most, (max(cache.num_blocks) - 1) * cache.block_size, INT32_MAX)


def lacks_room(cache: PagedKVCache, running: Iterable[Run], waiting: Iterable[Run], step_tokens: int) -> bool:
    """Return True if rows or blocks are short for the encoder outputs of runs that lack nothing else.

    Room is needed for the outputs of all running runs together, and for that of each run of `waiting` alone, which
    computes its tokens in steps of up to `step_tokens`.
    """
    alone = [[run] for run in _without_output(waiting) if not _lacks_others(cache, run, step_tokens)]
    coming = [runs for runs in (_without_output(running), *alone) if runs]
    if not coming:
        return False
    specs = [cache.spec(layer) for layer in range(cache.num_layers)]
    groups = {cache.group_of(layer) for layer, spec in enumerate(specs) if isinstance(spec, CrossSpec)}
    blocks = min(np.count_nonzero(cache.block_map(group).holders[1:] == 0) for group in groups)
    rows = cache.max_sequences - len({sequence.cross_row for sequence in cache.sequences.values()} - {-1})
    return any(
        len(runs) > rows or sum(ceil_div(run.request.cross_tokens or 0, cache.block_size) for run in runs) > blocks
        for runs in coming
    )


def _lacks_others(cache: PagedKVCache, run: Run, step_tokens: int) -> bool:
    """Return True if a run that waits lacks other blocks than those of its encoder output."""
    left = [run.num_tokens_left]
    return cache.shortage([run.sequence], left, step_tokens=step_tokens, encoder_outputs=False) > 0


def _without_output(runs: Iterable[Run]) -> list[Run]:
    """Return runs with different encoder outputs that are not on the device, one for each output."""
    missing = (run for run in runs if run.request.cross_tokens and run.sequence.cross_row < 0)
    return list({prefix_key(run): run for run in missing}.values())


def match_options(request: Request) -> dict[str, Any]:
    """Return the options of `match_length` for the prefix of a request."""
    options: dict[str, Any] = {"namespace": request.namespace}
    if request.spans is not None:
        options["spans"] = request.spans
    if request.max_reused_tokens is not None:
        options["max_tokens"] = request.max_reused_tokens
    if request.cross_digest is not None:
        options["cross_digest"] = request.cross_digest
    elif request.cross_tokens:
        options["max_tokens"] = 0
    return options


def add_options(request: Request) -> dict[str, Any]:
    """Return the options of `add_sequence` for a sequence of a request."""
    options = match_options(request)
    if request.cross_tokens is not None:
        options["cross_tokens"] = request.cross_tokens
    if request.cache_priority is not None:
        options["priority"] = request.cache_priority
    if request.cache_time_to_live is not None:
        options["time_to_live"] = request.cache_time_to_live
    return options


def prefix_key(run: Run) -> Hashable:
    """Return a key that is equal for two runs only if one can reuse the computed prefix of the other."""
    request = run.request
    if request.cross_tokens:
        return run if request.cross_digest is None else (request.namespace, request.spans, request.cross_digest)
    if request.cross_tokens == 0:
        return (request.namespace, request.spans, ())
    return request.namespace if request.spans is None else (request.namespace, request.spans)
