"""Device errors in the middle of a step: nothing has changed, and the next step succeeds."""

from __future__ import annotations

import numpy as np
import pytest

import pagecore
from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.cache.memory.store import Store
from pagecore.cache.staging import batch as uploads
from pagecore.cache.staging import tables
from pagecore.errors import DeviceError
from tests.cuda.caches import assert_device_tables, random_step, write_step
from tests.cuda.kit import Kit

LAYERS = [AttentionSpec(2, 8, dtype="float32", num_query_heads=4)]
LAYERS += [AttentionSpec(1, 16, 4, dtype="float16", num_query_heads=4, window=6)]


def refuse(*arguments, **options):
    raise DeviceError("the device is gone")


def make(cuda: Kit):
    return PagedKVCache(LAYERS, block_size=4, num_blocks=[20, 16], max_sequences=4, device=cuda.device)


def keys_of(cuda: Kit, cache, sequence):
    """Return the computed keys of every layer, with NaN for those that a window has released."""
    found = []
    for layer in range(2):
        blocks = cache._parts.tables.blocks(sequence.row, layer)
        rows = cuda.get(cache.key(layer))[blocks].astype(np.float32)
        rows[blocks == 0] = np.nan
        found.append(rows.reshape(-1, *rows.shape[2:])[: sequence.num_computed_tokens])
    return found


PLACES = [(tables, "scatter_entries"), (uploads, "pack_changes"), (uploads, "pack_pairs"), (Store, "copy")]


@pytest.mark.parametrize(("place", "name"), PLACES)
def test_blocks_that_a_failed_step_would_have_copied_are_held_and_intact(cuda, monkeypatch, place, name):
    cache = make(cuda)
    first, batch = cache.add_sequence(range(30)), cache.make_batch(4, 60)
    kept = write_step(cache, [first], 6, random_step(cuda, cache, 6))
    forks = [cache.fork(first), cache.fork(first)]
    before = cache.stats(), [cache._parts.tables.table(group).copy() for group in range(2)]
    keys = [keys_of(cuda, cache, one) for one in (first, *forks)]
    counts = [pool.ref_counts() for pool in cache._parts.tables.pools]
    with monkeypatch.context() as broken:
        broken.setattr(place, name, refuse)
        with pytest.raises(DeviceError, match="gone"):
            cache.prepare([first, *forks], [3, 1, 2], batch)
    assert (cache.stats(), batch.in_flight) == (before[0], False)
    assert batch.copied_blocks(0).shape == (0, 2)
    for group, table in enumerate(before[1]):
        np.testing.assert_array_equal(cache._parts.tables.table(group), table)
        np.testing.assert_array_equal(cache._parts.tables.pools[group].ref_counts(), counts[group])
    cache.check_invariants()
    for layer in range(2):
        assert (cuda.get(batch.group(layer).slot_mapping) == -1).all()

    cache.prepare([first, *forks], [3, 1, 2], batch)
    assert_device_tables(cuda, cache, batch)
    cache.commit(batch, [0, 0, 0])
    assert cache.stats().num_copied_blocks == 4
    assert len(batch.copied_blocks(0)) == 2
    assert cache.try_prepare([first, *forks], [20, 20, 20], batch) is None
    assert len(batch.copied_blocks(0)) == 0
    for sequence, expected in zip((first, *forks), keys, strict=True):
        for layer, found in enumerate(keys_of(cuda, cache, sequence)):
            np.testing.assert_array_equal(found, expected[layer])
    del kept


def test_a_sequence_whose_slots_cannot_be_uploaded_stays_and_its_step_goes_on(cuda, monkeypatch):
    """If it lost its blocks, the step would overwrite the data of their next owner."""
    cache = make(cuda)
    sequence, batch = cache.add_sequence(range(8)), cache.make_batch(1, 8)
    cache.prepare([sequence], 8, batch)
    with monkeypatch.context() as broken:
        broken.setattr(uploads.StagedBatch, "send_slots", refuse)
        with pytest.raises(DeviceError, match="gone"):
            cache.remove(sequence)
        with pytest.raises(DeviceError, match="gone"):
            cache.abandon(batch)
    assert (sequence.row, batch.in_flight, cache.stats().num_sequences) == (0, True, 1)
    cache.check_invariants()
    cache.remove(sequence)
    assert (sequence.row, cache.stats().num_sequences) == (-1, 0)
    for layer in range(2):
        assert (cuda.get(batch.group(layer).slot_mapping) == -1).all()
    cache.commit(batch)
    cache.check_invariants()


def halves(cuda: Kit, *shape, dtype="float16"):
    return cuda.put(np.full(shape, 7, dtype))


def call_of_two_kernels(cuda: Kit, op: str):
    """Return a call that needs two kernels, and the arrays that it writes."""
    ones, cache = halves(cuda, 3, 2, 8, dtype="float32"), halves(cuda, 6, 4, 2, 8)
    other = halves(cuda, 6, 4, 2, 8, dtype="float32")
    if op == "write_kv":
        slots = cuda.put(np.arange(3))
        return lambda: pagecore.write_kv(ones, ones, cache, other, slots), [cache, other]
    if op == "transfer_blocks":
        targets = [halves(cuda, 6, 4, 2, 8), halves(cuda, 6, 4, 2, 8)]
        return lambda: pagecore.transfer_blocks([cache, other], targets, [(1, 2)]), targets
    if op == "gather_blocks":
        out = [halves(cuda, 5, 2, 8), halves(cuda, 5, 2, 8)]
        return lambda: pagecore.gather_blocks([cache, other], [[1, 2]], [5], out=out), out
    query, out, blocks = halves(cuda, 41, 2, 64), halves(cuda, 41, 2, 64), halves(cuda, 6, 16, 2, 64)
    table, lens, begins = np.asarray([[1, 0, 0], [2, 3, 4]]), np.asarray([9, 40]), np.asarray([0, 1, 41])
    return lambda: pagecore.paged_attention(query, blocks, blocks, table, lens, cu_query_lens=begins, out=out), [out]


@pytest.mark.parametrize("op", ["write_kv", "transfer_blocks", "gather_blocks", "paged_attention"])
def test_a_call_whose_second_kernel_cannot_be_loaded_has_written_nothing(cuda, monkeypatch, op):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: a GPU has loaded the kernels in earlier tests")
    call, written = call_of_two_kernels(cuda, op)
    before = [cuda.get(array).copy() for array in written]
    load, asked = cuda.runtime.load, []

    def load_once(name, *arguments):
        asked.append(name)
        return load(name, *arguments) if len(asked) == 1 else refuse()

    monkeypatch.setattr(cuda.runtime, "load", load_once)
    with pytest.raises(DeviceError, match="gone"):
        call()
    assert len(asked) == 2
    assert cuda.runtime.launched == []
    for array, expected in zip(written, before, strict=True):
        np.testing.assert_array_equal(cuda.get(array), expected)
    monkeypatch.undo()
    call()
    assert len(cuda.runtime.launched) == 2


def test_the_destructor_of_a_space_that_cannot_wait_warns_and_does_not_raise(cuda, monkeypatch):
    cache = make(cuda)
    space = SwapSpace(cache, num_blocks=[9, 9])
    assert space._last_use is not None
    with monkeypatch.context() as broken:
        broken.setattr(type(space._last_use), "synchronize", refuse)
        with pytest.warns(ResourceWarning, match="a device may still copy to or from it: the device is gone"):
            space.__del__()
