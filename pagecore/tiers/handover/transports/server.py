"""The exporter's side: a listening socket, a thread that accepts readers, and one thread for each reader."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.tiers.handover.errors import CorruptTransfer, HandoverError, LeaseExpired
from pagecore.tiers.handover.offers import Offer
from pagecore.tiers.handover.pieces import Units
from pagecore.tiers.handover.transports.addresses import enlarge, listen
from pagecore.tiers.handover.wire import WIRE_VERSION, Answer, Claim, End, Refusal, Stream

# Seconds in which a new connection must send its claim.
CLAIM_SECONDS = 10
MAX_READERS = 64
# Errors of `accept` that last until others release descriptors or memory, and the pause before it is tried again.
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
PAUSE_SECONDS = 0.01
FOREVER = 2**62

# Answers a claim on an offer: sends the grant, and streams the units if they are streamed.
Respond = Callable[[Stream, Offer, Units, NDArray[np.uint64]], None]


@dataclass
class Reader:
    """A connection, and the offer that it reads."""

    connection: socket.socket
    thread: threading.Thread
    offer: Offer | None = None


class OfferServer:
    """Answers claims on offers until it is closed.

    Parameters
    ----------
    address : str
    respond : callable
        See `Respond`.
    is_revocable : bool
        True if reads end with their connection. Connections are then cut when the lease ends; otherwise the rows wait
        until the reader has ended.
    """

    def __init__(self, address: str, respond: Respond, *, is_revocable: bool) -> None:
        self._listener, self.address = listen(address)
        self._respond = respond
        self._is_revocable = is_revocable
        self._offers: dict[bytes, Offer] = {}
        self._readers: list[Reader] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="pagecore-offers", daemon=True)
        self._thread.start()

    def add(self, offer: Offer) -> None:
        """Answer claims on an offer."""
        with self._lock:
            if self._is_closed:
                raise UnsupportedOption("the transport is closed; make a new one")
            self._offers[offer.export] = offer
        self._notify()

    def withdraw(self, export: bytes) -> None:
        """Accept no more readers of an export, and cut those that can be cut."""
        with self._lock:
            offer = self._offers.get(export)
        if offer is not None:
            offer.withdraw()
            self._cut(offer)
            self._notify()

    @property
    def num_offers(self) -> int:
        """Offers whose rows are not given back yet."""
        return self._forget_released()

    def _forget_released(self) -> int:
        """Forget the offers whose rows are given back; return the number of the others."""
        with self._lock:
            self._offers = {key: offer for key, offer in self._offers.items() if not offer.settle()}
            return len(self._offers)

    def close(self) -> None:
        """Cut all connections, end all threads and give back all rows."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._notify()
        self._thread.join()  # until then it may accept one more reader
        readers = list(self._readers)
        for reader in readers:
            _shut(reader.connection)
        for reader in readers:
            reader.thread.join()
        for offer in self._offers.values():
            offer.withdraw()
        with self._lock:
            os.close(self._wake)
            self._wake = -1
        if self._listener.family == socket.AF_UNIX:
            with contextlib.suppress(OSError):
                os.unlink(self._listener.getsockname())
        self._listener.close()

    # -- the accepting thread ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        waiting.register(self._wake, select.POLLIN)
        while not self._is_closed:
            ready = {descriptor for descriptor, _ in waiting.poll(self._milliseconds_to_expiry())}
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            if self._listener.fileno() in ready:
                self._accept()
            self._expire()

    def _milliseconds_to_expiry(self) -> float | None:
        with self._lock:
            left = [offer.seconds_left for offer in self._offers.values() if not offer.is_closed]
        return max(0.0, min(left)) * 1000 + 1 if left else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:  # the connection waits, and would wake this thread again at once
                time.sleep(PAUSE_SECONDS)
            return
        with self._lock:
            self._readers = [reader for reader in self._readers if reader.thread.is_alive()]
            is_full = len(self._readers) >= MAX_READERS
        if is_full:
            connection.close()
            return
        enlarge(connection)
        reader = Reader(connection, threading.Thread(name="pagecore-reader", daemon=True))
        reader.thread = threading.Thread(target=self._answer, args=(reader,), name="pagecore-reader", daemon=True)
        with self._lock:
            try:
                reader.thread.start()
            except (RuntimeError, MemoryError):  # no thread is left: the importer may try again
                connection.close()
                return
            self._readers.append(reader)

    def _expire(self) -> None:
        with self._lock:
            offers = list(self._offers.values())
        for offer in offers:
            if offer.seconds_left <= 0 and not offer.is_closed:
                offer.withdraw()
                self._cut(offer)
        self._forget_released()

    def _cut(self, offer: Offer) -> None:
        if not self._is_revocable:
            return
        with self._lock:
            readers = [reader for reader in self._readers if reader.offer is offer]
        for reader in readers:
            _shut(reader.connection)

    def _notify(self) -> None:
        """Wake the accepting thread; an export may be withdrawn after `close`."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # -- the thread of a reader ----------------------------------------------------------------------------------

    def _answer(self, reader: Reader) -> None:
        stream = Stream(reader.connection, time.monotonic_ns() + CLAIM_SECONDS * 10**9, "the importer")
        with reader.connection, contextlib.suppress(HandoverError, OSError):
            claim = stream.receive(Claim)
            offer, refusal = self._admit(claim)
            if offer is None:
                stream.send(Answer(refusal=refusal))
                return
            reader.offer = offer
            is_complete = False
            try:
                is_complete = self._serve_claim(stream, claim, offer)
            finally:
                reader.offer = None
                offer.end(is_complete)
                self._notify()
            if claim.lease is not None:
                stream.send(Answer())

    def _admit(self, claim: Claim) -> tuple[Offer | None, Refusal | None]:
        if claim.version != WIRE_VERSION:
            text = f"the importer speaks version {claim.version} of the protocol, the exporter {WIRE_VERSION}"
            return None, Refusal(CorruptTransfer.__name__, f"{text}; use the same version of pagecore on both sides")
        with self._lock:
            offer = self._offers.get(claim.export)
        if offer is not None and offer.begin():
            return offer, None
        return None, Refusal(
            LeaseExpired.__name__,
            "the export has ended: its lease ran out, it was withdrawn, or all its readers were served; export again",
        )

    def _serve_claim(self, stream: Stream, claim: Claim, offer: Offer) -> bool:
        if claim.lease is not None:
            offer.extend(claim.lease)
            return claim.lease == 0
        stream.deadline = offer.expires if self._is_revocable else FOREVER
        try:
            units, seeds = offer.units(claim)
        except PagecoreError as error:
            stream.send(Answer(refusal=Refusal(CorruptTransfer.__name__, str(error))))
            return False
        self._respond(stream, offer, units, seeds)
        return stream.receive(End).is_complete


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
