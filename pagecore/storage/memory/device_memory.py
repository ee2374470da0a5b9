"""Device memory that is given back to the device and taken again while its addresses stay."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from dataclasses import dataclass

from pagecore.arrays import Tensor, cuda
from pagecore.arrays.cuda.devices import device_index
from pagecore.arrays.cuda.protocol import RefusedDuringCapture, Runtime
from pagecore.arrays.tensors._make import mapped
from pagecore.errors import PagecoreError
from pagecore.storage.checks import ceil_div


@dataclass
class _Range:
    """A range of reserved addresses, with memory or without."""

    runtime: Runtime
    device: int
    address: int
    size: int
    has_memory: bool = False

    def map(self) -> None:
        self.runtime.map_memory(self.address, self.size, self.device)
        self.has_memory = True

    def unmap(self) -> None:
        self.runtime.unmap_memory(self.address, self.size, self.device)
        self.has_memory = False

    def close(self) -> None:
        """Give memory and addresses back; warn if that fails, because nothing is left to call.

        CUDA frees no memory while a graph is being captured: the range then waits for `free_dropped`. So does one whose
        release is interrupted.
        """
        try:
            if self.has_memory:
                self.unmap()
            self.runtime.free_address(self.address, self.size, self.device)
        except RefusedDuringCapture:
            _dropped.append(self)
        except PagecoreError as error:
            warnings.warn(f"device memory at {self.address:#x} was not freed: {error}", ResourceWarning, stacklevel=2)
        except BaseException:
            _dropped.append(self)
            raise


# Ranges whose memory was dropped during the capture of a graph, or whose release was interrupted.
_dropped: deque[_Range] = deque()


def free_dropped() -> None:
    """Free what was dropped during the capture of a graph; what CUDA still refuses waits on."""
    for _ in range(len(_dropped)):
        try:
            one = _dropped.popleft()
        except IndexError:  # another thread has freed it
            return
        one.close()


class DeviceMemory:
    """Memory of a CUDA device with the addresses of its own, by the virtual memory functions of the driver.

    The memory consists of whole pages, of 2 MiB on most devices. Tensors over it keep the addresses reserved, and CUDA
    graphs that use them stay valid; while the memory is given back, an access to it is an error of the device. Memory
    that is dropped while a graph is being captured is freed by the next call after it that takes memory, or gives it
    back.

    Parameters
    ----------
    nbytes : int
    device : str
        A CUDA device.

    Attributes
    ----------
    nbytes : int
    address : int

    Raises
    ------
    NotEnoughMemory
        The device does not have the memory.
    DeviceError
        The driver or the device has no virtual memory.
    """

    def __init__(self, nbytes: int, device: str) -> None:
        index = device_index(device)
        assert index is not None
        free_dropped()
        runtime = cuda.runtime()
        self.nbytes = nbytes
        size = ceil_div(nbytes, page := runtime.memory_granularity(index)) * page
        self._device = device
        self._range = _Range(runtime, index, runtime.reserve_address(size, index), size)
        self.address = self._range.address
        weakref.finalize(self, self._range.close).atexit = False
        self._range.map()

    def tensor(self) -> Tensor:
        """Return the memory as bytes on its device, uint8 ``[nbytes]``; the tensor keeps the addresses reserved."""
        return mapped(self.address, self.nbytes, self._device, self)

    def discard(self) -> None:
        """Wait for all work of the device, and give the memory back; a second call does nothing."""
        if self._range.has_memory:
            free_dropped()
            self._range.unmap()

    def restore(self) -> None:
        """Take new memory, filled with zeros; do nothing if the memory is there.

        Raises
        ------
        NotEnoughMemory
            The device does not have the memory; nothing was changed.
        """
        if self._range.has_memory:
            return
        free_dropped()
        self._range.map()
        runtime, device = self._range.runtime, self._range.device
        try:
            stream = runtime.current_stream(device)
            runtime.fill(self.address, 0, self._range.size, stream)
            runtime.synchronize(stream, device)
        except BaseException:
            self._range.unmap()
            raise
