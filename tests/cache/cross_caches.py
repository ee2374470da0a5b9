"""Caches with cross attention for tests, and the plain twin of their attention."""

import numpy as np

from pagecore import CrossSpec, PagedKVCache
from tests.cache.caches import SPEC, normal

CROSS = CrossSpec(2, 8, dtype="float32", num_query_heads=4)
LAYERS = [SPEC, CROSS]


def make(layers=LAYERS, **options):
    return PagedKVCache(layers, **{"block_size": 4, "num_blocks": [17, 9], "max_sequences": 4} | options)


def attention(query, keys, values, scale=None):
    """Attention of every query to all keys, in float64: the plain twin of a cross-attention layer."""
    if not len(keys):
        return np.zeros(query.shape)
    query, keys, values = (np.asarray(each, np.float64) for each in (query, keys, values))
    group = query.shape[1] // keys.shape[1]
    keys, values = (np.repeat(each, group, axis=1) for each in (keys, values))
    scores = np.einsum("qhd,khd->hqk", query, keys) * (query.shape[2] ** -0.5 if scale is None else scale)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=2, keepdims=True), values)


def encode(cache, sequence, count, seed, layer=1):
    """Run the first step of a sequence; return the encoder's keys and values."""
    keys, values = (
        normal(sequence.num_cross_tokens, 2, 8, seed=seed),
        normal(sequence.num_cross_tokens, 2, 8, seed=seed + 1),
    )
    batch = cache.prepare([sequence], count)
    cache.write(layer, keys, values, batch)
    cache.commit(batch)
    return keys, values


def expect_seen(cache, sequences, stored, layer=1, count=1):
    batch = cache.prepare(sequences, count)
    assert batch.cross.num_tokens == 0
    query = normal(count * len(sequences), 4, 8, seed=7)
    found = cache.attend(layer, query, batch)
    for i, (keys, values) in enumerate(stored):
        rows = slice(i * count, (i + 1) * count)
        np.testing.assert_allclose(found[rows], attention(query[rows], keys, values), rtol=0, atol=2e-6)
    cache.commit(batch)
