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
from typing import BinaryIO, cast

from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.models.config_files.regular_files import open_file
from pagecore.storage.checks import shown

__all__ = ["STANDARD_INPUT", "TraceError", "checked_path", "open_trace", "open_trace_file"]

STANDARD_INPUT = "-"


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
    """Open a regular file; one that ends in .gz or .zst is decompressed.

    Raises
    ------
    OSError, EOFError
        The file cannot be opened or, also while it is read, cannot be decompressed.
    UnsupportedOption
        The file ends in .zst, and zstandard is not installed.
    """
    with open_file(name) as file:
        if name.endswith(".gz"):
            try:
                with gzip.open(file) as plain:
                    yield cast(BinaryIO, plain)
            except zlib.error as error:
                raise OSError(str(error)) from error
        elif name.endswith(".zst"):
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
    try:
        with library.ZstdDecompressor().stream_reader(file) as plain:
            yield cast(BinaryIO, io.BufferedReader(plain, 1 << 20))
    except library.ZstdError as error:
        raise OSError(str(error)) from error
