"""Memory of a pool of states: the caller's arrays, an allocator's, or one array that holds slot after slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from pagecore.arrays import Tensor, as_tensor, strided
from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage.checks import as_tuple, ceil_div
from pagecore.storage.pools.adoption import Span, refuse_overlap
from pagecore.storage.pools.allocation import Allocator, allocated, fill_zeros
from pagecore.storage.specs.spec import Plane


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


def adopted_views(
    buffers: Iterable[object], places: list[tuple[int, Plane]], num_slots: int, device: str
) -> list[Tensor]:
    """Check the caller's arrays, one for each plane of each layer, and return them as tensors."""
    given = as_tuple("buffers", buffers, "a list of arrays, layer by layer and within a layer plane by plane")
    if len(given) != len(places):
        raise ShapeError(f"{len(given)} buffers are given; expected {len(places)}, one for each plane of each layer")
    views: list[Tensor] = []
    for array, (layer, plane) in zip(given, places, strict=True):
        view, name = as_tensor(array), f"buffer of plane {plane.name!r} of layer {layer}"
        shape = (num_slots, *plane.shape)
        if view.device != device:
            raise DeviceError(f"the {name} is on {view.device}; the pool is on {device}: pass memory there")
        if view.dtype != plane.dtype:
            raise UnsupportedDtype(f"the {name} is {view.dtype}; expected {plane.dtype}")
        if view.shape != shape:
            raise ShapeError(f"the {name} has shape {view.shape}; expected {shape}")
        if view.readonly:
            raise UnsupportedOption(f"the {name} is read-only; pass a writable array")
        if view.strides != strided(view, shape).strides:
            raise ShapeError(f"the {name} has strides {view.strides}; pass a C-contiguous array")
        views.append(view)
    names = [f"buffer of plane {plane.name!r} of layer {layer}" for layer, plane in places]
    refuse_overlap(
        Span(name, view.pointer, view.pointer + view.nbytes) for name, view in zip(names, views, strict=True)
    )
    return views


def allocated_views(allocator: Allocator, places: list[tuple[int, Plane]], num_slots: int, device: str) -> list[Tensor]:
    """Return a tensor of the caller's allocator for each plane of each layer, on CUDA zeroed."""
    flat = [allocated(allocator, num_slots * plane.nbytes, device) for _, plane in places]
    names = [f"memory of plane {plane.name!r} of layer {layer}" for layer, plane in places]
    refuse_overlap(Span(name, view.pointer, view.pointer + view.nbytes) for name, view in zip(names, flat, strict=True))
    if device != "cpu":
        fill_zeros(flat, device)
    return [
        strided(memory, (num_slots, *plane.shape), None, 0, plane.dtype)
        for memory, (_, plane) in zip(flat, places, strict=True)
    ]
