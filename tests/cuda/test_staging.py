"""Uploads of a cache on CUDA: tables and batches on the device equal those of the host at all times."""

from __future__ import annotations

import gc
from contextlib import suppress

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.cache.staging import batch as uploads
from pagecore.cache.staging import tables
from pagecore.errors import DeviceError, OutOfBlocks, ShapeError, UnsupportedOption
from tests.cuda.caches import assert_device_batch, assert_device_tables, requests_of
from tests.cuda.kit import Kit

FULL = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)
WINDOWED = AttentionSpec(1, 16, 4, dtype="float16", num_query_heads=4, window=6)
LAYERS = [FULL, WINDOWED, FULL]


def make(cuda: Kit, **options):
    sizes = {"block_size": 4, "num_blocks": [40, 30], "max_sequences": 6}
    return PagedKVCache(LAYERS, **sizes | options, device=cuda.device)


class Life:
    """A cache and random operations on it that change its tables."""

    def __init__(self, cuda: Kit, seed: int, **options) -> None:
        self.cuda = cuda
        self.random = np.random.default_rng(seed)
        self.cache = make(cuda, **options)
        self.batches = [self.cache.make_batch(6, 60), self.cache.make_batch(4, 60)]
        self.sequences = []

    def some(self, most):
        count = int(self.random.integers(1, min(most, len(self.sequences)) + 1))
        return [self.sequences[i] for i in self.random.permutation(len(self.sequences))[:count]]

    def add(self):
        if len(self.sequences) < 6:
            # Few distinct prompts, so that prefixes are reused.
            self.sequences.append(self.cache.add_sequence(np.arange(self.random.integers(0, 30)) // 9))

    def fork(self):
        if 0 < len(self.sequences) < 6:
            self.sequences.append(self.cache.fork(self.some(1)[0]))

    def reorder(self):
        sequences = self.some(4)
        self.cache.reorder(sequences, [self.some(1)[0] for _ in sequences])

    def truncate(self):
        (sequence,) = self.some(1)
        with suppress(UnsupportedOption):
            self.cache.truncate(sequence, int(self.random.integers(0, sequence.num_tokens + 1)))

    def remove(self):
        (sequence,) = self.some(1)
        self.cache.remove(sequence)
        self.sequences.remove(sequence)

    def step(self):
        batch = self.batches[self.random.integers(2)]
        sequences = self.some(batch.max_sequences)
        counts = self.random.integers(0, 15, len(sequences))
        with suppress(OutOfBlocks, ShapeError):
            self.cache.prepare(sequences, counts, batch)
        if not batch.in_flight:
            return
        assert_device_tables(self.cuda, self.cache, batch)
        fate = self.random.integers(8)
        if fate == 0:
            self.cache.abandon(batch)
            assert_device_batch(self.cuda, batch)
        elif fate == 1:
            self.cache.commit(batch, self.random.integers(0, counts + 1))
        else:
            if fate == 2:
                gone = sequences[self.random.integers(len(sequences))]
                self.cache.remove(gone)
                self.sequences.remove(gone)
                assert_device_batch(self.cuda, batch)
            self.cache.commit(batch)
        self.cache.append_tokens(
            sequences := [s for s in sequences if s in self.sequences and s.num_tokens < s.num_computed_tokens],
            [[1] * (s.num_computed_tokens - s.num_tokens) for s in sequences],
        )

    def live(self, steps):
        calls = [self.add, self.fork, self.reorder, self.truncate, self.remove, *[self.step] * 5]
        for _ in range(steps):
            if not self.sequences:
                self.add()
            calls[self.random.integers(len(calls))]()
        self.cache.check_invariants()


@pytest.mark.parametrize("seed", range(4))
def test_tables_and_batches_on_the_device_follow_those_of_the_host(cuda, seed):
    Life(cuda, seed, index_dtype=["int64", "int32"][seed % 2]).live(60)


@pytest.mark.parametrize("spare", [0, 3])
def test_more_changes_than_a_batch_holds_are_uploaded_in_rounds(cuda, monkeypatch, spare):
    monkeypatch.setattr(uploads, "SPARE_ENTRIES", 1 + spare)
    monkeypatch.setattr(uploads, "usual_changes", lambda tables, buffers: 0)
    Life(cuda, 7).live(30)


def test_a_new_batch_is_padding_on_the_device_too(cuda):
    assert_device_batch(cuda, make(cuda).make_batch(3, 9))


def test_arrays_of_a_batch_keep_their_addresses(cuda):
    cache = make(cuda)
    sequence, batch = cache.add_sequence(range(30)), cache.make_batch(2, 9)
    arrays = [batch.rows, batch.query_lens, batch.cu_query_lens, batch.seq_lens, batch.positions]
    arrays += [batch.group(layer).slot_mapping for layer in range(3)] + [batch.group(0).block_table, cache.row_lengths]
    assert {array.device for array in arrays} == {"cuda:0"}
    assert batch.group(1).block_table is cache.block_table(1)
    before = [array.pointer for array in arrays]
    assert all(pointer % 64 == 0 for pointer in before[:8])
    plans = [batch.group(layer).plan.cuda.address for layer in range(3)]
    for count in (1, 9, 2):
        cache.commit(cache.prepare([sequence], count, batch))
    assert [array.pointer for array in arrays] == before
    assert [batch.group(layer).plan.cuda.address for layer in range(3)] == plans


def test_a_warm_step_is_one_copy_and_one_kernel_without_waiting(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    cache = make(cuda)
    sequences, batch = [cache.add_sequence(range(20)) for _ in range(3)], cache.make_batch(4, 40)
    cache.commit(cache.prepare(sequences, 7, batch))
    for _ in range(6):
        spent = requests_of(cuda, lambda: cache.commit(cache.prepare(sequences, [1, 0, 2], batch)))
        # The host waits for the copy of three steps ago if the device is that late.
        assert spent.pop("event_synchronizes", 0) <= 1
        assert spent == {"copies": 1, "records": 1, "launches": 1}
    cache.prepare(sequences, 1, batch)
    assert_device_tables(cuda, cache, batch)


def test_steps_that_grow_one_by_one_allocate_seldom_and_wait_for_nothing(cuda):
    """Each step without `out=` has a batch of its size; its staging memory grows by powers of two."""
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    cache = make(cuda, num_blocks=40, max_sequences=32)
    sequences, stream = [cache.add_sequence([number]) for number in range(32)], cuda.stream()
    cuda.runtime.streams.deferred = True

    def ramp():
        for count in range(1, 33):
            cache.abandon(cache.prepare(sequences[:count], 1, stream=stream))

    spent = requests_of(cuda, ramp)
    assert spent["pinned_allocations"] <= 3 * 4  # memory of three slots, of which the last is less than 16 of the first
    # A slot is taken again after its copy of three copies ago.
    assert spent["event_synchronizes"] <= spent["copies"] - 3
    batch = cache.prepare(sequences, 1, stream=stream)
    assert_device_tables(cuda, cache, batch, stream)


def test_the_host_may_run_ahead_and_each_step_sees_its_own_arrays(cuda):
    """Ten steps are submitted before the host waits; each copies the arrays that it saw, on the device."""
    cache, stream = make(cuda), cuda.stream()
    sequences, batch = [cache.add_sequence(range(30)) for _ in range(2)], cache.make_batch(2, 8)
    names = ["seq_lens", "positions", "cu_query_lens"]
    seen, expected = [], []
    for i in range(10):
        cache.prepare(sequences, [1 + i % 3, 1], batch, stream=stream)
        arrays = [getattr(batch, name) for name in names] + [batch.group(1).slot_mapping, cache.block_table(1)]
        host = [getattr(batch.host, name) for name in names] + [batch.host.slot_mappings[1]]
        seen.append([cuda.empty(array.shape, array.dtype) for array in arrays])
        for array, kept in zip(arrays, seen[-1], strict=True):
            cuda.runtime.copy(kept.pointer, array.pointer, array.nbytes, stream)
        expected.append([array.numpy().copy() for array in host] + [cache._parts.tables.table(1).copy()])
        cache.commit(batch)
    cuda.runtime.synchronize(stream)
    for found, wanted in zip(seen, expected, strict=True):
        for array, numbers in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(cuda.get(array), numbers)


def test_a_step_is_uploaded_on_the_stream_of_prepare(cuda):
    cache, stream = make(cuda), cuda.stream()
    sequence, batch = cache.add_sequence(range(8)), cache.make_batch(2, 8)
    if cuda.is_emulated:
        cuda.runtime.streams.deferred = True
    cache.prepare([sequence], 8, batch, stream=stream)
    if cuda.is_emulated:
        assert (cuda.get(batch.group(0).slot_mapping) == -1).all(), "stream 0 is not what the step was given to"
    assert_device_tables(cuda, cache, batch, stream)
    cache.abandon(batch)
    if cuda.is_emulated:
        assert (cuda.get(batch.group(0).slot_mapping) >= 0).all(), "it is undone in the order of its own stream"
    cuda.runtime.synchronize(stream)
    assert_device_batch(cuda, batch)


def test_the_default_stream_is_the_current_one(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: its current stream can be set")
    cache, stream = make(cuda), cuda.stream()
    sequence, batch = cache.add_sequence(range(8)), cache.make_batch(2, 8)
    cuda.runtime.streams.deferred = True
    cuda.runtime.stream = stream
    cache.prepare([sequence], 8, batch)
    assert (cuda.get(batch.group(0).slot_mapping) == -1).all()
    assert_device_tables(cuda, cache, batch, stream)


def test_a_new_batch_may_be_used_on_any_stream_at_once(cuda):
    cache, stream = make(cuda), cuda.stream()
    sequence, batch = cache.add_sequence(range(8)), cache.make_batch(2, 8)
    cache.prepare([sequence], 8, batch, stream=stream)
    assert_device_tables(cuda, cache, batch, stream)


def test_a_cache_may_be_deleted_during_its_last_step(cuda):
    cache = make(cuda)
    batch = cache.prepare([cache.add_sequence(range(8))], 8)
    del cache, batch
    gc.collect()
    cuda.runtime.synchronize(0)


@pytest.mark.parametrize("wrong", [-1, "now", 1.5, object()])
def test_an_invalid_stream_is_refused_before_blocks_are_taken(cuda, wrong):
    cache = make(cuda)
    sequence, batch = cache.add_sequence(range(8)), cache.make_batch(2, 8)
    before = cache.stats()
    with pytest.raises(UnsupportedOption, match="stream"):
        cache.prepare([sequence], 8, batch, stream=wrong)
    assert (cache.stats(), batch.in_flight) == (before, False)


def test_a_step_cannot_be_prepared_as_part_of_a_graph(cuda):
    cache = make(cuda)
    sequence, batch = cache.add_sequence(range(8)), cache.make_batch(2, 8)
    before = cache.stats()

    def prepare(stream):
        with pytest.raises(DeviceError, match="captured"):
            cache.prepare([sequence], 8, batch, stream=stream)

    cuda.capture(prepare)
    assert (cache.stats(), batch.in_flight) == (before, False)


def test_a_failed_upload_takes_nothing_and_the_next_one_sends_everything(cuda, monkeypatch):
    cache = make(cuda)
    sequences, batch = [cache.add_sequence(range(20)) for _ in range(3)], cache.make_batch(4, 40)
    cache.commit(cache.prepare(sequences, 9, batch))
    cache.remove(sequences.pop())
    before = cache.stats()

    def refuse(*arguments):
        raise DeviceError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(tables, "scatter_entries", refuse)
        with pytest.raises(DeviceError, match="gone"):
            cache.prepare(sequences, 5, batch)
    assert (cache.stats(), batch.in_flight) == (before, False)
    assert_device_batch(cuda, batch)
    cache.prepare(sequences, 5, batch)
    assert_device_tables(cuda, cache, batch)


def test_batches_of_just_the_right_size_are_made_for_the_stream(cuda):
    cache, stream = make(cuda), cuda.stream()
    sequences = [cache.add_sequence(range(30)) for _ in range(2)]
    for count in (9, 1, 4):
        batch = cache.prepare(sequences, count, stream=stream)
        assert_device_tables(cuda, cache, batch, stream)
        cache.commit(batch)
        assert (batch.max_sequences, batch.max_tokens) == (2, 2 * count)


def test_the_plans_of_a_step_are_sent_with_it(cuda):
    """Each of the two groups has a plan, equal to that of the planner for these lengths."""
    cache = make(cuda)
    sequences, batch = [cache.add_sequence(range(40)) for _ in range(2)], cache.make_batch(2, 40)
    for counts in ([17, 3], [1, 1]):
        cache.prepare(sequences, counts, batch)
        for layer in range(2):
            plan = batch.group(layer).plan
            assert plan.num_sequences == 2
            assert plan.num_items >= 2
            head = np.zeros(8, np.int32)
            cuda.runtime.copy(head.ctypes.data, plan.cuda.address, head.nbytes, 0)
            cuda.runtime.synchronize(0)
            assert (head[0], tuple(head[1:3])) == (plan.num_sequences, plan.cuda.num_items)
        cache.commit(batch)
