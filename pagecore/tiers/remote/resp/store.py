"""Store of blocks in Redis or Valkey."""

from __future__ import annotations

import ssl

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import flag, require_int, shown
from pagecore.tiers.arguments import checked_keys
from pagecore.tiers.remote.resp.address import Address
from pagecore.tiers.remote.resp.connection import RespConnection
from pagecore.tiers.remote.resp.session import RespSession
from pagecore.tiers.remote.resp.watch import EvictionWatch
from pagecore.tiers.remote.store import Batch, Identity, checked_identity, checked_timeout
from pagecore.tiers.remote.workers import Connection, WorkerStore
from pagecore.tiers.store import KEY_BYTES, Keys

# Version of keys and values in the server.
PREFIX = b"pc1:"


class RespStore(WorkerStore):
    """Blocks in a Redis or Valkey server, by RESP2 over TCP, TLS or a Unix socket.

    Commands are pipelined, and payloads pass between socket and memory of the caller without a copy. A value is a frame
    of 24 bytes with length and XXH3_64, then the payload; an entry that differs from its frame is a miss and is
    deleted. A lookup renews the time of use of what it finds, but holds nothing: what the server evicts before the load
    is a miss. A connection that was lost is opened again with the next batch.

    Parameters
    ----------
    url : str
        ``redis://[user:password@]host[:port][/database]``, ``rediss://...`` for TLS, or
        ``unix:///path/to/socket[?db=database]``; valkey:// and valkeys:// are redis:// and rediss://.
    fingerprint : Fingerprint
        Entries have the prefix ``pc1:<name of the fingerprint>:``.
    connections : int
        Connections, each with a thread.
    timeout : float
        Seconds without progress after which a batch fails. A `Guard` ends batches earlier.
    ttl : int, optional
        Seconds after which the server drops an entry.
    watch_evictions : bool
        Listen for the keys that the server evicts, expires or deletes, on one more connection, so that events report
        them at once (`EvictionReporter`). The server needs ``notify-keyspace-events Egex``. Notifications may be lost
        with a connection; such entries are missed when they are asked for.
    ssl_context : ssl.SSLContext, optional
        Certificates for rediss://; the default checks the server against the authorities of the system.

    Raises
    ------
    UnsupportedOption
        The URL does not parse; an object that is not a fingerprint or an SSLContext.
    StoreError
        No server answers, it does not speak RESP2, it refuses user, password or database, or it does not announce
        what `watch_evictions` listens for.
    DeviceError
        The system has no thread left for a connection, or no descriptor.
    ShapeError
        `connections` or `ttl` is not a positive integer, or `timeout` is not between 0.001 and 1,000,000 seconds.

    Notes
    -----
    Protocol: Redis serialization protocol specification, version 2.
    """

    def __init__(
        self,
        url: str,
        *,
        fingerprint: Identity,
        connections: int = 2,
        timeout: float = 5.0,
        ttl: int | None = None,
        watch_evictions: bool = False,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        count = require_int("connections", connections, max=1024)
        self._ttl = None if ttl is None else require_int("ttl", ttl, max=None)
        self._timeout = checked_timeout(timeout)
        if not (ssl_context is None or isinstance(ssl_context, ssl.SSLContext)):
            raise UnsupportedOption(f"ssl_context is {shown(ssl_context)}; give an ssl.SSLContext, or None")
        self._ssl_context = ssl_context
        self._address = Address.parse(url)
        self._prefix = PREFIX + checked_identity(fingerprint).name.encode() + b":"
        watches = flag("watch_evictions", watch_evictions)
        first = self._connect()
        first.open()
        self._watch: EvictionWatch | None = None
        try:
            if watches:
                self._watch = EvictionWatch(self._new_connection, self._address.database, self._prefix)
            super().__init__(self._address.name, fingerprint, first, count)
        except BaseException:
            first.close()
            if self._watch is not None:
                self._watch.close()
            raise

    # ---- EvictionReporter ----

    @property
    def reports_evictions(self) -> bool:
        """True with `watch_evictions`."""
        return self._watch is not None

    def take_evicted(self) -> Keys:
        """Return the keys of entries that the server has evicted since the last call."""
        taken = [] if self._watch is None else self._watch.take()
        return np.frombuffer(b"".join(taken), np.uint8).reshape(-1, KEY_BYTES)

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Return False for each key that the server has evicted since it was asked for, or written, last."""
        watch = self._watch
        names = [key.tobytes() for key in checked_keys(keys)]
        return np.array([watch is None or not watch.has_gone(name) for name in names], np.bool_)

    # ---- for the base class ----

    def _start(self, batch: Batch) -> None:
        if self._watch is not None and batch.kind != "remove":  # at the beginning: what goes during the batch has gone
            self._watch.expect(key.tobytes() for key in batch.keys)
        super()._start(batch)

    def _release(self) -> None:
        super()._release()
        if self._watch is not None:
            self._watch.close()

    def _connect(self) -> Connection:
        return RespSession(self._new_connection(), self._prefix, self._ttl)

    def _new_connection(self) -> RespConnection:
        return RespConnection(self._address, timeout=self._timeout, context=self._ssl_context)
