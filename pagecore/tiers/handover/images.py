"""Images: blocks and states of a cache on CUDA in host memory, where transports can read and write them."""

from __future__ import annotations

from collections.abc import Sequence as Listed

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays.runtime import Event
from pagecore.cache.parts import CacheParts
from pagecore.storage import HostPool, Region, StateSpec
from pagecore.tiers.host.copies import BlockCopies

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
    states : StatePool or None
        On the host, with slots for the running state and a checkpoint.

    Raises
    ------
    NotEnoughMemory
        The system cannot provide or register the memory.
    """

    def __init__(self, parts: CacheParts, blocks: Listed[NDArray[np.integer]]) -> None:
        assert parts.staging is not None
        self._staging, self._blocks = parts.staging, blocks
        states = [spec for spec in parts.state_specs if isinstance(spec, StateSpec)]
        self.memory = HostPool(
            [(group.spec, group.num_layers) for group in parts.groups],
            parts.block_size,
            states,
            num_blocks=[max(2, len(listed) + 1) for listed in blocks],
            num_states=CHECKPOINT + 1 if states else 0,
            device=parts.device,
            heads=parts.store.pools[0].layout.heads or "HND",
            huge_pages=False,
        )
        self.pools, self.states = self.memory.views("cpu")
        self._copies = BlockCopies(parts, self.memory, groups=len(parts.groups))
        self._await_arrivals = parts.store.await_arrivals
        assert self.memory.memory is not None
        self.memory.memory.wait_registered(None)

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
        if self.states is not None:
            lanes = [*lanes, np.array(states, np.int64).reshape(-1, 2)]
        pairs = [np.ascontiguousarray(lane[:, ::-1] if to_device else lane, np.int32) for lane in lanes]
        self._copies.run(pairs, to_device=to_device, stream=stream)
        event = runtime.make_event(self._staging.device)
        event.record(stream)
        return event

    def regions(self) -> list[Region]:
        """Return the memory, to register it with a transport."""
        return self.memory.regions()

    def close(self) -> None:
        """Unregister the memory; no copy may be under way. It is unmapped with the last view of it."""
        self.memory.close()


def numbered(rows: NDArray[np.integer]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the distinct blocks of a row or list, without the null block, and the row in numbers of an image."""
    blocks = np.unique(rows[rows != 0]).astype(np.int32)
    return blocks, np.where(rows != 0, np.searchsorted(blocks, rows) + 1, 0).astype(np.int32)
