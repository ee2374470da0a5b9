"""The loop of an engine around `Scheduler`: schedule, compute, commit, sample, accept.

The model is fake; a real one uses `cache.write` and `cache.attend`. One forward pass fails and is repeated, and one
request is cancelled while its step is in flight.

Run it: python examples/scheduler_loop.py
"""

import numpy as np

from pagecore import AttentionSpec, PagedKVCache
from pagecore.serving import Request, Scheduler

cache = PagedKVCache(AttentionSpec(num_kv_heads=2, head_dim=64), num_blocks=65, block_size=16, device="none")
scheduler = Scheduler(cache, max_running=8, max_tokens_per_step=64)
random = np.random.default_rng(0)
runs = [
    scheduler.add(
        Request(number, random.integers(0, 1000, 20 + 10 * number, np.int32), max_new_tokens=12, samples=1 + number % 2)
    )
    for number in range(10)
]


def forward(number: int) -> None:
    """Compute a step; the fourth forward pass fails."""
    if number == 3:
        raise RuntimeError("the device is temporarily unavailable")


number = 0
while (step := scheduler.schedule()) is not None:
    number += 1
    try:
        forward(number - 1)
    except RuntimeError as error:
        print(f"step {number}: {error}; the next step computes its tokens")
        scheduler.abandon(step)
        continue
    if number == 6:
        scheduler.cancel(runs[0])  # its blocks are freed at once; accept drops its id
    scheduler.commit(step)
    ids = random.integers(0, 1000, len(step.outputs))
    for run in scheduler.accept(step, ids):
        print(f"step {number}: {run} is finished")

print(f"{number} steps, {scheduler.num_forks} forks, {scheduler.num_preemptions} preemptions")
print(f"request 0 is {runs[0].state.value} after {runs[0].num_generated} tokens")
