"""Copies of host memory to a device."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import cuda
from pagecore.arrays.cuda.devices import device_index
from pagecore.arrays.cuda.pinned import PinnedRing, room_for
from pagecore.arrays.cuda.protocol import Runtime
from pagecore.arrays.tensors._make import empty
from pagecore.arrays.tensors._tensor import Tensor, as_tensor
from pagecore.errors import DeviceError

# The host waits once NUM_SLOTS uploads to a device are pending, and at once for an upload over SLOT_BYTES_MAX.
NUM_SLOTS = 64
SLOT_BYTES_MAX = 1 << 20
SLOT_BYTES_MIN = 4096

_uploading = threading.Lock()
# The runtime in use, and its ring for each device.
_rings: tuple[Runtime | None, dict[int, PinnedRing]] = (None, {})


def to_device(array: NDArray[Any], device: str) -> Tensor:
    """Return a host array as a tensor on `device`: a view on the host, a copy on CUDA.

    The copy uses the current stream and is complete when this function returns, so every stream may use it.

    Raises
    ------
    DeviceError
        The device does not exist, or the current stream is being captured.
    NotEnoughMemory
        The device cannot allocate the memory.
    """
    index = device_index(device)
    if index is None:
        return as_tensor(array)
    array = np.ascontiguousarray(array)
    tensor = empty(array.shape, array.dtype, device)
    runtime = cuda.runtime()
    stream = runtime.current_stream(index)
    runtime.copy(tensor.pointer, array.ctypes.data, array.nbytes, stream)
    runtime.synchronize(stream, index)
    return tensor


def upload(source: int, num_bytes: int, target: int, stream: int, device: int) -> None:
    """Copy host bytes to a device in the order of a stream; the caller may change them when this returns.

    The bytes are staged in pinned memory, because a device that reads pageable memory could see later writes of the
    host. An upload of more than SLOT_BYTES_MAX bytes is not staged but waited for. If NUM_SLOTS uploads are pending,
    the function waits for the oldest.

    Raises
    ------
    DeviceError
        CUDA fails the copy; or `stream` is being captured, as its graph would read staging memory of later uploads.
    NotEnoughMemory
        The host cannot allocate pinned memory.
    """
    runtime = cuda.runtime()
    if runtime.is_capturing(stream):
        raise DeviceError(
            f"{num_bytes} bytes of host memory are copied, and stream {stream:#x} is being captured: upload before the "
            "capture"
        )
    if num_bytes > SLOT_BYTES_MAX:
        runtime.copy(target, source, num_bytes, stream)
        runtime.synchronize(stream, device)
        return
    with _uploading:
        slot = _ring(runtime, device).take()
        slot.reserve(max(SLOT_BYTES_MIN, room_for(num_bytes)))
        ctypes.memmove(slot.address, source, num_bytes)
        slot.send(0, num_bytes, target, stream)


def _ring(runtime: Runtime, device: int) -> PinnedRing:
    global _rings  # noqa: PLW0603
    if _rings[0] is not runtime:
        _rings = (runtime, {})
    rings = _rings[1]
    if device not in rings:
        rings[device] = PinnedRing(runtime, device, NUM_SLOTS)
    return rings[device]
