"""The journal of a tree: its changes rebuild the contents, and every block has the hash of its prefix."""

import gc
import struct

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.index import RadixTree, chain_hashes
from tests.capabilities import require
from tests.faults import is_full
from tests.index.test_radix_against_twin import RadixMachine
from tests.machines import drawn


def contents_of_twin(twin):
    """Return (component, hash) -> (first, parent, tokens, marks) of everything that the plain tree holds."""
    held = {}
    for key, root in twin.roots.items():
        left = [(child, ()) for child in root.children.values()]
        while left:
            node, before = left.pop()
            blocks = (*before, *node.blocks)
            left += [(child, blocks) for child in node.children.values()]
            tokens = [token for each, _ in blocks for token in each]
            options = {"namespace": twin.namespaces[key], "spans": twin.spans_of(blocks)}
            hashes = chain_hashes(tokens, twin.block_size, **options).tolist()
            for i in range(node.depth, node.end):
                entry = (i, hashes[i - 1] if i else None, blocks[i][0], sorted((s, e) for s, e, _ in blocks[i][1]))
                if twin.full:
                    held[0, hashes[i]] = entry
                for w in range(len(twin.windows)):
                    if node.lanes[twin.full + w][i - node.depth]:
                        held[1 + w, hashes[i]] = entry
                if i + 1 == node.end and node.state is not None:
                    held[1 + len(twin.windows), hashes[i]] = entry
    return held


def apply(changes, held, block_size):
    for change in changes:
        parent = change.parent
        for i, each in enumerate(change.hashes):
            key = (change.component, each)
            if not change.is_stored:
                del held[key]  # KeyError: removed twice, or never stored
                continue
            assert key not in held
            tokens = tuple(change.tokens[i * block_size : (i + 1) * block_size])
            marks = sorted((s, e) for block, s, e, _ in change.spans if block == i)
            held[key] = (change.first + i, parent, tokens, marks)
            parent = each
    return held


class JournalMachine(RadixMachine):
    """All rules of the tree's own machine; the reader takes the changes after each."""

    @initialize()
    def forget(self):
        self.held = {}

    @invariant()
    def changes_rebuild_the_contents(self):
        if not hasattr(self, "tree") or not hasattr(self, "held"):
            return
        if not self.tree.has_journal:
            self.tree.start_journal()
            apply(self.tree.list_contents().to_list(), self.held, self.twin.block_size)
        apply(self.tree.take_changes().to_list(), self.held, self.twin.block_size)
        assert self.held == contents_of_twin(self.twin)
        assert apply(self.tree.list_contents().to_list(), {}, self.twin.block_size) == self.held


TestJournalAgainstTwin = pytest.mark.slow(drawn(JournalMachine))
TestJournalAgainstTwin.settings = settings(max_examples=25 if is_full() else 15, stateful_step_count=25, deadline=None)


def test_a_journal_that_starts_late_hashes_what_is_there():
    tree = RadixTree(2, windows=(2,), states=True, state_interval=2)
    tree.insert([1, 2, 3, 4], ([1, 2], [0, 5]), states=[(4, 7)], namespace="a")
    tree.insert([1, 2, 9, 9, 8, 8], ([1, 3, 4], [0, 6, 7]), namespace="a")
    tree.start_journal()
    tree.check_invariants()
    assert len(tree.take_changes()) == 0
    stored = tree.list_contents().to_list()
    assert all(change.is_stored and change.namespace == "a" for change in stored)
    assert {h for c in stored if c.component == 0 for h in c.hashes} == {
        *chain_hashes([1, 2, 3, 4], 2, namespace="a").tolist(),
        *chain_hashes([1, 2, 9, 9, 8, 8], 2, namespace="a").tolist(),
    }


def test_consecutive_blocks_of_one_sequence_are_one_change():
    tree = RadixTree(2)
    tree.start_journal()
    receipt = tree.match_and_lock([])
    tokens, blocks = [], []
    for i in range(5):
        tokens, blocks = [*tokens, i, i], [*blocks, i + 1]
        tree.extend(tokens, blocks, receipt)
    (change,) = tree.take_changes().to_list()
    assert change.hashes == chain_hashes(tokens, 2).tolist()
    assert change.tokens == tokens


