"""StateTable and its plain twin under the same random calls, with a recurrence that shows what every slot holds."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagecore.errors import OutOfBlocks, PagecoreError
from pagecore.index import BlockPool, BlockTables, StateBuffers, StateTable, StepBuffers
from tests.faults import is_full
from tests.machines import drawn
from tests.reference.block_pool import BlockPool as TwinPool
from tests.reference.block_tables import BlockTables as TwinTables
from tests.reference.state_table import StateTable as TwinStates

MAX_SEQUENCES = 4
MAX_BLOCKS = 12
MAX_TOKENS = 256
POISON = "poison"
ENDS = ["commit"] * 4 + ["later", "undo"]  # of a step, after prepare


class StatesMachine(RuleBasedStateMachine):
    """Calls on both; `memory` and `kept` have the tokens that the state of each slot has seen, or poison."""

    @initialize(
        sizes=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=2),
        num_slots=st.sampled_from([12, 24, 8, 5, 4, 3, 2]),
        num_blocks=st.sampled_from([40, 20, 8]),
        chunk=st.integers(1, 5),
        chunks=st.integers(1, 3),
        in_place=st.booleans(),
        drafts=st.sampled_from([0, 0, 1, 3]),
        num_rows=st.integers(0, 3),
        num_checkpoints=st.sampled_from([12, None, 5, None, 3, 2]),
        prompt=st.sampled_from([16, 12, 0]),
        data=st.data(),
    )
    def make(
        self, sizes, num_slots, num_blocks, chunk, chunks, in_place, drafts, num_rows, num_checkpoints, prompt, data
    ):
        options = {"chunk": chunk, "interval": chunk * chunks, "in_place": in_place, "draft_tokens": drafts}
        options["num_checkpoints"] = num_checkpoints
        self.drafts = drafts
        self.pools = [BlockPool(num_blocks) for _ in sizes]
        self.twin_pools = [TwinPool(num_blocks) for _ in sizes]
        tables = BlockTables(
            self.pools, block_sizes=sizes, max_sequences=MAX_SEQUENCES, max_blocks_per_sequence=MAX_BLOCKS
        )
        self.states = StateTable(tables, num_slots, **options)
        twin_tables = TwinTables(self.twin_pools, sizes, MAX_SEQUENCES, MAX_BLOCKS)
        self.twin = TwinStates(twin_tables, num_slots, *options.values())
        self.step = StepBuffers(MAX_SEQUENCES, MAX_TOKENS, len(sizes))
        self.buffers = StateBuffers(MAX_SEQUENCES, drafts)
        self.memory = [POISON] * num_slots
        # The tokens of quantised checkpoints; without them, checkpoints are slots of the states.
        self.kept = self.memory if num_checkpoints is None else [POISON] * num_checkpoints
        for _ in range(num_rows):
            self.both("add")
        self.tokens = dict.fromkeys(range(num_rows), ())  # ids of the tokens of each row, by row
        self.foreign = []  # (slot, ids, blocks) that another holder shares, as a prefix cache does
        self.next_id = 0
        for row in range(num_rows if prompt else 0):
            self.try_step(data, True, "commit", ([row], [prompt]))

    def both(self, name, *arguments, **keywords):
        """Call both; they return equal results or raise equal errors. Returns the result, and True if there is one."""
        try:
            expected = getattr(self.twin, name)(*arguments, **keywords)
        except PagecoreError as error:
            with pytest.raises(type(error)):
                getattr(self.states, name)(*arguments, **keywords)
            return None, False
        found = getattr(self.states, name)(*arguments, **keywords)
        assert (found.tolist() if hasattr(found, "tolist") else found) == expected
        return expected, True

    def some_rows(self, data, idle=None):
        """Draw rows, mostly valid for the call; sometimes any."""
        if data.draw(st.integers(0, 19)) == 19:
            return data.draw(st.lists(st.integers(-1, MAX_SEQUENCES), max_size=3))
        fitting = [row for row, s in sorted(self.twin.states.items()) if idle is None or (s.step is None) == idle]
        rows = data.draw(st.permutations(fitting))
        return rows[data.draw(st.integers(0, len(rows))) :]

    def ids_of(self, row, length):
        return self.tokens[row][:length]

    # Rows.

    @rule()
    def add(self):
        row, is_done = self.both("add")
        if is_done:
            self.tokens[row] = ()

    @rule(data=st.data())
    def add_with_prefix(self, data):
        if not self.foreign or data.draw(st.integers(0, 9)) == 0:
            free = [slot for slot, holders in enumerate(self.twin.checkpoints.holders) if not holders]  # 0 among them
            state = data.draw(st.sampled_from([-1, len(self.kept), *free]))
            assert not self.both("add", [[0]] * len(self.pools), state)[1]
            return
        slot, ids, blocks = data.draw(st.sampled_from(self.foreign))
        if data.draw(st.booleans()):  # keys and values of more tokens than the state
            longer = [each for each in self.foreign if each[1][: len(ids)] == ids]
            blocks = data.draw(st.sampled_from(longer))[2]
        if data.draw(st.integers(0, 5)) == 5:  # keys and values without a state
            slot, ids = 0, ()
        row, is_done = self.both("add", blocks, slot, len(ids))
        if is_done:
            self.tokens[row] = ids

    @rule(data=st.data())
    def fork(self, data):
        row = data.draw(st.sampled_from([*sorted(self.twin.states, key=self.twin.length, reverse=True), -1]))
        child, is_done = self.both("fork", row)
        if is_done:
            self.tokens[child] = self.tokens[row]

    @rule(data=st.data())
    def remove(self, data):
        rows = self.some_rows(data)
        self.both("remove", rows[:1] if len(rows) > 1 else [])

    @rule(data=st.data())
    def reorder(self, data):
        rows = self.some_rows(data, idle=True)
        parents = st.sampled_from(sorted(self.twin.states)) if self.twin.states else st.just(0)
        drawn = data.draw(st.lists(parents, min_size=len(rows), max_size=len(rows)))
        before = dict(self.tokens)
        if self.both("reorder", rows, drawn)[1]:
            self.tokens |= {row: before[parent] for row, parent in zip(rows, drawn, strict=True)}

    @rule(data=st.data(), keep_capacity=st.booleans())
    def truncate(self, data, keep_capacity):
        rows = self.some_rows(data, idle=True)
        lengths = []
        for row in rows:
            state = self.twin.states.get(row)
            known = [state.length, state.checkpoint_length] * 4 + [0] if state else [0]
            lengths.append(data.draw(st.sampled_from(known)) + (data.draw(st.integers(0, 19)) == 19))
        if self.both("truncate", rows, lengths, keep_capacity=keep_capacity)[1]:
            self.tokens |= {row: self.ids_of(row, n) for row, n in zip(rows, lengths, strict=True)}

    # Steps.

    def a_step(self, data):
        rows = self.some_rows(data, idle=True)
        small = st.one_of(st.integers(1, 1 + self.drafts), st.integers(1, 8), st.integers(-1, 20))
        return rows, data.draw(st.lists(small, min_size=len(rows), max_size=len(rows)))

    @rule(data=st.data(), keep_checkpoints=st.booleans(), length=st.integers(0, 30))
    def look(self, data, keep_checkpoints, length):
        self.both("shortage", *self.a_step(data), keep_checkpoints)
        self.both("resume_length", data.draw(st.sampled_from([-1, *self.twin.states])), length)
        if length < 3:
            self.both("drop_checkpoints", self.some_rows(data, idle=True))
        elif length < 12:
            rows = self.some_rows(data, idle=True)
            self.both("set_ends", rows, data.draw(st.lists(st.integers(0, 30), min_size=len(rows), max_size=len(rows))))

    @rule(data=st.data(), keep_checkpoints=st.sampled_from([True, True, False]), end=st.sampled_from(ENDS))
    def prepare(self, data, keep_checkpoints, end):
        self.try_step(data, keep_checkpoints, end)

    @rule(data=st.data())
    def prepare_and_commit(self, data):
        self.try_step(data, True, "commit")

    @rule(data=st.data(), count=st.integers(4, 20), end=st.sampled_from(ENDS))
    def prefill(self, data, count, end):
        """Compute a prompt in a row without tokens, or go on in another."""
        added, is_done = self.both("add")
        if is_done:
            self.tokens[added] = ()
        idle = [row for row, state in sorted(self.twin.states.items()) if state.step is None]
        if idle:
            row = data.draw(st.sampled_from(idle[-2:]))
            self.try_step(data, True, end, ([row], [count]))

    @rule(data=st.data(), count=st.integers(1, 9), end=st.sampled_from([*ENDS, "abandon"]))
    def go_on_from_a_checkpoint(self, data, count, end):
        """Return a row to its checkpoint and compute a step from there."""
        held = [row for row, state in sorted(self.twin.states.items()) if state.checkpoint and state.step is None]
        if not held:
            return
        row = data.draw(st.sampled_from(held))
        length = self.twin.states[row].checkpoint_length
        assert self.both("truncate", [row], [length])[1]
        self.tokens[row] = self.ids_of(row, length)
        self.try_step(data, True, "later" if end == "abandon" else end, ([row], [count]))
        if end == "abandon" and self.twin.states[row].step and self.both("abandon", [row])[1]:
            self.cut_to_states([row])

    def try_step(self, data, keep_checkpoints, end, step=None):
        rows, counts = step or self.a_step(data)
        before = self.buffers_as_lists()
        try:
            found = self.twin.prepare(rows, counts, keep_checkpoints)
        except PagecoreError as error:
            if isinstance(error, OutOfBlocks) and data.draw(st.booleans()):
                assert self.states.try_prepare(rows, counts, self.step, self.buffers, keep_checkpoints) is False
            else:
                with pytest.raises(type(error)):
                    self.states.prepare(rows, counts, self.step, self.buffers, keep_checkpoints)
            assert self.buffers_as_lists() == before
            return
        self.states.prepare(rows, counts, self.step, self.buffers, keep_checkpoints)
        self.buffers.check_invariants()
        self.check_buffers(found, len(rows))
        if end == "undo":
            self.both("undo", rows)
            return
        self.run(rows, counts)
        if end == "commit":
            self.save(rows, None)
            self.both("commit", rows)

    def save(self, rows, accepted):
        """Quantise the checkpoints that a commit keeps."""
        saves, _ = self.both("saves", rows, accepted)
        for slot, checkpoint in saves or []:
            self.kept[checkpoint] = self.memory[slot]

    def buffers_as_lists(self):
        b = self.buffers
        arrays = [b.state_read, b.state_write, b.checkpoint_write, b.checkpoint_lengths, b.zeros, b.copies, b.loads]
        return [each.tolist() for each in arrays] + (
            [b.draft_write.tolist(), b.draft_read.tolist()] if self.drafts else []
        )

    def check_buffers(self, found, num_rows):
        idle = [0] * (MAX_SEQUENCES - num_rows)
        expected = [found[name] + idle for name in ("read", "write", "checkpoints", "lengths")]
        expected.append(found["zeros"])
        expected += [[list(pair) for pair in found[name]] for name in ("copies", "loads")]
        if self.drafts:
            padding = [[0] * (1 + self.drafts)] * len(idle)
            expected.append(found["drafts"] + padding)
            reads = zip(found["read"], found["drafts"], strict=True)  # each token reads what the one before it writes
            expected.append([self.drafts_read(*each) for each in reads] + padding)
        assert self.buffers_as_lists() == expected

    def drafts_read(self, read, written):
        count = sum(slot > 0 for slot in written)
        return [read, *written[: count - 1], *[0] * (len(written) - count)] if count else written

    def run(self, rows, counts):
        """Zero, copy and compute: each sequence reads its state and writes those that the buffers ask for."""
        for slot in self.buffers.zeros.tolist():
            self.memory[slot] = ()
        for source, target in self.buffers.copies.tolist():
            self.memory[target] = self.memory[source]
        for checkpoint, target in self.buffers.loads.tolist():
            self.memory[target] = self.kept[checkpoint]
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count == 0:
                assert self.buffers.state_read[i] == self.buffers.state_write[i] == 0
                continue
            state = self.memory[self.buffers.state_read[i]]
            length = len(state) if state != POISON else None
            assert state == self.ids_of(row, length)
            assert length == self.twin.length(row)
            ids = tuple(range(self.next_id, self.next_id + count))
            self.next_id += count
            self.tokens[row] = state + ids
            self.write(i, state, ids)

    def write(self, i, state, ids):
        checkpoint = int(self.buffers.checkpoint_lengths[i])
        if checkpoint:
            self.memory[self.buffers.checkpoint_write[i]] = (state + ids)[:checkpoint]
        self.memory[self.buffers.state_write[i]] = state + ids
        if self.drafts and len(ids) <= 1 + self.drafts:
            for n, slot in enumerate(self.buffers.draft_write[i].tolist()):
                if n < len(ids):
                    self.memory[slot] = state + ids[: n + 1]

    @rule(data=st.data(), is_partial=st.booleans())
    def commit(self, data, is_partial):
        rows = self.some_rows(data, idle=False)
        accepted = None
        if is_partial:
            states = [self.twin.states.get(row) for row in rows]
            counts = [s.step.count if s and s.step else 0 for s in states]
            extra = int(data.draw(st.integers(0, 14)) == 0)
            accepted = [data.draw(st.integers(-extra, n + extra) | st.just(n)) for n in counts]
        self.save(rows, accepted)
        if self.both("commit", rows, accepted)[1]:
            self.cut_to_states(rows)

    @rule(data=st.data())
    def abandon(self, data):
        rows = self.some_rows(data, idle=False)
        if self.both("abandon", rows[-1:])[1]:
            self.cut_to_states(rows[-1:])

    def cut_to_states(self, rows):
        self.tokens |= {row: self.ids_of(row, self.twin.length(row)) for row in rows}

    # Another holder of slots, such as a prefix cache.

    @rule(data=st.data())
    def cache_shares_a_checkpoint(self, data):
        held = [row for row, state in self.twin.states.items() if state.checkpoint and state.step is None]
        if not held:
            return
        row = data.draw(st.sampled_from(held))
        slot, length = self.states.checkpoint(row)
        blocks = [
            part[: length // size]
            for part, size in zip(self.twin.tables.rows[row].blocks, self.twin.tables.block_sizes, strict=True)
        ]
        self.states.checkpoints.share(slot), self.twin.checkpoints.share([slot])
        for pool, twin_pool, part in zip(self.pools, self.twin_pools, blocks, strict=True):
            pool.share(part), twin_pool.share(part)
        self.foreign.append((slot, self.ids_of(row, length), blocks))

    @rule(data=st.data())
    def cache_evicts_a_checkpoint(self, data):
        if self.foreign:
            slot, _, blocks = self.foreign.pop(data.draw(st.integers(0, len(self.foreign) - 1)))
            self.states.checkpoints.free(slot), self.twin.checkpoints.free([slot])
            for pool, twin_pool, part in zip(self.pools, self.twin_pools, blocks, strict=True):
                pool.free(part), twin_pool.free(part)

    @invariant()
    def is_the_same(self):
        if not hasattr(self, "states"):
            return
        assert self.states.slots.ref_counts().tolist() == self.twin.slots.holders
        assert self.states.checkpoints.ref_counts().tolist() == self.twin.checkpoints.holders
        assert self.states.slots.num_free == self.twin.slots.num_free
        for pool, twin_pool in zip(self.pools, self.twin_pools, strict=True):
            assert pool.ref_counts().tolist() == twin_pool.holders
        for row in self.twin.states:
            assert self.states.length(row) == self.twin.length(row)
            assert self.states.slot(row) == self.twin.slot(row)
            assert self.states.spare(row) == self.twin.states[row].spare
            assert self.states.resting(row) == self.twin.resting(row)
            assert self.states.checkpoint(row) == self.twin.checkpoint(row)
            assert self.states.tables.length(row) == self.twin.tables.rows[row].length
        self.states.check_invariants(exclusive=not self.foreign)
        self.states.tables.check_invariants()

    @invariant()
    def every_kept_state_is_that_of_its_tokens(self):
        if not hasattr(self, "states"):
            return
        for pool, memory in ((self.twin.slots, self.memory), (self.twin.checkpoints, self.kept)):
            for slot, holders in enumerate(pool.holders):
                if not holders:
                    memory[slot] = POISON
        for row, state in self.twin.states.items():
            if state.step is None and state.running and state.length:
                assert self.memory[state.running] == self.tokens[row]
            if state.checkpoint:
                assert self.kept[state.checkpoint] == self.ids_of(row, state.checkpoint_length)
            if state.resting:
                assert self.kept[state.resting] == self.ids_of(row, state.length)
        for slot, ids, _ in self.foreign:
            assert self.kept[slot] == ids


TestStates = pytest.mark.slow(drawn(StatesMachine))
TestStates.settings = settings(max_examples=100 if is_full() else 27, deadline=None)
