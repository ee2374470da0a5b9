"""Statistics of drafts: how many were verified, and how many were accepted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

__all__ = ["Speculation"]


@dataclass(frozen=True, slots=True)
class Speculation:
    """Totals over the committed steps, of runs that had not ended by then.

    Attributes
    ----------
    num_drafts : int
        Verifications: rows with at least one draft.
    num_draft_tokens, num_accepted_tokens : int
        Drafts that were computed, and those that were accepted. The token that the model adds does not count.
    accepted_per_position : tuple of int
        Rows that accepted a draft at each position: the first draft of a chain, the second, and so on. In a tree the
        position is the depth.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that was accepted; 0 before the first."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_tokens(self) -> float:
        """Tokens that a row with drafts gains on average, the model's own token included; 0 before the first."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    def counted(self, rows: Iterable[tuple[int, int]]) -> Speculation:
        """Return the statistics with the rows of a step; each is its number of drafts and of accepted drafts."""
        with_drafts = [(drafts, accepted) for drafts, accepted in rows if drafts]
        longest = max((accepted for _, accepted in with_drafts), default=0)
        added = [0] * longest
        for _, accepted in with_drafts:
            if accepted:
                added[accepted - 1] += 1
        for place in range(longest - 1, 0, -1):  # a row that accepted the third draft accepted the second, too
            added[place - 1] += added[place]
        return Speculation(
            self.num_drafts + len(with_drafts),
            self.num_draft_tokens + sum(drafts for drafts, _ in with_drafts),
            self.num_accepted_tokens + sum(accepted for _, accepted in with_drafts),
            tuple(old + new for old, new in zip_longest(self.accepted_per_position, added, fillvalue=0)),
        )
