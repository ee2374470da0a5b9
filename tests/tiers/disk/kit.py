"""Disk stores with entries whose bytes follow from their keys, and file operations that fail on demand."""

import ctypes
import errno
import mmap
import os
import select
import threading

import numpy as np

from pagecore.tiers.disk import DiskStore
from pagecore.tiers.disk._io import IoQueue
from pagecore.tiers.keys import Fingerprint, content_chain, lane_keys

PAYLOAD = 5000  # not whole units: its last bytes pass through the buffer of a thread
POISON = 0xA5


def fingerprint(payloads=(PAYLOAD,), model="model", **options):
    lanes = tuple(f"lane {i}" for i in range(len(payloads)))
    return Fingerprint(model=model, lanes=lanes, payload_bytes=tuple(payloads), block_size=16, **options)


def bytes_for(slots, payloads=(PAYLOAD,)):
    """Return a max_bytes that holds `slots` entries of each lane."""
    return sum(8192 + -(-slots * 128 // 4096) * 4096 + slots * -(-payload // 4096) * 4096 for payload in payloads)


class DiskStoreWithOps(DiskStore):
    """A disk store whose reads and writes are those of a `FileOps`."""

    def __init__(self, folder, *, ops, **options):
        self._ops = ops  # which the native threads call as long as the store is open
        super().__init__(folder, **options)

    def _new_queue(self, threads):
        return IoQueue(threads, self._ops.address)


def open_store(folder, slots=16, payloads=(PAYLOAD,), ops=None, **options):
    options = {"fingerprint": fingerprint(payloads), "max_bytes": bytes_for(slots, payloads)} | options
    return DiskStore(folder, **options) if ops is None else DiskStoreWithOps(folder, ops=ops, **options)


def keys_of(store, numbers, lane=0):
    """Return the keys of entries by number: each is the one block of a prompt."""
    chains = [content_chain(store.fingerprint, [number] * 16) for number in numbers]
    return lane_keys(np.concatenate(chains) if chains else np.empty((0, 16), np.uint8), lane)


def content(key, nbytes):
    """Return the payload of a key: random bytes that the key seeds."""
    return np.random.default_rng(list(bytes(key))).integers(0, 256, nbytes, np.uint8)


class Memory:
    """Aligned memory for entries, one slot each, filled with a poison."""

    def __init__(self, count, nbytes=PAYLOAD):
        self.slot = -(-nbytes // 4096) * 4096
        self.nbytes = nbytes
        self.memory = mmap.mmap(-1, max(1, count) * self.slot)
        self.rows = np.frombuffer(self.memory, np.uint8).reshape(-1, self.slot)
        self.rows[:] = POISON
        base = self.rows.ctypes.data
        self.pieces = np.array([[base + i * self.slot, nbytes] for i in range(count)], np.uint64).reshape(count, 2)

    def fill(self, keys):
        for row, key in zip(self.rows, keys, strict=False):
            row[: self.nbytes] = content(key, self.nbytes)
        return self


def finish(store, ticket, timeout=30):
    """Return the Done of a ticket, waiting on the eventfd; the other ends are kept for later calls."""
    kept = store.__dict__.setdefault("_kept", {})
    while ticket not in kept:
        readable, _, _ = select.select([store.fileno()], [], [], timeout)
        assert readable, f"ticket {ticket} did not end"
        for done in store.poll():
            assert done.ticket not in kept
            kept[done.ticket] = done
    return kept.pop(ticket)


def put(store, numbers, lane=0, before=None):
    """Store entries; with `before`, a list of at most one number, they are a part of a prefix."""
    keys = keys_of(store, numbers, lane)
    memory = Memory(len(keys), store.fingerprint.payload_bytes[lane]).fill(keys)
    before = None if before is None else keys_of(store, before, lane)
    return finish(store, store.submit_store(keys, memory.pieces, before=before))


def look(store, numbers, lane=0):
    return finish(store, store.submit_lookup(keys_of(store, numbers, lane)))


def get(store, numbers, lane=0):
    """Load entries; every entry that the store reports as loaded must have its bytes, and nothing else is written."""
    keys = keys_of(store, numbers, lane)
    memory = Memory(len(keys), store.fingerprint.payload_bytes[lane])
    done = finish(store, store.submit_load(keys, memory.pieces))
    for row, key, ok in zip(memory.rows, keys, done.ok, strict=False):
        if ok:
            np.testing.assert_array_equal(row[: memory.nbytes], content(key, memory.nbytes))
        assert (row[memory.nbytes :] == POISON).all(), "bytes after the payload were written"
    return done


class Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


CALL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.POINTER(Iovec), ctypes.c_int, ctypes.c_int64)


class Table(ctypes.Structure):
    _fields_ = (("read", CALL), ("write", CALL))


class FileOps:
    """A table of file operations for `open_store`. `on_read` and `on_write` may change a call.

    Each is called with (fd, parts, offset), parts being memoryviews, and returns None for the ordinary call, or the
    result of the operation: a number of bytes or -errno.
    """

    def __init__(self, on_read=None, on_write=None):
        self.on_read, self.on_write = on_read, on_write
        self.lock = threading.Lock()
        self.num_reads = self.num_writes = 0
        self._table = Table(CALL(self._read), CALL(self._write))
        self.address = ctypes.addressof(self._table)

    def _read(self, fd, parts, count, offset):
        with self.lock:
            self.num_reads += 1
        return self._run(self.on_read, os.preadv, fd, parts, count, offset)

    def _write(self, fd, parts, count, offset):
        with self.lock:
            self.num_writes += 1
        return self._run(self.on_write, os.pwritev, fd, parts, count, offset)

    def _run(self, hook, system, fd, parts, count, offset):
        buffers = [
            memoryview((ctypes.c_char * parts[i].size).from_address(parts[i].base)).cast("B") for i in range(count)
        ]
        try:
            result = hook(fd, buffers, offset) if hook else None
            return system(fd, buffers, offset) if result is None else result
        except OSError as error:
            return -(error.errno or errno.EIO)


def short(buffers, most):
    """Return the first `most` bytes of buffers, in whole units of 512 bytes, at least one."""
    left, parts = max(512, most // 512 * 512), []
    for buffer in buffers:
        parts.append(buffer[:left])
        left -= len(parts[-1])
        if left <= 0:
            break
    return parts
