"""Copies of whole blocks and states between the pools of a cache and those of its host tier."""

from __future__ import annotations

from collections.abc import Sequence as Listed

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor
from pagecore.cache.parts import CacheParts
from pagecore.errors import InvalidBlock, UnsupportedOption
from pagecore.ops import transfer_blocks
from pagecore.storage import HostPool, KVPool, StatePool, StateSpec
from pagecore.storage.checks import shown
from pagecore.tiers.host.copies.rectangles import PlaneGroup, groups_of, rectangles

# Planes of the cache and of the host that one call of `transfer_blocks` takes: their second axes are equal.
Planes = tuple[list[Tensor], list[Tensor]]
IO = ("auto", "dma", "kernel")
# Runs of memory from which on a copy engine is faster than a kernel that reads over the bus.
DMA_BYTES = 1 << 16


class BlockCopies:
    """The planes of each lane on both sides.

    Parameters
    ----------
    parts : CacheParts
    pool : HostPool
        A pool for the groups of tokens of the cache, and for its states; without bytes nothing is copied.
    io : {"auto", "dma", "kernel"}
        On CUDA: copies of runs of memory by the copy engines if a run has 64 KiB or more, or always where a block of a
        plane is one run; or only by the kernel of `transfer_blocks`.
    groups : int, optional
        Groups that the pool has; by default those of tokens.
    states : StatePool, optional
        Slots of the cache that the pool has; by default those of checkpoints.
    """

    def __init__(
        self,
        parts: CacheParts,
        pool: HostPool,
        io: str = "auto",
        *,
        groups: int | None = None,
        states: StatePool | None = None,
    ) -> None:
        self._io = io
        # For each lane and layer: the planes that the copy engines copy, and calls of the kernel for the others.
        self._divided: dict[tuple[str, int], tuple[list[PlaneGroup], list[Planes]]] = {}
        self._by_layer: dict[int, list[Planes]] = {}
        count = len(parts.cached_groups) if groups is None else groups
        self._lanes: list[list[Planes]] = [[] for _ in range(count)]
        self._parts, self._pool = parts, pool
        # A cache without bytes has no pools.
        for lane, (own, host) in enumerate(zip(parts.store.pools[:count], pool.kv_pools, strict=False)):
            self._lanes[lane] = _alike(_by_layer(own), _by_layer(host))
        if parts.state.states is not None:
            self._lanes.append([])
            own_states = parts.store.checkpoints if states is None else states
            if own_states is not None and pool.state_pool is not None:
                self._lanes[count] = _alike(own_states.planes(), pool.state_pool.planes())

    @property
    def num_layers(self) -> int:
        """Layers of the largest lane."""
        return max((len(planes[0]) for calls in self._lanes for planes in calls), default=0)

    def run(self, pairs: Listed[NDArray[np.int32]], *, to_device: bool, stream: int | None = None) -> None:
        """Copy ``[n, (source, target)]`` of each lane; on CUDA the copies are submitted to `stream`."""
        for lane, (calls, moved) in enumerate(zip(self._lanes, pairs, strict=True)):
            if len(moved) and calls:
                self._copy(lane, ("lane", lane), calls, moved, to_device, stream)

    def _copy(
        self,
        lane: int,
        key: tuple[str, int],
        calls: list[Planes],
        pairs: NDArray[np.int32],
        to_device: bool,
        stream: int | None,
    ) -> None:
        """Copy entries of a lane in planes; `key` identifies the planes."""
        if stream is not None and self._io != "kernel":
            if key not in self._divided:
                self._divided[key] = self._divide(lane, calls)
            planes, (groups, calls) = calls, self._divided[key]
            if groups:
                assert self._parts.staging is not None
                _check_pairs(planes, pairs, to_device)
                copies = rectangles(groups, pairs, self._borders(lane), to_device=to_device)
                self._parts.staging.runtime.copy_rectangles(copies, stream)
        for own, host in calls:
            sources, targets = (host, own) if to_device else (own, host)
            transfer_blocks(sources, targets, pairs, stream=stream)

    def _divide(self, lane: int, calls: list[Planes]) -> tuple[list[PlaneGroup], list[Planes]]:
        """Return the planes that the copy engines copy, and the calls of the kernel for the others."""
        least = DMA_BYTES if self._io == "auto" else 1
        by_engine: list[tuple[Tensor, Tensor]] = []
        left: list[Planes] = []
        for planes in calls:
            others: Planes = ([], [])
            for own, host in zip(*planes, strict=True):
                if own[0].nbytes >= least and _is_run(own) and _is_run(host) and _is_alike(own, host):
                    by_engine.append((own, host))
                else:
                    others[0].append(own)
                    others[1].append(host)
            if others[0]:
                left.append(others)
        pools = self._parts.store.pools
        is_state = self._is_state_lane(lane)
        return groups_of(by_engine, () if is_state else pools[lane].buffers), left

    def _is_state_lane(self, lane: int) -> bool:
        return lane == len(self._lanes) - 1 and self._parts.state.states is not None

    def _borders(self, lane: int) -> NDArray[np.int64]:
        """Return the entries of a lane at which a chunk of registered memory begins."""
        return self._pool.chunk_starts(self._pool.num_lanes - 1 if self._is_state_lane(lane) else lane)

    def run_layer(self, layer: int, pairs: NDArray[np.int32], *, to_device: bool, stream: int | None = None) -> None:
        """Copy ``[n, (source, target)]`` in the planes of one model layer: blocks of its group, or slots of states."""
        if not len(pairs) or (not self._parts.store.pools and self._parts.store.states is None):
            return
        if layer not in self._by_layer:
            self._by_layer[layer] = self._planes_of(layer)
        place = self._parts.layer(layer)
        lane = len(self._lanes) - 1 if place.keeps_state else place.cached_group
        self._copy(lane, ("layer", layer), self._by_layer[layer], pairs, to_device, stream)

    def _planes_of(self, layer: int) -> list[Planes]:
        """Return the planes of one model layer."""
        place, pools = self._parts.layer(layer), self._pool.kv_pools
        spec = place.spec
        planes: Planes = ([], [])
        for plane in spec.checkpoint_spec.planes if isinstance(spec, StateSpec) else spec.planes:
            # Not by Store.plane, which waits for the layer.
            if place.keeps_state:
                assert self._parts.store.checkpoints is not None
                assert self._pool.state_pool is not None
                own = self._parts.store.checkpoints.plane(plane.name, place.index)
                host = self._pool.state_pool.plane(plane.name, place.index)
            else:
                own = self._parts.store.pools[place.cached_group].plane(plane.name, place.index)
                host = pools[place.cached_group].plane(plane.name, place.index)
            planes[0].append(own)
            planes[1].append(host)
        return _alike(*planes)


