"""The batches of a disk store that have not ended, and the effect of each end on the index."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterable

from pagecore.tiers.disk._io import IoQueue
from pagecore.tiers.disk.batch import NOT_TAKEN, Batch
from pagecore.tiers.disk.slab_set import SlabSet
from pagecore.tiers.store import Done, StoreStats

Counts = list[tuple[str, int]]


class Ledger:
    """Pending batches, ended batches that the caller has not polled, and counters.

    A method that has no memory raises MemoryError; what it has done stays, and a later `collect` does the rest, once.
    For that, each step allocates first and then changes what is counted.

    Parameters
    ----------
    slabs : SlabSet
    payload_bytes : tuple of int
        Bytes of an entry of each lane.
    """

    def __init__(self, slabs: SlabSet, payload_bytes: tuple[int, ...]) -> None:
        self._slabs = slabs
        self._lanes = slabs.lanes
        self._payload_bytes = payload_bytes
        self._pending: dict[int, Batch] = {}
        # Batches that the queue has ended, with an errno for each transfer; the first may be settled in part.
        self._ended: list[tuple[int, list[int]]] = []
        # Batches that store a key which another batch is writing, and the place of the key in them.
        self._waiting: dict[bytes, list[tuple[Batch, int]]] = {}
        # Results that `take_ready` has not returned, each with what it adds to the counters, and the counters without
        # them: in one attribute, so that an interrupt loses no count and repeats none.
        self._results: tuple[list[tuple[Done, Counts]], dict[str, int]] = [], {}
        self._to_give_back: Batch | None = None

    @property
    def has_ready(self) -> bool:
        """True if a batch has ended that `take_ready` has not returned, or that `collect` has not seen to the end."""
        return bool(self._results[0] or self._ended)

    def take_ready(self) -> list[Done]:
        """Return the batches that ended since the last call."""
        ready = [done for done, _ in self._results[0]]
        if ready:
            self._results = [], self._counters()
        return ready

    def begin(self, batch: Batch, shared: Iterable[tuple[bytes, int]] = ()) -> None:
        """Add a pending batch; `shared` are keys that other batches write, and their places."""
        self._pending[batch.ticket] = batch
        for key, place in shared:
            self._waiting.setdefault(key, []).append((batch, place))

    def is_pending(self, batch: Batch) -> bool:
        """Return True from `begin` of a batch until its end."""
        return batch.ticket in self._pending

    def give_back(self, batch: Batch) -> None:
        """Undo what a batch that was not submitted has taken, now or, if that lacks memory, in the next `collect`."""
        self._to_give_back = batch
        try:
            self._give_back()
        except MemoryError:  # `suppress` would need memory, too
            return

    def end(self, batch: Batch) -> int:
        """End a batch, once; return its ticket."""
        if not batch.has_ended:
            self._unpin_present(batch)
            self._results[0].append((batch.done(), self._counts_of(batch)))
            batch.has_ended = True
            self._pending.pop(batch.ticket, None)
        return batch.ticket

    def withdraw(self, batch: Batch) -> None:
        """Forget the result of a batch whose ticket was not returned, if it has one."""
        ready = self._results[0]
        ready[:] = [one for one in ready if one[0].ticket != batch.ticket]

    def recover(self) -> None:
        """End the batches whose ends an interrupt has cut short."""
        ended = {done.ticket for done, _ in self._results[0]}
        for batch in list(self._pending.values()):
            if batch.has_ended or batch.ticket in ended:
                batch.has_ended = True
                del self._pending[batch.ticket]
        self._recount_shared()

    def _recount_shared(self) -> None:
        """Count the keys for which batches wait, and end those that wait for none any more."""
        waiting = Counter(batch.ticket for batches in self._waiting.values() for batch, _ in batches)
        for batch in list(self._pending.values()):
            if batch.kind != "store" or batch is self._to_give_back:
                continue
            batch.num_shared = waiting[batch.ticket]
            if not batch.num_shared and batch.num_settled == len(batch.places):
                self.end(batch)

    def list_users(self) -> list[tuple[Counter[bytes], set[bytes]]]:
        """Return for each lane the pins that batches have of its keys, and the keys that batches write."""
        users: list[tuple[Counter[bytes], set[bytes]]] = [(Counter(), set()) for _ in self._lanes]
        batches = [*self._pending.values(), *([] if self._to_give_back is None else [self._to_give_back])]
        for batch in {batch.ticket: batch for batch in batches if not batch.has_ended}.values():
            for key in batch.present[: len(batch.present) - batch.num_unpinned]:
                if key:
                    users[key[-1]][0][key] += 1
            for place in batch.places[batch.num_settled :]:
                key = batch.keys[place]
                if batch.kind == "store":
                    users[key[-1]][1].add(key)
                elif place != NOT_TAKEN:
                    users[key[-1]][0][key] += 1
        return users

    def collect(self, queue: IoQueue) -> None:
        """Publish, free or drop the entries of batches that the queue has ended, and end the batches."""
        self._give_back()
        queue.poll(self._ended)
        while self._ended:
            ticket, errors = self._ended[0]
            batch = self._pending.get(ticket)
            if batch is not None:
                self._settle(batch, errors)
            del self._ended[0]

    def stats(self, num_held: int) -> StoreStats:
        """Return the counters."""
        return StoreStats(**self._counters(), num_pending=len(self._pending), num_held=num_held)

    def _settle(self, batch: Batch, errors: list[int]) -> None:
        """Take the transfers of a batch into account, and end it unless it waits for other batches."""
        end_transfer = {"load": self._end_load, "remove": self._end_remove}.get(batch.kind, self._end_store)
        while batch.num_settled < len(errors):
            following = batch.num_settled + 1
            place, error = batch.places[batch.num_settled], errors[batch.num_settled]
            batch.note(place, error)
            end_transfer(batch.keys[place], error)
            batch.num_settled = following
        if not batch.num_shared:
            self.end(batch)

    def _end_load(self, key: bytes, error: int) -> None:
        lane = self._lanes[key[-1]]
        slot = lane.entries.get(key)
        if error not in (0, errno.ECANCELED) and slot is not None:
            table, local = self._slabs.place(key[-1], slot)
            table.clear(local)
            lane.drop(key)
        lane.unpin(key)

    def _end_remove(self, key: bytes, _error: int) -> None:
        self._lanes[key[-1]].unpin(key)

    def _end_store(self, key: bytes, error: int) -> None:
        waiting = self._waiting.get(key)
        while waiting:
            other, place = waiting[-1]
            left = other.num_shared - 1
            other.note(place, error)
            if not left and other.num_settled == len(other.places):
                self.end(other)
            del waiting[-1]
            other.num_shared = left
        self._waiting.pop(key, None)
        lane = self._lanes[key[-1]]
        if error == 0:
            lane.publish(key)
        else:
            lane.abandon(key)

    def _give_back(self) -> None:
        """Undo what the batch in `_to_give_back` has taken: each step is counted, so that none is repeated."""
        batch = self._to_give_back
        if batch is None:
            return
        if not batch.has_ended:
            num_taken = len(batch.keys) if batch.kind == "lookup" else len(batch.places)
            while batch.num_settled < num_taken:
                following = batch.num_settled + 1
                self._give_back_one(batch, batch.num_settled)
                batch.num_settled = following
            self._unpin_present(batch)
            batch.has_ended = True  # for a key that it shares, which another batch writes
        self._pending.pop(batch.ticket, None)
        self._to_give_back = None

    def _give_back_one(self, batch: Batch, at: int) -> None:
        """Undo what one key of a lookup, or one transfer of another batch, has taken."""
        if batch.kind == "lookup":
            at = len(batch.keys) - 1 - at  # the first key is used last, as in `unlock`
            key = batch.keys[at]
            if batch.ok[at]:
                self._lanes[key[-1]].unhold(key)
            return
        place = batch.places[at]
        key = batch.keys[place]
        if batch.kind == "store":
            self._lanes[key[-1]].abandon(key)
            self._waiting.pop(key, None)
        elif place != NOT_TAKEN:
            self._lanes[key[-1]].unpin(key)

    def _unpin_present(self, batch: Batch) -> None:
        while batch.num_unpinned < len(batch.present):
            following = batch.num_unpinned + 1
            key = batch.present[-following]
            if key:
                self._lanes[key[-1]].unpin(key)
            batch.num_unpinned = following

    def _counters(self) -> dict[str, int]:
        """Return the counters of all batches that have ended."""
        ready, counted = self._results
        counters = counted.copy()
        for _, counts in ready:
            for name, number in counts:
                counters[name] = counters.get(name, 0) + number
        return counters

    def _counts_of(self, batch: Batch) -> Counts:
        """Return what a batch adds to the counters."""
        total, num_ok = len(batch.ok), sum(batch.ok)
        if batch.kind == "lookup":
            return [("num_lookups", total), ("num_found", num_ok)]
        if batch.kind == "remove":
            return [("num_removed", num_ok)]
        past = "loaded" if batch.kind == "load" else "stored"
        lanes = (batch.keys[place][-1] for place in batch.places if batch.ok[place])
        return [
            (f"num_{past}", num_ok),
            (f"num_{batch.kind}_failures", total - num_ok),
            (f"bytes_{past}", sum(self._payload_bytes[lane] for lane in lanes)),
        ]
