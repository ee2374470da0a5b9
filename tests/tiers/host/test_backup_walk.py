"""Random operations on sequences with backups between them: the host has every whole block of what they are now."""

import numpy as np
import pytest

from pagecore import SwapSpace, UnsupportedOption
from pagecore.tiers import HostTier, Tiers
from tests.cache import draft_walk
from tests.cache.caches import SPEC, WINDOWED

BLOCK = 4
IMAGES = [(1, b"first image"), (2, b"second image")]


class Twin(draft_walk.Twin):
    """Model of a sequence with a namespace, and with a span whose content is an image or an adapter's number."""

    def __init__(self, tokens, computed, image):
        super().__init__(tokens, computed)
        self.image = image

    @property
    def names(self):
        """The namespace and the spans, as options of a sequence."""
        number, digest = self.image
        return {"namespace": f"adapter {number}", "spans": [(2, 4, digest)]}

    def key_at(self, position):
        return draft_walk.key_at([*self.tokens, *[0] * 8], position) + 1_000_003 * self.image[0]


class BackupWalk(draft_walk.Walk):
    """A walk with a host that has room for everything, and a model of what a backup must leave there."""

    def __init__(self, layers, seed, write):
        super().__init__(layers, seed)
        self.tier = HostTier(self.cache, num_blocks=4000, huge_pages=False)
        self.tiers = None if write is None else Tiers(self.cache, self.tier, write=write)
        self.space = SwapSpace(self.cache, num_blocks=60)
        self.num_checked = 0

    def resident(self):
        return [sequence for sequence in self.twins if sequence.row >= 0]

    def settled(self):
        """Return the sequences whose computed tokens all have ids: what they share with a copy is published."""
        return [each for each in self.resident() if self.twins[each].computed <= len(self.twins[each].tokens)]

    def pick(self):
        sequences = self.resident()
        order = self.random.permutation(len(sequences))
        return [sequences[i] for i in order[: self.random.integers(1, len(sequences) + 1)]] if sequences else []

    def add(self):
        if len(self.resident()) == 5:
            return
        image = IMAGES[self.random.integers(2)]
        old = self.texts[self.random.integers(len(self.texts))]
        tokens = [*old[: self.random.integers(len(old) + 1)], *self.new_ids(self.random.integers(12))][:40]
        twin = Twin(tokens, 0, image)
        sequence = self.cache.add_sequence(tokens, **twin.names)
        twin.computed = sequence.num_cached_tokens
        self.twins[sequence] = twin

    def fork(self):
        if self.settled() and len(self.resident()) < 5:
            parent = self.settled()[0]
            twin = self.twins[parent]
            self.twins[self.cache.fork(parent)] = Twin(twin.tokens, twin.computed, twin.image)

    def reorder(self):
        sequences = self.settled()
        if sequences:
            parents = [sequences[i] for i in self.random.integers(len(sequences), size=len(sequences))]
            self.cache.reorder(sequences, parents)
            twins = [self.twins[parent] for parent in parents]
            for sequence, twin in zip(sequences, twins, strict=True):
                self.twins[sequence] = Twin(twin.tokens, twin.computed, twin.image)

    def remove(self, sequence=None):
        if sequence is not None or self.resident():
            super().remove(sequence)

    def truncate(self):
        """Forget up to 7 tokens of a sequence, unless a window has released keys that the next token sees."""
        for sequence in self.pick()[:1]:
            twin = self.twins[sequence]
            length = max(0, max(len(twin.tokens), twin.computed) - int(self.random.integers(8)))
            try:
                self.cache.truncate([sequence], [length])
            except UnsupportedOption:
                assert self.cache.num_groups > 1
            else:
                twin.tokens, twin.computed = twin.tokens[:length], min(twin.computed, length)

    def swap(self):
        """Swap one sequence out, or one in: of several that share blocks, a cache may publish less."""
        away = [sequence for sequence in self.twins if sequence.row < 0]
        if away:
            self.cache.try_swap_in(away[:1])
        elif self.resident():
            self.cache.try_swap_out(self.pick()[:1], self.space)

    def write(self, batch, sequences, counts, ids):
        keys = []
        for sequence, count, some in zip(sequences, counts, ids, strict=True):
            twin = self.twins[sequence]
            text = Twin([*twin.tokens[: twin.computed], *some], 0, twin.image)
            keys += [text.key_at(twin.computed + k) for k in range(count)]
        tokens = np.tile(np.array(keys, np.float32)[:, None, None], (1, 2, 8))
        for layer in range(self.cache.num_layers):
            self.cache.write(layer, tokens, tokens, batch)

    def check(self):
        """Back up some sequences; the host has all of their whole blocks."""
        self.cache.check_invariants()
        if self.random.integers(2):
            sequences = self.pick()
            self.tier.backup(sequences)
            for sequence in sequences:
                self.check_host(self.twins[sequence])
            self.tier.check_invariants()

    def check_host(self, twin):
        whole = min(len(twin.tokens), twin.computed) // BLOCK * BLOCK
        found = self.tier.tree.match(twin.tokens[:whole], **twin.names)
        assert found.num_tokens == whole
        lanes = np.reshape(found.blocks, (self.cache.num_groups, -1))  # the group without a window comes first
        for layer in range(self.cache.num_layers):
            group = self.cache.group_of(layer)
            keys = self.tier.kv_pools[group].key(0).numpy()
            for index, block in enumerate(lanes[group].tolist()):
                if block:
                    expected = [twin.key_at(position) for position in range(index * BLOCK, (index + 1) * BLOCK)]
                    assert keys[block, :, 0, 0].tolist() == expected
                    self.num_checked += 1


@pytest.mark.parametrize("layers", [SPEC, [SPEC, WINDOWED]], ids=["full", "window"])
@pytest.mark.parametrize("write", [None, "through"])
@pytest.mark.parametrize("seed", range(4))
def test_after_a_backup_the_host_has_all_whole_blocks_of_a_sequence(layers, write, seed):
    walk = BackupWalk(layers, seed, write)
    operations = [walk.add, walk.fork, walk.remove, walk.truncate, walk.truncate, walk.reorder, walk.swap]
    operations += [walk.append] * 5 + [walk.step] * 5
    for _ in range(150):
        operations[walk.random.integers(len(operations))]()
        walk.check()
    assert walk.num_checked > 15
