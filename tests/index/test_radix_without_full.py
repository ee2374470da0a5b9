"""RadixTree(full=0), for models without full attention: a prefix is removed with its last window id or state."""

import numpy as np
import pytest

from pagecore.errors import ShapeError
from pagecore.index import RadixTree


def test_a_tree_without_components_is_refused():
    with pytest.raises(ShapeError, match="full is 0 and there are no windows"):
        RadixTree(1, full=0)
    with pytest.raises(ShapeError, match="full is -1"):
        RadixTree(1, full=-1, windows=[4])


def test_a_prefix_is_removed_with_its_last_window_block():
    tree = RadixTree(1, full=0, windows=[2])
    assert tree.components == ("full", "window")
    tree.insert([1, 2, 3, 4], [0, 0, 13, 14], namespace="a")
    match = tree.match([1, 2, 3, 4, 5], namespace="a")
    assert (match.num_tokens, match.blocks.tolist()) == (4, [0, 0, 13, 14])
    assert (tree.evictable("full"), tree.evictable("window")) == (4, 2)
    assert tree.evict("window", 1).blocks.tolist() == [13]
    assert (tree.num_nodes, tree.match([1, 2, 3, 4], namespace="a").num_tokens) == (1, 0)
    assert tree.evict("window", 9).blocks.tolist() == [14]
    assert (tree.num_nodes, tree.num_namespaces, tree.evictable("full")) == (0, 0, 0)
    tree.check_invariants()


def test_parents_are_removed_with_their_last_child():
    tree = RadixTree(1, full=0, windows=[1])
    tree.insert([1, 2, 3], [0, 0, 13])
    tree.insert([1, 2, 4], [0, 0, 14])
    assert tree.num_nodes == 3
    assert tree.evict("window", 1).blocks.tolist() == [13]
    assert tree.num_nodes == 2
    assert tree.evict("window", 1).blocks.tolist() == [14]
    assert tree.num_nodes == 0
    tree.check_invariants()


def test_states_alone_keep_their_prefixes():
    tree = RadixTree(2, full=0, states=True)
    done = tree.insert([1, 1, 2, 2, 3, 3], (), states=[(4, 7)])
    assert (done.taken, done.taken_states.tolist(), done.num_tokens) == ((), [7], 6)
    assert (tree.num_nodes, tree.evictable("full")) == (1, 2)  # the third block has no ids
    match = tree.match([1, 1, 2, 2, 3, 3])
    assert (match.num_tokens, match.state, match.blocks) == (4, 7, ())
    gone = tree.evict("state", 9)
    assert (gone.amount, gone.blocks, gone.states.tolist(), tree.num_nodes) == (1, (), [7], 0)
    tree.check_invariants()


def test_a_pinned_prefix_stays_until_it_is_released():
    tree = RadixTree(1, full=0, windows=[2])
    receipt = tree.match_and_lock([1, 2], namespace="a")
    tree.insert([1, 2], [0, 0], receipt=receipt, namespace="a")
    assert (tree.num_nodes, tree.num_namespaces, tree.protected("full")) == (1, 1, 2)
    tree.extend([1, 2, 3, 4], [0, 0, 5, 6], receipt)
    assert tree.evict("window", 9).amount == 0
    receipt.release("window")
    assert tree.evict("window", 9).blocks.tolist() == [5, 6]
    assert tree.num_nodes > 0
    tree.release_all([receipt])
    assert (tree.num_nodes, tree.num_namespaces) == (0, 0)
    tree.check_invariants()


@pytest.mark.parametrize("namespace", [None, "new"])
def test_an_unpinned_insertion_of_holes_leaves_nothing(namespace):
    tree = RadixTree(1, full=0, windows=[2])
    done = tree.insert([1, 2], [0, 0], namespace=namespace)
    assert (done.num_tokens, done.taken.tolist()) == (2, [])
    assert (tree.num_nodes, tree.num_namespaces, tree.evictable("full")) == (0, 0, 0)
    tree.check_invariants()


