"""A recorded trace through the scheduler and a cache: the whole of serving but the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.serving.checks import as_instance, check_callbacks
from pagecore.serving.metrics import Metrics
from pagecore.serving.pictures.timeline import Watcher
from pagecore.serving.replay.attend import SPEC, AttendCheck, stand_in_id
from pagecore.serving.replay.options import UNBOUNDED, ReplayOptions
from pagecore.serving.replay.report import ReplayReport
from pagecore.serving.replay.trace import TraceRequest, TraceSummary, read_trace, scan_trace
from pagecore.serving.request import Request, RequestError, Run
from pagecore.serving.reuse import cache_options
from pagecore.serving.scheduler import Scheduler
from pagecore.serving.step import Step
from pagecore.storage import free_memory
from pagecore.storage.checks import INT32_MAX

__all__ = ["replay", "stand_in_ids"]

# Rows as long as this where a trace cannot be scanned beforehand.
LENGTH_UNSCANNED = 1 << 20


def replay(
    path: str | Path,
    options: ReplayOptions,
    progress: Callable[[int, int | None], None] = lambda _tokens, _total: None,
    watchers: Sequence[Watcher] = (),
) -> ReplayReport:
    """Replay a trace in order of arrival, each request as soon as there is room for it.

    Parameters
    ----------
    path : str or Path
        See `pagecore.serving.replay.trace`. A file is validated as a whole first; "-", the standard input, as it is
        read.
    options : ReplayOptions
    progress : callable
        Called after each step with the tokens computed or reused so far, and how many they are in the end if nobody is
        preempted (None for the standard input).
    watchers : sequence of Watcher
        Called with scheduler and metrics once a step, after commit and before the finished are removed: `Timeline`.

    Raises
    ------
    TraceError
        An unreadable trace or a malformed line.
    NotEnoughMemory
        With `attend`, the pool would not fit in what this machine has free.
    UnsupportedOption
        Blocks without bound for the standard input, which cannot be read beforehand.
    ShapeError
        A trace that fills more blocks without bound than there are ids.
    UnsupportedOption
        Arguments that are not ReplayOptions, a function, and a sequence of functions.
    """
    as_instance("options", options, ReplayOptions)
    check_callbacks(progress, watchers)
    return _Replay(path, options, progress, watchers).run()


class _Replay:
    """The state of one replay."""

    def __init__(
        self,
        path: str | Path,
        options: ReplayOptions,
        progress: Callable[[int, int | None], None],
        watchers: Sequence[Watcher],
    ) -> None:
        self.started = perf_counter()
        self.options = options
        self.progress = progress
        self.watchers = watchers
        only = options.prefill_only
        summary = scan_trace(path, options.requests, prefill_only=only, block_size=options.block_size)
        self.expected_tokens = None if summary is None else summary.num_computed_tokens
        self.trace: Iterator[TraceRequest] = read_trace(path, options.requests, prefill_only=only)
        self.num_blocks = _num_blocks(path, options, summary)
        self.cache, self.scheduler = _build(options, self.num_blocks, summary)
        self.check = AttendCheck(self.cache, options.seed) if options.attend else None
        self.metrics = Metrics()
        self.requests = self.finished = self.refused = 0
        self.prompt_tokens = self.generated_tokens = self.computed_tokens = 0
        self.swapped_blocks_peak = 0
        self.first_refusal: str | None = None

    def run(self) -> ReplayReport:
        while True:
            self._feed()
            step = self.scheduler.schedule()
            if step is None:
                return self._report()
            if self.check is not None:
                self.check.run(step)
            self.computed_tokens += step.batch.num_tokens
            self.scheduler.commit(step)
            stats = self.cache.stats()
            self.swapped_blocks_peak = max(self.swapped_blocks_peak, stats.num_swapped_blocks)
            scheduler = self.scheduler
            self.metrics.observe(stats, scheduler.num_running, scheduler.num_waiting, scheduler.reuse)
            for watch in self.watchers:
                watch(scheduler, self.metrics)
            self._end(step)
            self.progress(self.computed_tokens + scheduler.reuse.saved_prefill_tokens, self.expected_tokens)

    def _feed(self) -> None:
        """Keep a step's worth of requests waiting: more could not be admitted at once, and memory stays bounded."""
        scheduler = self.scheduler
        while (
            scheduler.num_waiting_tokens < scheduler.max_tokens_per_step
            and scheduler.num_waiting < scheduler.max_running
        ):
            line = next(self.trace, None)
            if line is None:
                return
            self.requests += 1
            try:
                # Before its prompt is made, which may be long.
                scheduler.check_request(line.number, line.input_length, line.output_length)
                scheduler.add(Request(line.number, line.prompt(), line.output_length))
            except RequestError as error:
                self.refused += 1
                self.first_refusal = self.first_refusal or f"line {line.line}: {error}"

    def _end(self, step: Step) -> None:
        """Take what stands for the sampled tokens, and count what has finished."""
        for run in self.scheduler.accept(step, stand_in_ids(step.outputs)):
            self.finished += 1
            self.prompt_tokens += len(run.request.prompt)
            self.generated_tokens += run.num_generated
        self.metrics.index_ns.add(step.index_ns)

    def _report(self) -> ReplayReport:
        metrics, check, reuse = self.metrics, self.check, self.scheduler.reuse
        index_us = {percent: metrics.index_ns.percentile(percent) / 1000 for percent in (50, 99)}
        return ReplayReport(
            requests_total=self.requests,
            requests_finished=self.finished,
            requests_refused=self.refused,
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
            first_refusal=self.first_refusal,
            num_swap_blocks=self.options.num_swap_blocks or None,
            swapped_blocks_peak=self.swapped_blocks_peak if self.options.num_swap_blocks else None,
            rows_attended=check.rows_attended if check else None,
            rows_checked=check.rows_checked if check else None,
            max_relative_error=check.max_relative_error if check else None,
            passed=check is None or check.passed or metrics.steps == 0,
        )


