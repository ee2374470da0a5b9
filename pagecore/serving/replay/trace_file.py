"""Files of recorded traffic, compressed or not, and the standard input."""

from __future__ import annotations

import gzip
import importlib
import io
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.models.config_files.regular_files import open_file
from pagecore.storage.checks import shown

__all__ = ["STANDARD_INPUT", "TraceError", "checked_path", "open_trace", "open_trace_file"]

STANDARD_INPUT = "-"
# Compressed bytes that are read at once: 4 of them may become 128 KiB, and this many 32 MiB.
ZSTD_BYTES = 1024


class TraceError(PagecoreError, ValueError):
    """A trace cannot be read, or a line is malformed; the message names file, line and reason."""


def checked_path(path: object) -> str:
    """Return a path as str; raise TraceError if it is not a path."""
    if not isinstance(path, str | os.PathLike):
        raise TraceError(f"expected the path of a trace, or '-' for the standard input, got {shown(path)}")
    name = os.fsdecode(path)
    try:
        if b"\0" not in os.fsencode(name):
            return name
    except UnicodeEncodeError:
        pass
    raise TraceError(f"expected the path of a trace, got {shown(name)}, which is not a path")


@contextmanager
def open_trace(name: str) -> Iterator[BinaryIO]:
    """Open a trace; the standard input, "-", stays open."""
    if name != STANDARD_INPUT:
        with open_trace_file(name) as file:
            yield file
        return
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise TraceError("trace - cannot be read: standard input is not open as bytes; pass the path of a file")
    yield stream


@contextmanager
def open_trace_file(name: str) -> Iterator[BinaryIO]:
    """Open a regular file; one that ends in .gz or .zst, in any case of letters, is decompressed.

    Raises
    ------
    OSError, EOFError
        The file cannot be opened or, also while it is read, cannot be decompressed.
    UnsupportedOption
        The file ends in .zst, and zstandard is not installed.
    """
    with open_file(name) as file:
        ending = name.lower()
        if ending.endswith(".gz"):
            try:
                with gzip.open(file) as plain:
                    yield cast(BinaryIO, plain)
            except zlib.error as error:
                raise OSError(str(error)) from error
        elif ending.endswith(".zst"):
            with _zstandard(name, file) as plain:
                yield plain
        else:
            yield file


@contextmanager
def _zstandard(path: str, file: BinaryIO) -> Iterator[BinaryIO]:
    try:
        library = importlib.import_module("zstandard")
    except ImportError as error:
        raise UnsupportedOption(
            f"trace {path} needs zstandard, which is not installed ({error}); run pip install 'pagecore[cli]', or "
            "decompress it"
        ) from None
    frames = cast(io.RawIOBase, _ZstdFrames(file, library.ZstdDecompressor()))
    try:
        with io.BufferedReader(frames, 1 << 20) as plain:
            yield plain
    except library.ZstdError as error:
        raise OSError(str(error)) from error


class _ZstdFrames(io.RawIOBase):
    """The plain bytes of all frames of a file; raises EOFError if the last frame is cut off.

    A `stream_reader` of zstandard takes a file that is cut off for one that ends there.
    """

    def __init__(self, file: BinaryIO, decompressor: Any) -> None:
        self._file = file
        self._decompressor = decompressor
        self._frame: Any = None
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            packed = self._file.read(ZSTD_BYTES)
            if not packed:
                if self._frame is not None:
                    raise EOFError("Compressed file ended before the end of a frame")
                return 0
            self._plain = memoryview(self._decompress(packed))
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _decompress(self, packed: bytes) -> bytes:
        parts = []
        while packed:
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            parts.append(self._frame.decompress(packed))
            packed = b""
            if self._frame.eof:
                packed, self._frame = self._frame.unused_data, None
        return b"".join(parts)
