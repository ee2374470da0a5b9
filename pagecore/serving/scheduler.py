"""Continuous batching over a paged cache; it knows no model and no framework.

R1: `running` followed by `waiting` is in order of arrival, so whoever is first in line is served first.
R2: the oldest run is never preempted, and every step computes at least one of its tokens: there is no livelock.
R3: a run in `running` has a sequence that is not swapped out. A run in `waiting` has none, or one that is swapped out,
    or, at the head alone, one that holds the prefix that it will reuse and no other block.
R4: rows promised to the runs (samples not yet forked included) never exceed `max_running`.
R5: whatever the swap space holds is of runs in `waiting`, whose computed tokens are not computed again.

One step: every run that decodes gets one token; what is left of the budget goes to prompts, in chunks, oldest first;
then the head of the queue is admitted while the pool can hold its whole prompt. When blocks run short the youngest run
is preempted and goes to the front of the queue: swapped out, where there is a swap space with room for it, to go on
where it was; else its blocks are given up, and what it has so far becomes its prompt (recomputation). Both as in vLLM.
What the prefix cache keeps of those blocks until it comes back is not computed again.
"""

from __future__ import annotations

from collections import deque
from itertools import repeat
from time import perf_counter_ns
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from pagecore.errors import InvalidSequence, OutOfBlocks, ShapeError, UnsupportedOption
from pagecore.serving.request import Request, RequestError, Run, State, token_ids
from pagecore.serving.reuse import Reuse
from pagecore.serving.step import Step
from pagecore.storage.checks import as_float, at_least

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from pagecore.cache import PagedKVCache, Sequence, SwapSpace

__all__ = ["Scheduler"]


