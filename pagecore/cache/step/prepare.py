"""Preparation of a step: its batch, its blocks, copy-on-write and the plans of its attention.

Everything here runs under the lock of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed
from functools import partial
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.memory.limits import short_of_blocks
from pagecore.cache.memory.sealer import sealed_groups
from pagecore.cache.parts import CacheParts, CrossParts
from pagecore.cache.prefix._prefix import evictable
from pagecore.cache.sequences._sequences import Sequence, as_list
from pagecore.cache.staging.batch import StagedBatch
from pagecore.cache.step._step import CrossStep, DraftIds, Step, StepPlan, StepTree, plan_step
from pagecore.cache.step.batch import Batch, own_batch
from pagecore.errors import OutOfBlocks, UnsupportedOption
from pagecore.index import StepBuffers
from pagecore.ops import AttentionPlan
from pagecore.storage.checks import shown

Pairs = NDArray[np.int32]
NO_PAIRS: Pairs = np.zeros((0, 2), np.int32)
Load = tuple[list[Sequence], ArrayLike, bool, SupportsIndex | None]
Ready = tuple[Batch, Step, Load | None, list[AttentionPlan], Callable[[tuple[Pairs, ...], list[Pairs]], None]]


def ready(
    parts: CacheParts,
    sequences: Listed[Sequence],
    counts: ArrayLike,
    out: Batch | None,
    stream: object,
    is_arrival: bool = False,
    parents: Listed[ArrayLike | None] | None = None,
    draft_ids: Listed[ArrayLike | None] | None = None,
    num_sealed: SupportsIndex | None = None,
) -> Ready | None:
    """Return the batch of a step and the other arguments of `take_step`; None if blocks are short.

    Without `out` the new batch has exactly the size of the step. A step of more tokens than the pools hold is refused
    before its arrays are allocated; otherwise blocks are counted once, when they are taken.
    """
    handle = None
    if parts.saver is not None:
        parts.saver.require_memory()
    if parts.staging is not None:
        handle = parts.staging.stream_of(stream)
    elif stream is not None:
        raise UnsupportedOption(f"stream is {shown(stream)}; a cache on {parts.device!r} has no streams: leave it out")
    listed = as_list(sequences)
    if parts.state.observer is not None and parts.prefix is not None:
        parts.state.observer.preparing(listed, counts)
    tree = None if parents is None else StepTree(parents)
    ids = None if draft_ids is None else DraftIds(draft_ids)
    load: Load | None = None
    if out is None:
        plan = plan_step(parts.state, listed, counts, is_arrival, num_sealed)
        if plan.num_tokens > parts.num_slots and not plan.has_room():
            return None
        sizes = max(1, plan.num_sequences), max(1, plan.num_tokens), plan.num_cross_tokens()
        words = 0 if tree is None else tree.num_words(plan)
        batch = new_batch(parts, *sizes, handle, plan, words)
    else:
        batch, load = own_batch(parts.state, out), (listed, counts, is_arrival, num_sealed)
    batch._step.offered = tree
    batch._step.offered_ids = ids
    # An arrival does not attend.
    groups = [] if is_arrival else batch._groups[: parts.tables.num_groups]
    plans = [group.plan for group in groups if group.plan is not None]
    return batch, batch._step, load, plans, partial(_copy, parts, batch._step, handle)


def refusal(parts: CacheParts) -> OutOfBlocks:
    """Return the error that says why the last step could not be taken."""
    if parts.cross is not None and parts.cross.contents.is_short:
        return parts.cross.contents.refuse(parts.cross.first_group)
    if parts.state.lacks_slots:
        return _out_of_slots(parts)
    try:
        parts.tables.refuse()
    except OutOfBlocks as error:
        return short_of_blocks(error, () if parts.prefix is None else evictable(parts.prefix))


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
    max_cross_tokens: int = 0,
    stream: int | None = None,
    plan: StepPlan | None = None,
    tree_words: int = 0,
) -> Batch:
    """Return a batch of a cache.

    Parameters
    ----------
    max_cross_tokens : int
        Encoder tokens that a step writes, in a cache with cross attention.
    stream : int, optional
        Stream of the only step of the batch; None for a batch of any number of steps.
    plan : StepPlan, optional
        Plan of the first step.
    tree_words : int
        64-bit words for the bits of each token of a tree; 0 for steps without trees.
    """
    num_groups = parts.tables.num_groups
    buffers = StepBuffers(max_sequences, max_tokens, num_groups, parts.index_dtype, tree_words, parts.seals_blocks)
    step = Step(parts.state, buffers, plan)
    plans = [ops.plan() for ops in parts.group_ops]
    if parts.staging is not None:
        listed = _staged_plans(parts, plans, 0, num_groups)
        step.staged = StagedBatch(parts.staging, buffers, listed, stream, step.states)
    if parts.cross is not None:
        step.cross = _cross_step(parts, parts.cross, buffers, max_cross_tokens, plans, stream)
    tails = sealed_groups(parts.layers) if parts.seals_blocks else {}
    sealed = {
        tail: (parts.block_tables[group], parts.store.pools[group] if parts.store.pools else None)
        for tail, group in tails.items()
    }
    return Batch(step, [layer.group for layer in parts.layers], parts.block_tables, plans, sealed)


def _staged_plans(
    parts: CacheParts, plans: Listed[AttentionPlan | None], first: int, last: int
) -> list[tuple[AttentionPlan, int]]:
    """Return the plan and value width of each of the groups [first, last) that has a plan."""
    pairs = zip(plans[first:last], parts.group_ops[first:last], strict=True)
    return [(attention, ops.value_dim) for attention, ops in pairs if attention is not None]


def _cross_step(
    parts: CacheParts,
    cross: CrossParts,
    queries: StepBuffers,
    max_tokens: int,
    plans: Listed[AttentionPlan | None],
    stream: int | None,
) -> CrossStep:
    """Return the encoder side of a step whose queries are those of `queries`."""
    tables = cross.contents.tables
    buffers = StepBuffers(queries.max_sequences, max_tokens, tables.num_groups, parts.index_dtype)
    listed = _staged_plans(parts, plans, cross.first_group, parts.num_groups)
    step = CrossStep(cross.contents, buffers, [plan for plan, _ in listed])
    if cross.staging is not None:
        step.staged = StagedBatch(cross.staging, buffers, listed, stream, queries=queries)
    return step


def _copy(parts: CacheParts, step: Step, stream: int | None, copies: tuple[Pairs, ...], stale: list[Pairs]) -> None:
    """Zero the blocks that another namespace used last, then copy the shared blocks and states that the step writes to.

    On a device, first send everything else that the step needs.
    """
    if parts.cross is not None and step.cross is not None and parts.scrub:
        stale = [*(stale or [NO_PAIRS] * parts.cross.first_group), *step.cross.taken_pairs()]
    if step.staged is not None:
        assert stream is not None
        step.staged.send(copies, stale, parts.store, stream)
        if step.cross is not None and step.cross.staged is not None:
            step.cross.staged.send((), (), parts.store, stream)
        return
    for group, pairs in enumerate(stale):
        if len(pairs):
            parts.store.zero(group, pairs)
    for group, pairs in enumerate(copies):
        if len(pairs):
            parts.store.copy(group, pairs)
    if step.states is not None:
        parts.store.move_states(step.states, step.states.copies)


def save_checkpoints(parts: CacheParts, step: Step) -> None:
    """Quantise the checkpoints that a step keeps; on a device after its pass, on the stream of the last step."""
    assert step.states is not None
    stream = None
    if parts.staging is not None and step.staged is not None:
        step.staged.check_reachable()
        stream = parts.staging.stream
        parts.staging.refuse_captured(stream)
    parts.store.save_states(step.states, stream)
