"""Random operations on a cache with prefix reuse: every sequence attends to the values of its own tokens.

Key and value of a token are computed from all ids before it, so that reusing a block for another prefix is detected.
"""

import zlib
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from pagecore import AttentionSpec, UnsupportedOption
from pagecore.cache import SwapSpace
from pagecore.cache.prefix._prefix import cached_blocks
from tests.cache.caches import learn
from tests.cache.tree_rules import TreeRules, segments
from tests.faults import is_full
from tests.machines import drawn
from tests.reference.dense import dense_attention, limits_of

FULL = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)
WINDOWED = AttentionSpec(1, 8, 4, dtype="float32", num_query_heads=4, window=6)
SINKED = AttentionSpec(1, 8, 4, dtype="float32", num_query_heads=4, window=5, sink_tokens=6)
CHUNKED = AttentionSpec(1, 8, dtype="float32", num_query_heads=2, chunk=8)
WIDE = AttentionSpec(1, 8, 8, dtype="float32", num_query_heads=2)
MODELS = {
    "plain": ([FULL], [9]),
    "window": ([FULL, WINDOWED], [9, 8]),
    "two plain and a window": ([WINDOWED, FULL, WIDE], [8, 9, 10]),
    "sinks": ([FULL, SINKED], [9, 9]),
    "sinks and a chunk": ([SINKED, CHUNKED], [9, 8]),
    "two windows": ([WINDOWED, AttentionSpec(1, 8, dtype="float32", num_query_heads=1, window=1)], [8, 7]),
}
BLOCK = 4
NAMES = st.sampled_from([None, None, None, "adapter", ("adapter", 1)])


@lru_cache(maxsize=100_000)
def made(what, size):
    return np.random.default_rng(zlib.crc32(repr(what).encode())).normal(size=size).astype(np.float32)


class Twin:
    """Model of one sequence: its future ids, and the numbers of known and computed tokens."""

    def __init__(self, namespace, ids):
        self.namespace, self.ids = namespace, list(ids)
        self.known, self.computed = len(ids), 0

    @property
    def length(self):
        return max(self.known, self.computed)

    def cut(self, length):
        self.ids, self.known, self.computed = self.ids[:length], min(length, self.known), min(length, self.computed)

    def copy(self):
        twin = Twin(self.namespace, self.ids)
        twin.known, twin.computed = self.known, self.computed
        return twin

    def continued(self, ids):
        """Return the model of a sequence that continues the computed tokens with other ids."""
        twin = self.copy()
        twin.ids = [*self.planned(self.computed)[: self.computed], *ids]
        return twin

    def accept(self, count, kept):
        """Record the end of a step of `count` tokens; rejected tokens and all after them are forgotten."""
        self.computed += kept
        if kept < count:
            self.known = min(self.known, self.computed)

    def planned(self, length):
        """Return the first `count` ids; ids past the given ones follow from those before."""
        while len(self.ids) < length:
            self.ids.append(zlib.crc32(repr(self.ids).encode()) % 2)
        return self.ids[:length]

    def stored(self, layer, spec, start, end):
        """Return key and value [tokens, heads, dim] of the tokens [start, end)."""
        ids = self.planned(end)
        rows = [(self.namespace, layer, tuple(ids[: i + 1])) for i in range(start, end)]
        return tuple(
            np.array([made((part, *row), (spec.num_kv_heads, size)) for row in rows], np.float32).reshape(
                -1, spec.num_kv_heads, size
            )
            for part, size in enumerate((spec.head_dim, spec.v_head_dim))
        )


