"""Swapping: the values that return, and the blocks and rows that are released meanwhile."""

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    InvalidSequence,
    KVLayout,
    UnsupportedOption,
)
from pagecore.cache import PagedKVCache, SwapSpace
from tests.cache.caches import SPEC, WINDOWED, advance, make, normal
from tests.cache.swaps import Labelled, content, fill, occupied, poison
from tests.reference.dense import dense_attention

LAYOUTS = ["layerwise", "blockwise", KVLayout("layerwise", heads="NHD"), "BNCHD"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_swapped_values_return_bit_for_bit(layout, dtype):
    spec = AttentionSpec(2, 8, dtype=dtype)
    cache = make([spec, AttentionSpec(2, 8, dtype=dtype, window=6), spec], num_blocks=[30, 17])
    space = SwapSpace(cache, num_blocks=20, layout=layout)
    occupied(cache)
    sequences = [cache.add_sequence(range(64)) for _ in range(2)]
    for length in (3, 4, 5, 13):
        fill(cache, sequences, length, seed=length)
    before = [content(cache, sequence) for sequence in sequences]
    cache.swap_out(sequences, space)
    cache.check_invariants()
    poison(cache)
    other = cache.add_sequence(range(100, 130))
    fill(cache, [other], 30, seed=99)
    cache.swap_in(sequences[::-1])
    poison(cache)
    assert [content(cache, sequence) for sequence in sequences] == before
    assert space.num_used_blocks == 0
    cache.check_invariants()


def test_nans_with_a_payload_and_negative_zeros_return():
    cache = make(AttentionSpec(1, 4, dtype="float32"))
    space = SwapSpace(cache, num_blocks=17)
    sequence = cache.add_sequence(range(8))
    advance(cache, [sequence], 8)
    bits = np.random.default_rng(0).integers(0, 2**32, cache.key(0).shape, dtype=np.uint32)
    bits[1, 0, 0] = 0x7FA00001, 0xFFC12345, 0x80000000, 0x00000001
    cache.key(0).numpy().view(np.uint32)[:] = bits
    before = content(cache, sequence)
    cache.swap_out([sequence], space)
    poison(cache)
    cache.swap_in([sequence])
    assert content(cache, sequence) == before


def test_attention_continues_as_if_nothing_had_been_swapped():
    cache = make([SPEC, WINDOWED])
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(64))
    stored = []
    for step in range(8):
        batch = cache.prepare([sequence], 3)
        key, query = normal(3, 2, 8, seed=step), normal(3, 4, 8, seed=step + 100)
        stored.append(key)
        for layer, window in ((0, None), (1, 6)):
            cache.write(layer, key, 2 * key, batch)
            keys = np.concatenate(stored)
            expected = dense_attention(query, keys, 2 * keys, window=window)
            np.testing.assert_allclose(cache.attend(layer, query, batch), expected, atol=1e-5)
        cache.commit(batch)
        cache.swap_out([sequence], space)
        poison(cache)
        cache.swap_in([sequence])
        poison(cache)


def test_a_swapped_sequence_keeps_its_tokens_and_releases_its_blocks():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(20), id="long")
    cache.commit(cache.prepare([sequence], 20), accepted=[6])
    cache.append_tokens([sequence], [range(6, 20)])
    assert sequence.capacity == 20
    cache.swap_out([sequence], space)
    assert (cache.num_available, space.num_available) == (16, 6)
    assert (sequence.is_swapped, sequence.swap_space, sequence.row, sequence.capacity) == (True, space, -1, 0)
    assert (sequence.id, sequence.num_tokens, sequence.num_computed_tokens) == ("long", 20, 6)
    assert sequence.tokens.tolist() == list(range(20))
    assert "swapped out" in repr(sequence)
    cache.append_tokens([sequence], [20])
    cache.swap_in([sequence])
    assert (sequence.is_swapped, sequence.swap_space, sequence.capacity) == (False, None, 8)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (21, 6)
    advance(cache, [sequence], 15)
    cache.check_invariants()


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8])
def test_sequences_of_any_length_are_swapped(length):
    cache = make([SPEC, WINDOWED])
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(12))
    fill(cache, [sequence], length)
    before = content(cache, sequence)
    cache.swap_out(sequence, space)
    assert space.num_sequences == 1
    poison(cache)
    cache.swap_in(sequence)
    assert content(cache, sequence) == before
    assert sequence.num_computed_tokens == length
    fill(cache, [sequence], 12 - length)
    cache.check_invariants()