def stand_in_ids(outputs: Sequence[Run]) -> NDArray[np.int32]:
    """Token ids where no model samples any, the same for all that a request generates."""
    return np.array([stand_in_id(run.request) for run in outputs], np.int32)


def _num_blocks(path: str | Path, options: ReplayOptions, summary: TraceSummary | None) -> int:
    """Blocks of the pool, the null block counted: what the options say, or what the trace can fill."""
    if not options.is_unbounded:
        return options.num_blocks
    if summary is None:
        raise UnsupportedOption(
            f"blocks is {UNBOUNDED!r}, and trace {path} is the standard input, whose end is not known beforehand; "
            "save it to a file, or give a number of blocks"
        )
    if summary.num_blocks >= INT32_MAX:
        raise ShapeError(
            f"blocks is {UNBOUNDED!r}, and trace {path} fills {summary.num_blocks} blocks; block ids end at "
            f"{INT32_MAX}: give a larger block_size or fewer requests"
        )
    return summary.num_blocks + 1


def _build(options: ReplayOptions, num_blocks: int, summary: TraceSummary | None) -> tuple[PagedKVCache, Scheduler]:
    """A cache of so many blocks, with rows as many and as long as the trace can use."""
    if options.attend:
        _check_free_memory(options, num_blocks)
    length = LENGTH_UNSCANNED if summary is None else summary.max_length
    length = min(length, (num_blocks - 1) * options.block_size, INT32_MAX)
    rows = min(options.max_running, options.max_tokens_per_step)
    if summary is not None:
        rows = min(rows, summary.num_requests)
    cache = PagedKVCache(
        SPEC if options.layers is None else options.layers,
        block_size=options.block_size,
        num_blocks=num_blocks,
        max_sequences=rows,
        max_tokens_per_sequence=length,
        device="cpu" if options.attend else "none",
        **cache_options(options.evict),
    )
    tokens = min(options.max_tokens_per_step, rows * length)
    space = SwapSpace(cache, num_blocks=options.num_swap_blocks) if options.num_swap_blocks else None
    return cache, Scheduler(cache, max_running=rows, max_tokens_per_step=tokens, swap_space=space)


def _check_free_memory(options: ReplayOptions, num_blocks: int) -> None:
    """The real pools have the memory model's numbers of blocks, with a small token in each slot."""
    blocks = num_blocks + options.num_swap_blocks
    needed = blocks * options.block_size * sum(plane.nbytes for plane in SPEC.planes)
    free = free_memory()
    if needed > free:
        raise NotEnoughMemory(
            f"attend needs a pool of {needed} bytes ({blocks} blocks of {options.block_size} tokens) and "
            f"{free} bytes are free here; give less memory or fewer blocks, or leave attend out"
        )