class PrefixMachine(TreeRules):
    def __init__(self):
        super().__init__()
        self.pins = []

    @initialize(model=st.sampled_from(sorted(MODELS)), policy=st.sampled_from(["lru", "lfu", "fifo", "slru"]))
    def make(self, model, policy):
        self.layers, blocks = MODELS[model]
        self.cache = self.make_cache(
            self.layers,
            block_size=BLOCK,
            num_blocks=blocks,
            max_sequences=6,
            max_tokens_per_sequence=64,
            eviction_policy=policy,
        )
        self.space = SwapSpace(self.cache, num_blocks=9)
        self.random = np.random.default_rng(0)
        self.twins = {}

    def is_full(self):
        return len(self.twins) == self.max_resident

    @precondition(lambda self: not self.is_full())
    @rule(length=st.integers(0, 24), strays=st.integers(0, 60), namespace=NAMES, most=st.sampled_from([None, None, 5]))
    def add(self, length, strays, namespace, most):
        ids = [int(bit) for bit in "010011010001101110100101"[:length]]
        if strays < length:
            ids[strays] = 2
        expected = self.cache.match_length(ids, namespace=namespace, max_tokens=most)
        sequence = self.cache.add_sequence(ids, namespace=namespace, max_tokens=most)
        twin = self.twins[sequence] = Twin(namespace, ids)
        twin.computed = sequence.num_cached_tokens
        assert twin.computed == expected <= max(0, length - 1)
        assert twin.computed % self.cache.block_size == 0
        assert most is None or twin.computed <= most

    def draw_count(self, data, sequence):
        twin = self.twins[sequence]
        return data.draw(st.sampled_from([max(0, twin.known - twin.computed), 0, 1, 3, 8]))

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def step(self, data):
        sequences = self.pick(data, self.resident(), most=4)
        counts = [self.draw_count(data, sequence) for sequence in sequences]
        if self.is_refused(sequences, counts):
            return
        batch = self.cache.prepare(sequences, counts)
        self.poison()
        end = data.draw(st.sampled_from(["commit", "commit", "commit", "reject", "abandon"]))
        if end == "abandon":
            self.cache.abandon(batch)
            return
        self.forward(batch, sequences, counts)
        accepted = [data.draw(st.integers(0, n)) for n in counts] if end == "reject" else counts
        is_late = data.draw(st.booleans())
        if not is_late:
            learn(self.cache, self.twins, sequences, accepted)
        self.cache.commit(batch, accepted if end == "reject" else None)
        for sequence, count, kept in zip(sequences, counts, accepted, strict=True):
            self.twins[sequence].accept(count, kept)

    def forward(self, batch, sequences, counts, trees=None):
        chains = segments([self.twins[s] for s in sequences], counts, trees)
        for layer, spec in enumerate(self.layers):
            self.attend(layer, spec, batch, chains, trees is not None)

    def attend(self, layer, spec, batch, chains, has_trees):
        """Write and attend at a layer; assert that the queries see the tokens of their sequences."""
        new = [twin.stored(layer, spec, start, start + n) for twin, start, n in chains]
        key, value = (np.concatenate(sides) for sides in zip(*new, strict=True))
        query = self.random.normal(size=(len(key), spec.num_query_heads, spec.head_dim)).astype(np.float32)
        self.cache.write(layer, key, value, batch)
        if has_trees and not self.attends_to_trees(spec):
            with pytest.raises(UnsupportedOption, match="has trees"):
                self.cache.attend(layer, query, batch)
            return
        found, first = self.cache.attend(layer, query, batch), 0
        for twin, start, n in chains:
            keys, values = twin.stored(layer, spec, 0, start + n)
            expected = dense_attention(query[first : first + n], keys, values, **limits_of(spec))
            np.testing.assert_allclose(found[first : first + n], expected, rtol=0, atol=2e-5)
            first += n

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def learn_late(self, data):
        sequences = self.pick(data, list(self.twins), most=4)
        learn(self.cache, self.twins, sequences, [0] * len(sequences))

    def diverge(self, data, twin):
        if data.draw(st.booleans()):
            twin.ids = [*twin.ids[: twin.length], data.draw(st.sampled_from([3, 4]))]

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def swap_out(self, data):
        self.cache.try_swap_out(self.pick(data, self.resident(), most=3), self.space)

    @rule()
    def clear(self):
        evictable = self.cache.stats().num_evictable_blocks
        assert self.cache.clear_prefix_cache() == evictable
        assert self.cache.stats().num_evictable_blocks == 0

    @rule(length=st.integers(0, 24), keep=st.sampled_from([0, 0, 3, 9]), namespace=NAMES)
    def evict_prefix(self, length, keep, namespace):
        ids = [int(bit) for bit in "010011010001101110100101"[:length]]
        cached, free = self.cache.match_length([*ids, 9], namespace=namespace), self.cache.stats().num_free_blocks
        freed = self.cache.evict_prefix(ids, keep=keep, namespace=namespace)
        assert self.cache.stats().num_free_blocks == free + freed
        assert self.cache.match_length([*ids, 9], namespace=namespace) <= cached

    @rule(length=st.integers(0, 24), valid=st.integers(0, 24), namespace=NAMES, by_id=st.booleans(), data=st.data())
    def revoke(self, length, valid, namespace, by_id, data):
        ids = [int(bit) for bit in "010011010001101110100101"[:length]]
        lengths = [pin.num_tokens for pin, _, _ in self.pins]
        if by_id and self.cache.num_groups and self.cache.has_prefix_cache:
            blocks = data.draw(st.lists(st.integers(1, self.cache.num_blocks[0] - 1), max_size=3))
            affected = self.cache.revoke_blocks(blocks)
            assert not set(blocks) & set(cached_blocks(self.cache._parts.prefix, 0).tolist())
        else:
            affected = self.cache.revoke_prefix(ids, valid=valid, namespace=namespace)
            left = valid // self.cache.block_size * self.cache.block_size
            assert set(affected.values()) <= set(range(left + 1))
            if left + self.cache.block_size <= length and not hasattr(self, "tier"):  # the host keeps its copies
                assert self.cache.match_length([*ids, 9], namespace=namespace) <= left
        for sequence, count in affected.items():
            assert 0 <= count <= self.twins[sequence].computed
        self.release_shortened(lengths)

    def release_shortened(self, lengths):
        """Release the pins that a revocation has made shorter than `lengths`: their ends may have no state."""
        for pinned, before in zip(list(self.pins), lengths, strict=True):
            if pinned[0].num_tokens < before:
                pinned[0].release()
                self.pins.remove(pinned)

    def found(self, ids, namespace):
        """Return the tokens of a prefix that the device has."""
        prefix = self.cache._parts.prefix
        return 0 if prefix is None else prefix.tree.match(ids, namespace=namespace).num_tokens

    @rule(length=st.integers(0, 24), namespace=NAMES, most=st.sampled_from([None, None, 5]))
    def pin(self, length, namespace, most):
        ids = [int(bit) for bit in "010011010001101110100101"[:length]]
        pin = self.cache.pin_prefix(ids, namespace=namespace, max_tokens=most)
        assert pin.num_tokens == self.found(ids[:most], namespace)
        self.pins.append((pin, ids, namespace))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        pin = data.draw(st.sampled_from(self.pins))
        pin[0].release()
        self.pins.remove(pin)

    @rule(namespace=NAMES)
    def evict_namespace(self, namespace):
        free = self.cache.stats().num_free_blocks
        freed = self.cache.evict_namespace(namespace)
        assert self.cache.stats().num_free_blocks == free + freed

    @precondition(lambda self: not self.is_full())
    @rule()
    def fill(self):
        """Assert that every block counted as available can be taken."""
        available = self.cache.num_available
        taker = self.cache.add_sequence([], id="taker")
        assert self.cache.try_prepare([taker], self.cache.block_size * (available + 1)) is None
        batch = self.cache.try_prepare([taker], self.cache.block_size * available)
        assert batch is not None
        assert self.cache.num_available == 0
        self.cache.check_invariants()
        self.cache.remove(taker)
        assert self.cache.num_available == available

    @invariant()
    def holds_what_it_should(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        stats = self.cache.stats()
        assert stats.num_free_blocks + stats.num_used_blocks + stats.num_evictable_blocks == stats.num_blocks
        rows = [sequence.row for sequence in self.resident()]
        prefix = self.cache._parts.prefix
        pinned = [] if prefix is None else [held.blocks for held in prefix.transfers]
        held = [
            np.concatenate([self.cache._parts.tables.table(g)[rows].ravel(), *(blocks[g] for blocks in pinned)])
            for g in range(self.cache.num_groups)
        ]
        used, holes = [len(np.unique(ids)) for ids in held], [(ids == 0).any() for ids in held]
        # Every block that no row uses is available, as in a cache without a prefix cache.
        left = [n - 1 - (u - hole) for n, u, hole in zip(self.cache.num_blocks, used, holes, strict=True)]
        assert self.cache.num_available == min(left, default=self.cache.num_available)
        for pin, ids, namespace in self.pins:
            assert self.found(ids, namespace) >= pin.num_tokens
        for sequence, twin in self.twins.items():
            assert sequence.tokens.tolist() == twin.ids[: twin.known]
            assert sequence.num_computed_tokens == twin.computed

    def teardown(self):
        if hasattr(self, "cache"):
            for sequence in self.twins:
                self.cache.remove(sequence)
            for pin, _, _ in self.pins:
                pin.release()
            stats = self.cache.stats()
            assert (stats.num_used_blocks, stats.num_cached_blocks) == (0, stats.num_evictable_blocks)
            self.cache.clear_prefix_cache()
            assert self.cache.stats().num_free_blocks == stats.num_blocks


TestPrefixMachine = pytest.mark.slow(drawn(PrefixMachine))
TestPrefixMachine.settings = settings(max_examples=80 if is_full() else 28, stateful_step_count=40, deadline=None)
