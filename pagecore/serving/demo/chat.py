"""Two dozen turns of chats through one paged cache, and every token of them checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.errors import ShapeError
from pagecore.serving.checks import as_flag, as_instance, check_callbacks
from pagecore.serving.demo.model import Array, Model, ModelSizes
from pagecore.serving.demo.sampling import scores
from pagecore.serving.demo.traffic import Traffic, chat_turns
from pagecore.serving.demo.verify import Verdict, verify
from pagecore.serving.metrics import Metrics
from pagecore.serving.pictures.timeline import Watcher
from pagecore.serving.request import Run
from pagecore.serving.reuse import POLICIES, cache_options, check_policy
from pagecore.serving.scheduler import Scheduler
from pagecore.serving.step import Step
from pagecore.storage.checks import as_float, require_int

__all__ = ["DemoConfig", "DemoReport", "demo"]

# Requests that wait before the next are asked: turns that go on are asked soon after the answer that they follow.
QUEUE_LENGTH = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What the demo serves, and in how little memory: the pools hold about half of what would like to run at once.

    `num_blocks` has one entry a group: layers with a window give back what it has left, and make do with fewer. With
    `swap`, preempted runs wait in a second memory of as many blocks, as far as they go, and are not computed again.
    `evict` is the policy by which cached blocks are given up; with "none", nothing is kept for reuse.

    Raises
    ------
    ShapeError
        A number that is out of its range.
    UnsupportedOption
        An unknown policy, or a `swap` or `model` of another type.
    """

    seed: int = 0
    num_requests: int = 24
    block_size: int = 16
    num_blocks: tuple[int, int] = (85, 53)
    max_running: int = 12
    max_tokens_per_step: int = 96
    max_length: int = 448
    temperature: float = 0.8
    swap: bool = False
    evict: str = POLICIES[0]
    model: ModelSizes = field(default_factory=ModelSizes)

    def __post_init__(self) -> None:
        require_int("seed", self.seed, 0)
        for name in ("num_requests", "block_size", "max_running", "max_tokens_per_step", "max_length"):
            require_int(name, getattr(self, name))
        if not isinstance(self.num_blocks, tuple) or len(self.num_blocks) != 2:
            raise ShapeError(
                f"num_blocks is {self.num_blocks!r}; give a tuple with one number for each of the 2 groups"
            )
        for blocks in self.num_blocks:
            require_int("num_blocks", blocks, 2)
        if not 0 <= as_float("temperature", self.temperature) < math.inf:
            raise ShapeError(f"temperature is {self.temperature}; it must be 0 or more, and finite")
        as_flag("swap", self.swap)
        check_policy(self.evict)
        as_instance("model", self.model, ModelSizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """What was served, in what memory, and whether it was right; times in seconds, shares from 0 to 1.

    `swaps` of the preempted runs were swapped out, the others computed again; `swap_nbytes` is the memory for that.
    `static_nbytes` is what caches of `max_length` would take for as many sequences as ran at once at the peak.
    `follow_ups` turns went on with a chat; of `history_tokens` that had been said before them, `history_hit_tokens`
    were reused. The other figures of reuse are those of `ReplayReport`.
    """

    requests: int
    sequences: int
    prompt_tokens: int
    generated_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefix_token_hit_rate: float
    recovered_tokens: int
    saved_prefill_tokens: int
    evict: str
    evicted_blocks: int
    follow_ups: int
    history_tokens: int
    history_hit_tokens: int
    steps: int
    num_blocks: int
    num_groups: int
    block_size: int
    utilization_peak: float
    utilization_mean: float
    fragmentation_mean: float
    copied_blocks: int
    preemptions: int
    swaps: int
    forks: int
    running_peak: int
    max_length: int
    nbytes: int
    swap_nbytes: int
    static_nbytes: int
    serve_s: float
    verify_s: float
    verdict: Verdict


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
        Called with the stage, "serve" or "verify", what is done of it, and how much there is.
    watchers : sequence of Watcher
        Called with scheduler and metrics once a step, after commit and before the finished are removed: `Timeline`.

    Raises
    ------
    UnsupportedOption
        Arguments that are not a DemoConfig, a function, and a sequence of functions.
    """
    check_callbacks(progress, watchers)
    chosen = DemoConfig() if config is None else as_instance("config", config, DemoConfig)
    return _Demo(chosen, progress, watchers).run()


class _Demo:
    """The state of one demo: a model, a cache of two groups, a scheduler."""

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
            **cache_options(config.evict),
        )
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
        start = perf_counter()
        finished = self._serve()
        served = perf_counter()
        verdict = self._verify(finished)
        return self._report(finished, verdict, served - start, perf_counter() - served)

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
        """The next step, after the users have asked what they can."""
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
        """Logits for each output of the step, by paged attention."""
        batch = step.batch
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

        hidden = self.model.forward(tokens, positions, attend)
        return self.model.logits(hidden[starts[np.array(step.output_rows, dtype=np.intp) + 1] - 1])

    def _sample(self, run: Run, logits: Array) -> int:
        """The token that follows what the run has so far."""
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
        # Samples are forked from the first, which is the one that was admitted.
        follow_ups = [run for run in finished if run.request.id in self.traffic.histories and run.sample == 0]
        token_nbytes = sum(plane.nbytes for spec in config.model.specs() for plane in spec.planes)
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
            static_nbytes=self.running_peak * config.max_length * token_nbytes,
            serve_s=serve_s,
            verify_s=verify_s,
            verdict=verdict,
        )
