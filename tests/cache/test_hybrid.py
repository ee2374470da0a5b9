"""PagedKVCache with layers that keep states: construction, checkpoints, reuse, eviction, refusals and memory."""

import math

import numpy as np
import pytest

from pagecore import (
    Alias,
    AttentionSpec,
    PagedCacheConfig,
    PagedKVCache,
    Plane,
    StateSpec,
    StaticKVCache,
    SwapSpace,
    TensorParallel,
    make_cache,
)
from pagecore.errors import DeviceError, InvalidSequence, NotEnoughMemory, OutOfBlocks, ShapeError, UnsupportedOption
from pagecore.storage import StatePool, state_budget
from pagecore.storage.state_shapes import delta_planes, mamba2_planes
from tests.reference.state_table import checkpoint_length

FULL = AttentionSpec(1, 8, dtype="float32")
PLANE = Plane("temporal", (2,), "float32", per="sequence")
CHUNKED = StateSpec((PLANE,), chunk=64, interval=256)


def make(spec=CHUNKED, num_states=9, **options):
    given = {"block_size": 16, "num_blocks": 200, "max_sequences": 6} | options
    return PagedKVCache([FULL, spec, FULL, spec], num_states=num_states, **given)


def table(cache):
    return cache._parts.state.states


def temporal(cache, layer=1):
    return cache.plane("temporal", layer).numpy()


def compute(cache, sequence, count):
    """Compute a step whose state after n tokens is n; return its batch."""
    batch = cache.prepare([sequence], count)
    before = sequence.num_computed_tokens
    for layer in (1, 3):
        assert (temporal(cache, layer)[batch.state_read.numpy()[0]] == before).all()
        temporal(cache, layer)[batch.checkpoint_write.numpy()[0]] = batch.checkpoint_lengths.numpy()[0]
        temporal(cache, layer)[batch.state_write.numpy()[0]] = before + count
        temporal(cache, layer)[0] = 0
    cache.commit(batch)
    cache.check_invariants()
    return batch


# Construction.


def test_layers_keep_their_model_index():
    wide = StateSpec((Plane("conv", (3, 2), "bfloat16", per="sequence"), PLANE), chunk=64, interval=256)
    cache = PagedKVCache([CHUNKED, FULL, wide, FULL], num_blocks=5, num_states=7, max_sequences=2)
    assert (cache.num_layers, cache.num_groups, cache.num_states) == (4, 1, 7)
    assert cache.plane("temporal", 0).shape == cache.plane("temporal", 2).shape == (7, 2)
    assert cache.plane("conv", 2).shape == (7, 3, 2)
    assert cache.key(1).shape == cache.key(3).shape == (5, 16, 1, 8)
    assert cache.spec(2) is wide
    assert cache.nbytes == 2 * 2 * 5 * 16 * 8 * 4 + 7 * (2 * 8 + 12)
    temporal(cache, 0)[1] = 3
    assert not (temporal(cache, 2)[1] == 3).all()


def test_layers_without_blocks_refuse_what_needs_blocks():
    cache = make()
    batch = cache.prepare([cache.add_sequence(range(3))], 3)
    calls = [
        lambda: cache.group_of(1),
        lambda: batch.group(3),
        lambda: batch.copied_blocks(1),
        lambda: cache.write(1, np.zeros((3, 1, 8)), np.zeros((3, 1, 8)), batch),
        lambda: cache.attend(1, np.zeros((3, 1, 8), np.float32), batch),
        lambda: cache.key(1),
        lambda: batch.draft_write,
    ]
    for call in calls:
        with pytest.raises(UnsupportedOption):
            call()
    plain = PagedKVCache(FULL, num_blocks=3)
    with pytest.raises(UnsupportedOption, match="no layer of the cache keeps a state"):
        _ = plain.make_batch().state_read
    assert plain.num_states == 0


