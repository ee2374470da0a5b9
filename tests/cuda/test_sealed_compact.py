"""Compaction of sequences with sealed blocks on CUDA, against host caches that live the same life."""

import numpy as np
import pytest

from pagecore.errors import DeviceError
from tests.cuda.test_sealed_cache import HOST, Life, assert_alike


def test_kept_tokens_are_sealed_as_on_the_host(cuda):
    """Steps on two streams; a fork shares the blocks before."""

    def life(kit, streams):
        one = Life(kit, num_blocks=[24, 24, 12])
        first = one.cache.add_sequence(range(150))
        kept = [one.step([first], [90], stream=streams[0])]
        fork = one.cache.fork(first)
        one.cache.compact(first, [*range(4), *range(16, 32), *range(33, 80), 85, 89])
        assert (first.num_computed_tokens, first.num_sealed_tokens, fork.num_sealed_tokens) == (69, 48, 64)
        kept.append(one.step([first, fork], [3, 1], stream=streams[1]))
        one.cache.compact(fork, [[*range(40, 91)], [*range(51)], [*range(40, 91)]])
        kept.append(one.step([first, fork], [20, 2], stream=streams[0]))
        for stream in streams:
            if stream is not None:
                kit.runtime.synchronize(stream)
        one.note(first, fork)
        return one

    assert_alike(life(cuda, [cuda.stream(), cuda.stream()]), life(HOST, [None, None]))


def test_nothing_is_repacked_in_a_capture(cuda):
    one, stream = Life(cuda), cuda.stream()
    sequence = one.cache.add_sequence(range(100))
    kept = one.step([sequence], [70], stream=stream)
    tables = [one.cache._parts.tables.blocks(sequence.row, group).copy() for group in range(3)]

    def attempt(captured):
        one.cache._parts.staging.stream = captured
        with pytest.raises(DeviceError, match="being captured"):
            one.cache.compact(sequence, range(1, 60))
        one.cache._parts.staging.stream = stream

    cuda.capture(attempt)
    for group, before in enumerate(tables):
        np.testing.assert_array_equal(one.cache._parts.tables.blocks(sequence.row, group), before)
    one.cache.compact(sequence, range(1, 60))
    cuda.runtime.synchronize(stream)
    one.cache.check_invariants()
    assert not kept[0].in_flight
