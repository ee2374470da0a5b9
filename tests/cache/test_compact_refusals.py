"""PagedKVCache.compact: lists, sequences and caches that are refused, and nothing is changed."""

from __future__ import annotations

import pytest

from pagecore import (
    AttentionSpec,
    InvalidSequence,
    KVPool,
    OutOfBlocks,
    Plane,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.cache import SwapSpace
from pagecore.cache.lifecycle.slot_moves import moves_of
from tests.cache.caches import SPEC, WINDOWED, Planes, advance, make
from tests.cache.texts import OTHER, prefilled


def test_truncate_refuses_lengths_inside_the_compacted_tokens():
    texts, sequence = prefilled(8)
    texts.compact(sequence, [0, 2, 5])
    texts.append(sequence, [9, 9])
    texts.step([sequence], [2])
    with pytest.raises(UnsupportedOption, match="compacted to 3 tokens"):
        texts.cache.truncate(sequence, 2)
    texts.cache.truncate(sequence, 4)
    del texts.text[sequence][9:], texts.kept[sequence][4:]
    texts.check()
    texts.cache.truncate(sequence, 0)
    assert sequence.num_dropped_tokens == 0
    texts.text[sequence], texts.kept[sequence] = [], []
    texts.append(sequence, [4, 4, 4, 4, 4])
    texts.step([sequence], [5])
    texts.check()
    assert texts.cache.add_sequence([4] * 6).num_cached_tokens == 4


def test_shared_blocks_without_room_for_a_copy_raise_and_change_nothing():
    texts, sequence = prefilled(12, num_blocks=5, prefix_cache=False, layers=[SPEC])
    texts.fork(sequence)
    texts.add([1])
    texts.step([list(texts.kept)[2]], [1])
    with pytest.raises(OutOfBlocks):
        texts.cache.compact(sequence, [1, 2, 3])
    texts.check()


REFUSED = {
    "descending": ([3, 2], ShapeError, "must ascend"),
    "twice": ([3, 3], ShapeError, "must ascend"),
    "past the end": ([0, 8], ShapeError, "give 0 to 7"),
    "negative": ([-1, 2], ShapeError, "give 0 to 7"),
    "a number": (3, ShapeError, "list of positions"),
    "groups": ([[1], [2]], ShapeError, "one list|one for all groups"),
    "floats": ([0.5], UnsupportedDtype, "kept position"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_lists_change_nothing(name):
    keep, kind, message = REFUSED[name]
    texts, sequence = prefilled()
    with pytest.raises(kind, match=message):
        texts.cache.compact(sequence, keep)
    texts.check()


def test_a_sequence_without_computed_tokens_keeps_none():
    sequence = (cache := make([SPEC])).add_sequence(range(8))
    with pytest.raises(ShapeError, match="0 computed tokens: give an empty list"):
        cache.compact(sequence, [0])
    cache.compact(sequence, [])


def test_groups_must_keep_equal_numbers():
    cache = make([SPEC, OTHER])
    sequence = cache.add_sequence(range(8))
    advance(cache, [sequence], 8)
    with pytest.raises(ShapeError, match="equal numbers"):
        cache.compact(sequence, [[1, 2], [3]])


def test_sequences_in_flight_or_swapped_out_are_refused():
    texts, sequence = prefilled()
    texts.append(sequence, [1])
    batch = texts.cache.prepare([sequence], 1)
    with pytest.raises(InvalidSequence, match="in flight"):
        texts.cache.compact(sequence, [0])
    texts.cache.abandon(batch)
    texts.check()
    space = SwapSpace(texts.cache, num_blocks=9)
    texts.cache.swap_out(sequence, space)
    with pytest.raises(InvalidSequence, match="swapped out"):
        texts.cache.compact(sequence, [0])
    texts.cache.swap_in(sequence)
    texts.check()


def test_caches_that_cannot_be_compacted_are_refused():
    for options, message in (
        ({"layers": [SPEC, WINDOWED]}, "group 1 has a window of 6"),
        ({"layers": [SPEC], "scrub": True}, "scrub"),
        ({"layers": [Planes(Plane("page", (8,), "float32", per="block"))]}, "page per block"),
    ):
        cache = make(**options)
        sequence = cache.add_sequence(range(8))
        advance(cache, [sequence], 8)
        with pytest.raises(UnsupportedOption, match=message):
            cache.compact(sequence, [0, 5])
        cache.check_invariants()


def test_bounds_of_quantised_keys_are_not_renewed():
    spec = AttentionSpec(2, 16, format="float8_token", key_bounds=True)
    with pytest.raises(UnsupportedOption, match="in a format"):
        moves_of(KVPool(spec, 1, 4))
