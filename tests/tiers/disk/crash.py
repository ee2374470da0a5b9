"""A power failure of a disk that loses and reorders writes, at the level of sectors.

A `Recorder` runs a workload on a real store and keeps every write. `crashed` returns a file as it may be after a power
failure: nothing was synchronised, so that of the sectors written before the failure any subset has reached the disk. A
sector itself is whole, old or new.

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


def crashed(before, writes, rng):
    """Return the bytes of a file after a failure at a random point of `writes`."""
    image = np.frombuffer(before, np.uint8).copy().reshape(-1, SECTOR)
    point = int(rng.integers(0, len(writes) + 1))
    # Most of the old writes have reached the disk; of the last ones, a share of which the failure draws.
    share = rng.choice([0.1, 0.5, 0.9, 1.0])
    recent = int(rng.integers(0, 24))
    for number, (offset, data) in enumerate(writes[:point]):
        sectors = np.frombuffer(data, np.uint8).reshape(-1, SECTOR)
        kept = rng.random(len(sectors)) < (share if number >= point - recent else 0.999)
        first = offset // SECTOR
        image[first : first + len(sectors)][kept] = sectors[kept]
    return image.tobytes()


class Reader:
    """The entries of a slab file.

    Parameters
    ----------
    data : bytes
    has_sums : bool
        False: believe entries and payloads without their sums.
    check_entry : callable
        Returns True if an entry is one that its slot may have, by its sum.
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
