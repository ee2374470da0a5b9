"""Steps of caches on the host whose keys and values are rotated, against the same steps without rotations.

A step writes the new tokens and attends; the two are also timed apart. Both caches hold random keys and values, with
outlier channels of keys, and the error of the output is printed for both.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bench.harness.runner import Bench
from bench.host.attention_controls import on_threads, thread_counts
from pagecore import AttentionSpec, PagedKVCache

HEADS, KV_HEADS, DIM, BLOCK, DTYPE = 32, 8, 128, 16, "bfloat16"
SIZES = {"query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "block_size": BLOCK}
FORMATS = ("int4_token", "nvfp4")
EVERY, FACTOR = 29, 12.0  # channels of keys that are outliers
ROTATIONS: dict[str, Any] = {"key_rotation": "hadamard", "value_rotation": "hadamard"}
PLAIN = "without rotations"


class Steps:
    """A step in flight of a cache, which can be written and attended to any number of times."""

    def __init__(self, sequences: int, context: int, count: int, **options: Any) -> None:
        random = np.random.default_rng(0)
        blocks = sequences * -(-context // BLOCK) + 1
        spec = AttentionSpec(KV_HEADS, DIM, dtype=DTYPE, num_query_heads=HEADS, **options)
        self._cache = PagedKVCache(spec, num_blocks=blocks, block_size=BLOCK, max_sequences=sequences)
        listed = [self._cache.add_sequence(range(context * i, context * (i + 1))) for i in range(sequences)]
        if context > count:
            with self._cache.prepare(listed, context - count) as batch:
                self._cache.write(0, *_rows(random, sequences * (context - count)), batch)
                self._cache.commit(batch)
        self._batch = self._cache.prepare(listed, count)
        self._key, self._value = _rows(random, sequences * count)
        self._query = random.standard_normal((sequences * count, HEADS, DIM), dtype=np.float32).astype(self._key.dtype)
        self.out = np.empty_like(self._query)
        self.step()

    def write(self) -> None:
        """Write the tokens of the step."""
        self._cache.write(0, self._key, self._value, self._batch)

    def attend(self) -> None:
        """Attend from the tokens of the step."""
        self._cache.attend(0, self._query, self._batch, out=self.out)

    def step(self) -> None:
        """Write and attend."""
        self.write()
        self.attend()


def _rows(random: np.random.Generator, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    key, value = random.standard_normal((2, tokens, KV_HEADS, DIM), dtype=np.float32)
    key[..., 3::EVERY] *= FACTOR
    dtype = AttentionSpec(1, DIM, dtype=DTYPE).planes[0].dtype.numpy
    return key.astype(dtype), value.astype(dtype)


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run decode steps of several sequences, and the step of a prompt."""
    loads = {
        "decode": (8, bench.pick(4096, 64, 2048), 1),
        "prompt": (1, bench.pick(2048, 64, 1024), bench.pick(2048, 64, 1024)),
    }
    threads = thread_counts(bench)[-1:]
    for name, load in loads.items():
        exact = Steps(*load).out.astype(np.float32)
        for format in FORMATS:
            turned, plain = Steps(*load, format=format, **ROTATIONS), Steps(*load, format=format)
            for count in threads:
                _compare(bench, f"{name} {load[0]} x {load[1]:,}, {format}", (turned, plain), exact, count)


def _compare(bench: Bench, title: str, pair: tuple[Steps, Steps], exact: np.ndarray, count: int) -> None:
    turned, plain = pair

    def check() -> None:
        for name, steps in (("with", turned), ("without", plain)):
            steps.out[...] = np.nan
            steps.step()
            error = float(np.linalg.norm(steps.out.astype(np.float32) - exact) / np.linalg.norm(exact))
            bench.fact(f"error of {title}, {name} rotations", error)
            assert error < 1, f"relative error {error:.3g}"

    with on_threads(count, None):
        for part in ("step", "write", "attend"):
            bench.compare(
                f"{title}, {part}, {count} thread{'s' if count > 1 else ''}",
                getattr(turned, part),
                {PLAIN: getattr(plain, part)},
                check=check if part == "step" else turned.step,
                sizes=SIZES | {"threads": count},
            )
