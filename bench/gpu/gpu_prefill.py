"""Prefill over a paged cache on a GPU, against a matrix product of equal FLOP, torch's SDPA, and FlashInfer.

Prefill over quantised caches is compared with prefill over bfloat16 in the same run; the relative error of the output
is by the Frobenius norm. "kivi2" and "kivi4" are sealed blocks, and 128 newer tokens of each prompt in bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pagecore
from bench.gpu.checks import TOLERANCE, assert_close, relative_error, run_over_nan
from bench.gpu.controls import (
    FLASHINFER,
    MATMUL,
    SDPA,
    flashinfer_prefill,
    load_flashinfer,
    matmuls,
    optional_control,
    sdpa,
)
from bench.gpu.device import Call, Gpu, clock, described_gpu, in_turn
from bench.gpu.load import QUICK_FORMATS, GpuLoad, GpuSealed, GpuStored
from bench.harness.runner import Bench, Job
from bench.harness.targets import GPU_PREFILL_RATIO_MIN
from bench.host.attention_load import Shape
from bench.host.formats import PLAIN
from bench.host.sealed_load import BLOCK
from pagecore.arrays.dtypes.formats import FORMATS, SEALED_FORMATS, Format

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
STORED, STORED_SMOKE = Shape(32, 8, 128, 1, 8192), Shape(4, 2, 64, 2, 96)


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run the figures with a target or a peer; a full run adds lengths, dims, heads and dtypes."""
    run_on(bench, described_gpu(bench))


def run_on(bench: Bench, gpu: Gpu) -> None:
    """Run all figures on one device."""
    flashinfer = load_flashinfer(bench)
    bench.each(bench.pick((*MAIN, *MORE), SMOKE, quick=MAIN), lambda case: _prefill(bench, gpu, flashinfer, case))
    shape = bench.pick(STORED, STORED_SMOKE)
    for name in bench.pick(tuple(FORMATS), tuple(FORMATS), quick=QUICK_FORMATS):
        with bench.case(_stored_title(shape, name)):
            _prefill_stored(bench, gpu, shape, FORMATS[name])
    for name in SEALED_FORMATS:
        with bench.case(_stored_title(shape, name)):
            _prefill_sealed(bench, gpu, shape, name)


def _prefill(bench: Bench, gpu: Gpu, flashinfer: Any, case: Case) -> None:
    shape = case.shape
    load = GpuLoad(gpu, shape, case.dtype, 1)
    query = load.query(shape.sequences * shape.context)
    out = gpu.torch.empty_like(query)
    cu_query_lens, plan = _planned(gpu, load)
    caches = [load.key_cache, load.value_cache]
    subject = gpu.job(in_turn([_call(query, load, caches, cu_query_lens, out, plan)], PROMPTS))
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


def _planned(gpu: Gpu, load: GpuLoad) -> tuple[Any, pagecore.AttentionPlan]:
    """Return the offsets of the prompts of a load, and a plan of them."""
    starts = [i * load.shape.context for i in range(load.shape.sequences + 1)]
    return gpu.torch.tensor(starts, dtype=gpu.torch.int32, device=gpu.place), load.plan(starts, starts[-1])


def _stored_title(shape: Shape, name: str) -> str:
    return f"prefill {shape.title}, causal, {name}"


def _prefill_stored(bench: Bench, gpu: Gpu, shape: Shape, format: Format) -> None:
    load = GpuLoad(gpu, shape, PLAIN, 1)
    stored = GpuStored(load, format)
    _compare_stored(bench, load, stored.read, format.name, stored.caches, stored.scales)


def _prefill_sealed(bench: Bench, gpu: Gpu, shape: Shape, name: str) -> None:
    load = GpuLoad(gpu, shape, PLAIN, 1, BLOCK)
    sealed = GpuSealed(load, name)
    caches, options = [load.key_cache, load.value_cache], {"sealed": sealed.batches[0]}
    _compare_stored(bench, load, sealed.read, name, caches, options)


def _compare_stored(
    bench: Bench,
    load: GpuLoad,
    oracle: GpuLoad,
    name: str,
    caches: list[Any],
    options: dict[str, Any],
) -> None:
    """Compare prompts over stored keys and values with prompts over those of the load; `oracle` has the former."""
    gpu, shape = load.gpu, load.shape
    query = load.query(shape.sequences * shape.context)
    out, exact = gpu.torch.empty_like(query), gpu.torch.empty_like(query)
    cu_query_lens, plan = _planned(gpu, load)
    call = _call(query, load, caches, cu_query_lens, out, plan, **options)
    plain = _call(query, load, [load.key_cache, load.value_cache], cu_query_lens, exact, plan)
    subject, control = gpu.job(in_turn([call], PROMPTS)), gpu.job(in_turn([plain], PROMPTS))

    def check() -> None:
        for got, expected in _checked_rows(oracle, query, out, subject):
            assert_close(got, expected, TOLERANCE[PLAIN])
        control.run()
        error = relative_error(out.double(), exact.double())
        bench.fact(f"error of {_stored_title(shape, name)}", error)

    bench.compare(
        _stored_title(shape, name),
        subject,
        {PLAIN: control},
        check=check,
        flop=Case(shape).flop,
        sizes=shape.sizes | {"format": name, "block_size": load.block_size},
    )


def _call(
    query: Any,
    load: GpuLoad,
    caches: list[Any],
    cu_query_lens: Any,
    out: Any,
    plan: pagecore.AttentionPlan,
    **options: Any,
) -> Call:
    return lambda: pagecore.paged_attention(
        query,
        caches[0],
        caches[1],
        load.tables[0],
        load.seq_lens,
        cu_query_lens=cu_query_lens,
        plan=plan,
        out=out,
        **options,
    )


def _check(load: GpuLoad, case: Case, query: Any, out: Any, subject: Job) -> None:
    """Require finite rows, and compare some rows with float64."""
    for got, expected in _checked_rows(load, query, out, subject):
        assert_close(got, expected, TOLERANCE[case.dtype])


def _checked_rows(load: GpuLoad, query: Any, out: Any, subject: Job) -> Iterator[tuple[Any, Any]]:
    """Run into a poisoned output, require finite rows, and yield some of them with the rows of the oracle."""
    run_over_nan(subject, out)
    shape = load.shape
    for sequence, position, head in (
        (0, 0, 0),
        (0, shape.context // 2, shape.query_heads // 2),
        (shape.sequences - 1, shape.context - 1, shape.query_heads - 1),
    ):
        row = sequence * shape.context + position
        yield out[row, head].double(), load.expected(0, query[row, head], position, sequence, head)