def _check_pairs(calls: list[Planes], pairs: NDArray[np.int32], to_device: bool) -> None:
    """Raise InvalidBlock, as `transfer_blocks` does, unless both ids of all pairs are blocks of every plane."""
    counts = [min(plane.shape[0] for planes in calls for plane in planes[side]) for side in (0, 1)]
    sizes = np.array(counts[::-1] if to_device else counts)
    if (wrong := (pairs < 1) | (pairs >= sizes)).any():
        number, column = np.argwhere(wrong)[0].tolist()
        name = ("source", "target")[column]
        raise InvalidBlock(
            f"the {name} of pair {number} is {pairs[number, column]} and the smallest {name} cache has "
            f"{sizes[column]} blocks; expected 1 to {sizes[column] - 1} (block 0 is the reserved null block)"
        )


def check_io(io: str) -> None:
    """Raise UnsupportedOption for an unknown `io`."""
    if not isinstance(io, str) or io not in IO:
        raise UnsupportedOption(f"io is {shown(io)}; use one of {', '.join(IO)}")


def _is_run(plane: Tensor) -> bool:
    """Return True if a block of a plane is one run of memory."""
    step = plane.itemsize
    for axis in sorted(range(1, plane.ndim), key=lambda axis: plane.strides[axis]):
        if plane.shape[axis] > 1 and plane.strides[axis] != step:
            return False
        step *= plane.shape[axis]
    return True


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Return True if the axes of two runs have the same order."""
    axes = [axis for axis in range(1, one.ndim) if one.shape[axis] > 1]
    return all(one.strides[axis] == other.strides[axis] for axis in axes)


def _by_layer(pool: KVPool) -> list[Tensor]:
    names = [plane.name for plane in pool.spec.planes]
    return [pool.plane(name, layer) for layer in range(pool.num_layers) for name in names]


def _alike(own: list[Tensor], host: list[Tensor]) -> list[Planes]:
    alike: dict[int, Planes] = {}
    for one, other in zip(own, host, strict=True):
        calls = alike.setdefault(one.shape[1], ([], []))
        calls[0].append(one)
        calls[1].append(other)
    return list(alike.values())
