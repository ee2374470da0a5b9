"""Continuous batching over a paged cache, without a model or a framework.

Each step gives one token to every decoding run. The remaining budget goes to prompts in chunks, oldest first. Requests
are then admitted from the head of the queue while the pool can hold their whole prompts and, in a cache with states,
their states. When blocks or state slots run short, the youngest run is preempted and moves to the front of the queue.
If a swap space has room, the run is swapped out and later continues where it was. Otherwise its blocks are freed and
its tokens so far become its prompt (recomputation); a prefix that is still cached when the run returns is not
recomputed. Both ways are as in vLLM.

S1: runs are served in order of arrival, and the oldest run is never preempted. Every step computes at least one of its
    tokens, so there is no livelock.
S2: the rows reserved for the runs, samples that are not forked yet included, never exceed `max_running`.
S3: the swap space holds only sequences of waiting runs; their computed tokens are not recomputed.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

from pagecore.errors import InvalidSequence, PagecoreError, ShapeError, UnsupportedOption
from pagecore.serving.figures import SchedulerFigures, read_figures
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

    `schedule` returns a step, the engine computes it, `commit` marks its tokens as computed, and `accept` takes the
    sampled ids. If the forward pass fails, call `abandon` instead of `commit` and `accept`; the next step computes the
    same tokens again. Only one step is open at a time. `add` and `cancel` are allowed at any time.

    An operation that raises has either not happened or happened completely, even if Ctrl-C interrupts it. The
    properties show which: `step` is the open step (its `state` shows if it is committed), and `waiting` lists the
    queue.

    A scheduler is not thread-safe: use it from one thread at a time. Only `figures` may be called from others.

    Parameters
    ----------
    cache : PagedKVCache
        An empty cache. Only the scheduler may add sequences to it from now on; the id of each is its `Run`.
    max_running : int
        Maximum number of sequences that run at once, up to 2^31 - 1. It is capped at the rows of the cache and at
        `max_tokens_per_step`, so that each running sequence gets a token in each step.
    max_tokens_per_step : int
        Maximum number of tokens of one step, prompt and decode together, up to 2^31 - 1.
    headroom : float
        Share of the pool, 0 to 1, that an admission leaves free, so that the new run is not preempted a few steps
        later. It does not apply when nothing else runs.
    states_per_run : int, optional
        State slots that an admission leaves for each running sequence of a cache with states, samples that are not
        forked yet included; it does not apply when nothing else runs. By default those without which the sequence
        cannot run: 1, or 2 with ``in_place=False``, and its draft tokens. One or two more keep the checkpoints of
        prompts when slots are short; fewer sequences run then, and more prefixes are reused.
    swap_space : SwapSpace, optional
        A swap space of this cache for preempted runs. Without one, or while it is full, preempted runs are recomputed.

    Attributes
    ----------
    cache : PagedKVCache
    swap_space : SwapSpace or None
    max_running, max_tokens_per_step : int
        Limits; `max_running` with the caps applied.
    max_length : int
        Slots of the longest sequence that the cache can hold when it holds nothing else.

    Raises
    ------
    ShapeError
        A limit is not an integer in its range, or `headroom` is outside 0 to 1.
    UnsupportedOption
        `cache` is not a PagedKVCache, `swap_space` belongs to another cache, or `states_per_run` is given for a cache
        without states.
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
        states_per_run: int | None = None,
        swap_space: SwapSpace | None = None,
    ) -> None:
        self._limits = choose_limits(cache, max_running, max_tokens_per_step, headroom, swap_space, states_per_run)
        self.cache = cache
        self.swap_space = swap_space
        self.max_running = self._limits.max_running
        self.max_tokens_per_step = self._limits.max_tokens_per_step
        self.max_length = self._limits.max_length
        self._num_added = 0
        self._roster = Roster(cache, cache.make_batch(self.max_running, self._limits.budget), swap_space)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def step(self) -> Step | None:
        """The open step, neither accepted nor abandoned; None if there is none."""
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
        """The runs that hold a row of the cache: the admitted runs, and the next one if its prefix is pinned."""
        roster = self._settled()
        return (*roster.running, *roster.pinned)

    @property
    def num_running(self) -> int:
        """Number of admitted runs; a sample counts once it is forked."""
        return len(self._settled().running)

    @property
    def num_waiting(self) -> int:
        """Number of runs in the queue, preempted runs included."""
        return len(self._settled().waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens that the queued runs have to compute; the cached prefix of the next run is subtracted.

        A caller that streams requests adds more while this is less than `max_tokens_per_step`.
        """
        return self._settled().num_waiting_tokens

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._settled().num_preemptions

    @property
    def num_swaps(self) -> int:
        """Number of preemptions so far that swapped the run out; the other runs are recomputed."""
        return self._settled().num_swaps

    @property
    def num_forks(self) -> int:
        """Number of samples so far that were forked from the first sample of their request."""
        return self._settled().num_forks

    @property
    def reuse(self) -> Reuse:
        """Tokens that the admissions so far found in the prefix cache."""
        return self._settled().reuse

    def figures(self) -> SchedulerFigures:
        """Return the counts of this scheduler; unlike everything else, other threads may call this at any time."""
        return read_figures(self._roster)

    def check_invariants(self) -> None:
        """Recount the runs and what they hold; raise `PagecoreError` if the state is inconsistent."""
        roster = self._settled()
        roster.check_invariants()
        rows = sum(run.samples for run in roster.running)
        if rows > self.max_running:
            raise PagecoreError(f"{rows} rows are reserved for the runs; max_running is {self.max_running}")

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> Run:
        """Queue a request.

        Returns
        -------
        Run
            The first sample of the request; the others appear in `Step.outputs` when the prompt is computed.

        Raises
        ------
        RequestError
            The cache cannot hold the request even alone, or the request has more samples than can run at once; nothing
            is queued.
        UnsupportedOption
            `request` is not a Request.
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
        """Check the lengths of a request before it is made.

        Raises
        ------
        RequestError
            `add` would refuse such a request.
        ShapeError
            A length or count is not an integer in its range.
        """
        self._limits.check_request(id, num_prompt_tokens, max_new_tokens, samples)

    def cancel(self, run: Run) -> bool:
        """End a run in any state and free its blocks at once, also while its step is in flight.

        That step then writes nothing for the run, and `accept` drops its id. `Run.tokens` keeps the generated tokens.

        Parameters
        ----------
        run : Run
            A run that `add` returned, or a sample from `Step.outputs`. Until the prompt is computed, the first sample
            represents the whole request and cancels all samples.

        Returns
        -------
        bool
            False if the run had already finished or was cancelled; nothing is changed then.

        Raises
        ------
        InvalidSequence
            `run` is not a run of this scheduler.
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
        """Choose the next step and allocate its blocks.

        Returns
        -------
        Step or None
            None if no run is running or waiting.

        Raises
        ------
        InvalidSequence
            The last step is neither accepted nor abandoned.
        OutOfBlocks
            The oldest run does not fit although it is alone, because blocks of the cache are held outside the
            scheduler.
        OutOfRows
            Rows of the cache are held outside the scheduler.
        """
        roster = self._settled()
        if roster.step is not None:
            raise InvalidSequence(
                f"the last step is {roster.step.state.value} and not accepted; "
                "accept its ids, or abandon it before its commit, then schedule the next step"
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
        """Mark the tokens of a step as computed, and fork complete prompts into their samples.

        Raises
        ------
        InvalidSequence
            `step` is not the open step of this scheduler, or is already committed; nothing is changed.
        """
        roster = self._settled()
        self._require(step, StepState.SCHEDULED, "commit")
        start = perf_counter_ns()
        roster.commit(step)
        step.index_ns += perf_counter_ns() - start

    def abandon(self, step: Step) -> None:
        """Undo a step whose forward pass failed. No run advances; the next steps compute the same tokens.

        Recurrent states that the step may have overwritten return to their last checkpoints; the tokens after these
        are computed again, as a prompt.

        Raises
        ------
        InvalidSequence
            `step` is not the open step of this scheduler, or is committed; nothing is changed.
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
            One id for each of `step.outputs`; the ids of runs that were cancelled meanwhile are dropped.

        Returns
        -------
        list of Run
            The runs that finished (also `Step.finished`). Their `tokens` are complete. They hold no blocks any more,
            but the prefix cache may keep their blocks until others need them.

        Raises
        ------
        ShapeError
            `ids` does not have one id for each output, or int32 cannot hold an id; nothing is changed.
        UnsupportedDtype
            `ids` are not integers; nothing is changed.
        InvalidSequence
            `step` is not the open step of this scheduler, is not committed, or was already accepted; nothing is
            changed.
        """
        roster = self._settled()
        self._require(step, StepState.COMMITTED, "accept")
        tokens = token_ids(ids, "ids")
        if tokens.shape != (len(step.outputs),):
            raise ShapeError(f"ids have shape {tokens.shape}; expected one id for each of {len(step.outputs)} outputs")
        going, going_ids, finished = sort_outputs(step, tokens)
        start = perf_counter_ns()
        roster.accept(step, going, going_ids, finished)
        step.index_ns += perf_counter_ns() - start
        return list(step.finished)

    # -- inside --------------------------------------------------------------------------------------------------

    def _settled(self) -> Roster:
        self._roster.settle()
        return self._roster

    def _require(self, step: Step, state: StepState, verb: str) -> None:
        """Raise InvalidSequence unless `step` is the open step and in `state`; `verb` names the refused call."""
        if not isinstance(step, Step):
            raise InvalidSequence(f"expected a Step (as returned by schedule), got {step!r}")
        if step is not self._roster.step:
            is_over = step.state in (StepState.ACCEPTED, StepState.ABANDONED)
            reason = f"was already {step.state.value}" if is_over else "belongs to another scheduler"
            raise InvalidSequence(f"cannot {verb} a step that {reason}; {verb} each step returned by schedule once")
        if step.state is not state:
            remedy = "commit it first" if state is StepState.COMMITTED else "accept the ids of its outputs"
            raise InvalidSequence(f"cannot {verb} a step that is {step.state.value}; {remedy}")
