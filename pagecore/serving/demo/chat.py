"""Serve two dozen chat turns from one paged cache, and verify every generated token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import numpy as np

from pagecore.cache import CacheStats, PagedKVCache, SwapSpace
from pagecore.errors import NotEnoughMemory
from pagecore.serving.checks import as_instance, check_callbacks
from pagecore.serving.demo.config import DemoConfig
from pagecore.serving.demo.model import Array, Model
from pagecore.serving.demo.report import DemoReport, StateFigures
from pagecore.serving.demo.sampling import scores
from pagecore.serving.demo.served import ServedStates
from pagecore.serving.demo.traffic import Traffic, chat_turns
from pagecore.serving.demo.verify import Verdict, verify
from pagecore.serving.metrics import Metrics
from pagecore.serving.pictures.timeline import Watcher
from pagecore.serving.scheduling.request import Run
from pagecore.serving.scheduling.reuse import cache_options
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.serving.scheduling.step import Step
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers

__all__ = ["demo"]

# Requests in the queue before the next is added. With a short queue, a follow-up is asked soon after its answer.
QUEUE_LENGTH = 1


def demo(
    config: DemoConfig | None = None,
    progress: Callable[[str, int, int], None] = lambda _stage, _done, _total: None,
    watchers: Sequence[Watcher] = (),
) -> DemoReport:
    """Serve the requests by continuous batching, then verify every token.

    Parameters
    ----------
    config : DemoConfig, optional
    progress : callable
        Called with the stage ("serve" or "verify"), the number of items done, and the total.
    watchers : sequence of Watcher
        Called with scheduler and metrics once a step, after the commit and before finished runs are removed; a
        `Timeline`, for example.

    Returns
    -------
    DemoReport

    Raises
    ------
    UnsupportedOption
        The arguments are not a DemoConfig, a function, and a sequence of functions.
    """
    check_callbacks(progress, watchers)
    chosen = DemoConfig() if config is None else as_instance("config", config, DemoConfig)
    return _Demo(chosen, progress, watchers).run()


class _Demo:
    """The state of one demo: a model, a cache, a scheduler."""

    def __init__(
        self, config: DemoConfig, progress: Callable[[str, int, int], None], watchers: Sequence[Watcher]
    ) -> None:
        self.config = config
        self.progress = progress
        self.watchers = watchers
        self.turns = chat_turns(config)
        self.traffic = Traffic(self.turns)
        self.model = Model(config.model, config.seed)
        self.cache = PagedKVCache(
            config.model.specs(),
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_sequences=config.max_running,
            max_tokens_per_sequence=config.max_length,
            num_states=config.num_states,
            **cache_options(config.evict),
        )
        self.tiers = _tiers(self.cache, config)
        self.states = ServedStates(self.model, self.cache)
        self.swap_space = SwapSpace(self.cache, num_blocks=config.num_blocks) if config.swap else None
        self.scheduler = Scheduler(
            self.cache,
            max_running=config.max_running,
            max_tokens_per_step=config.max_tokens_per_step,
            swap_space=self.swap_space,
        )
        self.metrics = Metrics()
        self.running_peak = 0

    def run(self) -> DemoReport:
        try:
            start = perf_counter()
            finished = self._serve()
            served = perf_counter()
            verdict = self._verify(finished)
            return self._report(finished, verdict, served - start, perf_counter() - served)
        finally:
            if self.tiers is not None:
                self.tiers.close()

    def _serve(self) -> list[Run]:
        total = sum(turn.samples * turn.max_new_tokens for turn in self.turns)
        finished: list[Run] = []
        generated = 0
        while (step := self._schedule()) is not None:
            logits = self._forward(step)
            self.scheduler.commit(step)
            self._observe()
            ids = [self._sample(run, row) for run, row in zip(step.outputs, logits, strict=True)]
            for run in self.scheduler.accept(step, ids):
                self.traffic.answer(run)
                finished.append(run)
            generated += len(ids)
            self.progress("serve", generated, total)
        return finished

    def _schedule(self) -> Step | None:
        """Queue the turns that can be asked now, and schedule the next step."""
        while self.scheduler.num_waiting < QUEUE_LENGTH and (request := self.traffic.next()) is not None:
            self.scheduler.add(request)
        return self.scheduler.schedule()

    def _observe(self) -> None:
        scheduler = self.scheduler
        self.running_peak = max(self.running_peak, scheduler.num_running)
        self.metrics.observe(self.cache.stats(), scheduler.num_running, scheduler.num_waiting, scheduler.reuse)
        for watch in self.watchers:
            watch(scheduler, self.metrics)

    def _forward(self, step: Step) -> Array:
        """Return the logits of each output of the step, computed with paged attention and the states of the cache."""
        batch = step.batch
        self.states.begin(batch)
        starts = np.asarray(batch.cu_query_lens)
        positions = np.asarray(batch.positions)[: batch.num_tokens]
        tokens = np.concatenate(
            [
                run.sequence.tokens[positions[start] :][:count]
                for run, start, count in zip(step.runs, starts, step.counts, strict=False)
            ]
        )

        def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
            self.cache.write(layer, key, value, batch)
            attended: Array = self.cache.attend(layer, query, batch)
            return attended

        hidden = self.model.forward(tokens, positions, attend, self.states.recur)
        return self.model.logits(hidden[starts[np.array(step.output_rows, dtype=np.intp) + 1] - 1])

    def _sample(self, run: Run, logits: Array) -> int:
        """Choose the next token of a run."""
        request = run.request
        temperature = self.config.temperature if request.samples > 1 else 0.0
        position = len(request.prompt) + run.num_generated
        ranked = scores(logits, self.config.seed, request.id, run.sample, position, temperature)
        return int(ranked.argmax())

    def _verify(self, finished: list[Run]) -> Verdict:
        model = Model(self.config.model, self.config.seed, np.float64)

        def counted() -> Iterator[Run]:
            for done, run in enumerate(finished):
                self.progress("verify", done, len(finished))
                yield run
            self.progress("verify", len(finished), len(finished))

        return verify(counted(), model, self.config.seed, self.config.temperature)

    def _report(self, finished: list[Run], verdict: Verdict, serve_s: float, verify_s: float) -> DemoReport:
        config, metrics, stats, reuse = self.config, self.metrics, self.cache.stats(), self.scheduler.reuse
        # Only the first sample of a request was admitted; the others were forked from it.
        follow_ups = [run for run in finished if run.request.id in self.traffic.histories and run.sample == 0]
        return DemoReport(
            requests=len({run.request.id for run in finished}),
            sequences=len(finished),
            prompt_tokens=sum(len(run.request.prompt) for run in finished if run.sample == 0),
            generated_tokens=sum(run.num_generated for run in finished),
            prefix_query_tokens=reuse.prefix_query_tokens,
            prefix_hit_tokens=reuse.prefix_hit_tokens,
            prefix_token_hit_rate=reuse.token_hit_rate,
            recovered_tokens=reuse.num_recovered_tokens,
            saved_prefill_tokens=reuse.saved_prefill_tokens,
            evict=config.evict,
            evicted_blocks=stats.num_evicted_blocks,
            follow_ups=len(follow_ups),
            history_tokens=sum(map(len, self.traffic.histories.values())),
            history_hit_tokens=sum(
                min(run.num_reused_tokens, len(self.traffic.histories[run.request.id])) for run in follow_ups
            ),
            steps=metrics.steps,
            num_blocks=stats.num_blocks,
            num_groups=self.cache.num_groups,
            block_size=config.block_size,
            utilization_peak=metrics.utilization_peak,
            utilization_mean=metrics.utilization_mean,
            fragmentation_mean=metrics.fragmentation_mean,
            copied_blocks=stats.num_copied_blocks,
            preemptions=self.scheduler.num_preemptions,
            swaps=self.scheduler.num_swaps,
            forks=self.scheduler.num_forks,
            running_peak=self.running_peak,
            max_length=config.max_length,
            nbytes=stats.nbytes,
            swap_nbytes=self.swap_space.nbytes if self.swap_space else 0,
            static_nbytes=self.running_peak * _static_nbytes(config),
            serve_s=serve_s,
            verify_s=verify_s,
            verdict=verdict,
            states=self._state_figures(finished, stats),
            host=None if self.tiers is None else self.tiers.stats().host,
        )

    def _state_figures(self, finished: list[Run], stats: CacheStats) -> StateFigures | None:
        if not stats.num_states:
            return None
        first = [run for run in finished if run.sample == 0]
        return StateFigures(
            num_states=stats.num_states,
            peak=self.metrics.states_peak,
            hits=sum(run.num_reused_tokens > 0 for run in first),
            queries=len(first),
            checkpoints=self.states.checkpoints,
            evicted=stats.num_evicted_states,
        )


def _tiers(cache: PagedKVCache, config: DemoConfig) -> Tiers | None:
    if config.host is None:
        return None
    try:
        tier = HostTier(cache, memory=config.host, huge_pages=False)
    except NotEnoughMemory as error:
        raise NotEnoughMemory(f"host: {error}") from None
    return Tiers(cache, tier, write="on_evict", min_tokens=config.block_size)


def _static_nbytes(config: DemoConfig) -> int:
    """Return the bytes that one sequence of the greatest length needs without paging."""
    planes = [plane for spec in config.model.specs() for plane in spec.planes]
    return sum(plane.nbytes * (1 if plane.per == "sequence" else config.max_length) for plane in planes)
