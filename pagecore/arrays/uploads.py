"""Host arrays that a device is to have."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import cuda
from pagecore.arrays._make import empty
from pagecore.arrays._tensor import Tensor, as_tensor
from pagecore.arrays.devices import device_index
from pagecore.arrays.pinned import PinnedRing

# The host may be so many uploads ahead of a device before it waits. What is larger is waited for at once.
NUM_SLOTS = 64
SLOT_BYTES_MAX = 1 << 20

_uploading = threading.Lock()
# Of the runtime in use, one a device.
_rings: tuple[cuda.Runtime | None, dict[int, PinnedRing]] = (None, {})


def placed(array: NDArray[Any], device: str) -> Tensor:
    """Return a host array as a tensor of `device`: itself there, else a copy that every stream may use at once."""
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
    """Copy host bytes to a device in the order of a stream; the host may change them as soon as this returns.

    They go by pinned memory: a device that reads pageable memory itself would still read what the host writes next.
    """
    runtime = cuda.runtime()
    if num_bytes > SLOT_BYTES_MAX:
        runtime.copy(target, source, num_bytes, stream)
        runtime.synchronize(stream, device)
        return
    with _uploading:
        slot = _ring(runtime, device).take()
        slot.reserve(num_bytes)
        ctypes.memmove(slot.address, source, num_bytes)
        slot.send(0, num_bytes, target, stream)


def _ring(runtime: cuda.Runtime, device: int) -> PinnedRing:
    global _rings  # noqa: PLW0603
    if _rings[0] is not runtime:
        _rings = (runtime, {})
    rings = _rings[1]
    if device not in rings:
        rings[device] = PinnedRing(runtime, device, NUM_SLOTS)
    return rings[device]
