"""Caches with events, and what their trees hold in the form of a mirror."""

import numpy as np

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec

BLOCK = 4
FULL = AttentionSpec(1, 8, dtype="float32", num_query_heads=1)
WIDE = AttentionSpec(2, 8, dtype="float32", num_query_heads=2)
WINDOWED = AttentionSpec(1, 8, dtype="float32", num_query_heads=1, window=6)
CHUNKED = AttentionSpec(1, 8, dtype="float32", num_query_heads=1, chunk=8)
STATE = StateSpec((Plane("state", (2,), "float32", per="sequence"),), chunk=8, interval=8)
MODELS = {
    "plain": ([FULL], {"num_blocks": 14}),
    "window": ([FULL, WINDOWED], {"num_blocks": [14, 12]}),
    "two plain and a window": ([WINDOWED, FULL, WIDE], {"num_blocks": [12, 14, 15]}),
    "chunk": ([FULL, CHUNKED], {"num_blocks": [14, 12]}),
    "state": ([FULL, STATE], {"num_blocks": 14, "num_states": 9}),
    "states alone": ([STATE], {"num_states": 9}),
}


def make(model="plain", **options):
    layers, sizes = MODELS[model]
    given = {"block_size": BLOCK, "max_sequences": 3, "device": "none", "max_tokens_per_sequence": 64}
    return PagedKVCache(layers, **given | sizes | options)


def compute(cache, tokens, **options):
    """Add a sequence, compute all of its tokens, and remove it."""
    sequence = cache.add_sequence(tokens, **options)
    count = len(tokens) - sequence.num_cached_tokens
    if count:
        cache.commit(cache.prepare([sequence], count))
    cache.remove(sequence)


def tree_of(cache):
    return cache._parts.prefix.tree


def contents(publisher):
    """Return (medium, group) -> {hash: hash of the block before} of everything that the publisher's trees hold."""
    held = {}
    for source in publisher._sources:
        for change in source.tree.list_contents().to_list():
            assert change.is_stored
            for group in source.groups[change.component]:
                blocks = held.setdefault((source.medium, group.group), {})
                blocks |= dict(zip(change.hashes, [change.parent, *change.hashes[:-1]], strict=True))
    return held


def state_of(mirror):
    return {place: mirror.blocks(*place) for place in mirror.places}


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()
