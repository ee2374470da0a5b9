"""Transports whose importer reads the exporter's memory itself: what NIXL and Mooncake have in common.

Claims go through a socket, as in `SocketTransport`. The grant lists the exporter's pieces and their sums; the importer
reads them window by window into staging memory, verifies them there, and copies them to its pool. While one window is
verified, the next is read.

An abandoned read may still write when its peer wakes up. It then writes to staging memory, which is lost until
the transport is closed, and never to a block of the cache.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.parts import parts_of
from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import require_int
from pagecore.tiers.handover._vectors import scatter_pieces, sum_units
from pagecore.tiers.handover.errors import CorruptTransfer, DeadlineExceeded, HandoverError, PeerLost
from pagecore.tiers.handover.offers import Offer
from pagecore.tiers.handover.pieces import Pieces, Units
from pagecore.tiers.handover.pulls import Pull, PullRequest
from pagecore.tiers.handover.transports.sockets import SocketTransport
from pagecore.tiers.handover.wire import Answer, Claim, Grant, Stream, batches, verify

STAGING_BYTES = 16 << 20
MAX_STAGING = 4
# Seconds between two looks at a read: short reads end within the first ones.
FIRST_LOOK, LONGEST_LOOK = 20e-6, 1e-3


@dataclass(eq=False)
class Staging:
    """Two windows of registered memory, of which one is read while the other is verified."""

    memory: NDArray[np.uint8]
    is_lost: bool = False

    def window(self, number: int) -> NDArray[np.uint8]:
        """Return the memory of a window."""
        half = len(self.memory) // 2
        return self.memory[number % 2 * half :][:half]


@dataclass
class Read:
    """One window that is being read: its units, its memory and the transport's handle."""

    first: int
    last: int
    memory: NDArray[np.uint8]
    handle: Any = None


