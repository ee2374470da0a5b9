"""StatePool: the bytes of the recurrent states of sequences."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np

from pagecore.arrays import Tensor, empty, strided, zeros
from pagecore.arrays.cuda.devices import device_name
from pagecore.errors import (
    InvalidBlock,
    NotEnoughMemory,
    PagecoreError,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.ops import copy_blocks, transfer_blocks
from pagecore.storage.checks import INT32_MAX, LAYERS_MAX, as_float, as_tuple, member, require_int, shown
from pagecore.storage.memory.budgets import Memory, parse_memory
from pagecore.storage.pools.allocation import Allocator, checked_allocator
from pagecore.storage.pools.regions import Region
from pagecore.storage.pools.state_memory import adopted_views, allocated_views, slotwise_views
from pagecore.storage.specs.state_spec import StateSpec

Specs = StateSpec | Iterable[StateSpec]
Slots = np.ndarray[tuple[int], np.dtype[np.int64]]


class StatePool:
    """The planes of all state layers of a model, divided into slots that the layers share.

    A slot has one entry of each plane in each layer. Slot 0 is the null slot: padding reads and writes it, and nothing
    that is written there is kept. A `StateTable` decides which slot a sequence reads and writes, and lists the slots to
    zero and to copy before a step.

    Parameters
    ----------
    specs : StateSpec, or list of StateSpec
        Spec of each state layer; one spec together with `num_layers`.
    num_slots : int
        Slots, including the null slot.
    num_layers : int, optional
        Number of layers of a single spec; 1 by default.
    device : str
        "cpu", "cuda" or another CUDA device, such as "cuda:1".
    buffers : list, optional
        Memory of the caller, used instead of allocated: layer by layer, and within a layer plane by plane, writable
        C-contiguous arrays ``[num_slots, *plane.shape]`` of the plane's dtype, of any type that `as_tensor` accepts.
        The views alias them and keep them alive. Nothing is written.
    slot_bytes : int, optional
        Store slot by slot instead: `buffers` is one contiguous array of at least ``num_slots * slot_bytes`` bytes. A
        slot holds its planes layer by layer, as one run of bytes; the distance between slots is `slot_bytes`.
    allocator : callable, optional
        Returns the memory of each plane of each layer for ``allocator(bytes, device)``, see `KVPool`. Exclusive with
        `buffers`.

    Raises
    ------
    ShapeError, UnsupportedOption, UnsupportedDtype, DeviceError
        Invalid specs, sizes, device or buffers.
    NotEnoughMemory
        The allocation failed.

    Notes
    -----
    Memory that the pool allocates on CUDA is zeroed; on the host only the null slot is, and other slots hold whatever
    the heap held until they are zeroed or copied to.

    Examples
    --------
    >>> from pagecore import StatePool, StateSpec
    >>> from pagecore.storage.state_shapes import delta_planes
    >>> pool = StatePool(StateSpec(delta_planes(2, 4, 8, 8)), num_slots=5, num_layers=3)
    >>> pool.plane("temporal", layer=2).shape
    (5, 4, 8, 8)
    >>> pool.zero([1, 2])
    >>> pool.copy([1], [3])
    """

    def __init__(
        self,
        specs: Specs,
        num_slots: int,
        *,
        num_layers: int | None = None,
        device: str = "cpu",
        buffers: Any = None,
        slot_bytes: SupportsIndex | None = None,
        allocator: Allocator | None = None,
    ) -> None:
        self.specs = listed_specs(specs, num_layers)
        self.num_slots = require_int("num_slots", num_slots, min=2)
        self.device = device_name(device)
        places = [(layer, plane) for layer, spec in enumerate(self.specs) for plane in spec.planes]
        shapes = [(self.num_slots, *plane.shape) for _, plane in places]
        # The memory, one region each: a tensor for each view, or one for all of them.
        self._memory: list[Tensor] | None = None
        source = checked_allocator(allocator)
        if source is not None and buffers is not None:
            raise UnsupportedOption("buffers and allocator are given; give one of them")
        if slot_bytes is not None:
            if buffers is None:
                raise UnsupportedOption("slot_bytes is given without buffers; pass one array of bytes as buffers")
            step = require_int("slot_bytes", slot_bytes, max=None)
            flat, views = slotwise_views(buffers, [plane for _, plane in places], self.num_slots, step, self.device)
            self._memory = [flat]
        elif source is not None:
            views = allocated_views(source, places, self.num_slots, self.device)
        elif buffers is None:
            make = empty if self.device == "cpu" else zeros
            views = [make(shape, plane.dtype, self.device) for shape, (_, plane) in zip(shapes, places, strict=True)]
        else:
            views = adopted_views(buffers, places, self.num_slots, self.device)
        self._views = {(layer, plane.name): view for (layer, plane), view in zip(places, views, strict=True)}
        self._zeros = _zeros_for(views, self.device)
        if buffers is None and self.device == "cpu":
            for view in views:
                view[0] = 0

    @property
    def num_layers(self) -> int:
        """Number of state layers."""
        return len(self.specs)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot in all layers."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.bytes_per_slot

    def plane(self, name: str, layer: SupportsIndex = 0) -> Tensor:
        """Return one plane of one state layer, ``[num_slots, *plane.shape]``; it aliases the pool.

        Raises
        ------
        UnsupportedOption
            The layer has no plane of that name.
        ShapeError
            The pool does not have that layer.
        """
        number = member("layer", layer, self.num_layers, "the pool")
        names = [plane.name for plane in self.specs[number].planes]
        if name not in names:
            raise UnsupportedOption(f"plane {shown(name)} is not stored; layer {number} has {', '.join(names)}")
        return self._views[number, name]

    def regions(self) -> list[Region]:
        """Return the memory as regions, to register it with a transfer library."""
        if self._memory is not None:
            return [Region("states", flat.pointer, flat.nbytes, self.device) for flat in self._memory]
        return [
            Region(f"state {name!r} of layer {layer}", view.pointer, view.nbytes, self.device)
            for (layer, name), view in self._views.items()
        ]

    def planes(self) -> list[Tensor]:
        """Return every plane of every layer, layer by layer; they alias the pool."""
        return list(self._views.values())

    def copy(self, source: Any, target: Any, *, stream: object = None) -> None:
        """Copy whole slots, in all layers and planes.

        Parameters
        ----------
        source, target : int, or integers [n] on the host
            No slot is a target twice, or both a source and a target.
        stream : int or a stream, optional
            On CUDA, the stream of the copies; by default the current stream of CuPy.

        Raises
        ------
        InvalidBlock
            A slot is outside of the pool, or a target is the null slot.
        ShapeError, UnsupportedDtype
            Arrays that are not integers of one length.
        UnsupportedOption
            A slot is a target twice, or both a source and a target. After every error nothing has been copied.
        """
        sources, targets = slot_numbers("source", source), slot_numbers("target", target)
        if sources.shape != targets.shape:
            raise ShapeError(f"source has {sources.size} slots and target {targets.size}; give one target for each")
        if (targets == 0).any():
            raise InvalidBlock("a target is slot 0, the null slot, which keeps nothing; use slots from 1")
        try:
            self.copy_pairs(np.stack([sources, targets], axis=1), stream=stream)
        except (InvalidBlock, UnsupportedOption) as error:
            raise self._refusal({"source": sources, "target": targets}, error) from None

    def copy_pairs(self, pairs: Any, *, stream: object = None) -> None:
        """Copy whole slots by pairs (source, target), which may be in the memory of the device.

        On CUDA the copies are submitted to `stream`, and pairs in device memory are read when they run: a captured
        graph copies the pairs of each replay. A pair of equal slots, such as (0, 0) as padding, is skipped.

        Parameters
        ----------
        pairs : integers, [n, 2]
            No slot is a target twice, or both a source and a target.
        stream : int or a stream, optional

        Raises
        ------
        InvalidBlock, ShapeError, UnsupportedDtype, UnsupportedOption
            As in `copy`. Pairs in CUDA memory are checked under `debug` only; otherwise pairs with slots outside of the
            pool are skipped.
        """
        copy_blocks(self.planes(), pairs, independent=True, stream=stream)

    def zero(self, slots: Any, *, stream: object = None) -> None:
        """Zero whole slots, in all layers and planes.

        Parameters
        ----------
        slots : int, or integers [n] on the host
            Distinct slots from 1.
        stream : int or a stream, optional
            On CUDA, the stream of the work; by default the current stream of CuPy.

        Raises
        ------
        InvalidBlock
            A slot is outside of the pool, or is the null slot.
        ShapeError, UnsupportedDtype, UnsupportedOption
            Slots that are not integers, or not distinct. After every error nothing has been written.
        """
        targets = slot_numbers("slots", slots)
        pairs = np.stack([np.ones_like(targets), targets], axis=1)
        try:
            for sources, planes in self._zeros:
                transfer_blocks(sources, planes, pairs, independent=True, stream=stream)
        except (InvalidBlock, UnsupportedOption) as error:
            raise self._refusal({"slots": targets}, error) from None

    def _refusal(self, listed: dict[str, Slots], error: PagecoreError) -> PagecoreError:
        """Return the error of a refused copy in terms of slots: `listed` has the sources, if any, and the targets."""
        for name, slots in listed.items():
            outside = slots[(slots < 0) | (slots >= self.num_slots)]
            if outside.size:
                return InvalidBlock(f"{name} has slot {outside[0]}; the pool has slots 0 to {self.num_slots - 1}")
        name, targets = list(listed.items())[-1]
        if (targets == 0).any():
            return InvalidBlock(f"{name} has slot 0, the null slot, which keeps nothing; use slots from 1")
        kept, counts = np.unique(targets, return_counts=True)
        if (counts > 1).any():
            return UnsupportedOption(f"slot {kept[counts > 1][0]} is in {name} twice; list each slot once")
        both = np.intersect1d(kept, listed.get("source", kept[:0]))
        if both.size:
            return UnsupportedOption(f"slot {both[0]} is both a source and a target; copy it in a call of its own")
        return error

    @staticmethod
    def slots_for(memory: Memory, specs: Specs, num_layers: int | None = None, device: str = "cpu") -> int:
        """Return the number of slots that fit into `memory`, including the null slot.

        Parameters
        ----------
        memory : int, str or float
            Bytes, a number with a unit such as ``"8GiB"``, or a fraction of the free memory of `device`.
        specs, num_layers
            As for the constructor.
        device : str
            ``"cpu"`` or a CUDA device.

        Raises
        ------
        NotEnoughMemory
            Fewer than two slots fit.
        ShapeError, UnsupportedOption
            An invalid budget, or invalid specs.
        """
        one = sum(spec.nbytes for spec in listed_specs(specs, num_layers))
        budget = parse_memory(memory, device)
        if budget < 2 * one:
            raise NotEnoughMemory(
                f"states have {budget} bytes; at least two state slots of {one} bytes are needed, including the null "
                f"slot: give at least {2 * one} bytes, or a larger state_ratio"
            )
        return min(budget // one, INT32_MAX)

    def __repr__(self) -> str:
        return (
            f"StatePool({self.num_layers} layers, {self.num_slots} slots, {self.nbytes / 2**20:.1f} MiB on "
            f"{self.device})"
        )


def state_budget(memory: Memory, state_ratio: SupportsFloat = 0.9, device: str = "cpu") -> int:
    """Return the bytes of a budget that belong to states, where `state_ratio` is state bytes over KV bytes.

    Raises
    ------
    ShapeError
        An invalid budget, or a ratio that is not a finite number above 0.
    """
    ratio = checked_ratio(state_ratio)
    from fractions import Fraction

    return math.floor(parse_memory(memory, device) * Fraction(ratio) / (1 + Fraction(ratio)))


def checked_ratio(state_ratio: SupportsFloat) -> float:
    """Return `state_ratio` as a float; raise ShapeError unless it is finite and above 0."""
    ratio = as_float("state_ratio", state_ratio)
    if not (math.isfinite(ratio) and ratio > 0):
        raise ShapeError(f"state_ratio is {ratio}; give a finite number above 0, such as 0.9")
    return ratio


def listed_specs(specs: Specs, num_layers: int | None) -> tuple[StateSpec, ...]:
    """Return the spec of each state layer; raise ShapeError or UnsupportedOption for anything else."""
    if isinstance(specs, StateSpec):
        return (specs,) * require_int("num_layers", 1 if num_layers is None else num_layers, max=LAYERS_MAX)
    listed = as_tuple("specs", specs, "a StateSpec, or a list with one StateSpec for each state layer")
    for layer, spec in enumerate(listed):
        if not isinstance(spec, StateSpec):
            raise UnsupportedOption(f"state layer {layer} is {shown(spec)}; expected a StateSpec")
    if not listed:
        raise ShapeError("specs is empty; give at least one StateSpec")
    if num_layers is not None and require_int("num_layers", num_layers, max=None) != len(listed):
        raise ShapeError(f"num_layers is {shown(num_layers)}, but specs lists {len(listed)}; leave num_layers out")
    return listed


def slot_numbers(name: str, given: Any) -> Slots:
    """Return slots as int64; raise ShapeError or UnsupportedDtype for anything but one axis of integers."""
    try:
        slots = np.atleast_1d(np.asarray(given))
    except (TypeError, ValueError):
        raise ShapeError(f"{name} is {shown(given)}; expected an integer or one axis of integers on the host") from None
    if slots.ndim != 1:
        raise ShapeError(f"{name} has shape {slots.shape}; expected one axis of slots")
    if slots.size == 0:
        return np.zeros(0, np.int64)
    if slots.dtype.kind not in "iu":
        raise UnsupportedDtype(f"{name} is {slots.dtype}; expected integers")
    return slots.astype(np.int64)


def _zeros_for(planes: list[Tensor], device: str) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return (sources, targets) for each call of `transfer_blocks`; all sources alias the zeros of one slot."""
    held = zeros((max(plane[0].nbytes for plane in planes),), "uint8", device)
    alike: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for plane in planes:
        sources, targets = alike.setdefault(plane.shape[1], ([], []))
        sources.append(strided(held, (2, *plane.shape[1:]), (0, *plane.strides[1:]), 0, plane.dtype))
        targets.append(plane)
    return list(alike.values())
