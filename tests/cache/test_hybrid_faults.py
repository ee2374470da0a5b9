"""Interrupts and failed allocations in caches with states: every operation is done or undone."""

from functools import partial

import numpy as np
import pytest

from pagecore import PagedKVCache, Plane, StateSpec, SwapSpace, dequantize_state
from tests.cache.caches import SPEC
from tests.cache.verdicts import spread
from tests.faults import PythonAllocations, fail_allocation, is_full, lines_of, raise_at

pytestmark = pytest.mark.slow

PLANE = Plane("temporal", (1, 2), "float32", per="sequence")
PROMPT = list(range(30))
MODELS = {
    "in place": {"chunk": 4, "interval": 8},
    "ping-pong": {"chunk": 4, "interval": 8, "in_place": False},
    "drafts": {"chunk": 4, "interval": 8, "draft_tokens": 2},
    "int8": {"chunk": 4, "interval": 8, "checkpoint_format": "int8"},
    "int8 ping-pong drafts": {
        "chunk": 4,
        "interval": 8,
        "in_place": False,
        "draft_tokens": 2,
        "checkpoint_format": "int8",
    },
}


class World:
    """A cache with a sequence `x`, its fork `y`, a swapped sequence `s`, and a step of `z` in flight."""

    def __init__(self, model):
        spec = StateSpec((PLANE,), **MODELS[model])
        self.cache = PagedKVCache([SPEC, spec], block_size=4, num_blocks=40, num_states=14, max_sequences=8)
        self.space = SwapSpace(self.cache, num_blocks=9)
        self.x = self.cache.add_sequence(PROMPT, "x")
        self.compute(self.x, 14)
        self.y = self.cache.fork(self.x, "y")
        self.s = self.cache.add_sequence(PROMPT[5:], "s")
        self.compute(self.s, 9)
        self.cache.swap_out([self.s], self.space)
        self.z = self.cache.add_sequence([*PROMPT[:13], 7, 7, 7], "z")
        self.flying = self.cache.prepare([self.z], 3)
        self.late = []

    def compute(self, sequence, count):
        batch, plane = self.cache.prepare([sequence], count), self.cache.plane("temporal", 1).numpy()
        plane[batch.checkpoint_write.numpy()[0]] = batch.checkpoint_lengths.numpy()[0]
        plane[batch.state_write.numpy()[0]] = sequence.num_computed_tokens + count
        plane[0] = 0
        self.cache.commit(batch)

    def keep(self, call):
        self.late.append(call())

    def seen(self):
        """Return what a user can observe, and assert that it is consistent."""
        cache, states = self.cache, self.cache._parts.state.states
        cache.check_invariants()
        plane, found = cache.plane("temporal", 1).numpy(), {}
        for name, sequence in cache.sequences.items():
            if sequence.row < 0:
                found[name] = sequence.num_tokens, sequence.num_computed_tokens
                continue
            slot, resting = states.slot(sequence.row), states.resting(sequence.row)
            if slot and name != "z":
                np.testing.assert_allclose(plane[slot], sequence.num_computed_tokens, rtol=1e-6)
            if resting:
                assert_kept(cache, resting, sequence.num_computed_tokens)
            checkpoint = states.checkpoint(sequence.row)
            if checkpoint:
                assert_kept(cache, *checkpoint)
            lengths = sequence.num_tokens, sequence.num_computed_tokens, checkpoint and checkpoint[1]
            found[name] = *lengths, bool(slot), bool(resting)
        stats = cache.stats()
        lengths = [cache.match_length(ids) for ids in (PROMPT, PROMPT[5:], [*PROMPT[:13], 7, 7, 7, 7])]
        free = stats.num_free_states, stats.num_free_blocks, states.checkpoints.num_free
        return found, lengths, free, self.space.num_available


def assert_kept(cache, slot, length):
    """Assert that a checkpoint is that after `length` tokens."""
    kept = cache.checkpoint_plane("temporal", 1).numpy()[slot]
    if cache.spec(1).checkpoint_format:
        kept = dequantize_state(kept, cache.checkpoint_plane("temporal_scale", 1).numpy()[slot])
    np.testing.assert_allclose(kept, length, rtol=1e-6)


