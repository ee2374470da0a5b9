"""Journal of one transition, so that an exception at any moment leaves it done or not begun."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Journal"]


class Journal:
    """Runs transitions that consist of an all-or-nothing call and of the bookkeeping after it.

    A transition is written down before its call. If an exception (Ctrl-C, out of memory) interrupts it, `settle` asks
    whether the call took effect: if so it repeats the bookkeeping, and otherwise nothing has happened. The bookkeeping
    must therefore be idempotent: assignments of values that were computed before the call, and calls that check whether
    they were made already.
    """

    def __init__(self) -> None:
        self._open: tuple[Callable[[], bool], Callable[[], None]] | None = None

    @property
    def is_open(self) -> bool:
        """True if a transition was interrupted and is not settled."""
        return self._open is not None

    def run(self, call: Callable[[], object], took_effect: Callable[[], bool], record: Callable[[], None]) -> None:
        """Make `call`, then `record` it; `took_effect` returns True once the call has happened."""
        self._open = (took_effect, record)
        call()
        record()
        self._open = None

    def settle(self) -> None:
        """Complete or discard the transition that an exception interrupted, if any."""
        if self._open is not None:
            took_effect, record = self._open
            if took_effect():
                record()
            self._open = None
