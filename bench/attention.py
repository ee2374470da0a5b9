"""Host attention over a paged cache, beside a read of the same bytes, NumPy, and torch's SDPA on contiguous copies.

One thread each. The blocks of a sequence lie scattered; every control has key and value in one contiguous piece, torch
with the query heads of a group folded into queries.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bench.arrays import DTYPES
from bench.runner import Bench
from bench.torch_control import load_torch, torch_view
from pagecore import AttentionSpec, PagedKVCache, paged_attention

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
GROUP = HEADS // KV_HEADS
SIZES = {"query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "block_size": BLOCK}
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 5e-3}
READ, NUMPY, TORCH = "read of the same bytes", "NumPy matmul", "torch SDPA"
DECODE_TARGETS = {"float32": {READ: 0.85, TORCH: 1.3}, "bfloat16": {READ: 0.80, TORCH: 2.1}}
PREFILL_TARGETS = {"float32": {TORCH: 1.2}, "bfloat16": {TORCH: 1.5}}
# Longer contexts stand in DRAM; what caches hold is another contest and has no target.
DRAM_LENGTH = 8192


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Decode of 8 sequences of 1,024 and of 8,192 tokens, and a causal prefill of 512 and of 2,048."""
    torch = load_torch(bench)
    for length in bench.pick((1024, DRAM_LENGTH), (64,)):
        for dtype in DTYPES:
            _decode(bench, torch, dtype, bench.pick(8, 2), length)
    for length in bench.pick((512, 2048), (32,)):
        for dtype in ("float32", "bfloat16"):
            _prefill(bench, torch, dtype, length)


class _Filled:
    """Random key and value in scattered blocks, and the same in one piece: [sequences, kv heads, length, dim]."""

    def __init__(self, dtype: str, num_sequences: int, length: int, step: int) -> None:
        spec = AttentionSpec(KV_HEADS, DIM, dtype=dtype, num_query_heads=HEADS)
        blocks = num_sequences * (length // BLOCK) + 1
        self.cache = PagedKVCache(spec, block_size=BLOCK, num_blocks=blocks, max_sequences=num_sequences)
        self.sequences = [self.cache.add_sequence([]) for _ in range(num_sequences)]
        self.key, self.value = (np.empty((num_sequences, KV_HEADS, length, DIM), DTYPES[dtype]) for _ in range(2))
        random = np.random.default_rng(0)
        for start in range(0, length, step):
            # Round robin, so that a sequence's blocks do not lie side by side.
            self.batch = self.cache.prepare(self.sequences, step)
            for plane in (self.key, self.value):
                new = random.standard_normal((num_sequences, KV_HEADS, step, DIM), dtype=np.float32)
                plane[:, :, start : start + step] = new
            parts = [
                plane[:, :, start : start + step].swapaxes(1, 2).reshape(-1, KV_HEADS, DIM)
                for plane in (self.key, self.value)
            ]
            self.cache.write(0, *parts, self.batch)
            if start + step < length:
                self.cache.commit(self.batch)

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + self.value.nbytes


def _decode(bench: Bench, torch: Any, dtype: str, num_sequences: int, length: int) -> None:
    filled = _Filled(dtype, num_sequences, length, BLOCK)
    cache, batch = filled.cache, filled.batch
    query = np.random.default_rng(1).standard_normal((num_sequences, HEADS, DIM), dtype=np.float32)
    query = query.astype(DTYPES[dtype])
    out = np.empty_like(query)
    seq_lens = np.full(num_sequences, length, np.int32)
    key_cache, value_cache, table = cache.key(0), cache.value(0), batch.group(0).block_table
    words = [plane.reshape(-1).view(np.int64) for plane in (filled.key, filled.value)]

    def ours() -> None:
        paged_attention(query, key_cache, value_cache, table, seq_lens, rows=batch.rows, out=out)

    def read() -> None:
        for plane in words:
            np.bitwise_or.reduce(plane)

    folded = query.reshape(num_sequences, KV_HEADS, GROUP, DIM)
    controls = {READ: read} | _controls(torch, dtype, (folded, filled.key, filled.value), causal=False)

    def check() -> None:
        ours()
        for name, control in controls.items():
            if name != READ:
                _assert_close(out, _as_numpy(control()).reshape(out.shape), dtype)

    bench.compare(
        f"decode {num_sequences} x {length}, {HEADS}/{KV_HEADS} x {DIM}, {dtype}",
        ours,
        controls,
        check=check,
        nbytes=filled.nbytes,
        at_least=DECODE_TARGETS.get(dtype) if length >= DRAM_LENGTH else None,
        sizes=SIZES | {"sequences": num_sequences, "context": length, "dtype": dtype},
    )


def _prefill(bench: Bench, torch: Any, dtype: str, length: int) -> None:
    filled = _Filled(dtype, 1, length, length)
    cache, batch = filled.cache, filled.batch
    query = np.random.default_rng(2).standard_normal((length, HEADS, DIM), dtype=np.float32).astype(DTYPES[dtype])
    out = np.empty_like(query)
    queries = np.ascontiguousarray(query.swapaxes(0, 1))[None]
    planes = [np.repeat(plane, GROUP, 1) for plane in (filled.key, filled.value)]
    controls = _controls(torch, dtype, (queries, *planes), causal=True)
    if not controls:
        bench.note(f"prefill {length}, {dtype}: its only control is torch; left out")
        return

    def check() -> None:
        cache.attend(0, query, batch, out=out)
        for control in controls.values():
            _assert_close(out, _as_numpy(control())[0].swapaxes(0, 1), dtype)

    bench.compare(
        f"prefill {length} causal, {HEADS}/{KV_HEADS} x {DIM}, {dtype}",
        lambda: cache.attend(0, query, batch, out=out),
        controls,
        check=check,
        unit="ms",
        at_least=PREFILL_TARGETS[dtype],
        sizes=SIZES | {"tokens": length, "dtype": dtype},
    )


def _controls(torch: Any, dtype: str, arrays: tuple[np.ndarray, ...], causal: bool) -> dict[str, Any]:
    """NumPy in float32 (it has no matmul for the others), and torch, on [batch, heads, tokens, dim]."""
    controls: dict[str, Any] = {}
    if dtype == "float32":
        controls[NUMPY] = lambda: _numpy_attention(*arrays, causal)
    if torch:
        tensors = [torch_view(torch, array) for array in arrays]
        controls[TORCH] = lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
    return controls


def _numpy_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, causal: bool) -> np.ndarray:
    scores = query @ key.swapaxes(2, 3)
    scores *= np.float32(DIM**-0.5)
    if causal:
        scores[..., ~np.tri(scores.shape[-1], dtype=bool)] = -np.inf
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return scores @ value


def _as_numpy(result: Any) -> np.ndarray:
    return result if isinstance(result, np.ndarray) else result.float().numpy()


def _assert_close(ours: np.ndarray, theirs: np.ndarray, dtype: str) -> None:
    np.testing.assert_allclose(
        ours.astype(np.float32), theirs.astype(np.float32), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
