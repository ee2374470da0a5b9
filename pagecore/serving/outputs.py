"""Outputs of a step: the runs that take sampled tokens, and the runs that these tokens finish."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from pagecore.serving.request import Run, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagecore.cache import Sequence
    from pagecore.serving.admission import StepRows
    from pagecore.serving.step import Step

__all__ = ["list_outputs", "sort_outputs"]


def list_outputs(rows: StepRows, owner: object) -> tuple[list[Run], list[int]]:
    """Return the runs that take a sampled token, and the row of each.

    These are the decodes, and all samples of each prompt that the step completes. The runs of samples are made here,
    with `owner`, when they are first listed.
    """
    outputs = rows.runs[: rows.num_decodes]
    output_rows = list(range(rows.num_decodes))
    for row in range(rows.num_decodes, len(rows.runs)):
        run = rows.runs[row]
        ends = rows.sequences[row].num_computed_tokens + rows.counts[row] == len(run.tokens)
        if ends and run.request.max_new_tokens:
            samples = [run, *_siblings(run, owner)]
            outputs += samples
            output_rows += repeat(row, len(samples))
    return outputs, output_rows


def sort_outputs(
    step: Step, tokens: NDArray[np.int32]
) -> tuple[list[Sequence], NDArray[np.int32], dict[Run, NDArray[np.int32]]]:
    """Return the sequences that continue, their ids, and the complete tokens of each run that finishes.

    `tokens` holds one id for each output; those of cancelled runs are dropped. The last token of a run does not enter
    the cache, because no step would compute it.
    """
    outputs = step.outputs
    held = [run.held for run in outputs]
    going = [one for one, run in zip(held, outputs, strict=True) if one and one.num_tokens + 1 < run.last_length]
    finished: dict[Run, NDArray[np.int32]] = {}
    places: list[int] = []
    if len(going) < len(outputs):
        for place, (one, run) in enumerate(zip(held, outputs, strict=True)):
            if one is None:  # cancelled
                continue
            if one.num_tokens + 1 < run.last_length:
                places.append(place)
            else:
                finished[run] = np.append(one.tokens, tokens[place])
    for run in step.runs[step.num_decodes :]:
        if run.state is State.RUNNING and not run.request.max_new_tokens and not run.prefilling:
            finished[run] = np.asarray(run.sequence.tokens)
    return going, tokens[places] if len(going) < len(outputs) else tokens, finished


def _siblings(run: Run, owner: object) -> list[Run]:
    """Return the samples that will be forked from `run`, without the cancelled ones."""
    if run.samples == 1:
        return []
    if not run.siblings:
        run.siblings = tuple(
            Run(run.request, sample, parent=run, owner=owner, arrival=run.arrival) for sample in range(1, run.samples)
        )
    return [each for each in run.siblings if not each.has_ended]
