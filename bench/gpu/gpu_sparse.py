"""Sparse selection on a GPU: selected attention and a whole Quest step against full attention, scores, selections.

A key head reads an eighth of the blocks of its sequence. The plan of a selection is part of its figures, and the plan
of full attention is not: engines plan a step once for all layers, and each layer selects for itself.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import pagecore
from bench.gpu.checks import TOLERANCE, assert_close, run_over_nan
from bench.gpu.controls import COPY
from bench.gpu.device import Call, Gpu, clock, copies, described_gpu, in_turn, num_sets
from bench.gpu.load import GpuLoad
from bench.harness.runner import Bench, Job
from bench.harness.targets import GPU_SELECTED_RATIO_MIN
from bench.host.attention_load import Shape

CLOCK = clock
DTYPE, BLOCK, SHARE = "bfloat16", 16, 8
FULL, TOPK = "full attention", "torch.topk"
SHAPES = (Shape(32, 8, 128, 8, 16384), Shape(32, 8, 128, 1, 131072))
SMOKE = (Shape(4, 2, 64, 2, 256),)


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run decode steps of 8 sequences of 16,384 tokens, and of one of 131,072."""
    run_on(bench, described_gpu(bench))


def run_on(bench: Bench, gpu: Gpu) -> None:
    """Run all figures on one device."""
    for shape in bench.pick(SHAPES, SMOKE):
        step = Step(bench, gpu, shape)
        for title, figure in (
            (f"attend to 1/{SHARE} of the blocks, {shape.title}, {DTYPE}", step.attend),
            (f"score, select, attend, {shape.title}, {DTYPE}", step.whole),
            (f"score_blocks, {shape.title}, {DTYPE}", step.score),
            (f"select 1/{SHARE} of {shape.context} scores, {shape.sequences} x {shape.kv_heads} rows", step.select),
        ):
            with bench.case(title):
                figure(title)


