"""Scheduler alone: a decode step of 256 runs, and whole requests, against a plain-Python scheduler and vLLM's.

No model runs and the cache has no bytes. A step is schedule, commit and accept of ids that are known in advance. Drafts
are given by their number, as for a drafter on the device, or as ids in lists; a fixed part of them is accepted. The
plain-Python scheduler has no prefix cache: pagecore without one is listed next to it.
"""

from __future__ import annotations

import argparse
import time
from typing import Protocol

import numpy as np

from bench.harness.runner import Bench, Job, Work
from bench.peers import PeerMissing, vllm_scheduler
from bench.serving.plain_scheduler import PlainScheduler
from pagecore import AttentionSpec, PagedKVCache
from pagecore.serving import Request, Scheduler, Step

BLOCK = 16
PROMPT = 64
STEPS = 16
DRAFTS = 3


class Side(Protocol):
    """A scheduler of the bench."""

    def add(self, number: int, prompt: int, new: int) -> None:
        """Queue a request whose tokens are all `number`."""

    def step(self) -> int | None:
        """Run one step; return the number of sampled tokens, None at the end."""

    def verify(self, drafts: int, accepted: list[int]) -> None:
        """Run one step with drafts for every run, all of which decode; `accepted` is what each gains."""


class Ours:
    """The scheduler of pagecore."""

    def __init__(
        self,
        rows: int,
        num_blocks: int,
        max_tokens: int,
        *,
        overlap: bool = False,
        reuse: bool = True,
        lists_ids: bool = False,
    ) -> None:
        self.cache = PagedKVCache(
            AttentionSpec(8, 128), block_size=BLOCK, num_blocks=num_blocks, max_sequences=rows, device="none",
            prefix_cache=reuse,
        )  # fmt: skip
        self.scheduler = Scheduler(self.cache, max_running=rows, max_tokens_per_step=max_tokens, overlap=overlap)
        self.previous: Step | None = None
        self.lists_ids = lists_ids

    def add(self, number: int, prompt: int, new: int) -> None:
        self.scheduler.add(Request(number, np.full(prompt, number, np.int32), new))

    def step(self) -> int | None:
        step = self.scheduler.schedule()
        if not self.scheduler.overlap:
            if step is None:
                return None
            self.scheduler.commit(step)
            return self._accept(step)
        previous, self.previous = self.previous, step
        if step is None and previous is None:
            return None
        sampled = 0 if previous is None else self._accept(previous)
        if step is not None:
            self.scheduler.commit(step)
        return sampled

    def verify(self, drafts: int, accepted: list[int]) -> None:
        scheduler = self.scheduler
        step = scheduler.schedule({run: [0] * drafts for run in scheduler.running} if self.lists_ids else drafts)
        assert step is not None
        scheduler.commit(step, accepted)
        ids = np.zeros((len(accepted), 1 + drafts), np.int32)
        scheduler.accept(step, [[0] * count for count in accepted] if self.lists_ids else ids)

    def _accept(self, step: Step) -> int:
        self.scheduler.accept(step, np.zeros(len(step.outputs), np.int32))
        return len(step.outputs)


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Time decode steps, steps with drafts, then requests from arrival to end."""
    _decode(bench)
    _verify(bench)
    _wait(bench)
    _requests(bench)


def _sides(bench: Bench, rows: int, num_blocks: int, max_tokens: int, length: int) -> dict[str, Side]:
    sides: dict[str, Side] = {
        "pagecore": Ours(rows, num_blocks, max_tokens),
        "plain Python": PlainScheduler(rows, num_blocks, max_tokens, BLOCK),
        "with overlap": Ours(rows, num_blocks, max_tokens, overlap=True),
    }
    try:
        theirs = vllm_scheduler.PeerScheduler(rows, num_blocks, max_tokens, BLOCK, length)
        sides[vllm_scheduler.NAME] = theirs
    except PeerMissing as missing:
        reason = f"without vLLM: {str(missing).splitlines()[0]}"
        if reason not in bench.notes:
            bench.note(reason)
    return sides


def _decode(bench: Bench) -> None:
    rows, length, rounds = bench.pick((256, 4096, 41), (8, 512, 2), (256, 4096, 15))
    blocks = rows * (length // BLOCK + 1) + 1
    sides = _sides(bench, rows, blocks, rows * PROMPT, length)
    for side in sides.values():
        for number in range(rows):
            # Rows fill their blocks in different steps.
            side.add(number, PROMPT - number % BLOCK, length - PROMPT)
        side.step()
        side.step()

    def steps(side: Side) -> Job:
        def call() -> None:
            for _ in range(STEPS):
                side.step()

        return Job(call, calls=STEPS, timer=_cpu_seconds)

    def check() -> None:
        """Let each side give every run one token."""
        assert [side.step() for side in sides.values()] == [rows] * len(sides)

    bench.compare(
        f"a decode step with {rows} running",
        steps(sides["pagecore"]),
        {name: steps(side) for name, side in sides.items() if name != "pagecore"},
        check=check,
        rounds=rounds,
        sizes={"rows": rows, "block_size": BLOCK},
    )


def _verify(bench: Bench) -> None:
    rows, length, rounds = bench.pick((256, 8192, 21), (8, 512, 2), (256, 8192, 9))
    blocks, max_tokens = rows * (length // BLOCK + 1) + 1, rows * PROMPT
    sides = _sides(bench, rows, blocks, max_tokens, length)
    del sides["with overlap"]
    sides["ids in lists"] = Ours(rows, blocks, max_tokens, lists_ids=True)
    for side in sides.values():
        for number in range(rows):
            side.add(number, PROMPT - number % BLOCK, length - PROMPT)
        side.step()

    accepted = [1 + number % (1 + DRAFTS) for number in range(rows)]

    def steps(side: Side) -> Job:
        def call() -> None:
            for _ in range(STEPS):
                side.verify(DRAFTS, accepted)

        return Job(call, calls=STEPS, timer=_cpu_seconds)

    def check() -> None:
        """Let each side verify drafts; after that, give every run one token."""
        for side in sides.values():
            side.verify(DRAFTS, accepted)
        assert [side.step() for side in sides.values()] == [rows] * len(sides)

    bench.compare(
        f"a decode step with {rows} running, {DRAFTS} drafts each",
        steps(sides["pagecore"]),
        {name: steps(side) for name, side in sides.items() if name != "pagecore"},
        check=check,
        rounds=rounds,
        sizes={"rows": rows, "block_size": BLOCK, "drafts": DRAFTS},
    )


def _wait(bench: Bench) -> None:
    """Time what a device may wait for with overlap and drafts: the commit of a step, and the schedule of the next."""
    for rows, steps in bench.pick([(1, 400), (256, 400)], [(8, 20)]):
        length = 2 * PROMPT + steps * (1 + DRAFTS)
        scheduler = Ours(rows, rows * (length // BLOCK + 1) + 1, rows * PROMPT, overlap=True).scheduler
        for number in range(rows):
            scheduler.add(Request(number, np.full(PROMPT - number % BLOCK, number, np.int32), length - PROMPT))
        last, ids = scheduler.schedule(), np.zeros(rows, np.int32)
        assert last is not None
        scheduler.commit(last)
        accepted, times = np.array([1 + number % (1 + DRAFTS) for number in range(rows)]), []
        for _ in range(steps):
            start = time.thread_time()
            step = scheduler.schedule(DRAFTS)
            spent = time.thread_time() - start
            assert step is not None
            scheduler.accept(last, ids)
            start = time.thread_time()
            scheduler.commit(step, accepted)
            times.append(1e6 * (spent + time.thread_time() - start))
            last, ids = step, np.zeros((rows, 1 + DRAFTS), np.int32)
        bench.fact(f"commit and schedule, {rows} running, {DRAFTS} drafts each", times, "us")


def _requests(bench: Bench) -> None:
    rows, number, new, rounds = bench.pick((256, 512, 32, 7), (8, 16, 4, 2), (256, 512, 32, 3))
    blocks = rows * ((PROMPT + new) // BLOCK + 1) + 1
    sides = _sides(bench, rows, blocks, rows * PROMPT, PROMPT + new)
    sides["without prefix cache"] = Ours(rows, blocks, rows * PROMPT, reuse=False)
    # New prompts in each call, so that none is cached.
    first = dict.fromkeys(sides, 0)

    def served(name: str) -> int:
        side, sampled = sides[name], 0
        for each in range(number):
            side.add(first[name] + each, PROMPT, new)
        first[name] += number
        while (count := side.step()) is not None:
            sampled += count
        return sampled

    def serve(name: str) -> Job:
        return Job(lambda: served(name), timer=_cpu_seconds)

    def check() -> None:
        """Let each side sample every token of every request."""
        assert [served(name) for name in sides] == [number * new] * len(sides)

    figure = bench.compare(
        f"{number} requests of {PROMPT} + {new} tokens, up to {rows} running",
        serve("pagecore"),
        {name: serve(name) for name in sides if name != "pagecore"},
        check=check,
        rounds=rounds,
        sizes={"requests": number, "prompt": PROMPT, "new": new, "rows": rows},
    )
    bench.fact("requests a second, pagecore", number / figure.subject.median, "/s")
    for name, control in figure.controls.items():
        bench.fact(f"requests a second, {name}", number / control.time.median, "/s")


def _cpu_seconds(run: Work) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start
