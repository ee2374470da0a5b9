"""Handles: the memory of one group of layers on one medium."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import DType, Tensor, strided
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage import KVLayout, KVPool
from pagecore.storage.checks import member
from pagecore.tiers.engine.files import DiskFiles, checked_blocks
from pagecore.tiers.engine.runs import BlockRuns
from pagecore.tiers.store import BlockStore


class DeviceType(Enum):
    """Media of a `StorageEngine`; the id numbers the devices, host pools, folders or stores of a type."""

    CUDA = "cuda"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(frozen=True, eq=False)
class StorageHandle:
    """The blocks of one group on one medium, as `StorageEngine.handle` returns it.

    Attributes
    ----------
    device_type : DeviceType
    device_id, group : int
    layout : KVLayout
        Bound layout: planes, sizes, shape and strides.
    storage : KVPool, DiskFiles or BlockStore
        Object that was registered or adopted; it keeps the memory alive.
    """

    device_type: DeviceType
    device_id: int
    group: int
    layout: KVLayout
    storage: KVPool | DiskFiles | BlockStore
    _runs: list[BlockRuns] = field(default_factory=list, repr=False)

    @property
    def dtype(self) -> DType:
        """Dtype of all planes; UnsupportedDtype if they differ, see ``layout.planes``."""
        dtypes = {plane.dtype for plane in self.layout.planes}
        if len(dtypes) > 1:
            listed = ", ".join(f"{plane.name} {plane.dtype}" for plane in self.layout.planes)
            raise UnsupportedDtype(f"the planes of {self.title} have several dtypes ({listed}); use layout.planes")
        return dtypes.pop()

    @property
    def num_blocks(self) -> int:
        """Blocks, including the null block."""
        return self.layout.num_blocks or 0

    @property
    def title(self) -> str:
        """Device type, id and group, for messages."""
        return f"{self.device_type.name} {self.device_id}" + (f", group {self.group}" if self.group else "")

    def tensor(self, buffer: int | None = None) -> Tensor:
        """Return the memory as an array in the order of ``layout.axes``, without a copy.

        Parameters
        ----------
        buffer : int, optional
            Number of the buffer, for layouts with several: one a layer, or one a plane of each layer.

        Returns
        -------
        Tensor
            ``layout.shape``; of bytes, ``[num_blocks, stride]`` or flat, if planes of unequal shape share the buffer.

        Raises
        ------
        UnsupportedOption
            The medium is not memory.
        ShapeError
            The layout does not have that buffer, or has several and none is given.
        """
        pool = self._require_memory("tensor()")
        count = len(pool.buffers)
        if buffer is None and count > 1:
            raise ShapeError(f"{self.title} has {count} buffers; pass a number from 0 to {count - 1}, or use tensors()")
        number = member("buffer", 0 if buffer is None else buffer, count, self.title)
        memory, layout = pool.buffers[number], self.layout
        planes = layout.planes_of(number)
        if len({(plane.shape, plane.dtype, plane.per) for plane in planes}) > 1:
            is_blockwise = layout.axes[0] == "B"
            shape = (self.num_blocks, layout.block_stride) if is_blockwise else (memory.nbytes,)
            return strided(memory, shape, None, 0, "uint8")
        order = KVLayout(layout.axes, block_alignment=layout.block_alignment)
        bound = order.bind(planes, layout.num_layers or 1, self.num_blocks, layout.block_size or 1)
        return strided(memory, bound.shape, bound.strides, 0, planes[0].dtype)

    def tensors(self) -> list[Tensor]:
        """Return `tensor` of every buffer: layer by layer, and within a layer plane by plane."""
        return [self.tensor(number) for number in range(len(self._require_memory("tensors()").buffers))]

    def pieces(self, blocks: Any) -> NDArray[np.uint64]:
        """Return address and bytes of the memory of blocks, block by block.

        A block-wise layout has one piece a block, as block stores take them. Other layouts have several, in the order
        of layers and planes; contiguous ones are joined.

        Parameters
        ----------
        blocks : int, or integers [n]

        Returns
        -------
        ndarray of uint64
            ``[n * pieces_per_block, 2]``.

        Raises
        ------
        InvalidBlock, ShapeError, UnsupportedDtype
            Blocks that the pool does not have, or that are not integers.
        UnsupportedOption
            The medium is not memory.
        """
        self._require_memory("pieces()")
        return self._block_runs().pieces(checked_blocks(blocks, self.num_blocks))

    @property
    def pieces_per_block(self) -> int:
        """Contiguous runs of bytes that a block consists of."""
        self._require_memory("pieces_per_block")
        return len(self._block_runs().starts)

    def _block_runs(self) -> BlockRuns:
        if not self._runs:
            assert isinstance(self.storage, KVPool)
            self._runs.append(BlockRuns.of(self.storage))
        return self._runs[0]

    def _require_memory(self, what: str) -> KVPool:
        if not isinstance(self.storage, KVPool):
            remedy = "storage.pieces(blocks)" if isinstance(self.storage, DiskFiles) else "storage.submit_load"
            raise UnsupportedOption(f"{self.title} is not memory and has no {what}; use {remedy}")
        return self.storage
