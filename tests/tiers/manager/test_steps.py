"""Steps of a cache with tiers look only at the sequences that may have something to back up."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec
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
        if specs[-1] is not STATE:
            assert sum(copied) == sum((5 + i + 24 - is_late) // BLOCK for i in range(4))
        tiers.check_invariants()
