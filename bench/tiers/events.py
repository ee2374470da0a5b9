"""Cost of events: commit of 256 decode rows with and without a publisher, and the work of its thread.

The control is the same cache without a publisher. One row in sixteen publishes a block in each step.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from bench.harness.runner import Bench, Job
from pagecore import AttentionSpec, PagedKVCache
from pagecore.tiers.events import EventPublisher, Subscriber

BLOCK = 16
STEPS = 1024
FULL = AttentionSpec(8, 128, dtype="bfloat16", num_query_heads=32)


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Time commit, publish and a snapshot."""
    batch_size, context = bench.pick((256, 1024), (8, 64))
    plain, published = Rows(batch_size, context), Rows(batch_size, context)
    endpoint = "tcp://127.0.0.1:*"
    with EventPublisher(published.cache, endpoint=endpoint, snapshot=endpoint, interval=None) as publisher:

        def drained() -> None:
            publisher.publish()
            published.prepare()

        plain.prepare()
        published.prepare()
        bench.compare(
            f"commit of {batch_size} decode rows with a publisher",
            Job(published.commit, after=drained),
            {"without": Job(plain.commit, after=plain.prepare)},
            check=lambda: None,
            sizes={"rows": batch_size, "context": context, "block_size": BLOCK},
        )
        _thread(bench, published, publisher)


def _thread(bench: Bench, rows: Rows, publisher: EventPublisher) -> None:
    """Report what the publisher's thread does outside of the step."""
    before, seconds = publisher.stats(), []
    for _ in range(bench.pick(64, 4)):
        rows.commit()
        start = time.perf_counter()
        publisher.publish()
        seconds.append((time.perf_counter() - start) * 1e6)
        rows.prepare()
    after = publisher.stats()
    bench.fact("publish the changes of a step", seconds, "us")
    steps = after.sequence - before.sequence
    bench.fact("events of a step", (after.num_events - before.num_events) / max(1, steps))
    bench.fact("bytes of a step", (after.num_bytes - before.num_bytes) / max(1, steps))
    with Subscriber(publisher.endpoint, snapshot=publisher.snapshot, timeout=60) as subscriber:
        start = time.perf_counter()
        subscriber.sync()
        bench.fact("snapshot, from request to mirror", (time.perf_counter() - start) * 1e3, "ms")
        bench.fact("blocks of the snapshot", len(subscriber.mirror.blocks()))


class Rows:
    """A cache without storage whose rows have random ids: in each step one row in sixteen fills a block."""

    def __init__(self, batch_size: int, context: int) -> None:
        self.cache = PagedKVCache(
            FULL,
            block_size=BLOCK,
            num_blocks=batch_size * ((context + STEPS) // BLOCK + 2) + 1,
            max_sequences=batch_size,
            max_tokens_per_sequence=context + STEPS,
            device="none",
        )
        self.random = np.random.default_rng(0)
        self.sequences = [
            self.cache.add_sequence(self.random.integers(0, 1 << 17, context - i % BLOCK)) for i in range(batch_size)
        ]
        self.batch = self.cache.make_batch(batch_size, max(context, batch_size))
        for sequence in self.sequences:
            self.cache.prepare([sequence], sequence.num_tokens, out=self.batch)
            self.commit()
        self.batch = self.cache.make_batch(batch_size, batch_size)

    def prepare(self) -> None:
        ids = self.random.integers(0, 1 << 17, (len(self.sequences), 1))
        self.cache.append_tokens(self.sequences, ids)
        self.cache.prepare(self.sequences, 1, out=self.batch)

    def commit(self) -> None:
        self.cache.commit(self.batch)
