"""Steps of a scheduler: they are chosen, committed, accepted or abandoned."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

from pagecore.errors import ShapeError
from pagecore.serving.scheduling.drafts import Proposed, read_drafts
from pagecore.serving.scheduling.encoding import encoder_spans
from pagecore.serving.scheduling.exclusive import exclusive
from pagecore.serving.scheduling.outputs import (
    find_decodes,
    find_drafts,
    find_ended,
    find_unknown,
    list_outputs,
    sort_outputs,
)
from pagecore.serving.scheduling.protocol import read_flags, require_room, require_step
from pagecore.serving.scheduling.request import token_ids
from pagecore.serving.scheduling.selection import prepare_step
from pagecore.serving.scheduling.step import Step, StepState, no_indices
from pagecore.serving.scheduling.turn_calls import SchedulerTurns
from pagecore.serving.scheduling.verified import (
    is_table,
    read_accepted,
    read_id_rows,
    read_id_table,
    sort_id_rows,
    sort_id_table,
)
from pagecore.storage.checks import flag

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Listed

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from pagecore.serving.scheduling.request import Run

__all__ = ["SchedulerSteps"]


class SchedulerSteps(SchedulerTurns):
    """Calls of a scheduler that concern steps, from `schedule` to `accept`."""

    overlap: bool

    @exclusive
    def schedule(
        self, drafts: Proposed | Mapping[Run, Proposed] | None = None, *, hold_prompts: bool = False
    ) -> Step | None:
        """Choose the next step and allocate its blocks.

        Parameters
        ----------
        drafts : int, DraftTree, or mapping of Run to (int, array_like of int or DraftTree), optional
            Drafts that the step verifies: a number, or one tree, for every decoding run; or for single runs a number,
            ids, or a tree. Drafts of runs that do not decode in this step are not used. A run gets the first ones of
            its drafts, or none: no more than it may still generate, and than `max_tokens_per_step`, the blocks and the
            state slots allow after all decodes have their token. No run is preempted for a draft.
        hold_prompts : bool
            If True, while there are decodes the step computes no prompts but those of which one token is left, as after
            an import, and which needs no output of an encoder that is not kept, of a span or for cross attention: parts
            of running prompts wait, and admissions from the first run with more to compute on. For data-parallel ranks,
            whose steps take as long as the longest, and for steps that a graph of decodes serves: each row has one
            token, and its drafts. A caller that holds prompts back for ever starves them, and the requests after them;
            without `embeddings`, no output of a span is kept, and a prompt that ends in a span is one of them.

        Returns
        -------
        Step or None
            None if no run is running or waiting; idle runs and those that wait for a load do not count. None also while
            imports hold the rows or blocks that the next run needs. With overlap, None also while a step is open whose
            ids are needed first: all runs may end with it, or blocks are short, or the step ahead of it was abandoned.

        Raises
        ------
        ShapeError, UnsupportedDtype, UnsupportedOption
            `drafts` is something else, or has ids that int32 cannot hold; there are more drafts than `draft_tokens` of
            the layers that keep states; or trees for which `max_tree_tokens` leaves no room. `hold_prompts` is not True
            or False.
        InvalidSequence
            `drafts` names a run of another scheduler. The last step is not committed, or, without overlap, neither
            accepted nor abandoned; or, with overlap, two steps are open.
        OutOfBlocks
            A run does not fit although it is alone, because blocks of the cache are held outside the scheduler.
        OutOfRows
            Rows of the cache are held outside the scheduler.
        """
        roster = self._roster
        hold_prompts = flag("hold_prompts", hold_prompts)
        if roster.steps:
            require_room(roster.steps, overlap=self.overlap)
            if roster.must_accept:
                return None
        proposed = None if drafts is None else read_drafts(drafts, self, self._limits)
        if roster.loading:
            roster.end_loads()
        if not roster.running and not roster.num_ready:
            if roster.ratios is not None:
                roster.ratio = roster.ratios.first
            return None
        start = perf_counter_ns()
        roster.switch_batch()
        num_preemptions = roster.num_preemptions
        rows = prepare_step(roster, self._limits, proposed, hold_prompts=hold_prompts)
        if rows is None:
            return None
        index_ns = perf_counter_ns() - start
        outputs, output_rows, unsampled = list_outputs(rows, self)
        decodes, previous = find_decodes(rows), roster.step
        step = Step(
            roster.batch,
            rows.runs,
            rows.counts,
            rows.num_decodes,
            outputs,
            output_rows,
            index_ns,
            unsampled,
            no_indices() if previous is None else decodes,
            no_indices() if previous is None else find_unknown(rows, previous),
            find_drafts(rows, decodes) if rows.has_drafts else no_indices(),
            rows.options.get("parents"),
            encoder_spans(rows.runs, rows.counts, rows.num_decodes, self._limits.embeddings),
            _num_drafts=rows.num_drafts,
        )
        if roster.ratios is not None and roster.ratio is not None and roster.num_preemptions == num_preemptions:
            roster.ratio = roster.ratios.decayed(roster.ratio)
        roster.num_steps += 1
        roster.steps = (*roster.steps, step)
        return step

    @exclusive
    def commit(
        self,
        step: Step,
        accepted: ArrayLike | None = None,
        *,
        accepted_path: Listed[ArrayLike | None] | None = None,
    ) -> None:
        """Mark the tokens of a step as computed, and fork complete prompts into their samples.

        On the host the forward pass must have finished. On a device it may still run, because later work of the cache
        follows it in the order of the stream. The rejected drafts of a step are forgotten, and their slots take the
        next tokens of their runs.

        Parameters
        ----------
        step : Step
            The newest open step.
        accepted : array_like of int, optional
            For a step with drafts, the number of tokens that each of `step.outputs` gains: its accepted drafts and one
            more; 1 for an output without drafts.
        accepted_path : list of (array_like of int or None), optional
            For a step with trees of drafts, and instead of `accepted`: for each of `step.outputs` the indices of the
            accepted tokens of its row, from 0, the token before the drafts, down a branch. None for an output without
            drafts.

        Raises
        ------
        ShapeError, UnsupportedDtype
            Numbers or paths that do not fit the step, or none for a step with drafts; nothing is changed.
        InvalidSequence
            `step` is not the newest open step of this scheduler, or is already committed; nothing is changed.
        OutOfRows
            Imports, or holders outside the scheduler, have the rows that the samples of a prompt need; the step is not
            committed. Cancel an import or samples, and commit again.
        """
        roster = self._roster
        require_step(roster.steps, step, StepState.SCHEDULED, "commit")
        is_plain = accepted is None and accepted_path is None and not step.has_drafts
        verified = None if is_plain else read_accepted(step, accepted, accepted_path)
        start = perf_counter_ns()
        roster.commit(step, verified)
        step.index_ns += perf_counter_ns() - start

    @exclusive
    def abandon(self, step: Step) -> None:
        """Undo a step whose forward pass failed. No run advances; the next steps compute the same tokens.

        Recurrent states that the step may have overwritten return to their last checkpoints; the tokens after these
        are computed again, as a prompt.

        Raises
        ------
        InvalidSequence
            `step` is not the newest open step of this scheduler, or is committed; nothing is changed.
        """
        roster = self._roster
        require_step(roster.steps, step, StepState.SCHEDULED, "abandon")
        roster.abandon(step)

    @exclusive
    def accept(self, step: Step, ids: ArrayLike, finished: ArrayLike | None = None) -> list[Run]:
        """Take the sampled tokens of a committed step.

        Parameters
        ----------
        step : Step
            The oldest open step.
        ids : array_like of int32
            One id for each of `step.outputs`; the ids of runs that have ended meanwhile are dropped. For a step with
            drafts a list with the ids that each output gains: the drafts that `commit` accepted, and the token after
            them; or a 2-D array with a row for each output, of which the first ids are read. A run ends at
            the first id that ends it, and the ids after it are dropped.
        finished : array_like of bool, optional
            True for each of `step.outputs` that ends with its last id, for reasons that the scheduler does not know;
            its list in `ids` may be shorter than what `commit` accepted. A run also ends with one of its
            `stop_token_ids`, from `min_new_tokens` on, and after `max_new_tokens`.

        Returns
        -------
        list of Run
            The runs that finished (also `Step.finished`), and those of resumable requests that are idle now. Their
            `tokens` are complete. Runs that finished hold no blocks any more, but the prefix cache may keep their
            blocks until others need them.

        Raises
        ------
        ShapeError
            `ids` or `finished` does not have one entry for each output, or an entry not the number of ids that were
            accepted, or int32 cannot hold an id; nothing is changed.
        UnsupportedDtype
            `ids` are not integers, or `finished` is not of booleans; nothing is changed.
        InvalidSequence
            `step` is not the oldest open step of this scheduler, is not committed, or was already accepted; nothing is
            changed.
        """
        roster = self._roster
        require_step(roster.steps, step, StepState.COMMITTED, "accept")
        flags = None if finished is None else read_flags(finished, len(step.outputs))
        going_ids: NDArray[np.int32] | list[list[int]]
        counts = None
        if not step.has_drafts and not is_table(ids):
            tokens = token_ids(ids, "ids")
            if tokens.shape != (len(step.outputs),):
                raise ShapeError(
                    f"ids have shape {tokens.shape}; expected one id for each of {len(step.outputs)} outputs"
                )
            may_end = flags is not None or (self._stop_ids and not self._stop_ids.isdisjoint(tokens.tolist()))
            ended = find_ended(step, tokens, flags) if may_end else None
            going, going_ids, complete = sort_outputs(step, tokens, ended, roster.least_left.bound)
        else:
            given = read_id_rows(ids, step, flags) if isinstance(ids, list | tuple) else read_id_table(ids, step)
            if isinstance(given, list):
                going, going_ids, complete = sort_id_rows(step, given, flags)
            else:
                least = roster.least_left.bound
                going, going_ids, counts, complete = sort_id_table(step, given, flags, self._stop_ids, least)
        least_left = roster.least_left_after(going_ids, counts, complete)
        start = perf_counter_ns()
        roster.accept(step, going, going_ids, complete, counts, least_left)
        step.index_ns += perf_counter_ns() - start
        return list(step.finished)
