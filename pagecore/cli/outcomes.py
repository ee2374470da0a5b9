"""Exit codes of the command, and the one-line error message on stderr."""

from __future__ import annotations

import sys

from pagecore.errors import PagecoreError

# Exit codes: a check failed; the command cannot run; Ctrl-C, as shells report it.
WRONG, REFUSED, INTERRUPTED = 1, 2, 130


class MissingExtraError(PagecoreError, ImportError):
    """A package of an extra that is not installed is required."""


class UnwritableFileError(PagecoreError, OSError):
    """An output file cannot be written."""


def fail(reason: str, code: int) -> int:
    """Print the reason to stderr and return `code`."""
    print(f"pagecore: {' '.join(reason.split())}", file=sys.stderr)
    return code
