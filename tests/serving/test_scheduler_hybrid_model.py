"""The state machine of the scheduler over caches with recurrent states; the model has a cache of its own."""

import math
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.storage import AttentionSpec, Plane, StateSpec
from tests.faults import is_full
from tests.machines import drawn
from tests.serving.runs import next_token
from tests.serving.test_scheduler_model import SchedulerMachine

HASH = Plane("hash", (1,), "int32", per="sequence")
POISON = 777_777


class Ids(list):
    """Ids of a sequence; what is appended goes to the cache."""

    def __init__(self, cache, sequence):
        super().__init__(sequence.tokens.tolist())
        self.cache, self.sequence = cache, sequence

    def append(self, token):
        self.cache.append_tokens([self.sequence], [token])


class ModelSequence:
    """A sequence as the model of the scheduler uses it."""

    def __init__(self, cache, held):
        self.cache, self.held = cache, held

    @property
    def ids(self):
        return Ids(self.cache, self.held)

    def __getattr__(self, name):
        return getattr(self.held, name)


class ModelCache:
    """A cache as the model of the scheduler uses it: sequences of `ModelSequence`."""

    def __init__(self, cache, least_states, grid, short):
        self.cache, self.least_states, self.grid, self.short = cache, least_states, grid, short
        self.prepared = []

    def __getattr__(self, name):
        return getattr(self.cache, name)

    def add_sequence(self, tokens, id, **options):
        return ModelSequence(self.cache, self.cache.add_sequence(tokens, id=id, **options))

    def fork(self, sequence, id):
        return ModelSequence(self.cache, self.cache.fork(sequence.held, id=id))

    def remove(self, sequence):
        self.count_freed(sequence, lambda: self.cache.remove(sequence.held))

    def shortage(self, sequences, counts):
        return self.cache.shortage([one.held for one in sequences], counts)

    def shortages(self, sequences, counts):
        return self.cache.shortages([one.held for one in sequences], counts)

    def slots_of(self, sequence, swaps):
        """Return the slots that a sequence holds; checkpoints only for a swap_in. `count_freed` checks the number."""
        slots = {self.cache.state_slot(sequence.held), self.cache.spare_slot(sequence.held)}
        checkpoint = self.cache.checkpoint(sequence.held)
        return len((slots | {checkpoint[0]} if swaps and checkpoint else slots) - {0})

    def count_freed(self, sequence, leave):
        """Call `leave`, which ends the row of a sequence, and assert that it frees the slots that `slots_of` counts.

        The slots that become free are the oracle. Others hold slots of a sequence too: forks, and the prefix cache.
        """
        is_idle = not sequence.held.is_swapped and sequence.held not in self.in_flight
        before, held = self.cache.stats(), self.slots_of(sequence, True) if is_idle else 0
        is_alone = is_idle and not self.cache.has_prefix_cache and not self.is_shared(sequence)
        left = leave()
        if is_idle and left is not False:
            freed = self.cache.stats().num_free_states - before.num_free_states
            assert freed == held if is_alone else freed <= held
        return left

    def is_shared(self, sequence):
        """Return True if another sequence holds a block or the state of a sequence."""
        held = [one for one in self.cache.sequences.values() if not one.is_swapped]
        slot, slots = self.cache.state_slot(sequence.held), [self.cache.state_slot(one) for one in held]
        table = self.cache.block_table(0).numpy()
        blocks, own = table[[one.row for one in held]], table[sequence.held.row]
        return (slot > 0 and slots.count(slot) > 1) or any(np.count_nonzero(blocks == one) > 1 for one in own[own > 0])

    @property
    def in_flight(self):
        """Sequences of the steps that are neither committed nor abandoned."""
        return [one for batch, sequences in self.prepared if batch.in_flight for one in sequences]

    def try_prepare(self, sequences, counts, batch):
        held = [one.held for one in sequences]
        found = self.cache.try_prepare(held, counts, batch)
        if found is not None:
            self.prepared = [(one, rows) for one, rows in self.prepared if one is not batch] + [(batch, held)]
        return found

    def truncate(self, sequences, lengths):
        by_held = [one.held if isinstance(one, ModelSequence) else one for one in sequences]
        self.cache.truncate(by_held, lengths)

    def try_swap_out(self, sequences, space):
        (sequence,) = sequences
        return self.count_freed(sequence, lambda: self.cache.try_swap_out([sequence.held], space))

    def swap_in(self, sequences):
        self.cache.swap_in([one.held for one in sequences])


