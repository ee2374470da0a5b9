"""Memory of a hybrid model: its division between blocks and state slots, and the slots of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, SupportsFloat, TypeVar

from pagecore.cache.layers.groups import Group, Layers, arrange
from pagecore.cache.memory.limits import count_blocks
from pagecore.cache.memory.states import StateLayers, StateSizes, size_states, state_layers
from pagecore.errors import UnsupportedOption
from pagecore.storage import StateSpec, TensorParallel
from pagecore.storage.checks import INT32_MAX
from pagecore.storage.specs.checkpoint_format import checked_format

__all__ = ["arrange_hybrid", "checkpoints_held", "divide_hybrid", "slots_held", "with_checkpoints"]

AnySpec = TypeVar("AnySpec")


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
    max_sequences: int = INT32_MAX,
) -> tuple[list[int], StateSizes]:
    """Return the blocks of each group and the state slots, the null ones counted, as `PagedKVCache` divides `memory`.

    Without groups, states have all bytes. There are 0 slots for a model without states. Of quantised checkpoints there
    is one for each running state, or more if `max_sequences` need fewer running states.

    Raises
    ------
    NotEnoughMemory
        Too few blocks or slots for a sequence.
    """
    keeping = StateLayers(states) if states else None
    ratio = None if keeping is None or num_states is not None or not groups else state_ratio
    slots, left = size_states(keeping, num_states, ratio, memory, max_sequences, "none", has_blocks=bool(groups))
    return count_blocks(groups, block_size, None, left, max_tokens=max_tokens), slots


def with_checkpoints(specs: Sequence[AnySpec], format: str | None) -> tuple[AnySpec, ...]:
    """Return the specs of a model with a format of checkpoints for those that keep a state; None changes nothing.

    Raises
    ------
    UnsupportedOption, UnsupportedDtype, ShapeError
        An unknown format, a model without states, or states that the format cannot store.
    """
    if checked_format("checkpoint_format", format) is None:
        return tuple(specs)
    if not any(isinstance(spec, StateSpec) for spec in specs):
        raise UnsupportedOption(f"checkpoint_format is {format!r}, but the model has no recurrent states; leave it out")
    changed: list[Any] = [
        replace(spec, checkpoint_format=format) if isinstance(spec, StateSpec) else spec for spec in specs
    ]
    return tuple(changed)


def checkpoints_held(states: Sequence[StateSpec], num_tokens: int, block_size: int) -> int:
    """Return the slots of quantised checkpoints of a request: one with its newest checkpoint, if any."""
    if not states or states[0].checkpoint_format is None:
        return 0
    return int(num_tokens >= states[0].prefill_grid(block_size))


def slots_held(states: Sequence[StateSpec], num_tokens: int, block_size: int) -> int:
    """Return the state slots of a request: those that its steps write, and one with its newest checkpoint, if any.

    One more, which a step fills while it keeps the next checkpoint, is taken from the cached states. Quantised
    checkpoints have slots of their own, see `checkpoints_held`.
    """
    if not states:
        return 0
    layers = StateLayers(tuple(states))
    keeps = num_tokens >= states[0].prefill_grid(block_size) and not layers.quantises
    return layers.slots_to_run + keeps
