"""Host attention over a paged cache, against a read of the same bytes, NumPy, and torch's SDPA on contiguous copies.

The blocks of a sequence are scattered. Every control has contiguous key and value, in huge pages like the cache; torch
gets the query heads of a group folded into queries. The read covers all bytes with the same number of threads as the
attention. For a few MiB its threads need longer to synchronise than to read.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import pagecore
from bench.harness.arrays import DTYPES
from bench.harness.machine import available_memory
from bench.harness.runner import Bench, Job, Work
from bench.harness.targets import (
    BLOCK_SIZE_RATIO_MIN,
    DECODE_READ_RATIO_MIN,
    DECODE_SDPA_RATIO_MIN,
    IN_CACHE_AMX_GB_PER_S_MIN,
    PREFILL_SDPA_RATIO_MIN,
)
from bench.harness.torch_control import load_torch
from bench.host.attention_controls import (
    NUMPY,
    READ,
    TORCH,
    Reader,
    numpy_attention,
    on_threads,
    thread_counts,
    torch_attention,
)
from bench.host.attention_load import Load, Paged, Shape
from pagecore import paged_attention

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 5e-3}
DRAM, IN_CACHE = Shape(32, 8, 128, 8, 8192), Shape(32, 8, 128, 1, 1024)
HEADS, DIMS, BATCHES, CONTEXTS = ((32, 8), (8, 1), (64, 4), (16, 16)), (64, 128, 256), (1, 8, 32), (1024, 8192, 32768)
# Key and value of a shape exist twice, and controls need memory. Larger shapes take seconds a call.
BYTES_MAX = 1 << 30
MEMORY_SHARE = 4


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run the figures with targets: decode from DRAM and caches, prefill, block sizes; a full run adds all shapes."""
    torch = load_torch(bench)
    threads = thread_counts(bench)
    dram, in_cache = bench.pick((DRAM, IN_CACHE), (replace(DRAM, sequences=2, context=256), IN_CACHE))
    for dtype in ("float32", "bfloat16"):
        _decode(bench, torch, dtype, dram, threads)
    _decode(bench, torch, "bfloat16", in_cache, threads)
    for length in bench.pick((512, 2048), (32,), quick=(2048,)):
        for dtype in ("float32", "bfloat16"):
            _prefill(bench, torch, dtype, length, threads)
    for dtype, heads in product(("float32", "bfloat16"), ("HND", "NHD")):
        _block_sizes(bench, dtype, dram, heads)
    if bench.kind != "quick":
        _instruction_sets(bench, in_cache)
        _sweep(bench, torch, threads)


