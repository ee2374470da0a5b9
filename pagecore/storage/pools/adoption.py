"""Adoption of the caller's memory: one array for each buffer of a layout, checked and viewed as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from pagecore.arrays import Tensor, as_tensor, strided
from pagecore.errors import DeviceError, PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage.checks import shown
from pagecore.storage.pools.layout import KVLayout


@dataclass(frozen=True)
class Span:
    """Address range of an adopted array, including bytes that the pool does not use."""

    name: str
    begin: int
    end: int


def adopt(buffers: object, layout: KVLayout, device: str) -> tuple[tuple[Tensor, ...], tuple[Span, ...]]:
    """Check the caller's arrays against a bound layout, and view them as flat bytes without writing or copying.

    Returns
    -------
    tensors : tuple of Tensor
        uint8 ``[layout.buffer_nbytes(i)]``, one for each buffer of the layout; they keep the arrays alive.
    spans : tuple of Span
        Address range of each array.

    Raises
    ------
    ShapeError, UnsupportedDtype, DeviceError, UnsupportedOption
        The wrong number of arrays, or arrays of invalid shape, strides, size, alignment, dtype or device; arrays that
        are read-only or share memory.
    """
    arrays = tensors_of(buffers, layout, device)
    flat = tuple(_adopted(array, number, layout) for number, array in enumerate(arrays))
    spans = tuple(
        Span(layout.buffer_name(number), array.pointer, array.pointer + array.nbytes)
        for number, array in enumerate(arrays)
    )
    refuse_overlap(spans)
    return flat, spans


def tensors_of(buffers: object, layout: KVLayout, device: str) -> list[Tensor]:
    """Return the caller's arrays as tensors on `device`, in the order of the layout's buffers."""
    given = _counted(buffers, layout)
    return [_tensor(buffer, layout.buffer_name(number), device) for number, buffer in enumerate(given)]


def refuse_overlap(spans: Iterable[Span]) -> None:
    """Raise UnsupportedOption if arrays share memory: a write to one plane would change another."""
    for one, other in pairwise(sorted(spans, key=lambda span: span.begin)):
        if other.begin < one.end:
            raise UnsupportedOption(
                f"the {one.name} and the {other.name} share {min(one.end, other.end) - other.begin} bytes of memory; "
                "pass arrays that do not overlap"
            )


def _counted(buffers: object, layout: KVLayout) -> list[object]:
    """Return the result of `_listed`; raise ShapeError unless it has one array for each buffer of the layout."""
    given = _listed(buffers, layout)
    if len(given) != layout.num_buffers:
        layers = "1 layer" if layout.num_layers == 1 else f"{layout.num_layers} layers"
        raise ShapeError(
            f"{len(given)} buffers are given; layout {layout.order!r} has {layout.num_buffers} for {layers} of "
            f"{len(layout.planes)} planes: leave L out of the axes for one array a layer, C for one a plane"
        )
    return given


def _listed(buffers: object, layout: KVLayout) -> list[object]:
    """Return the caller's arrays, layer by layer and within a layer plane by plane."""
    if isinstance(buffers, Mapping):
        return _by_name(buffers, layout)
    if not isinstance(buffers, list | tuple):
        return [buffers]
    nested = [isinstance(entry, Mapping | list | tuple) for entry in buffers]
    if not any(nested):
        return list(buffers)
    if not all(nested) or len(buffers) != layout.num_layers or "L" in layout.axes:
        raise ShapeError(
            f"buffers holds {sum(nested)} lists in a list of {len(buffers)}; layout {layout.order!r} expects "
            f"{layout.num_buffers} arrays" + ("" if "L" in layout.axes else f", or {layout.num_layers} lists of arrays")
        )
    one_layer = layout.bind(layout.planes, 1, layout.num_blocks or 1, layout.block_size or 1)
    return [array for entry in buffers for array in _counted(entry, one_layer)]