def test_a_receipt_that_moves_away_leaves_no_empty_node():
    tree = RadixTree(1, full=0, windows=[2])
    receipt = tree.match_and_lock([])
    tree.insert([1, 2], [0, 0], receipt=receipt, namespace="b")
    tree.insert([1, 2], [0, 0], receipt=receipt, namespace="a")
    assert (tree.num_nodes, tree.num_namespaces) == (1, 1)
    entries = [
        {"tokens": [7], "blocks": [7], "receipt": receipt, "namespace": "b"},
        {"tokens": [1], "blocks": [8], "namespace": "a"},  # which the first has ended
    ]
    tree.insert_all(entries)
    assert (tree.num_nodes, tree.num_namespaces) == (2, 2)
    assert tree.match([1], namespace="a").blocks.tolist() == [8]
    assert tree.match([7], namespace="b").blocks.tolist() == [7]
    tree.check_invariants()


def test_locking_the_half_of_a_prefix_with_ids_removes_the_other():
    tree = RadixTree(1, full=0, windows=[1])
    tree.insert([1, 2, 3, 4], [0, 12, 0, 0])
    assert tree.num_nodes == 1
    with tree.match_and_lock([1, 2, 3, 4]) as receipt:
        assert (receipt.num_tokens, tree.protected("full"), tree.evictable("full")) == (2, 2, 0)
        tree.check_invariants()


@pytest.mark.parametrize("end", [[], [9]])
@pytest.mark.parametrize("is_extended", [False, True])
def test_an_empty_lower_half_of_a_split_is_removed(is_extended, end):
    tree = RadixTree(1, full=0, windows=[9])
    tree.insert([1, 2, 3, 4], [0, 12, 0, 0])
    receipt = tree.match_and_lock([])
    if is_extended:
        tree.extend([1, 2, *end], [0, 0, 13], receipt)
    else:
        tree.insert([1, 2, *end], [0, 0, 13], receipt=receipt)
    tree.check_invariants()
    assert (tree.num_nodes, tree.protected("full"), tree.evictable("full")) == (1 + len(end), 2 + len(end), 0)


def test_evicting_tokens_also_removes_nodes_that_are_left_empty():
    tree = RadixTree(1, full=0, windows=[2])
    tree.insert([1, 2, 3, 4, 5, 6], [0, 0, 13, 0, 0, 16])
    gone = tree.evict("full", 1)
    assert (gone.amount, gone.blocks.tolist()) == (1, [16])
    gone = tree.evict("full", 3)
    assert (gone.amount, gone.blocks.tolist()) == (5, [13])
    assert tree.num_nodes == 0
    tree.insert([1, 2, 3], [0, 0, 13])
    tree.insert([1, 2, 4], [0, 0, 14])
    assert tree.evict("window", 1).blocks.tolist() == [13]
    assert tree.num_nodes == 2
    assert (tree.evict("full", 1).amount, tree.num_nodes) == (3, 0)
    tree.check_invariants()


def test_a_drain_of_windows_forgets_every_token():
    rng = np.random.default_rng(0)
    tree, free = RadixTree(4, full=0, windows=[8, 20]), list(range(1, 4097))
    for _ in range(300):
        tokens = rng.integers(0, 2, rng.integers(4, 80)).astype(np.int32)
        size = len(tokens) // 4
        offered = np.array(free[:size], np.int32)
        short = np.where(np.arange(size) < size - 2, 0, offered)
        done = tree.insert(tokens, (short, offered))
        taken = {block for lane in done.taken for block in lane.tolist()}
        free = [block for block in free if block not in taken]
        tree.check_invariants()
    for name in ("window0", "window1"):
        tree.evict(name, 10**9)
        tree.check_invariants()
    assert (tree.num_nodes, tree.evictable("full")) == (0, 0)
