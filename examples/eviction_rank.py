"""Custom eviction with ranks: when blocks are short, the cached prefix with the lowest rank is evicted first.

The rank here is the cost to recompute a prefix, times the number of times that this engine has seen it. The policy lru
considers only the time of the last use.

Run it: python examples/eviction_rank.py
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from pagecore import AttentionSpec, PagedKVCache

BLOCK = 16
spec = AttentionSpec(1, 8, dtype="float32")
random = np.random.default_rng(0)
# Many requests begin with one of two system prompts; the others are documents that are read once.
SYSTEM = [random.integers(1000, size=320), random.integers(1000, size=160)]


def requests(count: int) -> Iterator[tuple[int | None, Any]]:
    for number in range(count):
        if number % 5 < 2:
            yield number % 5, np.concatenate([SYSTEM[number % 5], random.integers(1000, size=8)])
        else:
            yield None, random.integers(1000, size=480)


def serve(policy: Literal["lru", "rank"]) -> float:
    """Return the share of all tokens that were reused from the cache."""
    cache = PagedKVCache(spec, num_blocks=96, block_size=BLOCK, eviction_policy=policy, device="none")
    seen: Counter[int | None] = Counter()
    tokens = reused = 0
    for kind, prompt in requests(200):
        seen[kind] += kind is not None
        rank = float(seen[kind] * len(prompt)) if policy == "rank" else None
        with cache.add_sequence(prompt, rank=rank) as sequence:
            tokens, reused = tokens + len(prompt), reused + sequence.num_cached_tokens
            cache.commit(cache.prepare([sequence], len(prompt) - sequence.num_cached_tokens))
    return reused / tokens


def main() -> None:
    policies: tuple[Literal["lru", "rank"], ...] = ("lru", "rank")
    for policy in policies:
        print(f"{policy:4} {serve(policy):.0%} of the tokens reused")


if __name__ == "__main__":
    main()
