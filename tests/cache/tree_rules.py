"""The rule of the state machines that verifies trees of drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from pagecore import AttentionSpec, ShapeError, UnsupportedOption
from tests.cache.caches import learn
from tests.cache.machine import SequenceMachine
from tests.reference.trees import ancestors, depths_of


@dataclass
class DraftTree:
    """A tree of new tokens of one sequence: parents, ids, and the model of the sequence that ends with each token."""

    parents: list[int]
    ids: list[int]
    twins: list[Any]

    @classmethod
    def of(cls, twin, parents, ids):
        paths = [[ids[at] for at in ancestors(parents, token)] for token in range(len(parents))]
        return cls(parents, ids, [twin.continued(path) for path in paths])

    def segments(self, start):
        """Return for each token the model that ends with it, its position, and 1."""
        return [(twin, start + depth, 1) for twin, depth in zip(self.twins, depths_of(self.parents), strict=True)]


def segments(twins, counts, trees=None):
    """Return (model, first position, number of tokens) of the chains of a step, of which trees have one a token."""
    listed = []
    for twin, count, tree in zip(twins, counts, trees or [None] * len(counts), strict=True):
        listed += [(twin, twin.computed, count)] if tree is None else tree.segments(twin.computed)
    return listed


class TreeRules(SequenceMachine):
    """Steps with trees, for machines with `learn` and a `forward` that takes `trees`; models have `continued(ids)`."""

    most_drafts = 4
    has_one_root = False
    may_share_past_its_state = False

    def attends_to_trees(self, spec):
        """Return True if the attention of a layer serves trees."""
        return isinstance(spec, AttentionSpec) and not spec.sink_tokens

    def least_accepted(self, count):
        """Return the least number of tokens of a chain that a commit accepts."""
        return 0

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def verify(self, data):
        sequences = self.pick(data, self.resident(), most=3)
        parents = [data.draw(self.trees()), *(data.draw(st.none() | self.trees()) for _ in sequences[1:])]
        counts = [
            self.draw_count(data, sequence) if own is None else len(own)
            for sequence, own in zip(sequences, parents, strict=True)
        ]
        if self.is_refused(sequences, counts):
            return
        trees = [self.draw_tree(data, *each) for each in zip(sequences, parents, strict=True)]
        batch = self.prepare_trees(sequences, counts, parents)
        if batch is None:
            return
        self.poison()
        self.forward(batch, sequences, counts, trees)
        if data.draw(st.integers(0, 5)) == 0:
            self.give_up(batch, sequences, counts)
            return
        paths = [self.draw_path(data, *each) for each in zip(counts, parents, strict=True)]
        self.refuse_paths(batch, parents, paths)
        self.cache.commit(batch, accepted_path=paths)
        for sequence, count, tree, path in zip(sequences, counts, trees, paths, strict=True):
            self.take(self.twins[sequence], count, tree, path)

    def trees(self):
        """Return a strategy of parents."""
        least = 0 if self.has_one_root else -1
        sizes = st.sampled_from([self.most_drafts, self.most_drafts, *range(self.most_drafts)])
        return sizes.flatmap(lambda n: st.tuples(st.just(-1), *(st.integers(least, k) for k in range(n)))).map(list)

    def draw_tree(self, data, sequence, parents):
        """Draw the ids of a tree and append them, or do not, as by an engine that knows them later."""
        if parents is None:
            return None
        twin = self.twins[sequence]
        pending = twin.planned(twin.known)[twin.computed :]
        drawn = data.draw(st.lists(st.integers(0, 1), min_size=len(parents), max_size=len(parents)))
        new = drawn[len(pending) :]
        if new and data.draw(st.booleans()):
            learn(self.cache, self.twins, [sequence], [0])
            self.cache.append_tokens([sequence], [new])
            twin.ids = [*twin.ids[: twin.known], *new]
            twin.known += len(new)
        return DraftTree.of(twin, parents, [*pending, *new][: len(parents)])

    def prepare_trees(self, sequences, counts, parents):
        """Return the batch of a step, or None if a sequence shares keys past its last state."""
        before = self.cache.stats()
        try:
            return self.cache.prepare(sequences, counts, parents=parents)
        except UnsupportedOption as error:
            message = str(error)
        assert self.may_share_past_its_state
        assert "shares keys and values past" in message
        assert self.cache.stats() == before
        return None

    def draw_path(self, data, count, parents):
        """Draw the accepted tokens of a sequence."""
        if parents is None:
            accepted = data.draw(st.integers(self.least_accepted(count), count))
            return None if accepted == count and data.draw(st.booleans()) else list(range(accepted))
        end = data.draw(st.integers(min(self.least_accepted(count), 1) - 1, count - 1))
        return [] if end < 0 else ancestors(parents, end)

    def refuse_paths(self, batch, parents, paths):
        """Assert that a commit without a path for a tree changes nothing."""
        before = self.cache.stats()
        wrong = [path if own is None else None for own, path in zip(parents, paths, strict=True)]
        with pytest.raises(ShapeError, match="is None and the sequence has a tree"):
            self.cache.commit(batch, accepted_path=wrong)
        assert self.cache.stats() == before

    def take(self, twin, count, tree, path):
        """Record the end of a step; an id of the path that was known stays known."""
        if tree is None or len(path) == count:
            if tree is not None:
                twin.ids = twin.continued(tree.ids).ids + twin.ids[twin.computed + count :]
            twin.accept(count, count if path is None else len(path))
            return
        known = twin.computed + sum(twin.computed + at < twin.known for at in path)
        twin.ids = twin.continued([tree.ids[at] for at in path]).ids
        twin.known = min(twin.known, known)
        twin.computed += len(path)

    def give_up(self, batch, sequences, counts):
        """Abandon a step."""
        self.cache.abandon(batch)