def test_holes_of_a_window_take_no_block_of_the_space():
    cache = make([SPEC, WINDOWED], num_blocks=[17, 5], max_tokens_per_sequence=64)
    space = SwapSpace(cache, num_blocks=[17, 3])
    sequence = cache.add_sequence(range(40))
    for _ in range(20):
        advance(cache, [sequence], 2)
    assert cache.stats().num_used_blocks == 10 + 2
    cache.swap_out([sequence], space)
    assert space.num_used_blocks == 12
    assert space.num_available == 0
    cache.swap_in([sequence])
    table = cache.make_batch().group(1).block_table.numpy()[sequence.row]
    assert (table[:8] == 0).all()
    assert (table[8:10] > 0).all()
    with pytest.raises(UnsupportedOption, match="window of 6"):
        cache.truncate(sequence, 20)


def test_blocks_shared_among_the_listed_are_stored_once_and_shared_again():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = cache.add_sequence(range(10))
    fill(cache, [parent], 10)
    forks = [parent, cache.fork(parent), cache.fork(parent)]
    before = content(cache, parent)
    cache.swap_out(forks, space)
    assert (cache.num_available, space.num_used_blocks) == (16, 3)
    cache.check_invariants()
    poison(cache)
    cache.swap_in(forks)
    assert cache.num_available == 13
    assert [content(cache, one) for one in forks] == [before] * 3
    fill(cache, forks, 1)  # each writes a block of its own
    assert cache.num_available == 11
    assert len({content(cache, one)[0][2] for one in forks}) == 3
    cache.check_invariants()


def test_blocks_that_one_of_the_listed_has_in_part_are_not_published():
    """The prefix cache would have a block that another row holds, and count it as one that eviction frees."""
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = cache.add_sequence([])
    fill(cache, [parent], 12)
    child = cache.fork(parent)
    cache.truncate(parent, 10)
    cache.append_tokens([parent, child], [list(range(10)), list(range(12))])
    cache.swap_out([parent, child], space)
    cache.swap_in([parent, child])
    assert cache.match_length(range(13)) == 8
    cache.remove(child)
    assert cache.num_available == 13
    assert cache.match_length(range(13)) == 8
    fill(cache, [parent], 2)
    assert cache.match_length(range(13)) == 8
    cache.check_invariants()


@pytest.mark.parametrize("layers", [SPEC, WINDOWED, [SPEC, WINDOWED]], ids=["full", "window", "both"])
def test_forks_publish_what_all_of_them_hold_whatever_comes_back_with_them(layers):
    """Two forks of 8 tokens, three that share 4 tokens of which one has 12, and a sequence with none computed."""
    cache = make(layers, num_blocks=40, max_sequences=8)
    space, other = SwapSpace(cache, num_blocks=40), SwapSpace(cache, num_blocks=9)
    first = cache.add_sequence(range(10))
    second = cache.add_sequence(range(100, 104))
    fill(cache, [first, second], [8, 4])
    families = [[first, cache.fork(first)], [second, cache.fork(second), cache.fork(second)]]
    cache.append_tokens([second], [list(range(104, 112))])
    fill(cache, [second], 8)
    short, elsewhere = cache.add_sequence([5]), cache.add_sequence([6])
    listed = [short, *families[1], *families[0]]
    cache.swap_out(listed, space)
    cache.swap_out([elsewhere], other)
    cache.clear_prefix_cache()
    cache.swap_in([*listed, elsewhere])
    cache.check_invariants()
    assert cache.match_length(range(20)) == 8
    assert cache.match_length(range(100, 120)) == 12
    for sequence in listed:
        cache.remove(sequence)
        cache.check_invariants()
    assert cache.match_length(range(20)) == 8


