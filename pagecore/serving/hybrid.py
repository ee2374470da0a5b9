"""Memory of a hybrid model: its division between blocks and state slots, and the slots of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsFloat

from pagecore.cache.layers import Group, Layers, arrange
from pagecore.cache.limits import count_blocks
from pagecore.cache.state_layers import StateLayers, size_states, state_layers
from pagecore.storage import StateSpec, TensorParallel

__all__ = ["arrange_hybrid", "divide_hybrid", "slots_held"]


def arrange_hybrid(specs: Layers, parallel: TensorParallel) -> tuple[list[Group], tuple[StateSpec, ...]]:
    """Return the groups of the layers that attend, and the specs of those with a state, as sharded to a rank.

    Raises
    ------
    UnsupportedOption, ShapeError
        As `PagedKVCache`.
    """
    placed, groups = arrange(specs, None, parallel)
    keeping = state_layers(placed)
    return groups, () if keeping is None else keeping.specs


def divide_hybrid(
    groups: Sequence[Group],
    states: tuple[StateSpec, ...],
    block_size: int,
    memory: int,
    state_ratio: SupportsFloat,
    num_states: int | None = None,
    max_tokens: int | None = None,
) -> tuple[list[int], int]:
    """Return the blocks of each group and the state slots, the null ones counted, as `PagedKVCache` divides `memory`.

    Without groups, states have all bytes. There are 0 slots for a model without states.

    Raises
    ------
    NotEnoughMemory
        Too few blocks or slots for a sequence.
    """
    keeping = StateLayers(states) if states else None
    ratio = None if keeping is None or num_states is not None or not groups else state_ratio
    slots, left = size_states(keeping, num_states, ratio, memory, 1, "none", bool(groups))
    return count_blocks(groups, block_size, None, left, max_tokens=max_tokens), slots


def slots_held(states: Sequence[StateSpec], num_tokens: int, block_size: int) -> int:
    """Return the state slots of a request: those that its steps write, and one with its newest checkpoint, if any.

    One more, which a step fills while it keeps the next checkpoint, is taken from the cached states.
    """
    if not states:
        return 0
    return StateLayers(tuple(states)).slots_to_run + (num_tokens >= states[0].prefill_grid(block_size))
