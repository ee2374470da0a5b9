"""The open slabs of a store, and the entries that they have when the folder is opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pagecore.tiers.disk._io import NO_KEY, IoQueue, SlabTable
from pagecore.tiers.disk.folder import StoreFolder
from pagecore.tiers.disk.header import SlabHeader
from pagecore.tiers.disk.lane import Lane
from pagecore.tiers.disk.recency import RecencyRecord
from pagecore.tiers.disk.slab import Slab


class SlabSet:
    """The slabs of all lanes. Slots are numbered over all files of a lane.

    Parameters
    ----------
    path : Path
        Folder of the fingerprint, which is locked until `close`.
    plan : sequence of sequences of SlabHeader
        Files of each lane; all but the last of a lane have equal numbers of slots.
    queue : IoQueue
        The queue that will use the slabs.

    Attributes
    ----------
    lanes : list of Lane
    newest : int
        Largest sequence number of an entry, or of the record of uses; 0 without both.
    is_direct : bool
        Every file is open with O_DIRECT.

    Raises
    ------
    NotEnoughMemory, StoreError, UnsupportedOption
        As for `DiskStore`; what the call created is removed.
    """

    def __init__(self, path: Path, plan: Sequence[Sequence[SlabHeader]], queue: IoQueue) -> None:
        self._digest = plan[0][0].digest
        self._folder = StoreFolder(path)
        self._slabs: list[list[Slab]] = []
        self.lanes: list[Lane] = []
        self.newest = 0
        try:
            self._folder.create(header for headers in plan for header in headers)
            record = RecencyRecord.read(path, self._digest)
            if record is None or len(record.lanes) != len(plan):
                record = RecencyRecord(0, [np.empty(0, np.uint32)] * len(plan))
            self.newest = record.newest  # its newest entries may have gone, and later ones have larger numbers
            for number, headers in enumerate(plan):
                self._slabs.append([])
                for header in headers:
                    self._slabs[-1].append(Slab(path / header.file_name, header, queue))
                entries, before, newest = _read_entries(self._slabs[-1], headers[0].num_slots, number, record)
                self.lanes.append(Lane(sum(header.num_slots for header in headers), entries, before))
                self.newest = max(self.newest, newest)
        except BaseException:
            self._close_slabs()
            self._folder.undo()
            raise
        self._per_file = [headers[0].num_slots for headers in plan]
        self.is_direct = all(slab.is_direct for slabs in self._slabs for slab in slabs)

    def place(self, lane: int, slot: int) -> tuple[SlabTable, int]:
        """Return the table of a slot of a lane, and the number of the slot in it."""
        number, local = divmod(slot, self._per_file[lane])
        return self._slabs[lane][number].table, local

    def check_invariants(self) -> None:
        """Raise PagecoreError if a table is inconsistent."""
        for slabs in self._slabs:
            for slab in slabs:
                slab.table.check_invariants()

    def flush(self) -> None:
        """Let the files forget the entries that were dropped; what cannot be written may be found again."""
        for slabs in self._slabs:
            for slab in slabs:
                slab.table.flush()

    def record_uses(self, newest: int) -> None:
        """Write the order of last uses; `newest` is the largest sequence number of an entry."""
        lanes = [np.fromiter(lane.slots_by_use(), np.uint32) for lane in self.lanes]
        RecencyRecord(newest, lanes).write(self._folder.path, self._digest)

    def close(self) -> None:
        """Close the files and release the lock of the folder; a second call does nothing."""
        self._close_slabs()
        self._folder.close()

    def _close_slabs(self) -> None:
        for slabs in self._slabs:
            for slab in slabs:
                slab.close()


def _read_entries(
    slabs: Sequence[Slab], slots_per_file: int, lane: int, record: RecencyRecord
) -> tuple[dict[bytes, int], dict[bytes, bytes], int]:
    """Return the slot of each key, the least recently used first, the entries before them, and the largest number.

    A key that was stored, evicted and stored again may be in two slots after a crash. The newer one counts; the tables
    forget the others, so that they do not come back when the newer one is removed.
    """
    parts = [slab.table.used() for slab in slabs]
    slots = np.concatenate([part[0].astype(np.int64) + i * slots_per_file for i, part in enumerate(parts)])
    keys, sequences, before = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3))
    by_number = np.argsort(sequences, kind="stable")
    by_number = by_number[keys[by_number, -1] == lane]
    latest = {keys[i].tobytes(): i for i in by_number.tolist()}
    names, chosen = list(latest), np.fromiter(latest.values(), np.int64)
    for slot in np.delete(slots, chosen).tolist():
        number, local = divmod(slot, slots_per_file)
        slabs[number].table.clear(local)
    order = record.order(lane, slots[chosen], sequences[chosen])
    entries = {names[i]: int(slots[chosen[i]]) for i in order.tolist()}
    links = {names[i]: before[chosen[i]].tobytes() for i in order.tolist()}
    newest = int(sequences.max()) if len(sequences) else 0
    return entries, {key: other for key, other in links.items() if other != NO_KEY}, newest
