"""Slab files: created whole or not at all, and opened after a check of their superblocks."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from pagecore.errors import NotEnoughMemory, StoreError, UnsupportedOption
from pagecore.tiers.disk._io import UNIT, IoQueue, SlabTable
from pagecore.tiers.disk.header import SUPERBLOCKS, SlabHeader, read_header

# Suffix of a file that is not complete.
PART = ".part"
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Slab:
    """An open slab.

    Attributes
    ----------
    header : SlabHeader
    table : SlabTable
    is_direct : bool
        The file is open with O_DIRECT: reads and writes bypass the page cache.
    """

    def __init__(self, path: Path, header: SlabHeader, queue: IoQueue) -> None:
        """Open the file at `path`, which `check_file` has accepted; raise StoreError if its table cannot be read."""
        self.header = header
        self._fd = -1
        try:
            self._fd, self.is_direct = _open_direct(path)
            self.table = SlabTable(
                self._fd,
                header.identity,
                header.num_slots,
                header.payload_bytes,
                header.table_offset,
                header.data_offset,
                queue.file_ops,
            )
            self.table.open()
        except OSError as error:
            self.close()
            raise StoreError(
                f"the table of {path} cannot be read: {error.strerror}; check the disk, or delete the file"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; the queue that uses the table is closed already."""
        fd, self._fd = self._fd, -1  # before the call: after an interrupt the number may be that of another file
        if fd >= 0:
            os.close(fd)


def create_slab(path: Path, header: SlabHeader) -> None:
    """Create a file with its final size and superblocks; if there is no room, leave none and raise NotEnoughMemory."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, header.file_bytes)
        for copy in range(SUPERBLOCKS):
            os.pwrite(fd, header.pack(), copy * UNIT)
        os.fsync(fd)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno in NO_ROOM:
            raise NotEnoughMemory(
                f"{path} has no room for {header.file_bytes} bytes: {error.strerror}; free some, or use a smaller "
                "max_bytes"
            ) from error
        raise
    finally:
        os.close(fd)


def check_file(path: Path, expected: SlabHeader) -> None:
    """Raise UnsupportedOption unless a file has the expected header and size; mend one damaged superblock."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        blocks = [os.pread(fd, UNIT, copy * UNIT) for copy in range(SUPERBLOCKS)]
        headers = [read_header(block) for block in blocks]
        found = [header for header in headers if header is not None]
        if not found:
            raise UnsupportedOption(
                f"{path} is not a slab of this version, or both of its superblocks are damaged; delete it"
            )
        for header in found:
            _check_header(path, header, expected)
        if os.fstat(fd).st_size != expected.file_bytes:
            raise UnsupportedOption(
                f"{path} has {os.fstat(fd).st_size} bytes, and its superblock says {expected.file_bytes}; delete it"
            )
        for copy, read in enumerate(headers):
            if read is None:
                os.pwrite(fd, expected.pack(), copy * UNIT)
    finally:
        os.close(fd)


def _check_header(path: Path, header: SlabHeader, expected: SlabHeader) -> None:
    if header.digest != expected.digest:
        raise UnsupportedOption(
            f"{path} holds blocks of another model or layout: its fingerprint begins with {header.digest[:8].hex()}, "
            f"expected {expected.digest[:8].hex()}; delete it, or use another folder"
        )
    for name in ("lane", "number", "num_slots", "payload_bytes"):
        ours, theirs = getattr(expected, name), getattr(header, name)
        if ours != theirs:
            raise UnsupportedOption(
                f"{path} has {name} {theirs}, expected {ours}; open it with the max_bytes, max_blocks_per_file and "
                "state_ratio that it was made with, or delete the folder"
            )


def _open_direct(path: Path) -> tuple[int, bool]:
    """Open a file with O_DIRECT if a read works; return the descriptor and whether it is."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError:
        return os.open(path, flags), False
    try:
        with mmap.mmap(-1, UNIT) as aligned:
            os.preadv(fd, [aligned], 0)
    except OSError:
        os.close(fd)
        return os.open(path, flags), False
    return fd, True
