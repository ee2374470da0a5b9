"""Prompts that begin alike: one run computes the common blocks, and the others wait for them.

A run that is not admitted yet waits one step if a prompt of this step computes the block after its cached prefix. In
the next step it reuses that block. It waits again only if its cached prefix has grown, so that it is admitted even
where a cache cannot reuse the blocks: those of windows that have passed, or without a checkpoint of the states.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from pagecore.serving.crossing import prefix_key

if TYPE_CHECKING:
    from pagecore.serving.request import Run

__all__ = ["SharedPrompts"]

Key = tuple[Hashable, bytes]


class SharedPrompts:
    """The first new block of each prompt of a step.

    Parameters
    ----------
    block_size : int
        Slots of a block of the cache.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[Key, Run] = {}
        # Most steps admit one run, which is compared with nothing: keys are made when a second one asks.
        self._unread: list[tuple[Run, int]] = []

    def add(self, run: Run, count: int) -> None:
        """Note that the step computes `count` tokens of a prompt."""
        self._unread.append((run, run.sequence.num_computed_tokens + count))

    def find(self, run: Run) -> Run | None:
        """Return a run of this step for whose next block `run`, which is pinned, should wait; None if there is none."""
        if not self._unread and not self._blocks:
            return None
        cached = run.sequence.num_computed_tokens
        # A sequence reuses at most the blocks before its last token.
        if cached <= run.shared_at or self._end(cached) >= len(run.tokens):
            return None
        for other, end in self._unread:
            computed = other.sequence.num_computed_tokens
            if self._end(computed) <= end:
                self._blocks.setdefault(self._key(other, computed), other)
        self._unread.clear()
        return self._blocks.get(self._key(run, cached))

    def _end(self, computed: int) -> int:
        return (computed // self._block_size + 1) * self._block_size

    def _key(self, run: Run, computed: int) -> Key:
        return prefix_key(run), run.tokens[: self._end(computed)].tobytes()
