"""Decode over a paged cache on a GPU, against a device copy, torch's SDPA on contiguous KV, and FlashInfer.

A step reads key and value once. The copy reads half of those bytes and writes them, and so moves the same number.
Batches with different blocks alternate in a graph until they have read several times the size of the L2.

Decode over quantised caches, and over sealed blocks of 2 and 4 bits with 128 newer tokens of each sequence in bfloat16,
is compared with a copy of its own bytes, and with decode over bfloat16 in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pagecore
from bench.gpu.checks import TOLERANCE, assert_close, relative_error, run_over_nan
from bench.gpu.controls import COPY, FLASHINFER, SDPA, flashinfer_decode, load_flashinfer, optional_control, sdpa
from bench.gpu.device import Call, Gpu, clock, copies, described_gpu, in_turn, num_sets
from bench.gpu.load import QUICK_FORMATS, GpuLoad, GpuSealed, GpuStored
from bench.harness.runner import Bench, Job
from bench.harness.targets import GPU_DECODE_ONE_US_MAX, GPU_DECODE_RATIO_MIN
from bench.host.attention_load import Shape
from bench.host.formats import PLAIN, bits_of
from bench.host.sealed_load import BLOCK
from pagecore.arrays.dtypes.formats import FORMATS, SEALED_FORMATS, Format

CLOCK = clock


@dataclass(frozen=True, slots=True)
class Case:
    """A decode step and its targets."""

    shape: Shape
    dtype: str = "bfloat16"
    block_size: int = 16
    ratio_min: float | None = None
    us_max: float | None = None

    @property
    def title(self) -> str:
        return f"decode {self.shape.title}, {self.dtype}, block {self.block_size}"


MAIN = (
    Case(Shape(32, 8, 128, 16, 4096), ratio_min=GPU_DECODE_RATIO_MIN),
    Case(Shape(32, 8, 128, 8, 16384), ratio_min=GPU_DECODE_RATIO_MIN),
    Case(Shape(32, 8, 128, 1, 4096), us_max=GPU_DECODE_ONE_US_MAX),
    Case(Shape(32, 8, 128, 1, 32768)),
    Case(Shape(64, 8, 128, 1, 8192)),
    Case(Shape(32, 4, 128, 1, 1024)),
)
MORE = (
    Case(Shape(32, 8, 128, 64, 4096)),
    Case(Shape(32, 8, 128, 8, 32768)),
    *(Case(Shape(32, 8, 128, 16, 4096), block_size=size) for size in (1, 8, 32, 64, 256)),
    *(Case(Shape(32, 8, 128, 16, 4096), dtype) for dtype in ("float16", "float32")),
    Case(Shape(32, 8, 64, 32, 4096)),
    Case(Shape(32, 8, 256, 8, 4096)),
    *(Case(Shape(heads, 8, 128, 16, 4096)) for heads in (8, 16, 40, 64, 128)),
    Case(Shape(16, 16, 128, 8, 4096)),
    Case(Shape(32, 8, 80, 16, 4096)),
)
SMOKE = (Case(Shape(4, 2, 64, 2, 96)), Case(Shape(4, 4, 64, 2, 40), "float32", 8))
STORED, STORED_SMOKE = Shape(32, 8, 128, 16, 4096), Shape(4, 2, 64, 2, 96)


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run the figures with targets or a peer; a full run adds block sizes, dtypes, dims and groups."""
    run_on(bench, described_gpu(bench))


def run_on(bench: Bench, gpu: Gpu) -> None:
    """Run all figures on one device, those of a quick run first."""
    flashinfer = load_flashinfer(bench)
    bench.each(bench.pick(MAIN, SMOKE), lambda case: _decode(bench, gpu, flashinfer, case))
    shape = bench.pick(STORED, STORED_SMOKE)
    for name in bench.pick(tuple(FORMATS), tuple(FORMATS), quick=QUICK_FORMATS):
        with bench.case(_stored_title(shape, name)):
            _decode_stored(bench, gpu, shape, FORMATS[name])
    for name in SEALED_FORMATS:
        with bench.case(_stored_title(shape, name)):
            _decode_sealed(bench, gpu, shape, name)
    bench.each(bench.pick(MORE, (), quick=()), lambda case: _decode(bench, gpu, flashinfer, case))


