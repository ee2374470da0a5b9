"""A relay in front of an exporter that cuts, hangs or changes a byte after a number of bytes."""

from __future__ import annotations

import contextlib
import select
import socket
import threading


class Relay:
    """Relays one connection after the other; faults concern the bytes from the exporter.

    `fault` is "cut", "hang" or "flip", and `after` the number of bytes before it. `reached` is set at the fault.
    """

    def __init__(self, target, fault=None, after=0):
        self.target, self.fault, self.after = target, fault, after
        self.reached = threading.Event()
        self._ended = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._ended:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            host, port = self.target.removeprefix("tcp://").split(":")
            with client, socket.create_connection((host, int(port))) as server, contextlib.suppress(OSError):
                self._relay(client, server)

    def _relay(self, client, server):
        moved, open_ends = 0, [client, server]
        while not self._ended:
            for source in select.select(open_ends, [], [], 0.02)[0]:
                data = bytearray(source.recv(4096))
                if not data:
                    return
                if source is server and self.fault and moved + len(data) > self.after:
                    self.reached.set()
                    if self.fault == "cut":
                        client.sendall(data[: self.after - moved])
                        return
                    if self.fault == "hang":
                        open_ends = [client]  # the importer's end is still noticed
                        continue
                    data[max(0, self.after - moved)] ^= 4
                    self.fault = None
                moved += len(data) if source is server else 0
                (client if source is server else server).sendall(data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._ended = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
