"""The bytes of a paged cache: one pool for each group of layers, and the operations that move whole blocks."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor, strided, zeros
from pagecore.cache.layers.groups import Group, Layer
from pagecore.cache.memory.adopted import refuse_shared
from pagecore.cache.memory.states import StateSizes
from pagecore.errors import DeviceError, UnsupportedOption
from pagecore.index import StateBuffers
from pagecore.ops import copy_blocks, transfer_blocks
from pagecore.storage import CheckpointPool, KVLayout, KVPool, Region, StatePool, StateSpec
from pagecore.storage.pools.allocation import Allocator
from pagecore.storage.pools.layout import as_layout

NO_STATES = StateSizes()


class Arrivals(Protocol):
    """Copies to layers of a cache that may still run on another stream of the device."""

    def wait(self, layer: Layer) -> None:
        """Make later work of the cache's stream wait for the copies to a layer; the host does not wait."""

    def wait_all(self) -> None:
        """Make later work of the cache's stream wait for the copies to all layers."""


class Store:
    """A pool for each group of layers; no pools if the device is "none".

    The cache decides which blocks to move. The store takes no lock, and does not know what its planes mean.

    Parameters
    ----------
    groups : list of Group
    num_blocks : list of int
        Blocks of each group.
    block_size : int
    layout : str or KVLayout, optional
    device : str
    buffers : list, optional
        Memory of the caller for each group, adopted instead of allocated.
    scrub : bool
        Zero the memory that the store allocates, and keep blocks of zeros for `zero`.
    states : tuple of StateSpec
        Spec of each layer that keeps a state.
    slots : StateSizes
        Slots of the states, and of quantised checkpoints.
    allocator : callable, optional
        Gives the memory of blocks and states, for (bytes, device).
    """

    def __init__(
        self,
        groups: list[Group],
        num_blocks: Listed[int],
        block_size: int,
        layout: str | KVLayout | None,
        device: str,
        buffers: Listed[object] | None = None,
        scrub: bool = False,
        states: tuple[StateSpec, ...] = (),
        slots: StateSizes = NO_STATES,
        allocator: Allocator | None = None,
    ) -> None:
        order = as_layout("layerwise" if layout is None else layout)
        given = [None] * len(groups) if buffers is None else buffers
        made = [] if device == "none" else list(zip(groups, num_blocks, given, strict=True))
        # Set by a tier that loads layer by layer: tensors are valid after `pool`, `plane` or `await_arrivals`.
        self.arrivals: Arrivals | None = None
        self.pools = [
            KVPool(
                group.spec,
                group.num_layers,
                n,
                block_size,
                order,
                device,
                own,
                scrub=scrub and own is None,
                allocator=allocator,
            )
            for group, n, own in made
        ]
        refuse_shared(self.pools)
        self._is_adopted = buffers is not None
        self.states = None
        if states and device != "none":
            self.states = StatePool(states, slots.num_states, device=device, allocator=allocator)
        # Converts checkpoints of states, if they are quantised.
        self.quantiser: CheckpointPool | None = None
        if self.states is not None and slots.num_checkpoints:
            self.quantiser = CheckpointPool(
                self.states, slots.num_checkpoints, format=states[0].checkpoint_format or "int8", allocator=allocator
            )
        self._scrubs = scrub
        if scrub and self.states is not None:
            self.states.zero(range(1, slots.num_states))
        if scrub and self.quantiser is not None:
            self.quantiser.pool.zero(range(1, slots.num_checkpoints))
        self._zeros = [_zeros_of(pool) for pool in self.pools] if scrub else []

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        of_states = 0 if self.states is None else self.states.nbytes
        of_states += 0 if self.quantiser is None else self.quantiser.nbytes
        return sum(pool.nbytes for pool in self.pools) + of_states

    @property
    def checkpoints(self) -> StatePool | None:
        """The pool whose slots the prefix cache and checkpoints have: that of the states unless they are quantised."""
        return self.states if self.quantiser is None else self.quantiser.pool

    def regions(self) -> list[Region]:
        """Return the memory of all pools as regions; with several groups their names end in the group."""
        several = len(self.pools) > 1
        found = [
            region._replace(name=f"{region.name} of group {group}") if several else region
            for group, pool in enumerate(self.pools)
            for region in pool.regions()
        ]
        found += [] if self.states is None else self.states.regions()
        if self.quantiser is not None:
            kept = self.quantiser.pool.regions()
            found += [region._replace(name=f"checkpoint of {region.name}") for region in kept]
        return found

    def pool(self, layer: Layer) -> KVPool:
        """Return the pool that a layer that attends writes to; raise DeviceError for a cache without bytes."""
        self._require_bytes()
        if layer.keeps_state:
            raise UnsupportedOption("the layer keeps a state and has no blocks; use the layers that attend")
        if self.arrivals is not None:
            self.arrivals.wait(layer)
        return self.pools[layer.group]

    def plane(self, name: str, layer: Layer) -> Tensor:
        """Return one plane of a layer; raise DeviceError for a cache without bytes."""
        self._require_bytes()
        if self.arrivals is not None:
            self.arrivals.wait(layer)
        if layer.keeps_state:
            assert self.states is not None
            return self.states.plane(name, layer.index)
        group = layer.group
        if layer.sealed_group is not None and name in {plane.name for plane in layer.spec.planes}:
            group = layer.sealed_group
        return self.pools[group].plane(name, layer.index)

    def await_arrivals(self) -> None:
        """Make later work of the cache's stream wait for all layers that are still being loaded."""
        if self.arrivals is not None:
            self.arrivals.wait_all()

    def checkpoint_plane(self, name: str, layer: Layer) -> Tensor:
        """Return one plane of the checkpoints of a layer; raise DeviceError for a cache without bytes."""
        self._require_bytes()
        if not layer.keeps_state:
            raise UnsupportedOption("the layer keeps no state and has no checkpoints; use a layer of a StateSpec")
        self.await_arrivals()
        assert self.checkpoints is not None
        return self.checkpoints.plane(name, layer.index)

    def _require_bytes(self) -> None:
        if not self.pools and self.states is None:
            raise DeviceError(
                "this cache has device='none' and stores no planes; make it with device='cpu' or device='cuda'"
            )

    def copy(self, group: int, pairs: Any, stream: int | None = None) -> None:
        """Copy blocks of a group in all its layers; `pairs` is ``[n, (source, target)]``.

        On CUDA the copies are submitted to `stream`.
        """
        self.await_arrivals()
        if self.pools:
            # A source is a block that a sequence still holds, and a target is a new block: pairs do not overlap.
            copy_blocks(self.pools[group].planes(), pairs, independent=True, stream=stream)

    def move_states(self, states: StateBuffers, pairs: Any, stream: int | None = None) -> None:
        """Zero and copy the slots of a step; `pairs` has the copies, on the device of the pool.

        With `scrub`, every slot that the step writes and does not read is zeroed, because another namespace may have
        used it.
        """
        if self.states is None:
            return
        self.await_arrivals()
        slots = _unread(states) if self._scrubs else states.zeros
        if len(slots):
            self.states.zero(slots, stream=stream)
        if len(states.copies):
            self.states.copy_pairs(pairs, stream=stream)
        if len(states.loads):
            assert self.quantiser is not None
            self.quantiser.load(*states.loads.T, stream=stream)

    def save_states(self, states: StateBuffers, stream: int | None = None) -> None:
        """Quantise the checkpoints of a step that is about to be committed."""
        if self.quantiser is not None and len(states.saves):
            self.quantiser.save(*states.saves.T, stream=stream)

    def zero_adopted(self) -> None:
        """Zero all bytes of the caller's memory that the pools use."""
        if self._is_adopted:
            for pool in self.pools:
                pool.zero()

    def zero(self, group: int, pairs: Any, stream: int | None = None) -> None:
        """Zero blocks of a group in all its layers; `pairs` is ``[n, (1, block)]``.

        The blocks are copied from a block of zeros: that takes one launch, where filling would take one for each block
        and plane. On CUDA the launch is submitted to `stream`.
        """
        self.await_arrivals()
        for sources, targets in self._zeros[group]:
            transfer_blocks(sources, targets, pairs, independent=True, stream=stream)


