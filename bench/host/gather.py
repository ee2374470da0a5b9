"""Gather, scatter and transfer of blocks, against numpy.copyto of the same bytes.

The blocks of a sequence are scattered; the control copies one contiguous array to another. One thread each.
"""

from __future__ import annotations

import argparse
from functools import partial

import ml_dtypes
import numpy as np

from bench.harness.arrays import paged_cache
from bench.harness.runner import Bench, Work
from pagecore.ops import gather_blocks, scatter_blocks, transfer_blocks

HEADS, DIM, BLOCK, SEQUENCES = 8, 128, 16, 4
TARGET = 0.8
BLOCK_BYTES = BLOCK * HEADS * DIM * 2
MIB = 1 << 20


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run gather, scatter and transfer of 1 MiB, which fits the caches, to 512 MiB, which does not."""
    for mebibytes in bench.pick((1, 8, 64, 512), (1,)):
        # The control has its own arrays, so that a subject does not warm them.
        source, target = (np.ones(mebibytes * MIB // 2, np.uint16) for _ in range(2))
        for heads in ("HND", "NHD"):
            _moves(bench, mebibytes, heads, partial(np.copyto, target, source))


def _moves(bench: Bench, mebibytes: int, heads: str, copy: Work) -> None:
    num_blocks = mebibytes * MIB // BLOCK_BYTES
    cache, other = (paged_cache(num_blocks + 1, BLOCK, HEADS, DIM, "bfloat16", heads) for _ in range(2))
    random = np.random.default_rng(0)
    cache[...] = random.standard_normal((1, BLOCK, HEADS, DIM), dtype=np.float32)
    cache[:, 0, 0, 0] = np.arange(num_blocks + 1) % 251
    ids = (1 + random.permutation(num_blocks)).astype(np.int32)
    table = ids.reshape(SEQUENCES, -1)
    seq_lens = np.full(SEQUENCES, num_blocks // SEQUENCES * BLOCK, np.int32)
    tokens = np.zeros((num_blocks * BLOCK, HEADS, DIM), ml_dtypes.bfloat16)
    pairs = np.stack([ids, 1 + random.permutation(num_blocks)], 1).astype(np.int64)

    def gather() -> None:
        gather_blocks(cache, table, seq_lens, out=tokens)

    def scatter() -> None:
        scatter_blocks(tokens, other, table, seq_lens)

    def transfer() -> None:
        transfer_blocks([cache], [other], pairs)

    def check_gather() -> None:
        gather()
        for i in (0, num_blocks // 2, num_blocks - 1):
            np.testing.assert_array_equal(_bits(tokens[i * BLOCK : (i + 1) * BLOCK]), _bits(cache[ids[i]]))

    def check_scatter() -> None:
        gather()
        scatter()
        np.testing.assert_array_equal(_bits(other[1:]), _bits(cache[1:]))

    def check_transfer() -> None:
        transfer()
        for source, target in pairs[:: max(1, num_blocks // 64)]:
            np.testing.assert_array_equal(_bits(other[target]), _bits(cache[source]))

    for name, work, check in (
        ("gather", gather, check_gather),
        ("scatter", scatter, check_scatter),
        ("transfer", transfer, check_transfer),
    ):
        bench.compare(
            f"{name}_blocks {mebibytes:>3} MiB, {HEADS} x {DIM} bf16, {heads}",
            work,
            {"numpy.copyto": copy},
            check=check,
            nbytes=mebibytes * MIB,
            at_least={"numpy.copyto": TARGET},
            sizes={"mebibytes": mebibytes, "kv_heads": HEADS, "head_dim": DIM, "block_size": BLOCK, "heads": heads}
            | {"dtype": "bfloat16", "sequences": SEQUENCES},
        )


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint16)
