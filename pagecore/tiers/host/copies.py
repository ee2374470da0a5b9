"""Copies of whole blocks and states between the pools of a cache and those of its host tier."""

from __future__ import annotations

from collections.abc import Sequence as Listed

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor
from pagecore.cache.parts import CacheParts
from pagecore.ops import transfer_blocks
from pagecore.storage import HostPool, KVPool, StatePool

# Planes of the cache and of the host that one call of `transfer_blocks` takes: their second axes are equal.
Planes = tuple[list[Tensor], list[Tensor]]


class BlockCopies:
    """The planes of each lane on both sides.

    Parameters
    ----------
    parts : CacheParts
    pool : HostPool
        A pool for the groups of tokens of the cache, and for its states; without bytes nothing is copied.
    """

    def __init__(self, parts: CacheParts, pool: HostPool) -> None:
        count = len(parts.token_groups)
        self._lanes: list[list[Planes]] = [[] for _ in range(count)]
        # A cache without bytes has no pools.
        for lane, (own, host) in enumerate(zip(parts.store.pools[:count], pool.kv_pools, strict=False)):
            self._lanes[lane] = _alike(_by_layer(own), _by_layer(host))
        if parts.state.states is not None:
            self._lanes.append([])
            if parts.store.states is not None and pool.state_pool is not None:
                self._lanes[count] = _alike(_of_states(parts.store.states), _of_states(pool.state_pool))

    @property
    def num_layers(self) -> int:
        """Layers of the largest lane."""
        return max((len(planes[0]) for calls in self._lanes for planes in calls), default=0)

    def run(self, pairs: Listed[NDArray[np.int32]], *, to_device: bool, stream: int | None = None) -> None:
        """Copy ``[n, (source, target)]`` of each lane; on CUDA the copies are submitted to `stream`."""
        for calls, moved in zip(self._lanes, pairs, strict=True):
            if not len(moved):
                continue
            for own, host in calls:
                sources, targets = (host, own) if to_device else (own, host)
                transfer_blocks(sources, targets, moved, stream=stream)


def _by_layer(pool: KVPool) -> list[Tensor]:
    names = [plane.name for plane in pool.spec.planes]
    return [pool.plane(name, layer) for layer in range(pool.num_layers) for name in names]


def _of_states(pool: StatePool) -> list[Tensor]:
    return pool.planes()


def _alike(own: list[Tensor], host: list[Tensor]) -> list[Planes]:
    alike: dict[int, Planes] = {}
    for one, other in zip(own, host, strict=True):
        calls = alike.setdefault(one.shape[1], ([], []))
        calls[0].append(one)
        calls[1].append(other)
    return list(alike.values())
