"""A step that a device refuses in the middle: everything is as it was before, and what comes next finds it so."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.cache import staging
from pagecore.cache.store import Store
from pagecore.errors import DeviceError
from tests.cuda.kit import Kit
from tests.cuda.staging import expect_alike
from tests.cuda.swap import fill, numbers

LAYERS = [AttentionSpec(2, 8, dtype="float32", num_query_heads=4)]
LAYERS += [AttentionSpec(1, 16, 4, dtype="float16", num_query_heads=4, window=6)]


def refuse(*arguments, **options):
    raise DeviceError("the device is gone")


def make(cuda: Kit):
    return PagedKVCache(LAYERS, block_size=4, num_blocks=[20, 16], max_sequences=4, device=cuda.device)


def keys_of(cuda: Kit, cache, sequence):
    """Computed keys of every layer, NaN where a window has let them go."""
    found = []
    for layer in range(2):
        blocks = cache._tables.blocks(sequence.row, layer)
        rows = cuda.get(cache.key(layer))[blocks].astype(np.float32)
        rows[blocks == 0] = np.nan
        found.append(rows.reshape(-1, *rows.shape[2:])[: sequence.num_computed_tokens])
    return found


PLACES = [(staging, "scatter_entries"), (staging, "pack_changes"), (staging, "pack_pairs"), (Store, "copy")]


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_blocks_that_a_refused_step_would_have_copied_are_held_and_whole(cuda, monkeypatch, place, name):
    cache = make(cuda)
    first, batch = cache.add_sequence(range(30)), cache.make_batch(4, 60)
    kept = fill(cache, [first], 6, numbers(cuda, cache, 6))
    forks = [cache.fork(first), cache.fork(first)]
    before = cache.stats(), [cache._tables.table(group).copy() for group in range(2)]
    keys = [keys_of(cuda, cache, one) for one in (first, *forks)]
    counts = [pool.ref_counts() for pool in cache._block_pools]
    with monkeypatch.context() as broken:
        broken.setattr(place, name, refuse)
        with pytest.raises(DeviceError, match="gone"):
            cache.prepare([first, *forks], [3, 1, 2], batch)
    assert (cache.stats(), batch.in_flight) == (before[0], False)
    assert batch.copied_blocks(0).shape == (0, 2)
    for group, table in enumerate(before[1]):
        np.testing.assert_array_equal(cache._tables.table(group), table)
        np.testing.assert_array_equal(cache._block_pools[group].ref_counts(), counts[group])
    cache.check_invariants()
    for layer in range(2):
        assert (cuda.get(batch.group(layer).slot_mapping) == -1).all()

    cache.prepare([first, *forks], [3, 1, 2], batch)
    expect_alike(cuda, cache, batch)
    cache.commit(batch, [0, 0, 0])
    assert cache.stats().num_copied_blocks == 4
    assert len(batch.copied_blocks(0)) == 2
    assert cache.try_prepare([first, *forks], [20, 20, 20], batch) is None
    assert len(batch.copied_blocks(0)) == 0
    for sequence, expected in zip((first, *forks), keys, strict=True):
        for layer, found in enumerate(keys_of(cuda, cache, sequence)):
            np.testing.assert_array_equal(found, expected[layer])
    del kept


def test_a_sequence_whose_slots_cannot_be_sent_is_removed_all_the_same(cuda, monkeypatch):
    """Its row may be another's from then on."""
    cache = make(cuda)
    sequence, batch = cache.add_sequence(range(8)), cache.make_batch(1, 8)
    cache.prepare([sequence], 8, batch)
    with monkeypatch.context() as broken:
        broken.setattr(staging.StagedBatch, "send_slots", refuse)
        with pytest.raises(DeviceError, match="gone"):
            cache.remove(sequence)
    assert (sequence.row, cache.stats().num_sequences) == (-1, 0)
    assert "removed" in repr(sequence)
    cache.commit(batch)
    cache.check_invariants()
