"""Small caches, and what the tests do with them over and over."""

import numpy as np

from pagecore import (
    AttentionSpec,
    PagedKVCache,
)

SPEC = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)
WINDOWED = AttentionSpec(2, 8, dtype="float32", num_query_heads=4, window=6)


def make(layers=SPEC, **options):
    return PagedKVCache(layers, **{"block_size": 4, "num_blocks": 17, "max_sequences": 4} | options)


def advance(cache, sequences, counts, **options):
    batch = cache.prepare(sequences, counts, **options)
    cache.commit(batch)
    return batch


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