def _sweep(bench: Bench, torch: Any, threads: tuple[int, ...]) -> None:
    """Decode with every shape that fits in memory."""
    effort = bench.effort
    bench.effort = replace(effort, figure_s=min(effort.figure_s, 0.5), rounds_min=min(effort.rounds_min, 5))
    most = min(BYTES_MAX, available_memory() // MEMORY_SHARE)
    left_out = []
    sides = bench.pick((HEADS, DIMS, BATCHES, CONTEXTS), (HEADS[1:2], DIMS[:1], (2,), (128,)))
    for heads, dim, sequences, context in product(*sides):
        shape = Shape(heads[0], heads[1], dim, sequences, context)
        for dtype in DTYPES:
            if shape.nbytes(dtype) > most:
                left_out.append(f"{shape.title} {dtype}")
            elif shape not in (DRAM, IN_CACHE) or dtype == "float16":
                _decode(bench, torch, dtype, shape, threads)
    if left_out:
        bench.note(f"left out, because key and value exceed {most / 2**30:.1f} GiB: {'; '.join(left_out)}")


def _decode(bench: Bench, torch: Any, dtype: str, shape: Shape, threads: tuple[int, ...]) -> None:
    """Decode: one query of each sequence, on each number of threads."""
    load = Load(shape, dtype)
    paged = Paged(load)
    query = shape.query(dtype, shape.sequences)
    out = np.empty_like(query)
    folded = query.reshape(shape.sequences, shape.kv_heads, shape.group, shape.dim)
    for count in threads:
        with on_threads(count, torch), closing(Reader([load.key, load.value], count)) as read:
            controls: dict[str, Work] = {READ: read}
            if torch:
                controls[TORCH] = torch_attention(torch, folded, load.key, load.value, causal=False)
            if dtype == "float32" and count == 1:
                controls[NUMPY] = partial(numpy_attention, folded, load.key, load.value)
            bench.compare(
                f"decode {shape.title}, {dtype}, {_threads(count)}",
                _attention(paged, query, out),
                controls,
                check=partial(_check_decode, load, paged, query, {**controls, READ: None}),
                nbytes=shape.nbytes(dtype),
                sizes=shape.sizes | {"dtype": dtype, "threads": count, "block_size": 16, "heads": "HND"},
                **_decode_targets(shape, dtype, count),
            )


def _decode_targets(shape: Shape, dtype: str, threads: int) -> dict[str, Any]:
    if shape == DRAM and dtype in DECODE_READ_RATIO_MIN:
        return {"at_least": {READ: DECODE_READ_RATIO_MIN[dtype], TORCH: DECODE_SDPA_RATIO_MIN[dtype]}}
    if (shape, dtype, threads) == (IN_CACHE, "bfloat16", 2) and pagecore.isa() == "x86-64-v4-amx":
        return {"gb_per_s_at_least": IN_CACHE_AMX_GB_PER_S_MIN}
    return {}


def _attention(paged: Paged, query: np.ndarray, out: np.ndarray, cu_query_lens: np.ndarray | None = None) -> Work:
    return lambda: paged_attention(
        query, paged.key_cache, paged.value_cache, paged.table, paged.seq_lens, cu_query_lens=cu_query_lens, out=out
    )


def _check_decode(load: Load, paged: Paged, query: np.ndarray, controls: dict[str, Work | None]) -> None:
    """Compare with the controls, and the first and last head with float32."""
    out = np.full_like(query, np.nan)
    _attention(paged, query, out)()
    for control in controls.values():
        if control is not None:
            _assert_close(out, _as_numpy(control()).reshape(out.shape), load.dtype)
    group = load.shape.group
    for sequence, head in ((0, 0), (load.shape.sequences - 1, load.shape.kv_heads - 1)):
        heads = slice(head * group, (head + 1) * group)
        parts = (query[sequence, heads], load.key[sequence, head], load.value[sequence, head])
        expected = numpy_attention(*(part.astype(np.float32) for part in parts))
        _assert_close(out[sequence, heads], expected, load.dtype)


def _prefill(bench: Bench, torch: Any, dtype: str, length: int, threads: tuple[int, ...]) -> None:
    """Prefill: a causal prompt of `length` tokens."""
    shape = replace(DRAM, sequences=1, context=length)
    load = Load(shape, dtype)
    paged = Paged(load)
    query = shape.query(dtype, length)
    out = np.empty_like(query)
    ours = _attention(paged, query, out, np.array([0, length], np.int32))
    name = f"prefill {length:,} causal, {shape.query_heads}/{shape.kv_heads} x {shape.dim}, {dtype}"
    queries = np.ascontiguousarray(query.swapaxes(0, 1))[None]
    planes = [np.repeat(plane, shape.group, 1) for plane in (load.key, load.value)]
    for count in threads:
        controls: dict[str, Work] = {}
        if torch:
            controls[TORCH] = torch_attention(torch, queries, *planes, causal=True)
        if dtype == "float32" and count == 1 and bench.kind != "quick":
            controls[NUMPY] = partial(numpy_attention, queries, *planes, causal=True)
        if not controls:
            bench.note(f"{name}, {_threads(count)}: left out, because its only control is torch")
            continue

        def check(controls: dict[str, Work] = controls) -> None:
            ours()
            for control in controls.values():
                _assert_close(out, _as_numpy(control())[0].swapaxes(0, 1), dtype)

        with on_threads(count, torch):
            bench.compare(
                f"{name}, {_threads(count)}",
                ours,
                controls,
                check=check,
                unit="ms",
                at_least={TORCH: PREFILL_SDPA_RATIO_MIN[dtype]} if length == 2048 else None,
                sizes=shape.sizes | {"dtype": dtype, "threads": count, "block_size": 16, "heads": "HND"},
            )


def _block_sizes(bench: Bench, dtype: str, shape: Shape, heads: str) -> None:
    """Decode with other block sizes and with NHD heads, on one thread."""
    load = Load(shape, dtype)
    query = shape.query(dtype, shape.sequences)
    usual = Paged(load, 16, heads)
    sizes = shape.sizes | {"dtype": dtype, "threads": 1}
    for block_size, least in BLOCK_SIZE_RATIO_MIN.items():
        _compare_caches(
            bench,
            f"decode {shape.title}, {dtype}, {heads}, block {block_size}",
            (Paged(load, block_size, heads), query),
            {"block 16": usual},
            nbytes=shape.nbytes(dtype),
            at_least={"block 16": least},
            sizes=sizes | {"block_size": block_size, "heads": heads},
        )
    if heads != "HND" and bench.kind != "quick":
        _compare_caches(
            bench,
            f"decode {shape.title}, {dtype}, {heads}",
            (usual, query),
            {"HND": Paged(load)},
            nbytes=shape.nbytes(dtype),
            sizes=sizes | {"block_size": 16, "heads": heads},
        )


def _compare_caches(
    bench: Bench, name: str, subject: tuple[Paged, np.ndarray], others: dict[str, Paged], **about: Any
) -> None:
    """Compare attention over the same key and value in different caches."""
    paged, query = subject
    out, other = np.empty_like(query), np.empty_like(query)
    ours = _attention(paged, query, out)
    controls = {each: _attention(cache, query, other) for each, cache in others.items()}

    def check() -> None:
        ours()
        for control in controls.values():
            control()
            _assert_close(out, other, about["sizes"]["dtype"])

    with on_threads(1, None):
        bench.compare(name, ours, controls, check=check, **about)


def _instruction_sets(bench: Bench, shape: Shape) -> None:
    """Compare the widest instruction set with every other one that is available: a cached step and a prompt."""
    if len(pagecore.available_isas()) == 1:
        bench.note(f"{pagecore.isa()} is the only available instruction set; its comparison is left out")
        return
    for dtype, count in product(DTYPES, (1, bench.pick(512, 32))):
        _levels(bench, Load(shape, dtype), count)


def _levels(bench: Bench, load: Load, count: int) -> None:
    """Compare on the last `count` tokens of one sequence."""
    paged, query = Paged(load), load.shape.query(load.dtype, count)
    widest = pagecore.isa()
    out, other = np.empty_like(query), np.empty_like(query)
    cu_query_lens = np.array([0, count], np.int32)

    def job(name: str, result: np.ndarray) -> Job:
        work = _attention(paged, query, result, cu_query_lens)
        return Job(work, before=partial(pagecore.set_isa, name), after=partial(pagecore.set_isa, widest))

    subject = job(widest, out)
    others = {name: job(name, other) for name in pagecore.available_isas() if name != widest}

    def check() -> None:
        subject.run()
        for each in others.values():
            each.before(), each.run(), each.after()
            _assert_close(out, other, load.dtype)

    with on_threads(1, None):
        bench.compare(
            f"{widest}, last {count} of {load.shape.context:,} tokens, {load.dtype}",
            subject,
            others,
            check=check,
            sizes=load.shape.sizes | {"queries": count, "dtype": load.dtype, "threads": 1, "block_size": 16},
        )


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _as_numpy(result: Any) -> np.ndarray:
    return result if isinstance(result, np.ndarray) else result.float().numpy()


def _assert_close(ours: np.ndarray, theirs: np.ndarray, dtype: str) -> None:
    np.testing.assert_allclose(
        ours.astype(np.float32), theirs.astype(np.float32), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