def _unread(states: StateBuffers) -> NDArray[np.int32]:
    """Return the slots that a step writes, but neither reads nor copies to; and those that it zeroes."""
    written = [states.state_write, states.checkpoint_write]
    if states.draft_write is not None:
        written.append(states.draft_write.ravel())
    kept = [states.state_read, states.copies.ravel(), np.zeros(1, np.int32)]
    return np.union1d(np.setdiff1d(np.concatenate(written), np.concatenate(kept)), states.zeros)


def _zeros_of(pool: KVPool) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return (sources, targets) for each call of `transfer_blocks`: two blocks of zeros for each plane, and the planes.

    All sources alias the same zeros. Their axes have the order of the plane's axes, so that a contiguous block is moved
    as one piece.
    """
    planes = pool.planes()
    held = zeros((max(plane[0].nbytes for plane in planes),), "uint8", pool.device)
    alike: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for plane in planes:
        sources, targets = alike.setdefault(plane.shape[1], ([], []))
        sources.append(_zeros_like(plane, held))
        targets.append(plane)
    return list(alike.values())


def _zeros_like(plane: Tensor, held: Tensor) -> Tensor:
    strides = [0] * plane.ndim  # the stride between blocks stays 0
    step = plane.itemsize
    for axis in sorted(range(1, plane.ndim), key=lambda axis: plane.strides[axis]):
        strides[axis] = step
        step *= plane.shape[axis]
    return strided(held, (2, *plane.shape[1:]), strides, 0, plane.dtype)
