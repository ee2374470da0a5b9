"""Truncation inside sealed blocks on CUDA: the restored tokens, on the stream of the last step."""

import pytest

from pagecore import SwapSpace
from pagecore.errors import DeviceError
from tests.cuda.test_sealed_cache import HOST, Life, assert_alike


def test_cut_blocks_are_restored_as_on_the_host(cuda):
    """Two sequences in one call, one of which shares the block with a fork; then a swap and steps that seal again."""

    def life(kit, streams):
        one = Life(kit, num_blocks=[24, 24, 16])
        first, second = one.cache.add_sequence(range(100)), one.cache.add_sequence(range(200, 280))
        kept = [one.step([first, second], [70, 60], stream=streams[0])]
        fork = one.cache.fork(first)
        one.cache.truncate([first, second], [37, 21])
        assert [each.num_sealed_tokens for each in (first, second, fork)] == [32, 16, 48]
        kept.append(one.step([first, second, fork], [1, 3, 2], stream=streams[1]))
        one.cache.swap_out([first], SwapSpace(one.cache, num_blocks=[6, 6, 4]))
        kept.append(one.step([second], [40], stream=streams[0]))
        one.cache.swap_in([first])
        kept.append(one.step([first, second], [40, 1], stream=streams[1]))
        for stream in streams:
            if stream is not None:
                kit.runtime.synchronize(stream)
        one.note(first, second, fork)
        return one

    assert_alike(life(cuda, [cuda.stream(), cuda.stream()]), life(HOST, [None, None]))


def test_no_block_is_restored_in_a_capture(cuda):
    """Work that a truncation submits would run at each replay, and not now."""
    one, stream = Life(cuda), cuda.stream()
    sequence = one.cache.add_sequence(range(100))
    kept = one.step([sequence], [70], stream=stream)

    def attempt(captured):
        one.cache._parts.staging.stream = captured
        with pytest.raises(DeviceError, match="being captured"):
            one.cache.truncate(sequence, 37)
        one.cache._parts.staging.stream = stream
        assert (sequence.num_computed_tokens, sequence.num_sealed_tokens) == (70, 48)
        one.cache.check_invariants()

    cuda.capture(attempt)
    one.cache.truncate(sequence, 37)
    assert sequence.num_sealed_tokens == 32
    cuda.runtime.synchronize(stream)
    assert not kept[0].in_flight
