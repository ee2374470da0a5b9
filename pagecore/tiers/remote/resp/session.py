"""Lookups, loads, stores and removals of blocks over one connection to Redis."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers import payload
from pagecore.tiers.remote.resp.connection import ProtocolError, ReplyError, RespConnection, encode
from pagecore.tiers.store import Keys, Pieces

# The protocol allows bulk strings of 512 MiB.
LONGEST_BULK = 512 << 20
# Bytes of values that are requested ahead: a server that answers more of them copies each into memory out of its cache.
WINDOW_BYTES = 1 << 20


class RespSession:
    """Operations on blocks; each pipelines its commands and receives payloads into their pieces.

    A value is the frame of the payload, 24 bytes, and the payload. TOUCH finds entries, because it renews their time
    of use for the LRU policies, which EXISTS does not.
    """

    def __init__(self, connection: RespConnection, prefix: bytes, ttl: int | None) -> None:
        self._connection = connection
        self._prefix = prefix
        options = (b"NX",) if ttl is None else (b"NX", b"EX", str(ttl).encode())
        self._set_arguments = 3 + len(options)
        self._options = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in options)

    def open(self) -> None:
        """Open the connection, whose thread blocks signals."""
        self._connection.open()
        self._connection.wait_in_kernel()

    def lookup(self, keys: Keys, ok: NDArray[np.bool_]) -> str | None:
        """Find entries."""
        self._ask(keys)
        return self._found(keys, ok)

    def _ask(self, keys: Keys) -> None:
        """Send the requests of a lookup."""
        self._connection.send([b"".join(encode(b"TOUCH", name) for name in self._names(keys))])

    def _found(self, keys: Keys, ok: NDArray[np.bool_]) -> str | None:
        """Receive the replies of a lookup."""
        error = None
        for index in range(len(keys)):
            try:
                ok[index] = self._connection.line() == b":1"
            except ReplyError as reply:
                error = str(reply)
        return error

    def load(self, keys: Keys, pieces: Pieces, ok: NDArray[np.bool_]) -> str | None:
        """Receive entries into their pieces, and verify them; an entry that fails is deleted."""
        names = self._names(keys)
        requests = [encode(b"GET", name) for name in names]
        sizes = pieces[:, 1].tolist()
        spoilt = []
        error = None
        num_sent = waiting = 0
        for index, name in enumerate(names):
            begin = num_sent
            while num_sent == index or (num_sent < len(names) and waiting + sizes[num_sent] <= WINDOW_BYTES):
                waiting += sizes[num_sent]
                num_sent += 1
            if num_sent > begin:
                self._connection.send([b"".join(requests[begin:num_sent])])
            waiting -= sizes[index]
            try:
                frame = self._receive(pieces[index])
            except ReplyError as reply:
                error = str(reply)
                continue
            if frame is not None:
                # The payload is in the processor's cache now.
                one = slice(index, index + 1)
                ok[index] = frame == payload.frames_of(keys[one], pieces[one]).tobytes()
                spoilt += [] if ok[index] else [name]
        if spoilt:
            self._delete(spoilt)  # a server that refuses keeps the entries, which fail again
            error = f"{len(spoilt)} entries differed from their sums or sizes and were deleted"
        return error

    def store(self, keys: Keys, pieces: Pieces, ok: NDArray[np.bool_]) -> str | None:
        """Send the entries that do not exist."""
        self._ask(keys)
        frames = payload.frames_of(keys, pieces)  # while the server answers
        self._found(keys, ok)
        absent = np.flatnonzero(~ok).tolist()
        names = self._names(keys)
        buffers: list[bytes | memoryview] = []
        for index in absent:
            frame = frames[index]
            address, nbytes = pieces[index].tolist()
            name = names[index]
            head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n" % (self._set_arguments, len(name), name)
            buffers.append(head + b"$%d\r\n" % (payload.FRAME_BYTES + nbytes) + frame.tobytes())
            buffers.append(payload.view(address, nbytes))
            buffers.append(self._options)
        self._connection.send(buffers)
        error = None
        for index in absent:
            try:
                ok[index] = self._connection.line() in (b"+OK", b"$-1")
            except ReplyError as reply:
                error = reply.reason
        return error

    def remove(self, keys: Keys, ok: NDArray[np.bool_]) -> str | None:
        """Delete entries, whose memory the server frees in the background."""
        error = self._delete(self._names(keys))
        ok[:] = error is None
        return error

    def abort(self) -> None:
        """Let a running call raise."""
        self._connection.abort()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _names(self, keys: Keys) -> list[bytes]:
        return [self._prefix + key.tobytes() for key in keys]

    def _receive(self, piece: NDArray[np.uint64]) -> bytes | None:
        """Receive one value into a piece; return its frame, b"" if it has another size, or None if there is none."""
        connection = self._connection
        line = connection.line()
        if line == b"$-1":
            return None
        size = int(line[1:]) if line[:1] == b"$" and line[1:].isdigit() else -1
        if not 0 <= size <= LONGEST_BULK:
            raise ProtocolError(f"expected a bulk string from {connection.address.name}, got {line[:60]!r}")
        address, nbytes = piece.tolist()
        frame = bytearray(payload.FRAME_BYTES if size == payload.FRAME_BYTES + nbytes else 0)
        if frame:
            connection.into(memoryview(frame))
            connection.into(payload.view(address, nbytes))
        else:
            connection.skip(size)
        connection.end_bulk()
        return bytes(frame)

    def _delete(self, names: list[bytes]) -> str | None:
        self._connection.send([encode(b"UNLINK", *names)])
        try:
            self._connection.line()
        except ReplyError as reply:
            return str(reply)
        return None