def _by_name(buffers: Mapping[Any, object], layout: KVLayout) -> list[object]:
    names = [plane.name for plane in layout.planes]
    if "C" in layout.axes or set(buffers) != set(names):
        expected = "share their buffers, pass a list" if "C" in layout.axes else f"are {', '.join(names)}"
        raise ShapeError(f"buffers are named {shown(list(buffers))}; the planes of layout {layout.order!r} {expected}")
    if "L" in layout.axes:
        return [buffers[name] for name in names]
    num_layers = layout.num_layers or 1
    columns = [_layers_of(buffers[name], name, num_layers) for name in names]
    return [column[layer] for layer in range(num_layers) for column in columns]


def _layers_of(arrays: object, name: str, num_layers: int) -> list[object]:
    listed = list(arrays) if isinstance(arrays, list | tuple) else [arrays]
    if len(listed) != num_layers:
        raise ShapeError(
            f"{len(listed)} buffers of {name!r} are given; expected a list with one for each layer, {num_layers}"
        )
    return listed


def _tensor(buffer: object, name: str, device: str) -> Tensor:
    try:
        tensor = as_tensor(buffer)
    except PagecoreError as error:
        error.args = (f"the {name}: {error}", *error.args[1:])
        raise
    if tensor.device != device:
        raise DeviceError(f"the {name} is on {tensor.device}; the pool is on {device}: pass memory there")
    return tensor


def _adopted(buffer: Tensor, number: int, layout: KVLayout) -> Tensor:
    name, planes, needed = layout.buffer_name(number), layout.planes_of(number), layout.buffer_nbytes(number)
    if buffer.readonly:
        raise UnsupportedOption(f"the {name} is read-only; a pool must be writable: pass a writable array")
    stored = {str(plane.dtype) for plane in planes}
    if str(buffer.dtype) not in ("uint8", "int8") and stored != {str(buffer.dtype)}:
        expected = f"{' and '.join(sorted(stored))}, or its bytes as uint8" if len(stored) == 1 else "bytes as uint8"
        raise UnsupportedDtype(f"the {name} is {buffer.dtype}; expected {expected}")
    _check_strides(buffer, name)
    _check_shape(buffer, number, layout)
    if buffer.nbytes < needed:
        raise ShapeError(f"the {name} has {buffer.nbytes} bytes; {needed} are needed")
    alignment = max(plane.dtype.itemsize for plane in planes)
    if buffer.pointer % alignment:
        raise ShapeError(f"the {name} starts at an address that is not a multiple of {alignment}; pass aligned memory")
    return strided(buffer, (needed,), (1,), 0, "uint8")


def _check_strides(buffer: Tensor, name: str) -> None:
    axes = [(extent, stride) for extent, stride in zip(buffer.shape, buffer.strides, strict=True) if extent > 1]
    if any(stride == 0 for _, stride in axes):
        raise UnsupportedOption(
            f"the {name} has strides {buffer.strides}: its elements share memory; pass a contiguous array"
        )
    step = buffer.itemsize
    for extent, stride in reversed(axes):
        if stride != step:
            raise ShapeError(
                f"the {name} has shape {buffer.shape} and strides {buffer.strides}; expected a contiguous "
                "array, outermost axis first: pass the axes in memory order"
            )
        step *= extent


def _check_shape(buffer: Tensor, number: int, layout: KVLayout) -> None:
    """Raise ShapeError unless an array's axes are those of the layout, or merge adjacent ones.

    The outermost may be longer.
    """
    expected = layout.buffer_shape(number)
    is_typed = buffer.dtype == layout.planes_of(number)[0].dtype
    if expected is None or not is_typed:
        return
    if buffer.ndim == len(expected):
        fits = buffer.shape[1:] == expected[1:] and buffer.shape[0] >= expected[0]
    else:
        fits = _steps(buffer.shape) <= _steps(expected)
    if not fits:
        raise ShapeError(
            f"the {layout.buffer_name(number)} has shape {buffer.shape}; layout {layout.order!r} needs {expected}, in "
            f"the order of its axes {layout.axes}: pass such an array, flat bytes, or the layout of the array"
        )


def _steps(shape: tuple[int, ...]) -> set[int]:
    """Return the elements between neighbours on each axis of a contiguous array; axes of one element have none."""
    return {prod(shape[axis + 1 :]) for axis, extent in enumerate(shape) if extent > 1}