class HybridSchedulerMachine(SchedulerMachine):
    imports = False

    def __init__(self):
        super().__init__()
        self.nearest = patch("pagecore.serving.scheduling.parts.NEAREST", 4)  # prompts of the machine are short
        self.nearest.start()

    def teardown(self):
        self.nearest.stop()

    @initialize(
        shape=st.tuples(st.integers(8, 40), st.integers(3, 16), st.integers(1, 6), st.integers(1, 30)),
        rules=st.tuples(st.sampled_from([2, 4]), st.sampled_from([1, 2]), st.booleans(), st.sampled_from([0, 0, 1, 3])),
        states_per_run=st.sampled_from([None, None, 3]),
        swap_blocks=st.sampled_from([None, None, 5, 30]),
        overlap=st.booleans(),
        policy=st.sampled_from(["fcfs", "fcfs", "lpm", "priority", "priority"]),
        max_wait=st.sampled_from([1, 5, 1000]),
        limits=st.tuples(st.sampled_from([None, None, 3, 8]), st.sampled_from([None, None, 2, 5]), st.integers(0, 3)),
        share=st.booleans(),
        future=st.tuples(st.sampled_from([None, None, 0.7, 0.3]), st.sampled_from([None, 0, 1])),
    )
    def make(self, shape, rules, states_per_run, swap_blocks, overlap, policy, max_wait, limits, share, future):
        num_blocks, num_states, max_running, max_tokens = shape
        chunk, intervals, in_place, self.max_drafts = rules
        spec = StateSpec(
            (HASH,), chunk=chunk, interval=chunk * intervals, in_place=in_place, draft_tokens=self.max_drafts
        )
        # The scheduler pins the prefixes of several requests before it swaps the first of them in; the model does not.
        reuse = swap_blocks is None
        caches = [
            PagedKVCache(
                [AttentionSpec(1, 8, dtype="float32"), spec], block_size=2, num_blocks=num_blocks,
                num_states=num_states + self.max_drafts, max_sequences=8, prefix_cache=reuse, eviction_policy="fifo",
            )
            for _ in range(2)
        ]  # fmt: skip
        spaces = [swap_blocks and SwapSpace(cache, num_blocks=swap_blocks) for cache in caches]
        self.states = caches[0].plane("hash", 1).numpy()[:, 0]
        self.states[1:] = POISON
        (prefill, longest, checkpoints), (ratio, threshold) = limits, future
        grid, least = math.lcm(chunk, 2), (1 if in_place else 2) + self.max_drafts
        self.start(
            [caches[0], ModelCache(caches[1], least, grid, 1 + self.max_drafts)], spaces,
            max_running=max_running, max_tokens=max_tokens, overlap=overlap, policy=policy, max_wait=max_wait,
            prefill=prefill, chunk=longest, share=share and reuse, ratio=ratio, checkpoints=checkpoints,
            states_per_run=states_per_run and states_per_run + self.max_drafts,
            threshold=threshold if policy == "priority" else None,
        )  # fmt: skip

    def compute(self, step):
        """Assert that each row reads the state of its tokens, and write those of the step."""
        batch = step.batch
        slots = batch.state_read, batch.state_write, batch.checkpoint_write, batch.checkpoint_lengths
        starts, positions = np.asarray(batch.cu_query_lens), np.asarray(batch.positions)
        for row, (run, count) in enumerate(zip(step.runs, step.counts, strict=True)):
            held = run.held or self.scheduler.cache.sequences.get(run)  # of an idle run, its row was ahead
            if held is None:
                continue
            read, write, kept, length = (int(each.numpy()[row]) for each in slots)
            text, before = (run.tokens if run.held is None else held.tokens).tolist(), int(positions[starts[row]])
            while len(text) < before + count:
                text.append(next_token(text, run.sample))
            assert self.states[read] == (next_token(text[:before], 0) if before else 0)
            if kept:
                self.states[kept] = next_token(text[:length], 0)
            self.states[write] = next_token(text[: before + count], 0)
            if self.max_drafts and count <= 1 + self.max_drafts:
                for place, slot in enumerate(batch.draft_write.numpy()[row][:count].tolist()):
                    self.states[slot] = next_token(text[: before + place + 1], 0)

    @rule(turns=st.integers(0, 4))
    def lose(self, turns):
        """Abandon a step after some others, so that states return to their checkpoints."""
        self.turn(turns)
        if not self.steps or self.steps[-1][1].is_committed:
            if len(self.steps) > self.overlap:
                return
            self.schedule(turns)
        if self.steps and not self.steps[-1][1].is_committed:
            step, expected = self.steps.pop()
            written = np.asarray(step.batch.state_write)[: step.batch.num_sequences]
            self.states[written[written > 0]] = POISON
            self.scheduler.abandon(step)
            self.model.abandon(expected)

    @invariant()
    def same(self):
        super().same()
        if hasattr(self, "model"):
            self.scheduler.cache.check_invariants()
            self.model.cache.check_invariants()


TestHybridSchedulerModel = pytest.mark.slow(drawn(HybridSchedulerMachine))
TestHybridSchedulerModel.settings = settings(
    max_examples=1000 if is_full() else 36, stateful_step_count=60 if is_full() else 25, deadline=None
)