def test_a_fork_is_swapped_out_alone_and_its_siblings_keep_their_blocks():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = cache.add_sequence(range(10))
    fill(cache, [parent], 10)
    child = cache.fork(parent)
    before = content(cache, parent)
    cache.swap_out([child], space)
    assert (cache.num_available, space.num_used_blocks) == (13, 3)
    poison(cache)
    assert content(cache, parent) == before
    fill(cache, [parent], 1)  # into the block that the child no longer shares
    assert cache.stats().num_copied_blocks == 0
    cache.swap_in([child])
    assert content(cache, child) == before
    assert cache.num_available == 10


def test_sequences_swapped_out_together_may_be_swapped_in_one_by_one():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = cache.add_sequence(range(10))
    fill(cache, [parent], 10)
    child = cache.fork(parent)
    before = content(cache, parent)
    cache.swap_out([parent, child], space)
    for back, rest in ((parent, 3), (child, 0)):
        cache.swap_in([back])
        poison(cache)
        assert content(cache, back) == before
        assert space.num_used_blocks == rest
        cache.check_invariants()


def test_one_swap_in_empties_two_spaces():
    cache = make()
    small, large = SwapSpace(cache, num_blocks=3), SwapSpace(cache, num_blocks=9)
    sequences = [cache.add_sequence(range(10)) for _ in range(3)]
    for seed, sequence in enumerate(sequences):
        fill(cache, [sequence], 8 if seed == 0 else 10, seed=seed)
    before = [content(cache, sequence) for sequence in sequences]
    cache.swap_out(sequences[:1], small)
    cache.swap_out(sequences[1:], large)
    assert (small.num_used_blocks, large.num_used_blocks) == (2, 6)
    assert cache.stats().num_swapped_blocks == 8
    cache.check_invariants()
    poison(cache)
    cache.swap_in([sequences[2], sequences[0], sequences[1]])
    assert [content(cache, sequence) for sequence in sequences] == before
    assert small.num_used_blocks == large.num_used_blocks == 0


def test_removing_a_swapped_sequence_releases_its_stored_blocks():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = cache.add_sequence(range(10))
    fill(cache, [parent], 10)
    child = cache.fork(parent)
    before = content(cache, child)
    cache.swap_out([parent, child], space)
    cache.remove(parent)
    assert (space.num_used_blocks, space.num_sequences, cache.num_sequences) == (3, 1, 1)
    with pytest.raises(InvalidSequence, match="removed"):
        cache.swap_in([parent])
    assert not parent.is_swapped
    cache.swap_in([child])
    assert content(cache, child) == before
    with child:
        cache.swap_out([child], space)
    assert (space.num_used_blocks, cache.num_sequences) == (0, 0)
    cache.check_invariants()


def test_an_empty_list_swaps_nothing():
    cache = make()
    space = SwapSpace(cache, num_blocks=2)
    cache.swap_out([], space)
    cache.swap_in(iter([]))
    assert cache.try_swap_out((), space)
    assert cache.try_swap_in(())


def test_a_cache_without_bytes_swaps_ids_only():
    cache = make([SPEC, WINDOWED], device="none")
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(20))
    advance(cache, [sequence], 20)
    used = cache.stats().num_used_blocks
    cache.swap_out([sequence], space)
    assert (space.nbytes, space.num_used_blocks, cache.num_available) == (0, used, 16)
    cache.swap_in([sequence])
    assert cache.stats().num_used_blocks == used
    cache.check_invariants()


def test_planes_of_any_kind_are_swapped():
    cache = PagedKVCache(Labelled(), num_layers=2, block_size=4, num_blocks=9)
    space = SwapSpace(cache, num_blocks=5, layout="LBNHD")
    random = np.random.default_rng(0)
    for plane in cache._parts.store.pools[0].planes():
        array = plane.numpy()
        array.view(np.uint8)[:] = random.integers(0, 256, array.view(np.uint8).shape)
    occupied(cache)
    sequence = cache.add_sequence(range(7))
    advance(cache, [sequence], 7)

    def stored():
        blocks = cache.make_batch().group(0).block_table.numpy()[sequence.row, :2]
        return [plane.numpy()[blocks].tobytes() for plane in cache._parts.store.pools[0].planes()]

    before = stored()
    cache.swap_out([sequence], space)
    for plane in cache._parts.store.pools[0].planes():
        plane.numpy()[4:] = 3
    cache.swap_in([sequence])
    assert stored() == before
