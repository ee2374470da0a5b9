"""Blocks that rows and the prefix cache share: duplicates, truncated blocks, forks and swapped blocks."""

import pytest

from pagecore import (
    AttentionSpec,
    OutOfBlocks,
    OutOfRows,
    PagedKVCache,
)
from pagecore.cache import SwapSpace
from tests.cache.caches import advance, make
from tests.cache.prefixes import ALIKE, computed, kept, used_by_rows
from tests.cache.swaps import content, fill, poison


def test_a_duplicate_stays_with_its_sequence_and_costs_no_more_than_without():
    cache = make()
    twins = [cache.add_sequence(ALIKE[:12]) for _ in range(2)]
    fill(cache, twins, 12)
    rows = cache.block_table().numpy()[[twin.row for twin in twins], :3].tolist()
    assert not set(rows[0]) & set(rows[1])
    cache.append_tokens([twins[1]], [ALIKE[12:20]])
    fill(cache, [twins[1]], 8)
    assert cache.match_length(ALIKE) == 20  # its own continuation is still found
    assert cache.num_available == 16 - 8
    cache.remove(twins[0])
    assert cache.num_available == 16 - 5
    taker = cache.add_sequence([])
    assert cache.try_prepare([taker], 4 * 11) is not None
    assert cache.block_table().numpy()[twins[1].row, :3].tolist() == rows[1]
    assert cache.match_length(ALIKE) == 20  # replaced by the blocks of the sequence that continues
    cache.check_invariants()


def test_a_sequence_truncated_inside_a_cached_block_writes_to_a_copy():
    cache = make()
    sequence = computed(cache, ALIKE[:12])
    before = content(cache, sequence)
    cache.truncate(sequence, 6)
    cache.append_tokens([sequence], [[98, 99]])
    fill(cache, [sequence], 2, seed=9)
    cache.check_invariants()
    again = cache.add_sequence(ALIKE[:13])
    assert again.num_cached_tokens == 12
    assert content(cache, again) == before
    assert cache.match_length([*ALIKE[:6], 98, 99, 0]) == 8


def test_a_sequence_that_fills_the_cache_can_be_truncated_and_continue():
    cache = make(num_blocks=4, max_tokens_per_sequence=64)
    sequence = computed(cache, ALIKE[:12])
    cache.truncate(sequence, 10)
    assert cache.shortage([sequence], 2) == 0
    assert cache.shortage([sequence], 3) == 1
    assert cache.try_prepare([sequence], 3) is None
    cache.check_invariants()
    cache.append_tokens([sequence], [[98, 99]])
    fill(cache, [sequence], 2)
    assert cache.match_length([*ALIKE[:10], 98, 99, 0]) == 12
    assert cache.match_length(ALIKE) == 8
    cache.check_invariants()


def test_a_truncated_block_is_replaced_in_the_tree_by_a_duplicate_before_it_is_written():
    cache = make(num_blocks=9, max_sequences=5)
    first, double = (cache.add_sequence(ALIKE[:8]) for _ in range(2))
    fill(cache, [first, double], 8)
    child = cache.fork(first)
    cache.truncate(child, 6)
    cache.remove(first)
    filler = cache.add_sequence([])
    filling = cache.try_prepare([filler], 4 * cache.num_available)
    assert filling is not None
    assert cache.num_available == 0
    assert cache.shortage([child], 2) == 0
    cache.append_tokens([child], [[98, 99]])
    fill(cache, [child], 2)  # in place: the tree now holds the block of `double`
    assert cache.match_length(ALIKE) == 8
    again = cache.add_sequence(ALIKE[:9])
    assert [plane[1] for plane in content(cache, again)] == [plane[1] for plane in content(cache, double)]
    cache.check_invariants()


def test_a_fork_holds_what_its_parent_published():
    cache = make(num_blocks=6)
    parent = computed(cache, ALIKE[:12])
    child = cache.fork(parent)
    assert child.num_cached_tokens == 0
    cache.remove(parent)
    assert cache.num_available == 2
    assert cache.stats().num_evictable_blocks == 0
    cache.remove(child)
    assert cache.stats().num_evictable_blocks == 3


