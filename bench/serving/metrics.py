"""Cost of the Prometheus exporter: a decode step of the scheduler with it and without, and a scrape.

Each step of the 256 runs fills 16 blocks, which the prefix cache takes, and evicts 16 blocks of earlier prompts. The
exporter does nothing in a step but time sampled blocks. Steps are measured in CPU time of the thread, so that other
processes matter less.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from bench.harness.runner import Bench, Job, Work
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
    figure = bench.compare(
        f"a decode step of {rows} runs with an exporter",
        Job(engine.steps, before=engine.attach, after=engine.detach, calls=STEPS, timer=_cpu_seconds),
        {"without": Job(engine.steps, before=engine.steps, calls=STEPS, timer=_cpu_seconds)},
        check=engine.cache.check_invariants,
        rounds=rounds,
        sizes={"rows": rows, "share of sampled blocks": SHARE},
    )
    without = figure.controls["without"].time
    bench.fact("added to a step, difference of medians", (figure.subject.median - without.median) * 1e6, "us")
    bench.fact("added to a step, difference of minima", (figure.subject.min - without.min) * 1e6, "us")
    bench.fact("blocks evicted in all steps", engine.cache.stats().num_evicted_blocks)
    engine.attach()
    start = time.perf_counter()
    generate_latest(engine.registry)
    bench.fact("a scrape", (time.perf_counter() - start) * 1e6, "us")
    engine.detach()


def _cpu_seconds(run: Work) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start
