"""What a scheduler hands to an engine for one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagecore.cache import Batch
    from pagecore.serving.request import Run

__all__ = ["Step"]


@dataclass(slots=True, eq=False)
class Step:
    """What one forward pass computes, and whose tokens come out of it.

    Attributes
    ----------
    batch : Batch
        Prepared for `runs`, row by row; valid until the next step is scheduled.
    runs : list of Run
        First those that decode (one token each), then those with a chunk of their prompt.
    counts : list of int
        Tokens of each row.
    num_decodes : int
    outputs : list of Run
        The runs that take one sampled token each; samples that are still to be forked stand side by side.
    output_rows : list of int
        For each output the row of the batch whose last token it is sampled from.
    index_ns : int
        Time spent in the cache on prepare (with shortage and swapping, for admission), commit and append, so far.
    is_committed : bool
        Whether it is computed and its outputs wait for their ids.
    """

    batch: Batch
    runs: list[Run]
    counts: list[int]
    num_decodes: int
    outputs: list[Run]
    output_rows: list[int]
    index_ns: int
    is_committed: bool = False
