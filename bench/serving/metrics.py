"""Cost of the Prometheus exporter: a decode step of the scheduler with it and without, and a scrape.

Each step of the 256 runs fills 16 blocks, which the prefix cache takes, and evicts 16 blocks of earlier prompts. The
exporter does nothing in a step but time sampled blocks. Steps are measured in CPU time of the thread, so that other
processes matter less. What the exporter adds is a small part of the noise of one sample: it is the median of the
differences of neighbouring samples, with the 95 % interval of that median by its order statistics.
"""

from __future__ import annotations

import argparse
import math
import random
import time

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from bench.harness.runner import Bench, Job, Work, collector_at_rest
from pagecore import AttentionSpec, PagedKVCache
from pagecore.serving import Request, Scheduler
from pagecore.serving.prometheus import Exporter

BLOCK, PROMPT = 16, 64
# Steps of a sample: each row fills one block.
STEPS = BLOCK
SHARE = 0.01


class _Engine:
    """A scheduler with `rows` decoding runs, in a pool that prompts of earlier requests fill."""

    def __init__(self, rows: int, length: int) -> None:
        blocks = rows * (length // BLOCK + 2) + 1
        self.cache = PagedKVCache(
            AttentionSpec(8, 128), block_size=BLOCK, num_blocks=blocks, max_sequences=rows, device="none"
        )
        self.scheduler = Scheduler(self.cache, max_running=rows, max_tokens_per_step=1 << 16, headroom=0.0)
        prompts = (blocks - 1) * BLOCK // PROMPT
        for number in range(prompts):
            self._add(number, 1)
        while self.scheduler.num_running or self.scheduler.num_waiting:
            self.step()
        for number in range(prompts, prompts + rows):
            # Rows fill their blocks in different steps.
            self._add(number, length - PROMPT, number % BLOCK)
        self.step()

    def _add(self, number: int, new: int, more: int = 0) -> None:
        prompt = np.full(PROMPT - more, number, np.int32)
        self.scheduler.add(Request(number, prompt, new))

    def step(self) -> None:
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.commit(step)
        self.scheduler.accept(step, np.zeros(len(step.outputs), np.int32))

    def steps(self) -> None:
        for _ in range(STEPS):
            self.step()

    def attach(self) -> None:
        self.registry = CollectorRegistry()
        self.exporter = Exporter(self.scheduler, self.registry, block_share=SHARE)
        self.steps()

    def detach(self) -> None:
        self.exporter.close()


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Time the steps of one scheduler with an exporter and without, in turns; then a scrape."""
    rows, length, rounds = bench.pick((256, 4096, 55), (8, 512, 2), (256, 2048, 25))
    engine = _Engine(rows, length)
    bench.compare(
        f"a decode step of {rows} runs with an exporter",
        Job(engine.steps, before=engine.attach, after=engine.detach, calls=STEPS, timer=_cpu_seconds),
        {"without": Job(engine.steps, before=engine.steps, calls=STEPS, timer=_cpu_seconds)},
        check=engine.cache.check_invariants,
        rounds=rounds,
        sizes={"rows": rows, "share of sampled blocks": SHARE},
    )
    with collector_at_rest():
        low, middle, high = _added(rows, length, bench.pick(1500, 3, 400))
    bench.fact("added to a step, median of paired differences", middle, "us")
    bench.fact("95 % interval of that median", [low, high], "us")
    bench.fact("blocks evicted in all steps", engine.cache.stats().num_evicted_blocks)
    engine.attach()
    start = time.perf_counter()
    generate_latest(engine.registry)
    bench.fact("a scrape", (time.perf_counter() - start) * 1e6, "us")
    engine.detach()


def _added(rows: int, length: int, pairs: int) -> tuple[float, float, float]:
    """Return what an exporter adds to a step in us: the median of `pairs` differences, between its bounds."""
    order = random.Random(0)
    differences = []
    most = (length - PROMPT) // (5 * STEPS) - 1  # pairs until the first row has all its tokens
    for pair in range(pairs):
        if pair % most == 0:
            engine = _Engine(rows, length)
        seconds = {}
        for has_exporter in order.sample([True, False], 2):
            # Both sides make an exporter, which takes milliseconds, so that they find the processor's caches alike.
            engine.attach()
            if not has_exporter:
                engine.detach()
                engine.steps()
            seconds[has_exporter] = _cpu_seconds(engine.steps)
            engine.detach()
        differences.append((seconds[True] - seconds[False]) / STEPS * 1e6)
    differences.sort()
    reach = 0.98 * math.sqrt(pairs)
    places = max(math.floor(pairs / 2 - reach), 0), pairs // 2, min(math.ceil(pairs / 2 + reach), pairs - 1)
    low, middle, high = (differences[place] for place in places)
    return low, middle, high


def _cpu_seconds(run: Work) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start
