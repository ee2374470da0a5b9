"""Prefill over a paged cache on a GPU, against a matrix product of equal FLOP, torch's SDPA, and FlashInfer."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import pagecore
from bench.attention_load import Shape
from bench.gpu import Call, Gpu, clock, in_turn, require_gpu
from bench.gpu_controls import (
    FLASHINFER,
    MATMUL,
    SDPA,
    flashinfer_prefill,
    load_flashinfer,
    matmuls,
    optional_control,
    sdpa,
)
from bench.gpu_decode import TOLERANCE, assert_close
from bench.gpu_load import GpuLoad
from bench.runner import Bench, Job
from bench.targets import GPU_PREFILL_RATIO_MIN

CLOCK = clock
# A prompt of 2,048 tokens takes 100 us or more, so the launch of a graph is negligible; 64 of the longest prompts would
# take seconds.
PROMPTS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of one length, causal."""

    shape: Shape
    dtype: str = "bfloat16"
    ratio_min: float | None = None

    @property
    def title(self) -> str:
        return f"prefill {self.shape.title}, causal, {self.dtype}"

    @property
    def flop(self) -> int:
        """FLOP of scores and values under the causal mask: half of all."""
        shape = self.shape
        return 2 * shape.sequences * shape.context**2 * shape.query_heads * shape.dim


MAIN = (
    Case(Shape(32, 8, 128, 1, 8192), ratio_min=GPU_PREFILL_RATIO_MIN),
    Case(Shape(32, 8, 128, 1, 2048)),
    Case(Shape(32, 8, 128, 16, 512)),
)
MORE = (
    Case(Shape(32, 8, 128, 1, 16384)),
    Case(Shape(32, 8, 128, 4, 2048)),
    Case(Shape(32, 8, 64, 1, 8192)),
    Case(Shape(32, 8, 256, 1, 4096)),
    Case(Shape(16, 16, 128, 1, 8192)),
    Case(Shape(32, 8, 128, 1, 8192), "float16"),
    Case(Shape(32, 8, 128, 1, 2048), "float32"),
)
SMOKE = (Case(Shape(4, 2, 64, 2, 96)), Case(Shape(4, 4, 64, 1, 40), "float32"))


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run the figures with a target or a peer; a full run adds lengths, dims, heads and dtypes."""
    gpu = require_gpu()
    gpu.describe(bench)
    run_on(bench, gpu)


def run_on(bench: Bench, gpu: Gpu) -> None:
    """Run all figures on one device."""
    flashinfer = load_flashinfer(bench)
    for case in bench.pick((*MAIN, *MORE), SMOKE, quick=MAIN):
        with bench.case(case.title):
            _prefill(bench, gpu, flashinfer, case)


def _prefill(bench: Bench, gpu: Gpu, flashinfer: Any, case: Case) -> None:
    shape = case.shape
    load = GpuLoad(gpu, shape, case.dtype, 1)
    query = load.query(shape.sequences * shape.context)
    out = gpu.torch.empty_like(query)
    starts = [i * shape.context for i in range(shape.sequences + 1)]
    cu_query_lens = gpu.torch.tensor(starts, dtype=gpu.torch.int32, device=gpu.place)
    plan = load.plan(starts, starts[-1])
    subject = gpu.job(in_turn([_call(query, load, cu_query_lens, out, plan)], PROMPTS))
    by_sequence = query.unflatten(0, (shape.sequences, shape.context)).transpose(1, 2).contiguous()
    controls: dict[str, Job] = {}
    if case.dtype != "float32":
        width = shape.sequences * shape.query_heads * shape.dim
        controls[MATMUL] = gpu.job(in_turn(matmuls(gpu, shape.context, width, case.dtype), PROMPTS))
    controls |= optional_control(bench, gpu, SDPA, lambda: sdpa(load, by_sequence, causal=True), PROMPTS)
    if case.dtype != "float32" and flashinfer is not None:
        controls |= optional_control(
            bench, gpu, FLASHINFER, lambda: flashinfer_prefill(flashinfer, load, query, cu_query_lens), PROMPTS
        )
    bench.compare(
        case.title,
        subject,
        controls,
        check=lambda: _check(load, case, query, out, subject),
        flop=case.flop,
        at_least=None if case.ratio_min is None else {MATMUL: case.ratio_min},
        sizes=shape.sizes | {"dtype": case.dtype, "block_size": load.block_size},
    )


def _call(query: Any, load: GpuLoad, cu_query_lens: Any, out: Any, plan: pagecore.AttentionPlan) -> Call:
    return lambda: pagecore.paged_attention(
        query,
        load.key_cache,
        load.value_cache,
        load.tables[0],
        load.seq_lens,
        cu_query_lens=cu_query_lens,
        plan=plan,
        out=out,
    )


def _check(load: GpuLoad, case: Case, query: Any, out: Any, subject: Job) -> None:
    """Require finite rows, and compare some rows with float64."""
    out.fill_(math.nan)
    subject.run()
    assert out.isfinite().all(), "a row was not written"
    shape = load.shape
    for sequence, position, head in (
        (0, 0, 0),
        (0, shape.context // 2, shape.query_heads // 2),
        (shape.sequences - 1, shape.context - 1, shape.query_heads - 1),
    ):
        row = sequence * shape.context + position
        expected = load.expected(0, query[row, head], position, sequence, head)
        assert_close(out[row, head].double(), expected, TOLERANCE[case.dtype])
