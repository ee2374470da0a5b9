"""HostPool: host memory for the blocks and states of one cache, entry by entry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor, strided
from pagecore.arrays.cuda.devices import check_device, device_index, device_name
from pagecore.errors import DeviceError, InvalidBlock, ShapeError
from pagecore.storage.checks import member
from pagecore.storage.memory.host_memory import PAGE, HostMemory
from pagecore.storage.memory.registration import CHUNK_BYTES, joined, whole_chunks
from pagecore.storage.pools.pool import KVPool
from pagecore.storage.pools.pool_geometry import PoolGeometry, checked_geometry
from pagecore.storage.pools.regions import Region
from pagecore.storage.pools.state_pool import StatePool, slot_numbers
from pagecore.storage.specs.spec import Spec
from pagecore.storage.specs.state_spec import StateSpec


class HostPool:
    """Host memory of one cache: the blocks of every group and the slots of states, each an aligned run of bytes.

    An *entry* is one block of a group in all its layers and planes, or one slot of the states of all layers. Entries
    have a *lane*: the number of the group, or for states the number of groups. An entry's payload is one run of bytes,
    layer by layer and within a layer plane by plane, in a slot that starts at a multiple of 4,096 bytes: a store reads
    and writes it by direct I/O.

    Parameters
    ----------
    groups : sequence of (Spec, int)
        Spec and number of layers of each group.
    block_size : int
        Tokens in a block.
    state_specs : sequence of StateSpec
        Spec of each layer that keeps a state.
    num_blocks : sequence of int
        Blocks of each group, including the null block 0.
    num_states : int
        Slots of states, including the null slot 0; 0 without `state_specs`.
    device : str
        "cpu"; a CUDA device, which then accesses the memory over its bus; or "none" for a pool without bytes.
    heads : {"HND", "NHD"}
        Order of heads and tokens within a plane of a block; that of the cache lets a copy move larger pieces.
    numa_node, huge_pages, shared, touch
        See `HostMemory`.

    Attributes
    ----------
    geometry : PoolGeometry
    device : str
    kv_pools : tuple of KVPool
        One for each group, over the memory; on a CUDA device they are on that device. Empty for ``device="none"``.
    state_pool : StatePool or None
    slot_bytes, payload_bytes : tuple of int
        For each lane: distance between entries, and bytes of an entry.
    memory : HostMemory or None
        None for ``device="none"``.

    Raises
    ------
    ShapeError, UnsupportedOption, DeviceError
        Invalid sizes, specs or device; planes that a block-wise layout cannot align; a NUMA node that does not exist.
    NotEnoughMemory
        The system cannot provide the memory.

    Notes
    -----
    The memory is zeroed. For a CUDA device it is registered in chunks in the background, because registering hundreds
    of GiB takes minutes: until ``memory.is_registered(begin, end)`` is True for a range, the device must not access it,
    and copies go through pinned memory of the device's own. No entry crosses from one chunk into another.

    Examples
    --------
    >>> from pagecore import AttentionSpec
    >>> from pagecore.storage import HostPool
    >>> pool = HostPool([(AttentionSpec(2, 64), 3)], 16, num_blocks=[9])
    >>> pool.payload_bytes, pool.slot_bytes, pool.kv_pools[0].key(2).shape
    ((24576,), (24576,), (9, 16, 2, 64))
    >>> int(pool.pieces(0, [5])[0, 1])
    24576
    """

    def __init__(
        self,
        groups: Iterable[tuple[Spec, SupportsIndex]],
        block_size: SupportsIndex,
        state_specs: Iterable[StateSpec] = (),
        *,
        num_blocks: Sequence[SupportsIndex],
        num_states: SupportsIndex = 0,
        device: str = "cpu",
        heads: str = "HND",
        numa_node: SupportsIndex | None = None,
        huge_pages: bool = True,
        shared: bool = False,
        touch: bool = True,
    ) -> None:
        geometry = checked_geometry(groups, block_size, state_specs, num_blocks, num_states, heads)
        name = _checked_device(device)
        nbytes = geometry.offsets[-1]
        memory = None
        if name != "none":
            memory = HostMemory(nbytes, numa_node=numa_node, huge_pages=huge_pages, shared=shared, touch=touch)
        self._build(geometry, name, memory)

    @classmethod
    def over(cls, memory: HostMemory, geometry: PoolGeometry, device: str = "cpu") -> HostPool:
        """Return a pool over memory that exists, such as that of another process; nothing is written.

        Raises
        ------
        ShapeError
            The memory is smaller than the geometry.
        """
        if memory.nbytes < geometry.offsets[-1]:
            raise ShapeError(f"the memory has {memory.nbytes:,} bytes; the geometry needs {geometry.offsets[-1]:,}")
        pool = cls.__new__(cls)
        pool._build(geometry, _checked_device(device), memory)
        return pool

    def _build(self, geometry: PoolGeometry, device: str, memory: HostMemory | None) -> None:
        self.geometry, self.device, self.memory = geometry, device, memory
        self.slot_bytes, self.payload_bytes = geometry.slot_bytes, geometry.payload_bytes
        self._counts, self._offsets = geometry.counts, geometry.offsets
        self._chunks = _chunks(geometry)
        self._chunk_starts = [self._starts_in(lane) for lane in range(len(self._counts))]
        self.kv_pools: tuple[KVPool, ...] = ()
        self.state_pool: StatePool | None = None
        if memory is None:
            return
        try:
            self.kv_pools, self.state_pool = self.views(device)
            if device != "cpu":
                memory.register(device, self._chunks)
        except BaseException:
            memory.close()
            raise

    def views(self, device: str) -> tuple[tuple[KVPool, ...], StatePool | None]:
        """Return pools over the memory for operations of another device, such as "cpu" for a pool on CUDA."""
        flat = self._bytes(device)
        lanes = [
            strided(flat, (end - begin,), (1,), begin)
            for begin, end in zip(self._offsets[:-1], self._offsets[1:], strict=True)
        ]
        geometry = self.geometry
        pools = tuple(
            KVPool(spec, num_layers, layout.num_blocks or 0, geometry.block_size, layout, device, lane)
            for (spec, num_layers), layout, lane in zip(geometry.groups, geometry.layouts, lanes, strict=False)
        )
        if not geometry.state_specs:
            return pools, None
        states = StatePool(
            geometry.state_specs, geometry.num_states, device=device, buffers=lanes[-1], slot_bytes=self.slot_bytes[-1]
        )
        return pools, states

    @property
    def num_lanes(self) -> int:
        """Number of lanes: the groups, and one for states."""
        return len(self.slot_bytes)

    @property
    def counts(self) -> tuple[int, ...]:
        """Entries of each lane, including the null entry."""
        return self._counts

    @property
    def nbytes(self) -> int:
        """Bytes of the memory; 0 for ``device="none"``."""
        return 0 if self.memory is None else self.memory.nbytes

    def entries(self, lane: SupportsIndex) -> Tensor:
        """Return the payloads of a lane on the host: uint8 ``[entries, payload_bytes]``, which aliases the memory."""
        number = member("lane", lane, self.num_lanes, "the pool")
        shape, steps = (self._counts[number], self.payload_bytes[number]), (self.slot_bytes[number], 1)
        return strided(self._bytes("cpu"), shape, steps, self._offsets[number], "uint8")

    def pieces(self, lane: SupportsIndex, ids: Any) -> NDArray[np.uint64]:
        """Return address and bytes of the payload of each entry: uint64 ``[n, 2]``.

        Parameters
        ----------
        lane : int
        ids : int, or integers [n]
            Blocks or slots, from 1.

        Raises
        ------
        InvalidBlock
            An id that the lane does not have, or 0.
        ShapeError, UnsupportedDtype
            A lane that the pool does not have; ids that are not integers.
        DeviceError
            A pool without bytes.
        """
        number = member("lane", lane, self.num_lanes, "the pool")
        entries = slot_numbers("ids", ids)
        count = self._counts[number]
        if entries.size and not 1 <= entries.min() <= entries.max() < count:
            wrong = entries[(entries < 1) | (entries >= count)][0]
            raise InvalidBlock(f"entry {wrong} is not in lane {number}, which has the entries 1 to {count - 1}")
        memory = self._require_memory()
        found = np.empty((len(entries), 2), np.uint64)
        found[:, 0] = memory.address + self._offsets[number] + entries * self.slot_bytes[number]
        found[:, 1] = self.payload_bytes[number]
        return found

    def chunk_starts(self, lane: int) -> NDArray[np.int64]:
        """Return the entries of a lane at which a chunk of the registration begins, ascending: int64 ``[n]``.

        One copy by a copy engine must not cross from one chunk into another.
        """
        return self._chunk_starts[lane]

    def _starts_in(self, lane: int) -> NDArray[np.int64]:
        begin, step = self._offsets[lane], self.slot_bytes[lane]
        inside = [start - begin for start, _ in self._chunks if begin < start < begin + self._counts[lane] * step]
        return np.array(inside, np.int64) // step

    def regions(self) -> list[Region]:
        """Return the memory as one region, to register it with NIXL or Mooncake; empty for ``device="none"``."""
        return [] if self.memory is None else [Region("host pool", self.memory.address, self.memory.nbytes, "cpu")]

    def close(self) -> None:
        """Unregister the memory and close its descriptor; it is unmapped with the last tensor over it.

        The caller waits for the work of devices on the memory first. A second call does nothing.
        """
        if self.memory is not None:
            self.memory.close()

    def _bytes(self, device: str) -> Tensor:
        return strided(self._require_memory().tensor(device), (self._offsets[-1],), (1,), 0)

    def _require_memory(self) -> HostMemory:
        if self.memory is None:
            raise DeviceError("the pool has device='none' and no bytes; make it with device='cpu' or a CUDA device")
        return self.memory

    def __repr__(self) -> str:
        lanes = ", ".join(f"{count} of {size}" for count, size in zip(self._counts, self.slot_bytes, strict=True))
        return f"HostPool({lanes} bytes, {self.nbytes / 2**20:.1f} MiB for {self.device})"


def _checked_device(device: str) -> str:
    if isinstance(device, str) and device == "none":
        return device
    index = device_index(device)
    if index is not None:
        check_device(index)
    return device_name(device)


def _chunks(geometry: PoolGeometry) -> list[tuple[int, int]]:
    """Return the ranges to register, which are whole pages; none ends within an entry."""
    ranges = [
        (begin + first, begin + last)
        for begin, end, step in zip(geometry.offsets[:-1], geometry.offsets[1:], geometry.slot_bytes, strict=True)
        for first, last in whole_chunks(end - begin, math.lcm(step, PAGE), CHUNK_BYTES)
    ]
    return joined(ranges, CHUNK_BYTES)
