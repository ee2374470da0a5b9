"""BlockTables and its plain twin under the same random calls, including failing ones."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagecore.errors import OutOfBlocks, PagecoreError
from pagecore.index import BlockPool, BlockTables, StepBuffers
from tests.faults import is_full
from tests.machines import drawn
from tests.reference.block_pool import BlockPool as TwinPool
from tests.reference.block_tables import BlockTables as TwinTables

MAX_SEQUENCES = 4
MAX_BLOCKS = 6
MAX_TOKENS = 64

group_plans = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 4]),  # block size
        st.sampled_from(["lifo", "fifo", "address"]),
        st.integers(2, 24),  # blocks of its pool
        st.booleans(),  # or the pool of the group before
    ),
    min_size=1,
    max_size=3,
)


def plain(result):
    """Return arrays and tuples as lists."""
    if isinstance(result, tuple):
        return [plain(part) for part in result]
    return result.tolist() if isinstance(result, np.ndarray) else result


class TablesMachine(RuleBasedStateMachine):
    @initialize(plan=group_plans, slot_dtype=st.sampled_from(["int64", "int32"]))
    def make(self, plan, slot_dtype):
        self.sizes = [size for size, *_ in plan]
        pools, twin_pools = [], []
        for _, order, num_blocks, is_shared in plan:
            pools.append(pools[-1] if is_shared and pools else BlockPool(num_blocks, order=order))
            twin_pools.append(twin_pools[-1] if is_shared and twin_pools else TwinPool(num_blocks, order))
        self.pools, self.twin_pools = pools, twin_pools
        self.tables = BlockTables(
            pools, block_sizes=self.sizes, max_sequences=MAX_SEQUENCES, max_blocks_per_sequence=MAX_BLOCKS
        )
        self.twin = TwinTables(twin_pools, self.sizes, MAX_SEQUENCES, MAX_BLOCKS)
        self.buffers = StepBuffers(MAX_SEQUENCES, MAX_TOKENS, len(plan), slot_dtype)
        self.foreign = [[] for _ in plan]  # references of another holder, by group
        self.copy = None  # mirror of tables and lengths, after follow_changes()

    def both(self, name, *arguments, **keywords):
        """Call both; they return equal results or raise equal errors."""
        try:
            expected = getattr(self.twin, name)(*arguments, **keywords)
        except PagecoreError as error:
            with pytest.raises(type(error)) as refused:
                getattr(self.tables, name)(*arguments, **keywords)
            self.check_figures(refused.value, error)
            return None
        assert plain(getattr(self.tables, name)(*arguments, **keywords)) == expected
        return expected

    def check_figures(self, refused, expected):
        if isinstance(expected, OutOfBlocks):
            figures = [(a,) if len(self.sizes) == 1 else a for a in (refused.requested, refused.available)]
            assert figures == [expected.requested, expected.available]

    def some_rows(self, data):
        """Draw rows, mostly distinct and used; sometimes one is unused or repeated."""
        if data.draw(st.integers(0, 9)) == 0:
            return data.draw(st.lists(st.integers(-1, MAX_SEQUENCES), max_size=3))
        rows = data.draw(st.permutations(sorted(self.twin.rows)))
        return rows[: data.draw(st.integers(0, len(rows)))]

    def a_step(self, data):
        rows = self.some_rows(data)
        small = st.one_of(st.integers(0, 3), st.integers(0, 12), st.integers(-1, 26))
        return rows, data.draw(st.lists(small, min_size=len(rows), max_size=len(rows)))

    def cuts(self, data, rows):
        """Draw a length for each row, mostly within the row."""
        longest = [self.twin.rows[row].length if row in self.twin.rows else 0 for row in rows]
        extra = int(data.draw(st.integers(0, 9)) == 0)
        return [data.draw(st.integers(-extra, length + extra)) for length in longest]

    # Rows.

    @rule()
    def add(self):
        self.both("add")

    @rule(data=st.data(), num_tokens=st.sampled_from([0, 6, 12]))
    def add_with_prefix(self, data, num_tokens):
        prefix = []
        for pool, size in zip(self.twin_pools, self.sizes, strict=True):
            count = -(-num_tokens // size)
            held = [block for block, holders in enumerate(pool.holders) if holders]
            block = st.sampled_from(held) if held else st.just(0)
            holes = data.draw(st.integers(0, count))
            wild = data.draw(st.integers(0, 9)) == 0
            block = st.integers(-1, pool.num_blocks) if wild else block
            prefix.append([0] * holes + data.draw(st.lists(block, min_size=count - holes, max_size=count - holes)))
        lengths = st.integers(-1, num_tokens + 1) | st.just(num_tokens)
        self.both("add", prefix, data.draw(st.none() | lengths))

    @rule(row=st.integers(-1, MAX_SEQUENCES))
    def fork(self, row):
        self.both("fork", row)

    @rule(data=st.data())
    def remove(self, data):
        self.both("remove", self.some_rows(data))

    @rule(data=st.data())
    def reorder(self, data):
        rows = self.some_rows(data)
        parents = st.sampled_from(sorted(self.twin.rows)) if self.twin.rows else st.just(0)
        self.both("reorder", rows, data.draw(st.lists(parents, min_size=len(rows), max_size=len(rows))))

    # Tokens.

    @rule(data=st.data())
    def extend(self, data):
        self.both("extend", *self.a_step(data))

    @rule(data=st.data(), dtype=st.sampled_from(["int32", "int64"]))
    def try_extend_into(self, data, dtype):
        rows, counts = self.a_step(data)
        out = [np.full(MAX_TOKENS * 2, -7, dtype) for _ in self.sizes]
        try:
            expected = self.twin.extend(rows, counts)
        except OutOfBlocks:
            assert self.tables.try_extend(rows, counts, out=out) is None
            assert all((part == -7).all() for part in out)
        except PagecoreError as error:
            with pytest.raises(type(error)):
                self.tables.try_extend(rows, counts, out=out)
        else:
            assert plain(self.tables.try_extend(rows, counts, out=out)) == expected
            assert [part[: len(slots)].tolist() for part, slots in zip(out, expected, strict=True)] == expected
            assert all((part[len(slots) :] == -7).all() for part, slots in zip(out, expected, strict=True))

    def some_first_blocks(self, data):
        """Draw a first block for each group, rarely an invalid one, or None for a step that takes every block."""
        wild = data.draw(st.integers(0, 19)) == 0
        firsts = st.lists(st.integers(-1 if wild else 0, 9), min_size=len(self.sizes), max_size=len(self.sizes))
        return data.draw(st.none() | firsts)

    @rule(data=st.data())
    def prepare(self, data):
        rows, counts = self.a_step(data)
        firsts = self.some_first_blocks(data)
        before = self.buffers_as_lists()
        lengths = {number: row.length for number, row in self.twin.rows.items()}
        try:
            slots = self.twin.extend(rows, counts, firsts)
        except PagecoreError as error:
            if isinstance(error, OutOfBlocks) and data.draw(st.booleans()):
                assert self.tables.try_prepare(rows, counts, self.buffers, firsts) is False
            else:
                with pytest.raises(type(error)) as refused:
                    self.tables.prepare(rows, counts, self.buffers, firsts)
                self.check_figures(refused.value, error)
            assert self.buffers_as_lists() == before
            return
        assert self.tables.try_prepare(rows, counts, self.buffers, firsts) is True
        self.buffers.check_invariants()
        self.check_buffers(rows, counts, lengths, slots)

    def buffers_as_lists(self):
        b = self.buffers
        arrays = (b.rows, b.query_lens, b.seq_lens, b.cu_query_lens, b.positions, *b.slot_mappings)
        return [array.tolist() for array in arrays] + [b.num_sequences, b.num_tokens]

    def check_buffers(self, rows, counts, lengths, slots):
        """Compare every entry of every array, including padding."""
        total = sum(counts)
        idle = MAX_SEQUENCES - len(rows)
        positions = [lengths[row] + i for row, count in zip(rows, counts, strict=True) for i in range(count)]
        assert self.buffers_as_lists() == [
            rows + [MAX_SEQUENCES] * idle,
            counts + [0] * idle,
            [lengths[row] + count for row, count in zip(rows, counts, strict=True)] + [0] * idle,
            [0, *np.cumsum(counts, dtype=int).tolist()] + [total] * idle,
            positions + [0] * (MAX_TOKENS - total),
            *[part + [-1] * (MAX_TOKENS - total) for part in slots],
            len(rows),
            total,
        ]

    @rule(data=st.data())
    def shortage(self, data):
        self.both("shortage", *self.a_step(data), self.some_first_blocks(data))

    @rule(data=st.data(), keep_capacity=st.booleans())
    def truncate(self, data, keep_capacity):
        rows = self.some_rows(data)
        self.both("truncate", rows, self.cuts(data, rows), keep_capacity=keep_capacity)

    @rule(data=st.data())
    def release_before(self, data):
        rows = self.some_rows(data)
        group = data.draw(st.integers(0, len(self.sizes) - 1))
        first = data.draw(st.sampled_from([0, 0, 1, 3, 8, -1]))
        self.both("release_before", rows, group, self.cuts(data, rows), first)

    @rule(data=st.data())
    def take_copies(self, data):
        group = data.draw(st.integers(0, len(self.sizes) - 1))
        assert [tuple(pair) for pair in self.tables.take_copies(group).tolist()] == self.twin.take_copies(group)

    # The mirror.

    @rule()
    def follow_changes(self):
        self.tables.follow_changes()
        self.copy = np.zeros(len(self.sizes) * (MAX_SEQUENCES + 1) * MAX_BLOCKS + MAX_SEQUENCES + 1, np.int32)

    @precondition(lambda self: self.copy is not None)
    @rule(capacity=st.sampled_from([1, 2, 7, 1000]))
    def take_changes(self, capacity):
        out = np.full((capacity, 2), -7, np.int64)
        while count := self.tables.take_changes(out):
            assert (np.diff(out[:count, 0]) > 0).all()
            assert (out[count:] == -7).all()
            self.copy[out[:count, 0]] = out[:count, 1]
            out[:] = -7
        expected = [self.tables.table(group).ravel() for group in range(len(self.sizes))]
        assert np.array_equal(self.copy, np.concatenate([*expected, self.tables.row_lengths]))

    # Other holders of blocks of the pools.

    @rule(data=st.data())
    def somebody_shares(self, data):
        group = data.draw(st.integers(0, len(self.sizes) - 1))
        held = [block for row in self.twin.rows.values() for block in row.blocks[group] if block]
        if held:
            block = data.draw(st.sampled_from(held))
            self.foreign[group].append(block)
            self.pools[group].share(block)
            self.twin_pools[group].share([block])

    @rule(data=st.data(), n=st.integers(0, 4))
    def somebody_allocates(self, data, n):
        group = data.draw(st.integers(0, len(self.sizes) - 1))
        if n <= self.twin_pools[group].num_free:
            blocks = self.pools[group].allocate(n).tolist()
            assert blocks == self.twin_pools[group].allocate(n)
            self.foreign[group] += blocks

    @rule(data=st.data())
    def somebody_frees(self, data):
        group = data.draw(st.integers(0, len(self.sizes) - 1))
        self.foreign[group] = data.draw(st.permutations(self.foreign[group]))
        for _ in range(data.draw(st.integers(0, len(self.foreign[group])))):
            block = self.foreign[group].pop()
            assert self.pools[group].free(block) == self.twin_pools[group].free([block])

    @invariant()
    def is_the_same(self):
        if not hasattr(self, "tables"):
            return
        self.tables.check_invariants(exclusive=not any(self.foreign))
        for pool, twin in zip(self.pools, self.twin_pools, strict=True):
            pool.check_invariants()
            assert pool.num_free == twin.num_free
            assert pool.ref_counts().tolist() == twin.holders
        rows = sorted(self.twin.rows)
        assert self.tables.num_rows == len(rows)
        assert self.tables.lengths(rows).tolist() == [self.twin.rows[row].length for row in rows]
        assert [self.tables.capacity(row) for row in rows] == [self.twin.capacity(row) for row in rows]
        for group in range(len(self.sizes)):
            expected = np.zeros((MAX_SEQUENCES + 1, MAX_BLOCKS), np.int32)
            for row in rows:
                blocks = self.twin.rows[row].blocks[group]
                expected[row, : len(blocks)] = blocks
                assert self.tables.blocks(row, group).tolist() == blocks
            assert np.array_equal(self.tables.table(group), expected)


TestTablesAgainstTwin = pytest.mark.slow(drawn(TablesMachine))
TestTablesAgainstTwin.settings = settings(max_examples=100 if is_full() else 27, deadline=None)


def test_changes_of_a_long_row_are_all_taken():
    """The row spans more than three words of the bitmap and starts within one."""
    tables = BlockTables(BlockPool(400), block_sizes=1, max_sequences=2, max_blocks_per_sequence=200)
    tables.follow_changes()
    tables.extend([tables.add()], [200])
    tables.fork(0)
    entries = np.zeros((1000, 2), np.int64)
    count = tables.take_changes(entries)
    copy = np.zeros(3 * 200 + 3, np.int64)
    copy[entries[:count, 0]] = entries[:count, 1]
    np.testing.assert_array_equal(copy[:600].reshape(3, 200), tables.table())
    np.testing.assert_array_equal(copy[600:], tables.row_lengths)
