"""Store of blocks in Mooncake Store, the distributed memory of a Mooncake cluster."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import ShapeError, StoreError, UnsupportedOption
from pagecore.storage.checks import require_int
from pagecore.tiers.arguments import checked_pieces
from pagecore.tiers.payload import FRAME_BYTES
from pagecore.tiers.remote.directory_watch import DirectoryWatch
from pagecore.tiers.remote.listing import ListedEntries, ListingReporter
from pagecore.tiers.remote.master import ADMIN_PORT, Directory, check_master, hangs, split_address
from pagecore.tiers.remote.store import Batch, Full, Identity, checked_identity, checked_timeout
from pagecore.tiers.remote.workers import Connection, WorkerStore
from pagecore.tiers.store import Keys, Pieces

# Results of Mooncake's client: no memory for an object, a buffer that is too small for it, an object that a client is
# writing, absence, and an object that exists.
NO_ROOM, INVALID, NOT_READY, NOT_FOUND, EXISTS = -200, -600, -703, -704, -705
LEAST_SEGMENT = 16 << 20
# A client that is closed asks the master, at this interval and for as long, whether it answers.
HANG_SECONDS = 1.0


class MooncakeStore(ListingReporter, WorkerStore):
    """Blocks in Mooncake Store: a master process, and memory that the clients of the cluster lend.

    The client reads and writes the caller's memory without a copy. It cannot end a transfer early: after a read that
    timed out its peer may still write (`writes_late`), and it keeps no sums (`verifies` is False). Use the store in a
    `Guard`, which loads into its staging memory and compares sums.

    Parameters
    ----------
    master : str
        ``host:port`` of ``mooncake_master``.
    fingerprint : Fingerprint
        Names of entries begin with the name of the fingerprint.
    hostname : str
        Name or IP address under which the other clients reach this process.
    segment_bytes : int
        Memory that this process lends to the store, 16 MiB or more; 0 for a client that lends none. At least one client
        must lend some.
    buffer_bytes : int
        Memory of the client for its own messages.
    metadata : str
        Metadata server of the cluster; "P2PHANDSHAKE" for none.
    protocol : {"tcp", "rdma"}
    devices : str
        RDMA devices, separated by commas; empty for all.
    threads : int
        Batches that are carried out at the same time.
    list_seconds : float, optional
        Seconds in which the master is asked once for every entry that this store knows, so that events report what
        other clients have removed and what the master has evicted. At most 50 requests a second, each for 256 entries.
        None: no such requests.
    admin : str, optional
        ``host:port`` of the master's HTTP server (``--metrics_port``), which `list_seconds` needs; by default port 9003
        of the master's host.
    replicas : int
        Copies of each entry that this process stores, in memory of different clients: an entry outlives a client that
        leaves. With fewer clients that lend memory there are fewer copies.

    Raises
    ------
    UnsupportedOption
        Mooncake is not installed, an address that does not parse, or `admin` without `list_seconds`.
    StoreError
        The master or its HTTP server does not answer, or the master refuses the client.
    DeviceError
        The system has no thread or descriptor left.
    ShapeError
        A number out of range, also `list_seconds` outside 0.001 to 1,000,000.

    Notes
    -----
    Mooncake: Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025. A call takes up to 30 s if
    the master hangs. The client would hold the interpreter's lock for 60 s if it left a cluster whose master hangs, so
    `close` waits until the master answers or is gone; a `Guard` waits 10 s and leaves the rest to a thread.
    """

    verifies = False
    writes_late = True

    def __init__(
        self,
        master: str,
        *,
        fingerprint: Identity,
        hostname: str = "127.0.0.1",
        segment_bytes: int = 0,
        buffer_bytes: int = 16 << 20,
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        threads: int = 2,
        list_seconds: float | None = None,
        admin: str | None = None,
        replicas: int = 1,
    ) -> None:
        segment = require_int("segment_bytes", segment_bytes, min=0, max=None)
        if 0 < segment < LEAST_SEGMENT:
            raise ShapeError(
                f"segment_bytes is {segment}; Mooncake's client lends {LEAST_SEGMENT} bytes or more: give 0 or as much"
            )
        local = require_int("buffer_bytes", buffer_bytes, min=1 << 20, max=None)
        count = require_int("threads", threads, max=64)
        self._replicas = require_int("replicas", replicas, max=64)
        name = checked_identity(fingerprint).name
        seconds = None if list_seconds is None else checked_timeout(list_seconds, "list_seconds")
        address = None if admin is None else split_address("admin", admin, "the HTTP server of mooncake_master")
        if address is not None and seconds is None:
            raise UnsupportedOption(f"admin is {admin}, which only list_seconds uses; give both, or leave admin out")
        self._master = check_master(master)
        directory = Directory(*(address or (self._master[0], ADMIN_PORT)))
        if seconds is not None:
            directory.check()
        self._prefix = f"{name}:"
        self._registered: list[int] = []
        self._client: Any = _client()
        status = self._client.setup(hostname, metadata, segment, local, protocol, devices, master)
        if status != 0:
            raise StoreError(
                f"Mooncake's client cannot join the cluster of {master} as {hostname} over {protocol}: {status}; check "
                "hostname, metadata and devices"
            )
        self._watch: DirectoryWatch | None = None
        try:
            super().__init__(f"mooncake://{master}", fingerprint, self._connect(), count)
        except BaseException:
            if self._client is not None:  # `close` has not run
                self._client.close()
            raise
        if seconds is not None:
            self._listed = ListedEntries()
            try:
                self._watch = DirectoryWatch(directory, self._listed, self._prefix, seconds)
            except BaseException:
                self.close()
                raise

    def register_memory(self, address: int, nbytes: int) -> None:
        """Make memory known to the client, as transfers by RDMA require; it must stay until `close`.

        Raises
        ------
        StoreError
            The client cannot register the memory.
        """
        status = self._client.register_buffer(address, nbytes)
        if status != 0:
            raise StoreError(f"Mooncake cannot register {nbytes} bytes: {status}; check the limit of locked memory")
        self._registered.append(address)

    def _connect(self) -> Connection:
        return _Session(self._client, self._prefix, self._replicas)

    def _start(self, batch: Batch) -> None:
        if self._listed is not None:
            self._listed.expect(key.tobytes() for key in batch.keys)
        super()._start(batch)

    def _end(self, batch: Batch) -> None:
        if self._listed is not None and batch.kind != "remove":
            self._listed.note(key.tobytes() for key in batch.keys[batch.ok])
        super()._end(batch)

    def _release(self) -> None:
        if self._watch is not None:
            self._watch.close()
        super()._release()
        while hangs(*self._master, HANG_SECONDS):
            time.sleep(HANG_SECONDS)
        client, self._client = self._client, None
        if client is not None:
            for address in self._registered:
                client.unregister_buffer(address)
            client.close()

    def _checked_pieces(self, keys: Keys, pieces: Pieces) -> Pieces:
        """Accept payloads with and without the frame that a `Guard` adds."""
        checked = checked_pieces(pieces, len(keys))
        sizes = self._sizes(keys)
        wrong = (checked[:, 1] != sizes) & (checked[:, 1] != sizes + np.uint64(FRAME_BYTES))
        if wrong.any():
            index = int(wrong.argmax())
            raise ShapeError(
                f"pieces[{index}] has {int(checked[index, 1])} bytes; an entry of lane {int(keys[index, -1])} has "
                f"{int(sizes[index])} bytes by the fingerprint; use the pieces of that cache's HostPool"
            )
        return checked


class _Session:
    """Calls of the client, which all threads share."""

    def __init__(self, client: Any, prefix: str, replicas: int) -> None:
        from mooncake.store import ReplicateConfig

        self._client = client
        self._prefix = prefix
        self._config = ReplicateConfig()
        self._config.replica_num = replicas

    def _names(self, keys: Keys) -> list[str]:
        return [self._prefix + key.tobytes().hex() for key in keys]

    def open(self) -> None:
        """Do nothing: the client was set up before."""

    def lookup(self, keys: Keys, ok: NDArray[np.bool_]) -> str | None:
        """Find entries."""
        found = np.array(self._client.batch_is_exist(self._names(keys)), np.int64)
        ok[:] = found == 1
        return _reason(found[found < 0])

    def load(self, keys: Keys, pieces: Pieces, ok: NDArray[np.bool_]) -> str | None:
        """Read entries; one of another size is a miss and is deleted, and one that is being written is a miss."""
        names = self._names(keys)
        error = None
        for chosen in _without_repeats(names):
            loaded, reason = self._load_once([names[index] for index in chosen], pieces[chosen])
            ok[chosen] = loaded
            error = error or reason
        return error

    def _load_once(self, names: list[str], pieces: Pieces) -> tuple[NDArray[np.bool_], str | None]:
        """Read entries of different names."""
        addresses, sizes = pieces.T.tolist()
        found = np.array(self._client.batch_get_into(names, addresses, sizes), np.int64)
        ok = found == pieces[:, 1].astype(np.int64)
        unfit = np.flatnonzero(~ok & ((found >= 0) | (found == INVALID))).tolist()
        wrong = [names[index] for index in unfit if 0 <= self._client.get_size(names[index]) != sizes[index]]
        if wrong:
            self._client.batch_remove(wrong, True)
            return ok, f"{len(wrong)} entries had another size and were deleted"
        return ok, _reason(found[(found < 0) & (found != NOT_FOUND) & (found != NOT_READY)])

    def store(self, keys: Keys, pieces: Pieces, ok: NDArray[np.bool_]) -> str | None:
        """Write entries; one that exists stays."""
        addresses, sizes = pieces.T.tolist()
        written = np.array(self._client.batch_put_from(self._names(keys), addresses, sizes, self._config), np.int64)
        ok[:] = (written == 0) | (written == EXISTS)
        return _reason(written[~ok])

    def remove(self, keys: Keys, ok: NDArray[np.bool_]) -> str | None:
        """Delete entries, also those that the master has leased to a client that reads them."""
        removed = np.array(self._client.batch_remove(self._names(keys), True), np.int64)
        ok[:] = (removed == 0) | (removed == NOT_FOUND)
        num_written = int((removed == NOT_READY).sum())
        busy = Full(f"{num_written} of the entries are being written; wait for the end") if num_written else None
        return _reason(removed[~ok & (removed != NOT_READY)]) or busy

    def abort(self) -> None:
        """Do nothing: the client has no way to end a call early."""

    def close(self) -> None:
        """Do nothing: the store closes the client."""


def _without_repeats(names: list[str]) -> list[list[int]]:
    """Divide the indices of names so that no part has a name twice: the client fills one buffer of a name in a call."""
    if len(set(names)) == len(names):
        return [list(range(len(names)))]
    seen: Counter[str] = Counter()
    parts: list[list[int]] = []
    for index, name in enumerate(names):
        if seen[name] == len(parts):
            parts.append([])
        parts[seen[name]].append(index)
        seen[name] += 1
    return parts


def _reason(codes: NDArray[np.int64]) -> str | None:
    if len(codes) == 0:
        return None
    advice = "check its master and the memory that clients lend"
    reason = f"Mooncake failed for {len(codes)} keys with code {int(codes[0])}; {advice}"
    return Full(reason) if (codes == NO_ROOM).all() else reason


def _client() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise UnsupportedOption(
            f"MooncakeStore cannot import mooncake ({error}); install it with: pip install 'pagecore[mooncake]', and "
            "libibverbs1, libnuma1 and libcurl4 of the system"
        ) from None
    return MooncakeDistributedStore()
