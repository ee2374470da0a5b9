"""Random operations on a cache, compared with a plain model that keeps all keys and values in lists."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from pagecore import AttentionSpec
from pagecore.cache import SwapSpace
from tests.cache.machine import SequenceMachine
from tests.faults import is_full
from tests.machines import drawn
from tests.reference.dense import dense_attention, limits_of

FULL = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)
WINDOWED = AttentionSpec(1, 16, 4, dtype="float32", num_query_heads=4, window=5, softcap=20.0)
LAYERS = [FULL, WINDOWED, FULL]
BLOCK = 4


class Twin:
    """Model of one sequence: ids, and key and value of each computed token in each layer."""

    def __init__(self, ids):
        self.ids = list(ids)
        self.stored = [([], []) for _ in LAYERS]

    @property
    def computed(self):
        return len(self.stored[0][0])

    @property
    def length(self):
        return len(self.ids)

    def copy(self):
        twin = Twin(self.ids)
        twin.stored = [(list(keys), list(values)) for keys, values in self.stored]
        return twin

    def cut(self, length):
        self.ids = self.ids[:length]
        self.stored = [(keys[:length], values[:length]) for keys, values in self.stored]


class CacheMachine(SequenceMachine):
    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(0)
        self.cache = self.make_cache(LAYERS, block_size=BLOCK, num_blocks=[14, 12], max_sequences=6)
        self.batch = self.cache.make_batch(6, 40)
        self.spaces = [SwapSpace(self.cache, num_blocks=[7, 6]), SwapSpace(self.cache, num_blocks=30)]
        self.twins = {}

    def is_full(self):
        return super().is_full() or len(self.twins) == 10

    @precondition(lambda self: self.resident())
    @rule(data=st.data(), which=st.integers(0, 1))
    def swap_out(self, data, which):
        sequences, space = self.pick(data, self.resident(), most=4), self.spaces[which]
        before = self.cache.stats()
        needed = [self.num_blocks(sequences, group) for group in range(2)]
        suffices = all(n <= pool.num_free for n, pool in zip(needed, space.block_pools, strict=True))
        assert self.cache.try_swap_out(sequences, space) == suffices
        if suffices:
            assert self.cache.stats().num_swapped_blocks == before.num_swapped_blocks + sum(needed)
            self.poison()
        else:
            assert self.cache.stats() == before
        assert all(sequence.is_swapped == suffices for sequence in sequences)

    def num_blocks(self, sequences, group):
        """Return the distinct blocks with computed tokens."""
        table = self.cache._parts.tables.table(group)
        return len(
            {
                block
                for sequence in sequences
                for block in table[sequence.row, : -(-sequence.num_computed_tokens // BLOCK)].tolist()
                if block
            }
        )

    @precondition(lambda self: not self.is_full())
    @rule(length=st.integers(0, 20))
    def add(self, length):
        ids = self.random.integers(0, 1000, length)
        self.twins[self.cache.add_sequence(ids)] = Twin(ids.tolist())

    @precondition(lambda self: self.resident())
    @rule(data=st.data(), padded=st.booleans())
    def step(self, data, padded):
        sequences = self.pick(data, self.resident(), most=4)
        counts = [data.draw(st.integers(0, 9)) for _ in sequences]
        out = self.batch if padded else None
        if self.is_refused(sequences, counts, out):
            return
        batch = self.cache.prepare(sequences, counts, out)
        if data.draw(st.integers(0, 9)) == 0:
            self.cache.abandon(batch)
            return
        written = self.forward(batch, sequences, counts)
        accepted = None
        if data.draw(st.booleans()):
            accepted = [data.draw(st.integers(0, count)) for count in counts]
        self.cache.commit(batch, accepted)
        self.record(sequences, written, counts, counts if accepted is None else accepted)

    def forward(self, batch, sequences, counts):
        """Write random keys and values in every layer, attend, and compare each row with dense attention."""
        total = sum(counts)
        rows = batch.max_tokens
        assert batch.host.cu_query_lens.numpy()[len(sequences)] == total
        written = []
        for layer, spec in enumerate(LAYERS):
            key = self.random.normal(size=(rows, spec.num_kv_heads, spec.head_dim)).astype(np.float32)
            value = self.random.normal(size=(rows, spec.num_kv_heads, spec.v_head_dim)).astype(np.float32)
            query = self.random.normal(size=(rows, spec.num_query_heads, spec.head_dim)).astype(np.float32)
            self.cache.write(layer, key, value, batch)
            found = self.cache.attend(layer, query, batch)
            start = 0
            for sequence, count in zip(sequences, counts, strict=True):
                end = start + count
                keys, values = self.twins[sequence].stored[layer]
                expected = dense_attention(
                    query[start:end],
                    np.array([*keys, *key[start:end]]).reshape(-1, *key.shape[1:]),
                    np.array([*values, *value[start:end]]).reshape(-1, *value.shape[1:]),
                    **limits_of(spec),
                    softcap=spec.softcap,
                )
                np.testing.assert_allclose(found[start:end], expected, rtol=0, atol=2e-5)
                start = end
            assert not found[total:].any()
            written.append((key, value))
        return written

    def record(self, sequences, written, counts, accepted):
        start = 0
        for sequence, count, kept in zip(sequences, counts, accepted, strict=True):
            for (keys, values), (key, value) in zip(self.twins[sequence].stored, written, strict=True):
                keys.extend(key[start : start + kept])
                values.extend(value[start : start + kept])
            if kept < count:  # rejected ids, and all after them, are forgotten
                del self.twins[sequence].ids[self.twins[sequence].computed :]
            start += count

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def append(self, data):
        sequences = self.pick(data, list(self.twins), most=6)
        ids = self.random.integers(0, 1000, len(sequences))
        self.cache.append_tokens(sequences, ids)
        for sequence, one in zip(sequences, ids.tolist(), strict=True):
            self.twins[sequence].ids.append(one)

    def check_refused_truncation(self, twins, lengths):
        assert any(
            (twin.computed - WINDOWED.window + 1) // BLOCK * BLOCK
            > max(0, min(length, twin.computed) - WINDOWED.window + 1)
            for twin, length in zip(twins, lengths, strict=True)
        )

    @invariant()
    def holds_what_the_model_holds(self):
        self.cache.check_invariants()
        for sequence, twin in self.twins.items():
            assert sequence.tokens.tolist() == twin.ids
            assert sequence.num_computed_tokens == twin.computed
            assert sequence.is_swapped or sequence.capacity >= twin.computed
        assert self.cache.num_sequences == len(self.twins)

    def teardown(self):
        for sequence in self.twins:
            self.cache.remove(sequence)
        stats = self.cache.stats()
        assert stats.num_used_blocks == stats.num_swapped_blocks == 0
        assert stats.num_free_blocks + stats.num_evictable_blocks == stats.num_blocks == 24
        assert self.cache.clear_prefix_cache() == stats.num_evictable_blocks
        assert self.cache.stats().num_free_blocks == 24


TestCacheMachine = pytest.mark.slow(drawn(CacheMachine))
TestCacheMachine.settings = settings(max_examples=60 if is_full() else 26, stateful_step_count=30, deadline=None)
