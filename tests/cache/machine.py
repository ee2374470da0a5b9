"""Rules that the state machines of paged caches share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pagecore import InvalidSequence, OutOfBlocks, PagedKVCache, UnsupportedOption
from tests.cache.swaps import poison


class SequenceMachine(RuleBasedStateMachine):
    """Random operations on `cache`, with a model of each sequence in the dict `twins`.

    A subclass makes both. Its twins have `computed`, the number of computed tokens, `length`, the largest length that
    `truncate` accepts, `copy()` and `cut(length)`.
    """

    max_resident = 6

    def make_cache(self, layers, **options):
        return PagedKVCache(layers, **options)

    def poison(self):
        poison(self.cache, np.nan)

    def resident(self):
        return [sequence for sequence in self.twins if not sequence.is_swapped]

    def swapped(self):
        return [sequence for sequence in self.twins if sequence.is_swapped]

    def is_full(self):
        """Return True if no sequence may be added or forked."""
        return len(self.resident()) == self.max_resident

    def pick(self, data, among, most=1):
        count = data.draw(st.integers(1, min(most, len(among))))
        return data.draw(st.permutations(among))[:count]

    def is_refused(self, sequences, counts, out=None):
        """Return True if the cache cannot prepare a step; assert that it then refuses without a change."""
        room = self.cache.max_tokens_per_sequence
        too_long = any(self.twins[s].computed + n > room for s, n in zip(sequences, counts, strict=True))
        if not too_long and not self.cache.shortage(sequences, counts):
            return False
        before = self.cache.stats()
        try:
            self.cache.prepare(sequences, counts, out)
            raise AssertionError("prepared without blocks")
        except (OutOfBlocks, ValueError):
            assert self.cache.stats() == before
        return True

    @precondition(lambda self: self.resident() and not self.is_full())
    @rule(data=st.data())
    def fork(self, data):
        (parent,) = self.pick(data, self.resident())
        child = self.cache.fork(parent)
        self.twins[child] = self.twins[parent].copy()
        self.diverge(data, self.twins[child])

    def diverge(self, data, twin):
        """Change the future tokens of a forked or truncated sequence."""

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def reorder(self, data):
        sequences = self.pick(data, self.resident(), most=4)
        parents = [data.draw(st.sampled_from(self.resident())) for _ in sequences]
        self.cache.reorder(sequences, parents)
        copies = [self.twins[parent].copy() for parent in parents]
        self.twins.update(zip(sequences, copies, strict=True))

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def truncate(self, data):
        sequences = self.pick(data, self.resident(), most=3)
        twins = [self.twins[sequence] for sequence in sequences]
        lengths = [data.draw(st.integers(0, twin.length)) for twin in twins]
        before = self.cache.stats()
        try:
            self.cache.truncate(sequences, lengths)
        except UnsupportedOption:
            assert self.cache.stats() == before
            self.check_refused_truncation(twins, lengths)
            return
        for twin, length in zip(twins, lengths, strict=True):
            twin.cut(length)
            self.diverge(data, twin)

    def check_refused_truncation(self, twins, lengths):
        """Assert that a window has released blocks that a truncated sequence would need."""

    @precondition(lambda self: self.swapped())
    @rule(data=st.data())
    def swap_in(self, data):
        sequences = self.pick(data, self.swapped(), most=4)
        before = self.cache.stats()
        has_rows = len(self.resident()) + len(sequences) <= self.max_resident
        suffices = has_rows and self.cache.shortage(sequences, 0) == 0
        assert self.cache.try_swap_in(sequences) == suffices
        if suffices:
            self.poison()
        else:
            assert self.cache.stats() == before
        assert all(sequence.is_swapped != suffices for sequence in sequences)

    @precondition(lambda self: self.swapped())
    @rule(data=st.data())
    def use_a_swapped_sequence(self, data):
        (sequence,) = self.pick(data, self.swapped())
        calls = [
            lambda: self.cache.prepare([sequence], 1),
            lambda: self.cache.fork(sequence),
            lambda: self.cache.truncate(sequence, 0),
        ]
        try:
            data.draw(st.sampled_from(calls))()
            raise AssertionError("used while it is swapped out")
        except InvalidSequence:
            pass

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def remove(self, data):
        (sequence,) = self.pick(data, list(self.twins))
        self.cache.remove(sequence)
        del self.twins[sequence]
        try:
            self.cache.remove(sequence)
            raise AssertionError("removed twice")
        except InvalidSequence:
            pass
