"""Requests of a scheduler: they are added, cancelled and preempted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagecore.errors import InvalidSequence, UnsupportedOption
from pagecore.serving.scheduling.crossing import check_cross, check_retention
from pagecore.serving.scheduling.exclusive import exclusive
from pagecore.serving.scheduling.request import QueueFull, Request, Run
from pagecore.serving.scheduling.view import SchedulerView
from pagecore.storage.checks import as_tuple, flag, require_int, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagecore.cache import PagedKVCache
    from pagecore.serving.scheduling.limits import Limits
    from pagecore.serving.scheduling.loading import Load

__all__ = ["SchedulerRequests"]


class SchedulerRequests(SchedulerView):
    """Calls of a scheduler that concern requests; none of them computes anything."""

    cache: PagedKVCache
    _limits: Limits
    _num_added = 0
    _stop_ids: set[int]  # of all requests so far

    @exclusive
    def add(self, request: Request) -> Run:
        """Queue a request.

        Returns
        -------
        Run
            The first sample of the request; the others appear in `Step.outputs` when the prompt is computed. If it took
            the place of a waiting run, that run is its `displaced`.

        Raises
        ------
        QueueFull
            `max_queued` requests wait, and none of them has to leave for this one; nothing is queued.
        RequestError
            The cache cannot hold the request even alone, the request has more samples than can run at once, or with
            `whole_spans` a span that is longer than a step, or an encoder output of more than `max_encoder_tokens`;
            nothing is queued.
        UnsupportedOption
            `request` is not a Request, has encoder tokens for a cache without cross attention, or has none for a cache
            with it; a `cache_priority` for a cache with another policy than "priority".
        ShapeError
            A `cache_priority` or `cache_time_to_live` out of range.
        """
        roster = self._roster
        if not isinstance(request, Request):
            raise UnsupportedOption(f"expected a Request, got {shown(request)}")
        limits = self._limits
        limits.check_size(request.id, len(request.prompt), request.max_new_tokens, request.samples)
        limits.check_spans(request)
        limits.check_encoder(request)
        check_cross(request.id, getattr(self.cache, "max_cross_tokens", None), request.cross_tokens)
        check_retention(self.cache, request)
        displaced = self._displaced_by(request)
        samples = request.samples if request.max_new_tokens else 1
        run = Run(request, samples=samples, owner=self, arrival=self._num_added)
        run.waits_since = roster.num_steps
        self._num_added += 1
        if run.stops:
            self._stop_ids |= run.stops
        roster.has_samples = roster.has_samples or samples > 1
        run.displaced = displaced
        if displaced is None:
            roster.add(run)
        else:
            roster.cancel(displaced, run)
        return run

    def _displaced_by(self, request: Request) -> Run | None:
        """Return the waiting run that leaves a full queue for a request, None if there is room; or raise QueueFull."""
        roster, limits = self._roster, self._limits
        most = limits.max_queued
        if most is None or len(roster.waiting) < most or roster.num_new_waiting < most:
            return None
        for run in reversed(roster.by_priority or ()):
            if run.request.priority >= request.priority:
                break
            if run in roster.new and run.waits_since > roster.num_steps - limits.max_wait_steps:
                return run
        roster.num_refused += 1
        raise QueueFull(f"request {request.id} was not added: {most} requests wait; add it later, or raise max_queued")

    def check_request(self, id: object, num_prompt_tokens: int, max_new_tokens: int, samples: int = 1) -> None:
        """Check the lengths of a request before it is made.

        Parameters
        ----------
        id : object
            Name of the request in the error message.
        num_prompt_tokens, max_new_tokens, samples : int
            As in `Request`; `num_prompt_tokens` is the length of its prompt.

        Raises
        ------
        RequestError
            `add` would refuse such a request.
        ShapeError
            A length or count is not an integer in its range.
        """
        self._limits.check_request(id, num_prompt_tokens, max_new_tokens, samples)

    @exclusive
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
        roster = self._roster
        if self._require_run(run, "cancel").has_ended:
            return False
        roster.cancel(run)
        return True

    @exclusive
    def wait_for(self, run: Run, load: Load) -> None:
        """Let a run of the queue wait for a load while others pass it: of its prefix from stores, or of an import.

        The run keeps its place, and `schedule` passes it over until it finds that the load has ended. Then the run is
        admitted in its turn, with what the load has brought, and computes the other tokens: a load that fails is a
        miss. The load is released when the run is admitted, and given up when the run is cancelled. The caller polls
        tiers and imports as ever, and may cancel a run whose load has failed.

        An import takes a row and blocks when it begins, in the name of the run: ``start_import(cache, manifest,
        id=run)``, after `make_import_room`. Pass the namespace, spans and `cross_digest` of the request: a sequence of
        others, or with other tokens, is dropped. `max_reused_tokens` of the request does not apply to it. The row
        counts for `max_running` until the end. The run then continues with the sequence. If its blocks run short while
        it waits for its admission, it gives them up after the idle runs.

        Parameters
        ----------
        run : Run
            A run of the queue that has no sequence of its own and waits for no other load; call it before the
            `schedule` that could admit the run.
        load : Load
            A `pagecore.tiers.Request`, a `SequenceImport`, or another object with the attribute `has_ended` and the
            methods `cancel` and `release`, none of which may raise. `schedule` reads `has_ended`: where several ranks
            must make the same steps, it may change only between calls that all of them make, as with
            ``Tiers(agree=)``. Imports are not for such ranks: a failing import gives its row and blocks back at any
            time.

        Raises
        ------
        InvalidSequence
            The run is not in the queue, is swapped out or holds a sequence of an earlier turn, or waits for a load.
        UnsupportedOption
            `load` lacks one of these attributes.

        Notes
        -----
        As vLLM's requests that wait for remote keys and values, with its policy "recompute".
        """
        roster = self._roster
        self._require_run(run, "wait for")
        missing = [name for name in ("has_ended", "cancel", "release") if not hasattr(load, name)]
        if missing:
            raise UnsupportedOption(f"load is {shown(load)}, without {missing[0]}; pass what Tiers.request returns")
        self._require_loadable(run)
        if run in roster.pinned:
            roster.unpin(run)
        roster.loading[run] = load

    @exclusive
    def make_import_room(self, run: Run, num_tokens: int | None = None) -> bool:
        """Let runs between two turns give way to an import for a run of the queue; call it before `start_import`.

        The import may then take its row and blocks without touching the rows that are reserved for running requests,
        their samples included. Steps may be open. Idle runs keep their blocks if all of them hold too few; without a
        row, the first of them gives its own up before the blocks are counted. `schedule` lets them keep theirs
        while others run; if nothing runs, all may give way to the first request, which may still wait for an import.

        Parameters
        ----------
        run : Run
            As for `wait_for`. A cached prefix that it has pinned is unpinned, so that its name is free for the import.
        num_tokens : int, optional
            Number of tokens that the import brings; by default all of the run.

        Returns
        -------
        bool
            True if a row and the blocks are available; they stay so until the next call of this scheduler or cache.

        Raises
        ------
        InvalidSequence
            As `wait_for`; nothing is changed.
        ShapeError
            `num_tokens` is not an integer between 1 and the number of tokens of the run.
        """
        roster = self._roster
        self._require_loadable(run)
        count = len(run.tokens) if num_tokens is None else require_int("num_tokens", num_tokens, 1, max=len(run.tokens))
        step = roster.step
        in_flight = step.runs if step is not None and roster.batch.in_flight else ()
        return roster.make_import_room(run, count, self.max_running, in_flight)

    def _require_loadable(self, run: Run) -> None:
        roster = self._roster
        self._require_run(run, "wait for")
        has_own = run.held is not None and run not in roster.pinned
        if run not in roster.waiting or has_own or run in roster.loading or run in roster.loaded:
            raise InvalidSequence(f"{run!r} cannot wait for a load; it must be in the queue, without sequence and load")

    @exclusive
    def preempt_all(self, *, swap: bool = True) -> list[Run]:
        """Move all running runs to the front of the queue, so that no request holds memory of the cache.

        Idle runs stay idle, and give up what they hold.

        Call it before `PagedKVCache.release_memory`, or before the model gets other weights. The next `schedule` admits
        the runs again, in the same order. An exception may leave some of them running: call it again then.

        Parameters
        ----------
        swap : bool
            If True, runs go to the swap space while it has room and continue where they were. Runs leave it, and are
            computed again, if they were swapped out while another run kept their encoder output on the device, and that
            run has ended or did not fit the swap space. If False, and for the runs that did not fit, their tokens so
            far become their prompts; with False the runs that are in the swap space leave it, too. With other weights,
            also call `PagedKVCache.clear_prefix_cache`, or the prompts find what was computed with the old ones.

        Returns
        -------
        list of Run
            The runs that were running, in order of admission.

        Raises
        ------
        InvalidSequence
            A step is open, or an import runs for a run of the queue; nothing is changed.
        UnsupportedOption
            `swap` is not True or False.

        Notes
        -----
        As vLLM's ``reset_prefix_cache(reset_running_requests=True)``, and SGLang's ``pause_generation`` that retracts.
        """
        roster = self._roster
        preempted = self._preempt((*roster.waiting, *roster.running, *roster.idle), swap)
        while roster.release_encoder_output():
            pass
        return preempted

    @exclusive
    def preempt(self, runs: Iterable[Run], *, swap: bool = False) -> list[Run]:
        """Move some running runs to the front of the queue; the next `schedule` may admit them again.

        For runs that have to compute something again: after `PagedKVCache.revoke_prefix` or `revoke_blocks`, pass the
        ids of the sequences that it returned, which are their runs. An exception may leave some of them running: call
        it again then.

        Parameters
        ----------
        runs : iterable of Run
            Runs that wait or are idle give up the cached prefix or the sequence that they hold, as in `preempt_all`;
            for runs that have ended nothing changes.
        swap : bool
            If False, the tokens so far become the prompts, of which the prefix cache may have a part. If True, runs go
            to the swap space while it has room and continue where they were.

        Returns
        -------
        list of Run
            Those that were running, in order of admission.

        Raises
        ------
        InvalidSequence
            An object that is not a run of this scheduler, or a step is open, or an import runs for one of the runs;
            nothing is changed.
        ShapeError
            `runs` is not iterable.
        UnsupportedOption
            `swap` is not True or False.
        """
        chosen = as_tuple("runs", runs, "runs of this scheduler")
        return self._preempt([self._require_run(run, "preempt") for run in chosen], swap)

    def _preempt(self, runs: Iterable[Run], swap: bool) -> list[Run]:
        roster, chosen = self._roster, set(runs)
        swap = flag("swap", swap)
        if roster.steps:
            raise InvalidSequence("a step is open; accept or abandon it, then preempt the runs")
        roster.end_loads()
        if arriving := [run for run in roster.loading if run in chosen and roster.found(run) is not None]:
            raise InvalidSequence(f"{arriving[0]!r} waits for an import; cancel the import, or wait for its end")
        for run in [each for each in roster.victims() if each in chosen]:
            roster.reclaim(run, swap=swap)
        for run in [each for each, held in roster.idle.items() if each in chosen and held is not None and not swap]:
            roster.forget(run)
        held = roster.pinned if swap else [run for run in roster.waiting if run.held is not None]
        for run in [each for each in held if each in chosen]:
            roster.unpin(run)
        running = [run for run in roster.running if run in chosen]
        for run in reversed(running):
            roster.preempt(run, swap=swap, is_retraction=False)
        return running

    def _require_run(self, run: Run, action: str) -> Run:
        if not isinstance(run, Run):
            raise InvalidSequence(f"expected a Run (as returned by add), got {shown(run)}")
        if run.owner is not self:
            raise InvalidSequence(f"{run!r} belongs to another scheduler; {action} it there")
        return run
