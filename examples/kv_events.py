"""A router that follows two workers by their events and sends each request to the longest cached prefix.

Each worker has a cache and a publisher; the router has a mirror of each cache. Half way the router is started again: it
takes snapshots and continues. Its expectation of every request is compared with what the worker reused.

Run it: python examples/kv_events.py
"""

from __future__ import annotations

import numpy as np

from pagecore import AttentionSpec, PagedKVCache
from pagecore.tiers import EventPublisher, Subscriber

ANY_PORT = "tcp://127.0.0.1:*"
random = np.random.default_rng(0)


class Worker:
    """A cache of 120 blocks without storage, and its publisher."""

    def __init__(self, rank: int) -> None:
        spec = AttentionSpec(num_kv_heads=8, head_dim=128)
        self.cache = PagedKVCache(spec, num_blocks=121, block_size=16, device="none", max_tokens_per_sequence=1024)
        self.publisher = EventPublisher(
            self.cache, endpoint=ANY_PORT, replay=ANY_PORT, snapshot=ANY_PORT, rank=rank, buffer=16
        )

    def serve(self, prompt: np.ndarray) -> int:
        """Compute a prompt; return the tokens that were reused."""
        sequence = self.cache.add_sequence(prompt)
        reused = sequence.num_cached_tokens
        self.cache.commit(self.cache.prepare([sequence], len(prompt) - reused))
        self.cache.remove(sequence)
        return reused


def follow(worker: Worker) -> Subscriber:
    """Return a subscriber with the state of a worker's cache."""
    publisher = worker.publisher
    follower = Subscriber(publisher.endpoint, replay=publisher.replay, snapshot=publisher.snapshot)
    follower.sync()
    return follower


workers = [Worker(rank) for rank in range(2)]
followers = [follow(worker) for worker in workers]
conversations = [random.integers(0, 32_000, 64) for _ in range(6)]
reused, expected, total, load = 0, 0, 0, [0, 0]
for turn in range(120):
    if turn == 60:
        for follower in followers:
            follower.close()
        followers = [follow(worker) for worker in workers]
    number = int(random.integers(len(conversations)))
    is_long = len(conversations[number]) > 800
    before = random.integers(0, 32_000, 64) if is_long else conversations[number]
    prompt = conversations[number] = np.concatenate([before, random.integers(0, 32_000, 40)])

    for worker, follower in zip(workers, followers, strict=True):
        worker.publisher.publish()  # a real worker leaves this to the publisher's thread
        follower.catch_up()
    found = [follower.mirror.match(prompt[:-1]) for follower in followers]
    best = max(range(2), key=lambda rank: (found[rank], -load[rank]))
    expected += found[best]
    reused += workers[best].serve(prompt)
    total += len(prompt)
    load[best] += len(prompt) - found[best]

for worker, follower in zip(workers, followers, strict=True):
    stats = worker.publisher.stats()
    print(f"{stats.num_events} events in {stats.sequence + 1} batches, {stats.num_bytes:,} bytes")
    follower.close()
    worker.publisher.close()
print(f"{reused:,} of {total:,} prompt tokens were reused; the router expected {expected:,}")
