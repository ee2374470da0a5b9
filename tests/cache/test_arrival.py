"""Arrivals: sequences whose tokens another cache has computed, with and without windows."""

import numpy as np
import pytest

from pagecore import InvalidSequence, OutOfBlocks, ShapeError, SwapSpace, UnsupportedOption
from tests.cache.handing_over import (
    Text,
    check_content,
    compute,
    computed,
    gathered,
    make,
    receive,
    reusable,
    taken_first,
    write_arrived,
)
from tests.cache.swaps import poison
from tests.faults import is_full
from tests.thinning import in_turn
from tests.together import together

WINDOWS = [1, 2, 4, 5, 6, 16, 31, 32, 33, 64, 96, 97, 500]


@pytest.mark.parametrize(("window", "block_size", "by_table"), in_turn(WINDOWS, [1, 4, 16], over=[[False, True]]))
def test_a_received_sequence_continues_as_if_it_had_been_computed_here(window, block_size, by_table):
    text = Text((None, window))
    sender, receiver = (make(text.windows, block_size=block_size, num_blocks=[220, 220]) for _ in range(2))
    sent = computed(sender, text, 96)
    poison(receiver)
    received = receiver.add_sequence(text.ids[:96])
    receive(receiver, received, gathered(sender, sent), by_table=by_table)
    poison(receiver)
    check_content(receiver, received, text)
    assert receiver.held_from(received, 1) == sender.held_from(sent, 1)
    for count in (1, 1, 20, 1):
        compute(receiver, received, text, count)
    check_content(receiver, received, text)
    receiver.check_invariants()


@pytest.mark.parametrize("length", [97, 100, 96, 81, 80, 50])
def test_other_sequences_reuse_the_prefix_of_a_received_one_that_its_windows_allow(length):
    text = Text((None, 32))
    sender, receiver = make(), make()
    sent = computed(sender, text, 96)
    poison(receiver)
    received = receiver.add_sequence(text.ids[:96])
    receive(receiver, received, gathered(sender, sent))
    poison(receiver)
    expected = 96 if length > 96 else 0
    assert receiver.match_length(text.ids[:length]) == expected
    third = receiver.add_sequence(text.ids[:length])
    assert third.num_cached_tokens == expected
    check_content(receiver, third, text)
    compute(receiver, third, text, length - expected)
    check_content(receiver, third, text)
    receiver.check_invariants()


def test_other_sequences_reuse_one_received_in_parts_up_to_the_end_of_each_part():
    text = Text((None, 32))
    sender, receiver = make(), make()
    received = receiver.add_sequence(text.ids[:96])
    sent = sender.add_sequence(text.ids[:96])
    for length in (48, 96):
        compute(sender, sent, text, length - sent.num_computed_tokens)
        receive(receiver, received, gathered(sender, sent))
    assert [receiver.match_length(text.ids[:length]) for length in (97, 96, 65, 50, 48)] == [96, 48, 48, 48, 0]
    third = receiver.add_sequence(text.ids[:70])
    check_content(receiver, third, text)
    compute(receiver, third, text, 70 - third.num_computed_tokens)


