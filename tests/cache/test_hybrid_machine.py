"""Random operations on caches whose layers keep states: each state is computed from all ids before it.

The rules are those of caches with prefix reuse. A pass asserts that the state that it reads is that of the sequence's
computed tokens, so that a slot which is shared, overwritten or freed too early is detected.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from pagecore import LatentSpec, StateSpec, SwapSpace, UnsupportedOption, dequantize_state, quantize_state
from tests.cache.hybrid_models import MODELS
from tests.cache.test_prefix_machine import BLOCK, PrefixMachine, made
from tests.cache.tree_rules import segments
from tests.faults import is_full
from tests.machines import drawn
from tests.reference.dense import dense_attention


class HybridMachine(PrefixMachine):
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

    # States.

    @property
    def states(self):
        return self.cache._parts.state.states

    def planes(self):
        """Yield the number and spec of each layer that keeps states, the name of a plane and the plane."""
        for layer, spec in enumerate(self.layers):
            for plane in spec.planes if isinstance(spec, StateSpec) else ():
                yield (layer, plane.name), plane.shape, self.cache.plane(plane.name, layer)

    def read(self, tensor):
        """Return a tensor of the cache as an array on the host."""
        return tensor.numpy()

    def put(self, plane, slot, values):
        plane.numpy()[slot] = values

    def expected(self, place, shape, twin, length):
        if length == 0:
            return np.zeros(shape, np.float32)
        return made((place, twin.namespace, tuple(twin.planned(length)[:length])), shape)

    def assert_state(self, slot, twin, length):
        for place, shape, plane in self.planes():
            found, expected = self.read(plane[slot]), self.expected(place, shape, twin, length)
            if self.rules.checkpoint_format and length and not np.array_equal(found, expected) and len(shape) > 1:
                expected = dequantize_state(*quantize_state(expected))
            np.testing.assert_array_equal(found, expected)

    def assert_checkpoint(self, slot, twin, length):
        """A quantised checkpoint has the bytes that the quantiser gives for the state."""
        if not self.rules.checkpoint_format:
            self.assert_state(slot, twin, length)
            return
        for place, shape, _ in self.planes():
            for plane, values in self.stored_state(place, shape, twin, length).items():
                found = self.read(self.cache.checkpoint_plane(plane, place[0])[slot])
                np.testing.assert_array_equal(found, values)

    def stored_state(self, place, shape, twin, length):
        """Return the arrays that store a plane of a checkpoint, by name."""
        expected = self.expected(place, shape, twin, length)
        if not self.rules.checkpoint_format or len(shape) == 1:
            return {place[1]: expected}
        codes, scales = quantize_state(expected)
        return {place[1]: codes, f"{place[1]}_scale": scales}

    def write_state(self, slot, twin, length):
        if slot:
            for place, shape, plane in self.planes():
                self.put(plane, slot, self.expected(place, shape, twin, length))

    def poison(self):
        super().poison()
        pools = [
            (self.cache._parts.store.states, self.states.slots),
            (self.space.state_pool, self.space.state_slots),
        ]
        if self.rules.checkpoint_format:
            pools.append((self.cache._parts.store.checkpoints, self.states.checkpoints))
            pools.append((self.space.checkpoint_pool, self.space.checkpoint_slots))
        for pool, slots in pools:
            free = np.flatnonzero(slots.ref_counts() == 0)
            for plane in pool.planes():
                poison = np.nan if str(plane.dtype) == "float32" else 77
                for slot in free[free > 0]:
                    self.put(plane, slot, np.full(plane.shape[1:], poison, self.read(plane[0]).dtype))

    # Steps.

    def is_decode(self, count):
        return count <= 1 + self.rules.draft_tokens

    @property
    def most_drafts(self):
        return self.rules.draft_tokens

    @property
    def has_one_root(self):
        return self.rules.in_place

    may_share_past_its_state = True

    def forward(self, batch, sequences, counts, trees=None):
        reads, writes = self.read(batch.state_read), self.read(batch.state_write)
        checkpoints, lengths = self.read(batch.checkpoint_write), self.read(batch.checkpoint_lengths)
        assert not any(slots[len(sequences) :].any() for slots in (reads, writes, checkpoints, lengths))
        for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            twin, read, write = self.twins[sequence], reads[i], writes[i]
            if count == 0:
                assert read == write == checkpoints[i] == 0
                continue
            self.assert_state(read, twin, twin.computed)
            if trees and trees[i]:
                self.run_tree(batch, i, twin, trees[i])
                continue
            assert (read == write) == self.rules.in_place or self.rules.draft_tokens
            if self.rules.draft_tokens and self.is_decode(count):
                for k, slot in enumerate(self.read(batch.draft_write)[i, :count]):
                    self.write_state(slot, twin, twin.computed + k + 1)
                assert write == self.read(batch.draft_write)[i, count - 1]
            kept, length = checkpoints[i], lengths[i]
            assert bool(kept) == bool(length)
            assert not kept or twin.computed < length <= twin.computed + count
            assert length % self.cache.block_size == 0
            self.write_state(kept, twin, length)
            self.write_state(write, twin, twin.computed + count)
        chains = segments([self.twins[s] for s in sequences], counts, trees)
        for layer, spec in enumerate(self.layers):
            if isinstance(spec, LatentSpec):
                self.attend_latents(layer, spec, batch, chains, trees is not None)
            elif not isinstance(spec, StateSpec):
                self.attend(layer, spec, batch, chains, trees is not None)

    def run_tree(self, batch, index, twin, tree):
        """Write the state of each token of a tree, after an assertion that it reads that of its parent."""
        reads, writes = [self.read(batch.state_read)[index]], [self.read(batch.state_write)[index]]
        if self.rules.draft_tokens:
            reads, writes = self.read(batch.draft_read)[index], self.read(batch.draft_write)[index]
        assert not self.read(batch.checkpoint_write)[index] or len(tree.ids) == 1
        for k, (branch, position, _) in enumerate(tree.segments(twin.computed)):
            self.assert_state(reads[k], branch, position)
            self.write_state(writes[k], branch, position + 1)
        if kept := self.read(batch.checkpoint_write)[index]:
            self.write_state(kept, tree.twins[0], twin.computed + 1)

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

    def least_accepted(self, count):
        return (int(self.rules.in_place) if self.is_decode(count) else count) if count else 0

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
            self.learn(sequences, accepted)
        self.cache.commit(batch, accepted if end == "reject" else None)
        for sequence, count, kept in zip(sequences, counts, accepted, strict=True):
            self.twins[sequence].accept(count, kept)

    def give_up(self, batch, sequences, counts):
        before = self.rests(sequences)
        super().give_up(batch, sequences, counts)
        assert not self.read(batch.state_write).any()
        self.go_back(sequences, counts, before)

    def rests(self, sequences):
        """Return the checkpoint of each sequence, and the slot of a state that it has not restored yet."""
        return [(self.states.checkpoint(s.row), self.states.resting(s.row)) for s in sequences]

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
            twin, slot = self.twins[sequence], self.states.slot(sequence.row)
            checkpoint = self.states.checkpoint(sequence.row)
            assert self.states.length(sequence.row) == twin.computed
            if slot:
                self.assert_state(slot, twin, twin.computed)
            if checkpoint is not None:
                self.assert_checkpoint(checkpoint[0], twin, checkpoint[1])
            resting = self.states.resting(sequence.row)
            if resting:
                self.assert_checkpoint(resting, twin, twin.computed)

    def teardown(self):
        super().teardown()
        if hasattr(self, "cache"):
            assert self.states.slots.num_used == self.states.checkpoints.num_used == 0


TestHybridMachine = pytest.mark.slow(drawn(HybridMachine))
TestHybridMachine.settings = settings(max_examples=80 if is_full() else 28, stateful_step_count=40, deadline=None)
