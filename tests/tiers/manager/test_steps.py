"""Steps of a cache with tiers look only at the sequences that may have something to back up."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, Plane, ShapeError, StateSpec
from pagecore.tiers import HostTier, Tiers

BLOCK = 4
STATE = StateSpec([Plane("state", (1,), "int32", per="sequence")], chunk=4, interval=8)


@pytest.mark.parametrize("specs", [[AttentionSpec(1, 8)], [AttentionSpec(1, 8), STATE], [STATE]])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_decode_step_backs_up_only_sequences_that_have_completed_a_block(monkeypatch, specs, is_late):
    """Prompts of 5 to 8 tokens: each sequence completes a block in every fourth step, one sequence a step.

    With `is_late`, the id of a step's token is known after the next commit, as with overlap.
    """
    states = {"num_states": 40} if specs[-1] is STATE else {}
    blocks = {} if specs == [STATE] else {"num_blocks": 60}
    cache = PagedKVCache(specs, block_size=BLOCK, max_sequences=4, max_tokens_per_sequence=64, **blocks, **states)
    with Tiers(cache, HostTier(cache, **blocks, **states)) as tiers:
        looked_at, copied = [], []
        backup = tiers.host.backup

        def counted(sequence, **options):
            looked_at.append(sequence)
            copied.append(backup(sequence, **options))
            return copied[-1]

        monkeypatch.setattr(tiers.host, "backup", counted)
        sequences = [cache.add_sequence(np.arange(5 + i) + 100 * i, id=i) for i in range(4)]
        cache.commit(cache.prepare(sequences, [5, 6, 7, 8]))
        for step in range(1, 25):
            looked_at.clear()
            if not is_late:
                cache.append_tokens(sequences, [step] * 4)
            with cache.prepare(sequences, 1) as batch:
                if is_late and step > 1:
                    cache.append_tokens(sequences, [step] * 4)
                cache.commit(batch)
            assert len(looked_at) <= 1 + (specs[-1] is STATE), "the one that has completed a block, or a checkpoint"
        lengths = [5 + i + 24 - is_late for i in range(4)]
        # States: after the last whole chunk of each prompt, and then in each interval.
        num_states = sum(
            len({(5 + i) // STATE.chunk * STATE.chunk, *range(STATE.interval, length + 1, STATE.interval)})
            for i, length in enumerate(lengths)
        )
        assert sum(copied) == (num_states if specs == [STATE] else sum(length // BLOCK for length in lengths))
        assert tiers.host.stats().num_cached_states == (num_states if states else 0)
        tiers.check_invariants()


@pytest.mark.parametrize("write", ["through", "second_hit"])
def test_a_step_without_a_new_block_offers_nothing_whatever_the_host_has_evicted(monkeypatch, write):
    cache = PagedKVCache([AttentionSpec(1, 8)], block_size=BLOCK, num_blocks=20)
    with Tiers(cache, HostTier(cache, num_blocks=20), write=write) as tiers:
        for _ in range(2):
            sequence = cache.add_sequence(np.arange(8))
            cache.commit(cache.prepare([sequence], 8 - sequence.num_cached_tokens))
        assert tiers.host.match(np.arange(9)) == 8
        assert tiers.host.clear() == 2
        offered, backup = [], tiers.host.backup
        monkeypatch.setattr(tiers.host, "backup", lambda one, **options: (offered.append(one), backup(one, **options)))
        for step in range(BLOCK - 1):
            cache.append_tokens([sequence], [step])
            cache.commit(cache.prepare([sequence], 1))
        assert not offered
        monkeypatch.undo()
        assert tiers.host.backup(sequence) == 2


def test_limits_of_changed_sequences_are_one_for_each():
    cache = PagedKVCache([AttentionSpec(1, 8)], block_size=BLOCK, num_blocks=20)
    host = HostTier(cache, num_blocks=20)
    sequences = [cache.add_sequence(np.arange(12) + 100 * i) for i in range(2)]
    cache.commit(cache.prepare(sequences, 12))
    host.backup(sequences, max_tokens=8)
    assert host.list_changed(sequences) == sequences
    assert host.list_changed(sequences, max_tokens=[8, 2**70]) == sequences[1:]
    with pytest.raises(ShapeError, match="1 max_tokens are given for 2 sequences"):
        host.list_changed(sequences, max_tokens=[8])


@pytest.mark.parametrize("write", ["through", "explicit"])
@pytest.mark.parametrize("length", [0, 4, 6, 7])
def test_blocks_that_are_computed_again_after_a_truncation_are_backed_up(write, length):
    """The sequence has as long a prefix as at its last backup, with other tokens."""
    cache = PagedKVCache([AttentionSpec(1, 8)], block_size=BLOCK, num_blocks=20)
    with Tiers(cache, HostTier(cache, num_blocks=20), write=write) as tiers:
        sequence = cache.add_sequence(np.arange(8))
        cache.commit(cache.prepare([sequence], 8))
        assert tiers.host.backup(sequence) == (2 if write == "explicit" else 0)
        cache.truncate([sequence], [length])
        others, num_new = list(range(50, 58 - length)), 2 - length // BLOCK
        cache.append_tokens([sequence], [others])
        cache.commit(cache.prepare([sequence], 8 - length))
        assert tiers.host.backup(sequence) == (num_new if write == "explicit" else 0)
        assert tiers.host.match_both([*range(length), *others, 0])[1] == 8
        assert tiers.host.stats().num_backed_up_blocks == 2 + num_new
        tiers.check_invariants()


def test_a_state_that_is_computed_again_after_a_truncation_is_backed_up():
    cache = PagedKVCache([STATE], block_size=BLOCK, num_states=20)
    with Tiers(cache, HostTier(cache, num_states=20)) as tiers:
        sequence = cache.add_sequence(np.arange(16))
        cache.commit(cache.prepare([sequence], 8))
        cache.truncate([sequence], [0])
        cache.append_tokens([sequence], [np.arange(50, 66)])
        cache.commit(cache.prepare([sequence], 8))
        assert tiers.host.match_both(np.arange(50, 59))[1] == 8
        assert tiers.host.stats().num_cached_states == 2


@pytest.mark.parametrize("limit", ["min_priority", "revoked", "compacted"])
def test_a_sequence_that_publishes_less_than_it_computes_is_not_offered_in_every_step(monkeypatch, limit):
    cache = PagedKVCache(
        [AttentionSpec(1, 8)], block_size=BLOCK, num_blocks=20, max_tokens_per_sequence=64, eviction_policy="priority"
    )
    with Tiers(cache, HostTier(cache, num_blocks=20, policy="priority", min_priority=50)) as tiers:
        sequence = cache.add_sequence(
            np.arange(12), priority=[(0, 8, 90), (8, None, 10 if limit == "min_priority" else 90)]
        )
        cache.commit(cache.prepare([sequence], 12))
        if limit == "revoked":
            cache.revoke_prefix(np.arange(12), valid=8)
        elif limit == "compacted":
            cache.compact(sequence, np.arange(11))
        tiers.host.backup(sequence)
        offered, backup = [], tiers.host.backup

        def counted(sequence, **options):
            offered.append(sequence)
            return backup(sequence, **options)

        monkeypatch.setattr(tiers.host, "backup", counted)
        for step in range(12):
            cache.append_tokens([sequence], [step])
            cache.commit(cache.prepare([sequence], 1))
        assert not offered
        assert tiers.host.match_both(sequence.tokens)[1] == (12 if limit == "revoked" else 8)
        tiers.check_invariants()
