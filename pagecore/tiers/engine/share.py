"""Host pools shared between processes: the descriptor of their memory travels over a Unix socket."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import SupportsIndex

from pagecore.errors import PeerError, UnsupportedOption
from pagecore.storage import HostMemory, HostPool, Spec, StateSpec
from pagecore.storage.checks import shown
from pagecore.tiers.engine.geometry import geometry_values, packed, read_geometry, unpacked, with_own_specs

KIND = "host pool"
# Magic and bytes of the message that follows.
HEADER = struct.Struct("<8sI")
MAGIC = b"pagecore"
MESSAGE_BYTES_MAX = 16 << 20


def export_pool(pool: HostPool, connection: socket.socket, *, timeout: float | None = 10.0) -> None:
    """Send a host pool to the process at the other end of a Unix socket, which calls `open_pool`.

    The bytes stay in place; the descriptor of the memory and its geometry are sent. Both processes then read and write
    the same memory, without any order between them: they have to agree on who writes which entry, for example by the
    ids of a free list that one of them owns. The memory lives as long as one of them maps it.

    Parameters
    ----------
    pool : HostPool
        Made with ``shared=True``.
    connection : socket.socket
        A connected Unix stream socket.
    timeout : float, optional
        Seconds to wait for the peer; None waits without a limit.

    Raises
    ------
    UnsupportedOption
        An object that is not a host pool in shared memory, or a socket of another family.
    PeerError
        The peer closed the connection, or does not read.
    """
    if not isinstance(pool, HostPool):
        raise UnsupportedOption(f"pool is {shown(pool)}; expected a HostPool")
    fd = None if pool.memory is None else pool.memory.fd
    if fd is None or pool.memory is None:
        raise UnsupportedOption(f"{pool!r} is not in shared memory, or closed; make it with shared=True")
    message = packed(KIND, {"nbytes": pool.memory.nbytes} | geometry_values(pool.geometry))
    with _peer(connection, timeout):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        header = HEADER.pack(MAGIC, len(message))
        sent = connection.sendmsg([header], rights)
        connection.sendall(header[sent:] + message)


def open_pool(
    connection: socket.socket,
    *,
    groups: Iterable[tuple[Spec, SupportsIndex]] | None = None,
    state_specs: Iterable[StateSpec] | None = None,
    block_size: SupportsIndex | None = None,
    device: str = "cpu",
    timeout: float | None = 10.0,
) -> HostPool:
    """Open the host pool that the process at the other end of a Unix socket exports; no bytes are copied.

    Parameters
    ----------
    connection : socket.socket
        A connected Unix stream socket.
    groups, state_specs, block_size
        As for `HostPool`: expected specs, which the pools of the result then have. By default the peer's planes are
        accepted as they are; specs then lack all options of attention.
    device : str
        "cpu", or a CUDA device of this process, with which the memory is registered.
    timeout : float, optional
        Seconds to wait for the peer; None waits without a limit.

    Returns
    -------
    HostPool
        Its `kv_pools` and `state_pool` adopt the shared memory. `close` leaves the peer's pool as it is.

    Raises
    ------
    PeerError
        The peer closed the connection, did not send in time, or sent something else than a pool.
    ShapeError
        Another geometry than expected.
    UnsupportedOption
        A socket of another family; a descriptor that is not sealed shared memory.
    """
    with _peer(connection, timeout):
        fds: list[int] = []
        try:
            message = _received(connection, fds)
            content = unpacked(KIND, message)
            geometry = with_own_specs(read_geometry(content), groups, state_specs, block_size)
            if len(fds) != 1:
                raise PeerError(f"the peer sent {len(fds)} descriptors; expected 1")
            memory = HostMemory.from_fd(fds.pop(), content.get("nbytes", 0))
        finally:
            for fd in fds:
                os.close(fd)
    return HostPool.over(memory, geometry, device)


@contextmanager
def _peer(connection: socket.socket, timeout: float | None) -> Iterator[None]:
    """Check a socket, and raise its errors as PeerError; its own timeout is restored."""
    if not isinstance(connection, socket.socket) or connection.family != socket.AF_UNIX:
        raise UnsupportedOption(f"connection is {shown(connection)}; descriptors travel over a connected Unix socket")
    if connection.type & socket.SOCK_STREAM != socket.SOCK_STREAM:
        raise UnsupportedOption("connection is not a stream socket; use socket.SOCK_STREAM")
    before = connection.gettimeout()
    try:
        connection.settimeout(timeout)
        yield
    except TimeoutError as error:
        raise PeerError(f"the peer did not answer within {timeout} seconds") from error
    except OSError as error:
        if isinstance(error, PeerError):
            raise
        raise PeerError(f"the peer closed the connection: {error}") from error
    finally:
        with suppress(OSError):  # the caller may have closed it
            connection.settimeout(before)


def _received(connection: socket.socket, fds: list[int]) -> bytes:
    """Return the message of the peer; the descriptors that come along are appended to `fds`."""
    magic, size = HEADER.unpack(_exactly(connection, HEADER.size, fds))
    if magic != MAGIC or size > MESSAGE_BYTES_MAX:
        raise PeerError(f"the peer sent {magic!r} and a size of {size}; expected the export of a pool")
    return _exactly(connection, size, fds)


def _exactly(connection: socket.socket, size: int, fds: list[int]) -> bytes:
    room = socket.CMSG_SPACE(16 * array.array("i").itemsize)
    data = bytearray()
    while len(data) < size:
        part, controls, _, _ = connection.recvmsg(min(size - len(data), 1 << 16), room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in controls:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                fds.extend(numbers)
        if not part:
            raise PeerError(f"the peer closed the connection after {len(data)} of {size} bytes")
        data += part
    return bytes(data)
