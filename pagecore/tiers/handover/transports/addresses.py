"""Addresses of transports: ``tcp://host:port`` and ``unix:///path``."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import time

from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import shown
from pagecore.tiers.handover.errors import DeadlineExceeded, PeerLost
from pagecore.tiers.handover.wire import SOCKET_BUFFER_BYTES

Place = tuple[int, object]


def parse(address: object) -> Place:
    """Return the family and the address of a socket.

    Raises
    ------
    UnsupportedOption
        Anything but ``tcp://host:port`` or ``unix:///path``.
    """
    if isinstance(address, str):
        kind, _, rest = address.partition("://")
        if kind == "unix" and rest:
            return socket.AF_UNIX, rest
        host, _, port = rest.rpartition(":")
        if kind == "tcp" and host and port.isdecimal() and int(port) < 65536:
            host = host.strip("[]")
            return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))
    raise UnsupportedOption(f"address is {shown(address)}; give 'tcp://host:port' or 'unix:///path'")


def listen(address: str) -> tuple[socket.socket, str]:
    """Return a listening socket, and its address with the port that it got.

    Raises
    ------
    UnsupportedOption
        An invalid address, or one that cannot be bound.
    """
    family, place = parse(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_UNIX:
            _remove_stale(str(place))
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)  # type: ignore[arg-type]
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise UnsupportedOption(
            f"cannot listen at {address}: {error.strerror or error}; use a free port, or a path in a folder that exists"
        ) from None
    listener.setblocking(False)
    if family == socket.AF_UNIX:
        return listener, address
    host, port = listener.getsockname()[:2]
    return listener, f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def _remove_stale(path: str) -> None:
    """Remove the socket file of a process that has ended; leave one that answers, and any other file."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)


def connect(address: str, deadline: int) -> socket.socket:
    """Return a connected socket.

    Raises
    ------
    PeerLost
        Nothing answers at the address.
    DeadlineExceeded
        The deadline passed.
    """
    family, place = parse(address)
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        enlarge(connection)
        connection.setblocking(False)
        status = connection.connect_ex(place)  # type: ignore[arg-type]
        if status in (errno.EINPROGRESS, errno.EAGAIN):
            left = max(0, deadline - time.monotonic_ns()) / 1e6
            waiting = select.poll()
            waiting.register(connection, select.POLLOUT)
            if not waiting.poll(left):
                raise DeadlineExceeded(f"{address} did not answer before the deadline; import again with a longer one")
            status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            raise PeerLost(f"nothing answers at {address}: {os.strerror(status)}; check that the exporter runs")
    except (socket.gaierror, UnicodeError) as error:  # the codec of host names refuses some
        connection.close()
        raise PeerLost(f"the host of {address} is not known: {error}; check the exporter's address") from None
    except BaseException:
        connection.close()
        raise
    return connection


def enlarge(connection: socket.socket) -> None:
    """Give a connection large buffers, and send small messages at once."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
