"""Preparation of a step: its batch, its blocks, copy-on-write and the plans of its attention.

Everything here runs under the lock of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache._sequence import Sequence, as_list
from pagecore.cache.limits import with_evictable
from pagecore.cache.parts import CacheParts
from pagecore.cache.prefix._evict import evictable
from pagecore.cache.step._plan import StepPlan, plan_step
from pagecore.cache.step._step import Step
from pagecore.cache.step._tree import StepTree
from pagecore.cache.step.batch import Batch, own_batch
from pagecore.cache.step.staging import StagedBatch
from pagecore.errors import OutOfBlocks, UnsupportedOption
from pagecore.index import StepBuffers
from pagecore.ops import AttentionPlan

Pairs = NDArray[np.int32]
Load = tuple[list[Sequence], ArrayLike, bool]
Ready = tuple[Batch, Step, Load | None, list[AttentionPlan], Callable[[tuple[Pairs, ...], list[Pairs]], None]]


def ready(
    parts: CacheParts,
    sequences: Listed[Sequence],
    counts: ArrayLike,
    out: Batch | None,
    stream: object,
    is_arrival: bool = False,
    parents: Listed[ArrayLike | None] | None = None,
) -> Ready | None:
    """Return the batch of a step and the other arguments of `take_step`; None if blocks are short.

    Without `out` the new batch has exactly the size of the step. A step of more tokens than the pools hold is refused
    before its arrays are allocated; otherwise blocks are counted once, when they are taken.
    """
    handle = None
    if parts.staging is not None:
        handle = parts.staging.stream_of(stream)
    elif stream is not None:
        raise UnsupportedOption(f"stream is {stream!r}; a cache on {parts.device!r} has no streams: leave it out")
    listed = as_list(sequences)
    tree = None if parents is None else StepTree(parents)
    load: Load | None = None
    if out is None:
        plan = plan_step(parts.state, listed, counts, is_arrival)
        if plan.num_tokens > parts.num_slots and not plan.has_room():
            return None
        words = 0 if tree is None else tree.num_words(plan)
        batch = new_batch(parts, max(1, plan.num_sequences), max(1, plan.num_tokens), handle, plan, words)
    else:
        batch, load = own_batch(parts.state, out), (listed, counts, is_arrival)
    batch._step.offered = tree
    # An arrival does not attend.
    plans = [] if is_arrival else [group.plan for group in batch._groups if group.plan is not None]
    return batch, batch._step, load, plans, partial(_copy, parts, batch._step, handle)


def refusal(parts: CacheParts) -> OutOfBlocks:
    """Return the error that says why the last step could not be taken."""
    if parts.state.lacks_slots:
        return _out_of_slots(parts)
    try:
        parts.tables.refuse()
    except OutOfBlocks as error:
        return error if parts.prefix is None else with_evictable(error, evictable(parts.prefix))


def _out_of_slots(parts: CacheParts) -> OutOfBlocks:
    states = parts.state.states
    assert states is not None
    try:
        states.refuse()
    except OutOfBlocks as error:
        return OutOfBlocks(
            f"{error.requested} state slots are needed and {error.available} are available, including cached ones; "
            "remove a sequence or make the cache with more num_states",
            error.requested,
            error.available,
        )


def new_batch(
    parts: CacheParts,
    max_sequences: int,
    max_tokens: int,
    stream: int | None = None,
    plan: StepPlan | None = None,
    tree_words: int = 0,
) -> Batch:
    """Return a batch of a cache.

    Parameters
    ----------
    stream : int, optional
        Stream of the only step of the batch; None for a batch of any number of steps.
    plan : StepPlan, optional
        Plan of the first step.
    tree_words : int
        64-bit words for the bits of each token of a tree; 0 for steps without trees.
    """
    buffers = StepBuffers(max_sequences, max_tokens, parts.num_groups, parts.index_dtype, tree_words)
    step = Step(parts.state, buffers, plan)
    plans = [ops.plan() for ops in parts.group_ops]
    if parts.staging is not None:
        pairs = zip(plans, parts.group_ops, strict=True)
        staged = [(attention, ops.value_dim) for attention, ops in pairs if attention is not None]
        step.staged = StagedBatch(parts.staging, buffers, staged, stream, step.states)
    return Batch(step, [layer.group for layer in parts.layers], parts.block_tables, plans)


def _copy(parts: CacheParts, step: Step, stream: int | None, copies: tuple[Pairs, ...], stale: list[Pairs]) -> None:
    """Zero the blocks that another namespace used last, then copy the shared blocks and states that the step writes to.

    On a device, first send everything else that the step needs.
    """
    if step.staged is not None:
        assert stream is not None
        step.staged.send(copies, stale, parts.store, stream)
        return
    for group, pairs in enumerate(stale):
        if len(pairs):
            parts.store.zero(group, pairs)
    for group, pairs in enumerate(copies):
        if len(pairs):
            parts.store.copy(group, pairs)
    if step.states is not None:
        parts.store.move_states(step.states, step.states.copies)
