"""The disk store for the bench "tiers", against reads and writes of the same slots by eight threads and a file copy."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.runner import Bench, Job
from bench.harness.targets import DISK_READ_RATIO_MIN
from bench.tiers.store_load import Entries, fingerprint_of, puts_and_gets
from pagecore.tiers.disk import DiskStore
from pagecore.tiers.disk._io import UNIT, SlabTable
from pagecore.tiers.disk.header import read_header

THREADS = 8
PREADV, PWRITEV, COPY = "preadv, 8 threads", "pwritev, 8 threads", "shutil.copyfile"
MIB = 1 << 20


def run(bench: Bench, entry_bytes: int, count: int) -> None:
    """Time puts and gets of one size in a temporary folder; TMPDIR selects the disk."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        room = 4 * count * (entry_bytes + UNIT) + MIB
        fingerprint = fingerprint_of(entry_bytes)
        store = stack.enter_context(DiskStore(folder, fingerprint=fingerprint, max_bytes=room, threads=THREADS))
        if not store.is_direct:
            bench.note(f"{folder} has no O_DIRECT: the page cache serves; set TMPDIR to a folder on a disk")
        (path,) = store.path.glob("*.slab")
        written, read = Entries(count, entry_bytes), Entries(count, entry_bytes, seed=1)
        raw = stack.enter_context(RawSlots(path, read, store.is_direct))
        spare = stack.enter_context(RawSlots(Path(shutil.copyfile(path, folder / "spare")), written, store.is_direct))
        copied = Job(partial(shutil.copyfile, _file_of(folder / "whole", count * entry_bytes), folder / "copy"))
        puts_and_gets(
            bench,
            store,
            written,
            read,
            put_controls={PWRITEV: Job(spare.write), COPY: copied},
            get_controls={PREADV: Job(raw.read, before=raw.find), COPY: copied},
            at_least={PREADV: DISK_READ_RATIO_MIN} if entry_bytes == MIB else None,
        )


def _file_of(path: Path, nbytes: int) -> Path:
    path.write_bytes(np.random.default_rng(5).bytes(nbytes))
    return path


class RawSlots:
    """Slots of a slab, read and written by threads, with one call for each slot."""

    def __init__(self, path: Path, entries: Entries, is_direct: bool) -> None:
        header = read_header(path.open("rb").read(UNIT))
        assert header is not None
        self._header = header
        self._views = [memoryview(row) for row in entries.rows]
        self._slots: Sequence[int] = range(len(entries.rows))
        self._fd = os.open(path, os.O_RDWR | (os.O_DIRECT if is_direct else 0))
        self._pool = ThreadPoolExecutor(THREADS)

    def find(self) -> None:
        """Select the slots that were stored last, in random order."""
        header = self._header
        sizes = header.num_slots, header.payload_bytes, header.table_offset, header.data_offset
        table = SlabTable(self._fd, header.identity, *sizes)
        table.open()
        slots, _, sequences, _ = table.used()
        newest = slots[np.argsort(sequences)[-len(self._views) :]]
        self._slots = np.random.default_rng(4).permutation(newest).tolist()

    def read(self) -> None:
        """Read the slots."""
        self._move(os.preadv)

    def write(self) -> None:
        """Write the slots."""
        self._move(os.pwritev)

    def _move(self, call: Callable[[int, list[memoryview], int], int]) -> None:
        header = self._header

        waiting = iter(list(zip(self._views, self._slots, strict=True)))

        def share(_: int) -> None:
            for view, slot in waiting:  # the GIL makes each step of the iterator atomic
                moved = call(self._fd, [view], header.data_offset + slot * header.slot_bytes)
                assert moved == len(view)

        list(self._pool.map(share, range(THREADS)))

    def __enter__(self) -> RawSlots:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        os.close(self._fd)
