"""Pieces: addresses and bytes of the tokens of a sequence in the pools of a cache.

A hand-over moves units: `cut` tokens of a sequence in layers and planes of a group, or one state. The bytes of a
unit have one order on both sides, whatever the layouts of the pools are:

    layer 0: plane 0, plane 1 ...; layer 1 ...      within a plane head by head and then token by token, or the reverse

Each side lists the pieces of its own memory in this order; where pieces end need not agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor
from pagecore.storage import KVPool, StatePool
from pagecore.storage.specs.spec import Plane

Pieces = NDArray[np.uint64]
Ends = NDArray[np.int64]


@dataclass(frozen=True)
class Units:
    """Pieces of several units, and the number of pieces up to the end of each."""

    pieces: Pieces
    ends: Ends

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return int(self.pieces[:, 1].sum())

    @staticmethod
    def concatenate(parts: list[Units]) -> Units:
        """Return the units of several lists, one after the other."""
        if not parts:
            return Units(np.zeros((0, 2), np.uint64), np.zeros(0, np.int64))
        starts = np.cumsum([0, *(len(part.pieces) for part in parts[:-1])])
        ends = [part.ends + start for part, start in zip(parts, starts, strict=True)]
        return Units(np.concatenate([part.pieces for part in parts]), np.concatenate(ends))


def is_head_outer(pool: KVPool) -> bool:
    """Return True if a block of the pool is stored head by head; False if token by token, or without heads."""
    for plane in pool.spec.planes:
        if plane.per == "token" and len(plane.shape) == 2 and plane.shape[0] > 1:
            strides = pool.plane(plane.name).strides
            return strides[2] > strides[1]
    return False


def token_units(
    pool: KVPool,
    blocks: NDArray[np.integer],
    firsts: NDArray[np.integer],
    counts: NDArray[np.integer],
    layers: range,
    heads: range,
    *,
    with_heads: bool,
    without_heads: bool,
    head_outer: bool,
) -> Units:
    """Return the pieces of units of tokens, each within one block.

    Parameters
    ----------
    blocks, firsts, counts : integers [n]
        Block of each unit, its first token in the block, and the number of its tokens.
    layers : range
        Layers of the pool.
    heads : range
        Heads of the planes that have heads.
    with_heads, without_heads : bool
        Include the planes with heads, and those without.
    head_outer : bool
        Order of a unit's bytes in planes with heads: heads outermost, else tokens.
    """
    views = [
        (plane, pool.plane(plane.name, layer))
        for layer in layers
        for plane in pool.spec.planes
        if (with_heads and len(heads) > 0 if len(plane.shape) == 2 else without_heads)
    ]
    parts = []
    for run in _equal_runs(counts):  # all units but the first and the last have equal counts
        addresses, sizes = [], []
        for plane, view in views:
            at = view.pointer + blocks[run].astype(np.int64) * view.strides[0]
            if plane.per == "token":
                at += firsts[run] * view.strides[1]
            offsets, nbytes = _offsets(plane, view, int(counts[run][0]), heads, head_outer)
            addresses.append(at[:, None] + offsets[None, :])
            sizes.append(np.full(len(offsets), nbytes, np.int64))
        parts.append(_merged(addresses, sizes, run.stop - run.start))
    return Units.concatenate(parts)


def _equal_runs(counts: NDArray[np.integer]) -> Iterator[slice]:
    """Return the slices of consecutive equal counts."""
    if len(counts) == 0:
        return
    starts = np.flatnonzero(np.diff(counts, prepend=counts[0] - 1))
    for start, stop in zip(starts, [*starts[1:], len(counts)], strict=True):
        yield slice(int(start), int(stop))


def _offsets(plane: Plane, view: Tensor, count: int, heads: range, head_outer: bool) -> tuple[NDArray[np.int64], int]:
    """Return the offsets of a unit's pieces from its first token in one plane, and the bytes of each piece."""
    item = plane.shape[-1] * plane.dtype.itemsize
    axes = [] if plane.per == "block" else [(count, view.strides[1])]
    start = 0
    if len(plane.shape) == 2:
        step = view.strides[len(view.strides) - 2]
        start = heads.start * step
        axes = [(len(heads), step), *axes] if head_outer else [*axes, (len(heads), step)]
    offsets = np.full(1, start, np.int64)
    for extent, step in reversed(axes):
        if len(offsets) == 1 and step == item:  # contiguous with what is inside: the piece grows
            item *= extent
        else:
            offsets = (np.arange(extent, dtype=np.int64)[:, None] * step + offsets[None, :]).ravel()
    return offsets, item


def _merged(addresses: list[NDArray[np.int64]], sizes: list[NDArray[np.int64]], count: int) -> Units:
    """Return the pieces of `count` units, neighbours within a unit joined where their memory is contiguous."""
    if not addresses:
        return Units(np.zeros((0, 2), np.uint64), np.zeros(count, np.int64))
    at = np.concatenate(addresses, axis=1)
    length = np.broadcast_to(np.concatenate(sizes), at.shape)
    begins = np.ones(at.shape, bool)
    begins[:, 1:] = at[:, 1:] != at[:, :-1] + length[:, :-1]
    flat = begins.ravel()
    firsts = np.flatnonzero(flat)
    pieces = np.empty((len(firsts), 2), np.uint64)
    pieces[:, 0] = at.ravel()[firsts]
    pieces[:, 1] = np.add.reduceat(length.ravel(), firsts)
    return Units(pieces, np.cumsum(begins.sum(axis=1, dtype=np.int64)))


def state_units(pool: StatePool, slot: int) -> Units:
    """Return the pieces of one state: its slot in every plane of every layer."""
    planes = pool.planes()
    pieces = [[plane.pointer + slot * plane.strides[0], plane[0].nbytes] for plane in planes]
    return Units(np.array(pieces, np.uint64).reshape(-1, 2), np.array([len(pieces)], np.int64))


def buffer_units(memory: NDArray[np.uint8]) -> Units:
    """Return one unit that consists of a contiguous array."""
    return Units(np.array([[memory.ctypes.data, memory.nbytes]], np.uint64), np.array([1], np.int64))
