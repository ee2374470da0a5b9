"""Prompts that grow, and runs that stay for further turns."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagecore.cache.prefix.retention import validate_spans
from pagecore.errors import InvalidSequence
from pagecore.serving.scheduling.exclusive import exclusive
from pagecore.serving.scheduling.extension import extended
from pagecore.serving.scheduling.request import State, token_ids
from pagecore.serving.scheduling.request_calls import SchedulerRequests
from pagecore.storage.checks import flag

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pagecore.cache.prefix.retention import Spans
    from pagecore.serving.scheduling.request import Run

__all__ = ["SchedulerTurns"]


class SchedulerTurns(SchedulerRequests):
    """Calls of a scheduler that concern the turns of a run."""

    @exclusive
    def extend(
        self,
        run: Run,
        tokens: ArrayLike,
        *,
        max_new_tokens: int | None = None,
        drop_last: bool = False,
        spans: Spans | None = None,
    ) -> None:
        """Append tokens to the prompt of a run: further input of a user, or the result of a tool.

        The new tokens follow all tokens that are known, generated ones included, and the run computes them as a prompt
        before it generates again; what it has computed stays. `Run.request` is then a copy of the request whose prompt
        ends with the new tokens, and `Run.generated` begins anew. A preempted run finds its cached prefix as ever.

        An idle run begins another turn. It joins the end of the queue, or its place by priority, with what it has
        computed, and is never refused because the queue is full. If it had to give its blocks up meanwhile, it finds
        its cached prefix, or continues from the swap space.

        Parameters
        ----------
        run : Run
            A run that `add` returned, or a sample from `Step.outputs` that is forked. Until the prompt is computed, the
            first sample represents the whole request, and extends all samples.
        tokens : array_like of int
            Token ids ``[n]``, n >= 1; copied.
        max_new_tokens : int, optional
            Tokens to generate after the new ones; by default those that the request has left, and for an idle run all
            of those of its last turn. `min_new_tokens` falls by the tokens that were generated, but not for an idle
            run.
        drop_last : bool
            If True, the new tokens take the place of the last token that an idle run has generated, if it has generated
            any: of a stop id that must not be in the text, for example.
        spans : iterable of (int, int, bytes or int), optional
            Images or audio in the new tokens: positions [start, end) in `tokens`, and digests, in addition to the spans
            of the request. The run finds what it has computed in the prefix cache, and computes the rest again, the
            last partial block at least; a running run is preempted for that.

        Raises
        ------
        InvalidSequence
            The run has ended, belongs to another scheduler, is a sample that is not forked yet, or has a row in an open
            step. With overlap, accept the open steps before another one is scheduled; an idle run is in no later step.
        RequestError
            The cache cannot hold the longer sequence even alone, or as for `add`.
        ShapeError, UnsupportedDtype
            `tokens` is empty or not 1-D, has ids that int32 cannot hold, or is not of integers; `max_new_tokens` is
            negative; spans are out of range or overlap those of the request.
        UnsupportedOption
            `max_new_tokens` is 0 for a request with several samples that generates, or not 0 for one that does not.
            `drop_last` is not True or False, or True for a run that is not idle.

        Notes
        -----
        As vLLM's streaming input, which drops the last token at the end of each turn; SGLang keeps it. Nothing is
        changed if an error is raised.
        """
        roster = self._roster
        if self._require_run(run, "extend").has_ended:
            raise InvalidSequence(f"{run!r} has ended; add a request whose prompt begins with the tokens of the run")
        if run.held is None and run not in roster.waiting and run not in roster.idle:
            raise InvalidSequence(f"{run!r} is not forked yet; extend the first sample of its request")
        if any(run in step.runs or run in step.outputs for step in roster.steps):
            raise InvalidSequence(f"{run!r} has a row in an open step; accept or abandon the step, then extend the run")
        new = token_ids(tokens, "tokens")
        spans = None if spans is None else validate_spans(spans) or None
        request = extended(run, new, max_new_tokens, drop_last=flag("drop_last", drop_last), spans=spans)
        self.check_request(request.id, len(request.prompt), request.max_new_tokens, run.samples)
        self._limits.check_spans(request)
        self._limits.check_encoder(request)
        if run in roster.idle:
            arrival = self._num_added
            self._num_added += 1  # first: an interrupt must not give two runs one arrival
            roster.resume(run, request, len(request.prompt) - len(new), arrival)
            return
        if spans is not None and run in roster.running:
            roster.preempt(run, swap=False, is_retraction=False)
        if spans is not None and run.held is not None:
            roster.unpin(run)
        roster.extend(run, request)

    @exclusive
    def finish(self, run: Run) -> bool:
        """Let a run of a resumable request have no further turn.

        An idle run ends at once and frees what it holds; the prefix cache may keep its blocks. Another run ends with
        its turn, like that of a request that is not resumable.

        Parameters
        ----------
        run : Run
            A run that `add` returned, or a sample from `Step.outputs`. Until the prompt is computed, the first sample
            represents the whole request.

        Returns
        -------
        bool
            True if the run was idle and has ended.

        Raises
        ------
        InvalidSequence
            `run` is not a run of this scheduler.
        """
        roster = self._roster
        if self._require_run(run, "finish") in roster.idle:
            roster.cancel(run, state=State.FINISHED)
            return True
        if not run.has_ended and run.request.resumable:
            last = replace(run.request, resumable=False)
            for each in (*run.siblings, run):
                each.request = last
        return False
