"""Transport over TCP and Unix sockets: the reference, which needs no library and no special memory."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import UnsupportedOption
from pagecore.tiers.handover.errors import CorruptTransfer, DeadlineExceeded, HandoverError, LeaseExpired
from pagecore.tiers.handover.manifest import Manifest
from pagecore.tiers.handover.offers import Offer
from pagecore.tiers.handover.pieces import Units
from pagecore.tiers.handover.pulls import Pull, PullRequest
from pagecore.tiers.handover.transports.addresses import connect
from pagecore.tiers.handover.transports.server import OfferServer
from pagecore.tiers.handover.wire import WIRE_VERSION, Answer, Claim, End, Grant, Stream, receive_units, send_units

POLL_SECONDS = 0.002
REFUSALS = {kind.__name__: kind for kind in (LeaseExpired, CorruptTransfer)}


class SocketTransport:
    """Hand sequences over through sockets.

    The importer receives straight into the memory of its pool, and the exporter sends from its own: many pieces a
    system call, without the GIL and without copies in user space. Bytes are verified batch by batch.

    Parameters
    ----------
    address : str, optional
        Where to listen for importers: ``tcp://host:port`` (port 0 for any free one) or ``unix:///path``. A transport
        without an address can only import.
    advertised : str, optional
        Address that manifests carry, if importers reach this process by another one.

    Raises
    ------
    UnsupportedOption
        An address that does not parse or cannot be bound.

    Notes
    -----
    A reader that has the manifest can read the sequence. TCP is neither encrypted nor authenticated beyond the 16
    random bytes of the manifest: listen on a trusted network. Give the transport to one cache or to several; close it
    when the last of its sequences has been handed over.
    """

    name = "sockets"
    is_revocable = True

    def __init__(self, address: str | None = None, *, advertised: str | None = None) -> None:
        self._server = None if address is None else OfferServer(address, self.respond, is_revocable=self.is_revocable)
        self._advertised = advertised
        self._pulls: list[Pull] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def address(self) -> str:
        """Address at which importers reach this transport; empty if it only imports."""
        if self._server is None:
            return ""
        return self._advertised or self._server.address

    @property
    def num_offers(self) -> int:
        """Exports whose rows are not given back yet."""
        return 0 if self._server is None else self._server.num_offers

    @property
    def num_pulls(self) -> int:
        """Pulls that are not quiet yet."""
        return len(self._pulls)

    def offer(self, offer: Offer) -> None:
        """Answer importers that know the export, until the last of its readers is served or its lease ends."""
        if self._server is None:
            raise UnsupportedOption(
                "the transport has no address, so that importers cannot reach it; make it with one, such as "
                f"{type(self).__name__}('tcp://127.0.0.1:0')"
            )
        self._server.add(offer)

    def withdraw(self, export: bytes) -> None:
        """End an offer early; its rows are given back when no read of it can follow."""
        if self._server is not None:
            self._server.withdraw(export)

    def respond(self, stream: Stream, offer: Offer, units: Units, seeds: NDArray[np.uint64]) -> None:
        """Send the grant of a claim, and the units."""
        stream.send(Answer(grant=Grant(units.nbytes, len(units.ends), offer.seconds_left)))
        send_units(stream, units, seeds, offer.require_rows)

    def pull(self, request: PullRequest) -> Pull:
        """Begin to pull pieces into the caller's memory; return at once. The caller runs the pull."""
        return self._begin(lambda pull: self._read(pull, request))

    def change_lease(self, manifest: Manifest, lease: float, deadline: int) -> Pull:
        """Begin to extend the lease of an export, or to give it up for one reader with a lease of 0; return at once.

        The caller runs the pull, which moves nothing.
        """
        return self._begin(lambda pull: self._ask_for_lease(pull, manifest, lease, deadline))

    def _begin(self, read: Callable[[Pull], None]) -> Pull:
        pull = Pull(read, self._forget)
        with self._lock:
            if self._is_closed:
                raise UnsupportedOption("the transport is closed; make a new one")
            self._pulls.append(pull)
        return pull

    def _forget(self, pull: Pull) -> None:
        with self._lock:
            self._pulls.remove(pull)

    def _read(self, pull: Pull, request: PullRequest) -> None:
        with _connected(pull, request.manifest.address, request.deadline) as stream:
            try:
                stream.send(self.claim_of(request))
                grant = granted(stream, request)
                stream.deadline = min(request.deadline, time.monotonic_ns() + int(grant.lease * 1e9))
                self.fetch(stream, grant, request, pull)
                stream.send(End(True))
            except DeadlineExceeded as error:
                if time.monotonic_ns() < request.deadline:
                    raise LeaseExpired(f"the lease ended while the sequence was read ({error})") from None
                raise

    def _ask_for_lease(self, pull: Pull, manifest: Manifest, lease: float, deadline: int) -> None:
        with _connected(pull, manifest.address, deadline) as stream:
            stream.send(Claim(WIRE_VERSION, manifest.export, True, [], False, False, lease=lease))
            check_answer(stream, stream.receive(Answer))

    def claim_of(self, request: PullRequest) -> Claim:
        """Return the claim of a request as this transport makes it."""
        return request.claim

    def fetch(self, stream: Stream, grant: Grant, request: PullRequest, pull: Pull) -> None:  # noqa: ARG002
        """Move and verify the bytes of a granted claim."""
        receive_units(stream, request.units, request.seeds)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no offer and no pull is left; return False if `timeout` seconds pass first."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.num_offers or self.num_pulls:
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def close(self) -> None:
        """End all offers and pulls, threads and connections; a second call does nothing."""
        with self._lock:
            self._is_closed = True
            pulls = list(self._pulls)
        for pull in pulls:
            pull.cancel()
        while self._pulls:  # their threads end at once
            time.sleep(POLL_SECONDS)
        self.release_memory()
        if self._server is not None:
            self._server.close()

    def release_memory(self) -> None:
        """End what reads or writes memory without a connection; nothing for sockets."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r}, {self.num_offers} exports, {self.num_pulls} pulls)"


def granted(stream: Stream, request: PullRequest) -> Grant:
    """Receive the answer to a claim; raise the error that a refusal names."""
    answer = stream.receive(Answer)
    check_answer(stream, answer)
    grant = answer.grant
    expected = request.units.nbytes, len(request.units.ends)
    if grant is None or (grant.nbytes, grant.num_units) != expected:
        held = None if grant is None else (grant.nbytes, grant.num_units)
        raise CorruptTransfer(f"{stream.peer} grants {held} bytes and units; expected {expected}: export again")
    return grant


def check_answer(stream: Stream, answer: Answer) -> None:
    """Raise the error that a refusal names."""
    if answer.refusal is not None:
        kind: type[HandoverError] = REFUSALS.get(answer.refusal.kind, HandoverError)
        raise kind(f"{stream.peer} refuses: {answer.refusal.text}")


@contextlib.contextmanager
def _connected(pull: Pull, address: str, deadline: int) -> Iterator[Stream]:
    """Connect to an exporter; a cancelled pull shuts the connection down."""
    with connect(address, deadline) as connection:
        pull.interrupt_with(lambda: _shut(connection))
        try:
            yield Stream(connection, deadline, f"the exporter at {address}")
        finally:
            pull.interrupt_with(None)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