@pytest.mark.parametrize("way", ["fork", "reorder"])
@pytest.mark.parametrize(
    ("policy", "options"),
    [("lru", {"spans": [(9, 10, b"image")]}), ("rank", {"rank": 1}), ("priority", {"priority": 1})],
)
def test_a_copy_of_a_sequence_whose_ids_came_late_publishes_in_its_namespace(policy, options, way):
    cache = make(block_size=2, device="none", eviction_policy=policy)
    with cache.add_sequence([6, 6], namespace="other") as other:
        advance(cache, [other], 2)
    parent = cache.add_sequence([], namespace="own", **options)
    advance(cache, [parent], 2)  # publishes nothing, because the ids are not known
    cache.append_tokens([parent], [[7, 8]])
    if way == "fork":
        child = cache.fork(parent)
    else:
        child = cache.add_sequence([])
        cache.reorder([child], [parent])
    cache.append_tokens([child], [[9, 9]])
    advance(cache, [child], 2)
    assert cache.match_length([7, 8, 9, 9, 0], namespace="own") == 4
    for name in (None, "other", "own"):
        assert cache.match_length([6, 6, 9, 9, 0], namespace=name) == (2 if name == "other" else 0)
    cache.check_invariants()


def test_blocks_of_two_rows_with_ids_known_to_one_are_not_published():
    cache = make()
    parent = cache.add_sequence(ALIKE[:4])
    advance(cache, [parent], 8)
    child = cache.fork(parent)
    cache.append_tokens([parent], [ALIKE[4:9]])
    advance(cache, [parent], 1)
    assert cache.match_length(ALIKE) == 4  # the child may still fill the second block with other ids
    cache.remove(child)
    cache.remove(parent)
    assert cache.match_length(ALIKE) == 8
    assert cache.num_available == 16


def test_blocks_that_are_swapped_in_are_cached_once():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    sequence = computed(cache, ALIKE[:12])
    before = content(cache, sequence)
    cache.swap_out(sequence, space)
    assert cache.match_length(ALIKE) == 12
    assert cache.stats().num_evictable_blocks == 3
    poison(cache)
    cache.swap_in(sequence)
    assert content(cache, sequence) == before
    assert cache.num_available == 13
    cache.check_invariants()


def test_swapping_in_evicts_before_it_refuses():
    cache = make(num_blocks=6)
    space = SwapSpace(cache, num_blocks=9)
    sequence = computed(cache, ALIKE[:12])
    cache.swap_out(sequence, space)
    kept(cache, range(50, 70))
    assert cache.stats().num_free_blocks == 0
    assert cache.shortage([sequence], 0) == 0
    cache.swap_in(sequence)
    assert cache.stats().num_evicted_blocks == 3 + 3
    cache.check_invariants()


def test_a_truncated_block_that_was_copied_is_no_longer_held():
    cache = make()
    sequence = computed(cache, ALIKE[:12])
    cache.truncate(sequence, 6)
    cache.append_tokens([sequence], [[98]])
    assert cache.num_available == 16 - 2
    fill(cache, [sequence], 1)
    assert cache.stats().num_copied_blocks == 1
    assert cache.num_available == 16 - used_by_rows(cache, [sequence]) == 14
    cache.check_invariants()


def test_the_fork_of_a_duplicate_is_a_duplicate():
    cache = make()
    twins = [cache.add_sequence(ALIKE[:12]) for _ in range(2)]
    fill(cache, twins, 12)
    child = cache.fork(twins[1])
    for twin in twins:
        cache.remove(twin)
    assert cache.num_available == 16 - used_by_rows(cache, [child]) == 13
    taker = cache.add_sequence([])
    assert cache.try_prepare([taker], 4 * 13) is not None
    cache.check_invariants()


def test_beams_share_blocks_whose_ids_came_late():
    cache = make()
    beams = [cache.add_sequence(ALIKE[:4]) for _ in range(2)]
    advance(cache, beams, [8, 4])
    cache.append_tokens([beams[0]], [ALIKE[4:8]])
    cache.reorder(beams, [beams[0]] * 2)
    assert cache.match_length(ALIKE) == 8
    for beam in beams:
        cache.append_tokens([beam], [[90]])
    advance(cache, beams, 1)
    cache.check_invariants()
    cache.remove(beams[0])
    assert cache.num_available == 16 - used_by_rows(cache, [beams[1]])


def test_sequences_that_share_blocks_and_are_swapped_in_together_publish_them_again():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = computed(cache, ALIKE[:12])
    pair = [parent, cache.fork(parent)]
    cache.swap_out(pair, space)
    cache.clear_prefix_cache()
    assert cache.match_length(ALIKE) == 0
    cache.swap_in(pair)
    assert cache.match_length(ALIKE) == 12
    cache.remove(parent)
    assert cache.num_available == 13
    cache.check_invariants()


