"""A store of blocks in a dict, with faults, delays and transfers that write late: the model of a remote store.

A batch ends at once, in `submit_*`. Faults that were injected change the next batches of their kind:

====== ===================================================================================================
error  the batch ends with an error and nothing was transferred
gone   the entries vanish before the batch; a miss without an error
flip   one bit of each payload changes on its way; noticed if the store verifies
part   half of the bytes of each payload arrive, then an error
hang   the batch does not end until it is cancelled, released or the store is closed
raise  the submission raises
====== ===================================================================================================

A hanging batch of a store with ``writes_late`` ends with an error when it is cancelled, while its transfer remains in
`late`: `write_late` carries it out, to whom ever the memory belongs by then. `close` destroys the transfers.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from pagecore.tiers.arguments import checked_keys, checked_pieces
from pagecore.tiers.completions import Completions
from pagecore.tiers.store import StoreStats


@dataclass(eq=False)
class Transfer:
    ticket: int
    kind: str
    keys: np.ndarray
    pieces: np.ndarray | None
    fault: str | None = None


class MemoryStore:
    """Implementation of `BlockStore` over a dict of bytes, which several stores may share as ``data``.

    Parameters
    ----------
    data : dict of bytes to bytes, optional
    verifies, writes_late : bool
        As `pagecore.tiers.guard.Guard` reads them.
    manual : bool
        Batches hang until `release`.
    stubborn : bool
        Hanging batches do not end when they are cancelled.
    delay : float
        Seconds until a batch ends, by a thread.
    """

    def __init__(
        self,
        *,
        data=None,
        medium="EXTERNAL",
        name="memory",
        verifies=True,
        writes_late=False,
        manual=False,
        delay=0.0,
        stubborn=False,
    ):
        self.medium = medium
        self.name = name
        self.verifies = verifies
        self.writes_late = writes_late
        self.manual = manual
        self.stubborn = stubborn
        self.delay = delay
        self.data = {} if data is None else data
        self.can_remove = True
        self.faults = {"lookup": deque(), "load": deque(), "store": deque(), "remove": deque()}
        self.hanging = []  # batches that have not ended
        self.late = []  # transfers that go on after their batch ended
        self.holds = Counter()
        self.registered = []
        self.counts = Counter()
        self.is_closed = False
        self._completions = Completions()
        self._lock = threading.RLock()
        self._timers = set()

    # ---- BlockStore ----

    def fileno(self):
        return self._completions.fileno()

    def submit_lookup(self, keys):
        return self._submit("lookup", checked_keys(keys), None)

    def submit_load(self, keys, pieces):
        keys = checked_keys(keys)
        return self._submit("load", keys, checked_pieces(pieces, len(keys)))

    def submit_store(self, keys, pieces):
        keys = checked_keys(keys)
        return self._submit("store", keys, checked_pieces(pieces, len(keys)))

    def submit_remove(self, keys):
        return self._submit("remove", checked_keys(keys), None)

    def unlock(self, keys):
        with self._lock:
            for key in checked_keys(keys):
                self._unhold(key.tobytes())

    def cancel(self, ticket):
        with self._lock:
            for transfer in [each for each in self.hanging if each.ticket == ticket and not self.stubborn]:
                self.hanging.remove(transfer)
                if self.writes_late and transfer.pieces is not None:
                    self.late.append(transfer)
                self._fail(transfer, "cancelled")

    def poll(self):
        return self._completions.take()

    def drain(self, timeout=None):
        return self._completions.wait(timeout)

    def close(self):
        for timer in list(self._timers):
            timer.cancel()
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            self.late.clear()
            while self.hanging:
                self._fail(self.hanging.pop(), "the store was closed")
            self._completions.close()

    def stats(self):
        counts = self.counts
        return StoreStats(
            num_lookups=counts["lookup"],
            num_found=counts["lookup ok"],
            num_loaded=counts["load ok"],
            num_load_failures=counts["load"] - counts["load ok"],
            num_stored=counts["store ok"],
            num_store_failures=counts["store"] - counts["store ok"],
            bytes_loaded=counts["load bytes"],
            bytes_stored=counts["store bytes"],
            num_pending=self._completions.num_pending,
            num_held=sum(self.holds.values()),
            num_removed=counts["remove ok"],
        )

    def register_memory(self, address, nbytes):
        self.registered.append((address, nbytes))

    # ---- faults ----

    def inject(self, kind, fault, times=1):
        """Let the next `times` batches of `kind` ("lookup", "load", "store" or "remove") have a fault."""
        self.faults[kind].extend([fault] * times)

    def release(self, ticket=None, fault=None):
        """End hanging batches, or one of them, as they would have ended, or with a fault."""
        with self._lock:
            for transfer in [each for each in self.hanging if ticket in {None, each.ticket}]:
                self.hanging.remove(transfer)
                transfer.fault = fault
                self._carry_out(transfer)

    def write_late(self):
        """Carry out the transfers whose batches were given up; return their number."""
        with self._lock:
            late, self.late = self.late, []
            for transfer in late:
                for key, piece in zip(transfer.keys, transfer.pieces, strict=True):
                    self._move(transfer.kind, key.tobytes(), piece, None)
            return len(late)

    def rot(self, key, bit=0):
        """Flip a bit of a stored payload."""
        payload = bytearray(self.data[bytes(key)])
        payload[bit // 8 % len(payload)] ^= 1 << bit % 8
        self.data[bytes(key)] = bytes(payload)

    # ---- inner ----

    def _submit(self, kind, keys, pieces):
        with self._lock:
            assert not self.is_closed, "the store is closed"
            fault = self.faults[kind].popleft() if self.faults[kind] else None
            if fault == "raise":
                raise OSError("injected")
            transfer = Transfer(self._completions.open(), kind, keys, pieces, fault)
            if fault == "hang" or self.manual:
                self.hanging.append(transfer)
            elif self.delay > 0:
                self.hanging.append(transfer)
                timer = threading.Timer(self.delay, lambda: self._after_delay(transfer, timer))
                timer.daemon = True
                self._timers.add(timer)
                timer.start()
            else:
                self._carry_out(transfer)
            return transfer.ticket

    def _after_delay(self, transfer, timer):
        self._timers.discard(timer)
        self.release(transfer.ticket, transfer.fault)

    def _carry_out(self, transfer):
        if transfer.fault == "error":
            self._fail(transfer, "injected")
            return
        ok = np.zeros(len(transfer.keys), bool)
        error = None
        for index, key in enumerate(each.tobytes() for each in transfer.keys):
            if transfer.fault == "gone":
                self.data.pop(key, None)
            if transfer.kind == "remove":
                self.data.pop(key, None)
                ok[index] = True
                continue
            if transfer.kind == "lookup":
                ok[index] = key in self.data
                self.holds[key] += int(ok[index])
                continue
            ok[index] = self._move(transfer.kind, key, transfer.pieces[index], transfer.fault)
            if not ok[index] and transfer.fault in {"flip", "part"}:
                error = f"injected: {transfer.fault}"
        self._end(transfer, ok, error)

    def _move(self, kind, key, piece, fault):
        """Transfer one payload; return whether all its bytes are there."""
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * int(piece[1])).from_address(int(piece[0])))
        if kind == "store":
            if fault == "part":
                return False
            if fault == "flip" and not self.verifies:
                memory = memory.copy()
                memory[len(memory) // 2] ^= 1
            if fault != "flip" or not self.verifies:
                self.data.setdefault(key, memory.tobytes())
            return fault != "flip" or not self.verifies
        payload = self.data.get(key)
        if payload is None or len(payload) != len(memory):
            return False
        num_bytes = len(memory) // 2 if fault == "part" else len(memory)
        memory[:num_bytes] = np.frombuffer(payload, np.uint8)[:num_bytes]
        if fault == "flip":
            memory[len(memory) // 2] ^= 1
        return fault != "part" and not (fault == "flip" and self.verifies)

    def _fail(self, transfer, error):
        self._end(transfer, np.zeros(len(transfer.keys), bool), error)

    def _end(self, transfer, ok, error):
        self.counts[transfer.kind] += len(ok)
        self.counts[f"{transfer.kind} ok"] += int(ok.sum())
        if transfer.pieces is not None:
            self.counts[f"{transfer.kind} bytes"] += int(transfer.pieces[ok, 1].sum())
        if transfer.kind == "load":
            for key in transfer.keys:
                self._unhold(key.tobytes())
        self._completions.end(transfer.ticket, ok, error)

    def _unhold(self, key):
        if self.holds[key] > 1:
            self.holds[key] -= 1
        else:
            del self.holds[key]
