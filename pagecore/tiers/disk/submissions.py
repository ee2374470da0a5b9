"""Submissions of a disk store: what each takes from the index before the queue gets its transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial

from pagecore.tiers.disk._io import SlabTable
from pagecore.tiers.disk.batch import NOT_TAKEN, Batch, split_before, split_keys, split_pieces
from pagecore.tiers.disk.parts import StoreParts
from pagecore.tiers.store import Keys, Pieces

Operation = tuple[SlabTable, int, bytes, int, int]


class Submissions(StoreParts):
    """Methods of `DiskStore` that submit batches, and those that release or count holds and uses."""

    _tickets: Iterator[int]
    _sequence: int

    def submit_lookup(self, keys: Keys) -> int:
        """Hold the entries of `keys` that are there; return a ticket. The batch ends at once.

        Parameters
        ----------
        keys : ndarray of uint8
            ``[n, 17]``.

        Raises
        ------
        ShapeError
            Keys of another shape or lane.
        UnsupportedOption
            The store is closed, or belongs to the parent of this process.
        """
        wanted = split_keys(keys, self.fingerprint)
        turn = self._submission()
        with self._lock, turn:
            batch = Batch(next(self._tickets), wanted, "lookup", [False] * len(wanted))
            self._lookup = batch, {key: self._lanes[key[-1]].held.get(key, 0) for key in wanted}
            try:
                for i, key in enumerate(wanted):
                    batch.ok[i] = self._lanes[key[-1]].hold(key)
                return self._ledger.end(batch)
            except Exception:
                self._lookup = None
                self._ledger.give_back(batch)
                raise

    def submit_load(self, keys: Keys, pieces: Pieces) -> int:
        """Read entries into memory and verify them; return a ticket.

        Parameters
        ----------
        keys : ndarray of uint8
            ``[n, 17]``; their holds end with the batch.
        pieces : ndarray of uint64
            ``[n, 2]``, address and bytes; the memory belongs to the store until the batch ends. A piece whose key fails
            has undefined contents.

        Raises
        ------
        ShapeError
            Keys or pieces of another shape, lane or size, or memory that is not aligned to 4,096 bytes.
        UnsupportedOption
            The store is closed, or belongs to the parent of this process.
        """
        wanted = split_keys(keys, self.fingerprint)
        targets = split_pieces(pieces, wanted, self.fingerprint)
        turn = self._submission()
        with self._lock, turn:
            batch = Batch(next(self._tickets), wanted, "load", [False] * len(wanted))
            operations: list[Operation] = []
            try:
                for i, key in enumerate(wanted):
                    lane = self._lanes[key[-1]]
                    if key not in lane.entries:
                        lane.unhold(key)
                        continue
                    batch.places.append(NOT_TAKEN)
                    slot = lane.pin_for_load(key)
                    batch.places[-1] = i
                    assert slot is not None
                    operations.append((*self._slabs.place(key[-1], slot), key, *targets[i]))
                _end_first(batch, operations)
                if not operations:
                    return self._ledger.end(batch)
                return self._sent(batch, partial(self._queue.submit_load, batch.ticket, operations))
            except BaseException:
                self._undo(batch, operations)
                raise

    def submit_store(self, keys: Keys, pieces: Pieces, *, before: Keys | None = None) -> int:
        """Write entries; return a ticket.

        Parameters
        ----------
        keys : ndarray of uint8
            ``[n, 17]``. An entry that is there already is not written; one that another batch is writing shares that
            batch's result.
        pieces : ndarray of uint64
            ``[n, 2]``, address and bytes; the memory must not change until the batch ends.
        before : ndarray of uint8, optional
            ``[m, 17]``: the keys are a part of one prefix, and `before` has the entry before the first of each lane, if
            there is one. An entry is then evicted before the one that it follows, also when the folder is opened again,
            and is not stored without it. States follow nothing.

        Raises
        ------
        ShapeError
            Keys or pieces of another shape, lane or size, or memory that is not aligned to 4,096 bytes.
        UnsupportedOption
            The store is closed, or belongs to the parent of this process.
        """
        wanted = split_keys(keys, self.fingerprint)
        sources = split_pieces(pieces, wanted, self.fingerprint)
        links = split_before(wanted, before, self.fingerprint)
        turn = self._submission()
        with self._lock, turn:
            batch = Batch(next(self._tickets), wanted, "store", [False] * len(wanted))
            operations: list[Operation] = []
            shared: list[tuple[bytes, int]] = []
            try:
                self._pin_present(batch)
                for i, key in enumerate(wanted):
                    lane = self._lanes[key[-1]]
                    if key in lane.entries:
                        batch.ok[i] = True
                    elif key in lane.writing:
                        shared.append((key, i))
                    else:
                        batch.places.append(i)
                        slot = lane.take(key, links[i])
                        if slot is None:
                            del batch.places[-1]
                            batch.full = batch.full or f"lane {key[-1]} has no slot that may be evicted for an entry"
                        else:
                            operations.append((*self._slabs.place(key[-1], slot), key, *sources[i]))
                _end_first(batch, operations)
                if not operations and not shared:
                    return self._ledger.end(batch)
                batch.num_shared = len(shared)
                previous = [links[i] for i in batch.places]
                submit = partial(self._queue.submit_store, batch.ticket, operations, self._sequence, previous)
                self._sequence += len(operations)
                return self._sent(batch, submit if operations else None, shared)
            except BaseException:
                self._undo(batch, operations)
                raise

    def submit_remove(self, keys: Keys) -> int:
        """Delete entries, held ones too; return a ticket.

        Loads that run still end with the right bytes. What a crash leaves of a removal may be found again.

        Parameters
        ----------
        keys : ndarray of uint8
            ``[n, 17]``. A key without an entry counts as removed; one that another batch is writing fails.

        Raises
        ------
        ShapeError
            Keys of another shape or lane.
        UnsupportedOption
            The store is closed, or belongs to the parent of this process.
        """
        wanted = split_keys(keys, self.fingerprint)
        turn = self._submission()
        with self._lock, turn:
            batch = Batch(next(self._tickets), wanted, "remove", [False] * len(wanted))
            erased: list[tuple[SlabTable, int]] = []
            try:
                for i, key in enumerate(wanted):
                    lane = self._lanes[key[-1]]
                    if key in lane.entries:
                        batch.places.append(NOT_TAKEN)
                        slot = lane.remove(key)
                        batch.places[-1] = i
                        assert slot is not None
                        erased.append(self._slabs.place(key[-1], slot))
                    elif key in lane.writing:
                        batch.full = "another batch is writing an entry; wait for its end"
                    else:
                        batch.ok[i] = True
                if not erased:
                    return self._ledger.end(batch)
                return self._sent(batch, partial(self._queue.submit_erase, batch.ticket, erased))
            except BaseException:
                self._undo(batch, erased)
                raise

    def unlock(self, keys: Keys) -> None:
        """Release the holds of a lookup; keys without a hold are ignored."""
        wanted = split_keys(keys, self.fingerprint)
        if self._is_usable():
            turn = self._turn()
            with self._lock, turn:
                for key in reversed(wanted):
                    self._lanes[key[-1]].unhold(key)

    def touch(self, keys: Keys) -> None:
        """Count entries as used now, from the last key to the first; keys without an entry are ignored.

        `Tiers` reports what sequences have used from the device or the host, so that it is not evicted before what
        follows it.
        """
        wanted = split_keys(keys, self.fingerprint)
        if self._is_usable():
            turn = self._turn()
            with self._lock, turn:
                for key in reversed(wanted):
                    self._lanes[key[-1]].touch(key)

    def _pin_present(self, batch: Batch) -> None:
        """Pin the keys of a store that are there already, until the batch ends."""
        for key in batch.keys:
            lane = self._lanes[key[-1]]
            if key in lane.entries:
                batch.present.append(b"")
                lane.pin(key)
                batch.present[-1] = key

    def _sent(self, batch: Batch, submit: Callable[[], object] | None, shared: Iterable[tuple[bytes, int]] = ()) -> int:
        """Add a batch to the ledger and hand its transfers to the queue; return its ticket."""
        self._ledger.begin(batch, shared)
        if submit is not None:
            submit()
        return batch.ticket

    def _undo(self, batch: Batch, operations: Sized) -> None:
        """Give back what a batch has taken, unless the queue has it, which has emptied `operations` then."""
        if not (self._ledger.is_pending(batch) and batch.places and not operations):
            batch.places.sort(reverse=True)  # as `_end_first`, which may not have been called
            self._ledger.give_back(batch)


def _end_first(batch: Batch, operations: list[Operation]) -> None:
    """Reverse the transfers of a batch, so that the first keys, the beginning of a prefix, are used last.

    Eviction then takes a prefix from its end, as a prefix tree does.
    """
    batch.places.reverse()
    operations.reverse()
