"""Prompts that begin alike: one run computes the common blocks, and the others wait for them.

A run that is not admitted yet waits one step if a prompt of this step computes the block after its cached prefix. In
the next step it reuses that block. It waits again only if its cached prefix has grown, so that it is admitted even
where a cache cannot reuse the blocks: those of windows that have passed, or without a checkpoint of the states.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from pagecore.serving.scheduling.crossing import prefix_key

if TYPE_CHECKING:
    from pagecore.serving.scheduling.request import Run

__all__ = ["SharedPrompts"]

# Namespace, and bytes of the tokens up to the end of a block.
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
        self._blocks: set[Key] = set()
        # Most steps admit one run, which is compared with nothing: keys are made when a second one asks.
        self._unread: list[tuple[Run, int]] = []
        self._asked: tuple[Run, Key] | None = None

    def add(self, run: Run, count: int) -> None:
        """Note that the step computes `count` tokens of a prompt."""
        computed = run.sequence.num_computed_tokens
        if self._end(computed) > computed + count:
            return
        if self._asked is not None and self._asked[0] is run:
            self._blocks.add(self._asked[1])
        else:
            self._unread.append((run, computed))

    def should_wait(self, run: Run) -> bool:
        """Return True if the step computes the next block of `run`, which is pinned, and it has not waited for it."""
        if not self._unread and not self._blocks:
            return False
        cached = run.sequence.num_computed_tokens
        end, most = self._end(cached), run.request.max_reused_tokens
        # A sequence reuses at most the blocks before its last token.
        if cached <= run.shared_at or end >= len(run.tokens) or (most is not None and end > most):
            return False
        for other, computed in self._unread:
            self._blocks.add(self._key(other, computed))
        self._unread.clear()
        key = self._key(run, cached)
        self._asked = run, key
        return key in self._blocks

    def _end(self, computed: int) -> int:
        return (computed // self._block_size + 1) * self._block_size

    def _key(self, run: Run, computed: int) -> Key:
        return prefix_key(run), run.tokens[: self._end(computed)].tobytes()
