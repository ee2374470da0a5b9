"""ZeroMQ sockets of publishers and subscribers."""

from __future__ import annotations

from typing import Any

from pagecore.errors import UnsupportedOption, shown
from pagecore.tiers.events.wire import optional


def library() -> Any:
    """Return pyzmq; raise UnsupportedOption that names the extra if it is missing."""
    return optional("zmq")


def opened(kind: str, endpoint: object, name: str, *, binds: bool, limit: int = 0) -> Any:
    """Return a socket of a kind ("PUB", "ROUTER" ...) that is bound or connected to an endpoint.

    Parameters
    ----------
    endpoint : str
        Such as ``"tcp://127.0.0.1:5557"``, or ``"ipc:///run/events"``.
    name : str
        Name of the argument, for messages.
    limit : int
        Messages that wait for or from each peer; 0 for no limit.
    """
    zmq = library()
    if not isinstance(endpoint, str) or "://" not in endpoint:
        raise UnsupportedOption(
            f"{name} is {shown(endpoint)}; use an address such as 'tcp://*:5557' or 'ipc:///tmp/events'"
        )
    socket = zmq.Context.instance().socket(getattr(zmq, kind))
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, limit)
    socket.set(zmq.RCVHWM, limit)
    try:
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        remedy = "another process uses it; use another port, or '*'" if error.errno == zmq.EADDRINUSE else str(error)
        raise UnsupportedOption(
            f"{name} {endpoint!r} cannot be {'bound' if binds else 'connected'}: {remedy}"
        ) from None
    return socket


def bound_to(socket: Any, endpoint: str) -> str:
    """Return the address of a socket, with the port that the system chose for ``*``."""
    zmq = library()
    address = socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0")
    return address.replace("0.0.0.0", "127.0.0.1") if address else endpoint


def is_bound_by_publisher(endpoint: object) -> bool:
    """Return True for addresses that a publisher binds, False for those that it connects to, as vLLM decides."""
    return isinstance(endpoint, str) and ("*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc", "inproc")))
