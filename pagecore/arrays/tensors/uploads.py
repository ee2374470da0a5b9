"""Copies of host memory to a device."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import cuda
from pagecore.arrays.cuda.devices import device_index
from pagecore.arrays.cuda.pinned import PinnedRing
from pagecore.arrays.cuda.protocol import Runtime
from pagecore.arrays.tensors._make import empty
from pagecore.arrays.tensors._tensor import Tensor, as_tensor
from pagecore.errors import DeviceError

# Uploads of at most SMALL_BYTES go through slots of that size, larger ones in pieces of LARGE_BYTES. The host waits
# once all slots of a kind are pending.
NUM_SMALL, SMALL_BYTES = 64, 64 << 10
NUM_LARGE, LARGE_BYTES = 16, 1 << 20

_making = threading.Lock()


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
    host. The function waits only if all slots of staging memory are pending.

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
    slots = _slots(runtime, device, num_bytes > SMALL_BYTES)
    for begin in range(0, num_bytes, slots.slot_bytes):
        slots.send(source + begin, min(slots.slot_bytes, num_bytes - begin), target + begin, stream)


class _Slots:
    """Slots of staging memory in one allocation, for any thread.

    Each slot has a lock of its own, so that a thread that waits for a copy stops only threads that need its slot.
    """

    def __init__(self, runtime: Runtime, device: int, num_slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._ring = PinnedRing(runtime, device, num_slots, slot_bytes)
        self._locks = [threading.Lock() for _ in range(num_slots)]
        self._turn = 0  # threads may read the same turn: one of them then searches on

    def send(self, source: int, num_bytes: int, target: int, stream: int) -> None:
        """Copy at most `slot_bytes` bytes to a slot, and from there in the order of a stream."""
        number = self._take()
        slot = self._ring.slots[number]
        try:
            slot.wait()
            ctypes.memmove(slot.address, source, num_bytes)
            slot.send(0, num_bytes, target, stream)
        finally:
            self._locks[number].release()

    def _take(self) -> int:
        """Lock the first slot whose copy is done, or the next in turn if none is, and return its number."""
        first, count = self._turn, len(self._locks)
        for number in ((first + step) % count for step in range(count)):
            lock = self._locks[number]
            if lock.acquire(blocking=False):
                is_done = False
                try:
                    is_done = self._ring.slots[number].is_done()
                finally:
                    if not is_done:
                        lock.release()
                if is_done:
                    self._turn = (number + 1) % count
                    return number
        self._turn = (first + 1) % count
        self._locks[first].acquire()
        return first


# The runtime in use, and its slots by device and size.
_made: tuple[Runtime | None, dict[tuple[int, bool], _Slots]] = (None, {})


def _slots(runtime: Runtime, device: int, is_large: bool) -> _Slots:
    global _made  # noqa: PLW0603
    owner, made = _made
    found = made.get((device, is_large)) if owner is runtime else None
    if found is not None:
        return found
    with _making:
        if _made[0] is not runtime:
            _made = (runtime, {})
        made = _made[1]
        if (device, is_large) not in made:
            sizes = (NUM_LARGE, LARGE_BYTES) if is_large else (NUM_SMALL, SMALL_BYTES)
            made[device, is_large] = _Slots(runtime, device, *sizes)
        return made[device, is_large]
