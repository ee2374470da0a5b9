"""Images: blocks and states of a cache on CUDA in host memory, where transports can read and write them."""

from __future__ import annotations

from collections.abc import Sequence as Listed

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays.cuda.protocol import Event
from pagecore.cache.parts import CacheParts
from pagecore.storage import HostPool, Region, Spec, StateSpec
from pagecore.tiers.host.copies.copies import BlockCopies

# Slots of the running state and of the checkpoint in an image.
RUNNING, CHECKPOINT = 1, 2


class HostImage:
    """Registered host memory for some blocks and states of a cache on CUDA.

    Parameters
    ----------
    parts : CacheParts
    blocks : sequence of ndarray
        For each group the device's blocks: distinct, without the null block. Block ``i`` is block ``i + 1`` here.

    Attributes
    ----------
    pools : tuple of KVPool
        The blocks of each group, on the host.
    states, checkpoints : StatePool or None
        On the host, with slots for the running state and a checkpoint: one pool, unless checkpoints are quantised.

    Raises
    ------
    NotEnoughMemory
        The system cannot provide or register the memory.
    """

    def __init__(self, parts: CacheParts, blocks: Listed[NDArray[np.integer]]) -> None:
        assert parts.staging is not None
        self._staging, self._blocks = parts.staging, blocks
        self._await_arrivals = parts.store.await_arrivals
        pools = parts.store.pools
        heads = (pools[0].layout.heads if pools else None) or "HND"
        groups = [(group.spec, group.num_layers) for group in parts.groups]
        counts = [max(2, len(listed) + 1) for listed in blocks]
        self._memory = [_pool_for(parts, parts.checkpoint_specs, groups, counts, heads)]
        self._copies = BlockCopies(parts, self._memory[0], groups=len(groups))
        self.pools, self.checkpoints = self._memory[0].views("cpu")
        self.states, self._running_copies = self.checkpoints, None
        if parts.store.quantiser is None:
            return
        try:
            self._memory.append(_pool_for(parts, parts.state_specs))
        except BaseException:
            self.close()
            raise
        self._running_copies = BlockCopies(parts, self._memory[1], groups=0, states=parts.store.states)
        self.states = self._memory[1].views("cpu")[1]

    def copy(self, states: Listed[tuple[int, int]], *, to_device: bool) -> Event:
        """Submit copies of all blocks and of states ``(device's slot, slot here)``; return the event of their end.

        Raises
        ------
        DeviceError
            The stream of the cache is being captured into a graph.
        """
        lanes = [np.stack([listed, np.arange(1, len(listed) + 1)], axis=1) for listed in self._blocks]
        return self._submit(lanes, states, to_device)

    def copy_states(self, states: Listed[tuple[int, int]]) -> Event:
        """Submit copies of states to the device; return the event of their end."""
        return self._submit([np.empty((0, 2), np.int64)] * len(self._blocks), states, True)

    def _submit(self, lanes: list[NDArray[np.int64]], states: Listed[tuple[int, int]], to_device: bool) -> Event:
        stream, runtime = self._staging.stream, self._staging.runtime
        self._staging.refuse_captured(stream)
        if not to_device:
            self._await_arrivals()
        slots = np.array(states, np.int64).reshape(-1, 2)
        if self._running_copies is not None:
            is_running = slots[:, 1] == RUNNING
            self._running_copies.run([_ordered(slots[is_running], to_device)], to_device=to_device, stream=stream)
            slots = slots[~is_running]
        lanes = lanes if self.checkpoints is None else [*lanes, slots]
        self._copies.run([_ordered(lane, to_device) for lane in lanes], to_device=to_device, stream=stream)
        event = runtime.make_event(self._staging.device)
        event.record(stream)
        return event

    def regions(self) -> list[Region]:
        """Return the memory, to register it with a transport."""
        return [region for pool in self._memory for region in pool.regions()]

    def close(self) -> None:
        """Unregister the memory; no copy may be under way. It is unmapped with the last view of it."""
        for pool in self._memory:
            pool.close()


def _pool_for(
    parts: CacheParts,
    states: Listed[Spec],
    groups: Listed[tuple[Spec, int]] = (),
    num_blocks: Listed[int] = (),
    heads: str = "HND",
) -> HostPool:
    """Return registered memory for blocks, a running state and a checkpoint."""
    pool = HostPool(
        groups,
        parts.block_size,
        [spec for spec in states if isinstance(spec, StateSpec)],
        num_blocks=num_blocks,
        num_states=CHECKPOINT + 1 if states else 0,
        device=parts.device,
        heads=heads,
        huge_pages=False,
    )
    assert pool.memory is not None
    pool.memory.wait_registered(None)
    return pool


def _ordered(pairs: NDArray[np.integer], to_device: bool) -> NDArray[np.int32]:
    """Return pairs ``(device, host)`` as ``(source, target)``."""
    return np.ascontiguousarray(pairs[:, ::-1] if to_device else pairs, np.int32)


def numbered(rows: NDArray[np.integer]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the distinct blocks of a row or list, without the null block, and the row in numbers of an image."""
    blocks = np.unique(rows[rows != 0]).astype(np.int32)
    return blocks, np.where(rows != 0, np.searchsorted(blocks, rows) + 1, 0).astype(np.int32)
