"""Random operations on caches whose layers keep states: each state is computed from all ids before it.

The rules are those of caches with prefix reuse. A pass asserts that the state that it reads is that of the sequence's
computed tokens, so that a slot which is shared, overwritten or freed too early is detected.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from pagecore import LatentSpec, StateSpec, SwapSpace, UnsupportedOption
from tests.cache.caches import learn
from tests.cache.hybrid_models import MODELS
from tests.cache.state_rules import StateRules
from tests.cache.test_prefix_machine import BLOCK, PrefixMachine, made
from tests.cache.tree_rules import segments
from tests.faults import is_full
from tests.machines import drawn
from tests.reference.dense import dense_attention


class HybridMachine(StateRules, PrefixMachine):
    @initialize(
        model=st.sampled_from(sorted(MODELS)),
        policy=st.sampled_from(["lru", "lfu", "fifo", "slru"]),
        caches=st.sampled_from([True, True, True, False]),
    )
    def make(self, model, policy, caches):
        self.layers, blocks, num_states = MODELS[model]
        self.rules = self.layers[0]
        self.cache = self.make_cache(
            self.layers,
            block_size=BLOCK,
            num_blocks=blocks,
            num_states=num_states,
            max_sequences=6,
            max_tokens_per_sequence=64,
            eviction_policy=policy,
            prefix_cache=caches,
        )
        self.space = SwapSpace(self.cache, num_blocks=None if blocks is None else 9, num_states=5)
        self.random = np.random.default_rng(0)
        self.twins = {}

    def poison(self):
        super().poison()
        self.poison_states()

    @property
    def most_drafts(self):
        return self.rules.draft_tokens

    @property
    def has_one_root(self):
        return self.rules.in_place

    may_share_past_its_state = True

    def forward(self, batch, sequences, counts, trees=None):
        self.write_states(batch, sequences, counts, trees)
        chains = segments([self.twins[s] for s in sequences], counts, trees)
        for layer, spec in enumerate(self.layers):
            if isinstance(spec, LatentSpec):
                self.attend_latents(layer, spec, batch, chains, trees is not None)
            elif not isinstance(spec, StateSpec):
                self.attend(layer, spec, batch, chains, trees is not None)

    def attend_latents(self, layer, spec, batch, chains, has_trees):
        """Write and attend at a layer with latents; assert that the queries see the tokens of their sequences."""
        width = spec.latent_dim + spec.rope_dim
        new = np.concatenate([self.latents(twin, layer, width, start, start + n) for twin, start, n in chains])
        query = self.random.normal(size=(len(new), spec.num_query_heads, width)).astype(np.float32)
        self.cache.write(layer, *np.split(new, [spec.latent_dim], axis=-1), batch)
        parts = tuple(np.split(query, [spec.latent_dim], axis=-1))
        if has_trees:
            with pytest.raises(UnsupportedOption, match="has trees"):
                self.cache.attend(layer, parts, batch)
            return
        found, first = self.cache.attend(layer, parts, batch), 0
        for twin, start, n in chains:
            rows = self.latents(twin, layer, width, 0, start + n)[:, None]
            values, own = rows[..., : spec.latent_dim], query[first : first + n]
            expected = dense_attention(own, rows, values, scale=spec.scale, window=spec.window)
            np.testing.assert_allclose(found[first : first + n], expected, rtol=0, atol=2e-5)
            first += n

    def latents(self, twin, layer, width, start, end):
        """Return the rows of the tokens [start, end), latent and rope part: float32 ``[tokens, width]``."""
        ids = twin.planned(end)
        rows = [made((twin.namespace, layer, tuple(ids[: i + 1])), (width,)) for i in range(start, end)]
        return np.array(rows, np.float32).reshape(-1, width)

    def accepted(self, data, counts):
        """Draw numbers of accepted tokens after which every sequence has a state."""
        return [
            n if not self.is_decode(n) and data.draw(st.booleans()) else data.draw(st.integers(low, n))
            for low, n in zip(map(self.least_accepted, counts), counts, strict=True)
        ]

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def step(self, data):
        sequences = self.pick(data, self.resident(), most=4)
        counts = [self.draw_count(data, sequence) for sequence in sequences]
        if self.is_refused(sequences, counts):
            return
        batch = self.cache.prepare(sequences, counts)
        self.poison()
        end = data.draw(st.sampled_from(["commit", "commit", "commit", "reject", "abandon", "lose", "abandon late"]))
        if end not in ("abandon", "lose"):
            self.forward(batch, sequences, counts)
        if end in ("abandon", "abandon late"):
            self.give_up(batch, sequences, counts)
            return
        if end == "lose":
            before = self.rests(sequences)
            del batch
            self.cache.stats()  # gives up lost steps
            self.go_back(sequences, counts, before)
            return
        accepted = self.accepted(data, counts) if end == "reject" else counts
        if end == "reject" and self.rules.in_place and max(counts) > 1 + self.rules.draft_tokens:
            before = self.cache.stats()
            with pytest.raises(UnsupportedOption, match="has no state after"):
                self.cache.commit(batch, [n - (not self.is_decode(n)) for n in counts])
            assert self.cache.stats() == before
        if data.draw(st.booleans()):
            learn(self.cache, self.twins, sequences, accepted)
        self.cache.commit(batch, accepted if end == "reject" else None)
        for sequence, count, kept in zip(sequences, counts, accepted, strict=True):
            self.twins[sequence].accept(count, kept)

    def give_up(self, batch, sequences, counts):
        before = self.rests(sequences)
        super().give_up(batch, sequences, counts)
        assert not self.read(batch.state_write).any()
        self.go_back(sequences, counts, before)

    def go_back(self, sequences, counts, before):
        """Assert that sequences have returned to their last states after a step that was not committed."""
        for sequence, count, (checkpoint, resting) in zip(sequences, counts, before, strict=True):
            twin = self.twins[sequence]
            if self.rules.in_place and count and not resting:
                reached = 0 if checkpoint is None else checkpoint[1]
                has_window = any(getattr(spec, "window", None) or getattr(spec, "chunk", None) for spec in self.layers)
                assert sequence.num_computed_tokens in ({0, reached} if has_window else {reached})
                twin.computed = sequence.num_computed_tokens
            assert sequence.num_computed_tokens == twin.computed

    # Other rules.

    def check_refused_truncation(self, twins, lengths):
        assert any(0 < length < twin.computed for twin, length in zip(twins, lengths, strict=True))

    @rule()
    def clear(self):
        stats = self.cache.stats()
        assert self.cache.clear_prefix_cache() == stats.num_evictable_blocks
        assert self.cache.stats().num_cached_states == 0 or self.pins

    @precondition(lambda self: self.cache.num_groups and not self.is_full())
    @rule()
    def fill(self):
        taker = self.cache.add_sequence([], id="taker")
        lacks_slots = self.cache.num_available > 0 and self.cache.shortage([taker], 1) > 0
        self.cache.remove(taker)
        if not lacks_slots:
            super().fill()

    @invariant()
    def holds_what_it_should(self):
        super().holds_what_it_should()
        if not hasattr(self, "cache"):
            return
        for sequence in self.resident():
            self.check_states(sequence, self.twins[sequence])

    def teardown(self):
        super().teardown()
        if hasattr(self, "cache"):
            assert self.states.slots.num_used == self.states.checkpoints.num_used == 0


TestHybridMachine = pytest.mark.slow(drawn(HybridMachine))
TestHybridMachine.settings = settings(max_examples=80 if is_full() else 28, stateful_step_count=40, deadline=None)
