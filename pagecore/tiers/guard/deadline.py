"""Deadline of a batch as a function of its bytes."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.errors import ShapeError
from pagecore.storage.checks import as_float


@dataclass(frozen=True, slots=True)
class Deadline:
    """Time limit of a batch: `seconds` plus its bytes at `bytes_per_second`.

    Bytes of earlier batches that have not ended count, too: of loads for a load, of all for a store.
    """

    seconds: float = 0.05
    bytes_per_second: float = 200e6

    def __post_init__(self) -> None:
        if not min(as_float("seconds", self.seconds), as_float("bytes_per_second", self.bytes_per_second)) > 0:
            raise ShapeError(f"expected a deadline of positive seconds and bytes per second, got {self}")

    def of(self, nbytes: int) -> float:
        """Return the seconds that `nbytes` may take."""
        return self.seconds + nbytes / self.bytes_per_second
