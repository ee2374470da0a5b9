"""Preparation of a step: its batch, its blocks, copy-on-write and the plan of its attention.

Everything here runs under the lock of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache._lifecycle import shortage
from pagecore.cache._sequence import Sequence, as_list
from pagecore.cache._step import Step
from pagecore.cache.batch import Batch
from pagecore.cache.layers import Group
from pagecore.cache.limits import with_evictable
from pagecore.cache.staging import StagedBatch
from pagecore.errors import OutOfBlocks, UnsupportedOption
from pagecore.index import StepBuffers
from pagecore.ops import AttentionPlan
from pagecore.storage import AttentionSpec
from pagecore.storage.checks import INT32_MAX

if TYPE_CHECKING:
    from pagecore.cache.paged import PagedKVCache

Pairs = NDArray[np.int32]


Ready = tuple[Batch, Step, list[Sequence], ArrayLike, bool, list[AttentionPlan], Callable[..., None]]


def ready(
    cache: PagedKVCache,
    sequences: Listed[Sequence],
    counts: ArrayLike,
    out: Batch | None,
    stream: object,
    is_arrival: bool = False,
) -> Ready | None:
    """Return what `take_step` takes: `out`, or a batch of just the right size, and its parts; None if blocks are short.

    An arrival is a step of one sequence whose tokens were computed elsewhere.
    """
    handle = None
    if cache._staging is not None:
        handle = cache._staging.stream_of(stream)
    elif stream is not None:
        raise UnsupportedOption(f"stream is {stream!r}; a cache on {cache.device!r} has no streams: leave it out")
    listed = as_list(sequences)
    batch = _fitting(cache, listed, counts, handle, is_arrival) if out is None else cache._own(out)
    if batch is None:
        return None
    # What arrives does not attend.
    plans = [] if is_arrival else [group.plan for group in batch._groups if group.plan is not None]
    copy = partial(_copy, cache, batch._step.staged, handle)
    return batch, batch._step, listed, counts, is_arrival, plans, copy


def refusal(cache: PagedKVCache) -> OutOfBlocks:
    """Return the error that says why the last step could not be taken."""
    try:
        cache._tables.refuse()
    except OutOfBlocks as error:
        return error if cache._prefix is None else with_evictable(error, cache._prefix.evictable())


def new_batch(cache: PagedKVCache, max_sequences: int, max_tokens: int, stream: int | None = None) -> Batch:
    """An empty batch of a cache; one that is given a stream serves the next step alone."""
    step = Step(cache._state, StepBuffers(max_sequences, max_tokens, cache.num_groups, cache.index_dtype))
    plans = [_plan(group, cache.device) for group in cache._groups]
    if cache._staging is not None:
        placed = [
            (plan, _value_dim(group)) for plan, group in zip(plans, cache._groups, strict=True) if plan is not None
        ]
        step.staged = StagedBatch(cache._staging, step.buffers, placed, stream)
    return Batch(step, [layer.group for layer in cache._layers], cache._shown_tables, plans)


def _copy(
    cache: PagedKVCache,
    staged: StagedBatch | None,
    stream: int | None,
    copies: tuple[Pairs, ...],
    stale: list[Pairs],
) -> None:
    """Zero blocks that held another tenant's numbers, and copy blocks that the step writes to and others share.

    On a device, also send everything else that the step needs.
    """
    if staged is not None:
        assert stream is not None
        staged.send(copies, stale, cache._store, stream)
        return
    for group, pairs in enumerate(stale):
        if len(pairs):
            cache._store.zero(group, pairs)
    for group, pairs in enumerate(copies):
        if len(pairs):
            cache._store.copy(group, pairs)


def _fitting(
    cache: PagedKVCache, sequences: list[Sequence], counts: ArrayLike, stream: int | None, is_arrival: bool
) -> Batch | None:
    """A new batch of just the right size; None where blocks are short: no array is as large as a wrong count."""
    if any(shortage(cache._state, sequences, counts, is_arrival)):
        return None
    each = np.asarray(counts)
    total = int(each) * len(sequences) if each.ndim == 0 else int(each.sum())
    return new_batch(cache, max(1, len(sequences)), min(max(1, total), INT32_MAX), stream)


def _plan(group: Group, device: str) -> AttentionPlan | None:
    """An empty plan for the layers of a group; None where their query heads are not known beforehand."""
    spec = group.spec
    if not isinstance(spec, AttentionSpec) or spec.num_query_heads is None:
        return None
    return AttentionPlan(
        num_query_heads=spec.num_query_heads,
        num_kv_heads=spec.num_kv_heads,
        window=spec.window,
        device=device if device.startswith("cuda") else "cpu",
    )


def _value_dim(group: Group) -> int:
    return next(plane.shape[-1] for plane in group.spec.planes if plane.name == "value")
