"""Steps with states that are abandoned, rejected or truncated; forks and arrivals of states."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec, SwapSpace
from pagecore.errors import InvalidSequence, UnsupportedOption
from tests.cache.hybrids import FULL, PLANE, compute, make, table, temporal


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


@pytest.mark.parametrize("sinks", [0, 1, 6, 9])
def test_an_abandoned_step_returns_to_no_checkpoint_whose_window_has_holes(sinks):
    state = StateSpec((Plane("temporal", (4,), "float32", per="sequence"),), chunk=4, interval=8)
    spec = AttentionSpec(1, 8, dtype="float32", window=4, sink_tokens=sinks)
    cache = PagedKVCache([spec, state], block_size=1, num_blocks=60, num_states=6, max_sequences=2, device="none")
    sequence = cache.add_sequence(range(39))
    for _ in range(11):  # past the checkpoint at 8
        cache.commit(cache.prepare([sequence], 1))
    cache.abandon(cache.prepare([sequence], 1))
    # The token at 8 sees those from 5 on, of which sinks keep up to all three.
    assert sequence.num_computed_tokens == (8 if sinks > 7 else 0)
    batch = cache.prepare([sequence], 1)
    row = batch.group(0).block_table.numpy()[0]
    first = max(sequence.num_computed_tokens - 3, 0)
    assert (row[first : sequence.num_computed_tokens + 1] > 0).all()
    cache.commit(batch)
    cache.check_invariants()


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