class Scheduler:
    """Decides what each step computes: `add`, then `schedule`, `commit`, `accept` until `schedule` gives None.

    Parameters
    ----------
    cache : PagedKVCache
        An empty one; from now on the scheduler alone adds sequences to it.
    max_running : int
        Sequences that run at once, at most; as many rows must be free in the cache. No more run than
        `max_tokens_per_step`, so that each of them gets a token in each step.
    max_tokens_per_step : int
        Tokens of one step, prompt and decode together.
    headroom : float
        Share of the pool that an admission leaves free for those that run already, so that the newcomer is not
        preempted a few steps later. When nothing else runs it may take everything.
    swap_space : SwapSpace, optional
        Of this cache: where preempted runs wait. Without it, and while it is full, they are computed again.

    Attributes
    ----------
    max_length : int
        Slots of the longest sequence that the cache can hold, alone.
    num_preemptions, num_swaps, num_forks : int
        So far; `num_swaps` of the preempted runs were swapped out, the others are computed again.
    reuse : Reuse
        What the admitted found in the prefix cache.
    num_waiting_tokens : int
        Tokens that the queue has to compute, as far as it is known: what the prefix cache has is told when a run is the
        next. Who streams requests adds more while there is less than a step's.

    Raises
    ------
    ShapeError
        A limit below 1, or a headroom outside 0 to 1.
    UnsupportedOption
        A swap space of another cache.
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
        max_running = at_least("max_running", max_running)
        max_tokens_per_step = at_least("max_tokens_per_step", max_tokens_per_step)
        headroom = as_float("headroom", headroom)
        if not 0 <= headroom <= 1:
            raise ShapeError(f"headroom is {headroom}; it must be a share of the pool, between 0 and 1")
        if swap_space is not None and getattr(swap_space, "cache", None) is not cache:
            raise UnsupportedOption(f"swap_space is {swap_space!r}, which is not of this cache; make one for it")
        self.cache = cache
        self.swap_space = swap_space
        self.max_running = min(max_running, max_tokens_per_step)
        self.max_tokens_per_step = max_tokens_per_step
        # The pool is empty now, so what it has to give is what a sequence can have when it is alone.
        self.max_length = min(cache.num_available * cache.block_size, cache.max_tokens_per_sequence)
        self.num_preemptions = 0
        self.num_swaps = 0
        self.num_forks = 0
        self.reuse = Reuse()
        self.num_waiting_tokens = 0
        self._headroom = int(self.max_length * headroom)
        self._running: list[Run] = []
        self._waiting: deque[Run] = deque()
        self._rows = 0
        # Whether the prefix cache may have more for the head of the queue than when it was last asked.
        self._has_news = False
        self._batch = cache.make_batch(self.max_running, max_tokens_per_step)

    @property
    def running(self) -> tuple[Run, ...]:
        """The admitted runs, oldest first."""
        return tuple(self._running)

    @property
    def holders(self) -> tuple[Run, ...]:
        """The runs that have a place in the cache: the admitted ones, and the next if it keeps its prefix there."""
        head = self._head_with_prefix()
        return self.running if head is None else (*self._running, head)

    @property
    def num_running(self) -> int:
        """Runs that are admitted; samples count once they are forked."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Runs in the queue, the preempted ones included."""
        return len(self._waiting)

    def add(self, request: Request) -> Run:
        """Queue a request.

        Returns
        -------
        Run
            Its first sample; the others appear in `Step.outputs` when the prompt is computed.

        Raises
        ------
        RequestError
            The cache cannot hold it even alone, or it has more samples than can run; nothing is queued.
        """
        if request.num_slots > self.max_length:
            raise RequestError(
                f"request {request.id} needs {request.num_slots} slots ({len(request.prompt)} of prompt, "
                f"{request.max_new_tokens} to generate); the cache holds {self.max_length} for one sequence; "
                "give it more blocks or longer rows, or shorten the request"
            )
        if request.samples > self.max_running:
            raise RequestError(
                f"request {request.id} asks for {request.samples} samples; {self.max_running} sequences run at once; "
                "raise max_running (and max_tokens_per_step), or ask for fewer"
            )
        run = Run(request, samples=request.samples if request.max_new_tokens else 1)
        self._waiting.append(run)
        self.num_waiting_tokens += len(run.tokens)
        return run

    def schedule(self) -> Step | None:
        """Choose the next step and take its blocks; None when nothing is left to do.

        Raises
        ------
        OutOfBlocks
            The oldest run does not fit although it is alone: blocks of the cache are held outside the scheduler.
        """
        if not self._running and not self._waiting:
            return None
        start = perf_counter_ns()
        runs, sequences, counts, num_decodes = self._select()
        self._admit(runs, sequences, counts)
        if not runs:
            self._refuse_to_stall()
        while self.cache.try_prepare(sequences, counts, out=self._batch) is None:
            if self._let_go_of_head():
                continue
            if len(self._running) <= 1:
                self.cache.prepare(sequences, counts, out=self._batch)
                break
            self._preempt_youngest()
            runs, sequences, counts, num_decodes = self._select()
        index_ns = perf_counter_ns() - start
        outputs, rows = self._outputs(runs, sequences, counts, num_decodes)
        return Step(self._batch, runs, counts, num_decodes, outputs, rows, index_ns)

    def commit(self, step: Step) -> None:
        """Count the tokens of a step as computed, and fork the prompts that are complete into their samples."""
        start = perf_counter_ns()
        self.cache.commit(step.batch)
        step.is_committed = True
        step.index_ns += perf_counter_ns() - start
        if len(step.runs) > step.num_decodes:
            self._has_news = True
            self._end_prefills(step)

    def abandon(self, step: Step) -> None:
        """Undo a step whose forward pass failed: every run is where it was, and the next step tries again."""
        self.cache.abandon(step.batch)

    def accept(self, step: Step, ids: ArrayLike) -> list[Run]:
        """Hand over the sampled tokens of a committed step.

        Parameters
        ----------
        step : Step
        ids : array_like of int32
            One id for each of `step.outputs`.

        Returns
        -------
        list of Run
            Those that are finished; their `tokens` are complete. They hold nothing of the cache any more, but it may
            keep their blocks until others need them.

        Raises
        ------
        ShapeError
            Not one id for each output, or ids that int32 cannot hold; nothing is changed.
        UnsupportedDtype
            Ids that are no integers; nothing is changed.
        InvalidSequence
            A step that is not committed, or was accepted already.
        """
        if not step.is_committed:
            raise InvalidSequence("the step waits for no ids; commit it, then accept once for all of its outputs")
        tokens = token_ids(ids, "ids")
        if tokens.shape != (len(step.outputs),):
            raise ShapeError(f"ids have shape {tokens.shape}; one id for each of {len(step.outputs)} outputs is needed")
        step.is_committed = False
        ended = self._count_generated(step)
        if not ended:
            self._append(step, [run.sequence for run in step.outputs], tokens)
            return []
        going = [run.state is State.RUNNING for run in step.outputs]
        self._append(step, [run.sequence for run in step.outputs if run.state is State.RUNNING], tokens[going])
        last = dict(zip(step.outputs, tokens, strict=True))
        for run in ended:
            self._finish(run, last.get(run))
        self._running = [run for run in self._running if run.state is State.RUNNING]
        return ended

    def _select(self) -> tuple[list[Run], list[Sequence], list[int], int]:
        """The rows of those that run: decodes, then chunks of prompts, oldest first, while the budget lasts."""
        runs = [run for run in self._running if not run.prefilling]
        num_decodes = len(runs)
        counts = [1] * num_decodes
        if num_decodes < len(self._running):
            budget = self.max_tokens_per_step - num_decodes
            for run in self._running:
                if run.prefilling and budget:
                    count = min(run.num_tokens_left, budget)
                    runs.append(run)
                    counts.append(count)
                    budget -= count
        return runs, [run.sequence for run in runs], counts, num_decodes

    def _admit(self, runs: list[Run], sequences: list[Sequence], counts: list[int]) -> None:
        """Admit from the queue while rows, budget and blocks for a whole prompt last; extends the lists in place."""
        if not self._waiting:
            return
        budget = self.max_tokens_per_step - sum(counts)
        # Budget is left only when every prompt that runs is given all that it lacks, so `counts` are whole needs here.
        needs = counts.copy()
        while budget and self._waiting and self._rows + self._waiting[0].samples <= self.max_running:
            run = self._waiting[0]
            self._hold(run)
            rest = run.num_tokens_left
            sequences.append(run.sequence)
            headroom = self._headroom if self._running else 0
            needs.append(min(rest + headroom, self.max_length - run.sequence.num_computed_tokens))
            if self.cache.shortage(sequences, needs):
                sequences.pop()
                return
            if run.sequence.is_swapped:
                self.cache.swap_in([run.sequence])
            else:
                self.reuse.count(run, self.cache.block_size)
            needs[-1] = rest
            self._waiting.popleft()
            self.num_waiting_tokens -= rest
            self._running.append(run)
            self._rows += run.samples
            run.state = State.RUNNING
            runs.append(run)
            counts.append(min(rest, budget))
            budget -= counts[-1]

    def _hold(self, run: Run) -> None:
        """Give the head of the queue its place in the cache, with as much of its prefix as is there by now."""
        if run.held is not None:
            if run.held.is_swapped or not self._has_news:
                return
            found = self.cache.match_length(run.tokens, namespace=run.request.namespace)
            self._has_news = False
            if found <= run.held.num_cached_tokens:
                return
            self._let_go_of_head()
        run.held = self.cache.add_sequence(run.tokens, namespace=run.request.namespace)
        self.num_waiting_tokens -= run.held.num_cached_tokens
        self._has_news = False

    def _let_go_of_head(self) -> bool:
        """Take the place in the cache from the head of the queue, if it has one: it may hold what others lack."""
        head = self._head_with_prefix()
        if head is None:
            return False
        self.num_waiting_tokens += head.sequence.num_cached_tokens
        self._leave_cache(head)
        return True

    def _head_with_prefix(self) -> Run | None:
        """The head of the queue, where it holds its prefix in the cache."""
        head = self._waiting[0] if self._waiting else None
        return None if head is None or head.held is None or head.held.is_swapped else head

    def _refuse_to_stall(self) -> NoReturn:
        """Nothing runs and the head of the queue does not fit, though `add` found that it fits an empty pool."""
        run = self._waiting[0]
        available = self.cache.num_available
        needed = available + self.cache.shortage([run.sequence], [run.num_tokens_left])
        raise OutOfBlocks(
            f"request {run.request.id} needs {needed} blocks for {len(run.tokens)} tokens; {available} are available "
            "although nothing runs: blocks are held outside the scheduler; remove what holds them",
            needed,
            available,
        )

    def _preempt_youngest(self) -> None:
        """Send the youngest run back to the front of the queue: swapped out, or to be computed from its start."""
        run = self._running.pop()
        run.tokens = np.asarray(run.sequence.tokens)
        run.prefilling = True
        run.state = State.WAITING
        self._rows -= run.samples
        if self.swap_space is not None and self.cache.try_swap_out([run.sequence], self.swap_space):
            self.num_swaps += 1
        else:
            self._leave_cache(run)
        self._waiting.appendleft(run)
        self.num_waiting_tokens += run.num_tokens_left
        run.num_preemptions += 1
        self.num_preemptions += 1

    def _leave_cache(self, run: Run) -> None:
        self.cache.remove(run.sequence)
        run.held = None

    def _outputs(
        self, runs: list[Run], sequences: list[Sequence], counts: list[int], num_decodes: int
    ) -> tuple[list[Run], list[int]]:
        """Who takes a sampled token, and from which row: each decode, and each sample of a prompt that ends."""
        outputs = runs[:num_decodes]
        rows = list(range(num_decodes))
        for row in range(num_decodes, len(runs)):
            run = runs[row]
            if not run.request.max_new_tokens or sequences[row].num_computed_tokens + counts[row] < len(run.tokens):
                continue
            outputs.append(run)
            outputs += [Run(run.request, sample) for sample in range(1, run.samples)]
            rows += repeat(row, run.samples)
        return outputs, rows

    def _end_prefills(self, step: Step) -> None:
        """Turn prompts that are computed into runs that decode, each sample a sequence of its own."""
        for run in step.runs[step.num_decodes :]:
            run.prefilling = run.sequence.num_computed_tokens < len(run.tokens)
            run.samples = run.samples if run.prefilling else 1
        for row, run in zip(step.output_rows, step.outputs, strict=True):
            if run.held is None:
                parent = step.runs[row]
                run.held = self.cache.fork(parent.sequence)
                run.prefilling = False
                run.state = State.RUNNING
                # Beside its siblings: the order of arrival holds (R1).
                self._running.insert(self._running.index(parent) + run.sample, run)
                self.num_forks += 1

    def _count_generated(self, step: Step) -> list[Run]:
        """Advance the counts; those that end with this step, marked as finished."""
        ended = []
        for run in step.outputs:
            run.num_generated += 1
            if run.num_generated == run.request.max_new_tokens:
                ended.append(run)
        prompts = step.runs[step.num_decodes :]
        ended += [run for run in prompts if not run.request.max_new_tokens and not run.prefilling]
        for run in ended:
            run.state = State.FINISHED
        return ended

    def _append(self, step: Step, sequences: list[Sequence], tokens: NDArray[np.int32]) -> None:
        if sequences:
            start = perf_counter_ns()
            self.cache.append_tokens(sequences, tokens)
            step.index_ns += perf_counter_ns() - start

    def _finish(self, run: Run, last: np.int32 | None) -> None:
        """Give up what a finished run holds; its last token never enters the cache, where no step would compute it."""
        tokens = np.asarray(run.sequence.tokens)
        run.tokens = tokens if last is None else np.append(tokens, last)
        self._rows -= 1
        self._leave_cache(run)
        self._has_news = True
