"""Caches that hand sequences over, and the bytes that a sequence has in its cache."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.cache.memory.sealer import sealed_groups
from pagecore.cache.parts import parts_of
from pagecore.tiers.handover.errors import DeadlineExceeded
from pagecore.tiers.handover.imports import import_sequence

SPECS = [AttentionSpec(4, 8, dtype="float32"), AttentionSpec(4, 8, dtype="float32", window=24)]


def make(specs=SPECS, **options):
    return PagedKVCache(list(specs), **{"block_size": 8, "num_blocks": 40, "max_sequences": 8} | options)


def fill(cache, seed):
    """Write random bytes to every pool of a cache."""
    rng = np.random.default_rng(seed)
    store = parts_of(cache).store
    memory = [buffer.numpy() for pool in store.pools for buffer in pool.buffers]
    memory += [] if store.states is None else [plane.numpy() for plane in store.states.planes()]
    for array in memory:
        flat = array.reshape(-1).view(np.uint8)
        flat[:] = rng.integers(0, 256, flat.size, np.uint8)


def computed(cache, tokens, length=None, seed=0, **options):
    """Add a sequence whose bytes are those that the pools hold already."""
    sequence = cache.add_sequence(tokens, **options)
    advance(cache, sequence, (len(tokens) if length is None else length) - sequence.num_computed_tokens)
    return sequence


def advance(cache, sequence, count):
    """Compute `count` more tokens of a sequence with random bytes."""
    batch = cache.prepare([sequence], count)
    rng = np.random.default_rng([count, sequence.num_computed_tokens])
    store = parts_of(cache).store
    mappings = [(slots, batch.num_tokens) for slots in batch.host.slot_mappings]
    mappings += [] if batch.cross is None else [(slots, batch.cross.num_tokens) for slots in batch.cross.slot_mappings]
    for pool, (mapping, length) in zip(store.pools, mappings, strict=True):
        slots = mapping.numpy()[:length]
        for plane in (plane for plane in pool.planes() if plane.shape[1:2] == (cache.block_size,)):
            array = as_bytes(plane)
            array[slots // cache.block_size, slots % cache.block_size] = rng.integers(
                0, 256, (len(slots), *array.shape[2:]), np.uint8
            )
    cache.commit(batch)


def row_of(cache, sequence, group):
    """Return the blocks of a sequence in one group."""
    parts = parts_of(cache)
    if parts.groups[group].is_cross:
        if sequence.cross_row < 0:
            return np.empty(0, np.int32)
        return parts.cross.contents.tables.blocks(sequence.cross_row, group - len(parts.token_groups))
    return parts.tables.blocks(sequence.row, group)


def as_bytes(plane):
    """Return a plane as uint8; its last axis counts bytes."""
    return plane.numpy().view(np.uint8)


def content(cache, sequence):
    """Return the bytes of the tokens that each group holds, by (group, layer, plane): ``[tokens, ...]`` each."""
    parts = parts_of(cache)
    found = {}
    first = len(parts.token_groups)
    sealed = set(sealed_groups(parts.layers).values())
    for group, pool in enumerate(parts.store.pools):
        row, length = row_of(cache, sequence, group), sequence.num_computed_tokens
        if group in sealed:
            length = sequence.num_sealed_tokens
        if group >= first:
            length = sequence.num_cross_tokens if sequence.is_cross_written else 0
        tokens = np.arange(length)
        tokens = tokens[row[tokens // cache.block_size] != 0]
        found[group, "held"] = tokens
        for layer in range(pool.num_layers):
            for plane in pool.spec.planes:
                array = as_bytes(pool.plane(plane.name, layer))
                if plane.per == "block":
                    blocks = np.unique(tokens // cache.block_size)
                    found[group, layer, plane.name] = array[row[blocks]]
                else:
                    block = row[tokens // cache.block_size]
                    found[group, layer, plane.name] = array[block, tokens % cache.block_size]
    if parts.state.states is not None:
        slot = cache.state_slot(sequence)
        found["state"] = [as_bytes(plane)[slot] for plane in parts.store.states.planes()]
    return found


def assert_same(one, other, heads=None):
    """Compare the bytes of two sequences; `heads` selects those of `one` that `other` holds."""
    assert one.keys() == other.keys()
    for key, expected in one.items():
        if key == "state":
            for mine, theirs in zip(expected, other[key], strict=True):
                np.testing.assert_array_equal(mine, theirs)
            continue
        part = expected[:, heads] if heads is not None and expected.ndim == 3 else expected
        np.testing.assert_array_equal(part, other[key], err_msg=str(key))


def import_late(receiver, manifest, transport, is_reading):
    """Import until a deadline passes after `is_reading()`: on a busy machine, short ones pass before the first read."""
    deadline = 0.1
    while not is_reading():
        with pytest.raises(DeadlineExceeded):
            import_sequence(receiver, manifest, transport=transport, deadline=deadline)
        deadline *= 2
