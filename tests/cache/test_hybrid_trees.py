"""Trees of drafts in caches with layers that keep states: each draft has a state of its own."""

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    CrossSpec,
    PagedKVCache,
    Plane,
    ShapeError,
    StateSpec,
    SwapSpace,
    UnsupportedOption,
)
from pagecore.ops import dequantize_state, quantize_state
from tests.faults import is_full

PLANES = (Plane("temporal", (2, 4, 4), "float32", per="sequence"),)
BLOCK = 4
SPECS = {
    "in place": StateSpec(PLANES, chunk=4, interval=4, draft_tokens=7),
    "two slots": StateSpec(PLANES, chunk=4, interval=4, draft_tokens=7, in_place=False),
    "int8": StateSpec(PLANES, chunk=4, interval=4, draft_tokens=7, checkpoint_format="int8"),
}


def make(spec, **options):
    given = {"block_size": BLOCK, "num_blocks": 64, "num_states": 60, "max_sequences": 4} | options
    return PagedKVCache([AttentionSpec(1, 8, dtype="float32"), spec], **given)


def state_of(ids):
    """Return the state after some tokens: random numbers that depend on all of them; zeros after none."""
    shape = PLANES[0].shape
    return np.random.default_rng(list(ids)).normal(size=shape).astype(np.float32) if len(ids) else np.zeros(shape)


def key_of(ids):
    return np.random.default_rng([9, *ids]).normal(size=(1, 8)).astype(np.float32)


def random_parents(random, count, has_one_root):
    return [-1, *(int(random.integers(0 if has_one_root else -1, k)) for k in range(1, count))]


def random_path(random, parents, is_empty_legal):
    """Return a path from a root down, which may end early."""
    path, at = [], -1
    while children := [k for k, parent in enumerate(parents) if parent == at]:
        if (path or is_empty_legal) and random.random() < 0.2:
            break
        at = int(random.choice(children))
        path.append(at)
    return path


