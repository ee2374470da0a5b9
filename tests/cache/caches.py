"""Small caches, and helpers that many tests use."""

import numpy as np

from pagecore import AttentionSpec, KVLayout, PagedKVCache, StaticKVCache

SPEC = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)
WINDOWED = AttentionSpec(2, 8, dtype="float32", num_query_heads=4, window=6)


def make(layers=SPEC, **options):
    return PagedKVCache(layers, **{"block_size": 4, "num_blocks": 17, "max_sequences": 4} | options)


def make_static(spec=SPEC, **options):
    return StaticKVCache(spec, **{"num_layers": 3, "max_batch_size": 4, "max_length": 16} | options)


def stored(cache):
    """Return copies of the arrays of a static cache."""
    return cache.key_array.numpy().copy(), cache.value_array.numpy().copy()


class Planes:
    """A user-defined spec with any planes."""

    window = None

    def __init__(self, *planes):
        self.planes = planes


def advance(cache, sequences, counts, **options):
    batch = cache.prepare(sequences, counts, **options)
    cache.commit(batch)
    return batch


def learn(cache, twins, sequences, counts):
    """Append the planned ids of sequences, up to `counts` tokens past the computed ones, that the cache lacks."""
    missing = []
    for sequence, count in zip(sequences, counts, strict=True):
        twin = twins[sequence]
        end = max(twin.known, twin.computed + count)
        missing.append(twin.planned(end)[twin.known :])
        twin.known = end
    cache.append_tokens(sequences, missing)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def owned_memory(layers, layout, put=np.asarray, **options):
    """Return buffers for a cache with these options: a list for each group, filled with 0xFF bytes (NaNs)."""
    plain = PagedKVCache(layers, **options, device="none")
    order = layout if isinstance(layout, KVLayout) else KVLayout(layout)
    places = [
        order.bind(group.spec, group.num_layers, num_blocks, plain.block_size)
        for group, num_blocks in zip(plain._parts.groups, plain.num_blocks, strict=True)
    ]
    return [
        [put(np.full(place.buffer_nbytes(i), 0xFF, np.uint8)) for i in range(place.num_buffers)] for place in places
    ]
