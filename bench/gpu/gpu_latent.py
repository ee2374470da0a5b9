"""Decode over a cache of latents on a GPU, with absorbed queries, against a device copy of the bytes of the rows.

A step reads every row of 512 latent and 64 rope numbers once, for all query heads: bfloat16, or codes. The copy reads
half of those bytes and writes them. Batches with different blocks alternate in a graph until they have read several
times the size of the L2.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import pagecore
from bench.gpu.checks import TOLERANCE, assert_close, run_over_nan
from bench.gpu.controls import COPY
from bench.gpu.device import Gpu, clock, copies, described_gpu, in_turn, num_sets
from bench.harness.runner import Bench
from bench.harness.targets import GPU_DECODE_RATIO_MIN
from bench.host.latent import FORMATS, LATENT, ROPE, SCALE
from pagecore.arrays import as_dtype

CLOCK = clock


@dataclass(frozen=True, slots=True)
class Case:
    """A decode step over latents, and its target."""

    heads: int
    sequences: int
    context: int
    format: str = "bfloat16"
    block_size: int = 64
    ratio_min: float | None = None

    @property
    def title(self) -> str:
        shown = f"{self.format}, block {self.block_size}"
        return f"latent decode {self.sequences} x {self.context:,}, {self.heads} heads, {shown}"

    @property
    def nbytes(self) -> int:
        width, dtype = FORMATS[self.format]
        return self.sequences * self.context * width * as_dtype(dtype).itemsize


MAIN = (
    Case(16, 32, 8192, ratio_min=GPU_DECODE_RATIO_MIN),
    Case(16, 1, 32768),
    Case(128, 32, 8192),
    Case(16, 32, 8192, "float8_e4m3fn"),
    Case(16, 32, 8192, "fp8_ds_mla"),
    Case(128, 32, 8192, "fp8_ds_mla"),
)
MORE = (*(Case(heads, 32, 8192) for heads in (1, 8, 32, 64)), Case(16, 32, 8192, "nvfp4_ds_mla"))
SMOKE = tuple(Case(4, 2, 96, format, 16) for format in FORMATS)


class Load:
    """Batches with disjoint blocks of one cache."""

    def __init__(self, gpu: Gpu, case: Case, batches: int) -> None:
        self.case, torch = case, gpu.torch
        each = -(-case.context // case.block_size)
        count = batches * case.sequences * each
        width, dtype = FORMATS[case.format]
        rows = gpu.random(((count + 1) * case.block_size, LATENT + ROPE), "bfloat16")
        self.cache = torch.zeros((count + 1, case.block_size, width), dtype=getattr(torch, dtype), device=gpu.place)
        slots = torch.arange(len(rows), dtype=torch.int32, device=gpu.place)
        pagecore.write_latent(rows[:, :LATENT], rows[:, LATENT:], self.cache, None, slots)
        ids = 1 + gpu.permutation(count).to(torch.int32)
        self.tables = list(ids.reshape(batches, case.sequences, each))
        self.seq_lens = torch.full((case.sequences,), case.context, dtype=torch.int32, device=gpu.place)
        self.query = gpu.random((case.sequences, case.heads, LATENT), "bfloat16", seed=2)
        self.rope = gpu.random((case.sequences, case.heads, ROPE), "bfloat16", seed=3)
        heads: dict[str, Any] = {"num_query_heads": case.heads, "num_kv_heads": 1}
        sizes = {} if gpu.name == "cpu" else {"max_sequences": case.sequences, "max_tokens": case.sequences}
        plan = pagecore.AttentionPlan(**heads, **sizes, device=gpu.name)  # type: ignore[arg-type]
        self.plan = pagecore.plan_attention(None, [case.context] * case.sequences, **heads, out=plan)

    def call(self, table: Any, out: Any) -> Any:
        """Return a call over one batch."""
        return lambda: pagecore.latent_attention(
            self.query, self.rope, self.cache, None, table, self.seq_lens, scale=SCALE, plan=self.plan, out=out
        )

    def expected(self, batch: int, sequence: int, head: int) -> Any:
        """Return a row of the output, in float64."""
        table, lens = self.tables[batch][sequence : sequence + 1], self.seq_lens[:1]
        rows: Any = pagecore.gather_latent(self.cache, None, table, lens, dtype="float32")
        rows = rows.double()
        query, rope = self.query[sequence, head].double(), self.rope[sequence, head].double()
        scores = (rows[:, :LATENT] @ query + rows[:, LATENT:] @ rope) * SCALE
        return scores.softmax(0) @ rows[:, :LATENT]


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run 16 heads, as of a model in 8 parts, and 128; a full run adds other numbers of heads, and codes of 4 bits."""
    run_on(bench, described_gpu(bench))


def run_on(bench: Bench, gpu: Gpu) -> None:
    """Run all figures on one device."""
    bench.each(bench.pick((*MAIN, *MORE), SMOKE, quick=MAIN), lambda case: _decode(bench, gpu, case))


def _decode(bench: Bench, gpu: Gpu, case: Case) -> None:
    sets = bench.pick(num_sets(case.nbytes), 2)
    load = Load(gpu, case, sets)
    outs = gpu.random((sets, *load.query.shape), "bfloat16")
    subject = gpu.job(in_turn([load.call(table, out) for table, out in zip(load.tables, outs, strict=True)]))

    def check() -> None:
        run_over_nan(subject, outs)
        for batch in {0, sets - 1}:
            for sequence, head in ((0, 0), (case.sequences - 1, case.heads - 1)):
                assert_close(
                    outs[batch, sequence, head].double(), load.expected(batch, sequence, head), TOLERANCE["bfloat16"]
                )

    bench.compare(
        case.title,
        subject,
        {COPY: gpu.job(in_turn(copies(gpu, case.nbytes // 2, sets)))},
        check=check,
        nbytes=case.nbytes,
        at_least=None if case.ratio_min is None else {COPY: case.ratio_min},
        sizes={"sequences": case.sequences, "context": case.context, "query_heads": case.heads, "sets": sets}
        | {"format": case.format, "block_size": case.block_size},
    )
