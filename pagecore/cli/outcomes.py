"""How a command ends: exit codes, and the one line on stderr that says why."""

from __future__ import annotations

import sys

from pagecore.errors import PagecoreError

# A result that is wrong, a command that cannot be done, Ctrl-C as shells report it.
WRONG, REFUSED, INTERRUPTED = 1, 2, 130


class MissingExtraError(PagecoreError, ImportError):
    """A command needs a package that only an extra installs."""


class UnwritableFileError(PagecoreError, OSError):
    """A file that the command was asked to write cannot be written."""


def fail(reason: str, code: int) -> int:
    """Say why on stderr, and return the exit code."""
    print(f"pagecore: {' '.join(reason.split())}", file=sys.stderr)
    return code
