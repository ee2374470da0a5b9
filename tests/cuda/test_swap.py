"""Swap spaces of a cache on CUDA: blocks move to pinned memory and back, in stream order."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.errors import OutOfBlocks
from pagecore.storage.memory import registration
from tests.cuda.caches import block_bytes, poison, random_step, requests_of, write_step
from tests.cuda.kit import Kit

LAYERS = [AttentionSpec(2, 8, dtype="float32", num_query_heads=4)] * 2
LAYERS += [AttentionSpec(1, 16, 4, dtype="bfloat16", num_query_heads=2, window=6)]


def make(cuda: Kit, **options):
    sizes = {"block_size": 4, "num_blocks": [20, 14], "max_sequences": 4}
    return PagedKVCache(LAYERS, **sizes | options, device=cuda.device)


@pytest.mark.parametrize("layout", [None, "blockwise", "LBNHD"])
def test_swapped_blocks_come_back_bit_for_bit(cuda, layout):
    cache = make(cuda)
    space = SwapSpace(cache, num_blocks=[9, 9], layout=layout)
    first, second = cache.add_sequence(range(13)), cache.add_sequence(range(50, 58))
    write_step(cache, [first, second], [13, 8], random_step(cuda, cache, 21))
    fork = cache.fork(first)
    write_step(cache, [fork], 2, random_step(cuda, cache, 2, seed=1))
    cuda.runtime.synchronize(0)
    before = {sequence: block_bytes(cuda, cache, sequence) for sequence in (first, second, fork)}
    cache.swap_out([first, fork], space)
    cache.check_invariants()
    cuda.runtime.synchronize(0)
    poison(cuda, cache)
    cache.swap_in([fork, first])
    cache.check_invariants()
    cuda.runtime.synchronize(0)
    assert {sequence: block_bytes(cuda, cache, sequence) for sequence in before} == before


def test_a_space_of_another_dtype_rounds_its_numbers(cuda):
    cache = PagedKVCache(AttentionSpec(2, 8, dtype="float32"), block_size=4, num_blocks=9, device=cuda.device)
    space = SwapSpace(cache, num_blocks=5, dtype="bfloat16")
    sequence = cache.add_sequence(range(8))
    write_step(cache, [sequence], 8, random_step(cuda, cache, 8))
    cuda.runtime.synchronize(0)
    row = cache._parts.tables.blocks(sequence.row)
    before = cuda.get(cache.key(0))[row]
    cache.swap_out(sequence, space)
    cache.swap_in(sequence)
    cuda.runtime.synchronize(0)
    after = cuda.get(cache.key(0))[cache._parts.tables.blocks(sequence.row)]
    np.testing.assert_allclose(after, before, rtol=2**-8)
    assert (after != before).any()


def test_swapping_runs_on_the_stream_of_the_last_step_without_waiting(cuda):
    cache, stream = make(cuda, prefix_cache=False), cuda.stream()
    space = SwapSpace(cache, num_blocks=[9, 9])
    sequence, other = cache.add_sequence(range(13)), cache.add_sequence(range(50, 61))
    arrays, others = random_step(cuda, cache, 13), random_step(cuda, cache, 11, seed=1)
    kept = [write_step(cache, [sequence], 13, arrays, stream)]
    cuda.runtime.synchronize(stream)
    before = block_bytes(cuda, cache, sequence)
    spent = requests_of(cuda, lambda: cache.swap_out(sequence, space))
    kept.append(write_step(cache, [other], 11, others, stream))  # into the blocks that the swap has freed
    cache.remove(other)
    spent |= requests_of(cuda, lambda: cache.swap_in(sequence))
    assert not {"synchronizes", "event_synchronizes"} & set(spent)
    cuda.runtime.synchronize(stream)
    assert block_bytes(cuda, cache, sequence) == before


def test_a_large_space_is_registered_in_chunks(cuda, monkeypatch):
    monkeypatch.setattr(registration, "CHUNK_BYTES", 4096)
    cache = make(cuda)
    before = cuda.runtime.counts["registrations"] if cuda.is_emulated else 0
    space = SwapSpace(cache, num_blocks=[9, 9])
    if cuda.is_emulated:
        assert cuda.runtime.counts["registrations"] > before + 2
    sequence = cache.add_sequence(range(13))
    write_step(cache, [sequence], 13, random_step(cuda, cache, 13))
    bytes_before = block_bytes(cuda, cache, sequence)
    cache.swap_out(sequence, space)
    cache.swap_in(sequence)
    assert block_bytes(cuda, cache, sequence) == bytes_before
    del space
    gc.collect()
    if cuda.is_emulated:
        assert cuda.runtime.counts["registrations"] == before


def test_a_swap_out_without_space_changes_nothing(cuda):
    cache = make(cuda)
    space = SwapSpace(cache, num_blocks=[3, 3])
    sequence = cache.add_sequence(range(13))
    write_step(cache, [sequence], 13, random_step(cuda, cache, 13))
    before = cache.stats()
    with pytest.raises(OutOfBlocks):
        cache.swap_out(sequence, space)
    assert (cache.stats(), sequence.is_swapped) == (before, False)


def test_a_space_may_be_deleted_during_a_swap_in(cuda):
    cache = make(cuda)
    space = SwapSpace(cache, num_blocks=[9, 9])
    sequence = cache.add_sequence(range(13))
    write_step(cache, [sequence], 13, random_step(cuda, cache, 13))
    before = block_bytes(cuda, cache, sequence)
    cache.swap_out(sequence, space)
    cache.swap_in(sequence)
    del space
    gc.collect()
    cuda.runtime.synchronize(0)
    assert block_bytes(cuda, cache, sequence) == before
