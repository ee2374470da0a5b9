"""The `pagecore` command: info, demo, replay, plan."""

from __future__ import annotations

import os
import sys

from pagecore.cli.arguments import parser
from pagecore.cli.outcomes import INTERRUPTED, REFUSED, WRONG, fail
from pagecore.errors import PagecoreError

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns
    -------
    int
        0 when all is well, 1 when a check failed, 2 when the command cannot be done (one line on stderr says why) or no
        request could be served, 130 after Ctrl-C.
    """
    if isinstance(sys.stdout, type(sys.__stdout__)) and sys.stdout is not None:
        # Bars and box lines must not end a replay on a terminal that has none.
        sys.stdout.reconfigure(errors="replace")
    arguments = parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments)
        if sys.stdout is not None:  # closed by the caller: nobody is to read
            sys.stdout.flush()
    except KeyboardInterrupt:
        return fail("interrupted", INTERRUPTED)
    except PagecoreError as error:
        return fail(str(error), REFUSED)
    except OSError as error:
        # Our output has nowhere to go; the interpreter must not try to flush it once more.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return WRONG
        return fail(f"output cannot be written: {error.strerror or error}", REFUSED)
    except MemoryError as error:
        return fail(f"out of memory ({error or 'no details'}); give less --memory or --max-running", REFUSED)
    return code
