"""Sparse selection on the host: selected attention and a whole Quest step against full attention, bounds in a write.

Decode of 4 sequences of 16384 tokens, 32 query heads over 8 key-value heads of 128, bfloat16, blocks of 16. A key head
reads an eighth of its blocks, at random. Keys and values exceed the caches.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bench.harness.arrays import DTYPES, paged_cache
from bench.harness.runner import Bench
from pagecore import paged_attention, score_blocks, select, write_kv

SEQUENCES, QUERY_HEADS, HEADS, DIM, BLOCK, SHARE = 4, 32, 8, 128, 16, 8
SIZES = {"sequences": SEQUENCES, "query_heads": QUERY_HEADS, "kv_heads": HEADS, "head_dim": DIM, "block_size": BLOCK}
SELECTED_TARGET = 4.0
# A step reads an eighth of the keys and values, and bounds of a sixteenth of their bytes.
STEP_TARGET = 2.5
SELECT_TARGET = 1.0
# In a decode step bounds move 10 KiB a token, two rows read and written and the keys, and the write itself 8 KiB: at
# equal rates 0.44 of the write's speed. In a prompt they move once for a block.
WRITE_TARGETS = {"decode, 64 sequences": 0.35, "prompt": 0.5}


class Decode:
    """A batch in decode: caches in shuffled blocks, their bounds, and random selections."""

    def __init__(self, length: int) -> None:
        random = np.random.default_rng(0)
        self.pages = length // BLOCK
        num_blocks = SEQUENCES * self.pages + 1
        self.key, self.value = (paged_cache(num_blocks, BLOCK, HEADS, DIM, "bfloat16", "HND") for _ in range(2))
        for cache in (self.key, self.value):
            cache[...] = random.standard_normal((1, BLOCK, HEADS, DIM), np.float32)
        bounds = random.standard_normal((2, num_blocks, HEADS, DIM), np.float32)
        self.low, self.high = (np.sort(bounds, axis=0)[i].astype(DTYPES["bfloat16"]) for i in range(2))
        self.query = random.standard_normal((SEQUENCES, QUERY_HEADS, DIM), np.float32).astype(DTYPES["bfloat16"])
        self.table = (1 + random.permutation(num_blocks - 1)).astype(np.int32).reshape(SEQUENCES, -1)
        self.lens = np.full(SEQUENCES, length, np.int32)
        self.budget = self.pages // SHARE
        scores = random.standard_normal((SEQUENCES, HEADS, self.pages), np.float32)
        self.blocks, self.counts = select(scores, self.budget, lens=self.pages)
        self.out = np.zeros_like(self.query)

    def full(self) -> None:
        paged_attention(self.query, self.key, self.value, self.table, self.lens, out=self.out)

    def selected(self) -> None:
        chosen = {"blocks": self.blocks, "block_counts": self.counts}
        paged_attention(self.query, self.key, self.value, self.table, self.lens, out=self.out, **chosen)

    def quest(self) -> None:
        scores = score_blocks(self.query, self.low, self.high, self.table, self.lens, block_size=BLOCK)
        blocks, counts = select(scores, self.budget - 2, lens=self.pages, sinks=1, recent=1)
        chosen = {"blocks": blocks, "block_counts": counts}
        paged_attention(self.query, self.key, self.value, self.table, self.lens, out=self.out, **chosen)

    def check(self) -> None:
        """Check the first key head of the first sequence against attention over its selected blocks alone."""
        self.selected()
        group = QUERY_HEADS // HEADS
        table = self.table[:1, self.blocks[0, 0]]
        alone = paged_attention(
            self.query[:1, :group], self.key[:, :, :1], self.value[:, :, :1], table, [self.budget * BLOCK]
        )
        np.testing.assert_allclose(self.out[:1, :group].astype(np.float32), alone.astype(np.float32), atol=0.02)


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run decode, the selection itself, and writes with bounds."""
    length = bench.pick(16384, 512)
    decode = Decode(length)
    sizes = SIZES | {"tokens": length, "dtype": "bfloat16"}
    name = f"{SEQUENCES} x {length} tokens, {QUERY_HEADS}/{HEADS} x {DIM} bf16"
    full = {"full attention": decode.full}
    target = {"full attention": SELECTED_TARGET}
    bench.compare(
        f"attend to 1/{SHARE} of the blocks, {name}",
        decode.selected,
        full,
        check=decode.check,
        at_least=target,
        sizes=sizes,
    )
    target = {"full attention": STEP_TARGET}
    bench.compare(
        f"score, select, attend, {name}", decode.quest, full, check=decode.quest, at_least=target, sizes=sizes
    )
    _select(bench, length)
    _write(bench)


def _select(bench: Bench, length: int) -> None:
    """Compare the selection of 2048 of the tokens of each head with numpy.argpartition of the same scores."""
    scores = np.random.default_rng(1).standard_normal((SEQUENCES, HEADS, length), np.float32)
    budget = length // SHARE

    def subject() -> None:
        select(scores, budget, lens=length)

    def control() -> None:
        np.sort(np.argpartition(scores, length - budget, axis=-1)[..., length - budget :], axis=-1)

    def check() -> None:
        best = np.sort(np.argpartition(scores, length - budget, axis=-1)[..., length - budget :], axis=-1)
        np.testing.assert_array_equal(select(scores, budget, lens=length)[0], best)

    bench.compare(
        f"select {budget} of {length} tokens, {SEQUENCES} x {HEADS} heads",
        subject,
        {"numpy.argpartition": control},
        check=check,
        at_least={"numpy.argpartition": SELECT_TARGET},
        sizes={"sequences": SEQUENCES, "kv_heads": HEADS, "tokens": length, "budget": budget},
    )


def _write(bench: Bench) -> None:
    """Compare writes that keep bounds with plain writes: a decode batch and a prompt."""
    for tokens, name in ((64, "decode, 64 sequences"), (bench.pick(4096, 64), "prompt")):
        key, value = (paged_cache(tokens + 1, BLOCK, HEADS, DIM, "bfloat16", "HND") for _ in range(2))
        low, high = (np.zeros((tokens + 1, HEADS, DIM), DTYPES["bfloat16"]) for _ in range(2))
        new = np.ones((tokens, HEADS, DIM), DTYPES["bfloat16"])
        slots = np.arange(tokens) + BLOCK if name == "prompt" else (1 + np.arange(tokens)) * BLOCK + 5

        def subject(given: tuple[Any, ...] = (new, new, key, value, slots), low: Any = low, high: Any = high) -> None:
            write_kv(*given, key_min=low, key_max=high)

        def control(given: tuple[Any, ...] = (new, new, key, value, slots)) -> None:
            write_kv(*given)

        bench.compare(
            f"write with bounds, {name}, {tokens} tokens, {HEADS} x {DIM} bf16",
            subject,
            {"write": control},
            check=subject,
            at_least={"write": WRITE_TARGETS[name]},
            sizes={"tokens": tokens, "kv_heads": HEADS, "head_dim": DIM, "block_size": BLOCK, "dtype": "bfloat16"},
        )
