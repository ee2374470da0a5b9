"""Plain-Python control of the bench "scheduler": lists and dictionaries, one loop over the runs for each decision.

It admits by free blocks, gives each run a token a step and prompts the rest, and writes the arrays of a step to NumPy.
It has no prefix cache, no preemption and no samples, so it does less than the subject.
"""

from __future__ import annotations

from collections import deque

import numpy as np


class _Run:
    """One request."""

    def __init__(self, number: int, prompt: list[int], new: int) -> None:
        self.number, self.tokens, self.last = number, prompt, len(prompt) + new
        self.computed = 0
        self.row = -1
        self.blocks: list[int] = []


class PlainScheduler:
    """Continuous batching without reuse."""

    def __init__(self, rows: int, num_blocks: int, max_tokens: int, block_size: int) -> None:
        self.rows, self.max_tokens, self.block_size = rows, max_tokens, block_size
        self.free = list(range(num_blocks - 1, 0, -1))
        self.waiting: deque[_Run] = deque()
        self.running: list[_Run] = []
        self.free_rows = list(range(rows))
        self.table = np.zeros((rows, num_blocks // max(rows, 1) + 2), np.int32)
        self.rows_of_step = np.zeros(rows, np.int32)
        self.token_ids = np.zeros(max_tokens, np.int32)
        self.positions = np.zeros(max_tokens, np.int32)
        self.slots = np.zeros(max_tokens, np.int64)
        self.seq_lens = np.zeros(rows, np.int32)

    def add(self, number: int, prompt: int, new: int) -> None:
        """Queue a request whose tokens are all `number`."""
        self.waiting.append(_Run(number, [number] * prompt, new))

    def step(self) -> int | None:
        """Run one step; return the number of sampled tokens, None at the end."""
        if not self.waiting and not self.running:
            return None
        counts = self._choose()
        self._fill(counts)
        outputs = []
        for run, count in counts:
            run.computed += count
            if run.computed == len(run.tokens):
                run.tokens.append(0)
                outputs.append(run)
        for run in outputs:
            if len(run.tokens) == run.last:
                self.free += reversed(run.blocks)
                self.free_rows.append(run.row)
        self.running = [run for run in self.running if len(run.tokens) < run.last]
        return len(outputs)

    def verify(self, drafts: int, accepted: list[int]) -> None:
        """Run one step with drafts for every run, all of which decode; `accepted` is what each gains."""
        counts = [(run, 1 + drafts) for run in self.running]
        for run, _ in counts:
            run.tokens += [0] * drafts
        self._fill(counts)
        for (run, count), kept in zip(counts, accepted, strict=True):
            run.computed += kept
            del run.tokens[len(run.tokens) - count + kept :]
            run.tokens.append(0)

    def _choose(self) -> list[tuple[_Run, int]]:
        budget, counts = self.max_tokens, []
        for run in self.running:
            count = min(len(run.tokens) - run.computed, budget)
            if count:
                counts.append((run, count))
                budget -= count
        while self.waiting and budget and len(self.running) < self.rows:
            run = self.waiting[0]
            if -(-run.last // self.block_size) > len(self.free):
                break
            self.waiting.popleft()
            self.running.append(run)
            count = min(len(run.tokens), budget)
            counts.append((run, count))
            budget -= count
            # Blocks for the whole request, because nothing is preempted.
            run.blocks = [self.free.pop() for _ in range(-(-run.last // self.block_size))]
            run.row = self.free_rows.pop()
            self.table[run.row, : len(run.blocks)] = run.blocks
        return counts

    def _fill(self, counts: list[tuple[_Run, int]]) -> None:
        start, size = 0, self.block_size
        for row, (run, count) in enumerate(counts):
            self.rows_of_step[row] = run.row
            self.seq_lens[row] = run.computed + count
            for place in range(run.computed, run.computed + count):
                self.token_ids[start] = run.tokens[place]
                self.positions[start] = place
                self.slots[start] = run.blocks[place // size] * size + place % size
                start += 1
