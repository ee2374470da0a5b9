"""Random walks of operations on caches with sealed blocks: queries see the plain tail, and sealed blocks as quantised.

Key and value of a token are computed from all ids before it, so that reusing a block for another prefix is detected.
"""

import numpy as np
import pytest

from pagecore import AttentionSpec, OutOfBlocks, PagedKVCache, StateSpec, SwapSpace, UnsupportedOption, hadamard
from pagecore.tiers.host.tier import HostTier
from tests.cache.caches import learn
from tests.cache.hybrid_models import around
from tests.cache.sealing import as_read, restored, sealed_after
from tests.cache.state_rules import StateRules
from tests.cache.swaps import poison
from tests.cache.test_prefix_machine import Twin
from tests.cache.tree_rules import DraftTree, segments
from tests.faults import is_full
from tests.reference.dense import dense_attention, limits_of
from tests.reference.trees import ancestors

BLOCK = 16
BITS = "010011010001101110100101" * 4


def sealed(residual, heads=1, dims=(16, 32), group=16, **options):
    options = {"format": "kivi2", "group_size": group, "block_size": BLOCK, **options}
    return AttentionSpec(heads, *dims, dtype="float32", num_query_heads=2, residual=residual, **options)


FULL = AttentionSpec(1, 8, dtype="float32", num_query_heads=2)
WINDOWED = AttentionSpec(1, 8, 4, dtype="float32", num_query_heads=2, window=9)
MODELS = {
    "alone": ([sealed(20)], [9, 7]),
    "no residual": ([sealed(0, 2, softcap=3.0)], [9, 5]),
    "mixed bits": ([sealed(5, format="kivi4", value_format="kivi2", scale=0.3, sinks=[0.5, -1.0])], [8, 6]),
    "two layers and a plain one": ([sealed(16), FULL, sealed(16)], [8, 8, 6]),
    "two groups": ([sealed(7), sealed(7, 2, (32, 16), format="kivi4")], [9, 8, 6, 7]),
    "two residuals": ([sealed(3), sealed(20, 2, (32, 16), format="kivi4"), FULL, sealed(9, window=30)], [9] * 7),
    "rotations": ([sealed(5, 2, key_rotation="hadamard", value_rotation="hadamard"), sealed(5, 2)], [9, 6]),
    "a window": ([WINDOWED, sealed(9)], [7, 9, 6]),
    "windows": ([sealed(5, window=41), sealed(5, 2, (32, 16), window=9, lookahead=3), FULL], [9, 9, 8, 7, 7]),
    "a window alone": ([sealed(7, window=20)], [9, 7]),
    "chunks": ([sealed(9, chunk=48)], [9, 7]),
    "sink tokens": ([sealed(9, window=21, sink_tokens=18)], [9, 7]),
    "states and a window": (around(sealed(9, window=30)), [9, 7]),
    "states": (around(sealed(20)), [9, 7]),
    "states, no residual": (around(sealed(0), in_place=False), [9, 5]),
    "drafts": (around(sealed(7), FULL, draft_tokens=4, chunk=8), [9, 9, 6]),
    "drafts, a window, ping-pong": (around(WINDOWED, sealed(9), draft_tokens=3, in_place=False), [7, 9, 6]),
    "int8, a window": (around(WINDOWED, sealed(5), checkpoint_format="int8"), [7, 9, 6]),
}


def turned(spec, rows):
    """Return rows as a layer with rotations of keys and values stores them."""
    return rows if spec.key_rotation is None else hadamard(rows)


