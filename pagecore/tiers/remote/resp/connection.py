"""One connection to a server that speaks RESP2, received into the memory of the caller."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pagecore.errors import StoreError
from pagecore.tiers.remote.resp.address import Address
from pagecore.tiers.remote.store import Full

# Bytes received at once for lines of replies; what follows of a payload in it is copied.
LINES = 4096
LONGEST_LINE = 64 * 1024
# Seconds between two looks for an abort while connecting.
LOOK = 0.02
# Buffers in one sendmsg; Linux refuses more than 1,024.
MOST_BUFFERS = 512
REMEDIES = {
    "NOAUTH": "put user and password into the URL",
    "WRONGPASS": "put the right user and password into the URL",
    "NOPERM": "allow the commands GET, SET, TOUCH and UNLINK on keys pc1:* to the user",
    "OOM": "set maxmemory-policy to allkeys-lru, or raise maxmemory",
    "READONLY": "connect to the primary instead of a replica",
    "LOADING": "wait until the server has loaded its data",
    "MISCONF": "set save to an empty string: blocks need no snapshots",
    "MOVED": "connect to a server that is not part of a cluster, or to a proxy",
}


class ReplyError(StoreError):
    """The server answered a command with an error; the connection remains usable."""

    @property
    def reason(self) -> str:
        """The message, as `Full` if the server has no memory left."""
        return Full(self) if self.code == "OOM" else str(self)

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class ProtocolError(StoreError):
    """The peer sent bytes that are not RESP2; the connection is not usable."""


class RespConnection:
    """Blocking connection; sends and receives release the GIL.

    Each call ends after its timeout, whatever signals the thread receives, until `wait_in_kernel`.

    Parameters
    ----------
    address : Address
    timeout : float
        Seconds without progress after which connecting, sending or receiving raises TimeoutError.
    context : ssl.SSLContext or None
        Used with rediss://; None checks the certificate against the authorities of the system.
    """

    def __init__(self, address: Address, *, timeout: float, context: ssl.SSLContext | None = None) -> None:
        self.address = address
        self._timeout = timeout
        self._context = context
        self._buffer = bytearray(LINES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._is_aborted = False
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Connect, and check that the peer is a Redis server.

        Raises
        ------
        StoreError
            No server answers there, it is not a Redis server, or it refuses user or database.
        """
        try:
            self._connect()
        except OSError as error:  # ssl.SSLError is one
            self.close()
            raise StoreError(
                f"{self.address.name} cannot be reached: {error}; start a server there or correct the URL"
            ) from error
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        address = self.address
        places: list[tuple[int, Any]]
        if address.path is not None:
            places = [(socket.AF_UNIX, address.path)]
        else:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            places = [(family, place) for family, _, _, _, place in found]
        for family, place in places:
            try:
                self._socket = socket.socket(family, socket.SOCK_STREAM)
                self._reach(self._socket, place)
                break
            except OSError:
                self.close()
                if (family, place) == places[-1]:
                    raise
        assert self._socket is not None
        if address.path is None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(self._timeout)
        if address.has_tls:
            context = self._context or ssl.create_default_context()
            self._socket = context.wrap_socket(
                self._socket, server_hostname=address.host, do_handshake_on_connect=False
            )
            self._socket.do_handshake()

    def wait_in_kernel(self) -> None:
        """Let the kernel keep time, so that one call can receive a whole payload; not with TLS.

        A call then begins to wait again after each signal, so that its thread should block signals.
        """
        assert self._socket is not None
        if self.address.has_tls:
            return
        self._socket.setblocking(True)
        limit = struct.pack("ll", int(self._timeout), int(self._timeout % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _reach(self, connecting: socket.socket, place: Any) -> None:
        """Connect a socket; look for an abort now and then, because an unconnected socket cannot be shut down."""
        connecting.setblocking(False)
        limit = time.monotonic() + self._timeout
        poller = select.poll()
        poller.register(connecting, select.POLLOUT)
        code = connecting.connect_ex(place)
        while code in {errno.EINPROGRESS, errno.EALREADY, errno.EAGAIN}:
            if self._is_aborted:
                raise ConnectionAbortedError("cancelled")
            if time.monotonic() > limit:
                raise TimeoutError(f"no connection within {self._timeout} s")
            is_ready = poller.poll(1000 * LOOK)
            if code == errno.EAGAIN:  # the queue of a Unix socket is full
                time.sleep(LOOK)
                code = connecting.connect_ex(place)
            elif is_ready:
                code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def _greet(self) -> None:
        address = self.address
        commands: list[tuple[bytes, ...]] = []
        if address.password is not None:
            user = () if address.user is None else (address.user.encode(),)
            commands.append((b"AUTH", *user, address.password.encode()))
        if address.database:
            commands.append((b"SELECT", str(address.database).encode()))
        commands.append((b"PING",))
        try:
            if self._is_aborted:
                raise ConnectionAbortedError("cancelled")
            for command in commands:
                self.send([encode(*command)])
                answer = self.line()
                expected = b"+PONG" if command[0] == b"PING" else b"+OK"
                if answer != expected:
                    raise ProtocolError(
                        f"{address.name} answered {command[0].decode()} with {answer[:60]!r} instead of {expected!r}; "
                        "expected a Redis or Valkey server there"
                    )
        except TimeoutError:
            raise StoreError(
                f"{address.name} did not answer within {self._timeout} s; expected a Redis or Valkey server there"
            ) from None
        except ConnectionError as error:
            raise StoreError(
                f"{address.name} closed the connection ({error}); expected a Redis or Valkey server there"
            ) from None

    # ---- sending ----

    def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send all of `buffers`."""
        assert self._socket is not None
        if self.address.has_tls:
            for buffer in buffers:
                self._socket.sendall(buffer)
            return
        views = [memoryview(buffer) for buffer in buffers]
        index = 0
        while index < len(views):
            try:
                sent = self._socket.sendmsg(views[index : index + MOST_BUFFERS])
            except BlockingIOError:
                raise TimeoutError(f"{self.address.name} took nothing for {self._timeout} s") from None
            while index < len(views) and sent >= len(views[index]):
                sent -= len(views[index])
                index += 1
            if sent:
                views[index] = views[index][sent:]

    # ---- receiving ----

    def line(self) -> bytes:
        """Return the next line without its CRLF.

        Raises
        ------
        ReplyError
            The line is an error reply.
        ProtocolError
            The line is not the beginning of a reply.
        """
        parts = b""
        while True:
            at = self._buffer.find(b"\r\n", self._begin, self._end)
            if at >= 0:
                line = parts + bytes(self._view[self._begin : at])
                self._begin = at + 2
                break
            # A CR at the end of the buffer may be followed by its LF; both are found in the next round.
            parts += bytes(self._view[self._begin : self._end])
            if len(parts) > LONGEST_LINE or (parts and parts[:1] not in b"+-:$*"):
                raise self._not_resp(parts)
            keep = 1 if parts.endswith(b"\r") else 0
            parts = parts[: len(parts) - keep]
            self._buffer[:keep] = b"\r"[:keep]
            self._begin, self._end = 0, keep + self._receive(self._view[keep:])
        if line[:1] not in (b"+", b"-", b":", b"$", b"*"):
            raise self._not_resp(line)
        if line[:1] == b"-":
            raise self._reply_error(line)
        return line

    def into(self, target: memoryview) -> None:
        """Receive exactly the bytes of `target`."""
        ready = min(len(target), self._end - self._begin)
        if ready:
            target[:ready] = self._view[self._begin : self._begin + ready]
            self._begin += ready
        while ready < len(target):
            ready += self._receive(target[ready:], wait_all=True)

    def skip(self, nbytes: int) -> None:
        """Receive bytes and drop them."""
        scratch = memoryview(bytearray(min(nbytes, 1 << 16)))
        while nbytes:
            part = scratch[: min(nbytes, len(scratch))]
            self.into(part)
            nbytes -= len(part)

    def end_bulk(self) -> None:
        """Receive the CRLF after a bulk string."""
        end = bytearray(2)
        self.into(memoryview(end))
        if end != b"\r\n":
            raise self._not_resp(bytes(end))

    def _receive(self, target: memoryview, *, wait_all: bool = False) -> int:
        assert self._socket is not None
        try:
            flags = socket.MSG_WAITALL if wait_all and not self.address.has_tls else 0
            count = self._socket.recv_into(target, len(target), flags)
        except BlockingIOError:
            raise TimeoutError(f"{self.address.name} sent nothing for {self._timeout} s") from None
        if not count:
            raise ConnectionResetError(f"{self.address.name} closed the connection")
        return count

    def _not_resp(self, got: bytes) -> ProtocolError:
        return ProtocolError(f"expected a reply in RESP2 from {self.address.name}, got {got[:60]!r}; check the URL")

    def _reply_error(self, line: bytes) -> ReplyError:
        text = line[1:].decode(errors="replace")
        code = text.split(" ")[0]
        remedy = f"; {REMEDIES[code]}" if code in REMEDIES else ""
        return ReplyError(f"{self.address.name} answered: {text}{remedy}", code)

    # ---- end ----

    def abort(self) -> None:
        """Let a running call of another thread raise soon."""
        self._is_aborted = True
        current = self._socket
        if current is not None:
            with suppress(OSError):  # the method of SSLSocket would change its state under the other thread
                socket.socket.shutdown(current, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()


def encode(*arguments: bytes) -> bytes:
    """Return a command as an array of bulk strings."""
    parts = [b"*%d\r\n" % len(arguments)]
    parts += [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"".join(parts)
