"""Rules of states for models of caches: each state is computed from all ids before it, and slots hold such states."""

import numpy as np

from pagecore import StateSpec, dequantize_state, quantize_state
from tests.cache.test_prefix_machine import made


class StateRules:
    """Needs `cache`, `layers`, `space`, `twins`, and `rules`, the spec of a layer that keeps states."""

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

    def poison_states(self):
        """Overwrite free slots."""
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

    def is_decode(self, count):
        return count <= 1 + self.rules.draft_tokens

    def write_states(self, batch, sequences, counts, trees=None):
        """Write the states of a step, after assertions that it reads those of its sequences."""
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

    def rests(self, sequences):
        """Return the checkpoint of each sequence, and the slot of a state that it has not restored yet."""
        return [(self.states.checkpoint(s.row), self.states.resting(s.row)) for s in sequences]

    def least_accepted(self, count):
        return (int(self.rules.in_place) if self.is_decode(count) else count) if count else 0

    def check_states(self, sequence, twin):
        """Assert what the slots of an idle sequence hold."""
        slot, checkpoint = self.states.slot(sequence.row), self.states.checkpoint(sequence.row)
        assert self.states.length(sequence.row) == twin.computed
        if slot:
            self.assert_state(slot, twin, twin.computed)
        if checkpoint is not None:
            self.assert_checkpoint(checkpoint[0], twin, checkpoint[1])
        resting = self.states.resting(sequence.row)
        if resting:
            self.assert_checkpoint(resting, twin, twin.computed)
