"""Outputs of a step: the runs that take sampled tokens, and the runs that these tokens finish."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from pagecore.serving.scheduling.request import Run, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagecore.cache import Sequence
    from pagecore.serving.scheduling.rows import StepRows
    from pagecore.serving.scheduling.step import Step

__all__ = ["find_decodes", "find_drafts", "find_ended", "find_unknown", "list_outputs", "sort_outputs"]


def list_outputs(rows: StepRows, owner: object) -> tuple[list[Run], list[int], list[Run]]:
    """Return the runs that take a sampled token, the row of each, and the completed runs that take none.

    The first are the decodes, and all samples of each prompt that the step completes. The runs of samples are made
    here, with `owner`, when they are first listed.
    """
    outputs = rows.runs[: rows.num_decodes]
    output_rows = list(range(rows.num_decodes))
    unsampled: list[Run] = []
    for row in range(rows.num_decodes, len(rows.runs)):
        run = rows.runs[row]
        if rows.sequences[row].num_computed_tokens + rows.counts[row] < len(run.tokens):
            continue
        if not run.request.max_new_tokens:
            unsampled.append(run)
            continue
        outputs.append(run)
        output_rows.append(row)
        if run.samples > 1:
            others = _siblings(run, owner)
            outputs += others
            output_rows += repeat(row, len(others))
    return outputs, output_rows, unsampled


def find_decodes(rows: StepRows) -> NDArray[np.int64]:
    """Return the positions of the last tokens of the decodes, which come first in a batch, each with its drafts."""
    if rows.num_drafts is None:
        return np.arange(rows.num_decodes)
    counts = rows.num_drafts + 1
    return counts.cumsum() - counts


def find_unknown(rows: StepRows, previous: Step) -> NDArray[np.int64]:
    """Return the outputs of the step before that give the decodes their ids."""
    decodes = rows.runs[: rows.num_decodes]
    if decodes == previous.outputs[: rows.num_decodes]:
        return np.arange(rows.num_decodes)
    places = {run: place for place, run in enumerate(previous.outputs)}
    return np.fromiter(map(places.__getitem__, decodes), np.int64, rows.num_decodes)


def find_drafts(rows: StepRows, decodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of the drafts of a step, which has some; `decodes` are those of `find_decodes`."""
    is_draft = np.ones(decodes[-1] + rows.counts[rows.num_decodes - 1], np.bool_)
    is_draft[decodes] = False
    return is_draft.nonzero()[0]


def find_ended(step: Step, tokens: NDArray[np.int32], flags: NDArray[np.bool_] | None) -> list[bool]:
    """Return True for each output that ends early: its id is a stop id that ends its run, or its flag is set."""
    stopped = [token in run.stops and _may_stop(run) for token, run in zip(tokens.tolist(), step.outputs, strict=True)]
    return stopped if flags is None else [stop or flag for stop, flag in zip(stopped, flags.tolist(), strict=True)]


def _may_stop(run: Run) -> bool:
    """Return True if the run has `min_new_tokens` with the next token."""
    return run.held is not None and run.held.num_tokens + 1 >= run.stops_from


def sort_outputs(
    step: Step, tokens: NDArray[np.int32], ended: list[bool] | None, least_left: int = 0
) -> tuple[list[Sequence], NDArray[np.int32], dict[Run, NDArray[np.int32]]]:
    """Return the sequences that continue, their ids, and the complete tokens of each run that finishes.

    `tokens` holds one id for each output, and `ended` True for those that end early; the ids of runs that have ended
    already are dropped. The last token of a run does not enter the cache, because no step would compute it. No run has
    fewer than `least_left` tokens before its end.
    """
    outputs = step.outputs
    if ended is None and least_left > 1:
        going = [one for run in outputs if (one := run.held)]
    elif ended is None:
        going = [one for run in outputs if (one := run.held) and one.num_tokens + 1 < run.last_length]
    else:
        going = [
            one
            for run, ends in zip(outputs, ended, strict=True)
            if not ends and (one := run.held) and one.num_tokens + 1 < run.last_length
        ]
    finished: dict[Run, NDArray[np.int32]] = {}
    places: list[int] = []
    if len(going) < len(outputs):
        for place, run in enumerate(outputs):
            one = run.held
            if one is None:  # cancelled, or finished by an earlier step
                continue
            if one.num_tokens + 1 < run.last_length and not (ended and ended[place]):
                places.append(place)
            else:
                finished[run] = with_last(one, tokens[place])
    for run in step.unsampled:
        if run.state is State.RUNNING:
            finished[run] = np.asarray(run.sequence.tokens)
    return going, tokens[places] if len(going) < len(outputs) else tokens, finished


def with_last(sequence: Sequence, token: np.int32) -> NDArray[np.int32]:
    """Return the tokens of a sequence and one more; `numpy.append` takes three times as long."""
    tokens = np.empty(sequence.num_tokens + 1, np.int32)
    tokens[:-1] = sequence.tokens
    tokens[-1] = token
    return tokens


def _siblings(run: Run, owner: object) -> list[Run]:
    """Return the samples that will be forked from `run`, which has some, without the cancelled ones."""
    if not run.siblings:
        run.siblings = tuple(
            Run(run.request, sample, parent=run, owner=owner, arrival=run.arrival) for sample in range(1, run.samples)
        )
    return [each for each in run.siblings if not each.has_ended]
