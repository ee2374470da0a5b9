"""Opening of files whose path comes from the user."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

__all__ = ["open_file"]

KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for binary reading, without waiting for another process.

    Raises
    ------
    OSError
        The file cannot be opened, or is a directory, a FIFO (which would block until it has a writer), a device or a
        socket.
    ValueError
        The path has a null byte.
    """
    # O_NONBLOCK keeps the open of a FIFO from blocking; it has no effect on a regular file.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            kind = KINDS.get(stat.S_IFMT(mode), "a special file")
            raise OSError(errno.EINVAL, f"it is {kind}; expected a regular file", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
