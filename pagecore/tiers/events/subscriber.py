"""Subscriber: keeps a mirror of a cache up to date over ZeroMQ."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
from pagecore.storage.checks import as_float, require_int
from pagecore.tiers.events.mirror import Mirror, MissingBatch
from pagecore.tiers.events.sockets import library, opened
from pagecore.tiers.events.wire import END, Batch, EventFormatError, decode_batch, sequence_bytes

# Messages of one poll: more than arrive between two polls of a busy publisher, and few enough that a poll returns soon.
MAX_MESSAGES = 1024
LONGEST_WAIT = 3600


class Subscriber:
    """Follower of one publisher of events, of pagecore or vLLM.

    Used by one thread. Batches that it lost are asked for at the replay socket, and the whole state at the snapshot
    socket if they are no longer there. Without a snapshot it applies those that the replay socket still has.

    Parameters
    ----------
    endpoint : str
        Address at which the publisher publishes.
    replay, snapshot : str, optional
        Addresses of the publisher's other sockets.
    topic : str
        Prefix of the topics to receive.
    timeout : float
        Seconds to wait for an answer of the publisher.
    max_waiting : int
        Messages that wait to be polled; further ones are lost, and asked for later.
    by_tokens : bool
        As in `Mirror`: True for publishers with hashes of their own, such as vLLM.

    Attributes
    ----------
    mirror : Mirror
        The state of the cache.
    num_lost : int
        Batches that neither a replay nor a snapshot made up for; the mirror may then differ from the cache.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        snapshot: str | None = None,
        topic: str = "",
        timeout: float = 5.0,
        max_waiting: int = 100_000,
        by_tokens: bool = False,
    ) -> None:
        zmq = library()
        self.mirror = Mirror(by_tokens=by_tokens)
        self.num_lost = 0
        self._last_received = -1  # by the SUB socket, whose numbers increase until the publisher is started again
        self._timeout = timeout
        self._replay, self._snapshot = replay, snapshot
        self._socket = opened("SUB", endpoint, "endpoint", binds=False, limit=max_waiting)
        self._socket.subscribe(topic.encode())
        # Reports lost connections: the publisher may have been started again, and have reached the same number.
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._zmq = zmq

    def close(self) -> None:
        """Close the sockets; again does nothing."""
        if not self._socket.closed:
            self._socket.disable_monitor()  # or a later socket with its descriptor may receive nothing
        self._monitor.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sync(self) -> int:
        """Replace the mirror by a snapshot; return its sequence number.

        Raises
        ------
        DeviceError
            The publisher does not answer.
        UnsupportedOption
            The subscriber has no snapshot socket.
        """
        if self._snapshot is None:
            raise UnsupportedOption("snapshot is None, so that the state cannot be asked for; give the address")
        answer = list(self._ask(self._snapshot, b"snapshot"))
        if not answer:
            raise DeviceError(f"the snapshot of {self._snapshot} is empty; use the address of a publisher's snapshot")
        self.mirror.load(answer[0][0], [decode_batch(payload) for _, payload in answer])
        return self.mirror.sequence

    def catch_up(self) -> int:
        """Ask for the batches after the last one and apply them; return the last sequence number.

        Raises
        ------
        DeviceError, UnsupportedOption
            As in `sync`, for the replay socket.
        MissingBatch
            The publisher no longer has the first of the batches.
        """
        for number, payload in self._ask_for_replay():
            self.mirror.apply(number, decode_batch(payload))
        return self.mirror.sequence

    def _ask_for_replay(self) -> list[tuple[int, bytes]]:
        """Return the batches from the last one on that the publisher still has.

        If the publisher has a later batch of that number, or none, it was started again: the mirror is reset, and the
        batches are those from 0 on.
        """
        if self._replay is None:
            raise UnsupportedOption("replay is None, so that batches cannot be asked for; give the address")
        last = self.mirror.sequence
        batches = list(self._ask(self._replay, sequence_bytes(max(last, 0))))
        if last < 0 or (batches and not self._is_other(*batches[0])):
            return batches
        self.mirror.reset()
        return list(self._ask(self._replay, sequence_bytes(0)))

    def _is_other(self, number: int, payload: bytes) -> bool:
        """Return True for a batch with the number of the last one that is later than it, or than the snapshot."""
        return number == self.mirror.sequence and decode_batch(payload).timestamp > self.mirror.timestamp

    def poll(self, timeout: float = 0.0, *, max_messages: int = MAX_MESSAGES) -> int:
        """Apply the batches that have arrived; return the number of messages.

        Parameters
        ----------
        timeout : float
            Seconds to wait for the first.
        max_messages : int
            Messages after which the call returns, so that it ends although the publisher is faster than the
            subscriber. If it returns `max_messages`, more may wait.

        Raises
        ------
        EventFormatError
            A message is not a batch of events.
        ShapeError
            `timeout` is not a number from 0 to 3600, or `max_messages` not an integer of at least 1.
        """
        seconds = as_float("timeout", timeout)
        if not 0 <= seconds <= LONGEST_WAIT:
            raise ShapeError(
                f"timeout is {seconds}; use seconds from 0 to {LONGEST_WAIT}, and poll again to wait longer"
            )
        limit = require_int("max_messages", max_messages, max=None)
        count = 0
        while count < limit and self._socket.poll(0 if count else int(seconds * 1000)):
            frames = self._socket.recv_multipart()
            count += 1
            if len(frames) == 3 and len(frames[1]) == 8:
                self._receive(int.from_bytes(frames[1], "big"), frames[2])
        return count

    def wait_for(self, sequence: int) -> bool:
        """Apply batches until number `sequence` was; return False if it does not come within the timeout."""
        deadline = time.monotonic() + self._timeout
        while self.mirror.sequence < sequence:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.poll(min(left, 0.05))
        return True

    def _receive(self, number: int, payload: bytes) -> None:
        batch = decode_batch(payload)
        if number <= self._last_received:  # started again, whatever its clock says
            self.mirror.reset()
        self._last_received = number
        if not self._was_disconnected():
            try:
                self.mirror.apply(number, batch)
                return
            except MissingBatch as missing:
                if missing.is_restart:
                    self.mirror.reset()
        self._close_gap(number, batch)

    def _was_disconnected(self) -> bool:
        """Return True if the connection was lost since the last call."""
        was_lost = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            was_lost = True
        return was_lost

    def _close_gap(self, number: int, batch: Batch) -> None:
        """Apply a batch and those before it that are missing, by a replay or a snapshot."""
        replayed: list[tuple[int, bytes]] = []
        if self._replay is not None:
            with suppress(DeviceError, EventFormatError):
                replayed = self._ask_for_replay()
        with suppress(MissingBatch, EventFormatError):
            for each, content in replayed:
                self.mirror.apply(each, decode_batch(content))
        if self.mirror.sequence < number and self._snapshot is not None:
            with suppress(DeviceError, EventFormatError):
                self.sync()
        if self.mirror.sequence >= number:
            return
        for each, content in replayed:
            with suppress(EventFormatError):
                self._apply_after_gap(each, decode_batch(content))
        self._apply_after_gap(number, batch)

    def _apply_after_gap(self, number: int, batch: Batch) -> None:
        """Apply a batch, although batches before it are lost."""
        self.num_lost += max(number - self.mirror.sequence - 1, 0)
        self.mirror.skip(number - 1)
        self.mirror.apply(number, batch)

    def _ask(self, endpoint: str, request: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the messages of an answer up to its end."""
        zmq = self._zmq
        socket = opened("DEALER", endpoint, "replay or snapshot", binds=False)
        try:
            socket.send_multipart([b"", request])
            while True:
                if not socket.poll(int(self._timeout * 1000), zmq.POLLIN):
                    raise DeviceError(f"{endpoint} does not answer within {self._timeout} s; check the address")
                frames: list[Any] = socket.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != len(END):
                    raise DeviceError(
                        f"{endpoint} sent {len(frames)} frames that are not a batch; use the address of a publisher's "
                        "replay or snapshot"
                    )
                number, payload = frames[-2:]
                if number == END:
                    return
                yield int.from_bytes(number, "big"), payload
        finally:
            socket.close()
