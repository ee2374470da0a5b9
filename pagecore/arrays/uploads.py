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
SLOT_BYTES_MIN = 4096

_uploading = threading.Lock()
# Of the runtime in use, one a device.
_rings: tuple[cuda.Runtime | None, dict[int, PinnedRing]] = (None, {})


def placed(array: NDArray[Any], device: str) -> Tensor:
    """Return a host array as a tensor of `device`: on the host itself, else a copy that every stream may use at once.

    The copy goes by the current stream, and this call waits for it.

    Raises
    ------
    DeviceError
        A device that is not there, or a stream that is being captured.
    NotEnoughMemory
        The device has not as much.
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
    """Copy host bytes to a device in the order of a stream; the host may change them as soon as this returns.

    They go by pinned memory: a device that reads pageable memory itself would still read what the host writes next.
    More than SLOT_BYTES_MAX are waited for instead, and so is the oldest of NUM_SLOTS uploads that are on their way.

    Raises
    ------
    DeviceError
        CUDA refuses the copy, as it does a wait while a stream is being captured.
    NotEnoughMemory
        The host has no memory to lock.
    """
    runtime = cuda.runtime()
    if num_bytes > SLOT_BYTES_MAX:
        runtime.copy(target, source, num_bytes, stream)
        runtime.synchronize(stream, device)
        return
    with _uploading:
        slot = _ring(runtime, device).take()
        slot.reserve(_room(num_bytes))
        ctypes.memmove(slot.address, source, num_bytes)
        slot.send(0, num_bytes, target, stream)


def _room(num_bytes: int) -> int:
    """Bytes to reserve: powers of two, so that sizes that vary do not have every slot grow again and again."""
    return max(SLOT_BYTES_MIN, 1 << (num_bytes - 1).bit_length())


def _ring(runtime: cuda.Runtime, device: int) -> PinnedRing:
    global _rings  # noqa: PLW0603
    if _rings[0] is not runtime:
        _rings = (runtime, {})
    rings = _rings[1]
    if device not in rings:
        rings[device] = PinnedRing(runtime, device, NUM_SLOTS)
    return rings[device]