@pytest.mark.parametrize("change", [{"chunk": 32}, {"interval": 512}, {"in_place": False}, {"draft_tokens": 1}])
def test_state_layers_must_have_equal_rules(change):
    other = StateSpec((PLANE,), **{"chunk": 64, "interval": 256} | change)
    with pytest.raises(UnsupportedOption, match="give all of them the same"):
        PagedKVCache([FULL, CHUNKED, other], num_blocks=5)


def test_refused_models():
    with pytest.raises(UnsupportedOption, match=r"layer 2 is Alias\(1\)"):
        PagedKVCache([FULL, CHUNKED, Alias(1)], num_blocks=5)
    with pytest.raises(UnsupportedOption, match="layer 0 is a StateSpec, which only a PagedKVCache serves"):
        StaticKVCache([CHUNKED, FULL], None, 2, 8)
    with pytest.raises(UnsupportedOption, match="num_states is given, but no layer keeps a state"):
        PagedKVCache(FULL, num_blocks=5, num_states=4)
    with pytest.raises(UnsupportedOption, match=r"state_ratio is 0\.5, but no layer keeps a state"):
        PagedKVCache(FULL, memory="1MiB", state_ratio=0.5)
    for sizes in ({"num_blocks": 5}, {"memory": "1MiB", "num_states": 5}):
        with pytest.raises(UnsupportedOption, match="a ratio divides memory"):
            PagedKVCache([FULL, CHUNKED], **sizes, state_ratio=0.5)
    with pytest.raises(ShapeError, match="num_states is 3; one sequence needs 5"):
        make(StateSpec((PLANE,), in_place=False, draft_tokens=2), num_states=3)


@pytest.mark.parametrize(("rules", "each"), [({}, 2), ({"in_place": False}, 3), ({"draft_tokens": 3}, 5)])
def test_by_default_every_sequence_has_a_state_and_a_checkpoint(rules, each):
    assert make(StateSpec((PLANE,), **rules), num_states=None).num_states == 1 + 6 * each


def test_a_memory_is_divided_by_the_ratio():
    """Budget D10, in megabytes."""
    spec = StateSpec(mamba2_planes(64, 1, 4, 16, 16), chunk=16, interval=64)
    cache = PagedKVCache([FULL, spec, spec], memory="40MiB", state_ratio=0.9, max_sequences=4)
    states = state_budget("40MiB", 0.9)
    assert states == math.floor(40 * 2**20 * 0.9 / 1.9)
    assert cache.num_states == StatePool.slots_for(states, spec, 2) == states // (2 * spec.nbytes)
    blocks = cache.num_blocks[0] * 16 * 2 * 8 * 4
    assert 40 * 2**20 - 1024 - 2 * spec.nbytes < cache.nbytes <= 40 * 2**20
    assert cache.nbytes == blocks + cache.num_states * 2 * spec.nbytes
    few = PagedKVCache([FULL, spec], memory="1MiB", num_states=5, max_sequences=4)
    assert few.num_states == 5
    for options in ({"memory": 100}, {"memory": 5 * spec.nbytes, "num_states": 5}):
        with pytest.raises(NotEnoughMemory):
            PagedKVCache([FULL, spec], **options)


def test_a_config_keeps_the_dtypes_of_states():
    config = PagedCacheConfig(num_blocks=5, dtype="float16", max_sequences=2, num_states=7)
    cache = make_cache(config, [FULL, CHUNKED])
    assert cache.num_states == 7
    assert (str(cache.key(0).dtype), str(cache.plane("temporal", 1).dtype)) == ("float16", "float32")


def test_a_rank_takes_planes_that_were_made_for_it():
    full = AttentionSpec(4, 8, dtype="float32")
    split = StateSpec(delta_planes(4, 4, 8, 8, ranks=2), ranks=2)
    cache = PagedKVCache([full, split], num_blocks=5, max_sequences=2, parallel=TensorParallel(1, 2))
    assert cache.plane("temporal", 1).shape == (5, 2, 8, 8)
    assert cache.key(0).shape[2] == 2
    for parallel, spec in ((TensorParallel(0, 2), StateSpec(delta_planes(4, 4, 8, 8))), (None, split)):
        with pytest.raises(UnsupportedOption, match="planes of one of"):
            PagedKVCache([full, spec], num_blocks=5, parallel=parallel)


