"""Tree, tables and pools driven as by a cache, with their twins; references are recounted after each step."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.faults import is_full
from tests.index.prefix_cache import PrefixCache
from tests.index.test_radix_against_twin import POLICIES
from tests.machines import drawn

MAX_SEQUENCES = 5
MAX_BLOCKS = 8
namespaces = st.sampled_from([None, "tenant", ("tenant", 1), ("tenant", True)])
groups = st.sampled_from([(1, 0), (1, 1), (2, 1), (1, 2), (0, 1), (0, 2)])  # plain ones, windows
PROMPT = "01001101000110111010010110100111"


class PrefixMachine(RuleBasedStateMachine):
    @initialize(
        data=st.data(),
        block_size=st.integers(1, 4),
        groups=groups,
        policy=st.sampled_from(POLICIES),
        is_tidy=st.sampled_from([True, True, False]),
    )
    def make(self, data, block_size, groups, policy, is_tidy):
        full, windows = groups
        self.cache = PrefixCache(
            block_size,
            full,
            tuple(data.draw(st.lists(st.integers(1, 4 * block_size), min_size=windows, max_size=windows))),
            data.draw(st.lists(st.integers(8, 48), min_size=full + windows, max_size=full + windows)),
            MAX_SEQUENCES,
            MAX_BLOCKS,
            policy,
        )
        self.longest = MAX_BLOCKS * block_size
        # In a tidy cache each receipt covers all blocks that its row shares with the tree: a row releases blocks before
        # a window when it publishes, and publishes before it is forked; a truncated row keeps no capacity, and keeps
        # its last block pinned while the block may be the tree's.
        self.is_tidy = is_tidy

    def has_sequences(self):
        return hasattr(self, "cache") and self.cache.sequences != []

    def one(self, data):
        return data.draw(st.sampled_from(self.cache.sequences))

    def some(self, data):
        chosen = data.draw(st.permutations(self.cache.sequences))
        return chosen[: data.draw(st.integers(1, len(chosen)))]

    def tidy(self, sequence):
        """Release blocks that the receipt does not pin."""
        if not self.is_tidy:
            return
        cache = self.cache
        end = sequence.receipt.num_tokens
        for i, window in enumerate(cache.windows):
            kept = -(-window // cache.block_size) * cache.block_size
            position = min(max(0, end - kept), cache.length(sequence))
            cache.release_before(sequence, cache.full + i, position)

    # Sequences.

    @rule(data=st.data(), computes=st.sampled_from([True, True, True, False]))
    def add(self, data, computes):
        """Draw a prefix of one long prompt, sometimes modified, so that most sequences share a prefix."""
        length = data.draw(st.integers(1, min(len(PROMPT), self.longest)))
        tokens = [int(bit) for bit in PROMPT[:length]]
        if data.draw(st.integers(0, 2)) == 0:
            tokens[data.draw(st.integers(0, length - 1))] = 2
        is_named = data.draw(st.integers(0, 5)) == 0
        sequence = self.cache.add(tokens, data.draw(namespaces) if is_named else None)
        if sequence is not None:
            self.tidy(sequence)
            if computes:
                self.run(data, sequence, length - self.cache.length(sequence))

    @precondition(has_sequences)
    @rule(data=st.data(), goes_on=st.booleans())
    def fork(self, data, goes_on):
        parent = self.one(data)
        if self.is_tidy:
            self.publish_all(data, [parent])
        self.cache.fork(parent)
        if goes_on:
            self.go_on(data, self.some(data))

    @precondition(has_sequences)
    @rule(data=st.data())
    def remove(self, data):
        self.cache.remove(self.some(data))

    # Tokens.

    def run(self, data, sequence, count):
        if self.cache.compute([sequence], [count]):
            self.publish_all(data, [sequence])

    def publish_all(self, data, sequences):
        """Publish with one insert for all, or extend each."""
        if self.is_tidy:
            sequences = [each for each in sequences if self.cache.length(each) >= each.receipt.num_tokens]
        if data.draw(st.booleans()) and all(each.runs_on for each in sequences):
            for sequence in sequences:
                self.cache.run_on(sequence)
        else:
            self.cache.publish_all(sequences)
        for sequence in sequences:
            self.tidy(sequence)

    @precondition(has_sequences)
    @rule(data=st.data())
    def step(self, data):
        self.go_on(data, self.some(data))

    def go_on(self, data, sequences):
        """Sample new tokens, compute all or half of the known tokens, and perhaps publish them."""
        new = data.draw(st.lists(st.integers(0, 1), max_size=9))
        counts = []
        for sequence in sequences:
            room = self.longest - len(sequence.tokens)
            sequence.tokens += new[:room]
            known = len(sequence.tokens) - self.cache.length(sequence)
            counts.append(data.draw(st.sampled_from([known, known // 2])))
        if self.cache.compute(sequences, counts) and data.draw(st.booleans()):
            self.publish_all(data, sequences)

    @precondition(has_sequences)
    @rule(data=st.data())
    def publish(self, data):
        self.publish_all(data, [self.one(data)])

    @precondition(has_sequences)
    @rule(data=st.data(), goes_on=st.booleans())
    def truncate(self, data, goes_on):
        sequence = self.one(data)
        length = data.draw(st.integers(0, self.cache.length(sequence)))
        if not self.cache.can_go_on_from(sequence, length):
            return
        kept = self.cache.whole(length + self.cache.block_size - 1)
        if self.is_tidy and kept < sequence.receipt.num_tokens:
            if kept:
                self.cache.publish_all([sequence], kept)
            else:
                self.cache.hold_nothing(sequence)
        self.cache.truncate(sequence, length, not self.is_tidy and data.draw(st.booleans()))
        if goes_on:
            self.go_on(data, [sequence])

    @precondition(has_sequences)
    @rule(data=st.data())
    def release_before(self, data):
        sequence = self.one(data)
        if self.cache.windows:
            group = data.draw(st.integers(self.cache.full, len(self.cache.groups) - 1))
            position = data.draw(st.integers(0, self.cache.length(sequence)))
            self.cache.release_before(sequence, group, position)

    # Eviction.

    @rule(data=st.data(), amount=st.integers(0, 9))
    def evict(self, data, amount):
        """Evict from one component; windows get holes."""
        self.cache.evict(data.draw(st.integers(0, len(self.cache.windows))), amount)

    @rule(times=st.integers(0, 5))
    def evict_everything(self, times):
        if times != 5:
            return  # rare, so that trees grow
        cache = self.cache
        can_go = [len(cache.evictable_ids(group)) for group in cache.groups]
        before = [pool.num_free for pool in cache.pools]
        for component in reversed(range(len(cache.windows) + 1)):
            cache.evict(component, 10**9)
        if self.is_tidy:
            assert [pool.num_free - free for pool, free in zip(cache.pools, before, strict=True)] == can_go

    @invariant()
    def every_block_is_accounted_for(self):
        if hasattr(self, "cache"):
            self.cache.check()
            if self.is_tidy:
                self.cache.check_only_the_tree_holds_what_can_go()

    def teardown(self):
        """Release and evict everything: every block is free."""
        if not hasattr(self, "cache"):
            return
        if self.cache.sequences:
            self.cache.remove(list(self.cache.sequences))
        self.cache.evict(0, 10**9)
        self.cache.check()
        assert all(pool.num_used == 0 for pool in self.cache.pools)


TestPrefixMachine = pytest.mark.slow(drawn(PrefixMachine))
TestPrefixMachine.settings = settings(max_examples=80 if is_full() else 26, stateful_step_count=40, deadline=None)
