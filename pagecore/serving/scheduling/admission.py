"""Admission to the next step: the first requests of the queue that the pool can hold.

Admission tries stages of 1, 2, 4, ... requests, because `shortage` looks at all rows: it is called a logarithmic number
of times instead of once for each request. If a stage does not fit, bisection finds the part of it that fits. The cost
is linear in the requests that it looks at.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pagecore.serving.scheduling.crossing import match_options
from pagecore.serving.scheduling.future import add_future, count_future, expected_blocks
from pagecore.serving.scheduling.queue import Queue
from pagecore.serving.scheduling.rows import is_held_back
from pagecore.serving.scheduling.sharing import SharedPrompts
from pagecore.storage.checks import ceil_div

if TYPE_CHECKING:
    from pagecore.cache import Sequence
    from pagecore.serving.scheduling.limits import Limits
    from pagecore.serving.scheduling.request import Run
    from pagecore.serving.scheduling.roster import Roster
    from pagecore.serving.scheduling.rows import StepRows

__all__ = ["Admission"]


class Admission:
    """One round of admissions to a step.

    Parameters
    ----------
    roster : Roster
    rows : StepRows
        Rows of the running runs; a row is appended for each admitted run.
    budget : int
        Tokens that the step has left for prompts.
    limits : Limits

    Attributes
    ----------
    stopped_at : Run or None
        The first run of the queue that the pool cannot hold, or whose prefix has become too short for a step that holds
        prompts back; it keeps its cached prefix pinned.
    """

    def __init__(self, roster: Roster, rows: StepRows, budget: int, limits: Limits) -> None:
        self._roster = roster
        self._rows = rows
        self._limits = limits
        self._budget = budget
        reserved = roster.num_reserved_rows + roster.num_arriving
        self._free_rows = limits.max_running - reserved
        self._free_states = limits.state_rows - reserved
        self.stopped_at: Run | None = None
        self._is_closed = self._budget <= 0 or self._free_rows <= 0
        self._waits_for_part = False
        self._queue: Queue | None = None
        if self._is_closed:
            return
        self._queue = Queue(roster, limits)
        self._unpin([run for run in roster.pinned if run is not self._queue.first])
        # Prompts that are held back have no rows, and need their blocks later.
        self._held = [run.sequence for run in rows.held]
        self._held_needs = self._with_future(rows.held, [run.num_tokens_left for run in rows.held])
        # Tokens that each row still lacks, those that it will generate included.
        lacking = [run.num_tokens_left for run in rows.runs[rows.num_decodes :]]
        self._needs = self._with_future(rows.runs, [1] * rows.num_decodes + lacking)
        if rows.has_drafts:
            self._needs = [max(need, count) for need, count in zip(self._needs, rows.counts, strict=True)]
        self._shared = SharedPrompts(roster.cache.block_size) if limits.shares_prompts else None
        if self._shared is not None:
            for run, count in zip(rows.runs[rows.num_decodes :], rows.counts[rows.num_decodes :], strict=True):
                self._shared.add(run, count)

    def admit(self) -> None:
        """Admit runs from the queue, in its order, while budget, rows and blocks for a whole prompt last."""
        size = 1
        while not self._is_closed:
            stage, delayed = self._stage(size)
            fitting = self._count_fitting(stage) if stage else 0
            if self._limits.holds_prompts:  # prefixes that were pinned again may be shorter
                load = self._rows.load
                fitting = next((n for n, run in enumerate(stage[:fitting]) if is_held_back(run, load)), fitting)
            for run in stage[:fitting]:
                self._admit(run)
            if fitting < len(stage):
                self._stop(stage, fitting, delayed)
            size *= 2
        # A pinned run occupies a row, which must not be one that is reserved for samples.
        kept = self.stopped_at
        self._unpin([run for run in self._roster.pinned if run is not kept and run.samples > self._free_rows])

    @property
    def next_run(self) -> Run | None:
        """The first run of the queue that would continue if it had room; None if there is none.

        A step that decodes have filled has a token for it when one of them gives way. Nothing gives way to a run of
        which only a span waits for a later step.
        """
        has_tokens = self._budget > 0 or sum(self._rows.decode_counts) == self._limits.budget
        if not has_tokens or self._waits_for_part or not self._roster.num_ready:
            return None
        if self._queue is None:
            return Queue(self._roster, self._limits).first
        if self._queue.num_skipped == self._limits.max_running:
            return None
        return next(iter(self._queue.take(1)), None)

    def lacking_rows(self, run: Run) -> int:
        """Return the rows, or the state slots, that the next run lacks; 0 or less if it lacks none."""
        rows = run.samples - self._free_rows
        return max(rows, run.samples - self._free_states) if self._roster.running else rows

    def lacking_blocks(self, run: Run, others: int) -> int:
        """Return the blocks that the next run lacks once runs between two turns gave theirs up; 0 or less for none.

        None of them gives way if they and running runs that free `others` blocks hold too few. Without a row the cached
        prefix of the run is not pinned: all of its blocks are counted, and those that running runs still take.
        """
        roster = self._roster
        cache, ratio = roster.cache, roster.ratio
        size = cache.block_size
        wanted = None
        if run.held is None or self._queue is None:
            future = 0 if ratio is None else count_future(run, ratio, size)
            wanted = ceil_div(min(len(run.tokens) + future, self._limits.max_length), size)
            wanted += sum(expected_blocks(one, size, ratio) - one.sequence.capacity // size for one in roster.running)
        while True:
            missing = self._count_missing([run]) if wanted is None else wanted - cache.num_available
            if missing <= 0 or not (roster.parked or roster.continuing):
                return missing
            victims = roster.victims((run,))
            if wanted is None:
                lacked = [max(one - others, 0) for one in self._list_missing([run])]
                suffices = roster.can_free(lacked, victims, swaps=run.sequence.is_swapped)
            else:
                suffices = missing - others <= roster.most_blocks(victims)
            if not suffices or not roster.reclaim_next(keep=(run,)):
                return missing

    def _stage(self, size: int) -> tuple[list[Run], dict[Run, int]]:
        """Pin up to `size` runs of the queue for which budget, rows and state slots suffice.

        At most `max_running` runs are delayed in a step, because the next step admits no more. A run that has the cache
        for itself needs no slots for its samples: they are preempted when they lack slots.

        Returns
        -------
        stage : list of Run
        delayed : dict of Run to int
            Runs that wait one step for a prompt of this step, and the number of runs before each in the stage.
        """
        stage: list[Run] = []
        delayed: dict[Run, int] = {}
        roster, limits, shared = self._roster, self._limits, self._shared
        budget, free_rows, free_states = self._budget, self._free_rows, self._free_states
        load = self._rows.load.copy()
        queue = self._queue
        assert queue is not None  # admissions that are closed from the start take nothing
        taken = queue.take(size)
        self._is_closed = len(taken) < size
        for run in taken:
            lacks_states = run.samples > free_states and bool(stage or roster.running)
            has_delayed_most = queue.num_skipped == limits.max_running
            if budget <= 0 or run.samples > free_rows or lacks_states or has_delayed_most:
                self._is_closed = True
                break
            if limits.holds_prompts and self._must_wait(run):
                self._is_closed = True
                break
            if roster.parked or roster.continuing:
                roster.make_rows(limits.max_running - free_rows + run.samples, (*stage, run))
            self._pin(run)
            if limits.holds_prompts and is_held_back(run, load):
                self._unpin([run])
                run.held_news, run.held_room = roster.news, roster.cache.num_available
                self._is_closed = True
                break
            if shared is not None and run in roster.pinned and shared.should_wait(run):
                delayed[run] = len(stage)
                roster.delay(run)
                queue.num_skipped += 1
                continue
            count = limits.parts.count(run, budget, load)
            if not count:
                is_delayed = limits.parts.trees_delay(run, budget, load)
                self._rows.trees_delay_span = is_delayed and self._fits([*stage, run])
                self._unpin([run])
                self._is_closed = self._waits_for_part = True
                break
            stage.append(run)
            if load.is_limited:
                load.add(run, count)
            if shared is not None:
                shared.add(run, count)
            budget -= count
            free_rows -= run.samples
            free_states -= run.samples
        return stage, delayed

    def _must_wait(self, run: Run) -> bool:
        """Return True if a run is surely held back; it is not pinned for that.

        A prefix that tiers have may be shorter once it is pinned, because the pool lacks room for it, and only a
        sequence shows whether the cache has its encoder output: a run that was held back for that is not pinned again
        before there is news, or more room. A prefix is looked up only if blocks can end one token before the end of the
        prompt: about 50 us for 100,000 cached tokens.
        """
        roster, held = self._roster, run.held
        if self._rows.load.last_needs_output(run):
            return True
        if held is None and run.held_news == roster.news and roster.cache.num_available <= run.held_room:
            return True
        length, most = len(run.tokens), run.request.max_reused_tokens
        computed = 0 if held is None else held.num_computed_tokens
        if length - computed <= 1:
            return False
        size = roster.cache.block_size
        reusable = (length - 1 if most is None else min(length - 1, most)) // size * size
        if length - reusable > 1 or (held is not None and (run not in roster.pinned or run.pinned_news == roster.news)):
            return True
        return length - roster.cache.match_length(run.tokens, **match_options(run.request)) > 1

    def _stop(self, stage: list[Run], fitting: int, delayed: dict[Run, int]) -> None:
        """End the admission at the first run of a stage that does not fit; runs after it have not waited."""
        self._is_closed = True
        self.stopped_at = stage[fitting]
        for run, num_before in delayed.items():
            if num_before > fitting:
                run.shared_at = self._roster.delays[run]
        self._unpin(stage[fitting + 1 :])
        self._pin(stage[fitting])

    def _count_fitting(self, stage: list[Run]) -> int:
        """Return the number of runs at the start of the stage that fit; these are pinned."""
        if self._fits(stage):
            return len(stage)
        low, high = 0, len(stage)
        while high - low > 1:
            middle = (low + high) // 2
            self._unpin(stage[middle:])
            for run in stage[low:middle]:
                self._pin(run)
            if self._fits(stage[:middle]):
                low = middle
            else:
                high = middle
        return low

    def _fits(self, runs: list[Run]) -> bool:
        """Return True if the pool can hold the rows, the whole prompts of `runs`, and the headroom.

        Runs between two turns give their blocks up for that, unless all of them hold too few and others run.
        """
        is_alone = len(runs) == 1 and not self._roster.running
        while self._count_missing(runs):
            if not (self._roster.parked or self._roster.continuing):
                return False
            missing = self._list_missing(runs)
            swaps = any(run.sequence.is_swapped for run in runs)
            if not self._roster.reclaim_blocks(missing, keep=runs, must_suffice=not is_alone, swaps=swaps):
                return False
        return True

    def _count_missing(self, runs: list[Run]) -> int:
        """Return the blocks that the pool lacks for the rows, the whole prompts of `runs`, and the headroom.

        In the blocks of a window, a prompt needs room for its window and one part; the step is fitted to it later.
        """
        return self._roster.cache.shortage(*self._demand(runs), step_tokens=self._limits.prompt_tokens)

    def _list_missing(self, runs: list[Run]) -> list[int]:
        """Return `_count_missing` of each group, the state slots last."""
        return self._roster.cache.shortages(*self._demand(runs), step_tokens=self._limits.prompt_tokens)

    def _demand(self, runs: list[Run]) -> tuple[list[Sequence], list[int]]:
        """Return the sequences of the rows and of `runs`, and the tokens that each may still compute."""
        sequences = self._held + self._rows.sequences + [run.sequence for run in runs]
        lacking = [run.num_tokens_left for run in runs]
        is_alone = len(runs) == 1 and not self._roster.running
        needs = self._held_needs + self._needs + (lacking if is_alone else self._with_future(runs, lacking))
        headroom = self._limits.headroom if self._roster.running else 0
        for place in range(len(needs) - 1, -1, -1):  # a row takes as much of it as one sequence can hold
            if not headroom:
                break
            room = self._limits.max_length - sequences[place].num_computed_tokens - needs[place]
            more = max(0, min(headroom, room))
            needs[place] += more
            headroom -= more
        return sequences, needs

    def _with_future(self, runs: list[Run], needs: list[int]) -> list[int]:
        """Add the slots of tokens to be generated, up to the longest sequence that the cache can hold."""
        ratio = self._roster.ratio
        if ratio is None:
            return needs
        return add_future(runs, needs, ratio, self._roster.cache.block_size, self._limits.max_length)

    def _admit(self, run: Run) -> None:
        queue, rows = self._queue, self._rows
        run.came_late = queue is not None and queue.is_late(run)
        self._roster.admit(run)
        count = self._limits.parts.count(run, self._budget, rows.load)
        if count:
            rows.add(run, count)
            if rows.load.is_limited:
                rows.load.add(run, count)
            self._needs += self._with_future([run], [run.num_tokens_left])
        else:
            # Prefixes of the stage were pinned again and became shorter: the run has its row in a later step.
            self._is_closed = True
        self._budget -= count
        self._free_rows -= run.samples
        self._free_states -= run.samples

    def _pin(self, run: Run) -> None:
        """Pin the longest cached prefix of a waiting run, unless the run is swapped out."""
        roster = self._roster
        if run.held is not None:
            if run not in roster.pinned or run.pinned_news == roster.news:
                return
            found = roster.cache.match_length(run.tokens, **match_options(run.request))
            if found <= run.held.num_cached_tokens:
                run.pinned_news = roster.news
                return
            roster.unpin(run)
        roster.pin(run)

    def _unpin(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if run in self._roster.pinned:
                self._roster.unpin(run)