def test_a_cache_without_bytes_lists_what_its_owner_moves():
    cache = make(device="none")
    first = cache.add_sequence(range(70))
    batch = cache.prepare([first], 70)
    assert batch.state_zeros.tolist() == [1]
    cache.commit(batch)
    child = cache.fork(first)
    batch = cache.prepare([child], 1)
    assert batch.state_copies.tolist() == [[1, batch.state_write.numpy()[0]]]
    with pytest.raises(DeviceError, match="stores no planes"):
        cache.plane("temporal", 1)


# Checkpoints and reuse.


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


def test_decoding_keeps_a_checkpoint_at_every_interval():
    """Checkpoints D4."""
    cache = make()
    sequence = cache.add_sequence(range(600))
    compute(cache, sequence, 250)
    lengths = [compute(cache, sequence, 1).checkpoint_lengths.numpy()[0] for _ in range(270)]
    assert [n for n in lengths if n] == [256, 512]
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
    first = cache.add_sequence(range(full))
    for count in [state] * bool(state) + [1] * (full - state):
        compute(cache, first, count)
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
    (slot,) = cache._parts.prefix.held_states()
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
    (slot,) = cache._parts.prefix.held_states()
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


# Steps that end otherwise.


def test_an_abandoned_step_returns_to_the_checkpoint():
    cache = make()
    sequence = cache.add_sequence(range(100))
    compute(cache, sequence, 70)
    batch = cache.prepare([sequence], 10)
    temporal(cache)[batch.state_write.numpy()[0]] = np.nan
    cache.abandon(batch)
    cache.check_invariants()
    assert sequence.num_computed_tokens == 64
    assert not batch.state_read.numpy().any()
    assert not batch.state_write.numpy().any()
    compute(cache, sequence, 30)


def test_an_abandoned_first_step_past_a_state_gives_back_the_shared_blocks():
    cache = make()
    first = cache.add_sequence(range(100))
    compute(cache, first, 100)
    second = cache.add_sequence(range(100))
    cache.abandon(cache.prepare([second], 36))
    cache.check_invariants()
    assert (second.num_computed_tokens, second.capacity) == (64, 64)
    compute(cache, second, 36)


def test_ping_pong_abandons_exactly():
    cache = make(StateSpec((PLANE,), in_place=False))
    sequence = cache.add_sequence(range(100))
    compute(cache, sequence, 70)
    cache.abandon(cache.prepare([sequence], 10))
    assert sequence.num_computed_tokens == 70
    compute(cache, sequence, 10)


def test_rejected_drafts_keep_the_state_of_the_last_accepted_token():
    cache = make(StateSpec((PLANE,), draft_tokens=3))
    sequence = cache.add_sequence(range(70))
    batch = cache.prepare([sequence], 70)
    temporal(cache)[batch.state_write.numpy()[0]] = 70
    cache.commit(batch)
    batch = cache.prepare([sequence], 4)
    slots = batch.draft_write.numpy()[0]
    temporal(cache)[slots] = np.arange(71, 75)[:, None]
    cache.commit(batch, [2])
    cache.check_invariants()
    assert sequence.num_computed_tokens == 72
    assert table(cache).slot(sequence.row) == slots[1]
    assert (temporal(cache)[slots[1]] == 72).all()
    with pytest.raises(UnsupportedOption, match="the first token of a step must be accepted"):
        cache.commit(cache.prepare([sequence], 4), 0)


def test_a_partly_accepted_step_is_refused_without_draft_slots():
    cache = make()
    sequence = cache.add_sequence(range(70))
    batch = cache.prepare([sequence], 70)
    before = cache.stats()
    with pytest.raises(UnsupportedOption, match="69 of 70 tokens"):
        cache.commit(batch, [69])
    assert cache.stats() == before
    assert batch.in_flight
    cache.commit(batch)


