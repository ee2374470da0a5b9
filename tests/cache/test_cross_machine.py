"""Random operations on a cache with cross attention, compared with a model that keeps encoder outputs in a dict."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagecore import AttentionSpec, CrossSpec, OutOfBlocks, PagedKVCache, SwapSpace
from tests.cache.cross_caches import attention
from tests.faults import is_full
from tests.machines import drawn
from tests.reference.dense import dense_attention

SELF = AttentionSpec(1, 8, dtype="float32", num_query_heads=2)
CROSS = CrossSpec(2, 8, dtype="float32", num_query_heads=2)
OTHER = CrossSpec(1, 4, dtype="float32", num_query_heads=2)
LAYERS = [SELF, CROSS, OTHER]
BLOCK = 4


class Output:
    """An encoder output: keys and values of each cross layer, once they are written."""

    def __init__(self, num_tokens, key):
        self.num_tokens = num_tokens
        self.key = key
        self.stored = None if num_tokens else [(np.zeros((0, 2, 8)),) * 2, (np.zeros((0, 1, 4)),) * 2]


class Twin:
    """Keys and values of the decoder, and the encoder output."""

    def __init__(self, ids, output):
        self.ids, self.output, self.keys, self.values = list(ids), output, [], []

    def copy(self):
        twin = Twin(self.ids, self.output)
        twin.keys, twin.values = list(self.keys), list(self.values)
        return twin


class CrossMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(0)
        self.cache = self.make_cache(LAYERS, block_size=BLOCK, num_blocks=[30, 9, 11], max_sequences=6)
        self.batch = self.cache.make_batch(6, 30, 40)
        self.spaces = [SwapSpace(self.cache, num_blocks=[9, 6, 6]), SwapSpace(self.cache, num_blocks=40)]
        self.twins = {}
        self.listed = {}  # the last output of each digest

    def make_cache(self, layers, **options):
        return PagedKVCache(layers, **options)

    def resident(self):
        return [each for each in self.twins if not each.is_swapped]

    def pick(self, data, among, most=4):
        count = data.draw(st.integers(1, min(most, len(among))))
        return data.draw(st.permutations(among))[:count]

    def outputs(self):
        return {id(twin.output): twin.output for twin in self.twins.values() if twin.output is not None}.values()

    def found(self, digest):
        """Return the last output with a digest, if a sequence holds it outside of swap spaces."""
        output = None if digest is None else self.listed.get(digest)
        holders = [sequence for sequence, twin in self.twins.items() if twin.output is output]
        is_here = any(sequence.cross_row >= 0 for sequence in holders)
        return output if holders and (output.stored is None or is_here) else None

    @precondition(lambda self: len(self.resident()) < 6 and len(self.twins) < 9)
    @rule(length=st.integers(1, 9), tokens=st.integers(0, 14), digest=st.none() | st.integers(0, 2), late=st.booleans())
    def add(self, length, tokens, digest, late):
        digest = digest if tokens else None
        output = self.found(digest)
        if output is None:
            output = Output(tokens, digest)
            self.listed[digest] = output
        ids = self.random.integers(0, 2, length)
        if late:
            sequence = self.cache.add_sequence(ids)
            self.cache.set_cross_tokens(sequence, output.num_tokens, digest=digest)
        else:
            sequence = self.cache.add_sequence(ids, cross_tokens=output.num_tokens, cross_digest=digest)
        assert sequence.is_cross_written == (output.stored is not None)
        twin = Twin(ids.tolist(), output)
        if sequence.num_cached_tokens:
            assert digest is not None or not tokens
            assert not late
            self.read_prefix(sequence, twin)
        self.twins[sequence] = twin

    def read_prefix(self, sequence, twin):
        """Copy a reused prefix from the planes; only sequences with this encoder output have written it."""
        count = sequence.num_cached_tokens
        blocks = self.cache._parts.tables.table(0)[sequence.row][: count // BLOCK]
        self.reused = True
        for name, into in (("key", twin.keys), ("value", twin.values)):
            into.extend(self.plane(name, blocks))

    def plane(self, name, blocks):
        return self.cache.plane(name, 0).numpy()[blocks].reshape(-1, 1, 8).copy()

    @precondition(lambda self: self.resident())
    @rule(data=st.data(), padded=st.booleans())
    def step(self, data, padded):
        sequences = self.pick(data, self.resident())
        counts = [data.draw(st.integers(0, 5)) for _ in sequences]
        writes = []
        for sequence, count in zip(sequences, counts, strict=True):
            output = self.twins[sequence].output
            if count and output.stored is None and output not in writes:
                writes.append(output)
        total = sum(output.num_tokens for output in writes)
        out = self.batch if padded and total <= 40 else None
        if self.cache.shortage(sequences, counts):
            before = self.cache.stats()
            try:
                self.cache.prepare(sequences, counts, out)
                raise AssertionError("prepared without blocks")
            except OutOfBlocks:
                assert self.cache.stats() == before
            return
        batch = self.cache.prepare(sequences, counts, out)
        assert batch.cross.num_tokens == total
        if data.draw(st.integers(0, 5)) == 0:
            self.cache.abandon(batch)
            return
        stored = self.write_outputs(batch, writes)
        self.attend(batch, sequences, counts, stored)
        self.cache.commit(batch)
        for output in writes:
            output.stored = stored[output]

    def write_outputs(self, batch, writes):
        stored = {output: output.stored for output in self.outputs()}
        for output in writes:
            stored[output] = []
        for layer, spec in ((1, CROSS), (2, OTHER)):
            sides = [self.random.normal(size=(batch.cross.max_tokens, spec.num_kv_heads, spec.head_dim)) for _ in "kv"]
            keys, values = (side.astype(np.float32) for side in sides)
            if batch.cross.num_tokens:
                self.cache.write(layer, keys, values, batch)
            first = 0
            for output in writes:
                rows = slice(first, first + output.num_tokens)
                stored[output].append((keys[rows], values[rows]))
                first += output.num_tokens
        return stored

    def attend(self, batch, sequences, counts, stored):
        rows = batch.max_tokens
        key, value = (self.random.normal(size=(rows, 1, 8)).astype(np.float32) for _ in "kv")
        self.cache.write(0, key, value, batch)
        for layer, spec in enumerate(LAYERS):
            query = self.random.normal(size=(rows, 2, spec.head_dim)).astype(np.float32)
            found = self.cache.attend(layer, query, batch)
            start = 0
            for sequence, count in zip(sequences, counts, strict=True):
                twin, end = self.twins[sequence], start + count
                if layer == 0:
                    whole = [np.array([*old, *new[start:end]]).reshape(-1, 1, 8)
                             for old, new in ((twin.keys, key), (twin.values, value))]  # fmt: skip
                    expected = dense_attention(query[start:end], *whole)
                elif count:
                    expected = attention(query[start:end], *stored[twin.output][layer - 1])
                if count:
                    np.testing.assert_allclose(found[start:end], expected, rtol=0, atol=2e-5)
                start = end
            assert not found[start:].any()
        start = 0
        for sequence, count in zip(sequences, counts, strict=True):
            twin = self.twins[sequence]
            twin.keys.extend(key[start : start + count])
            twin.values.extend(value[start : start + count])
            start += count

    @precondition(lambda self: self.resident() and len(self.resident()) < 6 and len(self.twins) < 9)
    @rule(data=st.data())
    def fork(self, data):
        (parent,) = self.pick(data, self.resident(), 1)
        self.twins[self.cache.fork(parent)] = self.twins[parent].copy()

    @precondition(lambda self: len(self.resident()) > 1)
    @rule(data=st.data())
    def reorder(self, data):
        children = self.pick(data, self.resident())
        parents = [data.draw(st.sampled_from(self.resident())) for _ in children]
        self.cache.reorder(children, parents)
        copies = [self.twins[parent].copy() for parent in parents]
        self.twins.update(zip(children, copies, strict=True))

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def remove(self, data):
        (sequence,) = self.pick(data, list(self.twins), 1)
        self.cache.remove(sequence)
        del self.twins[sequence]

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def truncate(self, data):
        (sequence,) = self.pick(data, self.resident(), 1)
        twin = self.twins[sequence]
        length = data.draw(st.integers(0, min(len(twin.ids), len(twin.keys))))
        self.cache.truncate(sequence, length)
        twin.ids, twin.keys, twin.values = twin.ids[:length], twin.keys[:length], twin.values[:length]

    @precondition(lambda self: self.resident())
    @rule(data=st.data(), which=st.integers(0, 1))
    def swap_out(self, data, which):
        sequences = self.pick(data, self.resident())
        before = self.cache.stats()
        if not self.cache.try_swap_out(sequences, self.spaces[which]):
            assert self.cache.stats() == before

    @precondition(lambda self: len(self.resident()) < len(self.twins))
    @rule(data=st.data())
    def swap_in(self, data):
        swapped = self.pick(data, [each for each in self.twins if each.is_swapped])
        before = self.cache.stats()
        if not self.cache.try_swap_in(swapped):
            assert self.cache.stats() == before

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def swap_in_and_step(self, data):
        """The shortage of swapped sequences is 0 if and only if a swap_in and the prepare after it succeed."""
        sequences = self.pick(data, list(self.twins), 3)
        swapped = [each for each in sequences if each.is_swapped]
        if len(self.resident()) + len(swapped) > 6:
            return
        counts = [data.draw(st.integers(0, 5)) for _ in sequences]
        lacks = self.cache.shortage(sequences, counts)
        batch = None
        if self.cache.try_swap_in(swapped):
            batch = self.cache.try_prepare(sequences, counts)
        assert (batch is not None) == (lacks == 0)
        if batch is not None:
            self.cache.abandon(batch)

    @invariant()
    def holds_what_the_model_holds(self):
        self.cache.check_invariants()
        for sequence, twin in self.twins.items():
            assert sequence.num_computed_tokens == len(twin.keys)
            assert sequence.num_cross_tokens == twin.output.num_tokens
        resident = {id(self.twins[each].output): self.twins[each].output for each in self.resident()}.values()
        held = sum(-(-output.num_tokens // BLOCK) for output in resident if output.stored is not None)
        for group in (1, 2):
            assert np.count_nonzero(self.cache.block_map(group).holders) >= held

    def teardown(self):
        for sequence in self.twins:
            self.cache.remove(sequence)
        self.cache.check_invariants()
        stats = self.cache.stats()
        assert stats.num_used_blocks == stats.num_swapped_blocks == 0


TestCrossMachine = pytest.mark.slow(drawn(CrossMachine))
TestCrossMachine.settings = settings(max_examples=60 if is_full() else 26, stateful_step_count=30, deadline=None)
