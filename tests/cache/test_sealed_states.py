"""Sealed blocks next to layers that keep states: checkpoints that prefixes can take, and returns to one."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, StateSpec, SwapSpace
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers
from tests.cache.hybrids import PLANE, compute, table, temporal
from tests.tiers.handover.conftest import pair_of
from tests.tiers.handover.pairs import assert_same, content, fill

BLOCK, RESIDUAL = 32, 40
SPEC = AttentionSpec(2, 64, 32, dtype="float32", num_query_heads=4, format="kivi4", residual=RESIDUAL)


def make(num_states=9, num_blocks=30, layer=SPEC, **rules):
    state = StateSpec((PLANE,), **{"chunk": 16, "interval": 32} | rules)
    sizes = {"num_blocks": num_blocks, "num_states": num_states, "max_sequences": 4}
    return PagedKVCache([layer, state, layer, state], **sizes)


def test_a_prompt_is_shared_up_to_a_state_while_its_sequence_runs():
    cache = make()
    first = cache.add_sequence(range(150))
    batch = compute(cache, first, 150)
    assert batch.checkpoint_lengths.numpy()[0] == first.num_sealed_tokens == 96  # and not 128
    second = cache.add_sequence([*range(120), 7])
    assert (second.num_computed_tokens, second.num_sealed_tokens, second.num_matched_tokens) == (96, 96, 96)
    compute(cache, second, 25)
    cache.remove(first)  # seals a block more
    assert cache.match_length(range(200)) == 96
    stats = cache.stats()
    assert (stats.prefix_hit_tokens, stats.num_cached_states) == (96, 1)


def test_tokens_past_a_state_are_computed_again_in_blocks_of_the_sequence():
    cache = make(interval=1024)
    first = cache.add_sequence(range(230))
    for count in (96, 134):
        compute(cache, first, count)
    states = cache.stats().num_cached_states
    assert (first.num_sealed_tokens, states) == (160, 2)
    second = cache.add_sequence([*range(140), *range(900, 1000)])
    assert (second.num_computed_tokens, second.num_sealed_tokens, second.num_matched_tokens) == (32, 32, 128)
    tables = [cache.block_table(0).numpy()[one.row] for one in (first, second)]
    assert tables[0][0] == tables[1][0]
    batch = compute(cache, second, 208)
    assert (batch.group(0).slot_mapping.numpy()[:208] > 0).all()
    assert batch.checkpoint_lengths.numpy()[0] == 128  # where others branch off
    third = cache.add_sequence([*range(128), 5])
    assert third.num_computed_tokens == 128
    for sequence in (first, second, third):
        cache.remove(sequence)
    cache.clear_prefix_cache()
    assert table(cache).slots.num_used == 0
    assert cache.stats().num_free_blocks == cache.stats().num_blocks


def test_decoding_publishes_states_without_a_removal():
    cache = make()
    sequence = cache.add_sequence(range(400))
    compute(cache, sequence, 20)
    kept = [compute(cache, sequence, 1).checkpoint_lengths.numpy()[0] for _ in range(300)]
    assert [n for n in kept if n] == [64, 128, 192, 256, 320]  # further apart than the residual
    assert cache.stats().num_cached_states == 4
    assert cache.match_length(range(400)) == 256


def test_an_abandoned_step_returns_to_a_state_in_sealed_blocks():
    cache = make()
    sequence = cache.add_sequence(range(400))
    compute(cache, sequence, 150)
    for _ in range(35):
        compute(cache, sequence, 1)
    assert (cache.checkpoint(sequence)[1], sequence.num_sealed_tokens) == (96, 128)
    cache.abandon(cache.prepare([sequence], 3))
    assert (sequence.num_computed_tokens, sequence.num_sealed_tokens) == (96, 96)
    assert cache.held_from(sequence, cache.group_of(0)) == 96
    cache.check_invariants()
    compute(cache, sequence, 60)
    assert sequence.num_sealed_tokens == 96


def test_a_commit_whose_quantisation_fails_changes_no_state(monkeypatch):
    cache = make(num_states=12, draft_tokens=3)
    sequence = cache.add_sequence(range(400))
    compute(cache, sequence, 150)
    while sequence.num_computed_tokens < 166:
        compute(cache, sequence, 1)
    before, kept = cache.stats(), cache.checkpoint(sequence)
    batch = cache.prepare([sequence], 4, parents=[[-1, 0, 0, 2]])
    for k, slot in enumerate(batch.draft_write.numpy()[0]):
        for layer in (1, 3):
            temporal(cache, layer)[slot] = 167 + [0, 1, 1, 2][k] + (0.5 if k == 1 else 0)

    def fail(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("pagecore.cache.memory.sealer.seal_kv", fail)
        with pytest.raises(MemoryError):
            cache.commit(batch, accepted_path=[[0, 2]])
    assert batch.in_flight
    assert (sequence.num_computed_tokens, sequence.num_sealed_tokens, cache.checkpoint(sequence)) == (166, 96, kept)
    cache.commit(batch, accepted_path=[[0, 2]])
    assert sequence.num_computed_tokens == 168
    assert (temporal(cache)[cache.state_slot(sequence)] == 168).all()
    assert sequence.num_sealed_tokens == 128
    assert cache.stats().num_cached_states == before.num_cached_states
    cache.check_invariants()


@pytest.mark.parametrize("in_place", [True, False])
def test_rejected_drafts_leave_the_state_after_the_accepted_ones(in_place):
    cache = make(draft_tokens=3, in_place=in_place, num_states=16)
    sequence = cache.add_sequence(range(70))
    compute(cache, sequence, 70)
    sealed = sequence.num_sealed_tokens
    for accepted in (2, 4, 1, 3):
        batch = cache.prepare([sequence], 4)
        before = sequence.num_computed_tokens
        for layer in (1, 3):
            assert (temporal(cache, layer)[batch.state_read.numpy()[0]] == before).all()
            for k, slot in enumerate(batch.draft_write.numpy()[0]):
                temporal(cache, layer)[slot] = before + k + 1
        cache.commit(batch, accepted=[accepted])
        assert (temporal(cache)[cache.state_slot(sequence)] == sequence.num_computed_tokens).all()
        cache.check_invariants()
    assert (sequence.num_computed_tokens, sealed, sequence.num_sealed_tokens) == (80, 0, 32)


def test_forks_and_swapped_sequences_keep_their_states():
    cache = make()
    sequence = cache.add_sequence(range(300))
    compute(cache, sequence, 150)
    child = cache.fork(sequence)
    compute(cache, child, 20)
    space = SwapSpace(cache, num_blocks=12, num_states=6)
    cache.swap_out([child, sequence], space)
    cache.clear_prefix_cache()
    for layer in (1, 3):
        temporal(cache, layer)[:] = -1
    cache.swap_in([sequence, child])
    assert (sequence.num_sealed_tokens, child.num_sealed_tokens) == (96, 128)
    temporal(cache)[0] = temporal(cache, 3)[0] = 0
    compute(cache, sequence, 10)
    compute(cache, child, 10)


def test_a_host_tier_returns_sealed_blocks_and_the_state_after_them():
    cache = make()
    with Tiers(cache, HostTier(cache, num_blocks=20, num_states=6)) as tiers:
        sequence = cache.add_sequence(range(150))
        compute(cache, sequence, 150)
        keys = cache.sealed_planes(0).key.numpy()[cache.block_table(0).numpy()[sequence.row, :3]].copy()
        cache.remove(sequence)
        cache.clear_prefix_cache()
        for layer in (1, 3):
            temporal(cache, layer)[:] = -1
        temporal(cache)[0] = temporal(cache, 3)[0] = 0
        cache.sealed_planes(0).key.numpy()[1:] = -1
        again = tiers.add_sequence(range(200))
        assert again.num_computed_tokens == again.num_sealed_tokens == 96
        found = cache.sealed_planes(0).key.numpy()[cache.block_table(0).numpy()[again.row, :3]]
        np.testing.assert_array_equal(found, keys)
        compute(cache, again, 50)
        tiers.check_invariants()


def test_a_sequence_with_states_and_sealed_blocks_is_handed_over(tmp_path):
    sender, receiver = make(), make()
    fill(receiver, 2)
    sequence = sender.add_sequence(range(200))
    temporal(sender)[0] = temporal(sender, 3)[0] = 0
    compute(sender, sequence, 150)
    with pair_of("unix", tmp_path) as (exporter, importer):
        manifest = export_sequence(sender, sequence, transport=exporter)
        arrived = import_sequence(receiver, manifest, transport=importer)
        assert exporter.drain(10)
    assert (arrived.num_computed_tokens, arrived.num_sealed_tokens, receiver.checkpoint(arrived)[1]) == (150, 96, 96)
    assert_same(content(sender, sequence), content(receiver, arrived))
    temporal(receiver)[0] = temporal(receiver, 3)[0] = 0
    compute(receiver, arrived, 20)
    assert receiver.match_length(range(200)) == 96
