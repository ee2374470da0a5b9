"""Prompts that begin alike: one run computes the common blocks, and the others wait for them.

A run that is not admitted yet waits one step if a prompt of this step computes the block after its cached prefix. In
the next step it reuses that block. It waits again only if its cached prefix has grown, so that it is admitted even
where a cache cannot reuse the blocks: those of windows that have passed, or without a checkpoint of the states.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from pagecore.serving.scheduling.crossing import prefix_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagecore.serving.scheduling.request import Run

__all__ = ["SharedPrompts"]

# Namespace, end of the first new block of a prompt, and bytes of the tokens in that block.
Key = tuple[Hashable, int, bytes]


class Prefixes:
    """Token arrays of one length; they are hashed once there are two."""

    __slots__ = ("_by_hash", "_first")

    def __init__(self, first: NDArray[np.int32]) -> None:
        self._first = first
        self._by_hash: dict[int, list[NDArray[np.int32]]] | None = None

    def add(self, tokens: NDArray[np.int32]) -> None:
        """Add an array."""
        if self._by_hash is None:
            self._by_hash = {hash(self._first.tobytes()): [self._first]}
        self._by_hash.setdefault(hash(tokens.tobytes()), []).append(tokens)

    def __contains__(self, tokens: NDArray[np.int32]) -> bool:
        alike = [self._first] if self._by_hash is None else self._by_hash.get(hash(tokens.tobytes()), ())
        return any(np.array_equal(one, tokens) for one in alike)


class SharedPrompts:
    """The first new block of each prompt of a step.

    Prompts are compared only if these blocks are equal: most prompts differ there, and some are long. Where a second
    prompt has an equal block, as when one question follows many documents, hashes of the prompts up to its end choose
    which are compared. A call hashes a prompt once, so that the cost of a step is linear in its tokens.

    Parameters
    ----------
    block_size : int
        Slots of a block of the cache.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[Key, Prefixes] = {}
        # Most steps admit one run, which is compared with nothing: keys are made when a second one asks.
        self._unread: list[tuple[Run, int]] = []
        # The run that was asked for last, which most likely is added next.
        self._asked_for: Run | None = None
        self._asked_key: Key = (None, 0, b"")

    def add(self, run: Run, count: int) -> None:
        """Note that the step computes `count` tokens of a prompt."""
        computed = run.sequence.num_computed_tokens
        end = self._end(computed)
        if end > computed + count:
            return
        if run is self._asked_for and end == self._asked_key[1]:
            self._note(self._asked_key, run)
        else:
            self._unread.append((run, end))

    def should_wait(self, run: Run) -> bool:
        """Return True if the step computes the next block of `run`, which is pinned, and it has not waited for it."""
        if not self._unread and not self._blocks:
            return False
        cached = run.sequence.num_computed_tokens
        end, most = self._end(cached), run.request.max_reused_tokens
        # A sequence reuses at most the blocks before its last token.
        if cached <= run.shared_at or end >= len(run.tokens) or (most is not None and end > most):
            return False
        for other, last in self._unread:
            self._note(self._key(other, last), other)
        self._unread.clear()
        self._asked_for, self._asked_key = run, self._key(run, end)
        found = self._blocks.get(self._asked_key)
        return found is not None and run.tokens[:end] in found

    def _note(self, key: Key, run: Run) -> None:
        tokens, found = run.tokens[: key[1]], self._blocks.get(key)
        if found is None:
            self._blocks[key] = Prefixes(tokens)
        else:
            found.add(tokens)

    def _end(self, computed: int) -> int:
        return (computed // self._block_size + 1) * self._block_size

    def _key(self, run: Run, end: int) -> Key:
        return prefix_key(run), end, run.tokens[end - self._block_size : end].tobytes()
