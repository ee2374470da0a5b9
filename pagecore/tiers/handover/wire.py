"""Messages between the two sides of a hand-over, and the stream that carries them.

    importer                                exporter
    Claim  -------------------------------->
           <-------------------------------- Grant, or Refusal
           <-------------------------------- batches: sums of the units, and then their bytes     (streamed)
    End    -------------------------------->                                                     (one-sided: reads)

A claim with a lease asks for nothing, and is answered without a grant: the exporter keeps the rows for that long, or
counts one reader as served if the lease is 0.
A message is its length (4 bytes, big-endian) and MessagePack. A batch holds units of about 1 MiB, so that the exporter
sums them while it has them in its cache; both sides cut batches alike.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import ShapeError
from pagecore.tiers.handover._vectors import receive_pieces, send_pieces, sum_units
from pagecore.tiers.handover.codec import pack, unpack
from pagecore.tiers.handover.errors import CorruptTransfer, DeadlineExceeded, PeerLost
from pagecore.tiers.handover.pieces import Ends, Pieces, Units

T = TypeVar("T")
WIRE_VERSION = 3
MESSAGE_BYTES_MAX = 64 << 20
BATCH_BYTES = 1 << 20
SOCKET_BUFFER_BYTES = 4 << 20
_LENGTH = struct.Struct(">I")

TIMED_OUT, CLOSED = -1, -2


@dataclass(frozen=True)
class Part:
    """Units of one group that an importer asks for.

    Attributes
    ----------
    group : int
    cut : int
        Tokens of a unit; unit i holds the tokens from ``i * cut``.
    units : bytes
        Numbers of the units, int32 in little-endian order, ascending.
    first_layer, num_layers : int
        Layers, numbered within the exporter's group.
    first_head, num_heads : int
        Heads, numbered on the exporter's rank.
    with_heads, without_heads, head_outer : bool
        As for `token_units`.
    """

    group: int
    cut: int
    units: bytes
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    with_heads: bool
    without_heads: bool
    head_outer: bool

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Numbers of the units."""
        return np.frombuffer(self.units, "<i4").astype(np.int64)


@dataclass(frozen=True)
class Claim:
    """A request for parts of an export; `is_streamed` False asks for addresses instead of bytes.

    With `lease` it asks for nothing: the exporter keeps the rows for that many seconds more, at least; 0 gives the part
    of one reader up.
    """

    version: int
    export: bytes
    is_streamed: bool
    parts: list[Part]
    wants_state: bool
    wants_checkpoint: bool
    peer: bytes = b""
    lease: float | None = None


@dataclass(frozen=True)
class Grant:
    """Consent to a claim.

    Attributes
    ----------
    nbytes, num_units : int
        What will be delivered.
    lease : float
        Seconds that are left of the lease.
    pieces, ends, sums : bytes
        For one-sided reads: uint64 address and bytes of each piece, the number of pieces up to the end of each unit
        (int64), and the sum of each unit (uint64).
    peer : bytes
        For one-sided reads: what the transport needs to reach the exporter's memory.
    """

    nbytes: int
    num_units: int
    lease: float
    pieces: bytes = b""
    ends: bytes = b""
    sums: bytes = b""
    peer: bytes = b""


@dataclass(frozen=True)
class Refusal:
    """Refusal of a claim; `kind` names the error that the importer raises."""

    kind: str
    text: str


@dataclass(frozen=True)
class Answer:
    """A grant or a refusal."""

    grant: Grant | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True)
class End:
    """End of a claim; `is_complete` if all bytes arrived and were verified."""

    is_complete: bool


