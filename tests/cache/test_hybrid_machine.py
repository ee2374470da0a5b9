"""Random operations on caches whose layers keep states: each state is computed from all ids before it.

The rules are those of caches with prefix reuse. A pass asserts that the state that it reads is that of the sequence's
computed tokens, so that a slot which is shared, overwritten or freed too early is detected.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from pagecore import (
    AttentionSpec,
    LatentSpec,
    Plane,
    StateSpec,
    SwapSpace,
    UnsupportedOption,
    dequantize_state,
    quantize_state,
)
from tests.cache.test_prefix_machine import BLOCK, CHUNKED, FULL, SINKED, WIDE, WINDOWED, PrefixMachine, made
from tests.reference.dense import dense_attention

SLIM = AttentionSpec(1, 8, dtype="float32", num_query_heads=1, window=1)
AHEAD = AttentionSpec(1, 8, dtype="float32", num_query_heads=2, window=6, lookahead=3)
LATENT = LatentSpec(8, 4, 2, scale=0.3, dtype="float32")
APART = LatentSpec(8, 4, 2, scale=0.3, dtype="float32", joint=False, window=6)
CONV = Plane("conv", (3,), "float32", per="sequence")
TEMPORAL = Plane("temporal", (2, 2), "float32", per="sequence")


def state(*planes, **rules):
    return StateSpec(planes, **{"chunk": 4, "interval": 8} | rules)


def around(*attending, **rules):
    return [state(CONV, TEMPORAL, **rules), *attending, state(TEMPORAL, **rules)]


MODELS = {
    "in place": (around(FULL), [9], 6),
    "few slots": (around(FULL, WIDE), [11, 12], 4),
    "long chunks": (around(FULL, chunk=6, interval=12), [11], 7),
    "ping-pong": (around(FULL, in_place=False), [9], 9),
    "drafts": (around(FULL, draft_tokens=2), [9], 9),
    "ping-pong drafts": (around(FULL, draft_tokens=1, in_place=False), [9], 9),
    "int8": (around(FULL, checkpoint_format="int8"), [9], 6),
    "int8 ping-pong drafts": (around(FULL, checkpoint_format="int8", draft_tokens=1, in_place=False), [9], 11),
    "int8 window": (around(FULL, WINDOWED, checkpoint_format="int8"), [10, 8], 6),
    "window": (around(FULL, WINDOWED), [10, 8], 7),
    "window, ping-pong drafts": (around(FULL, WINDOWED, in_place=False, draft_tokens=2), [9, 8], 9),
    "window alone": (around(WINDOWED), [10], 7),
    "sinks": (around(FULL, SINKED), [9, 9], 7),
    "int8 sinks and a window, ping-pong": (
        around(SINKED, WINDOWED, checkpoint_format="int8", in_place=False),
        [9, 9],
        8,
    ),
    "chunk, drafts": (around(CHUNKED, FULL, draft_tokens=2), [9, 9], 9),
    "int8 two windows, drafts": (around(WINDOWED, SLIM, checkpoint_format="int8", draft_tokens=2), [9, 8], 9),
    "lookahead, drafts": (around(AHEAD, FULL, draft_tokens=2), [9, 9], 9),
    "every limit, ping-pong drafts": (
        around(WINDOWED, SINKED, CHUNKED, WIDE, in_place=False, draft_tokens=1),
        [9, 9, 9, 10],
        9,
    ),
    "latents": (around(LATENT), [9], 7),
    "int8 latents and windows, drafts": (
        around(APART, WINDOWED, LATENT, checkpoint_format="int8", draft_tokens=2),
        [9, 8, 9],
        9,
    ),
    "states alone": (around(), None, 7),
    "int8 states alone, drafts": (around(checkpoint_format="int8", draft_tokens=2), None, 9),
    "states alone, ping-pong drafts": (around(in_place=False, draft_tokens=1), None, 9),
}


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

    def forward(self, batch, sequences, counts):
        reads, writes = self.read(batch.state_read), self.read(batch.state_write)
        checkpoints, lengths = self.read(batch.checkpoint_write), self.read(batch.checkpoint_lengths)
        assert not any(slots[len(sequences) :].any() for slots in (reads, writes, checkpoints, lengths))
        for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            twin, read, write = self.twins[sequence], reads[i], writes[i]
            if count == 0:
                assert read == write == checkpoints[i] == 0
                continue
            self.assert_state(read, twin, twin.computed)
            assert (read == write) == self.rules.in_place or self.rules.draft_tokens
            if self.rules.draft_tokens and self.is_decode(count):
                for k, slot in enumerate(self.read(batch.draft_write)[i, :count]):
                    self.write_state(slot, twin, twin.computed + k + 1)
                assert write == self.read(batch.draft_write)[i, count - 1]
            kept, length = checkpoints[i], lengths[i]
            assert bool(kept) == bool(length)
            assert not kept or twin.computed < length <= twin.computed + count
            assert length % BLOCK == 0
            self.write_state(kept, twin, length)
            self.write_state(write, twin, twin.computed + count)
        for layer, spec in enumerate(self.layers):
            if isinstance(spec, LatentSpec):
                self.attend_latents(layer, spec, batch, sequences, counts)
            elif not isinstance(spec, StateSpec):
                self.attend(layer, spec, batch, sequences, counts)

    def attend_latents(self, layer, spec, batch, sequences, counts):
        """Write and attend at a layer with latents; assert that the queries see the tokens of their sequences."""
        ends = [(self.twins[s], self.twins[s].computed, n) for s, n in zip(sequences, counts, strict=True)]
        width = spec.latent_dim + spec.rope_dim
        new = np.concatenate([self.latents(twin, layer, width, start, start + n) for twin, start, n in ends])
        query = self.random.normal(size=(len(new), spec.num_query_heads, width)).astype(np.float32)
        self.cache.write(layer, *np.split(new, [spec.latent_dim], axis=-1), batch)
        found = self.cache.attend(layer, tuple(np.split(query, [spec.latent_dim], axis=-1)), batch)
        first = 0
        for twin, start, n in ends:
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
        least = [(int(self.rules.in_place) if self.is_decode(n) else n) if n else 0 for n in counts]
        return [
            n if not self.is_decode(n) and data.draw(st.booleans()) else data.draw(st.integers(low, n))
            for low, n in zip(least, counts, strict=True)
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
        at_rest = [self.states.resting(sequence.row) for sequence in sequences]
        end = data.draw(st.sampled_from(["commit", "commit", "commit", "reject", "abandon", "lose", "abandon late"]))
        if end not in ("abandon", "lose"):
            self.forward(batch, sequences, counts)
        if end not in ("commit", "reject"):
            checkpoints = [self.states.checkpoint(sequence.row) for sequence in sequences]
            if end == "lose":
                del batch
            else:
                self.cache.abandon(batch)
                assert not self.read(batch.state_write).any()
            self.cache.stats()  # gives up lost steps
            self.go_back(sequences, counts, checkpoints, at_rest)
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

    def go_back(self, sequences, counts, checkpoints, at_rest):
        """Assert that sequences have returned to their last states after a step that was not committed."""
        for sequence, count, checkpoint, resting in zip(sequences, counts, checkpoints, at_rest, strict=True):
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
        assert self.cache.stats().num_cached_states == 0

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


TestHybridMachine = HybridMachine.TestCase
TestHybridMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
