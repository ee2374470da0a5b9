"""Copies of blocks by the copy engines, in one of two ways for each run of blocks: that with fewer copies.

Each copies the rows of one rectangle of memory to those of another:

one block, all planes of a group               a run of blocks, one plane

host    |k0|v0|k1|v1|..  rows of one entry     host    |k0|......|k0|......|k0|   rows of entries in a row
device  |k0|...  |v0|...  |k1|...              device  |k0|k0|k0|
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor

# Columns of rectangles: addresses and distances of rows of target and source, bytes of a row, number of rows.
TARGET, TARGET_PITCH, SOURCE, SOURCE_PITCH, WIDTH, HEIGHT = range(6)
# Limit of CUDA for the distance of rows.
PITCH_MAX = (1 << 31) - 1

Rectangles = NDArray[np.int64]


@dataclass(frozen=True)
class PlaneGroup:
    """Planes at equal distances in the memory of both sides, whose blocks are runs of `nbytes` bytes.

    Attributes
    ----------
    own, host : (int, int, int)
        Address of the first plane, distance between planes and distance between blocks, in bytes.
    num_planes, nbytes : int
    """

    own: tuple[int, int, int]
    host: tuple[int, int, int]
    num_planes: int
    nbytes: int


def groups_of(planes: Iterable[tuple[Tensor, Tensor]], buffers: Sequence[Tensor]) -> list[PlaneGroup]:
    """Return planes of the cache and the host in groups, as large as the distances between them permit.

    Parameters
    ----------
    planes : iterable of (Tensor, Tensor)
        Planes of the cache and of a `HostPool`; a block of each is one run of memory.
    buffers : list of Tensor
        Memory of the cache. A group is within one buffer, because a copy must not cross from one allocation into
        another; a plane in none of them is a group of its own.
    """
    alike: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
    for number, (own, host) in enumerate(planes):
        inside = [i for i, buffer in enumerate(buffers) if 0 <= own.pointer - buffer.pointer < buffer.nbytes]
        key = (own[0].nbytes, own.strides[0], host.strides[0], inside[0] if inside else -1 - number)
        alike.setdefault(key, []).append((own.pointer, host.pointer))
    groups: list[PlaneGroup] = []
    for (nbytes, own_step, host_step, _), addresses in alike.items():
        begin = 0
        while begin < len(addresses):
            end, steps = _chain(addresses, begin, nbytes)
            count, width = end - begin, nbytes
            if steps == (nbytes, nbytes):  # the planes of a block are one run of memory
                count, width = 1, nbytes * count
            starts = addresses[begin]
            places = (starts[0], steps[0], own_step), (starts[1], steps[1], host_step)
            groups.append(PlaneGroup(*places, count, width))
            begin = end
    return groups


def _chain(addresses: list[tuple[int, int]], begin: int, width: int) -> tuple[int, tuple[int, int]]:
    """Return the end of the planes from `begin` on that are at equal distances, and the distances on both sides."""
    steps, end = (width, width), begin + 1
    while end < len(addresses):
        last, this = addresses[end - 1], addresses[end]
        found = (this[0] - last[0], this[1] - last[1])
        if end == begin + 1 and width <= min(found) and max(found) <= PITCH_MAX:
            steps = found
        elif found != steps or end == begin + 1:
            break
        end += 1
    return end, steps


def rectangles(
    groups: Iterable[PlaneGroup], pairs: NDArray[np.int32], borders: NDArray[np.int64], *, to_device: bool
) -> Rectangles:
    """Return the copies of blocks in all planes of the groups.

    Parameters
    ----------
    groups : list of PlaneGroup
    pairs : int32 [n, (source, target)]
        No target occurs twice.
    borders : int64, ascending
        Blocks of the host's side at which another registration begins; no copy crosses such a border.
    to_device : bool
        True if the source is the host.

    Returns
    -------
    int64 [m, (target, target pitch, source, source pitch, width, height)]
    """
    host_column = 0 if to_device else 1
    ids = pairs.astype(np.int64)
    ids = ids[np.argsort(ids[:, host_column], kind="stable")]
    host_ids, own_ids = ids[:, host_column], ids[:, 1 - host_column]
    starts_run = (np.diff(host_ids) != 1) | (np.diff(own_ids) != 1) | np.isin(host_ids[1:], borders)
    first = np.concatenate([[0], np.flatnonzero(starts_run) + 1])
    lengths = np.diff(first, append=len(ids))
    copies = []
    for group in groups:
        joins = (lengths > group.num_planes) & (max(group.own[2], group.host[2]) <= PITCH_MAX)
        starts, single = first[joins], np.repeat(~joins, lengths)
        copies.append(_by_run(group, own_ids[starts], host_ids[starts], lengths[joins]))
        copies.append(_by_block(group, own_ids[single], host_ids[single]))
    found = np.concatenate(copies) if copies else np.empty((0, 6), np.int64)
    return found if to_device else found[:, [SOURCE, SOURCE_PITCH, TARGET, TARGET_PITCH, WIDTH, HEIGHT]]


def _by_block(group: PlaneGroup, own_ids: NDArray[np.int64], host_ids: NDArray[np.int64]) -> Rectangles:
    """Return a copy for each block: a row is the block in one plane."""
    found = np.empty((len(own_ids), 6), np.int64)
    for column, (start, plane_step, block_step), ids in (
        (TARGET, group.own, own_ids),
        (SOURCE, group.host, host_ids),
    ):
        found[:, column] = start + ids * block_step
        found[:, column + 1] = plane_step
    found[:, WIDTH], found[:, HEIGHT] = group.nbytes, group.num_planes
    return found


def _by_run(
    group: PlaneGroup, own_ids: NDArray[np.int64], host_ids: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Rectangles:
    """Return a copy for each run of blocks and plane: a row is one block, or the run if it has no gaps."""
    planes = np.arange(group.num_planes, dtype=np.int64)[:, None]
    found = np.empty((group.num_planes, len(own_ids), 6), np.int64)
    for column, (start, plane_step, block_step), ids in (
        (TARGET, group.own, own_ids),
        (SOURCE, group.host, host_ids),
    ):
        found[..., column] = start + planes * plane_step + ids * block_step
        found[..., column + 1] = block_step
    found[..., WIDTH], found[..., HEIGHT] = group.nbytes, lengths
    if group.own[2] == group.host[2] == group.nbytes:
        found[..., WIDTH], found[..., HEIGHT] = group.nbytes * lengths, 1
    return found.reshape(-1, 6)
