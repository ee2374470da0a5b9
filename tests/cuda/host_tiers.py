"""Caches with a host tier on CUDA, for tests."""

from __future__ import annotations

import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.tiers.host.tier import HostTier
from tests.cuda.caches import on_host, poison, random_step, write_step

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


def ended(tier):
    """Wait for the copies of a tier; return the backups that ended."""
    assert tier.drain()
    return tier.poll()


def back_up_and_forget(cuda, cache, tier, ids=range(13)):
    """Leave the blocks of a prompt in the host alone."""
    sequence, _ = computed(cuda, cache, ids)
    tier.backup(sequence)
    ended(tier)
    cache.remove(sequence)
    cache.clear_prefix_cache()


def defer(cuda):
    """Let streams run their work as late as possible from now on; skip the test on a GPU, which does not."""
    if not cuda.is_emulated:
        pytest.skip("only the emulator runs work as late as possible")
    cuda.runtime.finish()
    cuda.runtime.streams.deferred = True


def check_that_no_copy_is_left(cuda, cache, tier):
    """Overwrite both sides and let all work end: nothing may have changed."""
    host = tier.pool.memory.tensor("cpu").numpy()
    host[...] = 7
    poison(cuda, cache)
    before = planes_of(cuda, cache)
    cuda.runtime.finish()
    assert (host == 7).all()
    assert planes_of(cuda, cache) == before


def planes_of(cuda, cache):
    """Return the bytes of all planes of a cache."""
    return [plane.numpy().tobytes() for pool in cache._parts.store.pools for plane in on_host(cuda, pool).planes()]
