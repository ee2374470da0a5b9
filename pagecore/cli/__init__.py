"""The `pagecore` command: info, demo, replay, plan, whatif."""

from __future__ import annotations

import os
import sys

from pagecore.cli.outcomes import INTERRUPTED, REFUSED, WRONG, fail
from pagecore.errors import PagecoreError

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns
    -------
    int
        0 on success; 1 if a check failed; 2 if the command cannot run (the reason is printed to stderr) or no request
        could be served; 130 after Ctrl-C.
    """
    if isinstance(sys.stdout, type(sys.__stdout__)) and sys.stdout is not None:
        # Characters that the terminal cannot print, such as bars, must not abort a replay.
        sys.stdout.reconfigure(errors="replace")
    try:
        # Imported here, so that Ctrl-C ends in one line while it loads, too.
        from pagecore.cli.arguments import parser

        arguments = parser().parse_args(argv)
        code: int = arguments.command(arguments)
        if sys.stdout is not None:  # None if the caller closed it
            sys.stdout.flush()
    except KeyboardInterrupt:
        return fail("interrupted", INTERRUPTED)
    except PagecoreError as error:
        return fail(str(error), REFUSED)
    except OSError as error:
        # stdout cannot be written; redirect it so that the interpreter does not flush it again on exit.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return WRONG
        return fail(f"cannot write output: {error.strerror or error}", REFUSED)
    except MemoryError as error:
        return fail(f"out of memory ({error or 'no details'}); lower --memory or --max-running", REFUSED)
    return code
