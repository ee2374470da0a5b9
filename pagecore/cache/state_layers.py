"""Layers that keep a state instead of keys: their common rules, and the number of slots that their states get."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import SupportsFloat, SupportsIndex

from pagecore.cache.layers import Layer
from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.index import BlockTables, StateTable
from pagecore.storage import StatePool, StateSpec, parse_memory, state_budget
from pagecore.storage.checks import INT32_MAX, require_int, shown
from pagecore.storage.memory import Memory

RULES = ("chunk", "interval", "in_place", "draft_tokens")


@dataclass(frozen=True)
class StateLayers:
    """The layers of a model that keep states, in the order of the model; they share the slots.

    Attributes
    ----------
    specs : tuple of StateSpec
        Spec of each layer: planes may differ, the rules of checkpoints are equal.
    """

    specs: tuple[StateSpec, ...]

    @property
    def rules(self) -> StateSpec:
        """Spec with the rules that all layers share."""
        return self.specs[0]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot in all layers."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def slots_to_run(self) -> int:
        """Slots that one sequence needs at once to compute any step, without a checkpoint."""
        return (1 if self.rules.in_place else 2) + self.rules.draft_tokens

    def table(self, tables: BlockTables, num_slots: int) -> StateTable:
        """Return the state table of a cache with these layers."""
        rules = self.rules
        return StateTable(
            tables,
            num_slots,
            chunk=rules.chunk,
            interval=rules.interval,
            in_place=rules.in_place,
            draft_tokens=rules.draft_tokens,
        )


def state_layers(placed: Listed[Layer]) -> StateLayers | None:
    """Return the layers that keep a state; None without any.

    Raises
    ------
    UnsupportedOption
        Layers with different rules.
    """
    by_index = {layer.index: layer.spec for layer in placed if layer.keeps_state}
    specs = tuple(spec for _, spec in sorted(by_index.items()) if isinstance(spec, StateSpec))
    if not specs:
        return None
    for spec in specs:
        for name in RULES:
            if getattr(spec, name) != getattr(specs[0], name):
                raise UnsupportedOption(
                    f"state layers have {name} {getattr(specs[0], name)} and {getattr(spec, name)}; they share slots "
                    "and checkpoints: give all of them the same"
                )
    return StateLayers(specs)


def size_states(
    layers: StateLayers | None,
    num_states: SupportsIndex | None,
    state_ratio: SupportsFloat | None,
    memory: Memory | None,
    max_sequences: int,
    device: str,
    has_blocks: bool = True,
) -> tuple[int, Memory | None]:
    """Return the slots of a cache, null slot included, and the memory that is left for blocks.

    Without blocks the slots get all of the memory, and none is left.

    Raises
    ------
    UnsupportedOption
        `num_states` or `state_ratio` for a cache without states; `state_ratio` without `memory`, or with `num_states`.
    ShapeError
        Too few slots for one sequence.
    NotEnoughMemory
        The memory does not hold that many slots, or holds too few.
    """
    if layers is None:
        if num_states is not None:
            raise UnsupportedOption("num_states is given, but no layer keeps a state; leave it out")
        if state_ratio is not None:
            raise UnsupportedOption(f"state_ratio is {shown(state_ratio)}, but no layer keeps a state; leave it out")
        return 0, memory
    if state_ratio is not None and (num_states is not None or memory is None):
        raise UnsupportedOption(
            f"state_ratio is {shown(state_ratio)}, and num_states is {shown(num_states)} and memory {shown(memory)}; a "
            "ratio divides memory: give memory without num_states, or leave state_ratio out"
        )
    if state_ratio is not None and not has_blocks:
        raise UnsupportedOption(
            f"state_ratio is {shown(state_ratio)}, but no layer attends, and states have all memory; leave it out"
        )
    least = 1 + layers.slots_to_run
    if num_states is not None:
        slots = require_int("num_states", num_states, min=2, max=INT32_MAX)
        if slots < least:
            raise ShapeError(f"num_states is {slots}; one sequence needs {least}, the null slot included: give more")
    elif memory is None:
        slots = min(1 + max_sequences * (1 + layers.slots_to_run), INT32_MAX)
    else:
        slots = 0
    if memory is None:
        return slots, None
    budget = parse_memory(memory, "cpu" if device == "none" else device)
    if num_states is None:
        share = budget
        if has_blocks:
            share = state_budget(budget) if state_ratio is None else state_budget(budget, state_ratio)
        slots = StatePool.slots_for(share, layers.specs)
    left = budget - slots * layers.bytes_per_slot
    if not has_blocks and slots >= least and left >= 0:
        return slots, None
    if slots < least or left <= 0:
        blocks = (f" and {max(left, 0)} bytes to blocks", " and two blocks of every group") if has_blocks else ("", "")
        found = slots if has_blocks else min(slots, budget // layers.bytes_per_slot)
        wanted = least if has_blocks else max(least, slots)
        raise NotEnoughMemory(
            f"a memory of {budget} bytes gives {found} state slots of {layers.bytes_per_slot} bytes{blocks[0]}; "
            f"{'one sequence needs' if has_blocks else 'needed are'} {wanted} slots{blocks[1]}: give more memory"
        )
    return slots, left
