"""Results of operations on a CUDA device, allocated by and returned to the caller's framework."""

from __future__ import annotations

import math
import sys
from typing import Any

from pagecore.arrays.cuda.device_memory import DEFAULT_STREAM, LEGACY_STREAM
from pagecore.arrays.dtypes.dtype import DType
from pagecore.arrays.exchange.frameworks import is_instance
from pagecore.arrays.tensors._make import empty, like
from pagecore.arrays.tensors._tensor import Tensor, as_tensor
from pagecore.arrays.tensors.streams import note_work
from pagecore.errors import NotEnoughMemory


def new_result(shape: tuple[int, ...], dtype: DType, example: object, device: int, stream: int) -> Tensor:
    """Return new device memory, written by work of `stream`; `finished_result` turns it into the caller's array.

    torch and CuPy allocate for their own arrays, so that their caching allocators and graph capture apply. A call also
    takes its workspace from here; the allocator reuses it in the order of the stream after the call returns.

    Raises
    ------
    NotEnoughMemory
        The device cannot allocate the memory.
    """
    try:
        if is_instance(example, "torch", "Tensor"):
            return as_tensor(_torch_empty(sys.modules["torch"], shape, dtype, device, stream))
        if is_instance(example, "cupy", "ndarray") and dtype.cupy == dtype.numpy:
            cupy: Any = sys.modules["cupy"]
            with cupy.cuda.Device(device), _cupy_stream(cupy, stream, device):
                return as_tensor(cupy.empty(shape, dtype.cupy))
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch and CuPy each define a class of this name
            raise
        num_bytes = math.prod(shape) * dtype.itemsize
        raise NotEnoughMemory(f"cuda:{device} cannot allocate {num_bytes:,} bytes: {error}") from error
    return empty(shape, dtype, f"cuda:{device}", stream=stream)


def lasts_for_graphs(example: object) -> bool:
    """Return True if memory that is freed during a graph capture stays reserved for the graph.

    torch reserves it, CuPy does not. `example` is the argument of `new_result`.
    """
    return is_instance(example, "torch", "Tensor")


def finished_result(result: Tensor, example: object, stream: int) -> Any:
    """Return a tensor of `new_result` as an array of the framework of `example`.

    Call it after the work is submitted to `stream`: a consumer such as JAX waits for the work submitted so far.
    """
    note_work(result, stream)
    owner = getattr(result.allocation, "producer", result.allocation)
    if type(owner) is type(example):
        return owner  # the array that new_result took from the framework
    return like(result, example)


def _torch_empty(torch: Any, shape: tuple[int, ...], dtype: DType, device: int, stream: int) -> Any:
    kind = getattr(torch, str(dtype))
    place = torch.device("cuda", device)
    current = torch.cuda.current_stream(device)
    if current.cuda_stream == stream:
        return torch.empty(shape, dtype=kind, device=place)
    with torch.cuda.stream(_torch_stream(torch, stream, place)):
        return torch.empty(shape, dtype=kind, device=place)


def _torch_stream(torch: Any, stream: int, place: Any) -> Any:
    if stream in (DEFAULT_STREAM, LEGACY_STREAM):
        return torch.cuda.default_stream(place)
    return torch.cuda.ExternalStream(stream, device=place)


def _cupy_stream(cupy: Any, stream: int, device: int) -> Any:
    from pagecore.arrays.cuda.cupy_current import external_stream

    return external_stream(cupy, stream, device)
