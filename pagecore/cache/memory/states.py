"""Layers that keep a state instead of keys: their common rules, and the number of slots that their states get."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import NoReturn, SupportsFloat, SupportsIndex

from pagecore.cache.layers.groups import Layer
from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.index import BlockTables, StateTable
from pagecore.storage import StatePool, StateSpec, parse_memory, state_budget
from pagecore.storage.checks import INT32_MAX, require_pool, shown
from pagecore.storage.memory.budgets import Memory

RULES = ("chunk", "interval", "in_place", "draft_tokens", "checkpoint_format")


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
    def quantises(self) -> bool:
        """True if checkpoints are quantised, in slots of their own."""
        return self.rules.checkpoint_format is not None

    @property
    def bytes_per_checkpoint(self) -> int:
        """Bytes of one checkpoint in all layers."""
        return sum(spec.checkpoint_nbytes for spec in self.specs)

    def nbytes(self, sizes: StateSizes) -> int:
        """Return the bytes of all slots."""
        kept = sizes.num_checkpoints * self.bytes_per_checkpoint if self.quantises else 0
        return sizes.num_states * self.bytes_per_slot + kept

    def divide(self, memory: int, max_sequences: int, num_checkpoints: int | None = None) -> StateSizes:
        """Return the slots that a memory for states holds.

        With quantised checkpoints these are the slots that `max_sequences` need to run and to fill a checkpoint in a
        prefill, or the number of checkpoints if they do not fit; the other bytes are those of checkpoints.
        """
        if not self.quantises:
            return StateSizes(StatePool.slots_for(memory, self.specs))
        each, one = self.bytes_per_slot, self.bytes_per_checkpoint
        if num_checkpoints is not None:
            left = max(memory - num_checkpoints * one, 0)
            return StateSizes(min(left // each, INT32_MAX), num_checkpoints)
        wanted = 1 + max_sequences * (1 + self.slots_to_run)
        slots = min(wanted, max(memory // (each + one), 2 + self.slots_to_run), INT32_MAX)
        return StateSizes(slots, min(max(memory - slots * each, 0) // one, INT32_MAX))

    @property
    def slots_to_run(self) -> int:
        """Slots that one sequence needs at once to compute any step, without a checkpoint."""
        return (1 if self.rules.in_place else 2) + self.rules.draft_tokens

    def table(self, tables: BlockTables, sizes: StateSizes, delay: int = 0) -> StateTable:
        """Return the state table of a cache with these layers, whose newest `delay` tokens no prefix has."""
        rules = self.rules
        return StateTable(
            tables,
            sizes.num_states,
            chunk=rules.chunk,
            interval=rules.interval,
            in_place=rules.in_place,
            draft_tokens=rules.draft_tokens,
            num_checkpoints=sizes.num_checkpoints if self.quantises else None,
            delay=delay,
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
    layers = StateLayers(specs)
    if layers.quantises and all(spec.checkpoint_spec.planes == spec.planes for spec in specs):
        names = ", ".join(sorted({plane.name for spec in specs for plane in spec.planes}))
        raise UnsupportedOption(
            f"checkpoint_format is {layers.rules.checkpoint_format!r}, but no state layer has a plane 'temporal', "
            f"which is quantised; they have {names}: use exact checkpoints"
        )
    return layers


@dataclass(frozen=True)
class StateSizes:
    """Slots of a cache, the null slots included: of states, and of quantised checkpoints (0 without a format)."""

    num_states: int = 0
    num_checkpoints: int = 0


def size_states(
    layers: StateLayers | None,
    num_states: SupportsIndex | None,
    state_ratio: SupportsFloat | None,
    memory: Memory | None,
    max_sequences: int,
    device: str,
    num_checkpoints: SupportsIndex | None = None,
    has_blocks: bool = True,
) -> tuple[StateSizes, Memory | None]:
    """Return the slots of a cache, and the memory that is left for blocks.

    Without blocks the slots get all of the memory, and none is left.

    Raises
    ------
    UnsupportedOption
        `num_states`, `num_checkpoints` or `state_ratio` for a cache without states; `state_ratio` without `memory`, or
        with `num_states`; `num_checkpoints` without a format of checkpoints.
    ShapeError
        Too few slots for one sequence.
    NotEnoughMemory
        The memory does not hold that many slots, or holds too few.
    """
    if layers is None:
        _refuse_slots(num_states=num_states, num_checkpoints=num_checkpoints, state_ratio=state_ratio)
        return StateSizes(), memory
    if num_checkpoints is not None and not layers.quantises:
        raise UnsupportedOption(
            "num_checkpoints is given, but checkpoints have slots of states; give the StateSpecs checkpoint_format, or "
            "leave it out"
        )
    _check_ratio(state_ratio, num_states, memory, has_blocks)
    least = 1 + layers.slots_to_run
    given = None if num_states is None else require_pool("num_states", num_states, "slot")
    kept = None if num_checkpoints is None else require_pool("num_checkpoints", num_checkpoints, "slot")
    if given is not None and given < least:
        raise ShapeError(f"num_states is {given}; one sequence needs {least}, the null slot included: give more")
    if memory is None:
        slots = min(1 + max_sequences * (1 + layers.slots_to_run), INT32_MAX) if given is None else given
        # A row holds its newest checkpoint while a step reserves the slot of the next.
        default = min(1 + 2 * max_sequences, INT32_MAX) if given is None else given
        return StateSizes(slots, _checkpoints(layers, kept, default)), None
    budget = parse_memory(memory, "cpu" if device == "none" else device)
    if given is not None:
        sizes = StateSizes(given, _checkpoints(layers, kept, given))
    else:
        ratio = () if state_ratio is None else (state_ratio,)
        sizes = layers.divide(state_budget(budget, *ratio) if has_blocks else budget, max_sequences, kept)
    left = budget - layers.nbytes(sizes)
    is_enough = sizes.num_states >= least and not (layers.quantises and sizes.num_checkpoints < 2)
    if not is_enough or left < (1 if has_blocks else 0):
        _raise_short(layers, sizes, budget, has_blocks)
    return sizes, left if has_blocks else None


def _refuse_slots(**options: object) -> None:
    """Raise UnsupportedOption for the first option that is given to a cache without states."""
    for name, value in options.items():
        if value is not None:
            what = f"is {shown(value)}" if name == "state_ratio" else "is given"
            raise UnsupportedOption(f"{name} {what}, but no layer keeps a state; leave it out")


def _check_ratio(
    ratio: SupportsFloat | None, num_states: SupportsIndex | None, memory: Memory | None, has_blocks: bool
) -> None:
    """Raise UnsupportedOption if a ratio is given where there is nothing to divide."""
    if ratio is not None and (num_states is not None or memory is None):
        raise UnsupportedOption(
            f"state_ratio is {shown(ratio)}, and num_states is {shown(num_states)} and memory {shown(memory)}; a "
            "ratio divides memory: give memory without num_states, or leave state_ratio out"
        )
    if ratio is not None and not has_blocks:
        raise UnsupportedOption(
            f"state_ratio is {shown(ratio)}, but no layer attends, and states have all memory; leave it out"
        )


def _raise_short(layers: StateLayers, sizes: StateSizes, budget: int, has_blocks: bool) -> NoReturn:
    """Raise NotEnoughMemory for a memory that holds fewer slots than wanted, or no blocks besides them."""
    left, least = budget - layers.nbytes(sizes), 1 + layers.slots_to_run
    kinds = f" and {sizes.num_checkpoints} checkpoints of {layers.bytes_per_checkpoint}" if layers.quantises else ""
    blocks = (f" and {max(left, 0)} bytes to blocks", " and two blocks of every group") if has_blocks else ("", "")
    found = sizes.num_states if has_blocks else min(sizes.num_states, budget // layers.bytes_per_slot)
    wanted = least if has_blocks else max(least, sizes.num_states)
    raise NotEnoughMemory(
        f"a memory of {budget} bytes gives {found} state slots of {layers.bytes_per_slot} bytes{kinds}{blocks[0]}; "
        f"{'one sequence needs' if has_blocks else 'needed are'} {wanted} slots{blocks[1]}: give more memory"
    )


def _checkpoints(layers: StateLayers, given: int | None, default: int) -> int:
    if not layers.quantises:
        return 0
    return default if given is None else given
