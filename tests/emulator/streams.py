"""Streams, events and graphs of the emulated device: work that is done at once, as late as may be, or kept for later.

Late is what a test of host code wants: a copy reads its pinned source when the stream is waited for and no sooner, so
that a buffer which is filled again too early, or memory that is freed, gives wrong numbers every time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from pagecore.errors import DeviceError

Work = Callable[[], None]


class Marker:
    """A point in a stream; has passed when the stream has come to it."""

    def __init__(self, stream: int) -> None:
        self.stream, self.passed = stream, False

    def __call__(self) -> None:
        self.passed = True


class Graph:
    """Work that was captured: the same calls with the same arguments, as often as it is launched."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.works: list[Work] = []

    def launch(self, stream: int) -> None:
        for work in self.works:
            self._streams.submit(stream, work)


class Streams:
    """All streams of a device; each does its work in order, and none waits for another unless told to.

    Attributes
    ----------
    deferred : bool
        Whether work waits until somebody waits for it. May be changed at any time.
    """

    def __init__(self) -> None:
        self.deferred = False
        self._queues: defaultdict[int, deque[Work]] = defaultdict(deque)
        self._captures: dict[int, Graph] = {}
        self._next = 0x1000

    def make(self) -> int:
        """Return the handle of a new stream."""
        self._next += 0x10
        return self._next

    def submit(self, stream: int, work: Work) -> None:
        """Do some work when its turn comes."""
        if stream in self._captures:
            self._captures[stream].works.append(work)
        elif self.deferred or self._queues[stream]:
            self._queues[stream].append(work)
            if not self.deferred:
                self.drain(stream)
        else:
            work()

    def drain(self, stream: int, until: Marker | None = None) -> None:
        """Do what a stream has been given, all of it or up to a point. Work that fails is not done again."""
        queue = self._queues[stream]
        while queue and not (until is not None and until.passed):
            queue.popleft()()

    def finish(self) -> None:
        """Do all that is left, of every stream."""
        for stream in list(self._queues):
            self.drain(stream)

    def mark(self, stream: int) -> Marker:
        marker = Marker(stream)
        self.submit(stream, marker)
        return marker

    def wait(self, stream: int, marker: Marker) -> None:
        """Let a stream go on only when another has come to a point."""
        self.submit(stream, lambda: self.drain(marker.stream, marker))

    def is_capturing(self, stream: int) -> bool:
        return stream in self._captures

    def refuse_capture(self, stream: int, what: str) -> None:
        """DeviceError where a device would end the capture: whatever waits, allocates or reads pageable memory."""
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
