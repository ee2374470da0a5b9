"""States slot by slot: the planes of all layers of one slot follow each other, as one run of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from pagecore.arrays import Tensor, as_tensor, strided
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
from pagecore.storage.checks import ceil_div
from pagecore.storage.spec import Plane


def slot_offsets(planes: Sequence[Plane]) -> tuple[list[int], int]:
    """Return the offset in bytes of each plane in a slot, a multiple of its item size, and the bytes of a slot."""
    offsets, end = [], 0
    for plane in planes:
        offsets.append(ceil_div(end, plane.dtype.itemsize) * plane.dtype.itemsize)
        end = offsets[-1] + plane.nbytes
    return offsets, end


def slotwise_views(
    buffer: object, planes: Sequence[Plane], num_slots: int, slot_bytes: int, device: str
) -> tuple[Tensor, list[Tensor]]:
    """Return the caller's memory as bytes, and the views ``[num_slots, *plane.shape]`` of all planes in it.

    Raises
    ------
    ShapeError
        Slots that do not fit into `slot_bytes`, or into the buffer; bytes that are not contiguous or aligned.
    DeviceError, UnsupportedOption
        Memory on another device, or read-only.
    """
    offsets, payload = slot_offsets(planes)
    alignment = max(plane.dtype.itemsize for plane in planes)
    if slot_bytes < payload or slot_bytes % alignment:
        raise ShapeError(f"slot_bytes is {slot_bytes}; it must be a multiple of {alignment} of at least {payload}")
    memory = as_tensor(buffer)
    if memory.device != device:
        raise DeviceError(f"the buffer of states is on {memory.device}; the pool is on {device}: pass memory there")
    if memory.readonly:
        raise UnsupportedOption("the buffer of states is read-only; pass writable memory")
    if memory.nbytes < num_slots * slot_bytes or memory.pointer % alignment:
        raise ShapeError(
            f"the buffer of states has {memory.nbytes} bytes at {memory.pointer:#x}; {num_slots} slots of {slot_bytes} "
            f"bytes at a multiple of {alignment} are needed"
        )
    flat = strided(memory, (num_slots * slot_bytes,), (1,), 0, "uint8")
    return flat, [
        strided(flat, (num_slots, *plane.shape), (slot_bytes, *_contiguous(plane)), offset, plane.dtype)
        for plane, offset in zip(planes, offsets, strict=True)
    ]


def _contiguous(plane: Plane) -> tuple[int, ...]:
    """Return the strides in bytes of one entry of a plane."""
    inner = list(accumulate(reversed(plane.shape[1:]), lambda step, extent: step * extent, initial=1))
    return tuple(step * plane.dtype.itemsize for step in reversed(inner))
