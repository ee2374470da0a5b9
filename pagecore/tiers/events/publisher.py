"""EventPublisher: the changes of a cache's prefix trees over ZeroMQ.

    hot path      insert, evict ──> journal of the tree
    publisher     take the journals under the cache's lock (swaps buffers) ──> encode ──> PUB, replay buffer

A batch has the changes of all trees up to one moment, and its number names that moment: the state after batch n is the
same for every subscriber.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from pagecore.cache import PagedKVCache
from pagecore.cache.parts import parts_of
from pagecore.cache.state._state import Held
from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import as_float, require_int, shown
from pagecore.tiers.events.sockets import bound_to, is_bound_by_publisher, library, opened
from pagecore.tiers.events.sources import Changes, Source, sources_of
from pagecore.tiers.events.wire import CLEARED, END, Event, encoder, sequence_bytes

_NUMBERS = itertools.count()
# Events in one frame of a snapshot.
SNAPSHOT_EVENTS = 1024


@dataclass(frozen=True, slots=True)
class EventStats:
    """Counters of a publisher.

    Attributes
    ----------
    sequence : int
        Number of the last batch; -1 before the first.
    num_events, num_bytes : int
        Events, and bytes of payloads, that were published.
    num_overflows : int
        Times that a journal was full or a batch failed, so that the whole state was published again.
    num_replays, num_snapshots : int
        Requests that were served.
    error : str or None
        The error that has ended the publisher's thread: nothing is published any more.
    """

    sequence: int = -1
    num_events: int = 0
    num_bytes: int = 0
    num_overflows: int = 0
    num_replays: int = 0
    num_snapshots: int = 0
    error: str | None = None


class EventPublisher:
    """Publisher of a cache's stored and removed blocks, in vLLM's format.

    A thread takes the changes every `interval` seconds, and answers the replay and snapshot sockets. The cache never
    waits for a subscriber: a subscriber that is too slow loses batches, which it sees by their numbers and asks for
    again. The first batch has the event AllBlocksCleared and everything that the trees hold.

    Parameters
    ----------
    cache : PagedKVCache
        A cache with a prefix cache.
    tiers : object, optional
        Other media: a `HostTier` ("CPU"), `Tiers` ("CPU", and "DISK" and "EXTERNAL" for what its stores are known to
        have, see `pagecore.tiers.manager.ledger`), or pairs of a `RadixTree` and a medium. The cache's lock protects
        them.
    endpoint : str
        Address for subscribers. As in vLLM, an address with ``*`` or ``::``, "ipc://" and "inproc://" are bound, any
        other one is connected.
    replay : str, optional
        Address of the socket that repeats batches. A request is a sequence number (8 bytes, big-endian); the reply has
        one message (topic, number, payload) for each buffered batch from there on, and (empty, -1, empty) at the end.
    snapshot : str, optional
        Address of the socket that reports the state. A request is any message; the reply has messages (topic, number,
        payload) with BlockStored events that give the state after batch `number`, and (empty, -1, empty) at the end.
    topic : str
        First frame of each message.
    buffer : int
        Batches that can be repeated.
    rank : int, optional
        Data-parallel rank, sent with each batch.
    interval : float, optional
        Seconds between two looks at the journals. None: only `publish` looks.
    medium : str
        Medium of the cache's own blocks.
    max_waiting : int
        Messages that wait for each subscriber before it loses some.
    max_bytes : int
        Size of the changes of one tree that can wait for the thread. More of them are replaced by the whole state.

    Attributes
    ----------
    endpoint, replay, snapshot : str or None
        Addresses in use, with the ports that the system chose for ``*``.

    Raises
    ------
    UnsupportedOption
        A cache without a prefix cache, or with a publisher already; an address that cannot be used; libraries of the
        extra "tiers" are missing.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        tiers: object = None,
        *,
        endpoint: str,
        replay: str | None = None,
        snapshot: str | None = None,
        topic: str = "",
        buffer: int = 10_000,
        rank: int | None = None,
        interval: float | None = 0.01,
        medium: str = "GPU",
        max_waiting: int = 100_000,
        max_bytes: int = 64 << 20,
    ) -> None:
        parts = parts_of(cache)
        self._lock = parts.state.lock
        self._sources = sources_of(parts, tiers, medium)
        if not isinstance(topic, str):
            raise UnsupportedOption(f"topic is {shown(topic)}; expected a str")
        try:
            self._topic = topic.encode()
        except UnicodeEncodeError:
            raise UnsupportedOption(f"topic is {shown(topic)}; expected text that UTF-8 encodes") from None
        self._rank = None if rank is None else require_int("rank", rank, min=0)
        self._interval = None if interval is None else as_float("interval", interval)
        self._encode = encoder()
        buffer = require_int("buffer", buffer)
        waiting = require_int("max_waiting", max_waiting)
        if self._interval is not None and not 0 < self._interval <= 3600:
            raise UnsupportedOption(f"interval is {interval}; use seconds above 0 and up to 3600, or None")
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._stats = EventStats()
        self._mutex = threading.Lock()  # of batches, statistics and the PUB socket
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._has_reported = False  # the caller has seen the error
        self._is_behind = False  # changes were taken and not sent
        self._sockets: list[Any] = []
        try:
            self._out = self._open("PUB", endpoint, "endpoint", is_bound_by_publisher(endpoint), waiting)
            self.endpoint = bound_to(self._out, endpoint)
            # A socket drops messages beyond its limit, and learns of reads only when half of the limit has been read:
            # with room for two replays, one always fits.
            self._replay, self.replay = self._server(replay, "replay", 2 * (buffer + 1))
            self._snapshot, self.snapshot = self._server(snapshot, "snapshot", 1 << 20)
            wake = f"inproc://pagecore-events-{next(_NUMBERS)}"
            self._wake_in = self._open("PULL", wake, "inproc", True, 0)
            self._wake_out = self._open("PUSH", wake, "inproc", False, 0)
            self._start_journals(max_bytes)
        except BaseException:
            self._close_sockets()
            raise
        try:
            self._publish_state()
            self._thread = threading.Thread(target=self._run, name="pagecore-events", daemon=True)
            self._thread.start()
        except BaseException:
            self._release()
            raise

    # Construction and end.

    def _open(self, kind: str, endpoint: object, name: str, binds: bool, limit: int) -> Any:
        socket = opened(kind, endpoint, name, binds=binds, limit=limit)
        self._sockets.append(socket)
        return socket

    def _server(self, endpoint: str | None, name: str, limit: int) -> tuple[Any, str | None]:
        if endpoint is None:
            return None, None
        socket = self._open("ROUTER", endpoint, name, True, limit)
        return socket, bound_to(socket, endpoint)

    def _start_journals(self, max_bytes: int) -> None:
        started: list[Source] = []
        with Held(self._lock):
            try:
                for source in self._sources:
                    source.tree.start_journal(max_bytes=max_bytes)
                    started.append(source)
            except BaseException:
                for source in started:
                    source.tree.stop_journal()
                raise

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._sockets = []

    def close(self) -> None:
        """Publish what is left, stop the thread, close the sockets and end the journals; again does nothing.

        Raises
        ------
        Exception
            The error that has ended the thread, unless `publish` has raised it; everything is closed.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        try:
            self._end_thread()
            if self._error is None:
                with self._mutex:
                    self._publish()
        finally:
            self._release()
        if self._error is not None and not self._has_reported:
            self._has_reported = True
            raise self._error

    def _release(self) -> None:
        """End the thread and the journals, so that the cache can have another publisher, and close the sockets."""
        self._end_thread()
        with self._mutex:
            with Held(self._lock):
                for source in self._sources:
                    source.tree.stop_journal()
            self._close_sockets()

    def _end_thread(self) -> None:
        """Wait until the thread, which uses the sockets, has ended; again after an interrupt."""
        self._closing.set()
        if self._thread is not None and self._thread.is_alive():
            self._wake_out.send(b"")
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._has_reported = self._has_reported or kind is not None  # the error of the block goes on
        self.close()

    # Batches.

    def publish(self) -> int:
        """Publish the changes up to now; return the number of the last batch.

        Raises
        ------
        UnsupportedOption
            The publisher is closed.
        Exception
            The error that has ended the thread; see `EventStats.error`.
        """
        with self._mutex:
            if self._closing.is_set():
                raise UnsupportedOption("the publisher is closed; make another one")
            if self._error is not None:
                self._has_reported = True
                raise self._error
            return self._publish()

    def stats(self) -> EventStats:
        """Return the counters."""
        return self._stats

    def _publish(self) -> int:
        """Publish a batch if there are changes. The caller holds the mutex."""
        with Held(self._lock):
            taken = self._take()
        number = self._send_changes(taken)
        self._is_behind = False
        return number

    def _publish_state(self) -> None:
        """Publish everything as the first batch."""
        with self._mutex:
            with Held(self._lock):
                self._take()
                logs = self._contents()
            self._send(self._whole(logs))
            self._is_behind = False

    def _take(self) -> tuple[list[Changes], bool]:
        """Return the changes and False; or all contents and True, if a journal was full or earlier changes are unsent.

        The caller holds the lock, and sets `_is_behind` to False when the changes are sent.
        """
        was_behind, self._is_behind = self._is_behind, True
        logs = [source.tree.take_changes() for source in self._sources]
        must_be_whole = was_behind or any(log.has_overflowed for log in logs)
        return (self._contents() if must_be_whole else logs), must_be_whole

    def _contents(self) -> list[Changes]:
        return [source.tree.list_contents() for source in self._sources]

    def _send_changes(self, taken: tuple[list[Changes], bool]) -> int:
        logs, is_whole = taken
        if is_whole:
            self._count(num_overflows=1)
            return self._send(self._whole(logs))
        events = self._events_of(logs)
        return self._send(events) if events else self._stats.sequence

    def _whole(self, logs: Sequence[Changes]) -> list[Event]:
        """Return the events of a batch that gives the whole state, given the contents of the trees."""
        return [{"type": CLEARED}, *self._announcements(), *self._events_of(logs)]

    def _announcements(self) -> list[Event]:
        return [event for source in self._sources for event in source.announcements()]

    def _events_of(self, logs: Sequence[Changes]) -> list[Event]:
        return [
            event for source, log in zip(self._sources, logs, strict=True) for event in source.events_of(log.to_list())
        ]

    def _send(self, events: list[Event]) -> int:
        payload = self._encode([time.time(), events, self._rank])
        number = self._stats.sequence + 1
        self._batches.append((number, payload))
        self._out.send_multipart((self._topic, sequence_bytes(number), payload))
        self._count(sequence=1, num_events=len(events), num_bytes=len(payload))
        return number

    def _count(self, **by: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + more for name, more in by.items()})

    # The thread.

    def _run(self) -> None:
        zmq = library()
        poller = zmq.Poller()
        for socket in (self._wake_in, self._replay, self._snapshot):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        wait = None if self._interval is None else max(1, int(self._interval * 1000))
        try:
            while not self._closing.is_set():
                ready = dict(poller.poll(wait))
                if self._interval is not None:
                    with self._mutex:
                        self._publish()
                if self._replay in ready:
                    self._serve(self._replay, self._replayed)
                if self._snapshot in ready:
                    self._serve(self._snapshot, self._state)
        except BaseException as error:  # raised again by publish() or close()
            self._error = error
            with self._mutex:
                self._stats = replace(self._stats, error=f"{type(error).__name__}: {error}")

    def _serve(self, socket: Any, answer: Any) -> None:
        """Answer one request; frames before the last are the way back to the client."""
        frames = socket.recv_multipart()
        way, request = frames[:-1], frames[-1]
        for number, payload in answer(request):
            socket.send_multipart([*way, self._topic, sequence_bytes(number), payload])
        socket.send_multipart([*way, b"", END, b""])

    def _replayed(self, request: bytes) -> Iterable[tuple[int, bytes]]:
        if len(request) != 8:
            return []
        first = int.from_bytes(request, "big")
        with self._mutex:
            self._count(num_replays=1)
            return [(number, payload) for number, payload in self._batches if number >= first]

    def _state(self, _request: bytes) -> Iterable[tuple[int, bytes]]:
        with self._mutex:
            with Held(self._lock):
                changes, logs = self._take(), self._contents()
            self._send_changes(changes)
            self._is_behind = False
            number = self._stats.sequence
            self._count(num_snapshots=1)
        events = [*self._announcements(), *self._events_of(logs)]
        for first in range(0, len(events), SNAPSHOT_EVENTS):
            yield number, self._encode([time.time(), events[first : first + SNAPSHOT_EVENTS], self._rank])
