"""Random hand-overs between two caches: whatever ends well has the right bytes, and nothing is leaked."""

import os

import numpy as np
import pytest

from pagecore import OutOfBlocks, OutOfRows
from pagecore.tiers.handover import errors
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import start_import
from tests.tiers.handover.conftest import pair_of
from tests.tiers.handover.pairs import as_bytes, fill, make

ROUNDS = 10_000 if os.environ.get("PAGECORE_FAULTS") == "full" else 250
ACTS = ["new", "grow", "remove", "hand over", "poll", "cancel"]


def expected(tokens, layer, plane, shape):
    """Bytes of tokens, which depend on the token and the plane."""
    seed = np.asarray(tokens).reshape(-1, *[1] * len(shape)) * 31 + layer * 7 + len(plane)
    return ((seed + np.arange(np.prod(shape)).reshape(shape)) % 251).astype(np.uint8)


def planes_of(cache):
    for group, pool in enumerate(cache._parts.store.pools):
        for layer in range(pool.num_layers):
            for plane in pool.spec.planes:
                yield group, group + layer, plane.name, as_bytes(pool.plane(plane.name, layer))


def compute(cache, sequence, count):
    start = sequence.num_computed_tokens
    batch = cache.prepare([sequence], count)
    tokens = sequence.tokens[start : start + count]
    for group, layer, name, array in planes_of(cache):
        slots = batch.host.slot_mappings[group].numpy()[:count]
        array[slots // 8, slots % 8] = expected(tokens, layer, name, array.shape[2:])
    cache.commit(batch)


def check(cache, sequence):
    tokens = np.arange(sequence.num_computed_tokens)
    ids = sequence.tokens
    for group, layer, name, array in planes_of(cache):
        row = cache._parts.tables.blocks(sequence.row, group)
        held = tokens[row[tokens // 8] != 0]
        assert len(held) >= min(len(tokens), 23)  # the next token sees a window of 24 with its own
        np.testing.assert_array_equal(
            array[row[held // 8], held % 8], expected(ids[held], layer, name, array.shape[2:])
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scrub", [False, True])
def test_random_hand_overs(tmp_path, seed, scrub):
    rng = np.random.default_rng(seed)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with pair_of("unix", folders[0]) as one, pair_of("unix", folders[1]) as other:
        sides = [_Side(one[0], other[1], seed, scrub), _Side(other[0], one[1], seed + 9, scrub)]
        for _ in range(ROUNDS):
            here, there = sides[:: 1 if rng.random() < 0.5 else -1]
            here.act(rng, there)
        for side in sides:
            side.finish()
        for side in sides:
            assert side.exporter.drain(10)
            assert side.cache.num_sequences == len(side.sequences)
            for sequence in side.sequences:
                check(side.cache, sequence)
                side.cache.remove(sequence)
            side.cache.clear_prefix_cache()
            side.cache.check_invariants()
            assert all(pool.num_used == 0 for pool in side.cache._parts.block_pools)
        assert sum(side.num_arrived for side in sides) > 10


class _Side:
    """A cache, its sequences, and what is under way."""

    def __init__(self, exporter, importer, seed, scrub):
        self.exporter, self.importer = exporter, importer
        self.cache = make(num_blocks=60, max_sequences=10, scrub=scrub)
        if not scrub:
            fill(self.cache, seed)
        self.sequences, self.running, self.num_arrived = [], [], 0

    def act(self, rng, other):
        act = rng.choice(ACTS, p=[0.15, 0.15, 0.25, 0.25, 0.15, 0.05])
        pick = self.sequences[rng.integers(len(self.sequences))] if self.sequences else None
        try:
            if act == "new":
                tokens = 1000 * int(rng.integers(1, 5)) + np.arange(int(rng.integers(1, 120)))
                sequence = self.cache.add_sequence(tokens)
                self.sequences.append(sequence)
                compute(self.cache, sequence, len(tokens) - sequence.num_computed_tokens)
            elif act == "poll":
                self.poll()
            elif act == "cancel" and self.running:
                self.running[rng.integers(len(self.running))].cancel()
            elif pick is None:
                return
            elif act == "grow":
                count = int(rng.integers(1, 20))
                if pick.num_computed_tokens == pick.num_tokens:
                    last = int(pick.tokens[-1])
                    self.cache.append_tokens([pick], [list(range(last + 1, last + 1 + count))])
                compute(self.cache, pick, pick.num_tokens - pick.num_computed_tokens)
            elif act == "remove":
                self.sequences.remove(pick)
                self.cache.remove(pick)
            elif act == "hand over":
                manifest = export_sequence(self.cache, pick, transport=self.exporter, lease=30)
                try:
                    other.running.append(start_import(other.cache, manifest.encode(), transport=other.importer))
                except (OutOfBlocks, OutOfRows):
                    self.exporter.withdraw(manifest.export)
                if rng.random() < 0.1:
                    self.exporter.withdraw(manifest.export)
        except (OutOfBlocks, OutOfRows):
            pass
        if rng.random() < 0.1:
            self.cache.check_invariants()

    def poll(self, wait=False):
        for running in list(self.running):
            if not (running.poll() or wait):
                continue
            self.running.remove(running)
            try:
                arrived = running.result()
            except (errors.LeaseExpired, errors.ImportCancelled, errors.PeerLost):
                continue
            check(self.cache, arrived)
            self.sequences.append(arrived)
            self.num_arrived += 1

    def finish(self):
        self.poll(wait=True)
        for offer in list(self.exporter._server._offers.values()):
            self.exporter.withdraw(offer.export)
