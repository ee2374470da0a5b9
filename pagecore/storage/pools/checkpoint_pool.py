"""CheckpointPool: the bytes of states at rest, quantised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, SupportsIndex

import numpy as np

from pagecore.arrays import Tensor
from pagecore.errors import InvalidBlock, ShapeError, UnsupportedOption
from pagecore.ops import transfer_blocks
from pagecore.ops.codecs._codecs import convert_slots
from pagecore.storage.checks import INT32_MAX, require_int, shown
from pagecore.storage.memory.budgets import Memory, parse_memory
from pagecore.storage.pools.allocation import Allocator
from pagecore.storage.pools.pool import blocks_within
from pagecore.storage.pools.state_pool import Specs, StatePool, listed_specs, slot_numbers
from pagecore.storage.specs.checkpoint_format import (
    RECURRENT,
    checked_format,
    checked_names,
    checkpoint_planes,
    scale_name,
)
from pagecore.storage.specs.state_spec import StateSpec


class CheckpointPool:
    """Checkpoints of states in slots of their own, with int8 codes instead of the numbers of the recurrent planes.

    A state is quantised when it is saved and restored when it is loaded: running states keep their precision. A slot
    has the codes and scales of every plane that `planes` names, and the other planes as they are. Slot 0 is the null
    slot, as in `StatePool`; nothing is kept there.

    Parameters
    ----------
    states : StatePool
        Pool of the running states, on the host or on CUDA; the checkpoints are on the same device.
    num_slots : int
        Slots of checkpoints, including the null slot.
    format : {"int8"}
        The format of `quantize_state`: a quarter of the bytes of float32 states, half of those of bfloat16.
    planes : sequence of str, optional
        Names of the planes that are quantised; by default "temporal". They have two axes or more, the last two values
        and keys, and are float32 or bfloat16.
    allocator : callable, optional
        Returns the memory of each plane for ``allocator(bytes, device)``, see `StatePool`.

    Attributes
    ----------
    pool : StatePool
        The stored bytes: codes, scales and the planes that are kept as they are.

    Raises
    ------
    ShapeError
        Fewer than two slots, or a quantised plane of one axis.
    UnsupportedOption
        Another format, or a plane that no layer has.
    UnsupportedDtype
        A quantised plane of another dtype.
    NotEnoughMemory
        The allocation failed.

    Notes
    -----
    int8 checkpoints of linear-attention states are from SGLang (2026).

    Examples
    --------
    >>> from pagecore import CheckpointPool, StatePool, StateSpec
    >>> from pagecore.storage.state_shapes import delta_planes
    >>> states = StatePool(StateSpec(delta_planes(2, 4, 8, 8)), num_slots=5, num_layers=3)
    >>> states.zero([1, 2])
    >>> checkpoints = CheckpointPool(states, num_slots=9)
    >>> checkpoints.save([1], [7])
    >>> checkpoints.load([7], [2])
    """

    def __init__(
        self,
        states: StatePool,
        num_slots: int,
        *,
        format: str = "int8",
        planes: Any = RECURRENT,
        allocator: Allocator | None = None,
    ) -> None:
        if not isinstance(states, StatePool):
            raise UnsupportedOption(f"states is {shown(states)}; expected a StatePool")
        if format is None or checked_format("format", format) is None:
            raise UnsupportedOption("format is None; use 'int8', or keep checkpoints in slots of the pool")
        self.states, self.format = states, format
        slots = require_int("num_slots", num_slots, min=2)
        self.quantised = checked_names((plane for spec in states.specs for plane in spec.planes), planes)
        self.pool = StatePool(_stored(states.specs, self.quantised), slots, device=states.device, allocator=allocator)
        # The planes of both sides: states, codes and scales, and those that are kept as they are.
        self._coded: list[tuple[Tensor, Tensor, Tensor]] = []
        self._plain: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        for layer, spec in enumerate(states.specs):
            for plane in spec.planes:
                self._add(layer, plane.name)

    def _add(self, layer: int, name: str) -> None:
        state, kept = self.states.plane(name, layer), self.pool.plane(name, layer)
        if name in self.quantised:
            self._coded.append((state, kept, self.pool.plane(scale_name(name), layer)))
        else:
            # One call copies all planes of equal second axes.
            calls = self._plain.setdefault(state.shape[1], ([], []))
            calls[0].append(state)
            calls[1].append(kept)

    @property
    def num_slots(self) -> int:
        """Slots of checkpoints, including the null slot."""
        return self.pool.num_slots

    @property
    def num_layers(self) -> int:
        """Number of state layers."""
        return self.states.num_layers

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one checkpoint in all layers."""
        return self.pool.bytes_per_slot

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.pool.nbytes

    def plane(self, name: str, layer: SupportsIndex = 0) -> Tensor:
        """Return one plane of a layer, ``[num_slots, ...]``; it aliases the pool.

        A quantised plane has its codes under its own name, and its scales ``[num_slots, ..., K]`` under
        ``f"{name}_scale"``.

        Raises
        ------
        UnsupportedOption
            The layer has no plane of that name.
        ShapeError
            The pool does not have that layer.
        """
        return self.pool.plane(name, layer)

    def save(self, slots: Any, checkpoints: Any, *, stream: object = None) -> None:
        """Quantise the states of slots of the pool of states into slots of checkpoints.

        Parameters
        ----------
        slots, checkpoints : int, or integers [n]
            Slots of the states, which may be repeated, and distinct slots of checkpoints, from 1.
        stream : int or a stream, optional
            On CUDA, the stream of the work; by default the current stream of CuPy.

        Raises
        ------
        InvalidBlock
            A slot is out of range, or a checkpoint is the null slot.
        ShapeError, UnsupportedDtype, UnsupportedOption
            Arrays that are not integers of one length, or a checkpoint that is listed twice. After every error nothing
            has been written.
        """
        self._convert("slots", slots, "checkpoints", checkpoints, False, stream)

    def load(self, checkpoints: Any, slots: Any, *, stream: object = None) -> None:
        """Restore checkpoints into slots of the pool of states; the checkpoints stay.

        Parameters
        ----------
        checkpoints, slots : int, or integers [n]
            Slots of checkpoints, which may be repeated, and distinct slots of the states, from 1.
        stream : int or a stream, optional
            As in `save`.

        Raises
        ------
        InvalidBlock, ShapeError, UnsupportedDtype, UnsupportedOption
            As in `save`, with the parts exchanged.
        """
        self._convert("checkpoints", checkpoints, "slots", slots, True, stream)

    def _convert(
        self, source_name: str, source: Any, target_name: str, target: Any, restores: bool, stream: object
    ) -> None:
        sources, targets = slot_numbers(source_name, source), slot_numbers(target_name, target)
        counts = (self.num_slots, self.states.num_slots) if restores else (self.states.num_slots, self.num_slots)
        if sources.shape != targets.shape:
            raise ShapeError(
                f"{source_name} has {sources.size} slots and {target_name} {targets.size}; give one for each"
            )
        for name, numbers, count in zip((source_name, target_name), (sources, targets), counts, strict=True):
            outside = (numbers < 0) | (numbers >= count)
            if outside.any():
                raise InvalidBlock(f"{name} has {numbers[outside][0]}; the pool has slots 0 to {count - 1}")
        if (targets == 0).any():
            raise InvalidBlock(f"{target_name} has slot 0, the null slot, which keeps nothing; use slots from 1")
        if np.unique(targets).size < targets.size:
            raise UnsupportedOption(f"a slot is in {target_name} twice; list each slot once")
        pairs = np.stack([sources, targets], axis=1)
        state_first = np.ascontiguousarray(pairs[:, ::-1] if restores else pairs)
        convert_slots(self._coded, state_first, restores, stream)
        for own, stored in self._plain.values():
            from_, to = (stored, own) if restores else (own, stored)
            transfer_blocks(from_, to, pairs, independent=True, stream=stream)

    @staticmethod
    def slots_for(
        memory: Memory, specs: Specs, num_layers: int | None = None, planes: Any = RECURRENT, device: str = "cpu"
    ) -> int:
        """Return the number of checkpoints that fit into `memory`, including the null slot.

        Parameters
        ----------
        memory : int, str or float
            Bytes, a number with a unit such as ``"8GiB"``, or a fraction of the free memory of `device`.
        specs, num_layers
            As for `StatePool`.
        planes
            As for the constructor.
        device : str
            ``"cpu"`` or a CUDA device.

        Raises
        ------
        NotEnoughMemory
            Fewer than two slots fit.
        ShapeError, UnsupportedOption, UnsupportedDtype
            An invalid budget, specs or planes.
        """
        listed = listed_specs(specs, num_layers)
        names = checked_names((plane for spec in listed for plane in spec.planes), planes)
        one = sum(spec.nbytes for spec in _stored(listed, names))
        return min(blocks_within(parse_memory(memory, device), one), INT32_MAX)

    def __repr__(self) -> str:
        return f"CheckpointPool({self.num_layers} layers, {self.num_slots} slots, {self.nbytes / 2**20:.1f} MiB)"


def _stored(specs: Iterable[StateSpec], quantised: tuple[str, ...]) -> list[StateSpec]:
    """Return the spec of the bytes of each layer's checkpoints."""
    return [
        replace(spec, planes=checkpoint_planes(spec.planes, quantised), checkpoint_format=None, split=None)
        for spec in specs
    ]