class OneSidedTransport(SocketTransport):
    """A transport whose importer reads the exporter's memory; see the module.

    Parameters
    ----------
    address, advertised
        As for `SocketTransport`; importers send their claims there.
    staging_bytes : int
        Bytes of each staging memory of an importer, more where a unit is larger; up to four imports read at the same
        time, and the others wait.

    Notes
    -----
    A lease that runs out does not end a read that has begun: the exporter keeps its rows until the reader has ended,
    its process has died, or the transport is closed.
    """

    is_revocable = False

    def __init__(
        self, address: str | None = None, *, advertised: str | None = None, staging_bytes: int = STAGING_BYTES
    ) -> None:
        self.staging_bytes = require_int("staging_bytes", staging_bytes, min=1 << 16, max=None)
        self.is_serving = address is not None
        self._staging: list[Staging] = []
        self._in_use: list[Staging] = []
        self._registered: dict[int, object] = {}
        self._memory_lock = threading.Condition()
        self.open_engine()
        try:
            super().__init__(address, advertised=advertised)
        except BaseException:
            self.close_engine()
            raise

    # -- the engine ----------------------------------------------------------------------------------------------

    @abstractmethod
    def open_engine(self) -> None:
        """Start the transfer library."""

    @abstractmethod
    def close_engine(self) -> None:
        """End every read and release the library; nothing writes to staging memory afterwards."""

    @abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Make memory known to the library until `close_engine`."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Make the library forget memory that nothing reads or writes any more."""

    @abstractmethod
    def own_peer(self) -> bytes:
        """Return what an importer needs to reach this exporter's memory."""

    @abstractmethod
    def begin(self, peer: bytes, local: int, remote: Pieces) -> Any:
        """Begin to read remote pieces, one after the other, to a local address; return a handle."""

    @abstractmethod
    def is_done(self, handle: Any) -> bool:
        """Return True if a read is complete; raise PeerLost if it failed."""

    @abstractmethod
    def forget(self, handle: Any) -> None:
        """Release the handle of a complete read."""

    def abandon(self, handle: Any) -> None:
        """Leave a read for which nothing waits any more: what has not begun need not begin."""

    # -- the exporter --------------------------------------------------------------------------------------------

    def offer(self, offer: Offer) -> None:
        """Register the memory of the cache, once, or that of the export, and answer importers."""
        lent = [] if offer.image is None else [(region.address, region.nbytes) for region in offer.image.regions()]
        lent += [] if offer.checkpoint is None else [(offer.checkpoint.ctypes.data, offer.checkpoint.nbytes)]
        with self._memory_lock:
            if self._is_closed:
                raise UnsupportedOption("the transport is closed; make a new one")
            if offer.image is None:
                store = parts_of(offer.cache).store
                states = [] if store.states is None else store.states.planes()
                for tensor in [*(buffer for pool in store.pools for buffer in pool.buffers), *states]:
                    self._register_once(tensor.pointer, tensor.nbytes, tensor)
            for address, nbytes in lent:
                self._register_once(address, nbytes, offer)
        offer.on_release = partial(self._unregister, [address for address, _ in lent])
        super().offer(offer)

    def _register_once(self, address: int, nbytes: int, owner: object) -> None:
        if address not in self._registered:
            self.register(address, nbytes)
            self._registered[address] = owner  # registered memory must stay

    def _unregister(self, addresses: list[int]) -> None:
        with self._memory_lock, contextlib.ExitStack() as steps:  # one that fails leaves none of the others registered
            for address in addresses:
                if self._registered.pop(address, None) is not None:
                    steps.callback(self.unregister, address)

    def respond(self, stream: Stream, offer: Offer, units: Units, seeds: NDArray[np.uint64]) -> None:
        """Send the addresses and sums of the units."""
        sums = sum_units(units.pieces, units.ends, seeds)
        offer.require_rows()
        with self._memory_lock:
            if self._is_closed:
                raise HandoverError("the transport was closed while an importer claimed an export")
            peer = self.own_peer()
        grant = Grant(
            units.nbytes,
            len(units.ends),
            offer.seconds_left,
            units.pieces.astype("<u8").tobytes(),
            units.ends.astype("<i8").tobytes(),
            sums.astype("<u8").tobytes(),
            peer,
        )
        stream.send(Answer(grant=grant))

    # -- the importer --------------------------------------------------------------------------------------------

    def claim_of(self, request: PullRequest) -> Claim:
        """Return a claim for addresses instead of bytes."""
        return replace(request.claim, is_streamed=False)

    def fetch(self, stream: Stream, grant: Grant, request: PullRequest, pull: Pull) -> None:
        """Read, verify and copy the units of a granted claim."""
        if grant.nbytes == 0:
            return
        remote, sums = _granted_units(grant, stream.peer)
        units, most = request.units, self.staging_bytes // 2
        windows = batches(units.ends, units.pieces, most)
        largest = max(_bytes_of(units, first, last) for first, last in windows)
        staging = self._take_staging(max(largest, min(most, units.nbytes)), stream.deadline, pull)
        reading: list[Read] = []
        try:
            for number, (first, last) in enumerate(windows):
                memory = staging.window(number)
                if _bytes_of(remote, first, last) != _bytes_of(units, first, last):
                    raise CorruptTransfer(f"{stream.peer} cuts its units otherwise; export the sequence again")
                reading.append(Read(first, last, memory))  # listed first: a part of it may have begun if it fails
                reading[-1].handle = self.begin(grant.peer, memory.ctypes.data, _pieces_of(remote, first, last))
                if len(reading) == 2:
                    self._finish(reading, request, sums, stream, pull)
            while reading:
                self._finish(reading, request, sums, stream, pull)
        except BaseException:
            staging.is_lost = bool(reading)  # abandoned reads may still write
            for read in reading:
                if read.handle is not None:
                    self.abandon(read.handle)
            raise
        finally:
            self._return_staging(staging)

    def _finish(
        self, reading: list[Read], request: PullRequest, sums: NDArray[np.uint64], stream: Stream, pull: Pull
    ) -> None:
        """Wait for the oldest window, verify it and copy it to its place."""
        read = reading[0]
        pause = FIRST_LOOK
        while not self.is_done(read.handle):
            pull.check()
            if time.monotonic_ns() > stream.deadline:
                raise DeadlineExceeded(f"{stream.peer} did not deliver before the deadline; import again")
            if pause >= LONGEST_LOOK and _has_ended(stream):
                raise PeerLost(f"{stream.peer} ended while its memory was read; import from another exporter")
            time.sleep(pause)
            pause = min(LONGEST_LOOK, 2 * pause)
        reading.pop(0)
        self.forget(read.handle)
        units = request.units
        sizes = np.diff(_totals(units)[read.first : read.last + 1])
        base = read.memory.ctypes.data
        offsets = np.cumsum(sizes) - sizes
        staged = np.stack([base + offsets, sizes], axis=1).astype(np.uint64)
        each = np.arange(1, len(sizes) + 1)
        verify(staged, each, request.seeds[read.first : read.last], sums[read.first : read.last], stream.peer)
        scatter_pieces(read.memory, _pieces_of(units, read.first, read.last))

    def _take_staging(self, half: int, deadline: int, pull: Pull) -> Staging:
        """Return staging memory with windows of `half` bytes or more; wait while others use it."""
        with self._memory_lock:
            while True:
                usable = [each for each in self._staging if not each.is_lost and each not in self._in_use]
                fitting = [each for each in usable if len(each.memory) >= 2 * half]
                if fitting or len(self._staging) < MAX_STAGING:
                    break
                if all(each.is_lost for each in self._staging):
                    raise HandoverError(
                        f"all {MAX_STAGING} staging memories are lost to abandoned reads; close the transport "
                        "and make a new one"
                    )
                if usable:  # too small
                    self.unregister(usable[0].memory.ctypes.data)
                    self._staging.remove(usable[0])
                    continue
                pull.check()
                if time.monotonic_ns() > deadline:
                    raise DeadlineExceeded("other imports used all staging memory until the deadline; import again")
                self._memory_lock.wait(0.01)
            if fitting:
                taken = fitting[0]
            else:
                taken = Staging(np.empty(2 * half, np.uint8))
                self.register(taken.memory.ctypes.data, taken.memory.nbytes)
                self._staging.append(taken)
            self._in_use.append(taken)
            return taken

    def _return_staging(self, staging: Staging) -> None:
        with self._memory_lock:
            self._in_use.remove(staging)
            self._memory_lock.notify_all()

    @property
    def num_lost_bytes(self) -> int:
        """Bytes of staging memory that abandoned reads may still write."""
        return sum(each.memory.nbytes for each in self._staging if each.is_lost)

    def release_memory(self) -> None:
        """End every read, and then release all staging memory."""
        with self._memory_lock:
            self.close_engine()
            self._staging.clear()
            self._registered.clear()


