"""Caches with a host tier on CUDA, for tests."""

from __future__ import annotations

from pagecore import (
    AttentionSpec,
    PagedKVCache,
)
from pagecore.tiers.host.tier import HostTier
from tests.cuda.caches import on_host, random_step, write_step

LAYERS = [AttentionSpec(2, 8, dtype="float32", num_query_heads=4)] * 2
LAYERS += [AttentionSpec(1, 16, 4, dtype="bfloat16", num_query_heads=2, window=6)]
WIDE = [AttentionSpec(8, 128, dtype="float32")]  # a plane of a block of 16 tokens has 64 KiB


def make(cuda, layers=LAYERS, **options):
    sizes = {"block_size": 4, "num_blocks": 20, "max_sequences": 4}
    return PagedKVCache(layers, **sizes | options, device=cuda.device)


def tier_of(cache, **options):
    tier = HostTier(cache, num_blocks=20, huge_pages=False, **options)
    assert tier.pool.memory.wait_registered(60)
    return tier


def computed(cuda, cache, ids, seed=0):
    sequence = cache.add_sequence(ids)
    left = sequence.num_tokens - sequence.num_computed_tokens
    return sequence, write_step(cache, [sequence], left, random_step(cuda, cache, left, seed=seed))


def planes_of(cuda, cache):
    """Return the bytes of all planes of a cache."""
    return [plane.numpy().tobytes() for pool in cache._parts.store.pools for plane in on_host(cuda, pool).planes()]
