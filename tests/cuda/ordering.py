"""Streams of a cache on CUDA: what goes from one to another waits, and what is captured is left alone."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.arrays import streams
from pagecore.errors import DeviceError
from tests.cuda.caches import requests_of
from tests.cuda.kit import Kit
from tests.cuda.staging import expect_alike, expect_staged
from tests.cuda.swap import content, fill, numbers

SPEC = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)


def make(cuda: Kit, **options):
    sizes = {"num_layers": 2, "block_size": 4, "num_blocks": 20, "max_sequences": 4}
    return PagedKVCache(SPEC, **sizes | options, device=cuda.device)


def refused(call):
    """A call for `Kit.capture` that must find itself refused."""

    def attempt(stream):
        with pytest.raises(DeviceError, match="captured"):
            call(stream)

    return attempt


def test_a_prepare_that_finds_no_blocks_leaves_the_stream_of_what_follows_as_it_was(cuda):
    cache, stream, other = make(cuda), cuda.stream(), cuda.stream()
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(13))
    arrays = numbers(cuda, cache, 13)
    cuda.runtime.synchronize(0)
    kept = fill(cache, [sequence], 13, arrays, stream)
    assert cache.try_prepare([sequence, cache.add_sequence([])], [60, 60], stream=other) is None
    cache.swap_out(sequence, space)
    cuda.runtime.synchronize(stream)
    cache.swap_in(sequence)
    cuda.runtime.synchronize(stream)
    found = cuda.get(cache.key(0))[cache._parts.tables.blocks(sequence.row)].reshape(-1, 2, 8)[:13]
    np.testing.assert_array_equal(found, cuda.get(arrays[0][0]))
    assert not kept.in_flight


def test_a_step_on_another_stream_waits_for_what_the_last_one_was_given(cuda):
    """Blocks of a sequence that went are written by the next step, and not before the last has read them."""
    cache, stream, other = make(cuda, num_blocks=6, layout="LBNHD"), cuda.stream(), cuda.stream()
    first, batch = cache.add_sequence(range(20)), cache.make_batch(2, 20)
    arrays, others = numbers(cuda, cache, 20), numbers(cuda, cache, 20, seed=1)
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
    expect_alike(cuda, cache, batch, other)
    cuda.runtime.synchronize(stream)
    found = np.sort(cuda.get(seen)[1:].reshape(20, -1), axis=0)
    np.testing.assert_array_equal(found, np.sort(cuda.get(arrays[0][0]).reshape(20, -1), axis=0))


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
        cache._parts.staging.stream = stream  # as if the last step had been given to it
        before = cache.stats()
        refused(lambda _: cache.prepare([sequence], 4, batch, stream=other))(stream)
        assert (cache.stats(), batch.in_flight) == (before, False)

    cuda.capture(attempt)
    cache._parts.staging.stream = 0


@pytest.mark.parametrize("how", ["abandon", "remove", "swap out", "swap in"])
def test_nothing_that_would_become_part_of_a_graph_is_begun(cuda, how):
    """Undone in a graph, a step would be undone as often as that is replayed, and now not at all."""
    cache = make(cuda)
    space = SwapSpace(cache, num_blocks=9)
    sequence, away = cache.add_sequence(range(8)), cache.add_sequence(range(8))
    fill(cache, [away], 8, numbers(cuda, cache, 8))
    cache.swap_out(away, space)
    batch = cache.make_batch(1, 4)
    calls = {
        "abandon": lambda: cache.abandon(batch),
        "remove": lambda: cache.remove(sequence),
        "swap out": lambda: cache.swap_out(sequence, space),
        "swap in": lambda: cache.swap_in(away),
    }

    def attempt(stream):
        batch._step.staged._stream = cache._parts.staging.stream = stream  # as if the last step had been given to it
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


def test_bytes_that_went_on_one_stream_come_back_on_another(cuda):
    cache, stream, other = make(cuda), cuda.stream(), cuda.stream()
    space = SwapSpace(cache, num_blocks=9)
    sequence, next_one = cache.add_sequence(range(13)), cache.add_sequence(range(4))
    arrays, others = numbers(cuda, cache, 13), numbers(cuda, cache, 4)
    cuda.runtime.synchronize(0)
    kept = [fill(cache, [sequence], 13, arrays, stream)]
    cuda.runtime.synchronize(stream)
    before = content(cuda, cache, sequence)
    cache.swap_out(sequence, space)
    kept.append(fill(cache, [next_one], 4, others, other))
    cache.swap_in(sequence)
    cuda.runtime.synchronize(other)
    assert content(cuda, cache, sequence) == before


def test_the_host_runs_three_copies_ahead_before_it_waits(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: its work can be kept back")
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


def test_who_takes_a_batch_over_on_another_stream_waits_for_the_step(cuda):
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
    expect_staged(cuda, cache.make_batch(3, 9))
    cache.commit(step)


def test_a_batch_of_one_step_is_made_without_waiting(cuda):
    cache, stream = make(cuda), cuda.stream()
    sequence, kept = cache.add_sequence(range(20)), []
    kept.append(cache.make_batch())  # has the ring reserve what it takes
    spent = requests_of(cuda, lambda: kept.append(cache.prepare([sequence], 4, stream=stream)))
    assert not {"synchronizes", "event_synchronizes", "pinned_allocations"} & set(spent)
    expect_alike(cuda, cache, kept[1], stream)


def test_a_write_without_a_stream_follows_the_framework_of_its_key(cuda, monkeypatch):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: its work can be kept back")

    class Foreign:
        def __init__(self, tensor):
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__

    cache, stream = make(cuda), cuda.stream()
    key, value = numbers(cuda, cache, 4)[0]
    batch = cache.prepare([cache.add_sequence(range(20))], 4, stream=stream)
    monkeypatch.setattr(streams, "_current_stream", lambda given, device: stream if isinstance(given, Foreign) else 0)
    cuda.runtime.streams.deferred = True
    cache.write(0, Foreign(key), value, batch)
    assert not cuda.get(cache.key(0)).any(), "stream 0 is not that of the key"
    cuda.runtime.synchronize(stream)
    assert cuda.get(cache.key(0)).any()


def test_a_space_may_go_while_blocks_are_on_their_way_there(cuda):
    cache, stream = make(cuda), cuda.stream()
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(13))
    kept = fill(cache, [sequence], 13, numbers(cuda, cache, 13), stream)
    cache.swap_out(sequence, space)
    cache.remove(sequence)
    del space
    gc.collect()
    cuda.runtime.synchronize(stream)
    assert not kept.in_flight
