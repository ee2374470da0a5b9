"""Helpers of the swapping tests."""

import numpy as np

from pagecore import Plane
from tests.cache.caches import advance, normal


def fill(cache, sequences, counts, seed=0):
    """Run a step that writes random keys and values in every layer."""
    batch = cache.prepare(sequences, counts)
    for layer in range(cache.num_layers):
        key, value = (
            normal(batch.num_tokens, *side.shape[2:], seed=(seed, layer, part))
            for part, side in enumerate((cache.key(layer), cache.value(layer)))
        )
        cache.write(layer, key, value, batch)
    cache.commit(batch)


def content(cache, sequence):
    """Return the bytes of each block of a sequence in each plane of each layer; None for a hole."""
    tables = [cache.make_batch().group(layer).block_table.numpy() for layer in range(cache.num_layers)]
    count = -(-sequence.num_computed_tokens // cache.block_size)
    return [
        [plane.numpy()[block].tobytes() if block else None for block in table[sequence.row, :count]]
        for layer, table in enumerate(tables)
        for plane in (cache.key(layer), cache.value(layer))
    ]


def poison(cache, number=777.0):
    """Overwrite every free block of the cache and of its swap spaces, whose content must not be seen again."""
    stores = [(space.block_pools, space.kv_pools) for space in cache._parts.swap_spaces]
    for pools, kv_pools in ((cache._parts.tables.pools, cache._parts.store.pools), *stores):
        for pool, kv_pool in zip(pools, kv_pools, strict=True):
            free = pool.ref_counts() == 0
            free[0] = False
            for plane in kv_pool.planes():
                plane.numpy()[free] = poison_of(plane.numpy().dtype, number)


def poison_of(dtype, number):
    """Return a number in a dtype; for NaN -1 in an integer dtype."""
    return np.asarray(-1 if dtype.kind == "i" and np.isnan(number) else number).astype(dtype)


def occupied(cache):
    """Call `make`, and take some blocks, so that ids differ from those of a new pool."""
    sequence = cache.add_sequence(range(9))
    advance(cache, [sequence], 9)
    return sequence


class Labelled:
    """A user-defined spec: key and value, an int8 plane per token and a plane per block."""

    planes = (
        Plane("key", (2, 8), "float32"),
        Plane("value", (2, 4), "float16"),
        Plane("label", (6,), "int8"),
        Plane("scale", (3,), "float32", per="block"),
    )
    window = None
