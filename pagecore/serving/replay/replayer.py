"""Replay of a trace through the scheduler and a cache: all of serving except the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from pagecore.errors import UnsupportedOption
from pagecore.serving.checks import as_instance, check_callbacks
from pagecore.serving.metrics import Metrics
from pagecore.serving.pictures.timeline import Watcher
from pagecore.serving.replay.attend import AttendCheck, placeholder_ids
from pagecore.serving.replay.build import build_cache, build_tiers, count_blocks
from pagecore.serving.replay.options import ReplayOptions
from pagecore.serving.replay.report import ReplayReport
from pagecore.serving.replay.states import StateUse
from pagecore.serving.replay.trace import SkippedRows, Trace, TraceRequest, read_trace, scan_trace
from pagecore.serving.replay.trace_source import trace_name
from pagecore.serving.replay.trace_turns import find_turns
from pagecore.serving.replay.turns import ReplayTurns
from pagecore.serving.scheduling.request import QueueFull, Request, RequestError
from pagecore.serving.scheduling.step import Step

__all__ = ["replay"]


def replay(
    path: Trace,
    options: ReplayOptions | None = None,
    progress: Callable[[int, int | None], None] = lambda _tokens, _total: None,
    watchers: Sequence[Watcher] = (),
) -> ReplayReport:
    """Replay a trace in order of arrival, each request as soon as there is room for it.

    With `ReplayOptions.prefill_rate` the replay has a clock, and no request is queued before it arrives.

    Parameters
    ----------
    path : str, Path or sequence of mappings
        A trace; see `read_trace`. A file or list is validated completely before the replay starts; "-", the standard
        input, is validated while it is read.
    options : ReplayOptions, optional
        By default ``ReplayOptions()``, a machine with 64 GiB for keys and values.
    progress : callable
        Called after each step with the number of tokens computed or reused so far, and the total if no run is preempted
        (None for the standard input).
    watchers : sequence of Watcher
        Called with scheduler and metrics once a step, after the commit and before finished runs are removed; a
        `Timeline`, for example.

    Returns
    -------
    ReplayReport

    Raises
    ------
    TraceError
        The trace cannot be read, or a line is malformed.
    NotEnoughMemory
        With `attend`, the pool does not fit in the free memory of this machine.
    UnsupportedOption
        `blocks` is "unbounded", or `turns` are given, for the standard input, which cannot be scanned beforehand; the
        trace names no conversations, for `turns`; or the arguments are not ReplayOptions, a function, and a sequence of
        functions.
    ShapeError
        With unbounded blocks, the trace fills more blocks than there are block ids.
    """
    options = ReplayOptions() if options is None else as_instance("options", options, ReplayOptions)
    check_callbacks(progress, watchers)
    running = _Replay(path, options, progress, watchers)
    try:
        return running.run()
    finally:
        running.close()


class _Replay:
    """The state of one replay."""

    def __init__(
        self,
        path: Trace,
        options: ReplayOptions,
        progress: Callable[[int, int | None], None],
        watchers: Sequence[Watcher],
    ) -> None:
        self.started = perf_counter()
        self.options = options
        self.progress = progress
        self.watchers = watchers
        only, units = options.prefill_only, options.units
        summary = scan_trace(path, options.requests, prefill_only=only, block_size=options.block_size, units=units)
        self.expected_tokens = None if summary is None else summary.num_computed_tokens
        self.skipped = SkippedRows()
        self.trace: Iterator[TraceRequest] = read_trace(
            path, options.requests, prefill_only=only, units=units, skipped=self.skipped
        )
        self.num_blocks = count_blocks(trace_name(path), options, summary)
        found = None
        if options.turns is not None:
            name = trace_name(path)
            if summary is None:
                raise UnsupportedOption(
                    f"turns is {options.turns!r}, but trace {name} is the standard input, which cannot be scanned "
                    "beforehand; save the trace to a file, or leave turns out"
                )
            scanned = read_trace(path, options.requests, prefill_only=only, units=units)
            found = find_turns(scanned, options.turns, name)
        num_turns = 0 if found is None else len(found.earlier)
        self.cache, self.scheduler = build_cache(options, self.num_blocks, summary, num_turns)
        self.tiers = build_tiers(self.cache, options, summary)
        self.clock = options.new_clock()
        self.turns = None
        if found is not None and self.clock is not None:  # the options refuse turns without a clock
            fetch = None if self.tiers is None else self.tiers.fetch
            self.turns = ReplayTurns(self.scheduler, self.cache, found, self.clock, fetch)
        self._coming: TraceRequest | None = None
        self.check = AttendCheck(self.cache, options.seed) if options.attend else None
        self.metrics = Metrics(self.tiers)
        self.states = None
        if options.states:
            kept = sum(spec.checkpoint_nbytes for spec in options.states)
            self.states = StateUse(sum(spec.nbytes for spec in options.states), kept)
        self.requests = self.finished = self.refused = 0
        self.prompt_tokens = self.generated_tokens = self.computed_tokens = 0
        self.swapped_blocks_peak = 0
        self.first_refusal: str | None = None

    def run(self) -> ReplayReport:
        while True:
            self._feed()
            step = self.scheduler.schedule()
            if step is None:
                if self.clock is None or self._coming is None:
                    return self._report()
                self.clock.wait_for(self._coming)
                continue
            if self.clock is not None:
                self.clock.run(step, 0.0 if self.tiers is None else self.tiers.reading_time())
            if self.check is not None:
                self.check.run(step)
            self.computed_tokens += step.batch.num_tokens
            if self.turns is not None:
                self.turns.before(step)
            self.scheduler.commit(step)
            if self.tiers is not None:
                self.tiers.poll()
            stats = self.cache.stats()
            self.swapped_blocks_peak = max(self.swapped_blocks_peak, stats.num_swapped_blocks)
            if self.states is not None:
                self.states.observe(stats)
            scheduler = self.scheduler
            self.metrics.observe(stats, scheduler.num_running, scheduler.num_waiting, scheduler.reuse)
            for watch in self.watchers:
                watch(scheduler, self.metrics)
            self._end(step)
            kept = 0 if self.turns is None else self.turns.kept_tokens
            self.progress(self.computed_tokens + scheduler.reuse.saved_prefill_tokens + kept, self.expected_tokens)

    def close(self) -> None:
        """Close the tiers."""
        if self.tiers is not None:
            self.tiers.close()

    def _feed(self) -> None:
        """Queue requests for one step: no more can be admitted at once, and memory stays bounded.

        Without a clock these are requests whose prompts fill the step. A bounded queue gets all requests that have
        arrived, and rejects some. A turn that waits for the end of the one before it is not in the queue, and delays no
        request that arrives after it: it is kept, with its new tokens, from its arrival on, while not too many are.
        """
        scheduler, turns = self.scheduler, self.turns
        while (turns is None or not turns.is_full) and (
            self.options.max_queued is not None
            or (
                (self.clock is not None or scheduler.num_waiting_tokens < scheduler.max_tokens_per_step)
                and scheduler.num_waiting < scheduler.max_running
            )
        ):
            line = self._next_arrived()
            if line is None:
                return
            self.requests += 1
            if turns is None or not turns.take(line):
                self._add(line)
            self._note_turns()

    def _add(self, line: TraceRequest) -> None:
        """Queue a request, or count that it is rejected or refused."""
        scheduler, turns = self.scheduler, self.turns
        is_continued = turns is not None and turns.is_continued(line)
        try:
            # Check the lengths before the prompt, which may be long, is made.
            scheduler.check_request(line.number, line.input_length, line.output_length)
            request = Request(
                line.number, line.prompt(), line.output_length, namespace=line.namespace, resumable=is_continued
            )
            run = scheduler.add(request)
            if turns is not None:
                turns.add(line, run)
            if self.tiers is not None:
                self.tiers.fetch(request.prompt, line.namespace)
            if self.clock is not None:
                self.clock.queue(line)
        except QueueFull:  # the scheduler counts it
            return
        except RequestError as error:
            self._refuse(line.line, error)

    def _note_turns(self) -> None:
        """Count the turns that were refused, and the turns that waited for them.

        A turn is longer than prompt and answer of the one before. A turn after a refused one is therefore refused, too,
        and never gets to the queue, whether or not that is full.
        """
        turns = self.turns
        if turns is None:
            return
        for number, error in turns.refusals:
            self._refuse(number, error)
        turns.refusals.clear()
        while turns.separate:
            line = turns.separate.popleft()
            if not turns.take(line):
                self._add(line)

    def _refuse(self, number: int, error: RequestError) -> None:
        self.refused += 1
        self.first_refusal = self.first_refusal or f"line {number}: {error}"

    def _next_arrived(self) -> TraceRequest | None:
        """Return the next request, if it has arrived."""
        line = next(self.trace, None) if self._coming is None else self._coming
        self._coming = None
        if line is not None and self.clock is not None and not self.clock.has_arrived(line):
            self._coming, line = line, None
        return line

    def _end(self, step: Step) -> None:
        """Accept placeholder token ids for the outputs of a step, and count the runs that finish."""
        finished = self.scheduler.accept(step, placeholder_ids([run.request for run in step.outputs]))
        if self.clock is not None:
            self.clock.finish(finished)
        for run in finished:
            self.finished += 1
            self.prompt_tokens += len(run.request.prompt)
            self.generated_tokens += run.num_generated
        self.metrics.index_ns.add(step.index_ns)
        if self.turns is not None:
            self.turns.end(finished)
            self._note_turns()

    def _report(self) -> ReplayReport:
        metrics, check, reuse = self.metrics, self.check, self.scheduler.reuse
        index_us = {percent: metrics.index_ns.percentile(percent) / 1000 for percent in (50, 99)}
        return ReplayReport(
            requests_total=self.requests,
            requests_finished=self.finished,
            requests_refused=self.refused,
            requests_skipped=self.skipped.count,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            computed_tokens=self.computed_tokens,
            prefix_query_tokens=reuse.prefix_query_tokens,
            prefix_hit_tokens=reuse.prefix_hit_tokens,
            prefix_query_blocks=reuse.prefix_query_blocks,
            prefix_hit_blocks=reuse.prefix_hit_blocks,
            prefix_token_hit_rate=reuse.token_hit_rate,
            prefix_block_hit_rate=reuse.block_hit_rate,
            recovered_tokens=reuse.num_recovered_tokens,
            saved_prefill_tokens=reuse.saved_prefill_tokens,
            evict=self.options.evict,
            evicted_blocks=metrics.evicted_blocks,
            preemptions=self.scheduler.num_preemptions,
            swaps=self.scheduler.num_swaps,
            steps=metrics.steps,
            num_blocks=self.num_blocks,
            block_size=self.options.block_size,
            index_us_p50=index_us[50],
            index_us_p99=index_us[99],
            index_us_max=metrics.index_ns.maximum / 1000,
            utilization_mean=metrics.utilization_mean,
            utilization_peak=metrics.utilization_peak,
            fragmentation_mean=metrics.fragmentation_mean,
            wall_s=perf_counter() - self.started,
            steps_per_point=metrics.utilization.stride,
            utilization_series=metrics.utilization.values(),
            fragmentation_series=metrics.fragmentation.values(),
            running_series=metrics.running.values(),
            prefix_hit_series=metrics.prefix_hit_rates(),
            evicted_series=metrics.evicted.values(),
            requests_rejected=None if self.options.max_queued is None else self.scheduler.num_refused,
            first_refusal=self.first_refusal,
            num_swap_blocks=self.options.num_swap_blocks or None,
            swapped_blocks_peak=self.swapped_blocks_peak if self.options.num_swap_blocks else None,
            rows_attended=check.rows_attended if check else None,
            rows_checked=check.rows_checked if check else None,
            max_relative_error=check.max_relative_error if check else None,
            states=None
            if self.states is None
            else self.states.report(self.cache.num_states, self.cache.num_checkpoints, reuse),
            tiers=None if self.tiers is None else self.tiers.report(),
            clock=None if self.clock is None else self.clock.report(),
            turns=None if self.turns is None else self.turns.report(),
            passed=check is None or check.passed or metrics.steps == 0,
        )
