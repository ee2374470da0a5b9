"""CheckpointPool: the bytes of states at rest, quantised."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np

from pagecore.arrays import Tensor, empty
from pagecore.errors import InvalidBlock, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.ops import transfer_blocks
from pagecore.ops._state_codec import convert_slots
from pagecore.storage.checks import INT32_MAX, as_tuple, member, require_int, shown
from pagecore.storage.memory import Memory, parse_memory
from pagecore.storage.pool import blocks_within
from pagecore.storage.spec import Plane
from pagecore.storage.state_pool import Specs, StatePool, listed_specs, slot_numbers

QUANTISED = ("float32", "bfloat16")


class CheckpointPool:
    """Checkpoints of states in slots of their own, with int8 codes instead of the numbers of the recurrent planes.

    A state is quantised when it is saved and restored when it is loaded: running states keep their precision. A slot
    has the codes and scales of every plane that `planes` names, and the other planes as they are. Slot 0 is the null
    slot, as in `StatePool`; nothing is kept there.

    Parameters
    ----------
    states : StatePool
        Pool of the running states, on the host.
    num_slots : int
        Slots of checkpoints, including the null slot.
    format : {"int8"}
        The format of `quantize_state`: a quarter of the bytes of float32 states, half of those of bfloat16.
    planes : sequence of str, optional
        Names of the planes that are quantised; by default "temporal". They have two axes or more, the last two values
        and keys, and are float32 or bfloat16.

    Raises
    ------
    ShapeError
        Fewer than two slots, or a quantised plane of one axis.
    UnsupportedOption
        Another format, a plane that no layer has, or a pool on CUDA, whose checkpoints are slots of the pool itself.
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

    def __init__(self, states: StatePool, num_slots: int, *, format: str = "int8", planes: Any = ("temporal",)) -> None:
        if not isinstance(states, StatePool):
            raise UnsupportedOption(f"states is {shown(states)}; expected a StatePool")
        if states.device != "cpu":
            raise UnsupportedOption(
                f"states is on {states.device}; int8 states are converted on the host: keep checkpoints in slots of "
                "the pool, or use a pool with device='cpu'"
            )
        if format != "int8":
            raise UnsupportedOption(f"format is {shown(format)}; use 'int8'")
        self.states, self.format = states, format
        self.num_slots = require_int("num_slots", num_slots, min=2)
        self.quantised = _checked_names(states.specs, planes)
        self._coded: list[tuple[Tensor, Tensor, Tensor]] = []
        self._plain: list[tuple[Tensor, Tensor]] = []
        self._views: dict[tuple[int, str], Tensor] = {}
        for layer, spec in enumerate(states.specs):
            for plane in spec.planes:
                self._add(layer, plane)

    def _add(self, layer: int, plane: Plane) -> None:
        """Allocate a plane, and zero its null slot."""
        state = self.states.plane(plane.name, layer)
        if plane.name not in self.quantised:
            kept = empty((self.num_slots, *plane.shape), plane.dtype, "cpu")
            self._plain.append((state, kept))
            self._views[layer, plane.name] = kept
        else:
            codes = empty((self.num_slots, *plane.shape), "int8", "cpu")
            scales = empty((self.num_slots, *plane.shape[:-2], plane.shape[-1]), plane.dtype, "cpu")
            self._coded.append((state, codes, scales))
            self._views[layer, plane.name] = codes
            self._views[layer, f"{plane.name}_scale"] = scales
        for name in (plane.name, f"{plane.name}_scale"):
            if (layer, name) in self._views:
                self._views[layer, name][0] = 0

    @property
    def num_layers(self) -> int:
        """Number of state layers."""
        return self.states.num_layers

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one checkpoint in all layers."""
        return _slot_bytes(self.states.specs, self.quantised)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.bytes_per_slot

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
        number = member("layer", layer, self.num_layers, "the pool")
        if (number, name) not in self._views:
            names = [held for at, held in self._views if at == number]
            raise UnsupportedOption(f"plane {shown(name)} is not stored; layer {number} has {', '.join(names)}")
        return self._views[number, name]

    def save(self, slots: Any, checkpoints: Any) -> None:
        """Quantise the states of slots of the pool of states into slots of checkpoints.

        Parameters
        ----------
        slots, checkpoints : int, or integers [n]
            Slots of the states, which may be repeated, and distinct slots of checkpoints, from 1.

        Raises
        ------
        InvalidBlock
            A slot is out of range, or a checkpoint is the null slot.
        ShapeError, UnsupportedDtype, UnsupportedOption
            Arrays that are not integers of one length, or a checkpoint that is listed twice. After every error nothing
            has been written.
        """
        self._convert("slots", slots, "checkpoints", checkpoints, False)

    def load(self, checkpoints: Any, slots: Any) -> None:
        """Restore checkpoints into slots of the pool of states; the checkpoints stay.

        Parameters
        ----------
        checkpoints, slots : int, or integers [n]
            Slots of checkpoints, which may be repeated, and distinct slots of the states, from 1.

        Raises
        ------
        InvalidBlock, ShapeError, UnsupportedDtype, UnsupportedOption
            As in `save`, with the parts exchanged.
        """
        self._convert("checkpoints", checkpoints, "slots", slots, True)

    def _convert(self, source_name: str, source: Any, target_name: str, target: Any, restores: bool) -> None:
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
        for state, codes, scales in self._coded:
            convert_slots(state, codes, scales, state_first, restores)
        for state, kept in self._plain:
            from_, to = (kept, state) if restores else (state, kept)
            transfer_blocks([from_], [to], pairs, independent=True)

    @staticmethod
    def slots_for(memory: Memory, specs: Specs, num_layers: int | None = None, planes: Any = ("temporal",)) -> int:
        """Return the number of checkpoints that fit into `memory`, including the null slot.

        Raises
        ------
        NotEnoughMemory
            Fewer than two slots fit.
        ShapeError, UnsupportedOption, UnsupportedDtype
            An invalid budget, specs or planes.
        """
        listed = listed_specs(specs, num_layers)
        one = _slot_bytes(listed, _checked_names(listed, planes))
        return min(blocks_within(parse_memory(memory, "cpu"), one), INT32_MAX)

    def __repr__(self) -> str:
        return f"CheckpointPool({self.num_layers} layers, {self.num_slots} slots, {self.nbytes / 2**20:.1f} MiB)"


def _checked_names(specs: Any, given: Any) -> tuple[str, ...]:
    """Return the names of the planes that are quantised; raise an error for planes that cannot be."""
    names = as_tuple("planes", (given,) if isinstance(given, str) else given, "names of planes")
    for name in names:
        planes = [plane for spec in specs for plane in spec.planes if plane.name == name]
        if not planes:
            stored = sorted({plane.name for spec in specs for plane in spec.planes})
            raise UnsupportedOption(f"planes has {shown(name)}; the layers have {', '.join(stored)}")
        for plane in planes:
            if len(plane.shape) < 2:
                raise ShapeError(f"plane {name!r} has shape {plane.shape}; it needs two axes, values and keys")
            if str(plane.dtype) not in QUANTISED:
                raise UnsupportedDtype(f"plane {name!r} is {plane.dtype}; int8 checkpoints need float32 or bfloat16")
    return tuple(names)


def _slot_bytes(specs: Any, quantised: tuple[str, ...]) -> int:
    total = 0
    for spec in specs:
        for plane in spec.planes:
            if plane.name not in quantised:
                total += plane.nbytes
                continue
            numbers = int(np.prod(plane.shape))
            total += numbers + plane.nbytes // numbers * (numbers // plane.shape[-2])
    return total
