"""Calls of the index, with states that show what each has changed: for tests in which memory runs out."""

import numpy as np

from pagecore.index import (
    BlockPool,
    BlockTables,
    RadixTree,
    RequestTable,
    SlotAllocator,
    StateBuffers,
    StateTable,
    StepBuffers,
    WindowSlotAllocator,
)
from tests.failing_calls import Case

MANY = 400  # ints up to 256 need no memory


class Box:
    """Holder of the result of a call; storing it creates no object."""

    def __init__(self):
        self.answer = [None]

    def keep(self, answer):
        self.answer[0] = answer


class Key:
    """Custom object as a namespace."""

    def __hash__(self):
        return 3

    def __eq__(self, other):
        return isinstance(other, Key)


class TreeState(Box):
    def __init__(self, **options):
        super().__init__()
        self.tree = RadixTree(1, **options)
        self.lanes = len(self.tree.windows) + (0 if options.get("full") == 0 else 1)
        self.tree.insert([1, 2, 3, 4], self.blocks(MANY, 4))
        self.tree.insert([1, 2, 7], self.blocks(MANY + 10, 3))
        self.tree.insert([5, 6], self.blocks(MANY + 20, 2), namespace=("a", Key()))
        self.receipt = self.tree.match_and_lock([1, 2, 3])
        self.other = self.tree.match_and_lock([5], namespace=("a", Key()))
        self.receipts = [self.receipt, self.other]

    def blocks(self, first, count):
        lane = np.arange(first, first + count, dtype=np.int32)
        return lane if self.lanes == 1 else [lane] * self.lanes

    def signature(self):
        """Return the observable state; evicts everything at the end."""
        tree = self.tree
        tree.check_invariants()
        if self.answer[0] is not None:
            self.receipts += self.answer[0] if isinstance(self.answer[0], list) else [self.answer[0]]
        seen = [
            (tree.num_nodes, tree.num_receipts, tree.num_namespaces),
            [(tree.evictable(name), tree.protected(name)) for name in tree.components],
            [tree.held_blocks(lane).tolist() for lane in range(self.lanes)],
            [(receipt.num_tokens, receipt.components) for receipt in self.receipts],
        ]
        for receipt in self.receipts:
            if receipt.components:
                receipt.release()
        gone = tree.evict("full", 10**9).blocks
        return [*seen, [lane.tolist() for lane in (gone if isinstance(gone, tuple) else [gone])]]


class TableState(Box):
    def __init__(self):
        super().__init__()
        self.pools = [BlockPool(2000), BlockPool(2000, order="address")]
        for pool in self.pools:
            pool.allocate(300)
        self.tables = BlockTables(self.pools, block_sizes=[1, 2], max_sequences=600, max_blocks_per_sequence=8)
        self.rows = [self.tables.add() for _ in range(300)]
        self.tables.follow_changes()
        self.tables.extend(self.rows, 2)
        self.forks = [self.tables.fork(row) for row in self.rows[:270]]
        self.tables.truncate(self.forks, 1, keep_capacity=True)
        self.tables.extend(self.forks, 1)  # copies on write
        self.buffers = StepBuffers(400, 400, 2)
        self.out = [np.zeros(900, np.int64), np.zeros(900, np.int64)]
        self.changes = np.zeros((5000, 2), np.int64)

    def signature(self):
        self.tables.check_invariants()
        answer = str(self.answer[0])
        copies = [group.tolist() for group in self.tables.take_copies()]
        lengths = self.tables.row_lengths.tolist()
        tables = [self.tables.table(group).tolist() for group in range(2)]
        counts = [pool.ref_counts().tolist() for pool in self.pools]
        changes = self.changes[: self.tables.take_changes(self.changes)].tolist()
        free = [pool.allocate(pool.num_free).tolist() for pool in self.pools]
        return answer, lengths, tables, copies, counts, changes, free


