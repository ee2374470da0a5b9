"""Turns of a replay: requests of one conversation that one run serves, idle between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pagecore.serving.scheduling.request import RequestError, Run, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagecore.cache import PagedKVCache, Sequence
    from pagecore.serving.replay.clock import ReplayClock
    from pagecore.serving.replay.trace_request import TraceRequest
    from pagecore.serving.replay.trace_turns import TraceTurns
    from pagecore.serving.scheduling.scheduler import Scheduler
    from pagecore.serving.scheduling.step import Step

__all__ = ["ReplayTurns", "TurnReport"]

# Turns that wait for the ends of others, up to which a trace is read further.
WAITING_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    """Turns of a replay: the requests of the trace that continued the run of an earlier one.

    `turns` requests continued the runs of `conversations` first requests. `turns_separate` requests were replayed as
    requests of their own although ids or prompts name an earlier one: the prompts differ, another request has continued
    it, or it was refused or rejected. After a turn that is too long for the cache all later ones are refused, too.

    The prompts of the turns have `prompt_tokens` tokens. Of these the runs still held `kept_tokens`, on the device or
    in the swap space, and found `found_tokens` in the prefix cache after they had given their blocks up, which happened
    `reclaimed` times. The steps computed the other `computed_tokens`.

    `idle_runs_mean` and `idle_runs_peak` count the runs that are idle during each step, and `idle_blocks_mean` and
    `idle_blocks_peak` the blocks of the device that they hold, summed over the groups. Blocks that a window has left do
    not count, and a shared block counts for each of its runs.
    """

    conversations: int
    turns: int
    turns_separate: int
    prompt_tokens: int
    kept_tokens: int
    found_tokens: int
    computed_tokens: int
    reclaimed: int
    idle_runs_mean: float
    idle_runs_peak: int
    idle_blocks_mean: float
    idle_blocks_peak: int


class ReplayTurns:
    """The conversations of a replay.

    Parameters
    ----------
    scheduler : Scheduler
    cache : PagedKVCache
        The cache of the scheduler.
    found : TraceTurns
        The turns of the trace.
    clock : ReplayClock
    fetch : callable or None
        Called with the prompt and the namespace of a turn whose run holds nothing, to load what stores have of it.

    Attributes
    ----------
    kept_tokens : int
        Tokens that turns have not computed because their runs held them.
    refusals : list of (int, RequestError)
        Lines of the turns that the cache could never hold, since the list was last cleared.
    separate : deque of TraceRequest
        Requests that waited for a turn that was refused, without the content of their prompts. They are longer, and the
        scheduler will refuse them, too.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: PagedKVCache,
        found: TraceTurns,
        clock: ReplayClock,
        fetch: Callable[[NDArray[np.int32], str | None], None] | None = None,
    ) -> None:
        self._scheduler, self._cache, self._clock, self._fetch = scheduler, cache, clock, fetch
        self._earlier = found.earlier
        self._continued = set(found.earlier.values())
        self._runs: dict[int, Run] = {}  # by the number of the newest request of the conversation
        # Turns that arrived before the end of the one before, each with its tokens after those of that one. To bound
        # memory, the requests have no content.
        self._coming: dict[Run, deque[tuple[TraceRequest, NDArray[np.int32]]]] = {}
        self._num_coming = 0
        self._ended_s: dict[Run, float] = {}
        self._fresh: dict[Run, Sequence | None] = {}  # runs whose turn has computed nothing, and what they held
        self._begun: set[int] = set()
        self.refusals: list[tuple[int, RequestError]] = []
        self.separate: deque[TraceRequest] = deque()
        self.kept_tokens = self._found_tokens = self._prompt_tokens = self._turns = 0
        self._num_separate = found.num_unlike
        # Blocks of the idle runs on the device, in the order in which these became idle, and the sum of the blocks.
        self._held: dict[Run, int] = {}
        self._num_held = self._num_reclaimed = 0
        self._steps = self._idle_runs = self._idle_runs_peak = self._idle_blocks = self._idle_blocks_peak = 0

    @property
    def is_full(self) -> bool:
        """True while `WAITING_MAX` turns wait for the ends of others: to bound memory, no more are read."""
        return self._num_coming >= WAITING_MAX

    def is_continued(self, line: TraceRequest) -> bool:
        """Return True if a later request continues this one: its run must be resumable."""
        return line.number in self._continued

    def add(self, line: TraceRequest, run: Run) -> None:
        """Note the run of a request that was added to the scheduler."""
        if self.is_continued(line):
            self._runs[line.number] = run

    def take(self, line: TraceRequest) -> bool:
        """Let a request continue the run of an earlier one, now or at the end of its turn.

        Returns
        -------
        bool
            False if it has to be added to the scheduler.
        """
        earlier = self._earlier.get(line.number)
        if earlier is None:
            return False
        run = self._runs.pop(earlier, None)
        if run is None:
            self._num_separate += 1
            return False
        if self.is_continued(line):
            self._runs[line.number] = run
        lines = self._coming.setdefault(run, deque())
        known = lines[-1][0].input_length + lines[-1][0].output_length if lines else run.last_length
        lines.append((replace(line, hash_ids=None, token_ids=None), line.prompt()[known:].copy()))
        self._num_coming += 1
        self._resume(run)
        return True

    def before(self, step: Step) -> None:
        """Count what the turns that begin with a step reuse, and the idle runs; call it before the commit."""
        self._observe()
        for run in step.runs[step.num_decodes :] if self._fresh else ():
            if run in self._fresh:
                held, computed = self._fresh.pop(run), run.sequence.num_computed_tokens
                self._prompt_tokens += len(run.request.prompt)
                if held is run.sequence:
                    self.kept_tokens += computed
                else:
                    self._found_tokens += computed

    def _observe(self) -> None:
        self._drop_reclaimed()
        runs, blocks = self._scheduler.num_idle, self._num_held
        self._steps += 1
        self._idle_runs += runs
        self._idle_runs_peak = max(self._idle_runs_peak, runs)
        self._idle_blocks += blocks
        self._idle_blocks_peak = max(self._idle_blocks_peak, blocks)

    def _drop_reclaimed(self) -> None:
        """Drop the blocks of idle runs that gave them up since the last step: the longest idle runs give way first."""
        num_lost = self._scheduler.num_reclaimed - self._num_reclaimed
        self._num_reclaimed += num_lost
        lost: list[Run] = []
        for run in self._held if num_lost else ():
            held = self._cache.sequences.get(run)
            if held is None or held.is_swapped:
                lost.append(run)
                if len(lost) == num_lost:
                    break
        for run in lost:
            self._drop_held(run)

    def _note_held(self, run: Run) -> None:
        """Count the blocks of a run that has become idle; the entries of a row that name no block are 0."""
        held = self._cache.sequences.get(run)
        if held is not None and not held.is_swapped:
            tables = (np.asarray(self._cache.block_table(group)) for group in range(self._cache.num_groups))
            self._held[run] = sum(int(np.count_nonzero(table[held.row])) for table in tables)
            self._num_held += self._held[run]

    def _drop_held(self, run: Run) -> None:
        self._num_held -= self._held.pop(run, 0)

    def end(self, runs: Iterable[Run]) -> None:
        """Begin the next turns of runs whose turns have ended, if they have arrived."""
        for run in runs:
            if run.state is State.IDLE:
                self._ended_s[run] = self._clock.now_s
                self._note_held(run)
                self._resume(run)
            else:
                self._forget(run)

    def report(self) -> TurnReport:
        """Return the figures so far."""
        steps = max(self._steps, 1)
        return TurnReport(
            conversations=len(self._begun),
            turns=self._turns,
            turns_separate=self._num_separate,
            prompt_tokens=self._prompt_tokens,
            kept_tokens=self.kept_tokens,
            found_tokens=self._found_tokens,
            computed_tokens=self._prompt_tokens - self.kept_tokens - self._found_tokens,
            reclaimed=self._scheduler.num_reclaimed,
            idle_runs_mean=self._idle_runs / steps,
            idle_runs_peak=self._idle_runs_peak,
            idle_blocks_mean=self._idle_blocks / steps,
            idle_blocks_peak=self._idle_blocks_peak,
        )

    def _resume(self, run: Run) -> None:
        """Begin the next turn of a run that is idle, if the turn has arrived."""
        lines = self._coming.get(run)
        if run.state is not State.IDLE or not lines:
            return
        line, tokens = lines.popleft()
        self._num_coming -= 1
        self._drop_held(run)
        try:
            # The refusal names the turn, not the first request of its run.
            self._scheduler.check_request(line.number, line.input_length, line.output_length)
            # The tokens before are the prompts before and the generated answers.
            self._scheduler.extend(run, tokens, max_new_tokens=line.output_length)
        except RequestError as error:
            self.refusals.append((line.line, error))
            self._scheduler.finish(run)
            later = [one for one, _ in lines]
            self.separate += later
            self._num_coming -= len(later)
            self._forget(run)
            self._runs.pop((later[-1] if later else line).number, None)
            return
        self._turns += 1
        self._begun.add(run.request.id)
        self._fresh[run] = run.held
        if run.held is None and self._fetch is not None:
            self._fetch(run.request.prompt, line.namespace)
        self._clock.queue(line, number=run.request.id, earliest_s=self._ended_s.get(run, 0.0))
        if not self.is_continued(line):
            self._scheduler.finish(run)

    def _forget(self, run: Run) -> None:
        """Drop a run that has ended; requests that continue it are separate."""
        self._coming.pop(run, None)
        self._ended_s.pop(run, None)
