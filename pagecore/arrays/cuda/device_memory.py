"""Memory of a CUDA device that pagecore allocated, with the stream that last used it."""

from __future__ import annotations

from pagecore.arrays.cuda.current import runtime
from pagecore.arrays.cuda.devices import check_device
from pagecore.arrays.refusals import ExportRefused

# Two handles of one stream. DLPack uses 1, because 0 could be mistaken for None.
DEFAULT_STREAM = 0
LEGACY_STREAM = 1


def _same_stream(stream: int) -> int:
    """Return the other handle of the default stream; any other handle is returned as it is."""
    return {DEFAULT_STREAM: LEGACY_STREAM, LEGACY_STREAM: DEFAULT_STREAM}.get(stream, stream)


class DeviceMemory:
    """Device memory allocated by empty() or zeros(), freed with the last tensor over it.

    Attributes
    ----------
    address : int
    nbytes : int
    device : int
    stream : int or None
        The last stream that pagecore submitted work on the memory to. A consumer of a DLPack export waits for it. None
        if every stream may use the memory at once.
    """

    __slots__ = ("__weakref__", "_kept", "_runtime", "address", "device", "nbytes", "stream")

    def __init__(self, nbytes: int, device: int, stream: int | None, zeroed: bool) -> None:
        check_device(device)
        self._runtime = runtime()
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
        """Wait for the work that the allocator's stream still does on the memory, so that every stream may use it."""
        if self._runtime.is_capturing(worker):
            self.stream = worker  # the host cannot wait for a graph
        else:
            self._runtime.synchronize(worker, self.device)

    def order(self, consumer: int) -> None:
        """Make later work of the stream `consumer` wait for the work submitted to the memory's stream so far."""
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
