"""Prefixes past a state in caches with windows: full attention shares the blocks, windows compute theirs again."""

import pytest

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec

FULL = AttentionSpec(1, 8, dtype="float32")
WINDOWED = AttentionSpec(1, 8, dtype="float32", window=6)


def make(recompute_last_block=False, **rules):
    """Return a cache with states after 20 and 44 tokens, and the sequence that computed them."""
    state = StateSpec((Plane("temporal", (4,), "float32", per="sequence"),), **{"chunk": 4, "interval": 8} | rules)
    cache = PagedKVCache(
        [state, FULL, WINDOWED],
        num_blocks=40,
        num_states=20,
        block_size=4,
        max_sequences=4,
        device="none",
        recompute_last_block=recompute_last_block,
    )
    first = cache.add_sequence(range(44))
    for _ in range(2):
        cache.commit(cache.prepare([first], 22))
    return cache, first


def tables(cache, sequence):
    return [cache._parts.tables.table(group)[sequence.row].tolist() for group in range(2)]


# Blocks of the prefix, and whether its window begins before the state after 5 blocks.
@pytest.mark.parametrize(("shared", "is_near"), [(6, True), (9, False)])
def test_blocks_past_the_state_are_shared_where_a_window_reaches_back_to_it(shared, is_near):
    cache, first = make()
    length = 4 * shared
    second = cache.add_sequence([*range(length + 3), 99, 98, 97])
    assert (second.num_computed_tokens, second.num_cached_tokens, second.num_matched_tokens) == (20, 20, length)
    (full, _), (own_full, own_windowed) = tables(cache, first), tables(cache, second)
    assert own_full[:shared] == full[:shared]
    assert own_windowed[:3] == [0, 0, 0]
    assert own_windowed[3] > 0
    assert any(own_windowed[5:shared]) == is_near
    batch = cache.prepare([second], length - 14)
    slots, of_window = (batch.group(layer).slot_mapping.numpy() for layer in (1, 2))
    past = length - 20
    assert (slots[:past] == -1).all()
    assert (slots[past:] > 0).all()
    assert (of_window[:past] == -1).all() if is_near else (of_window > 0).all()
    assert batch.checkpoint_lengths.numpy()[0] == length  # other sequences branch off there
    cache.check_invariants()
    cache.commit(batch)
    cache.check_invariants()
    assert cache.stats().prefix_shared_tokens == length
    assert cache.match_length([*range(length + 1)]) == length
    assert cache._parts.prefix.tree.num_receipts == 2  # the second one ends with the shared blocks


@pytest.mark.parametrize("length", [24, 36])
def test_steps_inside_the_shared_blocks_publish_and_keep_them(length):
    cache, first = make()
    second = cache.add_sequence([*range(length + 3), 99, 98, 97])
    while second.num_computed_tokens < length + 6:
        count = min(3, length + 6 - second.num_computed_tokens)
        batch = cache.prepare([second], count)
        start = second.num_computed_tokens
        expected = [position < length for position in range(start, start + count)]
        assert (batch.group(1).slot_mapping.numpy() == -1).tolist() == expected
        cache.commit(batch)
        cache.check_invariants()
    assert cache._parts.prefix.tree.num_receipts == 2
    cache.remove(first)
    cache.remove(second)
    cache.check_invariants()
    assert cache.stats().num_used_blocks == 0


@pytest.mark.parametrize("kept", [0, 1, 2, 4])
def test_a_step_that_is_rejected_inside_a_shared_block_copies_it_when_it_writes_again(kept):
    cache, first = make(in_place=False, draft_tokens=3)
    second = cache.add_sequence([*range(27), 99])
    batch = cache.prepare([second], 4)
    cache.commit(batch, [kept])
    cache.check_invariants()
    assert second.num_computed_tokens == 20 + kept
    fork = cache.fork(second)
    cache.check_invariants()
    for sequence in (second, fork):
        cache.append_tokens([sequence], [[7] * (4 - kept) + [8]])
        batch = cache.prepare([sequence], 1)
        is_shared = kept == 4  # 24 tokens end with a whole block
        assert (batch.copied_blocks(1).size > 0) == (0 < kept < 4)
        assert batch.group(1).slot_mapping.numpy()[0] > 0 or is_shared
        cache.commit(batch)
        cache.check_invariants()
    assert tables(cache, first)[0][5] not in tables(cache, second)[0] or is_shared


def test_abandoned_sequences_give_the_shared_blocks_back():
    for in_place in (True, False):
        cache, _ = make(in_place=in_place)
        second = cache.add_sequence([*range(27), 99])
        cache.commit(cache.prepare([second], 2))
        cache.abandon(cache.prepare([second], 4))
        cache.check_invariants()
        assert second.num_computed_tokens == (
            0 if in_place else 22
        )  # the window has released what the token after 20 sees
        batch = cache.prepare([second], 4)
        assert (batch.group(1).slot_mapping.numpy() > 0).all()
        cache.commit(batch)
        cache.check_invariants()


def test_shared_blocks_are_not_evicted_while_a_row_has_them():
    cache, first = make()
    second = cache.add_sequence([*range(27), 99])
    cache.remove(first)
    shared = tables(cache, second)[0][:6]
    cache.clear_prefix_cache()
    cache.check_invariants()
    assert (cache._parts.tables.pools[0].ref_counts()[shared] == 2).all()
    cache.reorder([second], [second])
    other = cache.add_sequence([5, 6])
    cache.reorder([other], [second])
    cache.check_invariants()
    cache.remove(second)
    cache.check_invariants()
    assert (cache._parts.tables.pools[0].ref_counts()[shared] == 2).all()
    cache.remove(other)
    cache.clear_prefix_cache()
    stats = cache.stats()
    assert stats.num_free_blocks == stats.num_blocks


# Blocks of the match, those that are shared, and the tokens up to the deepest state before them.
@pytest.mark.parametrize(("matched", "shared", "reused"), [(1, 0, 0), (4, 3, 0), (5, 4, 0), (6, 5, 20), (9, 8, 20)])
def test_a_match_gives_up_its_last_block_and_keeps_the_state_before_it(matched, shared, reused):
    cache, first = make(recompute_last_block=True)
    ids = [*range(4 * matched), 99, 98, 97]
    assert cache.match_length(ids) == reused
    second = cache.add_sequence(ids)
    assert (second.num_computed_tokens, second.num_matched_tokens) == (reused, 4 * shared)
    (full, _), (own_full, _) = tables(cache, first), tables(cache, second)
    assert own_full[: shared + 1] == [*full[:shared], 0]
    cache.check_invariants()
