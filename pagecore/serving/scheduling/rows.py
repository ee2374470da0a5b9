"""Rows of a step: those of the running runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pagecore.serving.scheduling.encoding import UNLIMITED, EncoderLoad

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagecore.cache import Sequence
    from pagecore.serving.scheduling.drafts import Drafts
    from pagecore.serving.scheduling.limits import Limits
    from pagecore.serving.scheduling.request import Run
    from pagecore.serving.scheduling.roster import Roster

__all__ = ["StepRows", "is_held_back", "list_decodes", "select"]


@dataclass(slots=True)
class StepRows:
    """Rows of a step: first `num_decodes` runs with one token and their drafts each, then chunks of prompts."""

    runs: list[Run]
    sequences: list[Sequence]
    counts: list[int]
    num_decodes: int
    drafts: Drafts | None = None
    num_drafts: NDArray[np.int64] | None = None  # those of each decode, if a decode has any
    load: EncoderLoad = UNLIMITED
    trees_delay_span: bool = False  # a prompt waits with a span that only trees leave without room
    held: list[Run] = field(default_factory=list)  # running prompts that the step holds back
    options: dict[str, Any] = field(default_factory=dict)  # those of `prepare`, for the drafts

    def add(self, run: Run, count: int) -> None:
        """Append a row."""
        self.runs.append(run)
        self.sequences.append(run.sequence)
        self.counts.append(count)

    @property
    def has_drafts(self) -> bool:
        """True if a decode has drafts."""
        return self.num_drafts is not None

    @property
    def decode_counts(self) -> list[int]:
        """Tokens of each decode: one, and its drafts."""
        return self.counts[: self.num_decodes]

    def add_drafts(self, drafts: Drafts, limits: Limits) -> int:
        """Give decodes their drafts, in order, while the tokens of the step last; return the number of drafts.

        No run computes a token that it would not keep because of `max_new_tokens`.
        """
        self.drafts = drafts
        rooms = [run.last_length - run.held.num_computed_tokens for run in self.runs]  # type: ignore[union-attr]
        granted = np.minimum(np.array(rooms, np.int64) - 2, drafts.count(self.runs))
        granted = np.maximum(np.minimum(granted, limits.max_drafts), 0)
        total, most = int(granted.sum()), limits.budget - self.num_decodes
        if total > most:  # rows take from what the rows before them leave
            granted = np.diff(np.minimum(granted.cumsum(), most), prepend=0)
            total = most
        self._grant(granted)
        return total

    def _grant(self, num_drafts: NDArray[np.int64]) -> None:
        self.counts[: self.num_decodes] = (num_drafts + 1).tolist()
        self.num_drafts = num_drafts if num_drafts.any() else None

    def cut_drafts(self, most: int) -> None:
        """Leave each decode its first `most` drafts, or fewer."""
        if self.num_drafts is not None:
            self._grant(np.minimum(self.num_drafts, most))

    def cut_prompts(self, counts: list[int]) -> None:
        """Give each row its count, and drop rows without tokens."""
        kept = [i for i, count in enumerate(counts) if count]
        self.runs = [self.runs[i] for i in kept]
        self.sequences = [self.sequences[i] for i in kept]
        self.counts = [counts[i] for i in kept]

    def draft_options(self) -> dict[str, Any]:
        """Return the options of `prepare` that describe the drafts: their ids and trees, where they are known."""
        if self.drafts is None or not self.has_drafts:
            return {}
        options = self.drafts.options(self.runs[: self.num_decodes], self.decode_counts)
        num_prompts = len(self.runs) - self.num_decodes
        return {name: listed + [None] * num_prompts for name, listed in options.items()}


def is_held_back(run: Run, load: EncoderLoad) -> bool:
    """Return True if a prompt has no row where prompts are held back: more than one token, or an encoder's work."""
    return run.num_tokens_left > 1 or load.needs_output(run)


def list_decodes(roster: Roster) -> list[Run]:
    """Return the running runs that decode in the next step.

    A step ahead of the ids of the step before has no row for a run that ends with those ids.
    """
    decodes = [run for run in roster.running if not run.prefilling]
    if not roster.steps:
        return decodes
    # The ids of all computed tokens will be known, and one more. `Run.sequence` checks what R2 promises.
    return [run for run in decodes if run.held.num_computed_tokens + 1 < run.last_length]  # type: ignore[union-attr]


def select(roster: Roster, limits: Limits, drafts: Drafts | None = None) -> tuple[StepRows, int]:
    """Return rows for the running runs, and the tokens that the step has left for prompts.

    All decodes come first, with their drafts, then chunks of prompts in order of admission. Where prompts are held
    back, those with more than one token left, or with an output of an encoder to compute, have no row.
    """
    decodes = list_decodes(roster)
    sequences: list[Sequence] = [run.held for run in decodes]  # type: ignore[misc]
    load = EncoderLoad(limits.encoder_tokens, limits.embeddings)
    rows = StepRows(decodes, sequences, [1] * len(decodes), len(decodes), load=load)
    num_drafts = 0 if drafts is None else rows.add_drafts(drafts, limits)
    budget = min(limits.budget - len(decodes) - num_drafts, limits.prefill_tokens)
    for run in roster.running if len(decodes) < len(roster.running) else ():
        if not run.prefilling:
            continue
        if limits.holds_prompts and is_held_back(run, load):
            rows.held.append(run)
            continue
        if not budget:
            break
        count = limits.parts.count(run, budget, rows.load)
        if not count:  # a span waits for a step with more room or encoder budget, and no other prompt passes it
            rows.trees_delay_span = limits.parts.trees_delay(run, budget, rows.load)
            return rows, 0
        rows.add(run, count)
        rows.load.add(run, count)
        budget -= count
    return rows, budget