def _granted_units(grant: Grant, peer: str) -> tuple[Units, NDArray[np.uint64]]:
    """Return the exporter's units and their sums."""
    pieces = np.frombuffer(grant.pieces, "<u8").astype(np.uint64)
    ends = np.frombuffer(grant.ends, "<i8").astype(np.int64)
    sums = np.frombuffer(grant.sums, "<u8").astype(np.uint64)
    units = Units(pieces[: len(pieces) // 2 * 2].reshape(-1, 2), ends)
    ascending = (np.diff(ends, prepend=0) >= 0).all() and (len(ends) == 0 or ends[-1] == len(units.pieces))
    if len(ends) != grant.num_units or len(sums) != len(ends) or not ascending or units.nbytes != grant.nbytes:
        raise CorruptTransfer(f"{peer} sent a grant that contradicts itself; export the sequence again")
    return units, sums


def _totals(units: Units) -> NDArray[np.int64]:
    """Return the bytes before each unit, and those of all: int64 ``[n + 1]``."""
    before = np.concatenate([[0], np.cumsum(units.pieces[:, 1].astype(np.int64))])
    return np.concatenate([[0], before[units.ends]])


def _bytes_of(units: Units, first: int, last: int) -> int:
    return int(_pieces_of(units, first, last)[:, 1].sum())


def _pieces_of(units: Units, first: int, last: int) -> Pieces:
    return units.pieces[int(units.ends[first - 1]) if first else 0 : int(units.ends[last - 1])]


def _has_ended(stream: Stream) -> bool:
    """Return True if the peer has closed its connection; it sends nothing between the grant and the end."""
    try:
        return stream.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
