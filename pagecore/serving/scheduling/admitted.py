"""Admission, preemption and cancellation of runs; R1 to R3 of `roster.py`."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from pagecore.serving.scheduling.crossing import lacks_room
from pagecore.serving.scheduling.future import ratio_after_retraction
from pagecore.serving.scheduling.least_left import LeastLeft
from pagecore.serving.scheduling.loading import LoadingRuns
from pagecore.serving.scheduling.request import Run, State
from pagecore.serving.scheduling.reuse import Reuse, query_of

if TYPE_CHECKING:
    from collections.abc import Container

    from pagecore.cache import PagedKVCache, SwapSpace
    from pagecore.serving.scheduling.future import Ratios
    from pagecore.serving.scheduling.request import Request

__all__ = ["AdmittedRuns"]


class AdmittedRuns(LoadingRuns):
    """The runs that are admitted, next to those of the queue and the idle ones; the base of `Roster`.

    Attributes
    ----------
    running : dict of Run
        The admitted runs, in order of admission; the values are None.
    ratio : float or None
        Share of `max_new_tokens` that admissions reserve for each run; None if they reserve nothing.
    num_preemptions, num_swaps : int
    num_refused, num_displaced : int
        Requests that a full queue refused, and waiting runs that gave their places in it to others.
    reuse : Reuse
    least_left : LeastLeft
        R5: no running run has fewer than `least_left.bound` tokens left before its `last_length`.
    has_samples : bool
        True once a request with several samples was added.
    """

    def __init__(self, cache: PagedKVCache, swap_space: SwapSpace | None, ratios: Ratios | None, policy: str) -> None:
        super().__init__(cache, swap_space, policy)
        self.ratios = ratios
        self.ratio = None if ratios is None else ratios.first
        self.running: dict[Run, None] = {}
        self.num_preemptions = self.num_swaps = 0
        self.num_refused = self.num_displaced = 0
        self.reuse = Reuse()
        self.least_left = LeastLeft()
        self.has_samples = False

    @property
    def num_reserved_rows(self) -> int:
        """Number of rows of the running runs, samples that are not forked yet included."""
        return sum(run.samples for run in self.running) if self.has_samples else len(self.running)

    @property
    def num_used_rows(self) -> int:
        """Number of sequences of the cache that are not swapped out, those of imports included."""
        return sum(not held.is_swapped for held in self.cache.sequences.values())

    def admit(self, run: Run) -> None:
        """Move a run of the queue, which has a sequence, to the running runs."""
        held = run.sequence
        is_back = held.is_swapped
        reuse, query, num_reused = self.reuse, run.query, run.num_reused_tokens
        if not run.hit_tokens:  # it has computed nothing yet, and reuses what it finds now
            num_reused = held.num_cached_tokens
        if run in self.pinned and run.hit_tokens:
            reuse = reuse.recovered(held.num_cached_tokens)
        elif run in self.pinned:
            query = query_of(held, len(run.tokens), self.cache.block_size)
        elif not run.hit_tokens:
            query = None  # an import looks no prefix up
        waiting_tokens = self.num_waiting_tokens - run.num_tokens_left
        least_left = self.least_left.with_run(run.last_length - max(held.num_tokens, len(run.tokens)))

        def call() -> None:
            if is_back:
                self.cache.swap_in([held])

        def record() -> None:
            run.state = State.RUNNING
            run.num_reused_tokens, run.query = num_reused, query
            self.running[run] = None
            self.least_left = least_left
            self._leave_queue(run)
            if self.loaded:
                self.release_load(run)
            self.reuse = reuse
            self.num_waiting_tokens = waiting_tokens

        self._journal.run(call, lambda: not held.is_swapped, record)

    def preempt(self, run: Run, *, swap: bool = True, is_retraction: bool = True) -> None:
        """Move a running run to the front of the queue, swapped out or without a sequence.

        A retraction, which makes room for other running runs, sets the ratio.
        """
        held = run.sequence
        tokens = np.asarray(held.tokens)
        preemptions, run_preemptions = self.num_preemptions + 1, run.num_preemptions + 1
        swaps, waiting_tokens, computed = self.num_swaps, self.num_waiting_tokens, held.num_computed_tokens
        news = self.news + 1
        ratio = self.ratio
        if swap and self.idle:
            self.make_swap_room(held)
        if ratio is not None and is_retraction:
            ratio = ratio_after_retraction(other for other in self.running if other is not run)

        def call() -> None:
            space = self.swap_space if swap else None
            if space is None or not self.cache.try_swap_out([held], space):
                self.cache.remove(held)

        def record() -> None:
            is_saved = held.is_swapped
            run.held = held if is_saved else None
            run.tokens = tokens
            run.prefilling = True
            run.state = State.WAITING
            run.num_preemptions = run_preemptions
            run.goes_first = True
            self.waiting[run] = None
            self.waiting.move_to_end(run, last=False)
            self._sort(run)
            self.running.pop(run, None)
            self.num_waiting_tokens = waiting_tokens + len(tokens) - (computed if is_saved else 0)
            self.num_preemptions = preemptions
            self.num_swaps = swaps + is_saved
            run.waits_since = self.num_steps
            run.matched_at = -1
            self.ratio = ratio
            self.news = news

        self._journal.run(call, lambda: held.is_swapped or self.found(run) is None, record)

    def extend(self, run: Run, request: Request) -> None:
        """Give a run a request whose prompt has all of its known tokens and further ones.

        The run has not ended, and has no row in an open step. It computes the new tokens as a prompt.
        """
        if run in self.pinned:
            self.unpin(run)
        held, tokens = run.held, request.prompt
        known = len(run.tokens) if held is None else held.num_tokens
        waiting_tokens = self.num_waiting_tokens + (len(tokens) - known if run in self.waiting else 0)

        def call() -> None:
            if held is None:
                run.request = request
            else:
                self.cache.append_tokens([held], [tokens[known:].tolist()])

        def record() -> None:
            for each in (run, *run.siblings):
                each.take_request(request)
                each.tokens = tokens
            self.least_left = LeastLeft()
            run.prefilling = True
            run.shared_at = run.matched_at = -1
            self.num_waiting_tokens = waiting_tokens

        self._journal.run(
            call, lambda: run.request is request or (held is not None and held.num_tokens > known), record
        )

    def make_import_room(self, run: Run, num_tokens: int, max_running: int, in_flight: Container[Run]) -> bool:
        """Let runs between two turns give way until an import of `num_tokens` for a run of the queue has room.

        Runs of `in_flight` keep their sequences. Return False if there is no room; at most one run, with a row, has
        given way then, unless some share blocks. A shared block is not freed, but a later write then needs no copy of
        it; both count as one block.
        """
        for one in list(self.pinned):
            self.unpin(one)
        if self.num_reserved_rows + self.num_arriving + run.samples > max_running:
            return False
        victims = deque(one for one in self.victims() if one not in in_flight)
        if self.num_used_rows >= self.cache.max_sequences and victims:
            self.reclaim(victims.popleft())
        if self.num_used_rows >= self.cache.max_sequences:
            return False
        self.pin(run)
        left = max(num_tokens - run.sequence.num_computed_tokens, 1)
        while any(missing := self.cache.shortages([run.sequence], [left])) and self.can_free(missing, victims):
            self.reclaim(victims.popleft())
        self.unpin(run)
        return not any(missing)

    def lacks_encoder_room(self, step_tokens: int) -> bool:
        """Return True if only rows or blocks for its encoder output are short for a run that holds a sequence.

        A run that waits computes up to `step_tokens` of its tokens in a step.
        """
        holders = [run for run in self.waiting if run.held is not None]
        return lacks_room(self.cache, self.running, holders, step_tokens)

    def release_encoder_output(self) -> bool:
        """Let swapped runs be computed again, to free an encoder output on the device that only they hold.

        Such an output is left when its last run on the device ends. Return False if there is none.
        """
        holders = [(run, run.held) for run in (*self.running, *self.waiting) if run.request.cross_tokens]
        holders += [(run, held) for run, held in self.idle.items() if run.request.cross_tokens]
        in_use = {held.cross_row for _, held in holders if held is not None and not held.is_swapped}
        left: dict[int, list[Run]] = {}
        for run, held in holders:
            if held is not None and held.is_swapped and held.cross_row >= 0 and held.cross_row not in in_use:
                left.setdefault(held.cross_row, []).append(run)
        if not left:
            return False
        # Runs at the front of the queue continue first, so the output whose first run is furthest back goes.
        for run in list(left.values())[-1]:
            (self.forget if run in self.idle else self.unpin)(run)
        return True

    def cancel(self, run: Run, successor: Run | None = None, *, state: State = State.CANCELLED) -> None:
        """End a run that has not ended, and remove its sequence; queue `successor`, a new run, in its place."""
        tokens = run.tokens if run.held is None else np.asarray(run.held.tokens)
        waiting_tokens = self.num_waiting_tokens - (run.num_tokens_left if run in self.waiting else 0)
        waiting_tokens += 0 if successor is None else len(successor.tokens)
        # The first sample represents all samples until they are forked.
        is_forked = run.held is not None or run in self.waiting or run in self.idle
        parent = None if is_forked else run.parent
        samples = 0 if parent is None else parent.samples - 1
        news = self.news + 1
        displaced = self.num_displaced + (successor is not None)
        ended = (run, *run.siblings) if run.samples > 1 else (run,)

        def record() -> None:
            run.held = None
            run.tokens = tokens
            for each in ended:
                each.state = state
            run.siblings = ()
            if parent is not None:
                parent.samples = samples
            self._leave_queue(run)
            self.running.pop(run, None)
            self.idle.pop(run, None)
            self.parked.pop(run, None)
            self.release_load(run)
            if successor is not None:
                self.waiting[successor] = self.new[successor] = None
                self._sort(successor)
            self.num_displaced = displaced
            self.num_waiting_tokens = waiting_tokens
            self.news = news

        def call() -> None:
            if run in self.loading:
                self.loading[run].cancel()
            self._leave_cache(run)

        self._journal.run(call, lambda: self.found(run) is None, record)
