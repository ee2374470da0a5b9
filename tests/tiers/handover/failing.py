"""A hand-over that is made to fail, and what must hold after it."""

from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import start_import
from tests.tiers.handover.pairs import SPECS, assert_same, computed, content, fill, make

TOKENS = list(range(100, 200))


def state_of(cache):
    """State of a cache: sequences, reference counts, cached prefixes, and every byte."""
    parts = cache._parts
    return (
        cache.num_sequences,
        [pool.ref_counts().tolist() for pool in parts.block_pools],
        cache.match_length(range(700, 800)),
        [bytes(buffer.numpy()) for pool in parts.store.pools for buffer in pool.buffers],
    )


class Case:
    """An exporter and an importer with something in their caches."""

    def __init__(self, pair, tokens=TOKENS, sizes=None, specs=SPECS, **options):
        self.exporter, self.importer = pair
        sizes = {"num_blocks": 80} if sizes is None else sizes
        self.sender, self.receiver = make(specs, **sizes), make(specs, **sizes, **options)
        fill(self.sender, 1)
        fill(self.receiver, 2)
        self.sequence = computed(self.sender, tokens)
        self.other = computed(self.receiver, list(range(700, 724)))
        self.before = state_of(self.receiver)

    def export(self, **options):
        return export_sequence(self.sender, self.sequence, transport=self.exporter, **options)

    def start(self, manifest, **options):
        return start_import(self.receiver, manifest, transport=self.importer, **options)

    def check_unchanged(self, *, bytes_too=True):
        after = state_of(self.receiver)
        assert after[:3] == self.before[:3]
        if bytes_too:
            assert after[3] == self.before[3]
        self.receiver.check_invariants()
        self.sender.check_invariants()

    def check_released(self, seconds=10):
        assert self.exporter.drain(seconds)
        assert self.importer.drain(seconds)
        assert self.sender.num_sequences == 1
        self.sender.check_invariants()

    def check_works(self):
        """A new hand-over succeeds."""
        arrived = self.start(self.export()).result()
        assert_same(content(self.sender, self.sequence), content(self.receiver, arrived))
        self.receiver.check_invariants()
