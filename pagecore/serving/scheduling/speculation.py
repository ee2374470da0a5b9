"""Statistics of drafts: how many were verified, and how many were accepted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pagecore.serving.scheduling.step import Step

__all__ = ["Speculation"]


@dataclass(frozen=True, slots=True)
class Speculation:
    """Totals over the accepted steps, of runs that had not ended before.

    Attributes
    ----------
    num_drafts : int
        Verifications: rows with at least one draft.
    num_draft_tokens, num_accepted_tokens : int
        Drafts that were computed, and those that were accepted. The token that the model adds does not count.
    accepted_per_position : tuple of int
        Rows that accepted a draft at each position, up to the longest chain so far: the first draft, the second, and so
        on. In a tree the position is the depth, up to the deepest accepted draft.
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

    def counted(self, step: Step) -> Speculation:
        """Return the statistics with those of a committed step that has drafts."""
        assert step._num_drafts is not None
        assert step._gained is not None
        drafts, accepted = step._num_drafts, step._gained[: step.num_decodes] - 1
        counts = [run.held is not None for run in step.outputs[: step.num_decodes]]
        if not all(counts):
            drafts, accepted = drafts[counts], accepted[counts]
        longest = 0 if step.parents is not None else int(drafts.max(initial=0))
        ends = np.bincount(accepted, minlength=1 + longest)  # rows by the number of accepted drafts
        added = ends[:0:-1].cumsum()[::-1].tolist()  # a row that accepted the third draft accepted the second, too
        return Speculation(
            self.num_drafts + int(np.count_nonzero(drafts)),
            self.num_draft_tokens + int(drafts.sum()),
            self.num_accepted_tokens + int(accepted.sum()),
            tuple(old + new for old, new in zip_longest(self.accepted_per_position, added, fillvalue=0)),
        )
