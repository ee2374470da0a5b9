"""Second hits: the prefixes that more than one sequence has asked for."""

from __future__ import annotations

from pagecore.cache.sequences._sequences import Sequence
from pagecore.tiers.host.operations._operations import options_of, version_of
from pagecore.tiers.manager.hits.origins import PrefixIndex


class SecondHits:
    """The blocks of prompts that were asked for once, and those that were asked for again; no bytes.

    Both are prefix trees of made-up ids, so that prefixes are compared token by token, and the oldest are forgotten.

    Parameters
    ----------
    block_size : int
    num_blocks : int
        Blocks that each tree remembers.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._once, self._again = PrefixIndex(block_size, num_blocks), PrefixIndex(block_size, num_blocks)
        self._block_size = block_size
        # Limit of each sequence, and what it is valid for: the number of its blocks, and their version.
        self._limits: dict[Sequence, tuple[tuple[int, int], int]] = {}

    def note(self, sequence: Sequence) -> None:
        """Note the prompt of a sequence, in its first step or before it is copied."""
        ids, options = sequence.tokens, options_of(sequence)
        known = self._once.match(ids, options)
        if known:
            self._again.add(ids[:known], options)
        self._once.add(ids, options)
        self._limits.pop(sequence, None)

    def limit(self, sequence: Sequence) -> int:
        """Return the computed tokens of a sequence that were asked for more than once."""
        blocks = sequence.num_computed_tokens // self._block_size
        found = blocks, version_of(sequence)
        seen, limit = self._limits.get(sequence, (None, 0))
        if seen != found:
            limit = self._again.match(sequence.tokens[: blocks * self._block_size], options_of(sequence))
            self._limits[sequence] = found, limit
        return limit

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that is removed; its prompt stays known."""
        self._limits.pop(sequence, None)