class SealedTwin(Twin):
    """Model of one sequence, with its number of sealed tokens."""

    sealed = 0
    before = None  # the model before the last cut inside a sealed block, whose tokens were restored

    def cut(self, length):
        left, old = min(length, self.computed), self.copy()
        super().cut(length)
        if left < self.sealed and left % BLOCK:
            self.before = old, left
        elif self.before is not None:
            self.before = self.before[0], min(self.before[1], left)
        self.sealed = min(self.sealed, left // BLOCK * BLOCK)

    def copy(self):
        twin = SealedTwin(self.namespace, self.ids)
        twin.known, twin.computed, twin.sealed = self.known, self.computed, self.sealed
        twin.before = self.before
        return twin

    def stored(self, layer, spec, start, end):
        """Return the numbers that the layer stores, in blocks that are not sealed."""
        key, value = (turned(spec, side) for side in super().stored(layer, spec, 0, end))
        if self.before is not None and spec.sealing is not None:
            old, left = self.before
            lengths = old.sealed, left, BLOCK
            cut = restored(spec, *old.stored(layer, spec, 0, old.sealed), *lengths)
            for side, found in zip((key, value), cut, strict=True):
                side[: min(left, end)] = found[:end]
        return key[start:], value[start:]


class Walk(StateRules):
    """A cache, the models of its sequences, and one method for each operation."""

    def __init__(self, model, seed, scrub):
        self.layers, blocks = MODELS[model]
        sizes = {"block_size": BLOCK, "num_blocks": blocks, "max_sequences": 5, "max_tokens_per_sequence": 112}
        self.rules = next((spec for spec in self.layers if isinstance(spec, StateSpec)), None)
        slots = {} if self.rules is None else {"num_states": 9 + 2 * self.rules.draft_tokens}
        self.cache = self.make_cache(self.layers, scrub=scrub, **sizes, **slots)
        self.attending = [spec for spec in self.layers if not isinstance(spec, StateSpec)]
        self.has_windows = any(spec.window is not None or spec.chunk is not None for spec in self.attending)
        self.residual = max(spec.sealing.residual for spec in self.attending if spec.sealing is not None)
        states = {"num_states": 6} if slots else {}
        if scrub:  # in the memory of a host tier, with tails of its own
            self.tier = HostTier(self.cache, num_blocks=12, huge_pages=False, **states)
            own = states if slots and self.rules.checkpoint_format else {}
            self.space = SwapSpace(self.cache, host=self.tier, num_blocks=9, **own)
        else:
            self.space = SwapSpace(self.cache, num_blocks=9, **states)
        self.random = np.random.default_rng(seed)
        self.twins = {}

    def make_cache(self, layers, **options):
        return PagedKVCache(layers, **options)

    def resident(self):
        return [sequence for sequence in self.twins if not sequence.is_swapped]

    def pick(self, among, most=1):
        count = self.random.integers(1, min(most, len(among)) + 1)
        return [among[i] for i in self.random.permutation(len(among))[:count]]

    def poison(self):
        if not self.cache.scrub:
            poison(self.cache, np.nan)
            if self.rules is not None:
                self.poison_states()

    # -- operations ----------------------------------------------------------------------------------------------

    def add(self):
        if len(self.resident()) == 5:
            return
        ids = [int(bit) for bit in BITS[: self.random.integers(0, 91)]]
        stray = self.random.integers(0, 200)
        if stray < len(ids):
            ids[stray] = 2
        expected = self.cache.match_length(ids)
        sequence = self.cache.add_sequence(ids)
        twin = self.twins[sequence] = SealedTwin(None, ids)
        twin.computed = twin.sealed = sequence.num_cached_tokens
        assert twin.computed == expected <= max(0, len(ids) - 1)

    def prepared(self, sequences, counts, **options):
        """Return the batch of a step; None, with nothing changed, if blocks are short."""
        room = self.cache.max_tokens_per_sequence
        if any(self.twins[each].computed + count > room for each, count in zip(sequences, counts, strict=True)):
            return None
        lacks, before = self.cache.shortage(sequences, counts), self.cache.stats()
        batch = self.cache.try_prepare(sequences, counts, **options)
        assert (batch is None) == (lacks > 0)
        if batch is None:
            assert self.cache.stats() == before
        else:
            self.poison()
        return batch

    def step(self):
        if not self.resident():
            return
        sequences = self.pick(self.resident(), most=3)
        twins = [self.twins[sequence] for sequence in sequences]
        counts = [int(self.random.choice([max(0, twin.known - twin.computed), 1, 3, 17, 40])) for twin in twins]
        batch = self.prepared(sequences, counts)
        if batch is None:
            return
        before = None if self.rules is None else self.rests(sequences)
        if self.random.random() < 0.1:
            self.cache.abandon(batch)
            if before is not None:
                self.go_back(sequences, counts, before)
            return
        self.forward(batch, sequences, segments(twins, counts))
        rejects = self.random.random() < 0.2
        accepted = [int(self.random.integers(self.least(n), n + 1)) for n in counts] if rejects else counts
        is_late = self.random.random() < 0.3
        if not is_late:
            learn(self.cache, self.twins, sequences, accepted)
        self.cache.commit(batch, accepted if rejects else None)
        for twin, count, kept in zip(twins, counts, accepted, strict=True):
            twin.accept(count, kept)
            twin.sealed = sealed_after(twin.computed, twin.sealed, self.residual, BLOCK)
        if is_late:
            learn(self.cache, self.twins, sequences, [0] * len(sequences))

    def verify(self):
        """Compute a tree of drafts, and accept one of its paths."""
        if not self.resident():
            return
        (sequence,) = self.pick(self.resident())
        twin = self.twins[sequence]
        has_one_root = self.rules is not None and self.rules.in_place
        most = 5 if self.rules is None else 1 + self.rules.draft_tokens
        parents = [int(self.random.integers(-1, at)) for at in range(int(self.random.integers(1, most + 1)))]
        if has_one_root:
            parents[1:] = [max(0, parent) for parent in parents[1:]]
        if twin.known > twin.computed or any(spec.sink_tokens for spec in self.attending):
            return
        batch = self.prepared([sequence], [len(parents)], parents=[parents])
        if batch is None:
            return
        tree = DraftTree.of(twin, parents, [int(each) for each in self.random.integers(0, 2, len(parents))])
        self.forward(batch, [sequence], segments([twin], [len(parents)], [tree]), [tree])
        end = int(self.random.integers(0 if has_one_root else -1, len(parents)))
        path = [] if end < 0 else ancestors(parents, end)
        self.cache.commit(batch, accepted_path=[path])
        moves = bool(path) and path[-1] >= len(path)
        length = twin.computed + (min(len(path), self.residual) if moves else len(path))
        twin.ids = twin.continued([tree.ids[at] for at in path]).ids
        twin.known = min(twin.known, twin.computed) if len(path) < len(parents) else twin.known
        twin.computed += len(path)
        twin.sealed = sealed_after(length, twin.sealed, self.residual, BLOCK)
        learn(self.cache, self.twins, [sequence], [0])

    def least(self, count):
        return 0 if self.rules is None else self.least_accepted(count)

    def go_back(self, sequences, counts, before):
        """Let the twins of an abandoned step return to their states, as the cache has done."""
        for sequence, count, (checkpoint, resting) in zip(sequences, counts, before, strict=True):
            twin = self.twins[sequence]
            if self.rules.in_place and count and not resting:
                reached = 0 if checkpoint is None else checkpoint[1]
                assert sequence.num_computed_tokens in ({0, reached} if self.has_windows else {reached})
                twin.computed = sequence.num_computed_tokens
                twin.sealed = min(twin.sealed, twin.computed)

    def forward(self, batch, sequences, chains, trees=None):
        """Write and attend at every layer, and compare with float64 over what the cache holds."""
        if self.rules is not None:
            counts = [n for _, _, n in chains] if trees is None else [len(tree.ids) for tree in trees]
            self.write_states(batch, sequences, counts, trees)
        for layer, spec in enumerate(self.layers):
            if isinstance(spec, StateSpec):
                continue
            new = [Twin.stored(twin, layer, spec, start, start + n) for twin, start, n in chains]
            key, value = (np.concatenate(sides) for sides in zip(*new, strict=True))
            query = self.random.normal(size=(len(key), spec.num_query_heads, spec.head_dim)).astype(np.float32)
            self.cache.write(layer, key, value, batch)
            found, first = self.cache.attend(layer, query, batch), 0
            for twin, start, n in chains:
                keys, values = twin.stored(layer, spec, 0, start + n)
                if spec.sealing is not None:
                    keys, values = as_read(spec, keys, values, twin.sealed, BLOCK)
                options = {"scale": spec.scale, "softcap": spec.softcap, "sinks": spec.sinks}
                queries = turned(spec, query[first : first + n])
                expected = dense_attention(queries, keys, values, **limits_of(spec), **options)
                expected = turned(spec, expected.astype(np.float32))
                np.testing.assert_allclose(found[first : first + n], expected, rtol=0, atol=5e-5)
                first += n

    def truncate(self):
        if not self.resident():
            return
        (sequence,) = self.pick(self.resident())
        twin = self.twins[sequence]
        length = int(
            self.random.choice([twin.length, max(0, twin.length - 5), twin.length // 32 * 16, twin.length // 2])
        )
        left = min(length, twin.computed)
        is_refused = self.rules is not None and self.states.resume_length(sequence.row, left) != left
        is_cut = left < twin.sealed and left % BLOCK > 0
        try:
            self.cache.truncate(sequence, length)
        except OutOfBlocks:
            assert is_cut
            assert not is_refused
            return
        except UnsupportedOption:
            assert is_refused or self.has_windows
            return
        assert not is_refused
        twin.cut(length)
        twin.ids = [*twin.ids[: twin.length], int(self.random.integers(3, 5))]

    def fork(self):
        if self.resident() and len(self.resident()) < 5:
            (parent,) = self.pick(self.resident())
            self.twins[self.cache.fork(parent)] = self.twins[parent].copy()

    def reorder(self):
        if self.resident():
            sequences = self.pick(self.resident(), most=3)
            parents = [self.pick(self.resident())[0] for _ in sequences]
            self.cache.reorder(sequences, parents)
            copies = [self.twins[parent].copy() for parent in parents]
            self.twins.update(zip(sequences, copies, strict=True))

    def swap_out(self):
        if self.resident():
            self.cache.try_swap_out(self.pick(self.resident(), most=2), self.space)

    def swap_in(self):
        swapped = [sequence for sequence in self.twins if sequence.is_swapped]
        if swapped and self.cache.try_swap_in(self.pick(swapped)):
            self.poison()

    def remove(self):
        if self.twins:
            (sequence,) = self.pick(list(self.twins))
            self.cache.remove(sequence)
            del self.twins[sequence]

    def clear(self):
        self.cache.clear_prefix_cache()

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self):
        self.cache.check_invariants()
        self.space.check_invariants()
        stats = self.cache.stats()
        assert stats.num_free_blocks + stats.num_used_blocks + stats.num_evictable_blocks == stats.num_blocks
        for sequence, twin in self.twins.items():
            assert sequence.tokens.tolist() == twin.ids[: twin.known]
            assert (sequence.num_computed_tokens, sequence.num_sealed_tokens) == (twin.computed, twin.sealed)
            if not sequence.is_swapped:
                tail = self.cache.group_of(next(i for i, each in enumerate(self.layers) if is_sealed(each)))
                assert self.cache.held_from(sequence, tail) == twin.sealed
                if self.rules is not None:
                    self.check_states(sequence, twin)

    def end(self):
        for sequence in self.twins:
            self.cache.remove(sequence)
        self.cache.clear_prefix_cache()
        stats = self.cache.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert self.space.num_used_blocks == self.space.num_sequences == 0
        if self.rules is not None:
            assert self.states.slots.num_used == self.states.checkpoints.num_used == 0


def is_sealed(spec):
    return getattr(spec, "sealing", None) is not None


WEIGHTS = {"add": 3, "step": 12, "verify": 1, "truncate": 2, "fork": 1, "reorder": 1, "swap_out": 1, "swap_in": 2}
WEIGHTS |= {"remove": 2, "clear": 0.3}


def run_walk(walk, num_operations):
    chances = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())
    for name in walk.random.choice(list(WEIGHTS), num_operations, p=chances):
        getattr(walk, name)()
        walk.check()
    walk.end()


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_random_operations(model):
    for seed in range(20 if is_full() else 2):
        run_walk(Walk(model, seed, scrub=seed % 2 == 1), 150 if is_full() else 80)
