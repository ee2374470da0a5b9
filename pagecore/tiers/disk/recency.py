"""The record of the order of last uses, which a store writes when it is closed."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.disk.slab import PART

NAME = "recency"
# magic, digest of the fingerprint, sequence number of the newest entry, lanes; then the slots of each lane, their
# numbers as uint32, the least recently used first, and the CRC-32 of all bytes before it.
HEAD = struct.Struct("<16s32sQI")
MAGIC = b"PAGECORE-USES\0\0\1"
COUNT = struct.Struct("<I")

Slots = NDArray[np.uint32]


class RecencyRecord:
    """Slots of each lane, the least recently used first, as of an entry with the sequence number `newest`.

    Entries with larger numbers are newer than the record, in whichever slots they are.
    """

    def __init__(self, newest: int, lanes: Sequence[Slots]) -> None:
        self.newest = newest
        self.lanes = lanes

    def write(self, folder: Path, digest: bytes) -> None:
        """Replace the record of a folder; one that cannot be written costs no more than the order."""
        body = HEAD.pack(MAGIC, digest, self.newest, len(self.lanes))
        body += b"".join(COUNT.pack(len(slots)) + slots.astype("<u4").tobytes() for slots in self.lanes)
        part = folder / (NAME + PART)
        try:
            part.write_bytes(body + COUNT.pack(zlib.crc32(body)))
            os.replace(part, folder / NAME)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    @classmethod
    def read(cls, folder: Path, digest: bytes) -> RecencyRecord | None:
        """Return the record of a folder; None without one, or if it is damaged or of another fingerprint."""
        try:
            data = (folder / NAME).read_bytes()
            magic, owner, newest, num_lanes = HEAD.unpack_from(data)
            is_whole = COUNT.unpack_from(data, len(data) - COUNT.size)[0] == zlib.crc32(data[: -COUNT.size])
            if (magic, owner) != (MAGIC, digest) or not is_whole:
                return None
            at, lanes = HEAD.size, []
            for _ in range(num_lanes):
                (count,) = COUNT.unpack_from(data, at)
                lanes.append(np.frombuffer(data, "<u4", count, at + COUNT.size).astype(np.uint32))
                at += COUNT.size + 4 * count
        except (OSError, struct.error, ValueError):
            return None
        return cls(newest, lanes)

    def order(self, lane: int, slots: NDArray[np.int64], sequences: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return an order of entries of a lane: those of the record by last use, then the newer ones by number."""
        ranks = np.full(max(int(slots.max(initial=0)), int(self.lanes[lane].max(initial=0))) + 1, -1, np.int64)
        ranks[self.lanes[lane]] = np.arange(len(self.lanes[lane]))
        is_newer = sequences > np.uint64(self.newest)
        return np.lexsort((sequences, np.where(is_newer, 0, ranks[slots]), is_newer))