class Engine:
    """A cache, and a model whose state and keys after a token are functions of the ids up to it."""

    def __init__(self, spec, **options):
        self.spec, self.cache = spec, make(spec, **options)
        self.plane = self.cache.plane("temporal", 1).numpy()

    def assert_state(self, slot, ids):
        """A state may come from a quantised checkpoint."""
        expected = state_of(ids)
        if not np.array_equal(self.plane[slot], expected):
            assert self.spec.checkpoint_format
            np.testing.assert_array_equal(self.plane[slot], dequantize_state(*quantize_state(expected)))

    def compute(self, sequence):
        """Compute the known tokens of a sequence in one step, as a chain."""
        start, ids = sequence.num_computed_tokens, sequence.tokens.tolist()
        batch = self.cache.prepare([sequence], len(ids) - start)
        self.assert_state(batch.state_read.numpy()[0], ids[:start])
        for slots, length in ((batch.checkpoint_write, batch.checkpoint_lengths.numpy()[0]), (batch.state_write, None)):
            self.plane[slots.numpy()[0]] = state_of(ids[:length])
        for k, slot in enumerate(batch.draft_write.numpy()[0, : len(ids) - start].tolist()):
            if len(ids) - start <= 1 + self.spec.draft_tokens:
                self.plane[slot] = state_of(ids[: start + k + 1])
        keys = np.array([key_of(ids[: k + 1]) for k in range(start, len(ids))])
        self.cache.write(0, keys, keys, batch)
        self.cache.commit(batch)

    def verify(self, sequences, parents):
        """Run a step with a tree of each sequence; each draft reads the state of its parent."""
        before = [sequence.num_computed_tokens for sequence in sequences]
        batch = self.cache.prepare(sequences, [len(own) for own in parents], parents=parents)
        keys = []
        for i, (sequence, own) in enumerate(zip(sequences, parents, strict=True)):
            reads, writes = batch.draft_read.numpy()[i], batch.draft_write.numpy()[i]
            assert not batch.checkpoint_write.numpy()[i] or len(own) == 1
            paths = []
            for k, parent in enumerate(own):
                paths.append([*(paths[parent] if parent >= 0 else sequence.tokens[: before[i]].tolist())])
                self.assert_state(reads[k], paths[k])
                paths[k].append(int(sequence.tokens[before[i] + k]))
                self.plane[writes[k]] = state_of(paths[k])
                keys.append(key_of(paths[k]))
            if len(own) == 1 and (slot := batch.checkpoint_write.numpy()[i]):
                self.plane[slot] = state_of(paths[0])
        self.cache.write(0, np.array(keys), np.array(keys), batch)
        return batch

    def check(self, sequence):
        """Assert the running state, the checkpoint and the keys of a sequence."""
        cache, ids = self.cache, sequence.tokens[: sequence.num_computed_tokens].tolist()
        if slot := cache.state_slot(sequence):
            self.assert_state(slot, ids)
        kept = cache.checkpoint(sequence)
        if kept is not None and not self.spec.checkpoint_format:
            self.assert_state(kept[0], ids[: kept[1]])
        elif kept is not None:
            codes, scales = quantize_state(state_of(ids[: kept[1]]))
            np.testing.assert_array_equal(cache.checkpoint_plane("temporal", 1).numpy()[kept[0]], codes)
            np.testing.assert_array_equal(cache.checkpoint_plane("temporal_scale", 1).numpy()[kept[0]], scales)
        blocks, rows = cache.block_table().numpy()[sequence.row], cache.plane("key", 0).numpy()
        for k in range(len(ids)):
            np.testing.assert_array_equal(
                rows[blocks[k // BLOCK]].reshape(BLOCK, 8)[k % BLOCK], key_of(ids[: k + 1])[0]
            )
        cache.check_invariants()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", range(6 if is_full() else 3))
def test_the_state_of_an_accepted_path_is_kept(name, seed):
    random, spec = np.random.default_rng(seed), SPECS[name]
    engine = Engine(spec)
    sequences = [engine.cache.add_sequence(random.integers(0, 9, int(n))) for n in (9, 6)]
    for sequence in sequences:
        engine.compute(sequence)
    for _ in range(12):
        counts = random.integers(1, 2 + spec.draft_tokens, 2).tolist()
        parents = [random_parents(random, count, spec.in_place) for count in counts]
        for sequence, count in zip(sequences, counts, strict=True):
            engine.cache.append_tokens([sequence], [random.integers(0, 99, count)])
        batch = engine.verify(sequences, parents)
        paths = [random_path(random, own, not spec.in_place) for own in parents]
        engine.cache.commit(batch, accepted_path=paths)
        for sequence in sequences:
            engine.check(sequence)
    for sequence in sequences:  # what was published has the states of its tokens
        tokens = sequence.tokens.tolist()
        engine.cache.remove(sequence)
        again = engine.cache.add_sequence([*tokens, 5])
        assert again.num_computed_tokens > 0
        engine.compute(again)
        engine.check(again)


def test_a_commit_that_is_refused_can_be_repeated():
    engine = Engine(SPECS["in place"])
    sequence = engine.cache.add_sequence(range(5))
    engine.compute(sequence)
    engine.cache.append_tokens([sequence], [[10, 11, 12]])
    batch = engine.verify([sequence], [[-1, 0, 0]])
    for wrong, error in (([[]], UnsupportedOption), ([[0, 1, 2]], ShapeError), ([[1]], ShapeError)):
        with pytest.raises(error):
            engine.cache.commit(batch, accepted_path=wrong)
    engine.cache.commit(batch, accepted_path=[[0, 2]])
    assert sequence.tokens.tolist() == [0, 1, 2, 3, 4, 10, 12]
    engine.check(sequence)


def test_an_error_while_a_checkpoint_is_saved_leaves_the_states_in_order(monkeypatch):
    engine = Engine(SPECS["int8"])
    sequence = engine.cache.add_sequence(range(6))
    engine.compute(sequence)
    engine.cache.append_tokens([sequence], [[10, 11, 12, 13]])
    batch = engine.verify([sequence], [[-1, 0, 0, 2]])

    def fail(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.cache._parts.store, "save_states", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.cache.commit(batch, accepted_path=[[0, 2, 3]])
    engine.cache.commit(batch, accepted_path=[[0, 1]])
    assert engine.cache.checkpoint(sequence)[1] == 8
    engine.check(sequence)


@pytest.mark.parametrize("name", SPECS)
def test_an_abandoned_tree_leaves_no_slots_behind(name):
    engine = Engine(SPECS[name])
    sequence = engine.cache.add_sequence(range(6))
    engine.compute(sequence)
    before = engine.cache.stats().num_free_states
    engine.cache.append_tokens([sequence], [[10, 11, 12]])
    engine.cache.abandon(engine.verify([sequence], [[-1, 0, 0]]))
    assert engine.cache.stats().num_free_states >= before
    assert sequence.num_computed_tokens == (6 if name == "two slots" else 4)
    engine.check(sequence)


@pytest.mark.parametrize(
    ("spec", "parents", "message"),
    [
        (SPECS["in place"], [-1, -1], r"parents\[0\]\[1\] is -1.*in_place=False"),
        (SPECS["in place"], [-1, 0, 0, 1, 1, 2, 2, 3, 3], r"tree of 9 tokens.*1 \+ 7.*draft_tokens=8"),
        (StateSpec(PLANES, chunk=4, interval=4), [-1, 0], r"1 \+ 0.*draft_tokens=1"),
    ],
)
def test_trees_without_a_state_for_each_token_are_refused(spec, parents, message):
    cache = make(spec)
    sequence = cache.add_sequence([*range(6), *range(len(parents))])
    cache.commit(cache.prepare([sequence], 6))
    before = cache.stats()
    with pytest.raises(UnsupportedOption, match=message):
        cache.prepare([sequence], len(parents), parents=[parents])
    assert (cache.stats(), sequence.num_computed_tokens) == (before, 6)
    cache.check_invariants()


def test_a_chain_next_to_a_tree_may_be_long():
    engine = Engine(SPECS["in place"])
    sequences = [engine.cache.add_sequence(range(first, first + 30)) for first in (0, 100)]
    engine.cache.commit(engine.cache.prepare(sequences[1:], 27))
    batch = engine.cache.prepare(sequences, [30, 3], parents=[None, [-1, 0, 0]])
    assert batch.checkpoint_lengths.numpy()[:2].tolist() == [28, 0]
    engine.cache.commit(batch, accepted_path=[None, [0, 2]])
    assert [sequence.num_computed_tokens for sequence in sequences] == [30, 29]
    engine.cache.check_invariants()


def test_a_sequence_that_shares_keys_past_its_state_takes_no_tree():
    cache = make(StateSpec(PLANES, chunk=8, interval=8, draft_tokens=3))
    with cache.add_sequence(range(22)) as first:
        cache.commit(cache.prepare([first], 22))
    sequence = cache.add_sequence([*range(20), 50])
    assert sequence.num_computed_tokens == 16
    with pytest.raises(UnsupportedOption, match="shares keys and values past its 16"):
        cache.prepare([sequence], 3, parents=[[-1, 0, 0]])
    cache.commit(cache.prepare([sequence], 5))
    cache.append_tokens([sequence], [[1, 2, 3]])
    cache.commit(cache.prepare([sequence], 3, parents=[[-1, 0, 0]]), accepted_path=[[0, 2]])
    cache.check_invariants()


def test_sequences_that_publish_nothing_take_trees():
    drafting = SPECS["in place"]
    crossed = PagedKVCache(
        [AttentionSpec(1, 8), CrossSpec(1, 8), drafting], block_size=BLOCK, num_blocks=64, num_states=60
    )
    unnamed = crossed.add_sequence(range(22), cross_tokens=5)  # without a digest, its keys have no name
    crossed.commit(crossed.prepare([unnamed], 22))
    hybrid = make(drafting)
    rounded = hybrid.add_sequence(range(22))
    hybrid.commit(hybrid.prepare([rounded], 22))
    hybrid.swap_out([rounded], SwapSpace(hybrid, num_blocks=64, num_states=9, dtype="float16"))
    hybrid.swap_in([rounded])
    for cache, sequence in ((crossed, unnamed), (hybrid, rounded)):
        cache.append_tokens([sequence], [[1, 2, 3]])
        batch = cache.prepare([sequence], 3, parents=[[-1, 0, 0]])
        cache.commit(batch, accepted_path=[[0, 2]])
        assert (sequence.num_computed_tokens, sequence.tokens[-2:].tolist()) == (24, [1, 3])
        cache.append_tokens([sequence], [[4] * 7])
        cache.commit(cache.prepare([sequence], 7), accepted=1)
        assert sequence.capacity == 32, "blocks stay with the sequence"
        cache.check_invariants()
