"""Small caches, and what the tests do with them over and over."""

import numpy as np

from pagecore import AttentionSpec, KVLayout, PagedKVCache, StaticKVCache

SPEC = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)
WINDOWED = AttentionSpec(2, 8, dtype="float32", num_query_heads=4, window=6)


def make(layers=SPEC, **options):
    return PagedKVCache(layers, **{"block_size": 4, "num_blocks": 17, "max_sequences": 4} | options)


def make_static(spec=SPEC, **options):
    return StaticKVCache(spec, **{"num_layers": 3, "max_batch_size": 4, "max_length": 16} | options)


def stored(cache):
    """Copies of all that a static cache holds."""
    return cache.key_array.numpy().copy(), cache.value_array.numpy().copy()


class Planes:
    """A spec of the user's own, with whatever planes."""

    window = None

    def __init__(self, *planes):
        self.planes = planes


def advance(cache, sequences, counts, **options):
    batch = cache.prepare(sequences, counts, **options)
    cache.commit(batch)
    return batch


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def owned_memory(layers, layout, put=np.asarray, **options):
    """Memory of the caller for a cache with these options: bytes of 0xFF, which are NaNs, in a list for each group."""
    plain = PagedKVCache(layers, **options, device="none")
    order = layout if isinstance(layout, KVLayout) else KVLayout(layout)
    places = [
        order.bind(group.spec, group.num_layers, num_blocks, plain.block_size)
        for group, num_blocks in zip(plain._parts.groups, plain.num_blocks, strict=True)
    ]
    return [
        [put(np.full(place.buffer_nbytes(i), 0xFF, np.uint8)) for i in range(place.num_buffers)] for place in places
    ]
