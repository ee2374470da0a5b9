"""A power failure of a disk that loses and reorders writes, at the level of sectors.

A `Recorder` keeps every write of a workload on a real store. A `History` returns the file as it may be after a power
failure: nothing was synchronised, so that of the sectors written before it any subset has reached the disk. A sector
itself is whole, old or new.

`Reader` is a plain-Python twin that opens such a file; without sums it believes every entry and payload.
"""

import struct

import numpy as np

from pagecore.tiers.keys import payload_sum
from tests.tiers.disk.kit import FileOps, Memory

SECTOR = 512


class Recorder(FileOps):
    """File operations that keep every write, in the order of their ends."""

    def __init__(self):
        super().__init__(on_write=self._record)
        self.writes = []

    def _record(self, fd, parts, offset):
        self.writes.append((offset, b"".join(parts)))


class History:
    """A file before a workload, and every sector that the workload wrote.

    Parameters
    ----------
    before : bytes
    writes : list of (int, bytes)
        Offset and bytes of each write, in their order.
    """

    def __init__(self, before, writes):
        self.before = np.frombuffer(before, np.uint8).reshape(-1, SECTOR)
        self.num_writes = len(writes)
        sizes = [len(data) // SECTOR for _, data in writes]
        self.write = np.repeat(np.arange(len(writes)), sizes)
        places = [offset // SECTOR + np.arange(size) for (offset, _), size in zip(writes, sizes, strict=True)]
        self.place = np.concatenate(places)
        self.data = np.frombuffer(b"".join(data for _, data in writes), np.uint8).reshape(-1, SECTOR)

    def crashed(self, rng):
        """Return the bytes of the file after a failure at a random point.

        Most of the old sectors have reached the disk, and of the sectors written last a share which the failure draws.
        """
        point = int(rng.integers(0, self.num_writes + 1))
        recent = int(rng.integers(0, 24))
        chance = np.where(self.write >= point - recent, rng.choice([0.1, 0.5, 0.9, 1.0]), 0.999)
        kept = np.flatnonzero((rng.random(len(self.write)) < chance) & (self.write < point))
        last = np.full(len(self.before), -1)
        last[self.place[kept]] = kept  # ascending: the last one stays
        image = self.before.copy()
        image[last >= 0] = self.data[last[last >= 0]]
        return image.tobytes()

    def complete(self):
        """Return the bytes of the file without a failure."""
        image = self.before.copy()
        for place, data in zip(self.place, self.data, strict=True):
            image[place] = data
        return image.tobytes()


class Reader:
    """The entries of a slab file.

    Parameters
    ----------
    data : bytes
    has_sums : bool
        False: believe entries and payloads without their sums.
    """

    def __init__(self, data, has_sums):
        _, _, _, _, slots, payload, _, _ = struct.unpack_from("<16sIIIIQQ32s", data)
        start = 8192 + -(-slots * 128 // 4096) * 4096
        width = -(-payload // 4096) * 4096
        self.served = {}
        newest = {}
        for slot in range(slots):
            entry = data[8192 + 128 * slot :][:128]
            key, flags, where, length, sequence, total = struct.unpack_from("<17sB2xIQQQ", entry)
            if flags != 1 or where != slot or length != payload or newest.get(key, 0) > sequence:
                continue
            newest[key] = sequence
            row = data[start + slot * width :][:payload]
            if not has_sums or _sum(key, row) == total:
                self.served[key] = row
            else:
                self.served.pop(key, None)


def _sum(key, row):
    memory = Memory(1, len(row))
    memory.rows[0, : len(row)] = np.frombuffer(row, np.uint8)
    return payload_sum(key, int(memory.pieces[0, 0]), len(row))