@dataclass
class Stream:
    """A connected socket with messages and pieces.

    Attributes
    ----------
    connection : socket.socket
    deadline : int
        Nanoseconds of `time.monotonic_ns` after which every call fails.
    peer : str
        Name of the other side for messages.
    """

    connection: socket.socket
    deadline: int
    peer: str
    moved: int = field(default=0)

    def send(self, message: object) -> None:
        """Send a message."""
        body = pack(message)
        data = np.frombuffer(_LENGTH.pack(len(body)) + body, np.uint8)
        self.send_pieces(_whole(data))

    def receive(self, kind: type[T]) -> T:
        """Receive a message; raise CorruptTransfer for one that cannot be read."""
        head = np.empty(_LENGTH.size, np.uint8)
        self.receive_pieces(_whole(head))
        (nbytes,) = _LENGTH.unpack(head.tobytes())
        if nbytes > MESSAGE_BYTES_MAX:
            raise CorruptTransfer(
                f"{self.peer} announces a message of {nbytes} bytes; the limit is {MESSAGE_BYTES_MAX}: check that the "
                "address is that of a pagecore transport"
            )
        body = np.empty(nbytes, np.uint8)
        self.receive_pieces(_whole(body))
        try:
            return unpack(kind, body.tobytes(), "message")
        except ShapeError as error:
            raise CorruptTransfer(f"{self.peer} sent something else than {kind.__name__}: {error}") from None

    def send_pieces(self, pieces: Pieces) -> None:
        """Send the bytes of all pieces."""
        status, moved = send_pieces(self.connection.fileno(), pieces, self.deadline)
        self._check(status, moved, pieces)

    def receive_pieces(self, pieces: Pieces) -> None:
        """Receive the bytes of all pieces into their memory."""
        status, moved = receive_pieces(self.connection.fileno(), pieces, self.deadline)
        self._check(status, moved, pieces)

    def _check(self, status: int, moved: int, pieces: Pieces) -> None:
        self.moved += moved
        if status == 0:
            return
        expected = int(pieces[:, 1].sum())
        if status == TIMED_OUT:
            raise DeadlineExceeded(
                f"{self.peer} moved {moved} of {expected} bytes before the deadline; import again with a longer one"
            )
        if status in (CLOSED, errno.EBADF, errno.ENOTCONN):
            raise PeerLost(
                f"{self.peer} closed the connection after {moved} of {expected} bytes; it ended, or the lease did"
            )
        raise PeerLost(f"the connection to {self.peer} failed: {os.strerror(status)}; {moved} bytes had moved")


def batches(ends: Ends, pieces: Pieces, most: int = BATCH_BYTES) -> list[tuple[int, int]]:
    """Return the units (first, last + 1) of each batch of up to `most` bytes; the sizes of units alone decide."""
    totals = np.concatenate([[0], np.cumsum(pieces[:, 1].astype(np.int64))])[ends]
    cut: list[tuple[int, int]] = []
    first, before = 0, 0
    while first < len(totals):
        last = max(first + 1, int(np.searchsorted(totals, before + most, side="right")))
        cut.append((first, last))
        first, before = last, int(totals[last - 1])
    return cut


def send_units(stream: Stream, units: Units, seeds: NDArray[np.uint64], check: Callable[[], None]) -> None:
    """Send all units in batches, the sums of each batch first; `check` raises if the sums may be of other tokens."""
    for first, last in batches(units.ends, units.pieces):
        begin = int(units.ends[first - 1]) if first else 0
        pieces = units.pieces[begin : units.ends[last - 1]]
        sums = sum_units(pieces, units.ends[first:last] - begin, seeds[first:last])
        check()
        stream.send_pieces(np.concatenate([_whole(sums.view(np.uint8)), pieces]))


def receive_units(stream: Stream, units: Units, seeds: NDArray[np.uint64]) -> None:
    """Receive all units into their memory; raise CorruptTransfer at the first batch whose sums differ."""
    for first, last in batches(units.ends, units.pieces):
        begin = int(units.ends[first - 1]) if first else 0
        pieces = units.pieces[begin : units.ends[last - 1]]
        sums = np.empty(last - first, np.uint64)
        stream.receive_pieces(np.concatenate([_whole(sums.view(np.uint8)), pieces]))
        verify(pieces, units.ends[first:last] - begin, seeds[first:last], sums, stream.peer)


def verify(pieces: Pieces, ends: Ends, seeds: NDArray[np.uint64], sums: NDArray[np.uint64], peer: str) -> None:
    """Raise CorruptTransfer unless the units have these sums."""
    wrong = sum_units(pieces, ends, seeds) != sums
    if wrong.any():
        raise CorruptTransfer(
            f"{int(wrong.sum())} of {len(sums)} units from {peer} differ from their sums, so that bytes changed on the "
            "way or at the exporter; import again"
        )


def seeds_of(export: bytes, lanes: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the seed of each unit's sum, from the export, the group (or lane of states) and the unit's number."""
    nonce = np.frombuffer(export[:8], "<u8").astype(np.uint64)[0]
    seeds: NDArray[np.uint64] = nonce ^ (lanes.astype(np.uint64) << np.uint64(40)) ^ numbers.astype(np.uint64)
    return seeds


def _whole(memory: NDArray[np.uint8]) -> Pieces:
    """Return the one piece of a contiguous array, which must live until the piece is used."""
    return np.array([[memory.ctypes.data, memory.nbytes]], np.uint64)
