"""PrefixObserver: the calls that a cache makes to a tier."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.prefix.retention import RetentionOptions
from pagecore.cache.sequences._sequences import Sequence


class PrefixObserver(Protocol):
    """Follows what a cache publishes. The cache calls it under its lock, and has no cost without one.

    An exception leaves the cache either before or after the operation, as an interrupt does.
    """

    def adding(self, ids: NDArray[np.int32], options: RetentionOptions, most: int) -> None:
        """Note that a sequence is about to reuse up to `most` tokens of its cached prefix."""

    def copying(self, sequences: list[Sequence]) -> None:
        """Note that other sequences are about to become copies of these, which may repeat."""

    def preparing(self, sequences: list[Sequence], counts: ArrayLike) -> None:
        """Note that a step of these sequences is about to take blocks; may evict what the step will evict."""

    def committed(self, sequences: list[Sequence]) -> None:
        """Note that a step of these sequences was committed, and their full blocks published."""

    def removing(self, sequence: Sequence) -> None:
        """Note that a sequence, which may be swapped out, is about to be removed."""

    def hit_tokens(self, sequence: Sequence) -> dict[str, int]:
        """Return the reused tokens of a sequence by the medium that had them."""

    def match_ids(self, ids: NDArray[np.int32], options: RetentionOptions, most: int) -> int:
        """Return the tokens of a prefix that the device would have after `adding`."""

    def settling(self) -> None:
        """Wait for the copies that hold blocks of the cache, and end them."""

    def releasing(self) -> None:
        """Note that the cache is about to evict all that it has cached; may save it, and waits for the copies."""
