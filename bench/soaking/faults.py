"""Faults of the soak: a store in memory that fails on purpose, bits of slabs that rot, and a Redis server that dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.store import Done, Keys, Medium, Pieces, StoreStats

__all__ = ["FaultyStore", "RedisServer", "rot_file"]

# The kernel ends a server when its parent ends, also by an abort.
DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
FAULTS = ("error", "gone", "flip", "part", "hang", "raise")


class FaultyStore:
    """Entries in a dict that several stores share; the next batches have the faults that were injected.

    Sums are left to the guard, and an abandoned transfer may still write: `write_late` carries it out.

    Parameters
    ----------
    data : dict of bytes to bytes
    name : str
    """

    medium: Medium = "EXTERNAL"
    verifies = False
    writes_late = True

    def __init__(self, data: dict[bytes, bytes], name: str) -> None:
        self.name = name
        self.data = data
        self.faults: list[str] = []
        self._hanging: dict[int, tuple[str, Keys, Pieces | None]] = {}
        self._late: list[tuple[str, Keys, Pieces]] = []
        self._ended: list[Done] = []
        self._ticket = 0
        self._lock = Lock()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def submit_lookup(self, keys: Keys) -> int:
        return self._submit("lookup", keys, None)

    def submit_load(self, keys: Keys, pieces: Pieces) -> int:
        return self._submit("load", keys, pieces)

    def submit_store(self, keys: Keys, pieces: Pieces) -> int:
        return self._submit("store", keys, pieces)

    def unlock(self, keys: Keys) -> None:
        """Do nothing: a lookup holds nothing, as in a remote store."""

    def cancel(self, ticket: int) -> None:
        with self._lock:
            batch = self._hanging.pop(ticket, None)
            if batch is not None:
                kind, keys, pieces = batch
                if pieces is not None:
                    self._late.append((kind, keys, pieces))
                self._end(ticket, np.zeros(len(keys), np.bool_), "cancelled")

    def poll(self) -> list[Done]:
        with self._lock:
            ended, self._ended = self._ended, []
            if ended and self._event >= 0:
                os.eventfd_read(self._event)
            return ended

    def drain(self, timeout: float | None = None) -> bool:
        limit = None if timeout is None else time.monotonic() + timeout
        while self._hanging:
            if limit is not None and time.monotonic() > limit:
                return False
            time.sleep(0.001)
        return True

    def close(self) -> None:
        with self._lock:
            self._late.clear()
            for ticket, (_, keys, _) in self._hanging.items():
                self._end(ticket, np.zeros(len(keys), np.bool_), "closed")
            self._hanging.clear()
            if self._event >= 0:
                os.close(self._event)
                self._event = -1

    def stats(self) -> StoreStats:
        return StoreStats(num_pending=len(self._hanging))

    def register_memory(self, address: int, nbytes: int) -> None:
        """Do nothing: the memory of the process can be written."""

    def write_late(self) -> None:
        """Carry out the transfers whose batches were abandoned."""
        with self._lock:
            late, self._late = self._late, []
            for kind, keys, pieces in late:
                self._move(kind, keys, pieces, None)

    def _submit(self, kind: str, keys: Keys, pieces: Pieces | None) -> int:
        with self._lock:
            fault = self.faults.pop() if self.faults else None
            if fault == "raise":
                raise OSError("planted")
            self._ticket += 1
            if fault == "hang":
                self._hanging[self._ticket] = (kind, keys.copy(), None if pieces is None else pieces.copy())
            elif fault == "error":
                self._end(self._ticket, np.zeros(len(keys), np.bool_), "planted")
            else:
                self._end(self._ticket, self._move(kind, keys, pieces, fault), None)
            return self._ticket

    def _move(self, kind: str, keys: Keys, pieces: Pieces | None, fault: str | None) -> NDArray[np.bool_]:
        ok = np.zeros(len(keys), np.bool_)
        for index, key in enumerate(bytes(row) for row in keys):
            if fault == "gone":
                self.data.pop(key, None)
            if pieces is None:
                ok[index] = key in self.data
                continue
            memory = memory_at(*pieces[index])
            if kind == "store":
                self.data.setdefault(key, damaged(memory.tobytes(), fault))
                ok[index] = True
            elif key in self.data and len(self.data[key]) == len(memory):
                memory[:] = np.frombuffer(damaged(self.data[key], fault), np.uint8)
                ok[index] = True
        return ok

    def _end(self, ticket: int, ok: NDArray[np.bool_], error: str | None) -> None:
        self._ended.append(Done(ticket, ok, error))
        os.eventfd_write(self._event, 1)


def memory_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return the bytes at an address as an array that aliases them."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * int(nbytes)).from_address(int(address)))


def damaged(payload: bytes, fault: str | None) -> bytes:
    """Return a payload with a bit flipped, or with its second half missing."""
    data = bytearray(payload)
    if fault == "flip":
        data[len(data) // 3] ^= 16
    elif fault == "part":
        data[len(data) // 2 :] = b"\xee" * (len(data) - len(data) // 2)
    return bytes(data)


def rot_file(folder: Path, draw: random.Random) -> None:
    """Flip a bit of a slab file, outside of its superblocks."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1 << 14]
    if files:
        path = draw.choice(sorted(files))
        offset = draw.randrange(2 * 4096, path.stat().st_size)
        with path.open("r+b", buffering=0) as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ (1 << draw.randrange(8))]))


class RedisServer:
    """A Redis server of the soak, which stops, goes on, dies and starts again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.folder = folder
        self._resume_at: float | None = None
        self.start()

    @staticmethod
    def is_installed() -> bool:
        """Return True if redis-server is on the path."""
        return shutil.which("redis-server") is not None

    @property
    def url(self) -> str:
        """URL for `RespStore`."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server, empty, and wait until it answers."""
        options = ["--port", str(self.port), "--save", "", "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru"]
        self._process = subprocess.Popen(
            [*DIE_WITH_PARENT, "redis-server", *options, "--bind", "127.0.0.1", "--dir", str(self.folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        limit = time.monotonic() + 10
        while time.monotonic() < limit:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.01)
        raise RuntimeError("redis-server did not answer within 10 s")

    def stop_for(self, seconds: float) -> None:
        """Let the server hang; `tick` resumes it."""
        if self._process.poll() is None and self._resume_at is None:
            self._process.send_signal(signal.SIGSTOP)
            self._resume_at = time.monotonic() + seconds

    def tick(self, now: float | None = None) -> None:
        """Resume a server whose pause is over."""
        if self._resume_at is not None and (now is None or now >= self._resume_at):
            self._process.send_signal(signal.SIGCONT)
            self._resume_at = None

    def kill(self) -> None:
        """Kill the server."""
        self.tick()
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Kill the server and start an empty one."""
        self.kill()
        self.start()
