"""A TCP proxy that cuts, hangs, flips and refuses."""

from __future__ import annotations

import contextlib
import select
import socket
import threading


class Proxy:
    """Forward connections to a server on loopback; a thread each, and one that accepts.

    Faults act on the bytes that the server sends: `cut_after` closes a connection after that number of them,
    `hang_after` forwards no more, `flip_at` changes one bit of one byte. Positions count from the last `reset`, over
    all connections. `refuse` closes the port. `released` lets hanging connections go on.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.target = (host, port)
        self.cut_after = self.hang_after = self.flip_at = None
        self.count = 0
        self.released = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._accept_from(self._listener)

    def reset(self, **faults: int | None) -> None:
        """Count from zero, with new faults."""
        self.cut_after = self.hang_after = self.flip_at = None
        self.count = 0
        self.released.clear()
        for name, value in faults.items():
            setattr(self, name, value)

    def refuse(self) -> None:
        """Close the port and all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def accept(self) -> None:
        """Open the port again."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._accept_from(self._listener)

    def cut(self) -> None:
        """Close all connections."""
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.released.set()
        self.refuse()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept_from(self, listener: socket.socket) -> None:
        self._spawn(self._run, listener)

    def _spawn(self, target, *arguments) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                self._spawn(self._forward, client)

    def _forward(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self.target) as server:
            pair = {client, server}
            self._sockets |= pair
            try:
                while True:
                    for source in select.select(list(pair), [], [])[0]:
                        data = bytearray(source.recv(1 << 16))
                        if not data:
                            return
                        if source is server and not self._tamper(data, client):
                            return
                        (client if source is server else server).sendall(data)
            finally:
                self._sockets -= pair

    def _tamper(self, data: bytearray, client: socket.socket) -> bool:
        """Apply the faults to bytes of the server; return False when the connection is to be closed."""
        begin, self.count = self.count, self.count + len(data)
        if self.flip_at is not None and begin <= self.flip_at < self.count:
            data[self.flip_at - begin] ^= 0x10
        if self.cut_after is not None and self.count > self.cut_after:
            client.sendall(data[: max(0, self.cut_after - begin)])
            return False
        if self.hang_after is not None and self.count > self.hang_after:
            kept = max(0, self.hang_after - begin)
            client.sendall(data[:kept])
            self.released.wait()
            del data[:kept]
        return True
