"""Streams of a cache on CUDA: a step waits for the stream of the last one; streams under capture are refused."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.arrays.tensors import streams
from pagecore.errors import DeviceError
from tests.cuda.caches import (
    assert_device_batch,
    assert_device_tables,
    block_bytes,
    random_step,
    requests_of,
    write_step,
)
from tests.cuda.kit import Kit

SPEC = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)


def make(cuda: Kit, **options):
    sizes = {"num_layers": 2, "block_size": 4, "num_blocks": 20, "max_sequences": 4}
    return PagedKVCache(SPEC, **sizes | options, device=cuda.device)


def refused(call):
    """Wrap a call for `Kit.capture`: it must raise because its stream is being captured."""

    def attempt(stream):
        with pytest.raises(DeviceError, match="captured"):
            call(stream)

    return attempt


def test_a_prepare_without_blocks_keeps_the_stream_of_the_cache(cuda):
    cache, stream, other = make(cuda), cuda.stream(), cuda.stream()
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(13))
    arrays = random_step(cuda, cache, 13)
    cuda.runtime.synchronize(0)
    kept = write_step(cache, [sequence], 13, arrays, stream)
    assert cache.try_prepare([sequence, cache.add_sequence([])], [60, 60], stream=other) is None
    cache.swap_out(sequence, space)
    cuda.runtime.synchronize(stream)
    cache.swap_in(sequence)
    cuda.runtime.synchronize(stream)
    found = cuda.get(cache.key(0))[cache._parts.tables.blocks(sequence.row)].reshape(-1, 2, 8)[:13]
    np.testing.assert_array_equal(found, cuda.get(arrays[0][0]))
    assert not kept.in_flight


def test_a_step_on_another_stream_waits_for_the_last_step(cuda):
    """The next step reuses the blocks of a removed sequence only after the last step has read them."""
    cache, stream, other = make(cuda, num_blocks=6, layout="LBNHD"), cuda.stream(), cuda.stream()
    first, batch = cache.add_sequence(range(20)), cache.make_batch(2, 20)
    arrays, others = random_step(cuda, cache, 20), random_step(cuda, cache, 20, seed=1)
    cuda.runtime.synchronize(0)
    cache.prepare([first], 20, batch, stream=stream)
    cache.write(0, *arrays[0], batch, stream=stream)
    seen = cuda.empty(cache.key(0).shape, "float32")
    cuda.runtime.copy(seen.pointer, cache.key(0).pointer, seen.nbytes, stream)
    cache.commit(batch)
    cache.remove(first)
    second = cache.add_sequence(range(30, 50))
    cache.prepare([second], 20, batch, stream=other)
    cache.write(0, *others[0], batch, stream=other)
    assert_device_tables(cuda, cache, batch, other)
    cuda.runtime.synchronize(stream)
    found = np.sort(cuda.get(seen)[1:].reshape(20, -1), axis=0)
    np.testing.assert_array_equal(found, np.sort(cuda.get(arrays[0][0]).reshape(20, -1), axis=0))


@pytest.mark.parametrize("ends", ["abandon", "remove", "collect"])
def test_blocks_of_an_undone_step_are_reused_after_its_pass(cuda, ends):
    """The pass is submitted after a step on another stream was prepared; a third step takes its blocks there."""
    cache, stream, other = make(cuda, num_blocks=7, layout="LBNHD"), cuda.stream(), cuda.stream()
    first, second, third = (cache.add_sequence(range(begin, begin + 20)) for begin in (0, 30, 60))
    batches = [cache.make_batch(1, 20) for _ in range(3)]
    arrays, others = random_step(cuda, cache, 20), random_step(cuda, cache, 20, seed=1)
    cuda.runtime.synchronize(0)
    if cuda.is_emulated:
        cuda.runtime.streams.deferred = True
    cache.prepare([first], 20, batches[0], stream=stream)
    cache.prepare([second], 4, batches[1], stream=other)
    cache.write(0, *arrays[0], batches[0], stream=stream)
    cache.commit(batches[1])
    if ends == "abandon":
        cache.abandon(batches[0])
    elif ends == "remove":
        cache.remove(first)
    else:
        batches[0] = None
        gc.collect()
    cache.prepare([third], 20, batches[2], stream=other)
    cache.write(0, *others[0], batches[2], stream=other)
    cache.commit(batches[2])
    cuda.runtime.synchronize(other)
    cuda.runtime.synchronize(stream)
    found = cuda.get(cache.key(0))[cache._parts.tables.blocks(third.row)].reshape(-1, 2, 8)[:20]
    np.testing.assert_array_equal(found, cuda.get(others[0][0]))


def test_a_step_on_the_same_stream_waits_for_nothing(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    cache, stream = make(cuda), cuda.stream()
    sequence, batch = cache.add_sequence(range(8)), cache.make_batch(1, 4)
    cache.commit(cache.prepare([sequence], 4, batch, stream=stream))
    before = cuda.runtime.counts["waits"]
    cache.commit(cache.prepare([sequence], 4, batch, stream=stream))
    assert cuda.runtime.counts["waits"] == before
    cuda.runtime.synchronize(stream)


def test_a_step_cannot_go_on_from_a_stream_that_is_being_captured(cuda):
    cache, other = make(cuda), cuda.stream()
    sequence, batch = cache.add_sequence(range(8)), cache.make_batch(1, 4)

    def attempt(stream):
        cache._parts.staging.stream = stream  # as if it were the stream of the last step
        before = cache.stats()
        refused(lambda _: cache.prepare([sequence], 4, batch, stream=other))(stream)
        assert (cache.stats(), batch.in_flight) == (before, False)

    cuda.capture(attempt)
    cache._parts.staging.stream = 0


@pytest.mark.parametrize("how", ["abandon", "remove", "swap out", "swap in"])
def test_no_operation_of_a_cache_begins_in_a_capture(cuda, how):
    """Work that undoes a step would run at each replay of the graph, and not now."""
    cache = make(cuda)
    space = SwapSpace(cache, num_blocks=9)
    sequence, away = cache.add_sequence(range(8)), cache.add_sequence(range(8))
    write_step(cache, [away], 8, random_step(cuda, cache, 8))
    cache.swap_out(away, space)
    batch = cache.make_batch(1, 4)
    calls = {
        "abandon": lambda: cache.abandon(batch),
        "remove": lambda: cache.remove(sequence),
        "swap out": lambda: cache.swap_out(sequence, space),
        "swap in": lambda: cache.swap_in(away),
    }

    def attempt(stream):
        batch._step.staged._stream = cache._parts.staging.stream = stream  # as if it were the stream of the last step
        before = cache.stats()
        refused(lambda _: calls[how]())(stream)
        assert cache.stats() == before
        assert (batch.in_flight, sequence.row >= 0, away.is_swapped) == (not how.startswith("swap"), True, True)

    if not how.startswith("swap"):
        cache.prepare([sequence], 4, batch)
    cuda.capture(attempt)
    batch._step.staged._stream = cache._parts.staging.stream = 0
    calls[how]()
    cache.check_invariants()


def test_a_sequence_swapped_out_on_one_stream_is_restored_on_another(cuda):
    cache, stream, other = make(cuda), cuda.stream(), cuda.stream()
    space = SwapSpace(cache, num_blocks=9)
    sequence, next_one = cache.add_sequence(range(13)), cache.add_sequence(range(4))
    arrays, others = random_step(cuda, cache, 13), random_step(cuda, cache, 4)
    cuda.runtime.synchronize(0)
    kept = [write_step(cache, [sequence], 13, arrays, stream)]
    cuda.runtime.synchronize(stream)
    before = block_bytes(cuda, cache, sequence)
    cache.swap_out(sequence, space)
    kept.append(write_step(cache, [next_one], 4, others, other))
    cache.swap_in(sequence)
    cuda.runtime.synchronize(other)
    assert block_bytes(cuda, cache, sequence) == before


def test_the_host_runs_three_copies_ahead_before_it_waits(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it delays the work of a stream")
    cache, stream = make(cuda), cuda.stream()
    sequence, batch = cache.add_sequence(range(20)), cache.make_batch(1, 4)
    cuda.runtime.streams.deferred = True
    first, is_done = cuda.runtime.make_event(0), []
    for step in range(5):
        cache.commit(cache.prepare([sequence], 4, batch, stream=stream))
        if step == 0:
            first.record(stream)
        is_done.append(first.marker.passed)
    assert is_done == [False] * 4 + [True]
    cuda.runtime.synchronize(stream)


def test_an_importer_of_a_batch_on_another_stream_waits_for_the_step(cuda):
    cache, stream, other = make(cuda), cuda.stream(), cuda.stream()
    batch = cache.make_batch(1, 4)
    cache.prepare([cache.add_sequence(range(20))], 4, batch, stream=stream)
    capsules = [batch.positions.__dlpack__(stream=other), cache.block_table().__dlpack__(stream=other)]
    cuda.runtime.synchronize(other)
    assert cuda.get(batch.positions).tolist() == [0, 1, 2, 3]
    assert cuda.get(cache.block_table())[0, 0] == 1
    cuda.runtime.synchronize(stream)
    del capsules


def test_a_new_batch_is_padding_for_every_stream_at_once(cuda):
    cache, stream = make(cuda), cuda.stream()
    step = cache.prepare([cache.add_sequence(range(8))], 8, stream=stream)
    assert_device_batch(cuda, cache.make_batch(3, 9))
    cache.commit(step)


def test_a_batch_for_one_step_is_allocated_without_waiting(cuda):
    cache, stream = make(cuda), cuda.stream()
    sequence, kept = cache.add_sequence(range(20)), []
    kept.append(cache.make_batch())  # the staging ring allocates its buffers
    spent = requests_of(cuda, lambda: kept.append(cache.prepare([sequence], 4, stream=stream)))
    assert not {"synchronizes", "event_synchronizes", "pinned_allocations"} & set(spent)
    assert_device_tables(cuda, cache, kept[1], stream)


def test_a_write_without_a_stream_follows_the_framework_of_its_key(cuda, monkeypatch):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it delays the work of a stream")

    class Foreign:
        def __init__(self, tensor):
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__

    cache, stream = make(cuda), cuda.stream()
    key, value = random_step(cuda, cache, 4)[0]
    batch = cache.prepare([cache.add_sequence(range(20))], 4, stream=stream)
    monkeypatch.setattr(streams, "_current_stream", lambda given, device: stream if isinstance(given, Foreign) else 0)
    cuda.runtime.streams.deferred = True
    cache.write(0, Foreign(key), value, batch)
    assert not cuda.get(cache.key(0)).any(), "stream 0 is not that of the key"
    cuda.runtime.synchronize(stream)
    assert cuda.get(cache.key(0)).any()


def test_a_space_may_be_deleted_during_a_swap_out(cuda):
    cache, stream = make(cuda), cuda.stream()
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(13))
    kept = write_step(cache, [sequence], 13, random_step(cuda, cache, 13), stream)
    cache.swap_out(sequence, space)
    cache.remove(sequence)
    del space
    gc.collect()
    cuda.runtime.synchronize(stream)
    assert not kept.in_flight
