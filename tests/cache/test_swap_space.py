"""SwapSpace: its size, memory, dtype, lifetime and counts."""

import gc
import weakref

import numpy as np
import pytest

from pagecore import (
    NotEnoughMemory,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.cache.state._state import hold
from pagecore.index import BlockPool
from tests.cache.caches import SPEC, WINDOWED, advance, make
from tests.cache.swaps import Labelled, content, fill, poison
from tests.together import together


def test_a_space_has_the_layout_of_the_cache_by_default():
    cache = make(layout="blockwise")
    orders = [SwapSpace(cache, num_blocks=9, layout=layout).kv_pools[0].layout.order for layout in (None, "layerwise")]
    assert orders == ["blockwise", "layerwise"]


def test_the_size_of_a_space_is_blocks_or_memory():
    cache = make([SPEC, WINDOWED])
    one = 4 * 2 * 8 * 4 * 2  # a block's key and value in one layer
    assert SwapSpace(cache, num_blocks=[5, 3]).num_blocks == (5, 3)
    assert SwapSpace(cache, num_blocks=np.int64(5)).num_blocks == (5, 5)
    space = SwapSpace(cache, memory=one * 14 + 1)
    assert (space.num_blocks, space.nbytes, space.num_available) == ((7, 7), one * 14, 6)
    halved = SwapSpace(cache, memory=one * 14, dtype="bfloat16")
    assert (halved.num_blocks, halved.nbytes) == ((14, 14), one * 14)


def test_a_space_may_store_a_narrower_dtype():
    cache = make()
    space = SwapSpace(cache, num_blocks=9, dtype="bfloat16")
    sequence = cache.add_sequence(range(8))
    fill(cache, [sequence], 8)
    expected = cache.key(0).numpy()[1:3].astype(space.kv_pools[0].key(0).numpy().dtype).astype(np.float32)
    cache.swap_out([sequence], space)
    poison(cache)
    cache.swap_in([sequence])
    blocks = cache.make_batch().group(0).block_table.numpy()[sequence.row, :2]
    assert (cache.key(0).numpy()[blocks] == expected).all()


@together(
    ("options", "error"),
    [
        ({}, ShapeError),
        ({"num_blocks": 5, "memory": "1MiB"}, ShapeError),
        ({"num_blocks": 1}, ShapeError),
        ({"num_blocks": [5, 5]}, ShapeError),
        ({"num_blocks": "many"}, ShapeError),
        ({"num_blocks": 2**31}, ShapeError),
        ({"memory": 100}, NotEnoughMemory),
        ({"memory": -1}, ShapeError),
        ({"num_blocks": 5, "layout": "rowwise"}, UnsupportedOption),
        ({"num_blocks": 5, "layout": 7}, UnsupportedOption),
        ({"num_blocks": 5, "dtype": "int8"}, UnsupportedDtype),
        ({"num_blocks": 5, "dtype": "float99"}, UnsupportedDtype),
    ],
)
@together("device", ["cpu", "none"])
def test_invalid_options_of_a_space_are_refused(options, error, device):
    with pytest.raises(error):
        SwapSpace(make(device=device), **options)


def test_a_space_serves_a_cache_and_converts_floats_only():
    for junk in (None, "cache", SPEC):
        with pytest.raises(UnsupportedOption, match="expected a PagedKVCache"):
            SwapSpace(junk, num_blocks=5)
    with pytest.raises(UnsupportedDtype, match="plane 'label' is int8"):
        SwapSpace(PagedKVCache(Labelled(), block_size=4, num_blocks=9), num_blocks=5, dtype="float16")


def test_a_space_lives_while_a_caller_or_a_swapped_sequence_holds_it():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(8))
    fill(cache, [sequence], 8)
    before = content(cache, sequence)
    cache.swap_out([sequence], space)
    alive = weakref.ref(space)
    del space
    gc.collect()
    assert alive() is not None
    cache.check_invariants()
    cache.swap_in([sequence])
    assert content(cache, sequence) == before
    gc.collect()
    assert alive() is None
    assert cache.stats().num_swapped_blocks == 0


def test_a_wrong_count_of_a_stored_block_is_found():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(8))
    advance(cache, [sequence], 8)
    cache.swap_out([sequence], space)
    space.block_pools[0].allocate(1)
    with pytest.raises(Exception, match="do not match the holders"):
        cache.check_invariants()


def test_statistics_count_swapped_and_resident_sequences_separately():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    first, second = (cache.add_sequence(range(10)) for _ in range(2))
    advance(cache, [first, second], [7, 4])
    cache.swap_out([first], space)
    stats = cache.stats()
    assert (stats.num_sequences, stats.num_tokens, stats.num_used_blocks) == (2, 4, 1)
    assert (stats.num_swapped_sequences, stats.num_swapped_tokens, stats.num_swapped_blocks) == (1, 7, 2)
    assert stats.fragmentation == 0.0
    assert cache.num_sequences == 2
    assert repr(space) == "SwapSpace(1 sequences, 2 of 8 blocks used)"


def test_blocks_of_a_collected_cycle_return_to_their_pool():
    pool = BlockPool(8)
    stored, counts = hold((pool,), [3])
    assert (counts, pool.num_free) == ([3], 4)
    cycle = [stored]
    cycle.append(cycle)
    del stored, cycle
    gc.collect()
    assert pool.num_free == 7
