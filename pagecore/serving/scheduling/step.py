"""One forward pass, from its schedule to its sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagecore.cache import Batch
    from pagecore.serving.scheduling.encoding import EncoderSpan
    from pagecore.serving.scheduling.request import Run

__all__ = ["Step", "StepState", "no_indices"]


def no_indices() -> NDArray[np.int64]:
    """Return an empty array of indices."""
    return np.empty(0, np.int64)


class StepState(Enum):
    """scheduled -> committed -> accepted, or scheduled -> abandoned; the last two are final."""

    SCHEDULED = "scheduled"
    COMMITTED = "committed"
    ACCEPTED = "accepted"
    ABANDONED = "abandoned"


@dataclass(slots=True, eq=False)
class Step:
    """Arguments of one forward pass, and the runs that take its sampled tokens.

    Attributes
    ----------
    batch : Batch
        Prepared for `runs`, row by row; its arrays are valid until the next step is scheduled. With overlap, two
        batches alternate in a cache on the host, whose arrays are valid until the next step but one is scheduled. On a
        device it is one batch with fixed addresses, which the next step overwrites in the order of the stream.
    runs : list of Run
        First the decoding runs, each with its last token and its drafts, then the runs with a chunk of their prompt.
    counts : list of int
        Tokens of each row.
    num_decodes : int
        Rows that decode.
    outputs : list of Run
        The runs that take one sampled token each; samples that are still to be forked are adjacent.
    output_rows : list of int
        Row of the batch whose last token each output is sampled from.
        With drafts, each token of a decoding row is followed by a token of the model: the drafts are compared with
        these.
    unsampled : list of Run
        The runs whose prompts the step completes and that generate nothing.
    unknown_positions : int64 array [k]
        Positions in ``batch.token_ids`` whose ids were not known when the step was scheduled; the batch has -1 there.
        Without overlap they are empty.
    unknown_outputs : int64 array [k]
        Output of the step before that gives each of these ids:
        ``token_ids[unknown_positions] = ids_of_the_step_before[unknown_outputs]``. Of an output that gained several
        ids it is the last one.
    draft_positions : int64 array [d]
        Positions of the drafts in ``batch.token_ids``, row by row; where the scheduler got no ids, the batch has -1 and
        the engine writes them.
    parents : list of (int64 array or None), optional
        In a step with trees of drafts, the parents of the tokens of each row, as for `PagedKVCache.prepare`.
    encoder_spans : list of EncoderSpan
        The spans whose outputs the step needs and the `embeddings` of the scheduler do not have, as (row, start, end,
        digest); of equal digests the longest one. The output has ``end - start`` tokens, also if the span goes past the
        end of its prompt.
    accepted : list of int, optional
        Tokens that each output gains; set by the commit of a step with drafts.
    index_ns : int
        Time spent in the cache so far: admission, swapping, prepare, commit and append.
    state : StepState
    finished : tuple of Run
        The runs that this step finished, and those that are idle after it; set when the step is accepted.
    """

    batch: Batch
    runs: list[Run]
    counts: list[int]
    num_decodes: int
    outputs: list[Run]
    output_rows: list[int]
    index_ns: int
    unsampled: list[Run] = field(default_factory=list)
    unknown_positions: NDArray[np.int64] = field(default_factory=no_indices)
    unknown_outputs: NDArray[np.int64] = field(default_factory=no_indices)
    draft_positions: NDArray[np.int64] = field(default_factory=no_indices)
    parents: list[NDArray[np.int64] | None] | None = None
    encoder_spans: list[EncoderSpan] = field(default_factory=list)
    accepted: list[int] | None = None
    _num_drafts: NDArray[np.int64] | None = field(default=None, repr=False)  # as `num_drafts`, in a step with drafts
    _gained: NDArray[np.int64] | None = field(default=None, repr=False)  # as `accepted`
    state: StepState = StepState.SCHEDULED
    finished: tuple[Run, ...] = ()

    @property
    def is_committed(self) -> bool:
        """True if the step is computed and waits for the ids of its outputs."""
        return self.state is StepState.COMMITTED

    @property
    def has_drafts(self) -> bool:
        """True if a row has drafts."""
        return len(self.draft_positions) > 0

    @property
    def num_drafts(self) -> list[int]:
        """Number of drafts of each decoding row: the first ones of those that were proposed."""
        return [count - 1 for count in self.counts[: self.num_decodes]]

    def __repr__(self) -> str:
        drafts = f"{len(self.draft_positions)} drafts, " if self.has_drafts else ""
        return (
            f"Step({self.state.value}, {len(self.runs)} rows, {self.num_decodes} of them decode, {drafts}"
            f"{sum(self.counts)} tokens, {len(self.outputs)} outputs)"
        )
