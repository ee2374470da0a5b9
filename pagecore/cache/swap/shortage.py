"""Blocks that a step lacks if some of its sequences must be swapped in first."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.lifecycle import require_live
from pagecore.cache.parts import CacheParts
from pagecore.cache.prefix._prefix import lacking, unused_states
from pagecore.cache.sequences._sequences import Sequence
from pagecore.cache.state._state import hold
from pagecore.cache.step._step import lacked, least_slots
from pagecore.cache.swap._swap import missing_cross, num_distinct, stored_blocks
from pagecore.errors import ShapeError
from pagecore.index._integers import int32_array
from pagecore.index.states._states import StateTable
from pagecore.storage.checks import ceil_div


def shortage_with_swapped(
    parts: CacheParts,
    sequences: list[Sequence],
    counts: ArrayLike,
    limits: list[int | None] | None = None,
    counts_outputs: bool = True,
) -> list[int]:
    """Return the blocks of each group that one swap_in, and then a prepare, lack; the slots last, with states.

    With `limits`, the counts are computed in several steps; see `shortage` of `cache.step`. Without `counts_outputs`
    encoder outputs are not counted.
    """
    each = int32_array(counts, "count", ShapeError)
    each = np.full(len(sequences), each) if each.ndim == 0 else each
    if len(each) != len(sequences):
        raise ShapeError(f"{len(each)} counts are given for {len(sequences)} sequences; give one for each")
    tables = parts.tables
    require_live(parts.state, sequences)
    coming = [(one, count) for one, count in zip(sequences, each.tolist(), strict=True) if one.is_swapped]
    staying = [(one, count) for one, count in zip(sequences, each.tolist(), strict=True) if not one.is_swapped]
    needed = _needed(parts, coming, limits)
    short_slots = _slots_lacking(parts, coming, staying)
    # Held for a moment, so that the tables count the missing blocks of the other rows without them.
    held, counts_held = hold(tables.pools, needed)
    try:
        missing = lacked(parts.state, [one for one, _ in staying], [count for _, count in staying], limits)
    finally:
        del held  # the frame of an exception would hold the blocks on
    short = [n - taken + lack for n, taken, lack in zip(needed, counts_held, missing, strict=True)]
    if parts.prefix is not None:
        short = lacking(parts.prefix, short, [one for one, count in staying if count])
    outputs = missing_cross(parts.state, sequences, each.tolist()) if counts_outputs else []
    short = [max(0, one) for one in (*short, *outputs)]
    return short if parts.state.states is None else [*short, max(0, short_slots)]


def _slots_lacking(parts: CacheParts, coming: list[tuple[Sequence, int]], staying: list[tuple[Sequence, int]]) -> int:
    """Return the state slots that one swap_in, or a prepare after it, lacks.

    swap_in brings states and checkpoints and evicts cached states for them. A step may also drop the checkpoints of all
    sequences without a step in flight, those that have come back included.
    """
    states = parts.state.states
    if states is None:
        return 0
    group = parts.tables.num_groups
    distinct = [num_distinct(parts.state, [one for one, _ in some]) for some in _by_space(coming)]
    arriving = sum(counts[group] for counts in distinct)
    cached = 0 if parts.prefix is None else unused_states(parts.prefix)
    if states.num_checkpoints:
        kept = sum(counts[-1] for counts in distinct)
        swap_in = max(arriving - states.slots.num_free, kept - states.checkpoints.num_free - cached)
    else:
        swap_in = arriving - states.slots.num_free - cached
    others = _slots_of_step(states, group, coming)
    return max(swap_in, least_slots(parts.state, [one for one, _ in staying], [count for _, count in staying], others))


def _slots_of_step(states: StateTable, group: int, coming: list[tuple[Sequence, int]]) -> int:
    """Return the slots that sequences hold after they have come back and have taken those of a step.

    In place, the last of the sequences that share a slot writes to it if all of them write.
    """
    slots = [(id(one.swap_space), int(stored_blocks(one)[group][0])) for one, _ in coming]
    held = Counter(slot for slot in slots if slot[1])
    written = Counter(slot for slot, (_, count) in zip(slots, coming, strict=True) if count)
    drafts = sum(count - 1 for _, count in coming if 1 < count <= 1 + states.draft_tokens)
    without = sum(n for slot, n in written.items() if not slot[1])  # a step gives them a running slot
    if not states.in_place:
        return len(held) + without + drafts + written.total()
    copies = sum(n - (n == held[slot]) for slot, n in written.items() if slot[1])
    return len(held) + without + drafts + copies


def _needed(parts: CacheParts, coming: list[tuple[Sequence, int]], limits: list[int | None] | None) -> list[int]:
    """Return the blocks of each group for sequences that are swapped in together and then grow by a count each."""
    growths = [(sequence, _growth(parts, sequence, count)) for sequence, count in coming]
    holders = _holders(coming)
    needed = [
        sum(
            growth if limit is None else min(growth, _room(sequence, group, limit, holders))
            for sequence, growth in growths
        )
        for group, limit in enumerate(limits or [None] * parts.tables.num_groups)
    ]
    for some in _by_space(coming):
        held = [stored_blocks(sequence) for sequence, _ in some]
        distinct = num_distinct(parts.state, [sequence for sequence, _ in some])
        for group in range(parts.tables.num_groups):
            copies = _num_copies(parts.block_size, some, [blocks[group] for blocks in held])
            needed[group] += distinct[group] + copies
    return needed


def _by_space(coming: list[tuple[Sequence, int]]) -> list[list[tuple[Sequence, int]]]:
    by_space: dict[int, list[tuple[Sequence, int]]] = {}
    for sequence, count in coming:
        by_space.setdefault(id(sequence.swap_space), []).append((sequence, count))
    return list(by_space.values())


def _num_copies(block_size: int, some: list[tuple[Sequence, int]], held: list[NDArray[np.int32]]) -> int:
    """Return the number of copies on write: the last holder of a block writes to it, every other holder to a copy."""
    holders = Counter(block for blocks in held for block in blocks.tolist() if block)
    writers = Counter(
        int(blocks[sequence.num_computed_tokens // block_size])
        for (sequence, count), blocks in zip(some, held, strict=True)
        if count and sequence.num_computed_tokens % block_size
    )
    return sum(min(n, holders[block] - 1) for block, n in writers.items() if block)


def _holders(coming: list[tuple[Sequence, int]]) -> Counter[tuple[int, int, int]]:
    """Return the number of the sequences that hold each block, by space, group and block."""
    return Counter(
        (id(sequence.swap_space), group, block)
        for sequence, _ in coming
        for group, blocks in enumerate(stored_blocks(sequence))
        for block in blocks.tolist()
    )


def _room(sequence: Sequence, group: int, limit: int, holders: Counter[tuple[int, int, int]]) -> int:
    """Return the number of blocks of a group that a swapped sequence takes before it holds `limit`.

    A block that another of the sequences holds too does not become free when this one releases it.
    """
    own = sum(
        holders[id(sequence.swap_space), group, block] == 1
        for block in stored_blocks(sequence)[group].tolist()
        if block
    )
    return max(0, limit - own)


def _growth(parts: CacheParts, sequence: Sequence, count: int) -> int:
    """Return the number of blocks that `count` more tokens need in addition to the stored ones."""
    length = sequence.num_computed_tokens
    if count < 0:
        raise ShapeError(f"a count is {count}; counts are 0 or more")
    if length + count > parts.max_tokens_per_sequence:
        raise ShapeError(
            f"sequence {sequence.id!r} would have {length + count} tokens; a row holds at most "
            f"{parts.max_tokens_per_sequence}: make the cache with a larger max_tokens_per_sequence or num_blocks"
        )
    return ceil_div(length + count, parts.block_size) - ceil_div(length, parts.block_size)