def test_truncation_needs_a_state():
    cache = make()
    sequence = cache.add_sequence(range(100))
    compute(cache, sequence, 90)
    with pytest.raises(UnsupportedOption, match=r"length is 80.* give 64, 90 or more"):
        cache.truncate(sequence, 80)
    with pytest.raises(UnsupportedOption, match=r"length is 60.* give 0 to compute it again, or 90 or more"):
        cache.truncate(sequence, 60)
    cache.truncate(sequence, 95)
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (95, 90)
    cache.truncate(sequence, 64)
    cache.check_invariants()
    compute(cache, sequence, 1)
    cache.truncate(sequence, 0)
    compute(cache, sequence, 3)


def test_forks_share_a_state_until_they_write():
    cache = make()
    parent = cache.add_sequence(range(30))
    compute(cache, parent, 20)
    child, other = cache.fork(parent), cache.add_sequence([1])
    assert table(cache).slot(child.row) == table(cache).slot(parent.row)
    compute(cache, child, 1)
    cache.reorder([other], [child])
    compute(cache, other, 1)
    for sequence, length in ((parent, 20), (child, 21), (other, 22)):
        assert (temporal(cache)[table(cache).slot(sequence.row)] == length).all()


def test_compaction_is_refused():
    cache = make()
    sequence = cache.add_sequence(range(30))
    compute(cache, sequence, 20)
    with pytest.raises(UnsupportedOption, match="recurrent states"):
        cache.compact(sequence, range(10))


def test_a_state_that_was_computed_elsewhere_arrives_with_its_sequence():
    sender, receiver = make(), make()
    sent = sender.add_sequence(range(90))
    compute(sender, sent, 80)
    assert sender.checkpoint(sent)[1] == 64
    received = receiver.add_sequence(range(90))
    batch = receiver.prepare_arrival(received, 80)
    assert not batch.checkpoint_write.numpy().any()
    for layer in (1, 3):
        temporal(receiver, layer)[batch.state_write.numpy()[0]] = temporal(sender, layer)[sender.state_slot(sent)]
    receiver.commit(batch)
    compute(receiver, received, 10)
    assert receiver.checkpoint(received) is None
    assert receiver.add_sequence(range(90)).num_computed_tokens == 0


def test_slots_of_a_sequence_without_a_row_are_refused():
    cache = make()
    space, sequence = SwapSpace(cache, num_blocks=9), cache.add_sequence(range(9))
    assert (cache.state_slot(sequence), cache.checkpoint(sequence)) == (0, None)
    compute(cache, sequence, 9)
    cache.swap_out(sequence, space)
    plain = PagedKVCache(FULL, num_blocks=3)
    for call in (cache.state_slot, cache.checkpoint):
        with pytest.raises(InvalidSequence, match="swapped out"):
            call(sequence)
    with pytest.raises(UnsupportedOption, match="no layer of the cache keeps a state"):
        plain.state_slot(plain.add_sequence([]))


# Slots that are short.


def test_states_are_evicted_alone_when_slots_are_short():
    cache = make(num_states=4)
    first = cache.add_sequence(range(64))
    compute(cache, first, 64)
    cache.remove(first)
    assert cache.stats().num_cached_states == 1
    others = [cache.add_sequence([i]) for i in range(3)]
    for other in others:
        compute(cache, other, 1)
    stats = cache.stats()
    assert (stats.num_cached_states, stats.num_evicted_states, stats.num_cached_blocks) == (0, 1, 4)
    assert cache.match_length(range(65)) == 0
    again = cache._parts.prefix.tree.match(list(range(65)))
    assert (again.num_tokens, again.num_shared_tokens) == (0, 64)


def test_states_are_evicted_with_their_blocks():
    cache = make(num_blocks=6)
    first = cache.add_sequence(range(64))
    compute(cache, first, 64)
    cache.remove(first)
    compute(cache, cache.add_sequence(range(100, 180)), 80)
    assert (cache.stats().num_evicted_states, cache.stats().num_evicted_blocks) == (1, 4)