def test_blocks_outside_the_window_of_an_arrival_are_holes_with_padding_slots():
    receiver = make(num_blocks=[40, 4])
    received = receiver.add_sequence(range(96))
    batch = receiver.prepare_arrival(received, 96)
    full, windowed = (np.asarray(receiver.block_table(group))[received.row] for group in (0, 1))
    assert (full[:6] > 0).all()
    assert (windowed[:4] == 0).all()
    assert (windowed[4:6] > 0).all()
    slots = np.asarray(batch.group(1).slot_mapping)
    assert (slots[:64] == -1).all()
    assert slots[64:].tolist() == [windowed[4 + i // 16] * 16 + i % 16 for i in range(32)]
    assert (np.asarray(batch.group(0).slot_mapping) > 0).all()
    assert np.asarray(batch.positions).tolist() == list(range(96))
    receiver.check_invariants()
    receiver.commit(batch)
    assert receiver.held_from(received, 0) == 0
    assert receiver.held_from(received, 1) == 64
    receiver.check_invariants()


def test_a_window_pool_smaller_than_the_arrival_suffices():
    text = Text((None, 32))
    sender, receiver = make(), make(num_blocks=[8, 3])
    sent = computed(sender, text, 96)
    received = receiver.add_sequence(text.ids[:96])
    assert receiver.shortage([received], 96) == 4
    receive(receiver, received, gathered(sender, sent))
    check_content(receiver, received, text)


@pytest.mark.parametrize("num_blocks", [[6, 40], [40, 2]], ids=["full", "window"])
@pytest.mark.parametrize("has_batch", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_an_arrival_for_which_blocks_are_short_changes_nothing(num_blocks, has_batch, prefix_cache):
    receiver = make(num_blocks=num_blocks, prefix_cache=prefix_cache)
    received = receiver.add_sequence(range(96))
    out = receiver.make_batch(1, 96) if has_batch else None
    with pytest.raises(OutOfBlocks) as refused:
        receiver.prepare_arrival(received, 96, out)
    assert refused.value.requested == (6, 2)
    assert receiver.try_prepare_arrival(received, 96, out) is None
    assert received.num_computed_tokens == received.capacity == 0
    assert [pool.num_free for pool in receiver._parts.tables.pools] == [count - 1 for count in num_blocks]
    receiver.check_invariants()


def test_cached_blocks_are_evicted_for_an_arrival():
    text, other = Text((None, 32)), Text((None, 32), seed=1)
    sender, receiver = make(), make(num_blocks=[8, 5])
    sent = computed(sender, text, 96)
    first = computed(receiver, other, 40)
    receiver.remove(first)
    received = receiver.add_sequence(text.ids[:96])
    receive(receiver, received, gathered(sender, sent))
    assert receiver.stats().num_evicted_blocks > 0
    check_content(receiver, received, text)
    compute(receiver, received, text, 1)
    receiver.check_invariants()


def test_a_pool_full_of_pinned_blocks_refuses_an_arrival():
    text, other = Text((None, 32)), Text((None, 32), seed=1)
    receiver = make(num_blocks=[8, 5])
    pinned = computed(receiver, other, 40)
    received = receiver.add_sequence(text.ids[:96])
    assert receiver.try_prepare_arrival(received, 96) is None
    receiver.check_invariants()
    check_content(receiver, pinned, other)


@pytest.mark.parametrize("end", ["abandon", "lost", "exception", "remove"])
@pytest.mark.parametrize("cached", [0, 32, 50])
def test_an_abandoned_arrival_leaves_the_sequence_unchanged(cached, end):
    text = Text((None, 32))
    sender, receiver = make(), make()
    sent = computed(sender, text, 96)
    received = computed(receiver, text, cached, known=96) if cached else receiver.add_sequence(text.ids[:96])
    free = [pool.num_free for pool in receiver._parts.tables.pools]
    packed = gathered(sender, sent)
    batch = receiver.prepare_arrival(received, 96 - cached)
    write_arrived(receiver, received, packed, batch, cached, 96)
    receiver.check_invariants()
    if end == "remove":
        receiver.remove(received)
        assert (np.asarray(batch.group(1).slot_mapping) == -1).all()
        receiver.commit(batch)
        receiver.check_invariants()
        assert receiver.match_length(text.ids[:97]) == cached // 16 * 16
        return
    if end == "abandon":
        receiver.abandon(batch)
    elif end == "exception":
        with pytest.raises(KeyError), batch:
            raise KeyError
    del batch
    receiver.check_invariants()
    assert received.num_computed_tokens == cached
    assert [pool.num_free for pool in receiver._parts.tables.pools] == free
    poison(receiver)
    check_content(receiver, received, text)
    receive(receiver, received, packed)
    compute(receiver, received, text, 2)
    receiver.check_invariants()


def test_an_arrival_is_committed_whole():
    receiver = make()
    received = receiver.add_sequence(range(96))
    batch = receiver.prepare_arrival(received, 96)
    for accepted in (0, 95, [95]):
        with pytest.raises(ShapeError, match="whole"):
            receiver.commit(batch, accepted)
    receiver.commit(batch, 96)
    assert received.num_computed_tokens == 96


def test_the_step_of_an_arrival_does_not_attend():
    text = Text((None, 32))
    receiver = make()
    received = receiver.add_sequence(text.ids[:96])
    out = receiver.make_batch(1, 96)
    batch = receiver.prepare_arrival(received, 96, out)
    with pytest.raises(InvalidSequence, match="computed elsewhere"):
        receiver.attend(0, text.query[0][:96], batch)
    receiver.abandon(batch)
    with receiver.prepare([received], 3, out):
        receiver.write(0, text.key[0][:3], text.value[0][:3], out)
        receiver.attend(0, text.query[0][:3], out)
        receiver.abandon(out)


def test_a_block_whose_last_tokens_never_arrived_is_not_published():
    text = Text((None, 4))
    sender, receiver = make(text.windows, block_size=4), make(text.windows, block_size=4)
    sent = computed(sender, text, 40)
    received = computed(receiver, text, 6, known=40)  # tokens 6 and 7 of its second block never arrive
    poison(receiver)
    receive(receiver, received, gathered(sender, sent))
    check_content(receiver, received, text)
    assert receiver.match_length(text.ids[:9]) == 4
    third = receiver.add_sequence(text.ids[:41])
    assert third.num_cached_tokens == 40
    check_content(receiver, third, text)
    receiver.check_invariants()


@pytest.mark.parametrize("cut", [30, 14])
def test_a_sequence_truncated_inside_a_shared_block_takes_an_arrival(cut):
    text = Text((None, 40))
    sender, receiver = make(text.windows), make(text.windows)
    sent = computed(sender, text, 90)
    received = computed(receiver, text, 32, known=90)
    receiver.truncate(received, cut)
    receiver.append_tokens([received], [text.ids[cut:90]])
    receive(receiver, received, gathered(sender, sent))
    check_content(receiver, received, text)
    compute(receiver, received, text, 3)
    receiver.check_invariants()


def test_a_truncated_block_that_the_window_leaves_is_not_counted_as_saved():
    text = Text((None, 6))
    cache = make(text.windows, block_size=4, num_blocks=[60, 20])
    sequence = computed(cache, text, 16, known=40)
    cache.truncate(sequence, 14)
    cache.append_tokens([sequence], [text.ids[14:40]])
    cache.clear_prefix_cache()
    fillers = []
    while cache._parts.tables.pools[1].num_free > 1:
        fillers.append(computed(cache, Text((None, 6), seed=1), 1))
    before = cache.match_length(text.ids[:17]), cache.stats()
    assert before[0] == 16
    assert cache.try_prepare_arrival(sequence, 26) is None
    assert (cache.match_length(text.ids[:17]), cache.stats()) == before
    cache.check_invariants()
    cache.remove(fillers.pop())
    cache.commit(cache.prepare_arrival(sequence, 26))
    cache.check_invariants()


def test_a_fork_keeps_its_tokens_when_its_parent_takes_an_arrival():
    text = Text((None, 40))
    sender, receiver = make(text.windows), make(text.windows)
    sent = computed(sender, text, 90)
    received = computed(receiver, text, 40, known=90)
    child = receiver.fork(received)
    receive(receiver, received, gathered(sender, sent))
    compute(receiver, child, text, 5)
    for one in (received, child):
        check_content(receiver, one, text)
    receiver.check_invariants()


def test_a_received_sequence_can_be_swapped_forked_and_handed_over_again():
    text = Text((None, 32))
    sender, middle, receiver = make(), make(), make(block_size=4, num_blocks=[60, 60])
    first = middle.add_sequence(text.ids[:96])
    receive(middle, first, gathered(sender, computed(sender, text, 96)))
    child = middle.fork(first)
    space = SwapSpace(middle, num_blocks=20)
    middle.swap_out([first], space)
    with pytest.raises(InvalidSequence, match="swapped"):
        middle.held_from(first, 1)
    middle.swap_in([first])
    check_content(middle, first, text)
    last = receiver.add_sequence(text.ids[:96])
    receive(receiver, last, gathered(middle, first))
    for cache, one in ((middle, first), (middle, child), (receiver, last)):
        compute(cache, one, text, 2)
        cache.check_invariants()


def test_held_from_lists_the_tokens_that_can_be_handed_over():
    text = Text((None, 32))
    cache = make()
    sequence = cache.add_sequence(text.ids[:160])
    for length, first in ((1, 0), (31, 0), (46, 0), (47, 16), (62, 16), (63, 32), (160, 128)):
        compute(cache, sequence, text, length - sequence.num_computed_tokens)
        assert [cache.held_from(sequence, group) for group in (0, 1)] == [0, first]
    with cache.prepare([sequence], 5):
        assert cache.held_from(sequence, 1) == 128


@together(
    ("call", "error"),
    [
        (lambda cache, one: cache.held_from(one, 2), ShapeError),
        (lambda cache, one: cache.held_from("x"), InvalidSequence),
        (lambda cache, one: cache.prepare_arrival("x", 1), InvalidSequence),
        (lambda cache, one: cache.prepare_arrival(make().add_sequence([1]), 1), InvalidSequence),
        (lambda cache, one: cache.prepare_arrival(one, -1), ShapeError),
        (lambda cache, one: cache.prepare_arrival(one, [1, 2]), ShapeError),
        (lambda cache, one: cache.prepare_arrival(one, 201), ShapeError),
        (lambda cache, one: cache.prepare_arrival(one, 2**31 - 1), ShapeError),
        (lambda cache, one: cache.prepare_arrival(one, 2**70), ShapeError),
        (lambda cache, one: cache.prepare_arrival(one, 5, cache.make_batch(1, 4)), ShapeError),
        (lambda cache, one: cache.prepare_arrival(one, 5, make().make_batch()), InvalidSequence),
        (lambda cache, one: cache.prepare_arrival(one, 5, stream=0), UnsupportedOption),
    ],
)
def test_an_invalid_arrival_is_refused_and_changes_nothing(call, error):
    cache = make(max_tokens_per_sequence=192)
    one = cache.add_sequence(range(96))
    with pytest.raises(error):
        call(cache, one)
    assert one.capacity == 0
    cache.check_invariants()


def test_a_sequence_with_a_step_in_flight_cannot_take_an_arrival():
    cache = make()
    one = cache.add_sequence(range(96))
    batch = cache.prepare_arrival(one, 5)
    for call in (lambda: cache.prepare_arrival(one, 5), lambda: cache.prepare([one], 5)):
        with pytest.raises(InvalidSequence, match="in flight"):
            call()
    cache.abandon(one)
    with pytest.raises(InvalidSequence):
        cache.commit(batch)


@pytest.mark.parametrize("seed", range(60 if is_full() else 24))
def test_sequences_of_any_length_are_handed_over_with_exactly_their_windows(seed):
    random = np.random.default_rng(seed)
    size = int(random.choice([1, 2, 4, 7, 16]))
    windows = [None] * random.integers(0, 2) + [int(random.choice([1, 2, size, size + 1, 20, 33, 300]))]
    windows += [int(random.integers(1, 60))] * random.integers(0, 2)
    text = Text(tuple(dict.fromkeys(windows)))
    options = {
        "block_size": size,
        "num_blocks": [420] * len(text.windows),
        "prefix_cache": bool(random.integers(0, 5)),
        "eviction_policy": str(random.choice(["lru", "priority"])),
        "index_dtype": str(random.choice(["int32", "int64"])),
    }
    sender, receiver = (make(text.windows, **options) for _ in range(2))
    length, known = int(random.integers(1, 150)), int(random.integers(0, 60))
    packed = gathered(sender, computed(sender, text, length))
    present = [set() for _ in text.windows]
    if known:  # tokens shared with another prompt
        receiver.remove(computed(receiver, text, known))
        present = [set(range(known // size)) for _ in text.windows]
    poison(receiver)
    received = receiver.add_sequence(text.ids[:length])
    here = int(random.integers(0, 8))  # tokens that the receiver computes itself
    here = min(here, length - received.num_computed_tokens)
    compute(receiver, received, text, here)
    start = received.num_computed_tokens
    receive(receiver, received, packed, out=receiver.make_batch(3, 160) if seed % 2 else None)
    poison(receiver)
    check_content(receiver, received, text)
    receiver.check_invariants()
    for blocks, window in zip(present, text.windows, strict=True):
        blocks |= set(range(start // size))  # each block was published before its window moved on
        blocks |= set(range(max(start // size, taken_first(receiver, length, window)), length // size))
    for prompt in (length + 1, length, max(1, length - size), known + 1):
        expected = reusable(receiver, text, prompt, present) if receiver.has_prefix_cache else 0
        assert receiver.match_length(text.ids[:prompt]) == expected, (prompt, windows, size, length, start)
        with receiver.add_sequence(text.ids[:prompt]) as other:
            check_content(receiver, other, text)
    for count in (1, 5, 1):
        compute(receiver, received, text, count)
    other = receiver.add_sequence(text.ids[: length + 4])
    compute(receiver, other, text, length + 4 - other.num_computed_tokens)
    check_content(receiver, received, text)
    receiver.remove(other)
    receiver.remove(received)
    receiver.check_invariants()
    receiver.clear_prefix_cache()
    assert all(pool.num_free == pool.num_blocks - 1 for pool in receiver._parts.tables.pools)
