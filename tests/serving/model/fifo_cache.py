"""The cache of the model."""

from tests.serving.fake_cache import FakeCache


class FifoCache(FakeCache):
    """A fake cache that evicts in order of publication, so that looking up a prefix changes nothing."""

    def _hold(self, sequence, key):
        sequence.hold.append(key)
        self.holds[key] += 1
        self.used.setdefault(key, self.time)

    def _release(self, sequence):
        for key in sequence.hold:
            self.holds[key] -= 1
        sequence.hold = []

    def _publish(self, sequence):
        self.time += 1
        super()._publish(sequence)
        self.used = {key: time for key, time in self.used.items() if key in self.tree}

    def _take(self):
        """Take a block; a key that was evicted for it is new when it is published again."""
        block = super()._take()
        self.used = {key: time for key, time in self.used.items() if key in self.tree}
        return block

    def is_shared(self, sequence):
        """Return True if another sequence holds a block of a sequence, or pins one that the tree has."""
        others = [one for one in self.sequences.values() if one is not sequence and not one.is_swapped]
        blocks = {block for one in others for block in one.blocks}
        return not blocks.isdisjoint(sequence.blocks) or any(self.holds[key] > 1 for key in sequence.hold)
