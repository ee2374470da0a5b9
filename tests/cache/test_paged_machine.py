"""A cache driven at random beside a plain model that keeps every key and value of every sequence in a list."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagecore import AttentionSpec, InvalidSequence, OutOfBlocks, PagedKVCache, UnsupportedOption
from tests.reference.dense import dense_attention

FULL = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)
WINDOWED = AttentionSpec(1, 16, 4, dtype="float32", num_query_heads=4, window=5, softcap=20.0)
LAYERS = [FULL, WINDOWED, FULL]
BLOCK = 4


class Twin:
    """What the model knows of one sequence: ids, and key and value of each computed token in each layer."""

    def __init__(self, ids):
        self.ids = list(ids)
        self.stored = [([], []) for _ in LAYERS]

    @property
    def computed(self):
        return len(self.stored[0][0])

    def copy(self):
        twin = Twin(self.ids)
        twin.stored = [(list(keys), list(values)) for keys, values in self.stored]
        return twin

    def cut(self, length):
        self.ids = self.ids[:length]
        self.stored = [(keys[:length], values[:length]) for keys, values in self.stored]


class CacheMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(0)
        self.cache = PagedKVCache(LAYERS, block_size=BLOCK, num_blocks=[14, 12], max_sequences=6)
        self.batch = self.cache.make_batch(6, 40)
        self.twins = {}

    def pick(self, data, least=1, most=1):
        count = data.draw(st.integers(least, min(most, len(self.twins))))
        return data.draw(st.permutations(list(self.twins)))[:count]

    def is_full(self):
        return len(self.twins) == 6

    @precondition(lambda self: not self.is_full())
    @rule(length=st.integers(0, 20))
    def add(self, length):
        ids = self.random.integers(0, 1000, length)
        self.twins[self.cache.add_sequence(ids)] = Twin(ids.tolist())

    @precondition(lambda self: self.twins)
    @rule(data=st.data(), padded=st.booleans())
    def step(self, data, padded):
        sequences = self.pick(data, most=4)
        counts = [data.draw(st.integers(0, 9)) for _ in sequences]
        out = self.batch if padded else None
        if self.too_long(sequences, counts) or self.cache.shortage(sequences, counts):
            before = self.cache.stats()
            try:
                self.cache.prepare(sequences, counts, out)
                raise AssertionError("prepared without blocks")
            except (OutOfBlocks, ValueError):
                assert self.cache.stats() == before
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

    def too_long(self, sequences, counts):
        room = self.cache.max_tokens_per_sequence
        return any(self.twins[s].computed + count > room for s, count in zip(sequences, counts, strict=True))

    def forward(self, batch, sequences, counts):
        """Write random keys and values in every layer, attend, and compare each row with dense attention."""
        total = sum(counts)
        rows = batch.max_tokens
        assert np.asarray(batch.cu_query_lens)[len(sequences)] == total
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
                    window=spec.window,
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
            start += count

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def append(self, data):
        sequences = self.pick(data, most=6)
        ids = self.random.integers(0, 1000, len(sequences))
        self.cache.append_tokens(sequences, ids)
        for sequence, one in zip(sequences, ids.tolist(), strict=True):
            self.twins[sequence].ids.append(one)

    @precondition(lambda self: self.twins and not self.is_full())
    @rule(data=st.data())
    def fork(self, data):
        (parent,) = self.pick(data)
        self.twins[self.cache.fork(parent)] = self.twins[parent].copy()

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def reorder(self, data):
        sequences = self.pick(data, most=4)
        parents = [data.draw(st.sampled_from(list(self.twins))) for _ in sequences]
        self.cache.reorder(sequences, parents)
        copies = [self.twins[parent].copy() for parent in parents]
        self.twins.update(zip(sequences, copies, strict=True))

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def truncate(self, data):
        (sequence,) = self.pick(data)
        twin = self.twins[sequence]
        length = data.draw(st.integers(0, len(twin.ids)))
        try:
            self.cache.truncate(sequence, length)
        except UnsupportedOption:
            released = (twin.computed - WINDOWED.window + 1) // BLOCK * BLOCK
            assert released > max(0, min(length, twin.computed) - WINDOWED.window + 1)
            return
        twin.cut(length)

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def remove(self, data):
        (sequence,) = self.pick(data)
        self.cache.remove(sequence)
        del self.twins[sequence]
        try:
            self.cache.remove(sequence)
            raise AssertionError("removed twice")
        except InvalidSequence:
            pass

    @invariant()
    def holds_what_the_model_holds(self):
        self.cache.check_invariants()
        for sequence, twin in self.twins.items():
            assert sequence.tokens.tolist() == twin.ids
            assert sequence.num_computed_tokens == twin.computed
            assert sequence.capacity >= twin.computed
        assert self.cache.num_sequences == len(self.twins)

    def teardown(self):
        for sequence in self.twins:
            self.cache.remove(sequence)
        stats = self.cache.stats()
        assert stats.num_used_blocks == 0
        assert stats.num_free_blocks == stats.num_blocks == 24


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
