"""Circuit breaker: after repeated failures a store is left alone for a while, then tried with one batch."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from pagecore.errors import ShapeError
from pagecore.storage.checks import as_float, require_int

State = Literal["closed", "open", "half-open"]


class Admission(Enum):
    """Answer of a breaker to a batch: refused, admitted, or admitted as the one probe of a half-open breaker."""

    REFUSED = 0
    ADMITTED = 1
    PROBE = 2


class Breaker:
    """Circuit breaker of one store.

    States: closed -> open after `failures` failures without a success between them; open -> half-open when the pause
    is over; half-open -> closed when the probe succeeds, -> open with twice the pause when it fails. A success sets the
    pause back to `first_pause`. Times are passed by the caller, and a time before an earlier one counts as the earlier.

    Parameters
    ----------
    failures : int
        Consecutive failures that open the breaker.
    first_pause, longest_pause : float
        Seconds of the first pause, and the limit of its doubling.

    Notes
    -----
    Source: M. Nygard, Release It!, 2007, chapter 5.
    """

    def __init__(self, *, failures: int = 3, first_pause: float = 1.0, longest_pause: float = 60.0) -> None:
        self.failures = require_int("failures", failures, max=None)
        if not 0 < as_float("first_pause", first_pause) <= as_float("longest_pause", longest_pause):
            raise ShapeError(f"expected 0 < first_pause <= longest_pause, got {first_pause} and {longest_pause}")
        self.first_pause = first_pause
        self.longest_pause = longest_pause
        self._count = 0
        self._pause = first_pause
        self._open_until: float | None = None
        self._has_probe = False
        self._latest = float("-inf")

    def state(self, now: float) -> State:
        """Return the state at time `now`."""
        if self._open_until is None:
            return "closed"
        return "half-open" if self._time(now) >= self._open_until else "open"

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the breaker is half-open; 0 if it is not open."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._time(now))

    def admit(self, now: float) -> Admission:
        """Decide about a batch; each admitted batch ends with one call of `record` or `withdraw`."""
        state = self.state(now)
        if state == "closed":
            return Admission.ADMITTED
        if state == "open" or self._has_probe:
            return Admission.REFUSED
        self._has_probe = True
        return Admission.PROBE

    def record(self, admission: Admission, now: float, *, success: bool) -> None:
        """Take the outcome of an admitted batch into account; while open, only that of the probe counts."""
        if admission is Admission.PROBE:
            self._has_probe = False
        elif self._open_until is not None:
            return
        if success:
            self._count = 0
            self._pause = self.first_pause
            self._open_until = None
            return
        self._count += 1
        if admission is Admission.PROBE:
            self._pause = min(2 * self._pause, self.longest_pause)
        if admission is Admission.PROBE or self._count >= self.failures:
            self._open_until = self._time(now) + self._pause

    def trip(self, now: float) -> None:
        """Open the breaker at once, for twice the pause if it was open before."""
        if self._open_until is not None:
            self._pause = min(2 * self._pause, self.longest_pause)
        self._open_until = self._time(now) + self._pause

    def withdraw(self, admission: Admission) -> None:
        """Take back an admitted batch that has no outcome, such as a cancelled one."""
        if admission is Admission.PROBE:
            self._has_probe = False

    def _time(self, now: float) -> float:
        self._latest = max(self._latest, now)
        return self._latest