def commit_tree(world):
    """Let the step in flight have a tree, and return the call that commits a path of it, with a checkpoint at 16."""
    fill_flying(world)
    world.cache.commit(world.flying)
    world.cache.append_tokens([world.z], [[8, 9]])
    world.flying = world.cache.prepare([world.z], 3, parents=[[-1, 0, 0]])
    writes, plane = world.flying.draft_write.numpy()[0], world.cache.plane("temporal", 1).numpy()
    plane[writes] = (world.z.num_computed_tokens + np.array([1, 50, 2]))[:, None, None]
    return partial(world.cache.commit, world.flying, accepted_path=[[0, 2]])


def assert_tree(world):
    """Commit the other path if the first commit failed, and assert that the path's state was kept."""
    was_kept = not world.flying.in_flight
    if not was_kept:
        world.cache.commit(world.flying, accepted_path=[[0, 1]])
    state = world.cache.plane("temporal", 1).numpy()[world.cache.state_slot(world.z)]
    np.testing.assert_array_equal(state, world.z.num_computed_tokens + (0 if was_kept else 48))


OPERATIONS = {
    "add": lambda world: partial(world.cache.add_sequence, PROMPT, "new"),
    "fork": lambda world: partial(world.cache.fork, world.x, "new"),
    "reorder": lambda world: partial(world.cache.reorder, [world.x, world.y], [world.y, world.y]),
    "truncate": lambda world: partial(world.cache.truncate, [world.x, world.y], [12, 0]),
    "remove": lambda world: partial(world.cache.remove, world.x),
    "remove in flight": lambda world: partial(world.cache.remove, world.z),
    "prepare": lambda world: partial(world.cache.prepare, [world.x, world.y], [1, 9], world.cache.make_batch(2, 16)),
    "commit": lambda world: partial(world.cache.commit, world.flying),
    "commit a tree": commit_tree,
    "abandon": lambda world: partial(world.cache.abandon, world.flying),
    "swap out": lambda world: partial(world.cache.swap_out, [world.x, world.y], world.space),
    "swap in": lambda world: partial(world.cache.swap_in, [world.s]),
    "clear": lambda world: world.cache.clear_prefix_cache,
}


CASES = [
    (name, model)
    for name in OPERATIONS
    for model, rules in MODELS.items()
    if name != "commit a tree" or "draft_tokens" in rules
]


@pytest.mark.parametrize(("name", "model"), CASES)
@pytest.mark.parametrize("fault", ["interrupt", "allocation"])
def test_an_operation_that_fails_anywhere_is_done_or_undone(fault, name, model):
    made = World(model)
    call = OPERATIONS[name](made)
    before = made.seen()
    if name == "commit":
        fill_flying(made)
    made.keep(call)
    after = made.seen()
    inject = partial(fail_allocation, allocations=PythonAllocations()) if fault == "allocation" else raise_at
    again = World(model)
    turn = CASES.index((name, model))
    # Of allocations, most operations have fewer than 60.
    points = range(1, 61) if is_full() else [1, *range(2 + turn % 4, 61, 4)]
    if fault == "interrupt":
        points = spread(lines_of(partial(again.keep, OPERATIONS[name](again))), 10, turn)
    reached = 0
    for n in points:
        world = World(model)
        if name == "commit":
            fill_flying(world)
        call = OPERATIONS[name](world)
        run = inject(partial(world.keep, call), n)
        reached += run.reached
        if name != "prepare" or not run.finished:
            world.late.clear()
        assert world.seen() in (before, after), run.where
        if name == "commit a tree":
            assert_tree(world)
        if not run.reached:
            break
    assert reached or name in ("clear", "abandon", "commit", "commit a tree")


def fill_flying(world):
    batch, plane = world.flying, world.cache.plane("temporal", 1).numpy()
    plane[batch.state_write.numpy()[0]] = world.z.num_computed_tokens + 3
    plane[batch.checkpoint_write.numpy()[0]] = batch.checkpoint_lengths.numpy()[0]
    if batch._step.states.draft_tokens:
        plane[batch.draft_write.numpy()[0]] = np.arange(1, 4)[:, None, None] + world.z.num_computed_tokens
    plane[0] = 0
