"""Index cost of a step: prepare, plan and commit of 256 decode rows at 8k context.

The control takes the same blocks, slots and lengths from NumPy tables: without a plan, without checks, and without
releasing blocks that have left the window.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from bench.harness.runner import Bench, Job
from bench.index.controls import NumpyPool, NumpyTables
from pagecore import AttentionSpec, PagedKVCache, StateSpec

BLOCK, WINDOW = 16, 4096
# Decode steps that fit in the pool.
STEPS = 1024
FULL = AttentionSpec(8, 128, dtype="bfloat16", num_query_heads=32)
WINDOWED = AttentionSpec(8, 128, dtype="bfloat16", num_query_heads=32, window=WINDOW)


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run prepare + plan, and the whole step with commit, for one group and for two."""
    for name, layers in (("one group", [FULL]), ("full + window", [FULL, WINDOWED])):
        _step(bench, name, layers)


def _step(bench: Bench, name: str, layers: list[AttentionSpec]) -> None:
    batch_size, context, capacity = bench.pick((256, 8192, 131_072), (8, 256, 4096))
    sizes = {"rows": batch_size, "context": context, "row_capacity": capacity, "block_size": BLOCK}
    ours = PreparedRows(layers, batch_size, context, capacity)
    theirs = _NumPy(len(layers), batch_size, context, capacity)

    def check() -> None:
        ours.prepare()
        theirs.prepare()
        slots = [np.from_dlpack(ours.batch.group(i).slot_mapping) for i in range(len(layers))]
        np.testing.assert_array_equal(slots[0], theirs.slots[0])
        # The windowed group reuses released blocks, so only the offsets within blocks are equal.
        np.testing.assert_array_equal(slots[-1] % BLOCK, theirs.slots[-1] % BLOCK)
        np.testing.assert_array_equal(np.from_dlpack(ours.batch.seq_lens), theirs.seq_lens)
        ours.commit()

    bench.compare(
        f"{name}: prepare + plan, {batch_size} decode rows",
        Job(ours.prepare, after=ours.commit),
        {"NumPy tables, no plan": Job(theirs.prepare)},
        check=check,
        at_most=20 if len(layers) == 1 else None,
        sizes=sizes,
    )
    bench.compare(
        f"{name}: prepare + plan + commit",
        Job(ours.step),
        {"NumPy tables, no plan": Job(theirs.prepare)},
        check=check,
        sizes=sizes,
    )


class PreparedRows:
    """A cache without storage, filled to uneven lengths: in each step one row in sixteen needs a block."""

    def __init__(
        self, layers: Sequence[AttentionSpec | StateSpec], batch_size: int, context: int, capacity: int
    ) -> None:
        self.cache = PagedKVCache(
            layers,
            block_size=BLOCK,
            num_blocks=self.num_blocks(batch_size, context),
            max_sequences=batch_size,
            max_tokens_per_sequence=capacity,
            device="none",
            prefix_cache=False,  # the controls have none
        )
        self.sequences = [self.cache.add_sequence([]) for _ in range(batch_size)]
        self.batch = self.cache.make_batch(batch_size, max(context, batch_size))
        for i, sequence in enumerate(self.sequences):
            self.cache.prepare([sequence], context - i % BLOCK, out=self.batch)
            self.commit()
        self.batch = self.cache.make_batch(batch_size, batch_size)
        self.counts = [1] * batch_size

    @staticmethod
    def num_blocks(batch_size: int, context: int) -> int:
        """Return the number of blocks for the rows and the timed steps."""
        return batch_size * ((context + STEPS) // BLOCK + 1) + 1

    def prepare(self) -> None:
        self.cache.prepare(self.sequences, self.counts, out=self.batch)

    def commit(self) -> None:
        self.cache.commit(self.batch)

    def step(self) -> None:
        self.cache.prepare(self.sequences, self.counts, out=self.batch)
        self.cache.commit(self.batch)


class _NumPy:
    """The rows in NumPy tables, one table for each group."""

    def __init__(self, groups: int, batch_size: int, context: int, capacity: int) -> None:
        columns = min(capacity, context + STEPS) // BLOCK + 2
        pools = [NumpyPool(PreparedRows.num_blocks(batch_size, context)) for _ in range(groups)]
        self.tables = [NumpyTables(pool, BLOCK, batch_size, columns) for pool in pools]
        self.rows = np.arange(batch_size, dtype=np.int32)
        self.counts = np.ones(batch_size, np.int32)
        self.slots = [np.empty(batch_size, np.int64) for _ in range(groups)]
        self.seq_lens, self.positions = (np.empty(batch_size, np.int32) for _ in range(2))
        self.cu_query_lens = np.empty(batch_size + 1, np.int32)
        scratch = np.empty(context, np.int64)
        for table in self.tables:
            for row in self.rows:
                table.extend(np.array([row]), np.array([context - row % BLOCK], np.int32), scratch)

    def prepare(self) -> None:
        for table, slots in zip(self.tables, self.slots, strict=True):
            np.copyto(self.positions, table.lengths[self.rows])
            table.extend(self.rows, self.counts, slots)
        self.cu_query_lens[0] = 0
        np.cumsum(self.counts, out=self.cu_query_lens[1:])
        np.copyto(self.seq_lens, table.lengths[self.rows])
