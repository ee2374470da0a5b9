"""The open slabs of a store, and the entries that they have when the folder is opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pagecore.tiers.disk._io import IoQueue, SlabTable
from pagecore.tiers.disk.folder import StoreFolder
from pagecore.tiers.disk.header import SlabHeader
from pagecore.tiers.disk.lane import Lane
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
        Largest sequence number of an entry; 0 without entries.
    is_direct : bool
        Every file is open with O_DIRECT.

    Raises
    ------
    NotEnoughMemory, StoreError, UnsupportedOption
        As for `DiskStore`; what the call created is removed.
    """

    def __init__(self, path: Path, plan: Sequence[Sequence[SlabHeader]], queue: IoQueue) -> None:
        self._folder = StoreFolder(path)
        self._slabs: list[list[Slab]] = []
        self.lanes: list[Lane] = []
        self.newest = 0
        try:
            self._folder.create(header for headers in plan for header in headers)
            for number, headers in enumerate(plan):
                self._slabs.append([])
                for header in headers:
                    self._slabs[-1].append(Slab(path / header.file_name, header, queue))
                entries, newest = _read_entries(self._slabs[-1], headers[0].num_slots, number)
                self.lanes.append(Lane(sum(header.num_slots for header in headers), entries))
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

    def close(self) -> None:
        """Close the files and release the lock of the folder; a second call does nothing."""
        self._close_slabs()
        self._folder.close()

    def _close_slabs(self) -> None:
        for slabs in self._slabs:
            for slab in slabs:
                slab.close()


def _read_entries(slabs: Sequence[Slab], slots_per_file: int, lane: int) -> tuple[dict[bytes, int], int]:
    """Return the slot of each key, the oldest first, and the largest sequence number.

    A key that was stored, evicted and stored again may be in two slots; the newer one counts.
    """
    parts = [slab.table.used() for slab in slabs]
    slots = np.concatenate([local.astype(np.int64) + i * slots_per_file for i, (local, _, _) in enumerate(parts)])
    keys = np.concatenate([keys for _, keys, _ in parts])
    sequences = np.concatenate([sequences for _, _, sequences in parts])
    order = np.argsort(sequences, kind="stable")
    order = order[keys[order, -1] == lane]
    names = [row.tobytes() for row in keys[order]]
    newest = int(sequences.max()) if len(sequences) else 0
    return dict(zip(names, slots[order].tolist(), strict=True)), newest
