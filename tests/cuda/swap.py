"""Swap spaces of a cache on CUDA: blocks go to page-locked memory and come back, in the order of the stream."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.errors import OutOfBlocks
from tests.cuda.caches import on_host, poison, requests_of
from tests.cuda.kit import Kit

LAYERS = [AttentionSpec(2, 8, dtype="float32", num_query_heads=4)] * 2
LAYERS += [AttentionSpec(1, 16, 4, dtype="bfloat16", num_query_heads=2, window=6)]


def make(cuda: Kit, **options):
    sizes = {"block_size": 4, "num_blocks": [20, 14], "max_sequences": 4}
    return PagedKVCache(LAYERS, **sizes | options, device=cuda.device)


def numbers(cuda: Kit, cache, count, seed=0):
    """Random key and value of a step in every layer."""
    random = np.random.default_rng(seed)
    sides = [(cache.key(layer), cache.value(layer)) for layer in range(cache.num_layers)]
    return [[cuda.put(random.normal(size=(count, *s.shape[2:])).astype(np.float32)) for s in pair] for pair in sides]


def fill(cache, sequences, counts, arrays, stream=None):
    """A step that writes them; returns its batch, which must be kept until it is done."""
    batch = cache.prepare(sequences, counts, stream=stream)
    for layer, (key, value) in enumerate(arrays):
        cache.write(layer, key, value, batch, stream=stream)
    cache.commit(batch)
    return batch


def content(cuda: Kit, cache, sequence):
    """The bytes of each computed block of a sequence, by plane; None for a hole."""
    found = []
    for group, pool in enumerate(cache._parts.store.pools):
        row = cache._parts.tables.blocks(sequence.row, group)[: -(-sequence.num_computed_tokens // cache.block_size)]
        planes = [plane.numpy() for plane in on_host(cuda, pool).planes()]
        found += [[plane[block].tobytes() if block else None for block in row] for plane in planes]
    return found


@pytest.mark.parametrize("layout", [None, "blockwise", "LBNHD"])
def test_what_comes_back_is_what_went_bit_for_bit(cuda, layout):
    cache = make(cuda)
    space = SwapSpace(cache, num_blocks=[9, 9], layout=layout)
    first, second = cache.add_sequence(range(13)), cache.add_sequence(range(50, 58))
    fill(cache, [first, second], [13, 8], numbers(cuda, cache, 21))
    fork = cache.fork(first)
    fill(cache, [fork], 2, numbers(cuda, cache, 2, seed=1))
    cuda.runtime.synchronize(0)
    before = {sequence: content(cuda, cache, sequence) for sequence in (first, second, fork)}
    cache.swap_out([first, fork], space)
    cache.check_invariants()
    cuda.runtime.synchronize(0)
    poison(cuda, cache)
    cache.swap_in([fork, first])
    cache.check_invariants()
    cuda.runtime.synchronize(0)
    assert {sequence: content(cuda, cache, sequence) for sequence in before} == before


def test_a_space_may_round_to_another_dtype(cuda):
    cache = PagedKVCache(AttentionSpec(2, 8, dtype="float32"), block_size=4, num_blocks=9, device=cuda.device)
    space = SwapSpace(cache, num_blocks=5, dtype="bfloat16")
    sequence = cache.add_sequence(range(8))
    fill(cache, [sequence], 8, numbers(cuda, cache, 8))
    cuda.runtime.synchronize(0)
    row = cache._parts.tables.blocks(sequence.row)
    before = cuda.get(cache.key(0))[row]
    cache.swap_out(sequence, space)
    cache.swap_in(sequence)
    cuda.runtime.synchronize(0)
    after = cuda.get(cache.key(0))[cache._parts.tables.blocks(sequence.row)]
    np.testing.assert_allclose(after, before, rtol=2**-8)
    assert (after != before).any()


def test_swapping_goes_on_the_stream_of_the_last_step_and_the_host_waits_for_nothing(cuda):
    cache, stream = make(cuda, prefix_cache=False), cuda.stream()
    space = SwapSpace(cache, num_blocks=[9, 9])
    sequence, other = cache.add_sequence(range(13)), cache.add_sequence(range(50, 61))
    arrays, others = numbers(cuda, cache, 13), numbers(cuda, cache, 11, seed=1)
    kept = [fill(cache, [sequence], 13, arrays, stream)]
    cuda.runtime.synchronize(stream)
    before = content(cuda, cache, sequence)
    spent = requests_of(cuda, lambda: cache.swap_out(sequence, space))
    kept.append(fill(cache, [other], 11, others, stream))  # into the blocks that were given up
    cache.remove(other)
    spent |= requests_of(cuda, lambda: cache.swap_in(sequence))
    assert not {"synchronizes", "event_synchronizes"} & set(spent)
    cuda.runtime.synchronize(stream)
    assert content(cuda, cache, sequence) == before


def test_a_space_that_is_short_takes_nothing(cuda):
    cache = make(cuda)
    space = SwapSpace(cache, num_blocks=[3, 3])
    sequence = cache.add_sequence(range(13))
    fill(cache, [sequence], 13, numbers(cuda, cache, 13))
    before = cache.stats()
    with pytest.raises(OutOfBlocks):
        cache.swap_out(sequence, space)
    assert (cache.stats(), sequence.is_swapped) == (before, False)


def test_a_space_may_go_while_blocks_are_on_their_way(cuda):
    cache = make(cuda)
    space = SwapSpace(cache, num_blocks=[9, 9])
    sequence = cache.add_sequence(range(13))
    fill(cache, [sequence], 13, numbers(cuda, cache, 13))
    before = content(cuda, cache, sequence)
    cache.swap_out(sequence, space)
    cache.swap_in(sequence)
    del space
    gc.collect()
    cuda.runtime.synchronize(0)
    assert content(cuda, cache, sequence) == before
