"""Continuous batching over a paged cache, without a model or a framework.

One step: every run that decodes gets one token; the rest of the budget goes to prompts, in chunks, oldest first; then
the head of the queue is admitted while the pool can hold its whole prompt. When blocks run short the youngest run is
preempted and goes to the front of the queue: swapped out, where there is a swap space with room for it, to continue
where it was; otherwise its blocks are given up, and its tokens so far become its prompt (recomputation). Both as in
vLLM. Blocks that the prefix cache keeps until the run comes back are not computed again.

S1: runs are served in order of arrival, and the oldest run is never preempted. Every step computes at least one of its
    tokens: there is no livelock.
S2: rows promised to the runs (samples not yet forked included) never exceed `max_running`.
S3: the swap space holds sequences of waiting runs, whose computed tokens are not computed again.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

from pagecore.errors import InvalidSequence, PagecoreError, ShapeError, UnsupportedOption
from pagecore.serving.limits import choose_limits
from pagecore.serving.outputs import list_outputs, sort_outputs
from pagecore.serving.request import Request, Run, token_ids
from pagecore.serving.reuse import Reuse
from pagecore.serving.roster import Roster
from pagecore.serving.selection import prepare_step
from pagecore.serving.step import Step, StepState

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from pagecore.cache import PagedKVCache, SwapSpace

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching: `add`, then `schedule`, `commit`, `accept` until `schedule` returns None.

    The protocol of a step: `schedule` returns it, the engine computes it, `commit` counts its tokens as computed, and
    `accept` takes the sampled ids. Where the forward pass fails, `abandon` takes the place of `commit` and `accept`;
    the next step then computes the same tokens. `schedule` refuses a second step before that. `add` and `cancel` are
    allowed at any time.

    An operation that raises has either not happened or happened in full, also after Ctrl-C at any moment. The
    properties show which: `step` is the step that is still open (its `state` says whether it is committed), and
    `waiting` lists the queue.

    One thread at a time may use a scheduler.

    Parameters
    ----------
    cache : PagedKVCache
        An empty cache; from now on the scheduler alone adds sequences to it. The id of a sequence is its `Run`.
    max_running : int
        Sequences that run at once, at most, up to 2^31 - 1. No more run than the cache has rows, or than
        `max_tokens_per_step`, so that each of them gets a token in each step.
    max_tokens_per_step : int
        Tokens of one step, prompt and decode together, up to 2^31 - 1.
    headroom : float
        Share of the pool, 0 to 1, that an admission leaves free for the runs, so that the new run is not preempted a
        few steps later. When nothing else runs it may take everything.
    swap_space : SwapSpace, optional
        A swap space of this cache, for preempted runs. Without it, and while it is full, they are computed again.

    Attributes
    ----------
    cache : PagedKVCache
    swap_space : SwapSpace or None
    max_running, max_tokens_per_step : int
        Limits; `max_running` after the caps above.
    max_length : int
        Slots of the longest sequence that the cache can hold, alone.

    Raises
    ------
    ShapeError
        A limit that is not an integer in its range, or a headroom outside 0 to 1.
    UnsupportedOption
        A cache that is not a PagedKVCache, or a swap space of another cache.
    NotEnoughMemory
        The arrays of a step of `max_tokens_per_step` tokens cannot be allocated.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        max_running: int = 256,
        max_tokens_per_step: int = 8192,
        headroom: float = 0.01,
        swap_space: SwapSpace | None = None,
    ) -> None:
        self._limits = choose_limits(cache, max_running, max_tokens_per_step, headroom, swap_space)
        self.cache = cache
        self.swap_space = swap_space
        self.max_running = self._limits.max_running
        self.max_tokens_per_step = self._limits.max_tokens_per_step
        self.max_length = self._limits.max_length
        self._num_added = 0
        self._roster = Roster(cache, cache.make_batch(self.max_running, self._limits.budget), swap_space)

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def step(self) -> Step | None:
        """The step that is neither accepted nor abandoned, or None."""
        return self._settled().step

    @property
    def running(self) -> tuple[Run, ...]:
        """The admitted runs, oldest first."""
        return tuple(self._settled().running)

    @property
    def waiting(self) -> tuple[Run, ...]:
        """The runs in the queue, the next one first; preempted runs included."""
        return tuple(self._settled().waiting)

    @property
    def holders(self) -> tuple[Run, ...]:
        """The runs that have a row of the cache: the admitted ones, and the next one if it holds its prefix there."""
        roster = self._settled()
        return (*roster.running, *roster.pinned)

    @property
    def num_running(self) -> int:
        """Number of admitted runs; samples count once they are forked."""
        return len(self._settled().running)

    @property
    def num_waiting(self) -> int:
        """Number of runs in the queue, preempted runs included."""
        return len(self._settled().waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the queue has to compute; cached prefixes are subtracted once a run is the next one.

        A caller that streams requests adds more while this is less than a step's tokens.
        """
        return self._settled().num_waiting_tokens

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self._settled().num_preemptions

    @property
    def num_swaps(self) -> int:
        """Preemptions so far that swapped the run out; the others are computed again."""
        return self._settled().num_swaps

    @property
    def num_forks(self) -> int:
        """Samples so far that were forked from the first one of their request."""
        return self._settled().num_forks

    @property
    def reuse(self) -> Reuse:
        """Tokens that the admissions so far found in the prefix cache."""
        return self._settled().reuse

    def check_invariants(self) -> None:
        """Recount the runs and what they hold; raises `PagecoreError` where the scheduler contradicts itself."""
        roster = self._settled()
        roster.check_invariants()
        rows = sum(run.samples for run in roster.running)
        if rows > self.max_running:
            raise PagecoreError(f"{rows} rows are promised; max_running is {self.max_running}")

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> Run:
        """Queue a request.

        Returns
        -------
        Run
            Its first sample; the others appear in `Step.outputs` when the prompt is computed.

        Raises
        ------
        RequestError
            The cache cannot hold the request even alone, or it has more samples than can run; nothing is queued.
        UnsupportedOption
            An argument that is not a Request.
        """
        roster = self._settled()
        if not isinstance(request, Request):
            raise UnsupportedOption(f"expected a Request, got {request!r}")
        self.check_request(request.id, len(request.prompt), request.max_new_tokens, request.samples)
        samples = request.samples if request.max_new_tokens else 1
        run = Run(request, samples=samples, owner=self, arrival=self._num_added)
        self._num_added += 1
        roster.add(run)
        return run

    def check_request(self, id: object, num_prompt_tokens: int, max_new_tokens: int, samples: int = 1) -> None:
        """Raise `RequestError` for a request that `add` would refuse, of which only the lengths need be known.

        Raises
        ------
        ShapeError
            A length or number that is not an integer in its range.
        """
        self._limits.check_request(id, num_prompt_tokens, max_new_tokens, samples)

    def cancel(self, run: Run) -> bool:
        """End a run in any state, and give up what it holds at once, also while its step is in flight.

        That step then writes nothing for it, and `accept` drops its id. `Run.tokens` keeps what was generated.

        Parameters
        ----------
        run : Run
            A run that `add` returned, or a sample from `Step.outputs`. Until the prompt is computed, the first sample
            represents the whole request and cancels all samples.

        Returns
        -------
        bool
            False if the run had finished or was cancelled before; nothing is changed then.

        Raises
        ------
        InvalidSequence
            An argument that is not a run of this scheduler.
        """
        roster = self._settled()
        if not isinstance(run, Run):
            raise InvalidSequence(f"expected a Run (as returned by add), got {run!r}")
        if run.owner is not self:
            raise InvalidSequence(f"{run!r} belongs to another scheduler; cancel it there")
        if run.has_ended:
            return False
        roster.cancel(run)
        return True

    # -- a step --------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Choose the next step and take its blocks; None when nothing is left to do.

        Raises
        ------
        InvalidSequence
            The last step is neither accepted nor abandoned.
        OutOfBlocks
            The oldest run does not fit although it is alone: blocks of the cache are held outside the scheduler.
        OutOfRows
            Rows of the cache are held outside the scheduler.
        """
        roster = self._settled()
        if roster.step is not None:
            raise InvalidSequence(
                f"the last step is {roster.step.state.value} and not accepted; "
                "accept its ids (or abandon it before its commit), then schedule the next one"
            )
        if not roster.running and not roster.waiting:
            return None
        start = perf_counter_ns()
        rows = prepare_step(roster, self._limits)
        index_ns = perf_counter_ns() - start
        outputs, output_rows = list_outputs(rows, self)
        roster.step = Step(roster.batch, rows.runs, rows.counts, rows.num_decodes, outputs, output_rows, index_ns)
        return roster.step

    def commit(self, step: Step) -> None:
        """Count the tokens of a step as computed, and fork the prompts that are complete into their samples.

        Raises
        ------
        InvalidSequence
            A step that is not the open one of this scheduler, or is committed already; nothing is changed.
        """
        roster = self._settled()
        self._require(step, StepState.SCHEDULED, "commit")
        start = perf_counter_ns()
        roster.commit(step)
        step.index_ns += perf_counter_ns() - start

    def abandon(self, step: Step) -> None:
        """Undo a step whose forward pass failed: every run is where it was, and the next step tries again.

        Raises
        ------
        InvalidSequence
            A step that is not the open one of this scheduler, or is committed; nothing is changed.
        """
        roster = self._settled()
        self._require(step, StepState.SCHEDULED, "abandon")
        roster.abandon(step)

    def accept(self, step: Step, ids: ArrayLike) -> list[Run]:
        """Take the sampled tokens of a committed step.

        Parameters
        ----------
        step : Step
        ids : array_like of int32
            One id for each of `step.outputs`; the ids of runs that were cancelled since are dropped.

        Returns
        -------
        list of Run
            The runs that are finished (also `Step.finished`); their `tokens` are complete. They hold nothing of the
            cache any more, but the prefix cache may keep their blocks until others need them.

        Raises
        ------
        ShapeError
            Not one id for each output, or ids that int32 cannot hold; nothing is changed.
        UnsupportedDtype
            Ids that are not integers; nothing is changed.
        InvalidSequence
            A step that is not the open one of this scheduler, is not committed, or was accepted before; nothing is
            changed.
        """
        roster = self._settled()
        self._require(step, StepState.COMMITTED, "accept")
        tokens = token_ids(ids, "ids")
        if tokens.shape != (len(step.outputs),):
            raise ShapeError(f"ids have shape {tokens.shape}; one id for each of {len(step.outputs)} outputs is needed")
        going, kept, finished = sort_outputs(step, tokens)
        start = perf_counter_ns()
        roster.accept(step, going, kept, finished)
        step.index_ns += perf_counter_ns() - start
        return list(step.finished)

    # -- inside --------------------------------------------------------------------------------------------------

    def _settled(self) -> Roster:
        self._roster.settle()
        return self._roster

    def _require(self, step: Step, state: StepState, verb: str) -> None:
        """Refuse to `verb` a step that is not the open one, or not in that state."""
        if not isinstance(step, Step):
            raise InvalidSequence(f"expected a Step (as returned by schedule), got {step!r}")
        if step is not self._roster.step:
            is_over = step.state in (StepState.ACCEPTED, StepState.ABANDONED)
            reason = f"was {step.state.value} already" if is_over else "belongs to another scheduler"
            raise InvalidSequence(f"cannot {verb} a step that {reason}; {verb} each step that schedule returns once")
        if step.state is not state:
            remedy = "commit it first" if state is StepState.COMMITTED else "accept the ids of its outputs"
            raise InvalidSequence(f"cannot {verb} a step that is {step.state.value}; {remedy}")
