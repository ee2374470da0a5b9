"""Streams, events and graphs of the emulated device. Work runs at once, as late as possible, or in a graph.

Late execution tests the host code: a copy reads its pinned source only when the host waits for the stream, so that a
buffer that is refilled or freed too early gives wrong numbers every time.
"""

from __future__ import annotations

import gc
import threading
from collections import defaultdict, deque
from collections.abc import Callable

from pagecore.errors import DeviceError

Work = Callable[[], None]


class Marker:
    """A point in a stream, or in the captured work of one; `passed` is True once the stream has reached it."""

    def __init__(self, stream: int, graph: Graph | None) -> None:
        self.stream, self.graph, self.passed = stream, graph, False

    def __call__(self) -> None:
        self.passed = True

    def refuse_captured(self) -> None:
        """Raise DeviceError for calls of the host on an event that was recorded in a capture."""
        if self.graph is not None:
            raise DeviceError(f"the event was last recorded while stream {self.stream:#x} was captured")


class Graph:
    """Captured work; each launch runs the same calls with the same arguments."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.works: list[Work] = []

    def launch(self, stream: int) -> None:
        for work in self.works:
            self._streams.submit(stream, work)


class Streams:
    """All streams of a device. Each runs its work in order, and waits for another only after `wait`.

    Attributes
    ----------
    deferred : bool
        True to run work only when the host or another stream waits for it. May be changed at any time.
    """

    def __init__(self) -> None:
        self.deferred = False
        self._queues: defaultdict[int, deque[Work]] = defaultdict(deque)
        self._lock = threading.RLock()
        self._captures: dict[int, Graph] = {}
        self._next = 0x1000

    def make(self) -> int:
        """Return the handle of a new stream."""
        self._next += 0x10
        return self._next

    def known(self) -> list[int]:
        """Return the streams to which work was submitted."""
        return list(self._queues)

    def submit(self, stream: int, work: Work) -> None:
        """Run work in the order of a stream."""
        if stream in self._captures:
            self._captures[stream].works.append(work)
        else:
            self._queues[stream].append(work)
            if not self.deferred:
                self.drain(stream)

    def drain(self, stream: int, until: Marker | None = None) -> None:
        """Run the work of a stream, up to a marker if given. Work that raises an error is not run again.

        The garbage collector is off meanwhile: memory that it frees, and waits of finalizers, come after the work that
        runs.
        """
        with self._lock:
            collects = gc.isenabled()
            gc.disable()
            try:
                queue = self._queues[stream]
                while queue and not (until is not None and until.passed):
                    queue.popleft()()
            finally:
                if collects:
                    gc.enable()

    def finish(self) -> None:
        """Run the deferred work of every stream."""
        for stream in list(self._queues):
            self.drain(stream)

    def mark(self, stream: int) -> Marker:
        marker = Marker(stream, self._captures.get(stream))
        self.submit(stream, marker)
        return marker

    def wait(self, stream: int, marker: Marker) -> None:
        """Let later work of a stream wait for a marker in another stream.

        Raises
        ------
        DeviceError
            One of the two is captured, and the other one is not, or in another graph.
        """
        if self._captures.get(stream) is not marker.graph:
            raise DeviceError(f"stream {stream:#x} waits for stream {marker.stream:#x}, which is not in its capture")
        self.submit(stream, lambda: self.drain(marker.stream, marker))

    def is_capturing(self, stream: int) -> bool:
        return stream in self._captures

    def refuse_capture(self, stream: int, what: str) -> None:
        """Raise DeviceError for calls that end a capture: waits, allocations, and reads of pageable memory."""
        if stream in self._captures:
            raise DeviceError(f"{what} while stream {stream:#x} is captured")

    def refuse_any_capture(self, what: str) -> None:
        for stream in self._captures:
            self.refuse_capture(stream, what)

    def begin_capture(self, stream: int) -> None:
        if stream == 0:
            raise DeviceError("the default stream cannot be captured")
        self.drain(stream)
        self._captures[stream] = Graph(self)

    def end_capture(self, stream: int) -> Graph:
        return self._captures.pop(stream)
