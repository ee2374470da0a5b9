"""Caches with attention and states, and steps whose states are counts of tokens."""

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec

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
