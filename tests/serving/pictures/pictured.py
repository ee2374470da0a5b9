"""Small runs of the scheduler with preemptions, forks and windows, for the tests of the pictures."""

import numpy as np

from pagecore import AttentionSpec, PagedKVCache
from pagecore.serving.metrics import Metrics
from pagecore.serving.scheduling.request import Request
from pagecore.serving.scheduling.scheduler import Scheduler

FULL = AttentionSpec(1, 8, dtype="float32")
WINDOWED = AttentionSpec(1, 8, dtype="float32", window=12)


def requests(count=14, seed=0):
    """Return requests of various lengths; every second one has a common prefix, every third one three samples."""
    random = np.random.default_rng(seed)
    listed = []
    for number in range(count):
        prompt = random.integers(0, 99, random.integers(3, 50))
        if number % 2:
            prompt[:10] = np.arange(10)[: len(prompt)]
        listed.append(Request(number, prompt, int(random.integers(2, 40)), 3 if number % 3 == 1 else 1))
    return listed


def serve(watchers, *, layers=FULL, num_blocks=26, max_running=6, count=14, prefix_cache=True, num_states=None):
    """Serve all requests without a model; return the scheduler and the metrics of the run."""
    cache = PagedKVCache(
        layers,
        block_size=4,
        num_blocks=num_blocks,
        num_states=num_states,
        max_sequences=max_running,
        device="none",
        prefix_cache=prefix_cache,
    )
    scheduler = Scheduler(cache, max_running=max_running, max_tokens_per_step=40)
    metrics = Metrics()
    for request in requests(count):
        scheduler.add(request)
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step)
        metrics.observe(cache.stats(), scheduler.num_running, scheduler.num_waiting, scheduler.reuse)
        for watch in watchers:
            watch(scheduler, metrics)
        scheduler.accept(step, np.full(len(step.outputs), 7))
    return scheduler, metrics
