"""State of a scheduler, read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagecore.cache.state._state import Held
from pagecore.errors import PagecoreError
from pagecore.serving.scheduling.exclusive import exclusive, settle
from pagecore.serving.scheduling.figures import SchedulerFigures, read_figures
from pagecore.serving.scheduling.roster_checks import check_roster

if TYPE_CHECKING:
    from pagecore.cache.state._state import StateLock
    from pagecore.serving.scheduling.request import Run
    from pagecore.serving.scheduling.reuse import Reuse
    from pagecore.serving.scheduling.roster import Roster
    from pagecore.serving.scheduling.speculation import Speculation
    from pagecore.serving.scheduling.step import Step

__all__ = ["SchedulerView"]


class SchedulerView:
    """Properties of a scheduler, read after an interrupted transition is settled."""

    _roster: Roster
    _lock: StateLock
    max_running: int

    @property
    def step(self) -> Step | None:
        """The newest open step, neither accepted nor abandoned; None if there is none."""
        return self._settled().step

    @property
    def steps(self) -> tuple[Step, ...]:
        """The open steps, oldest first; two only with overlap."""
        return self._settled().steps

    @property
    @exclusive
    def running(self) -> tuple[Run, ...]:
        """The admitted runs, in order of admission."""
        return tuple(self._roster.running)

    @property
    @exclusive
    def waiting(self) -> tuple[Run, ...]:
        """The runs in the queue: preempted runs first, then the others in order of arrival.

        Under the policy "fcfs" this is the order of admission.
        """
        return tuple(self._roster.waiting)

    @property
    @exclusive
    def idle(self) -> tuple[Run, ...]:
        """The runs between two turns, in the order in which the last turn of each has ended."""
        return tuple(self._roster.idle)

    @property
    @exclusive
    def loading(self) -> tuple[Run, ...]:
        """The runs of the queue that wait for a load, in the order in which their loads began."""
        return tuple(self._roster.loading)

    @property
    @exclusive
    def holders(self) -> tuple[Run, ...]:
        """The runs that hold a row of the cache.

        These are the admitted runs, the next one if its prefix is pinned, and the runs between two turns, or with an
        import that has ended, that have not given their blocks up. Rows of imports under way are not listed.
        """
        roster = self._roster
        return (*roster.running, *roster.pinned, *roster.victims())

    @property
    def num_running(self) -> int:
        """Number of admitted runs; a sample counts once it is forked."""
        return len(self._settled().running)

    @property
    def num_waiting(self) -> int:
        """Number of runs in the queue, preempted runs included."""
        return len(self._settled().waiting)

    @property
    def num_idle(self) -> int:
        """Number of runs between two turns."""
        return len(self._settled().idle)

    @property
    def num_loading(self) -> int:
        """Number of runs of the queue that wait for a load."""
        return len(self._settled().loading)

    @property
    def num_reclaimed(self) -> int:
        """Number of times so far that a run gave its blocks up between two turns, or after its import had ended."""
        return self._settled().num_reclaimed

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
    def num_refused(self) -> int:
        """Number of requests so far that `add` refused because the queue was full."""
        return self._settled().num_refused

    @property
    def num_displaced(self) -> int:
        """Number of waiting runs so far that were cancelled for a larger priority because the queue was full."""
        return self._settled().num_displaced

    @property
    def new_token_ratio(self) -> float | None:
        """Share of `max_new_tokens` that admissions reserve for each run; None if they reserve nothing."""
        return self._settled().ratio

    @property
    def reuse(self) -> Reuse:
        """Tokens that the admissions so far found in the prefix cache."""
        return self._settled().reuse

    @property
    def speculation(self) -> Speculation:
        """Drafts that the steps so far have verified and accepted."""
        return self._settled().speculation

    def figures(self) -> SchedulerFigures:
        """Return the counts of this scheduler, without waiting for a call of another thread."""
        return read_figures(self._roster)

    @exclusive
    def check_invariants(self) -> None:
        """Recount the runs and what they hold; raise `PagecoreError` if the state is inconsistent."""
        roster = self._roster
        check_roster(roster)
        rows = sum(run.samples for run in roster.running)
        if rows > self.max_running:
            raise PagecoreError(f"{rows} rows are reserved for the runs; max_running is {self.max_running}")

    def __repr__(self) -> str:
        roster = self._roster  # as it is: an interrupted transition is not settled
        return (
            f"Scheduler({len(roster.running)} running, {len(roster.waiting)} waiting, {len(roster.steps)} open steps)"
        )

    def _settled(self) -> Roster:
        roster = self._roster
        if roster.may_be_interrupted:
            with Held(self._lock):  # once no other thread is in the middle of a transition
                settle(self)
        return roster