def test_swapped_in_sequences_do_not_publish_shared_blocks_with_ids_unknown_to_one():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = cache.add_sequence(ALIKE[:4])
    advance(cache, [parent], 8)
    pair = [parent, cache.fork(parent)]
    cache.append_tokens([parent], [ALIKE[4:8]])
    cache.swap_out(pair, space)
    cache.clear_prefix_cache()
    cache.swap_in(pair)
    cache.remove(parent)
    assert cache.num_available == 16 - used_by_rows(cache, pair[1:]) == 14
    cache.check_invariants()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_a_swapped_in_row_has_no_cached_block_past_what_its_sequence_publishes(order):
    """Block 0 keeps `middle` from publishing block 1, which `last` has without block 0, and `first` with less of it."""
    cache = make(AttentionSpec(1, 8, dtype="float32", window=6), num_blocks=12)
    space = SwapSpace(cache, num_blocks=11)
    middle = cache.add_sequence([])
    advance(cache, [middle], 8)
    last, first = cache.fork(middle), cache.fork(middle)
    cache.append_tokens([middle, last, first], [ALIKE[:8]] * 3)
    cache.truncate(first, 2)
    advance(cache, [last], 2)
    listed = [(last, middle, first)[i] for i in order]
    cache.swap_out(listed, space)
    cache.clear_prefix_cache()
    cache.swap_in(listed)
    cache.check_invariants()
    cache.remove(last)
    taker = cache.add_sequence([])
    assert cache.shortage([taker], 4 * cache.num_available) == 0
    assert cache.try_prepare([taker], 4 * cache.num_available) is not None


def test_blocks_that_a_swap_space_has_rounded_are_not_shared():
    cache = make()
    space = SwapSpace(cache, num_blocks=9, dtype="bfloat16")
    sequence = computed(cache, ALIKE[:12])
    cache.swap_out(sequence, space)
    cache.clear_prefix_cache()
    cache.swap_in(sequence)
    cache.append_tokens([sequence], [ALIKE[12:16]])
    fill(cache, [sequence], 4)
    assert cache.match_length(ALIKE) == 0
    cache.truncate(sequence, 6)
    child = cache.fork(sequence)
    cache.append_tokens([child], [ALIKE[6:12]])
    fill(cache, [child], 6)
    assert cache.match_length(ALIKE) == 0
    cache.truncate(child, 0)
    cache.append_tokens([child], [ALIKE[:8]])
    fill(cache, [child], 8)
    assert cache.match_length(ALIKE) == 8
    cache.check_invariants()


def test_a_fork_without_a_free_row_publishes_nothing():
    cache = make(max_sequences=1)
    sequence = cache.add_sequence([])
    advance(cache, [sequence], 8)
    cache.append_tokens([sequence], [ALIKE[:8]])
    with pytest.raises(OutOfRows):
        cache.fork(sequence)
    assert cache.match_length(ALIKE) == 0


def test_substituted_blocks_count_as_evicted():
    cache = make()
    twins = [cache.add_sequence(ALIKE[:8]) for _ in range(2)]
    fill(cache, twins, 8)
    cache.remove(twins[0])
    assert cache.stats().num_evictable_blocks == 2
    assert cache.clear_prefix_cache() == cache.stats().num_evicted_blocks == 2
    assert cache.match_length(ALIKE) == 8


@pytest.mark.parametrize("num_blocks", [[20, 4], [20, 3], [20, 5]])
def test_shortage_agrees_with_prepare_for_a_truncated_block_that_a_windows_receipt_pins(num_blocks):
    """The first sequence's receipt holds a block that its window has left; the second was truncated inside it."""
    spec = AttentionSpec(1, 8, dtype="float32", num_query_heads=1)
    window = AttentionSpec(1, 8, dtype="float32", num_query_heads=1, window=20)
    cache = PagedKVCache([spec, window], num_blocks=num_blocks, device="none", max_tokens_per_sequence=100)
    first = cache.add_sequence(range(16))
    advance(cache, [first], 16)
    cache.append_tokens([first], [range(16, 38)])
    if cache.shortage([first], 22):
        assert cache.try_prepare([first], 22) is None
        return
    advance(cache, [first], 22)
    second = cache.add_sequence(range(17))
    cache.truncate(second, 13)
    before = (cache.stats(), cache.block_map(0), cache.block_map(1))
    lacking = cache.shortage([second], 1)
    if lacking:
        with pytest.raises(OutOfBlocks):
            cache.prepare([second], 1)
        assert cache.stats() == before[0]
    else:
        cache.commit(cache.prepare([second], 1))
    cache.check_invariants()
