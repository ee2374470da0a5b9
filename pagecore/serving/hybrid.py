"""Memory of a hybrid model: its division between blocks and state slots, and the slots of a request."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsFloat

from pagecore.cache.layers import Alias, Group, Layers, arrange
from pagecore.cache.limits import count_blocks
from pagecore.errors import NotEnoughMemory, UnsupportedOption
from pagecore.storage import StateSpec, TensorParallel, state_budget
from pagecore.storage.checks import INT32_MAX

__all__ = ["arrange_hybrid", "divide_hybrid", "slots_held"]


def arrange_hybrid(specs: Layers, parallel: TensorParallel) -> tuple[list[Group], tuple[StateSpec, ...]]:
    """Return the groups of the layers that attend, and the specs of those with a state, as sharded to a rank."""
    given: Any = specs
    if isinstance(given, StateSpec):
        given = [given]
    listed = list(given) if isinstance(given, list | tuple) else []
    states = tuple(_sharded(spec, parallel) for spec in listed if isinstance(spec, StateSpec))
    if not states:
        return arrange(specs, None, parallel)[1], ()
    attention = _without_states(listed)
    return arrange(attention, None, parallel)[1] if attention else [], states


def divide_hybrid(
    groups: Sequence[Group], states: Sequence[StateSpec], block_size: int, memory: int, state_ratio: SupportsFloat
) -> tuple[list[int], int]:
    """Return the blocks of each group and the state slots, the null ones counted, that `memory` bytes hold.

    States have `state_ratio` times the bytes of the blocks, or all bytes if no layer attends. There are 0 slots for a
    model without states.

    Raises
    ------
    NotEnoughMemory
        Fewer than two blocks of every group, or two slots.
    """
    if not states:
        return count_blocks(groups, block_size, None, memory), 0
    budget = state_budget(memory, state_ratio) if groups else memory
    one = sum(spec.nbytes for spec in states)
    if budget < 2 * one:
        raise NotEnoughMemory(
            f"memory is {memory} bytes, of which states have {budget}; at least two slots of {one} bytes are needed, "
            "including the null slot: give more memory, or a larger state_ratio"
        )
    slots = min(budget // one, INT32_MAX)
    return count_blocks(groups, block_size, None, memory - slots * one) if groups else [], slots


def slots_held(states: Sequence[StateSpec], num_tokens: int, block_size: int) -> int:
    """Return the state slots of a request: one that its steps write, and one with its newest checkpoint, if any.

    A third, which a step fills while it keeps the next checkpoint, is taken from the cached states.
    """
    if not states:
        return 0
    return 2 if num_tokens >= states[0].prefill_grid(block_size) else 1


def _sharded(spec: StateSpec, parallel: TensorParallel) -> StateSpec:
    part = parallel.shard(spec)
    assert isinstance(part, StateSpec)
    return part


def _without_states(layers: Sequence[object]) -> list[Any]:
    """Return the layers that attend; aliases refer to their numbers in the new list."""
    kept: list[Any] = []
    place: dict[int, int] = {}
    for number, layer in enumerate(layers):
        if isinstance(layer, StateSpec):
            continue
        place[number] = len(kept)
        kept.append(Alias(_target(layer, number, layers, place)) if isinstance(layer, Alias) else layer)
    return kept


def _target(alias: Alias, number: int, layers: Sequence[object], place: dict[int, int]) -> int:
    try:
        target = operator.index(alias.layer)
    except TypeError:
        return alias.layer
    if 0 <= target < number and isinstance(layers[target], StateSpec):
        raise UnsupportedOption(
            f"layer {number} is an alias of layer {target}, which keeps a state; an alias shares the planes of a layer "
            "that attends"
        )
    return place.get(target, target)