def test_a_full_journal_reports_the_overflow_once_and_goes_on():
    tree = RadixTree(2)
    tree.start_journal(max_bytes=400)
    for i in range(100):
        tree.insert([i, i], [i + 1])
    log = tree.take_changes()
    assert log.has_overflowed
    assert log.to_list() == []
    assert sum(len(change.hashes) for change in tree.list_contents().to_list()) == 100
    tree.evict("full", 1)
    log = tree.take_changes()
    assert not log.has_overflowed
    assert [change.is_stored for change in log.to_list()] == [False]


def roots_of(tree):
    """Return the number of namespaces of which a tree with a journal knows something."""
    return sum(len(each) for each in gc.get_referents(tree) if isinstance(each, dict))


@pytest.mark.parametrize("inserts", [True, False])
def test_namespaces_that_come_and_go_leave_nothing_although_the_changes_are_not_taken(inserts):
    tree = RadixTree(1)
    tree.start_journal(max_bytes=1000)
    tree.insert([1], [1], namespace="kept")
    kept = tree.match_and_lock([1], namespace="kept")
    for i in range(2000):
        if inserts:
            tree.insert([1], [2], namespace=f"tenant {i}")
            tree.evict("full", 1)
        else:
            tree.insert([], [], namespace=f"tenant {i}")
    assert roots_of(tree) < 500
    tree.check_invariants()
    assert tree.take_changes().has_overflowed == inserts
    tree.insert([1, 2], [1, 3], namespace="kept")
    names = {change.namespace for change in tree.list_contents().to_list()}
    assert names == {change.namespace for change in tree.take_changes().to_list()} == {"kept"}
    kept.release()


def test_a_journal_names_the_namespaces_of_its_changes_although_they_are_gone():
    tree = RadixTree(1)
    tree.start_journal()
    for i in range(1000):
        tree.insert([1], [1], namespace=f"tenant {i}")
        tree.evict("full", 1)
    named = [change.namespace for change in tree.take_changes().to_list() if change.is_stored]
    assert named == [f"tenant {i}" for i in range(1000)]
    tree.insert([1], [1], namespace="last")
    tree.take_changes()
    assert roots_of(tree) < 100


def test_a_log_outlives_the_tree_and_its_namespaces():
    tree = RadixTree(1)
    tree.start_journal()
    for i in range(300):
        tree.insert([1], [1], namespace=f"tenant {i}")
        tree.evict("full", 1)
    log = tree.take_changes()
    tree.insert([1], [1], namespace="last")
    del tree
    assert {change.namespace for change in log.to_list() if change.is_stored} == {f"tenant {i}" for i in range(300)}


def test_hashes_are_chained_xxh3_with_the_parent_as_seed():
    xxhash = require("xxhash")
    tokens = np.arange(100, dtype=np.int32) * 7919
    parent, expected = 0, []
    for block in tokens[:96].reshape(-1, 16):
        parent = xxhash.xxh3_64_intdigest(block.tobytes(), seed=parent)
        expected.append(parent)
    assert chain_hashes(tokens, 16).tolist() == expected
    root = xxhash.xxh3_64_intdigest(b"tenant", seed=1)
    parent = xxhash.xxh3_64_intdigest(tokens[:16].tobytes(), seed=root)
    assert chain_hashes(tokens[:16], 16, namespace="tenant").tolist() == [parent]
    mark = struct.pack("<qqi32s", 3, 20, 3, b"cat")
    parent = xxhash.xxh3_64_intdigest(mark, seed=expected[0])
    assert chain_hashes(tokens[:16], 16, spans=[(3, 20, b"cat")]).tolist() == [parent]


def test_hashes_are_the_same_on_every_machine():
    assert chain_hashes(range(32), 16).tolist() == [8773583392624668237, 10421089986442883640]
    assert chain_hashes(range(16), 16, namespace=("tenant", 7)).tolist() == [17479276736437242438]


def test_journals_refuse_what_they_cannot_do():
    tree = RadixTree(2)
    with pytest.raises(UnsupportedOption, match="no journal"):
        tree.list_contents()
    with pytest.raises(ShapeError, match="max_bytes is 0"):
        tree.start_journal(max_bytes=0)
    tree.start_journal()
    with pytest.raises(UnsupportedOption, match="a journal already"):
        tree.start_journal()
    tree.stop_journal()
    tree.insert([1, 2], [1])
    assert len(tree.take_changes()) == 0
    tree.start_journal()
    tree.check_invariants()
    with pytest.raises(ShapeError, match="block_size is 0"):
        chain_hashes([1], 0)
