"""Runs of contiguous bytes that a block consists of, in any layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecore.storage import KVLayout, KVPool


@dataclass(frozen=True)
class BlockRuns:
    """Contiguous runs of one block: start of each in block 0, distance between blocks, and bytes.

    Attributes
    ----------
    starts, steps, sizes : ndarray of int64
        ``[runs]``; starts are addresses.
    """

    starts: NDArray[np.int64]
    steps: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def of(cls, pool: KVPool) -> BlockRuns:
        """Return the runs of a pool's blocks, layer by layer and plane by plane; adjoining runs are joined."""
        layout = pool.layout
        found: list[tuple[int, int, int]] = []  # start, step, bytes
        for layer in range(pool.num_layers):
            for index in range(len(layout.planes)):
                where = layout.plane_layout(index, layer)
                start = pool.buffers[where.buffer].pointer + where.offset + layer * where.strides.get("L", 0)
                for offset, size in _plane_runs(layout, index):
                    _append(found, start + offset, where.strides["B"], size)
        starts, steps, sizes = (np.array(column, np.int64) for column in zip(*found, strict=True))
        return cls(starts, steps, sizes)

    def pieces(self, blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return address and bytes of each run of each block, block by block: uint64 ``[n * runs, 2]``."""
        pieces = np.empty((len(blocks), len(self.starts), 2), np.uint64)
        pieces[:, :, 0] = self.starts + blocks[:, None] * self.steps
        pieces[:, :, 1] = self.sizes
        return pieces.reshape(-1, 2)


def _append(runs: list[tuple[int, int, int]], start: int, step: int, size: int) -> None:
    if runs and sum(runs[-1][::2]) == start and runs[-1][1] == step:
        runs[-1] = (runs[-1][0], step, runs[-1][2] + size)
    else:
        runs.append((start, step, size))


def _plane_runs(layout: KVLayout, index: int) -> list[tuple[int, int]]:
    """Return offset and bytes of each run of one plane within a block, in the order of memory."""
    plane, strides = layout.planes[index], layout.plane_layout(index).strides
    heads, dim = (1, *plane.shape)[-2:]
    tokens = (layout.block_size or 1) if plane.per == "token" else 1
    size = plane.dtype.itemsize
    inner: list[tuple[int, int]] = []
    for stride, extent in sorted([(strides["D"], dim), (strides["H"], heads), (strides["N"], tokens)]):
        if extent == 1:
            continue
        if stride == size:
            size *= extent
        else:
            inner.append((stride, extent))
    offsets = np.zeros(1, np.int64)
    for stride, extent in inner:
        offsets = (np.arange(extent)[:, None] * stride + offsets).ravel()
    return [(int(offset), size) for offset in offsets]
