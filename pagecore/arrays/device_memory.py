"""Memory of a CUDA device that pagecore allocated, and whose work it waits for."""

from __future__ import annotations

from pagecore.arrays import cuda
from pagecore.arrays.devices import check_device
from pagecore.arrays.refusals import ExportRefused

# Two handles of one stream. Where None is no stream, as in DLPack, 0 could be mistaken for it, and 1 cannot.
DEFAULT_STREAM = 0
LEGACY_STREAM = 1


def _same_stream(stream: int) -> int:
    """Return the other handle of the default stream, or the handle itself."""
    return {DEFAULT_STREAM: LEGACY_STREAM, LEGACY_STREAM: DEFAULT_STREAM}.get(stream, stream)


class DeviceMemory:
    """Device memory that is given back with the last tensor over it; made by empty() and zeros().

    `stream` is the one whose work the memory was last given to, as far as pagecore knows; None while no stream needs
    to wait for another. Whoever takes the memory over through DLPack waits for it.
    """

    __slots__ = ("__weakref__", "_kept", "_runtime", "address", "device", "nbytes", "stream")

    def __init__(self, nbytes: int, device: int, stream: int | None, zeroed: bool) -> None:
        check_device(device)
        self._runtime = cuda.runtime()
        self.nbytes = nbytes
        self.device = device
        self.stream = stream
        worker = self._runtime.current_stream(device) if stream is None else stream
        self.address, self._kept = self._runtime.allocate(max(nbytes, 1), device, worker)
        if zeroed and nbytes > 0:
            self._runtime.fill(self.address, 0, nbytes, worker)
        if stream is None:
            self._settle(worker)

    def _settle(self, worker: int) -> None:
        """Wait for what the allocator's stream still does with the memory, so that every stream may use it."""
        if self._runtime.is_capturing(worker):
            self.stream = worker  # a graph cannot be waited for; its own stream comes after it
        else:
            self._runtime.synchronize(worker, self.device)

    def order(self, consumer: int) -> None:
        """Let what `consumer` is given from now on wait for what the memory's stream was given up to now."""
        if self.stream is None or consumer in (self.stream, _same_stream(self.stream)):
            return
        if self._runtime.is_capturing(consumer) and not self._runtime.is_capturing(self.stream):
            raise ExportRefused(
                f"stream {consumer:#x} is being captured and would wait for stream {self.stream:#x}, which is not: "
                "export the memory before the capture begins"
            )
        event = self._runtime.make_event(self.device)
        event.record(self.stream)
        self._runtime.wait_event(consumer, event)