class Step:
    """Batches in decode with bounds of their blocks, and random selections."""

    def __init__(self, bench: Bench, gpu: Gpu, shape: Shape) -> None:
        self.bench, self.gpu, self.shape = bench, gpu, shape
        self.sets = bench.pick(num_sets(shape.nbytes(DTYPE) // SHARE), 2)
        self.load = GpuLoad(gpu, shape, DTYPE, self.sets, BLOCK)
        self.query = self.load.query(shape.sequences)
        self.outs = gpu.random((self.sets, *self.query.shape), DTYPE)
        self.pages = -(-shape.context // BLOCK)
        self.budget = self.pages // SHARE
        size = (len(self.load.key_cache), shape.kv_heads, shape.dim)
        self.low, self.high = (gpu.random(size, DTYPE, seed) for seed in (5, 6))
        rows = (self.sets, shape.sequences, shape.kv_heads)
        self.scores = gpu.random((*rows, self.pages), "float32", 7)
        self.lists = [pagecore.select(scores, self.budget, lens=self.pages) for scores in self.scores]
        self.sizes = shape.sizes | {"dtype": DTYPE, "block_size": BLOCK, "sets": self.sets, "share": SHARE}

    def attend(self, title: str) -> None:
        """Compare attention to given blocks with attention to all."""
        subject = self.gpu.job(in_turn([self._attend_call(i, *self.lists[i]) for i in range(self.sets)]))
        nbytes = self.shape.nbytes(DTYPE) // SHARE
        self._compare(title, subject, self._full(), nbytes, lambda: self._check(subject))

    def whole(self, title: str) -> None:
        """Compare scores, selection and attention with attention to all blocks."""
        subject = self.gpu.job(in_turn([self._whole_call(i) for i in range(self.sets)]))
        nbytes = self.shape.nbytes(DTYPE) // SHARE + self._bound_bytes()
        self._compare(title, subject, self._full(), nbytes, lambda: self._check_written(subject))

    def score(self, title: str) -> None:
        """Compare scores of all blocks with a copy that moves the bytes of their bounds."""
        subject = self.gpu.job(in_turn([self._score_call(i) for i in range(self.sets)]))
        nbytes = self._bound_bytes()
        control = {COPY: self.gpu.job(in_turn(copies(self.gpu, nbytes // 2, self.sets)))}
        self.bench.compare(title, subject, control, check=self._check_scores, nbytes=nbytes, sizes=self.sizes)

    def select(self, title: str) -> None:
        """Compare a selection of tokens with torch.topk of the same scores, whose positions are not sorted."""
        shape, torch = self.shape, self.gpu.torch
        scores = self.gpu.random((self.sets, shape.sequences, shape.kv_heads, shape.context), "float32", 8)
        budget = shape.context // SHARE
        calls = [partial(pagecore.select, each, budget, lens=shape.context) for each in scores]
        controls = [partial(torch.topk, each, budget) for each in scores]

        def check() -> None:
            best = torch.topk(scores[0], budget).indices.sort().values
            got = pagecore.select(scores[0], budget, lens=shape.context)[0]
            assert torch.equal(got.long(), best), "a selection is not that of torch.topk"

        self.bench.compare(
            title,
            self.gpu.job(in_turn(calls)),
            {TOPK: self.gpu.job(in_turn(controls))},
            check=check,
            nbytes=scores[0].nbytes,
            sizes=self.sizes | {"budget": budget},
        )

    def _compare(self, title: str, subject: Job, control: Job, nbytes: int, check: Any) -> None:
        target = {FULL: GPU_SELECTED_RATIO_MIN} if title.startswith("attend") and self.shape.sequences > 1 else None
        self.bench.compare(
            title, subject, {FULL: control}, check=check, nbytes=nbytes, at_least=target, sizes=self.sizes
        )

    def _bound_bytes(self) -> int:
        return int(2 * self.shape.sequences * self.pages * self.shape.kv_heads * self.shape.dim * 2)

    def _full(self) -> Job:
        plan = self.load.plan(None, self.shape.sequences)
        planned = {"plan": plan}
        calls = [self._call(i, out, planned) for i, out in enumerate(self.outs.clone())]
        return self.gpu.job(in_turn(calls))

    def _attend_call(self, i: int, blocks: Any, counts: Any) -> Call:
        return self._call(i, self.outs[i], {"blocks": blocks, "block_counts": counts})

    def _call(self, i: int, out: Any, options: dict[str, Any]) -> Call:
        load = self.load
        return lambda: pagecore.paged_attention(
            self.query, load.key_cache, load.value_cache, load.tables[i], load.seq_lens, out=out, **options
        )

    def _score_call(self, i: int) -> Call:
        load = self.load
        return lambda: pagecore.score_blocks(
            self.query, self.low, self.high, load.tables[i], load.seq_lens, block_size=BLOCK
        )

    def _whole_call(self, i: int) -> Call:
        score = self._score_call(i)

        def call() -> None:
            blocks, counts = pagecore.select(score(), self.budget - 2, lens=self.pages, sinks=1, recent=1)
            self._attend_call(i, blocks, counts)()

        return call

    def _check_written(self, subject: Job) -> None:
        run_over_nan(subject, self.outs)
        assert float(self.outs.std()) > 0, "a row is that of every other"

    def _check(self, subject: Job) -> None:
        """Compare a row of the first and of the last batch with float64."""
        self._check_written(subject)
        torch = self.gpu.torch
        for batch in {0, self.sets - 1}:
            blocks = self.lists[batch][0][0, 0].long()
            tokens = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device=self.gpu.place)).flatten()
            key, value = (plane[0, 0, tokens].double() for plane in self.load.contiguous(batch))
            scores = key @ self.query[0, 0].double() / self.shape.dim**0.5
            expected = torch.softmax(scores, 0) @ value
            assert_close(self.outs[batch, 0, 0].double(), expected, TOLERANCE[DTYPE])

    def _check_scores(self) -> None:
        table = self.load.tables[0][0].long()
        low, high = (plane[table, 0].double() for plane in (self.low, self.high))
        query = self.query[0, : self.shape.group].double()
        zero = query.clamp(max=0) @ low.T + query.clamp(min=0) @ high.T
        got: Any = self._score_call(0)()
        assert self.gpu.torch.allclose(got[0, 0].double(), zero.amax(0), rtol=1e-4, atol=1e-3), "a score is off"