class StatesState(Box):
    """Rows with states, forks of them, and rows with a step in flight."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(4000)
        self.tables = BlockTables(self.pool, block_sizes=2, max_sequences=800, max_blocks_per_sequence=8)
        self.states = StateTable(self.tables, 3000, chunk=2, interval=4)
        self.step, self.slots = StepBuffers(400, 2000), StateBuffers(400)
        self.rows = [self.states.add() for _ in range(300)]
        self.states.prepare(self.rows, 5, self.step, self.slots)
        self.states.commit(self.rows)
        self.forks = [self.states.fork(row) for row in self.rows[:100]]
        self.flying = [self.states.add() for _ in range(300)]
        self.states.prepare(self.flying, 3, self.step, self.slots)

    def signature(self):
        self.states.check_invariants(exclusive=True)
        rows = [row for row, length in enumerate(self.tables.row_lengths.tolist()) if length]
        seen = [(row, self.states.length(row), self.states.slot(row), self.states.checkpoint(row)) for row in rows]
        buffers = [self.slots.state_read.tolist(), self.slots.state_write.tolist(), self.slots.copies.tolist()]
        counts = [pool.ref_counts().tolist() for pool in (self.pool, self.states.slots)]
        free = [pool.allocate(pool.num_free).tolist() for pool in (self.pool, self.states.slots)]
        return seen, buffers, self.tables.table().tolist(), counts, free, self.tables.num_rows


class SlotState(Box):
    def __init__(self):
        super().__init__()
        self.pool = BlockPool(3000)
        self.allocator = SlotAllocator(self.pool, 2)
        self.slots = self.allocator.allocate(1001)
        self.requests = RequestTable(600, 4)
        self.rows = self.requests.allocate(300)
        self.requests.write(self.rows, 0, self.slots[:300])
        self.out = np.zeros(1200, np.int64)

    def signature(self):
        self.allocator.check_invariants()
        self.requests.check_invariants()
        counts = self.pool.ref_counts().tolist()
        free = self.pool.allocate(self.pool.num_free).tolist()
        taken = (self.requests.num_free, self.requests.allocate(self.requests.num_free).tolist())
        return counts, free, self.requests.table.tolist(), taken


def entry(state, tokens, first, **options):
    return {"tokens": tokens, "blocks": state.blocks(first, len(tokens)), **options}


TREE_CALLS = {
    "match": lambda state: state.tree.match([1, 2, 3]),
    "match in a namespace": lambda state: state.tree.match([5, 6], namespace=("a", Key())),
    "match_and_lock": lambda state: state.keep(state.tree.match_and_lock([1, 2, 3], time=1.0)),
    "match_and_lock_all": lambda state: state.keep(
        state.tree.match_and_lock_all([[1], [1, 2, 7], [5]], namespaces=[None, None, ("a", Key())])
    ),
    "fork": lambda state: state.keep(state.receipt.fork()),
    "release": lambda state: state.receipt.release(time=2.0),
    "release of the last of a namespace": lambda state: state.other.release(),
    "release_all": lambda state: state.tree.release_all([state.receipt, state.other], time=2.0),
    "insert": lambda state: state.tree.insert([1, 2, 3, 9, 9], state.blocks(900, 5)),
    "insert of a long list": lambda state: state.tree.insert(
        list(range(50)), state.blocks(900, 50), receipt=state.other
    ),
    "insert in a new namespace": lambda state: state.tree.insert([1], state.blocks(900, 1), namespace=("b", 1.5)),
    "insert with a span": lambda state: state.tree.insert([8, 9], state.blocks(900, 2), spans=[(0, 2, b"cat")]),
    "insert with a receipt": lambda state: state.tree.insert([1, 9], state.blocks(900, 2), receipt=state.other),
    "insert_all": lambda state: state.tree.insert_all(
        [
            entry(state, [1, 2, 8], 900, receipt=state.receipt),
            entry(state, [1, 2, 8, 9], 910, namespace="new"),
            entry(state, [1, 2, 8, 9], 920),
            entry(state, [5, 6, 7], 930, namespace=("a", Key()), spans=[(1, 2, 7)]),
        ]
    ),
    "extend": lambda state: state.tree.extend([1, 2, 3, 8, 8], state.blocks(900, 5), state.receipt, time=1.0),
    "block_at": lambda state: state.tree.block_at(state.receipt, 1),
    "replace": lambda state: state.tree.replace(state.receipt, 1, 950),
    "evict": lambda state: state.tree.evict("full", 3, time=1.0),
    "evict more than there is": lambda state: state.tree.evict("full", 10**9),
    "held_blocks": lambda state: state.tree.held_blocks(),
}
TABLE_CALLS = {
    "add": lambda state: state.tables.add(),
    "add with a prefix": lambda state: state.tables.add([[1, 2], [1]]),
    "fork": lambda state: state.tables.fork(state.rows[0]),
    "remove": lambda state: state.tables.remove(state.forks),
    "reorder": lambda state: state.tables.reorder(state.rows[:9], state.rows[1:10]),
    "extend": lambda state: state.tables.extend(state.rows, 1),
    "extend into arrays": lambda state: state.tables.extend(state.rows, 1, state.out),
    "try_extend": lambda state: state.tables.try_extend(np.array(state.rows), 1),
    "shortage": lambda state: state.tables.shortage(state.rows, 2),
    "prepare": lambda state: state.tables.prepare(state.rows, 1, state.buffers),
    "prepare after holes": lambda state: state.tables.prepare(state.rows, 1, state.buffers, [0, 9]),
    "take_copies": lambda state: state.keep(state.tables.take_copies()),
    "take_copies of a group": lambda state: state.keep(state.tables.take_copies(1)),
    "take_changes": lambda state: state.keep(state.tables.take_changes(state.changes)),
    "truncate": lambda state: state.tables.truncate(state.rows, 1),
    "blocks": lambda state: state.tables.blocks(state.rows[0]),
    "allocate": lambda state: state.pools[0].allocate(300),
    "share": lambda state: state.pools[0].share(np.arange(1, 300)),
}
STATE_CALLS = {
    "add": lambda state: state.states.add(),
    "add with a prefix": lambda state: state.states.add(
        state.tables.blocks(0)[:2], state.states.checkpoint(0)[0], state.states.checkpoint(0)[1]
    ),
    "fork": lambda state: state.states.fork(0),
    "remove": lambda state: state.states.remove(state.rows),
    "reorder": lambda state: state.states.reorder(state.rows[:9], state.rows[1:10]),
    "truncate": lambda state: state.states.truncate(state.rows, 4),
    "prepare": lambda state: state.states.prepare(state.rows, 3, state.step, state.slots),
    "prepare forks": lambda state: state.states.prepare(state.forks, 1, state.step, state.slots),
    "commit": lambda state: state.states.commit(state.flying),
    "commit by counts": lambda state: state.states.commit(state.flying, [3] * 300),
    "abandon": lambda state: state.states.abandon(state.flying),
    "undo": lambda state: state.states.undo(state.flying),
    "shortage": lambda state: state.states.shortage(state.rows, 1),
}
SLOT_CALLS = {
    "allocate": lambda state: state.allocator.allocate(301),
    "allocate into an array": lambda state: state.allocator.allocate(301, state.out),
    "extend": lambda state: state.allocator.extend(1001, [1501], state.slots[-1:]),
    "extend into an array": lambda state: state.allocator.extend(1001, [1501], state.slots[-1:], state.out),
    "decode": lambda state: state.allocator.decode([1002], state.slots[-1:]),
    "requests.allocate": lambda state: state.requests.allocate(290),
    "requests.free": lambda state: state.requests.free(state.rows),
    "requests.write": lambda state: state.requests.write(state.rows, 1, state.slots[300:600]),
    "requests.read": lambda state: state.requests.read(3),
}
# These return a count: making its int can fail after the work is done.
COUNTS = {
    "pool.free": lambda state: state.pool.free(np.arange(1, 400)),
    "pool.retire": lambda state: state.pool.retire(np.arange(1, 400), 1),
    "slots.free": lambda state: state.allocator.free(state.slots),
}
OPTIONS = {
    "one lane": {},
    "priorities": {"policy": "priority"},
    "windows": {"windows": [2, 3]},
    "windows alone": {"full": 0, "windows": [2]},
}


class Changes:
    """Changes of a journal. It drops them if it has no memory for them, and reports an overflow."""

    def __init__(self, logs):
        self.has_overflowed = any(log.has_overflowed for log in logs)
        self.text = str([change for log in logs for change in log.to_list()])

    def __eq__(self, other):
        return self.has_overflowed or other.has_overflowed or self.text == other.text

    __hash__ = None


class JournalState(Box):
    """A tree with a journal, windows and states, and prefixes in more namespaces than are left."""

    def __init__(self):
        super().__init__()
        self.tree = RadixTree(1, windows=[2], states=True)
        self.insert([1, 2, 3], MANY)
        self.tree.start_journal()
        self.insert([1, 2, 4, 5], MANY + 10, spans=[(1, 3, b"cat")])
        for i in range(70):
            self.insert([7], MANY + 20 + i, namespace=("gone", i))
        for i in range(70):
            self.tree.evict_namespace(("gone", i))
        self.insert([1, 2, 6], MANY + 100, namespace="left")
        self.receipt = self.tree.match_and_lock([1, 2, 4, 5])

    def insert(self, tokens, first, **options):
        lane = np.arange(first, first + len(tokens), dtype=np.int32)
        return self.tree.insert(tokens, [lane, lane + 300], states=[(len(tokens), first + 600)], **options)

    def signature(self):
        """Return changes and contents; those of a result that was kept precede those that are left."""
        tree = self.tree
        tree.check_invariants()
        logs = [tree.take_changes()] if self.answer[0] is None else [self.answer[0], tree.take_changes()]
        held = [tree.held_blocks(lane).tolist() for lane in range(2)]
        contents = str(tree.list_contents().to_list()) if tree.has_journal else ""
        return Changes(logs), contents, held, tree.held_states().tolist(), tree.num_namespaces, tree.num_receipts


JOURNAL_CALLS = {
    "take_changes": lambda state: state.keep(state.tree.take_changes()),
    "list_contents": lambda state: state.tree.list_contents(),
    "insert": lambda state: state.insert([1, 2, 4, 5, 6], MANY + 200, namespace="left", spans=[(0, 2, 7)]),
    "insert after a receipt": lambda state: state.insert([1, 2, 4, 5, 6], MANY + 200, receipt=state.receipt),
    "evict": lambda state: state.tree.evict("full", 10**9),
    "evict states": lambda state: state.tree.evict("state", 2),
    "evict_path": lambda state: state.tree.evict_path([1, 2, 3], keep=1),
    "evict_namespace": lambda state: state.tree.evict_namespace("left"),
    "revoke": lambda state: state.tree.revoke([1, 2, 4], valid=1, receipts=[state.receipt]),
    "match_all": lambda state: state.tree.match_all([[1, 2, 3], [1, 2, 4, 5]]),
    "stop_journal": lambda state: state.tree.stop_journal(),
}


class Made(Box):
    """Objects that constructors refer to."""

    def __init__(self):
        super().__init__()
        self.pool, self.window = BlockPool(900), BlockPool(900)
        self.tables = BlockTables([self.pool, self.window], max_sequences=2, max_blocks_per_sequence=4)

    def signature(self):
        self.answer[0] = None
        for pool in (self.pool, self.window):
            pool.check_invariants()
        self.tables.check_invariants()
        return self.pool.num_used, self.window.num_used


CONSTRUCTORS = {
    "BlockPool": lambda state: BlockPool(900),
    "BlockPool by address": lambda state: BlockPool(900, order="address"),
    "BlockTables": lambda state: BlockTables(
        [state.pool, state.window], block_sizes=[1, 2], max_sequences=300, max_blocks_per_sequence=4
    ),
    "SlotAllocator": lambda state: SlotAllocator(state.pool, 4),
    "WindowSlotAllocator": lambda state: WindowSlotAllocator(state.pool, state.window, 4),
    "RequestTable": lambda state: RequestTable(300, 4),
    "StepBuffers": lambda state: StepBuffers(300, 400, 2),
    "StateTable": lambda state: StateTable(state.tables, 500, draft_tokens=2),
    "StateBuffers": lambda state: StateBuffers(300, 2),
    "RadixTree": lambda state: RadixTree(4, windows=[3], chunks=[None], states=True),
    "RadixTree with a journal": lambda state: RadixTree(4).start_journal(),
}

CASES = {
    **{
        f"tree with {options}: {name}": Case(lambda options=options: TreeState(**OPTIONS[options]), call)
        for options in OPTIONS
        for name, call in TREE_CALLS.items()
    },
    **{f"tables: {name}": Case(TableState, call) for name, call in TABLE_CALLS.items()},
    **{f"states: {name}": Case(StatesState, call) for name, call in STATE_CALLS.items()},
    **{f"slots: {name}": Case(SlotState, call) for name, call in SLOT_CALLS.items()},
    **{f"counts: {name}": Case(SlotState, call, may_be_done=True) for name, call in COUNTS.items()},
    **{f"journal: {name}": Case(JournalState, call) for name, call in JOURNAL_CALLS.items()},
    **{f"new {name}": Case(Made, call) for name, call in CONSTRUCTORS.items()},
}