def _decode(bench: Bench, gpu: Gpu, flashinfer: Any, case: Case) -> None:
    shape = case.shape
    nbytes = shape.nbytes(case.dtype)
    sets = bench.pick(num_sets(nbytes), 2)
    load = GpuLoad(gpu, shape, case.dtype, sets, case.block_size)
    query = load.query(shape.sequences)
    outs = gpu.random((sets, *query.shape), case.dtype)
    plan = load.plan(None, shape.sequences)
    subject = gpu.job(in_turn([_call(query, load, batch, out, plan) for batch, out in enumerate(outs)]))
    controls = {COPY: gpu.job(in_turn(copies(gpu, nbytes // 2, sets)))}
    controls |= optional_control(bench, gpu, SDPA, lambda: sdpa(load, query[:, :, None], causal=False))
    if flashinfer is not None and case.dtype != "float32":
        controls |= optional_control(bench, gpu, FLASHINFER, lambda: flashinfer_decode(flashinfer, load, query))
    bench.compare(
        case.title,
        subject,
        controls,
        check=lambda: _check(load, case.dtype, query, outs, subject),
        nbytes=nbytes,
        at_least=None if case.ratio_min is None else {COPY: case.ratio_min},
        at_most=case.us_max,
        sizes=shape.sizes | {"dtype": case.dtype, "block_size": case.block_size, "sets": sets},
    )


def _stored_title(shape: Shape, name: str) -> str:
    return f"decode {shape.title}, {name}"


def _num_sets(bench: Bench, shape: Shape, bits: int) -> int:
    return bench.pick(num_sets(shape.nbytes(PLAIN) * bits // 16), 2)


def _decode_stored(bench: Bench, gpu: Gpu, shape: Shape, format: Format) -> None:
    load = GpuLoad(gpu, shape, PLAIN, _num_sets(bench, shape, bits_of(format)))
    stored = GpuStored(load, format)
    options = {"caches": stored.caches, **stored.scales}
    _compare_stored(bench, load, stored.read, format.name, stored.nbytes, lambda _: options)


def _decode_sealed(bench: Bench, gpu: Gpu, shape: Shape, name: str) -> None:
    load = GpuLoad(gpu, shape, PLAIN, _num_sets(bench, shape, SEALED_FORMATS[name]), BLOCK)
    sealed = GpuSealed(load, name)
    _compare_stored(bench, load, sealed.read, name, sealed.nbytes, lambda batch: {"sealed": sealed.batches[batch]})


def _compare_stored(
    bench: Bench,
    load: GpuLoad,
    oracle: GpuLoad,
    name: str,
    nbytes: int,
    options: Callable[[int], dict[str, Any]],
) -> None:
    """Compare steps over stored keys and values with steps over those of the load; `oracle` has the former.

    `options` are those of the call of a batch, which reads `nbytes`.
    """
    gpu, shape, sets = load.gpu, load.shape, len(load.tables)
    query, plan = load.query(shape.sequences), load.plan(None, shape.sequences)
    outs, exact = (gpu.random((sets, *query.shape), PLAIN) for _ in range(2))
    calls = [_call(query, load, batch, out, plan, **options(batch)) for batch, out in enumerate(outs)]
    plain = [_call(query, load, batch, out, plan) for batch, out in enumerate(exact)]
    subject = gpu.job(in_turn(calls))
    controls = {COPY: gpu.job(in_turn(copies(gpu, nbytes // 2, sets))), PLAIN: gpu.job(in_turn(plain))}

    def check() -> None:
        _check(oracle, PLAIN, query, outs, subject)
        controls[PLAIN].run()
        bench.fact(f"error of {_stored_title(shape, name)}", relative_error(outs.double(), exact.double()))

    bench.compare(
        _stored_title(shape, name),
        subject,
        controls,
        check=check,
        nbytes=nbytes,
        sizes=shape.sizes | {"format": name, "block_size": load.block_size, "sets": sets},
    )


def _call(
    query: Any,
    load: GpuLoad,
    batch: int,
    out: Any,
    plan: pagecore.AttentionPlan,
    caches: list[Any] | None = None,
    **options: Any,
) -> Call:
    key_cache, value_cache = caches or (load.key_cache, load.value_cache)
    return lambda: pagecore.paged_attention(
        query, key_cache, value_cache, load.tables[batch], load.seq_lens, plan=plan, out=out, **options
    )


def _check(load: GpuLoad, dtype: str, query: Any, outs: Any, subject: Job) -> None:
    """Require finite rows, and compare some rows of the first and last batch with float64."""
    run_over_nan(subject, outs)
    shape = load.shape
    for batch in {0, len(outs) - 1}:
        for sequence, head in ((0, 0), (shape.sequences - 1, shape.query_heads - 1)):
            got = outs[batch, sequence, head].double()
            expected = load.expected(batch, query[sequence, head], shape.context - 1, sequence, head)
            assert_close(got, expected, TOLERANCE[dtype])
