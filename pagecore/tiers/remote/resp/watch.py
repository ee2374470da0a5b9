"""Keys that a Redis server evicts, expires or deletes, by its keyspace notifications."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from pagecore.errors import StoreError
from pagecore.tiers.remote.gone import GoneKeys
from pagecore.tiers.remote.resp.connection import ProtocolError, RespConnection, encode
from pagecore.tiers.resources import start_thread
from pagecore.tiers.store import KEY_BYTES

# Seconds between two attempts to connect again.
PAUSE = 1.0
SETTING = b"notify-keyspace-events"
# Key events of commands that delete, of evictions and of expirations.
FLAGS = "Egex"
EVENTS = (b"evicted", b"expired", b"del")


class EvictionWatch:
    """A thread with a connection of its own that records which entries of a prefix the server evicts.

    A lost connection is opened again; what the server evicts until then is not recorded. After a silence of the timeout
    of its connections, the thread sends a PING; a second silence is a lost connection.

    Parameters
    ----------
    connect : callable
        Returns a connection that is not open.
    database : int
    prefix : bytes
        Beginning of the names of the entries; a content key follows.

    Raises
    ------
    StoreError
        No server answers, or it does not announce all three events.
    DeviceError
        The system has no thread left.

    Notes
    -----
    Redis keyspace notifications, which are sent at most once.
    """

    def __init__(self, connect: Callable[[], RespConnection], database: int, prefix: bytes) -> None:
        self._connect, self._prefix = connect, prefix
        self._channels = [b"__keyevent@%d__:%b" % (database, event) for event in EVENTS]
        self._gone = GoneKeys()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._connection = connect()
        name = self._connection.address.name
        self._thread = threading.Thread(target=self._run, name=f"pagecore {name} evictions", daemon=True)
        try:
            self._subscribe()
            start_thread(
                self._thread, name, "its evictions", "leave watch_evictions out, or raise the limit of processes"
            )
        except BaseException:
            self._closing.set()
            self._connection.close()
            raise

    def take(self) -> list[bytes]:
        """Return the keys that the server has evicted since the last call."""
        return self._gone.take()

    def has_gone(self, key: bytes) -> bool:
        """Return True if the server has evicted a key since it was last expected."""
        return self._gone.has_gone(key)

    def expect(self, keys: Iterable[bytes]) -> None:
        """Note that keys are looked up or written: what was known of them may be false soon."""
        self._gone.expect(keys)

    def close(self) -> None:
        """End the thread and its connection."""
        with self._lock:
            self._closing.set()
            self._connection.abort()
        self._thread.join()

    # ---- thread ----

    def _run(self) -> None:
        is_asked = False  # a PING has no answer yet
        while not self._closing.is_set():
            try:
                self._note(self._message())
                is_asked = False
            except (OSError, StoreError) as error:
                # A connection may be lost without a sign of it.
                is_asked = isinstance(error, TimeoutError) and not is_asked and self._asks()
                if not is_asked:
                    self._connection.close()
                    while not self._closing.wait(PAUSE) and not self._reconnects():
                        pass
        self._connection.close()

    def _asks(self) -> bool:
        """Send a PING; return False if the connection is lost."""
        try:
            self._connection.send([encode(b"PING")])
        except (OSError, StoreError):
            return False
        return True

    def _reconnects(self) -> bool:
        """Try to connect again; return False if that failed."""
        with self._lock:
            if self._closing.is_set():
                return False
            self._connection = self._connect()
        try:
            self._subscribe()
        except (OSError, StoreError):
            self._connection.close()
            return False
        return True

    def _subscribe(self) -> None:
        connection = self._connection
        connection.open()
        connection.send([encode(b"CONFIG", b"GET", SETTING)])
        count = self._count(b"*")
        found = [self._bulk() for _ in range(count)]
        flags = found[1].decode(errors="replace") if count == 2 else ""
        if "E" not in flags or not ("A" in flags or set(FLAGS) <= set(flags)):
            raise StoreError(
                f"{connection.address.name} announces no evictions: {SETTING.decode()} is {flags!r}; set it "
                f"to {FLAGS!r}, or leave watch_evictions out"
            )
        connection.send([encode(b"SUBSCRIBE", *self._channels)])
        for _ in self._channels:
            self._count(b"*")
            self._bulk()
            self._bulk()
            self._count(b":")

    def _message(self) -> bytes:
        """Return the name of the next key, or an empty name for the answer to a PING."""
        count = self._count(b"*")
        if count not in (2, 3):
            raise ProtocolError(f"expected a message of 2 or 3 parts from {self._connection.address.name}, got {count}")
        return [self._bulk() for _ in range(count)][-1]

    def _note(self, name: bytes) -> None:
        key = name[len(self._prefix) :]
        if name.startswith(self._prefix) and len(key) == KEY_BYTES:
            self._gone.note(key)

    def _count(self, kind: bytes) -> int:
        line = self._connection.line()
        if line[:1] != kind or not line[1:].isdigit():
            raise ProtocolError(
                f"expected {kind!r} and a number from {self._connection.address.name}, got {line[:60]!r}"
            )
        return int(line[1:])

    def _bulk(self) -> bytes:
        content = bytearray(min(self._count(b"$"), 1 << 20))
        self._connection.into(memoryview(content))
        self._connection.end_bulk()
        return bytes(content)
