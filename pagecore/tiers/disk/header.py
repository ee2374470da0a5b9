"""The layout of a slab file, and the superblocks that describe it."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from pagecore.storage.checks import ceil_div
from pagecore.tiers.disk._io import ENTRY_BYTES, UNIT

MAGIC = b"PAGECORE-SLAB\0\0\0"
VERSION = 1
# magic, version, lane, number, slots, bytes of a payload, bytes of the file, digest of the fingerprint
FIELDS = struct.Struct("<16sIIIIQQ32s")
CHECK = struct.Struct("<I")
SUPERBLOCKS = 2


@dataclass(frozen=True)
class SlabHeader:
    """Contents of a superblock.

    A file has two superblocks of 4,096 bytes, the table of 128-byte entries in whole units of 4,096 bytes, and the
    slots, each a payload in whole units.

    Attributes
    ----------
    digest : bytes
        Digest of the fingerprint, 32 bytes.
    lane, number : int
        Lane of the entries, and number of the file in its lane.
    num_slots : int
    payload_bytes : int
        Bytes of an entry.
    """

    digest: bytes
    lane: int
    number: int
    num_slots: int
    payload_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in the file."""
        return ceil_div(self.payload_bytes, UNIT) * UNIT

    @property
    def table_offset(self) -> int:
        """Offset of the first entry."""
        return SUPERBLOCKS * UNIT

    @property
    def data_offset(self) -> int:
        """Offset of the first slot."""
        return self.table_offset + ceil_div(self.num_slots * ENTRY_BYTES, UNIT) * UNIT

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self.data_offset + self.num_slots * self.slot_bytes

    @property
    def file_name(self) -> str:
        """Name of the file in the folder of its fingerprint."""
        return f"lane{self.lane}-{self.number:03}.slab"

    def pack(self) -> bytes:
        """Return a superblock: the fields, zeros, and the CRC-32 of the bytes before it."""
        numbers = (VERSION, self.lane, self.number, self.num_slots, self.payload_bytes, self.file_bytes)
        body = FIELDS.pack(MAGIC, *numbers, self.digest).ljust(UNIT - CHECK.size, b"\0")
        return body + CHECK.pack(zlib.crc32(body))

    @property
    def identity(self) -> bytes:
        """Bytes that seed the sums of the entries, so that those of another slab are invalid."""
        return self.pack()


def read_header(block: bytes) -> SlabHeader | None:
    """Return the contents of a superblock; None if it is damaged, or of another version."""
    if len(block) != UNIT or CHECK.unpack(block[-CHECK.size :])[0] != zlib.crc32(block[: -CHECK.size]):
        return None
    magic, version, lane, number, num_slots, payload_bytes, file_bytes, digest = FIELDS.unpack_from(block)
    if magic != MAGIC or version != VERSION:
        return None
    header = SlabHeader(digest, lane, number, num_slots, payload_bytes)
    return header if header.file_bytes == file_bytes else None
