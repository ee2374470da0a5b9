"""A store whose batches end when the test says so, and as the test says."""

from __future__ import annotations

import ctypes
import os

import numpy as np

from pagecore.tiers.store import Done, StoreStats


def memory_at(address, nbytes):
    """Return the bytes at an address as an array that aliases them."""
    return np.frombuffer((ctypes.c_uint8 * int(nbytes)).from_address(int(address)), np.uint8)


class ScriptedStore:
    """Keeps entries in a dict. `finish` ends the oldest batch, or the one with a ticket."""

    def __init__(self, name="scripted", medium="DISK"):
        self.name, self.medium = name, medium
        self.entries = {}
        self.holds = {}
        self.batches = {}
        self.ended = []
        self.cancelled = []
        self.last = 0
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        self.can_remove = True
        self.refuses = None  # an exception that every submission raises

    def fileno(self):
        return self.event

    def _submit(self, kind, keys, pieces=None):
        if self.refuses is not None:
            raise self.refuses
        self.last += 1
        self.batches[self.last] = (kind, [bytes(key) for key in keys], pieces)
        return self.last

    def submit_lookup(self, keys):
        return self._submit("lookup", keys)

    def submit_load(self, keys, pieces):
        assert pieces.dtype == np.uint64
        assert pieces.shape == (len(keys), 2)
        assert (pieces[:, 0] % 4096 == 0).all()
        return self._submit("load", keys, pieces.copy())

    def submit_store(self, keys, pieces):
        return self._submit("store", keys, pieces.copy())

    def submit_remove(self, keys):
        return self._submit("remove", keys)

    def unlock(self, keys):
        for key in map(bytes, keys):
            if key in self.holds:
                self._drop(key)

    def cancel(self, ticket):
        self.cancelled.append(ticket)

    def _drop(self, key):
        self.holds[key] -= 1
        if not self.holds[key]:
            del self.holds[key]

    def finish(self, ticket=None, *, fails=(), error=None):
        """End a batch; entries at the indices in `fails` fail."""
        ticket = next(iter(self.batches)) if ticket is None else ticket
        kind, keys, pieces = self.batches.pop(ticket)
        ok = np.zeros(len(keys), np.bool_)
        for index, key in enumerate(keys):
            if kind == "store":
                if index not in fails:
                    self.entries[key] = bytes(memory_at(*pieces[index]))
                    ok[index] = True
                continue
            if kind == "remove":
                if index not in fails:
                    self.entries.pop(key, None)
                    ok[index] = True
                continue
            is_there = key in self.entries and index not in fails
            if kind == "lookup" and is_there:
                self.holds[key] = self.holds.get(key, 0) + 1
            if kind == "load":
                if key in self.holds:
                    self._drop(key)
                memory_at(*pieces[index])[:] = np.frombuffer(self.entries[key], np.uint8) if is_there else 0xFF
            ok[index] = is_there
        self.ended.append(Done(ticket, ok, error))
        os.eventfd_write(self.event, 1)

    def finish_all(self):
        while self.batches:
            self.finish()

    def poll(self):
        ended, self.ended = self.ended, []
        if ended and self.event >= 0:
            os.eventfd_read(self.event)
        return ended

    def drain(self, timeout=None):
        self.finish_all()
        return True

    def close(self):
        self.finish_all()
        if self.event >= 0:
            os.close(self.event)
            self.event = -1

    def stats(self):
        return StoreStats(num_pending=len(self.batches), num_held=sum(self.holds.values()))
