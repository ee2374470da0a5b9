"""Trees of drafts on the host: verification with rows of bits against the flat bool mask of the same keys.

One step of 8 sequences of 8192 tokens, each with a tree of 64 drafts, 32 query heads over 8 key-value heads of 128,
bfloat16, blocks of 16. The mask holds a byte for each draft and key; the bits are one word a draft.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bench.harness.arrays import DTYPES, paged_cache
from bench.harness.runner import Bench
from pagecore import AttentionSpec, PagedKVCache, paged_attention, tree_mask

SEQUENCES, DRAFTS, QUERY_HEADS, HEADS, DIM, BLOCK = 8, 64, 32, 8, 128, 16
SIZES = {"sequences": SEQUENCES, "drafts": DRAFTS, "query_heads": QUERY_HEADS, "kv_heads": HEADS, "head_dim": DIM}
# The mask is read, and turns every tile into one that is masked.
MASK_TARGET = 1.0


def binary_tree(count: int) -> list[int]:
    """Return the parents of a complete binary tree."""
    return [(token - 1) // 2 if token else -1 for token in range(count)]


class Verification:
    """A batch of trees: caches in shuffled blocks, rows of bits, and the flat mask of the same keys."""

    def __init__(self, length: int) -> None:
        random = np.random.default_rng(0)
        pages = length // BLOCK
        self.key, self.value = (
            paged_cache(SEQUENCES * pages + 1, BLOCK, HEADS, DIM, "bfloat16", "HND") for _ in range(2)
        )
        for cache in (self.key, self.value):
            cache[...] = random.standard_normal((1, BLOCK, HEADS, DIM), np.float32)
        query = random.standard_normal((SEQUENCES * DRAFTS, QUERY_HEADS, DIM), np.float32)
        table = (1 + random.permutation(SEQUENCES * pages)).astype(np.int32).reshape(SEQUENCES, -1)
        lens = np.full(SEQUENCES, length, np.int32)
        self.arrays = (query.astype(DTYPES["bfloat16"]), self.key, self.value, table, lens)
        self.cu = np.arange(SEQUENCES + 1, dtype=np.int32) * DRAFTS
        self.bits = tree_mask([binary_tree(DRAFTS)] * SEQUENCES)
        seen = np.ones((DRAFTS, length), bool)
        seen[:, length - DRAFTS :] = self.bits[:DRAFTS, None] >> np.arange(DRAFTS, dtype=np.uint64) & np.uint64(1)
        self.mask = np.tile(seen.ravel(), SEQUENCES)
        self.out, self.expected = (np.zeros_like(self.arrays[0]) for _ in range(2))

    def by_bits(self) -> None:
        paged_attention(*self.arrays, cu_query_lens=self.cu, tree_mask=self.bits, out=self.out)

    def by_mask(self) -> None:
        paged_attention(*self.arrays, cu_query_lens=self.cu, mask=self.mask, out=self.expected)

    def check(self) -> None:
        self.by_bits()
        self.by_mask()
        np.testing.assert_allclose(self.out.astype(np.float32), self.expected.astype(np.float32), atol=0.02)


class Steps:
    """Steps of a cache without bytes: a prepare and a commit of 64 drafts for each of 8 sequences."""

    def __init__(self) -> None:
        spec = AttentionSpec(HEADS, DIM, num_query_heads=QUERY_HEADS)
        self.cache = PagedKVCache(spec, block_size=BLOCK, num_blocks=4096, device="none", prefix_cache=False)
        self.sequences = [self.cache.add_sequence([1]) for _ in range(SEQUENCES)]
        self.batch = self.cache.make_batch(SEQUENCES, SEQUENCES * DRAFTS, max_tree_tokens=DRAFTS)
        self.parents: Any = [np.array(binary_tree(DRAFTS))] * SEQUENCES
        self.paths: Any = [[0, 2, 6, 14]] * SEQUENCES

    def tree(self) -> None:
        self.cache.prepare(self.sequences, DRAFTS, self.batch, parents=self.parents)
        self.cache.commit(self.batch, accepted_path=self.paths)
        self.cache.truncate(self.sequences, 0)

    def chain(self) -> None:
        self.cache.prepare(self.sequences, DRAFTS, self.batch)
        self.cache.commit(self.batch, accepted=4)
        self.cache.truncate(self.sequences, 0)


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run the verification, and the step around it."""
    length = bench.pick(8192, 512)
    load = Verification(length)
    bench.compare(
        f"verify {SEQUENCES} trees of {DRAFTS} drafts, {length} tokens, {QUERY_HEADS}/{HEADS} x {DIM} bf16",
        load.by_bits,
        {"bool mask": load.by_mask},
        check=load.check,
        at_least={"bool mask": MASK_TARGET},
        sizes=SIZES | {"tokens": length, "tree_mask_bytes": load.bits.nbytes, "mask_bytes": load.mask.nbytes},
    )
    steps = Steps()
    bench.compare(
        f"prepare and commit {SEQUENCES} trees of {DRAFTS} drafts",
        steps.tree,
        {"chains": steps.chain},
        check=steps.tree,
        sizes=SIZES,
    )