def test_without_slots_a_step_is_refused_and_changes_nothing():
    cache = make(num_states=3)
    sequences = [cache.add_sequence([i]) for i in range(3)]
    for sequence in sequences[:2]:
        compute(cache, sequence, 1)
    before = cache.stats()
    assert cache.shortage([sequences[2]], 1) == 1
    assert cache.shortage(sequences[:2], 5) == 0
    with pytest.raises(OutOfBlocks, match="1 state slots are needed and 0 are available") as error:
        cache.prepare([sequences[2]], 1)
    assert (error.value.requested, error.value.available) == (1, 0)
    assert cache.try_prepare([sequences[2]], 1) is None
    assert cache.stats() == before
    cache.check_invariants()


def test_a_checkpoint_is_left_out_before_a_step_is_refused():
    cache = make(num_states=2)
    sequence = cache.add_sequence(range(100))
    batch = compute(cache, sequence, 100)
    assert not batch.checkpoint_write.numpy().any()
    cache.abandon(cache.prepare([sequence], 1))
    assert sequence.num_computed_tokens == 0


def test_idle_sequences_lose_their_checkpoints_before_a_step_is_refused():
    cache = make(num_states=3, prefix_cache=False)
    first, second = cache.add_sequence(range(100)), cache.add_sequence([1])
    compute(cache, first, 100)
    assert table(cache).checkpoint(first.row) is not None
    compute(cache, second, 1)
    assert table(cache).checkpoint(first.row) is None


# Swapping, scrubbing.


def test_states_travel_with_a_swapped_sequence():
    cache = make(num_states=6)
    space = SwapSpace(cache, num_blocks=20, num_states=4)
    sequence = cache.add_sequence(range(100))
    compute(cache, sequence, 90)
    child = cache.fork(sequence)
    cache.swap_out([sequence, child], space)
    cache.clear_prefix_cache()
    cache.check_invariants()
    assert (table(cache).slots.num_used, space.state_slots.num_used, space.num_states) == (0, 2, 4)
    for layer in (1, 3):
        temporal(cache, layer)[1:] = np.nan
    assert cache.shortage([sequence, child], 0) == 0
    cache.swap_in([child, sequence])
    cache.check_invariants()
    assert (space.state_slots.num_used, table(cache).checkpoint(sequence.row)[1]) == (0, 64)
    compute(cache, sequence, 1)
    compute(cache, child, 1)
    cache.truncate(sequence, 64)
    compute(cache, sequence, 1)


def test_a_space_without_slots_refuses_a_sequence():
    cache = make()
    space = SwapSpace(cache, num_blocks=20, num_states=2)
    sequence = cache.add_sequence(range(100))
    compute(cache, sequence, 90)
    before = cache.stats()
    with pytest.raises(OutOfBlocks, match="2 state slots are needed and 1 are free"):
        cache.swap_out([sequence], space)
    assert cache.stats() == before
    with pytest.raises(UnsupportedOption, match="num_states is given"):
        SwapSpace(PagedKVCache(FULL, num_blocks=3), num_blocks=3, num_states=3)


def test_a_space_divides_its_memory_like_the_cache():
    cache = make()
    space = SwapSpace(cache, memory=cache.nbytes // 2)
    assert cache.nbytes // 2 - 2048 < space.nbytes <= cache.nbytes // 2
    assert space.num_states == cache.num_states // 2


@pytest.mark.parametrize("in_place", [True, False])
def test_scrub_zeroes_slots_that_another_namespace_used(in_place):
    cache = make(StateSpec((PLANE,), in_place=in_place), scrub=True)
    assert not temporal(cache).any()
    first = cache.add_sequence(range(100), namespace="a")
    compute(cache, first, 100)
    cache.remove(first)
    cache.clear_prefix_cache()
    temporal(cache)[1:] = 5
    second = cache.add_sequence(range(100), namespace="b")
    batch = cache.prepare([second], 100)
    for slots in (batch.state_read, batch.state_write, batch.checkpoint_write):
        assert not temporal(cache)[slots.numpy()].any()
