"""Checkpoints of states, and prefixes that end with a state."""

import pytest

from pagecore import StateSpec
from pagecore.cache.prefix._prefix import cached_states
from tests.cache.hybrids import PLANE, compute, make, table, temporal
from tests.reference.state_table import checkpoint_length


def decode(cache, sequence, ids):
    """Append tokens and compute each alone; return the length of the checkpoint of each step."""
    found = []
    for token in ids:
        cache.append_tokens([sequence], [[token]])
        found.append(compute(cache, sequence, 1).checkpoint_lengths.numpy()[0])
    return found


@pytest.mark.parametrize(
    ("before", "count", "expected"), [(192, 88, 256), (0, 230, 192), (0, 63, 0), (192, 63, 0), (0, 64, 64)]
)
def test_a_prefill_keeps_the_last_whole_chunk(before, count, expected):
    """Checkpoints D3."""
    cache = make()
    sequence = cache.add_sequence(range(400))
    if before:
        compute(cache, sequence, before)
    batch = compute(cache, sequence, count)
    assert batch.checkpoint_lengths.numpy()[0] == expected == checkpoint_length(before, count, 64, 256, 16, 0)
    assert bool(batch.checkpoint_write.numpy()[0]) == bool(expected)


@pytest.mark.parametrize("recompute_last_block", [False, True])
@pytest.mark.parametrize("length", [63, 64, 65, 80, 96, 127, 128, 129, 144, 192, 256])
def test_a_prompt_that_is_repeated_begins_with_a_state_of_the_first_one(length, recompute_last_block):
    cache = make(recompute_last_block=recompute_last_block)
    with cache.add_sequence(range(length)) as first:
        kept = compute(cache, first, length).checkpoint_lengths.numpy()[0]
    end = max(0, (length - 1) // 16 - recompute_last_block) * 16
    assert kept == (end // 64 * 64 or length // 64 * 64)  # the only one serves what continues the prompt
    assert cache.match_length(range(length)) == end // 64 * 64
    if not recompute_last_block:
        assert cache.match_length([*range(length), *range(32)]) == kept


def test_parts_of_a_prompt_leave_a_state_for_its_repetition_and_one_for_what_continues_it():
    cache = make()
    with cache.add_sequence(range(192)) as first:
        assert [compute(cache, first, count).checkpoint_lengths.numpy()[0] for count in (128, 64)] == [128, 192]
    assert (cache.match_length(range(192)), cache.match_length(range(193))) == (128, 192)


def test_a_prompt_that_grew_before_its_step_keeps_its_checkpoint_before_its_new_end():
    cache = make()
    first = cache.add_sequence(range(128))
    cache.append_tokens([first], [range(128, 256)])
    assert compute(cache, first, 256).checkpoint_lengths.numpy()[0] == 192


def test_a_prompt_whose_ids_follow_its_step_keeps_its_checkpoint_before_the_end_of_the_step():
    cache = make()
    sequence = cache.add_sequence(range(100))
    assert compute(cache, sequence, 200).checkpoint_lengths.numpy()[0] == 192
    cache.append_tokens([sequence], [range(100, 201)])
    compute(cache, sequence, 1)
    assert cache.match_length(range(200)) == 192


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((50, 14, 60, 4, 172), [0, 64, 0, 128, 256]),
        ((63, 1, 63, 1, 172), [0, 64, 0, 128, 256]),  # one token, as a decode step has
        ((1,) * 130, [64 * (n in (64, 128)) * (n // 64) for n in range(1, 131)]),
        ((50, 78, 172), [0, 128, 256]),  # no chunk of the second step ends with a block before its end
        ((50, 250), [0, 0]),  # neither does the step end on the grid
    ],
)
def test_parts_of_a_prompt_that_end_on_the_grid_keep_the_state_at_their_end(counts, expected):
    cache = make()
    sequence = cache.add_sequence(range(300))
    assert [compute(cache, sequence, count).checkpoint_lengths.numpy()[0] for count in counts] == expected
    assert cache.match_length(range(301)) == max(expected)


@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_that_accept_a_draft_at_the_grid_keep_states_at_the_interval_alone(drafts):
    cache = make(StateSpec((PLANE,), chunk=16, interval=64, draft_tokens=drafts))
    sequence = cache.add_sequence(range(14))
    compute(cache, sequence, 14)
    lengths = []
    for start in range(14, 130, 1 + drafts):
        cache.append_tokens([sequence], [range(start, start + 1 + drafts)])
        lengths.append(compute(cache, sequence, 1 + drafts).checkpoint_lengths.numpy()[0])
    assert [n for n in lengths if n] == [64, 128]


def test_decoding_keeps_a_checkpoint_at_every_interval():
    """Checkpoints D4."""
    cache = make()
    sequence = cache.add_sequence(range(250))
    compute(cache, sequence, 250)
    assert [n for n in decode(cache, sequence, range(250, 520)) if n] == [256, 512]
    assert cache.stats().num_cached_states == 3
    other = cache.add_sequence(range(520))
    assert (other.num_computed_tokens, other.num_cached_tokens) == (512, 512)


@pytest.mark.parametrize(
    ("full", "state", "branch"),
    [(280, 192, 256), (256, 192, 256), (130, 0, 128), (250, 192, 0), (230, 192, 0), (63, 0, 0)],
)
def test_a_prefill_past_a_shared_prefix_keeps_its_checkpoint_before_that_ends(full, state, branch):
    """Branch points D5: the blocks up to `full` are cached, and the deepest state is after `state` tokens."""
    cache = make(StateSpec((PLANE,), chunk=64, interval=1024))
    first = cache.add_sequence(range(state + 1))
    for count in [state] * bool(state) + [1]:
        compute(cache, first, count)
    decode(cache, first, range(state + 1, full))
    second = cache.add_sequence([*range(full), *range(1000, 1300)])
    assert second.num_computed_tokens == state
    count = full + 200 - state
    batch = compute(cache, second, count)
    expected = checkpoint_length(state, count, 64, 1024, 16, 0, full // 16 * 16)
    assert batch.checkpoint_lengths.numpy()[0] == expected
    assert (expected if branch else min(expected, full + 1)) == (branch or full + 1)
    third = cache.add_sequence([*range(full), 7])
    assert third.num_computed_tokens == (branch or state)


def test_reuse_ends_at_the_deepest_state_and_shares_the_blocks_after_it():
    cache = make()
    first = cache.add_sequence(range(100))
    compute(cache, first, 100)  # a state after 64 tokens
    second = cache.add_sequence([*range(90), 7, 7])
    assert cache.match_length([*range(90), 7, 7]) == second.num_computed_tokens == second.num_cached_tokens == 64
    blocks = [cache._parts.tables.blocks(one.row).tolist() for one in (first, second)]
    assert blocks[1] == blocks[0][:5], "the blocks of tokens 0 to 79"
    batch = compute(cache, second, 28)
    slots = batch.group(0).slot_mapping.numpy()
    assert (slots[:16] == -1).all()
    assert (slots[16:28] >= 0).all()
    assert cache._parts.tables.blocks(second.row)[:5].tolist() == blocks[0][:5], "nothing was copied"
    stats = cache.stats()
    assert (stats.prefix_hit_tokens, stats.prefix_shared_tokens, stats.prefix_query_tokens) == (64, 80, 192)


def test_a_request_that_begins_with_a_cached_state_never_changes_it():
    """Slots D7."""
    cache = make()
    first = cache.add_sequence(range(64))
    compute(cache, first, 64)
    cache.remove(first)
    (slot,) = cached_states(cache._parts.prefix)
    second = cache.add_sequence([*range(64), 1])
    assert table(cache).slot(second.row) == slot
    batch = compute(cache, second, 1)
    assert batch.state_copies.tolist() == [[slot, batch.state_write.numpy()[0]]]
    assert batch.state_write.numpy()[0] != slot
    assert (temporal(cache)[slot] == 64).all()
    assert (temporal(cache)[table(cache).slot(second.row)] == 65).all()
    cache.remove(second)
    assert table(cache).slots.num_used == 1
    assert cache.clear_prefix_cache() == 4
    assert table(cache).slots.num_used == 0


def test_ping_pong_reads_a_cached_state_without_a_copy():
    cache = make(StateSpec((PLANE,), in_place=False))
    first = cache.add_sequence(range(64))
    compute(cache, first, 64)
    (slot,) = cached_states(cache._parts.prefix)
    second = cache.add_sequence([*range(64), 1])
    batch = compute(cache, second, 1)
    assert batch.state_read.numpy()[0] == slot
    assert not len(batch.state_copies)
    assert batch.state_write.numpy()[0] != slot


def test_a_hit_that_gives_up_its_last_block_ends_with_an_earlier_state():
    cache = make(recompute_last_block=True)
    first = cache.add_sequence(range(200))
    compute(cache, first, 64)
    compute(cache, first, 64)
    assert cache.add_sequence(range(200)).num_computed_tokens == cache.match_length(range(200)) == 64
