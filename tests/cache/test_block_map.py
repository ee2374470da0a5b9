"""PagedKVCache.block_map against plain loops, and the device views of block tables and lengths."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore import OutOfBlocks, PagedKVCache, ShapeError, UnsupportedOption
from tests.cache.caches import SPEC, WINDOWED, advance, make


def plain_map(cache, group, sequences):
    """Return owner, holders and tokens of each block by a loop over the rows of `sequences`, in their order."""
    table = np.asarray(cache.block_table(group)).tolist()
    owner, holders, tokens = ([start] * cache.num_blocks[group] for start in (-1, 0, 0))
    for place, sequence in enumerate(sequences):
        for number, block in enumerate(table[sequence.row]):
            if block == 0:
                continue
            if owner[block] == -1:
                owner[block] = place
            holders[block] += 1
            inside = min(max(sequence.num_computed_tokens - number * cache.block_size, 0), cache.block_size)
            tokens[block] = max(tokens[block], inside)
    return owner, holders, tokens


def check(cache, sequences):
    for group in range(cache.num_groups):
        found = cache.block_map(group)
        assert (found.group, found.block_size) == (group, cache.block_size)
        assert found.sequences == tuple(sequence.id for sequence in sequences)
        for array, expected in zip(
            (found.owner, found.holders, found.num_tokens), plain_map(cache, group, sequences), strict=True
        ):
            assert array.dtype == np.int32
            assert array.tolist() == expected


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), device=st.sampled_from(["none", "cpu"]))
def test_a_block_map_agrees_with_the_rows_after_every_operation(seed, device):
    random = np.random.default_rng(seed)
    cache = make([SPEC, WINDOWED], num_blocks=[19, 15], max_sequences=6, device=device)
    sequences = []
    for _ in range(40):
        action = random.choice(["add", "step", "step", "step", "fork", "truncate", "remove", "reorder"])
        if action == "add" and len(sequences) < 6:
            sequences.append(cache.add_sequence(random.integers(0, 99, random.integers(0, 20))))
        elif action == "step":
            step(cache, random, sequences)
        elif action == "fork" and 0 < len(sequences) < 6:
            sequences.append(cache.fork(random.choice(sequences)))
        elif action == "truncate" and sequences:
            sequence = random.choice(sequences)
            with suppress(UnsupportedOption):
                cache.truncate(sequence, random.integers(0, sequence.num_tokens + 1))
        elif action == "remove" and sequences:
            cache.remove(sequences.pop(random.integers(len(sequences))))
        elif action == "reorder" and sequences:
            cache.reorder(sequences, random.choice(sequences, len(sequences)))
        check(cache, sequences)


def step(cache, random, sequences):
    """Run a step of some sequences, checking the map while it is in flight; reject some tokens."""
    chosen = [sequence for sequence in sequences if random.random() < 0.6]
    counts = random.integers(0, 9, len(chosen))
    try:
        batch = cache.prepare(chosen, counts)
    except (OutOfBlocks, ShapeError):
        return
    check(cache, sequences)
    if random.random() < 0.1:
        cache.abandon(batch)
    else:
        cache.commit(batch, random.integers(0, counts + 1) if random.random() < 0.3 else None)


def test_a_block_map_lists_owners_holders_and_tokens():
    cache = make(num_blocks=8)
    first = cache.add_sequence(range(6), id="first")
    advance(cache, [first], 6)
    second = cache.fork(first, id="second")
    cache.add_sequence([1], id="without blocks")
    advance(cache, [second], 3)
    found = cache.block_map()
    assert found.sequences == ("first", "second", "without blocks")
    assert found.owner.tolist() == [-1, 0, 0, 1, 1, -1, -1, -1]
    assert found.holders.tolist() == [0, 2, 1, 1, 1, 0, 0, 0]
    assert found.num_tokens.tolist() == [0, 4, 2, 4, 1, 0, 0, 0]
    assert repr(found) == "BlockMap(group=0, 4 of 7 blocks held, 1 of them shared, 3 sequences)"


def test_the_tokens_of_a_step_in_flight_are_not_valid_yet():
    cache = make(num_blocks=8)
    sequence = cache.add_sequence(range(6))
    batch = cache.prepare([sequence], 6)
    assert cache.block_map().holders.tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    assert not cache.block_map().num_tokens.any()
    cache.commit(batch)
    assert cache.block_map().num_tokens.tolist() == [0, 4, 2, 0, 0, 0, 0, 0]


def test_a_block_map_shows_what_a_window_has_released_as_free():
    cache = make(WINDOWED, num_blocks=8)
    sequence = cache.add_sequence(range(20))
    for count in (9, 9):
        advance(cache, [sequence], count)
    found = cache.block_map()
    held = np.flatnonzero(found.holders)
    assert len(held) == 2
    assert (found.owner[held] == 0).all()
    assert found.num_tokens.sum() == 18 - 12


def test_a_block_map_does_not_change_with_the_cache():
    cache = make()
    sequence = cache.add_sequence(range(9))
    advance(cache, [sequence], 9)
    found = cache.block_map()
    kept = found.owner.copy(), found.holders.copy(), found.num_tokens.copy()
    cache.remove(sequence)
    for array, before in zip((found.owner, found.holders, found.num_tokens), kept, strict=True):
        assert (array == before).all()
    assert cache.block_map().sequences == ()
    assert not cache.block_map().holders.any()


def test_a_block_map_marks_the_blocks_of_the_prefix_cache():
    cache = make(num_blocks=8)
    first = cache.add_sequence(range(10), id="first")
    advance(cache, [first], 10)
    found = cache.block_map()
    assert found.cached.tolist() == [False, True, True, False, False, False, False, False]
    assert found.holders.tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
    cache.remove(first)
    found = cache.block_map()
    assert found.cached.tolist() == [False, True, True, False, False, False, False, False]
    assert not found.holders.any()
    assert (found.owner == -1).all()
    assert repr(found) == "BlockMap(group=0, 0 of 7 blocks held, 0 of them shared, 2 more cached, 0 sequences)"
    cache.clear_prefix_cache()
    assert not cache.block_map().cached.any()


@pytest.mark.parametrize("group", [-1, 2, 10**30, "0", None, 0.0, np.float32(0)])
def test_an_unknown_group_is_refused_by_name(group):
    cache = make([SPEC, WINDOWED])
    for call in (cache.block_map, cache.block_table):
        with pytest.raises(ShapeError, match=r"group is .*; the cache has groups 0 to 1"):
            call(group)


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_the_block_table_aliases_the_index_and_cannot_be_written(device):
    cache = make([SPEC, WINDOWED], device=device)
    sequence = cache.add_sequence(range(9))
    table = cache.block_table(np.int64(0))
    assert table.shape == (5, 16)
    assert str(table.dtype) == "int32"
    advance(cache, [sequence], 9)
    assert np.asarray(table)[sequence.row].tolist() == [1, 2, 3] + [0] * 13
    assert not np.asarray(table)[-1].any()
    assert table.pointer == cache.block_table(0).pointer != cache.block_table(1).pointer
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(table)[0, 0] = 1


def test_row_lengths_alias_the_index_and_count_the_step_in_flight():
    cache = PagedKVCache(SPEC, block_size=4, num_blocks=17, max_sequences=4, device="none")
    first, second = cache.add_sequence(range(9)), cache.add_sequence(range(3))
    lengths = cache.row_lengths
    assert lengths.shape == (5,)
    assert str(lengths.dtype) == "int32"
    batch = cache.prepare([first, second], [9, 2])
    assert np.asarray(lengths)[[first.row, second.row]].tolist() == [9, 2]
    cache.commit(batch, [7, 2])
    assert np.asarray(lengths)[[first.row, second.row]].tolist() == [7, 2]
    cache.remove(first)
    assert np.asarray(lengths).tolist() == [0, 2, 0, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(lengths)[0] = 1
