"""Markers in the blocks of sequences, and the values that are found there."""

import numpy as np

from pagecore import KVLayout
from pagecore.cache.swap._swap import stored_blocks
from tests.cache.caches import SPEC, make

LAYOUTS = ["layerwise", "blockwise", KVLayout("blockwise", "NHD"), "BNHD", "BHND", "CBNHD", "LBNHD", "NBHD"]
MARKERS = {"a": 3.0, "b": 5.0}


def marked_step(cache, sequences, counts, marker, **options):
    """Prepare a step and write a marker to every plane of its slots."""
    batch = cache.prepare(sequences, counts, **options)
    mark(cache, batch, marker)
    return batch


def mark(cache, batch, marker, tokens=slice(None)):
    """Write a marker to the slots of some tokens of a step, in every plane of every layer."""
    for group, pool in enumerate(cache._parts.store.pools):
        slots = np.asarray(batch.host.slot_mappings[group])[: batch.num_tokens][tokens]
        slots = slots[slots >= 0]
        for plane in pool.planes():
            array = plane.numpy()
            if array.shape[1:2] == (cache.block_size,):
                array[slots // cache.block_size, slots % cache.block_size] = marker
            else:
                array[slots // cache.block_size] = marker


def compute(cache, sequences, counts, marker, **options):
    cache.commit(marked_step(cache, sequences, counts, marker, **options))


def numbers_of(cache, sequence):
    """Return all values in all slots of a sequence's blocks, including spare ones, in every plane and layer."""
    if sequence.is_swapped:
        pools, rows = sequence.swap_space.kv_pools, stored_blocks(sequence)
    else:
        tables = [cache._parts.tables.blocks(sequence.row, group) for group in range(cache.num_groups)]
        pools, rows = cache._parts.store.pools, tables
    found = set()
    for pool, row in zip(pools, rows, strict=True):
        for plane in pool.planes():
            found |= set(np.unique(plane.numpy()[row[row != 0]].astype(np.float64)).tolist())
    return found


def numbers_in_flight(cache, sequence, count):
    """Return the values in a sequence's blocks after a step has taken blocks and before it writes."""
    batch = cache.prepare([sequence], count)
    found = numbers_of(cache, sequence)
    assert batch.in_flight
    return found


def dirty(layers=SPEC, *, tokens=16, **options):
    """Return a cache whose free blocks a removed sequence of another namespace has filled with a marker."""
    cache = make(layers, **{"scrub": True, "num_blocks": 9} | options)
    sequence = cache.add_sequence(range(tokens), namespace="a")
    compute(cache, [sequence], tokens, MARKERS["a"])
    assert numbers_of(cache, sequence) == {MARKERS["a"]}
    cache.remove(sequence)
    cache.clear_prefix_cache()
    return cache
