"""RadixTree.extend: nodes grow in place, windows move along, and the cost is that of the new blocks."""

import numpy as np
import pytest

from pagecore.errors import DoubleFree, InvalidBlock, InvalidSequence, ShapeError, UnsupportedDtype
from pagecore.index import RadixTree
from tests.index.radix import blocks, snapshot
from tests.together import together


def test_a_decode_of_a_thousand_tokens_leaves_one_node():
    tree = RadixTree(16)
    receipt = tree.match_and_lock(range(3000))
    for length in range(16, 1017, 16):
        done = tree.extend(range(length), blocks(length // 16), receipt)
        assert (done.num_tokens, done.num_old_tokens) == (length, length - 16)
        assert done.taken.tolist() == [length // 16]
        assert receipt.num_tokens == length
    assert (tree.num_nodes, tree.protected()) == (1, 63)
    assert tree.match(range(3000)).blocks.tolist() == list(range(1, 64))
    receipt.release()
    tree.check_invariants()
    assert tree.evict("full", 2).blocks.tolist() == [63, 62]


@pytest.mark.parametrize("step", [1, 3, 10])
def test_windows_move_along_and_leave_no_chain_of_nodes(step):
    tree = RadixTree(1, windows=[4, 7])
    receipt = tree.match_and_lock([])
    for length in range(step, 200, step):
        lanes = (blocks(length), blocks(length), blocks(length))
        tree.extend(range(length), lanes, receipt)
        assert tree.protected("window0") == min(4, length)
        assert tree.protected("window1") == min(7, length)
        assert tree.num_nodes <= 3
        tree.check_invariants()
    assert tree.evict("window0", 5).blocks[1].tolist() == [1, 2, 3, 4, 5]
    assert tree.match(range(500)).num_tokens == length
    receipt.release()
    assert tree.protected("window0") == tree.protected("window1") == 0


def test_blocks_that_the_receipt_pins_are_ignored():
    tree = RadixTree(2, windows=[2])
    receipt = tree.match_and_lock([])
    tree.insert([1, 1, 2, 2], ([5, 6], [5, 6]), receipt=receipt)
    done = tree.extend([-9, -9, -9, -9, 3, 3, 4], ([-1, 0, 7], [-1, -1, 7]), receipt)
    assert [lane.tolist() for lane in done.taken] == [[7], [7]]
    assert tree.match([1, 1, 2, 2, 3, 3]).blocks[0].tolist() == [5, 6, 7]
    tree.check_invariants()


def test_blocks_that_the_tree_has_are_duplicates_and_holes_are_filled():
    tree = RadixTree(1, windows=[2])
    first, second = tree.match_and_lock([]), tree.match_and_lock([])
    tree.extend([1], ([1], [1]), first)
    tree.insert([1, 2, 3, 4], ([1, 2, 3, 4], [0, 0, 3, 4]))
    done = tree.extend([1, 2, 3, 5], ([1, 12, 13, 15], [1, 12, 13, 15]), first)
    assert [lane.tolist() for lane in done.taken] == [[15], [12, 15]]
    assert [lane.tolist() for lane in done.duplicates] == [[12, 13], [13]]
    assert done.num_old_tokens == 3
    assert first.num_tokens == 4
    done = tree.extend([1, 2], ([21, 22], [21, 22]), second)
    assert [lane.tolist() for lane in done.taken] == [[], []]
    assert (second.num_tokens, done.num_old_tokens) == (2, 2)
    tree.check_invariants()
    tree.release_all([first, second])
    assert tree.protected() == 0


def test_a_node_with_two_receipts_at_its_end_does_not_grow():
    tree = RadixTree(1)
    first = tree.match_and_lock([])
    tree.extend([1, 2], [1, 2], first)
    second = first.fork()
    tree.extend([1, 2, 3], [1, 2, 3], first)
    tree.extend([1, 2, 4], [1, 2, 4], second)
    assert (tree.num_nodes, tree.protected()) == (3, 4)
    tree.extend([1, 2, 4, 5], [1, 2, 4, 5], second)
    assert tree.num_nodes == 3
    first.release()
    assert tree.evict("full", 9).blocks.tolist() == [3]
    tree.check_invariants()


def test_a_node_with_a_state_does_not_grow_past_it():
    tree = RadixTree(1, states=True)
    receipt = tree.match_and_lock([])
    tree.insert([1, 2], [1, 2], states=[(2, 7)])
    receipt = tree.match_and_lock([1, 2, 3])
    assert receipt.components == ("full", "state")
    tree.extend([1, 2, 3], [1, 2, 3], receipt)
    assert (tree.num_nodes, receipt.components, tree.evictable("state")) == (2, ("full",), 1)
    assert tree.match([1, 2, 3]).state == 7
    tree.check_invariants()


def running(length, **options):
    """Return a tree with a window of 2, and the receipt of a sequence extended to `length` blocks of one token."""
    tree = RadixTree(1, windows=[2], **options)
    receipt = tree.match_and_lock([])
    for end in range(1, length + 1):
        run_on(tree, receipt, end)
    return tree, receipt


def run_on(tree, receipt, end):
    tree.extend(range(end), (blocks(end), blocks(end)), receipt)
    tree.check_invariants()


def test_a_node_with_two_children_is_not_joined():
    tree, receipt = running(4)
    tree.insert([0, 1, 9], ([1, 2, 50], [0, 0, 50]))
    run_on(tree, receipt, 5)
    assert tree.match([0, 1, 9]).blocks[0].tolist() == [1, 2, 50]
    assert tree.num_nodes == 4


def test_a_node_that_another_receipt_ends_at_is_not_joined():
    tree, receipt = running(4)
    other = tree.match_and_lock([0, 1])
    other.release("window")
    run_on(tree, receipt, 5)
    run_on(tree, receipt, 6)
    assert (other.num_tokens, receipt.num_tokens) == (2, 6)
    other.release()
    tree.check_invariants()


def test_a_node_with_a_state_is_not_joined_to_what_follows():
    tree, receipt = running(4, states=True)
    tree.insert([0, 1], (blocks(2), blocks(2)), states=[(2, 7)])
    run_on(tree, receipt, 6)
    assert tree.match(range(6)).state == 7


def test_a_state_keeps_its_age_when_its_node_is_joined_to_the_one_above():
    tree, receipt = running(4, states=True, policy="fifo")
    tree.insert([9], ([90], [90]), states=[(1, 5)])
    tree.insert(range(3), (blocks(3), blocks(3)), states=[(3, 7)])
    before = tree.num_nodes
    run_on(tree, receipt, 5)
    assert tree.num_nodes == before - 1
    assert [tree.evict("state", 1).states.tolist() for _ in range(2)] == [[5], [7]]


def test_blocks_that_a_window_has_left_are_as_old_as_the_first_of_them():
    tree, receipt = running(4)
    tree.insert([9], ([90], [90]))
    run_on(tree, receipt, 5)
    assert tree.evict("window", 4).blocks[1].tolist() == [1, 2, 3, 90]


def test_blocks_of_a_hit_that_a_window_has_left_stay_younger_than_those_before_the_hit():
    tree = RadixTree(1, windows=[2])
    tree.insert(range(9), (blocks(9), blocks(9)))
    tree.insert([9], ([90], [90]))
    receipt = tree.match_and_lock(range(6))  # needs blocks 5 and 6
    for end in range(7, 12):
        tree.extend([*range(6), *range(20, 14 + end)], (blocks(end, 21), blocks(end, 21)), receipt)
        tree.check_invariants()
    assert tree.evict("window", 4).blocks[1].tolist() == [1, 2, 7, 27]  # more than a window needs
    assert tree.evict("window", 7).blocks[1].tolist() == [3, 4, 8, 9, 90, 5, 6]


def test_blocks_of_a_hit_stay_longer_than_new_blocks_before_the_window():
    tree = RadixTree(1, windows=[2])
    tree.insert([*range(4), 50], ([*blocks(4), 50], [*blocks(4), 50]))
    receipt = tree.match_and_lock(range(4))  # needs blocks 3 and 4
    run_on(tree, receipt, 10)
    assert tree.evict("window", 9).blocks[1].tolist() == [5, 6, 1, 2, 50, 7, 8, 3, 4]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [90, 3, 2, 1, 80]),
        ("lfu", [90, 3, 80, 2, 1]),
        ("slru", [90, 3, 80, 2, 1]),
        ("fifo", [90, 3, 2, 1, 80]),
        ("filo", [80, 3, 90, 2, 1]),
    ],
)
def test_blocks_after_a_hit_are_new_and_have_no_hits(policy, order):
    tree = RadixTree(1, policy=policy)
    tree.insert([0, 1], [1, 2])
    tree.insert([9], [90])
    with tree.match_and_lock([0, 1]) as receipt:
        tree.extend([0, 1, 2], [1, 2, 3], receipt)
    tree.insert([8], [80])
    assert tree.evict("full", 5).blocks.tolist() == order


def test_growing_counts_as_a_use_of_a_window_that_is_not_pinned():
    tree, receipt = running(2)
    receipt.release("window")
    tree.insert([9], ([90], [90]))
    run_on(tree, receipt, 3)
    assert tree.evict("window", 4).blocks[1].tolist() == [1, 90, 2, 3]


def test_a_joined_node_gives_up_every_block_of_its_window():
    tree = RadixTree(1, windows=[2])
    tree.insert(range(6), (blocks(6), blocks(6)))
    tree.match_and_lock(range(4)).release()  # cuts at 2 and 4
    tree.match_and_lock(range(6)).release()
    assert tree.evict("window", 3).blocks[1].tolist() == [1, 2, 3]
    tree.insert(range(2), (blocks(2), blocks(2, 11)))
    receipt = tree.match_and_lock([])
    tree.extend(range(4), (blocks(4), [0] * 4), receipt)
    tree.extend(range(6), (blocks(6), [0] * 6), receipt)
    assert tree.num_nodes == 2
    tree.check_invariants()
    assert tree.evict("window", 9).blocks[1].tolist() == [11, 12, 4]


def test_a_leaf_that_lost_its_window_and_its_tail_grows_with_a_new_one():
    tree, receipt = running(5)
    receipt.release()
    assert tree.evict("window", 9).amount == 5
    tree.evict("full", 1)
    receipt = tree.match_and_lock([])
    receipt.release("window")
    tree.insert(range(4), (blocks(4), [0] * 4), receipt=receipt)
    tree.extend(range(8), (blocks(8), blocks(8)), receipt)
    tree.check_invariants()
    assert tree.evict("window", 9).blocks[1].tolist() == [5, 6, 7, 8]


def test_priorities_of_joined_nodes_expire():
    tree = RadixTree(1, windows=[2], policy="priority")
    receipt = tree.match_and_lock([])
    tree.insert(range(4), (blocks(4), blocks(4)), receipt=receipt, time=0.0, priority=90, time_to_live=10)
    for end in range(5, 9):
        run_on(tree, receipt, end)
    tree.insert([9], ([90], [90]), priority=50)
    assert tree.evict("window", 1).blocks[1].tolist() == [90]
    tree.extend(range(9), (blocks(9), blocks(9)), receipt, time=10.0)
    tree.insert([9], ([90], [90]), priority=50)
    assert tree.evict("window", 3).blocks[1].tolist() == [3, 4, 5]
    tree.check_invariants()


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_receipt_of_an_empty_prefix_keeps_its_namespace(is_forked):
    tree = RadixTree(1)
    receipt = tree.match_and_lock([1, 2], namespace=("tenant", 1))
    if is_forked:
        receipt, _ = receipt.fork(), receipt.release()
    assert tree.num_namespaces == 0
    tree.extend([1, 2], [1, 2], receipt)
    assert tree.num_namespaces == 1
    tree.extend([1, 2, 3], [1, 2, 3], receipt)
    assert tree.match([1, 2, 3], namespace=("tenant", 1)).num_tokens == 3
    assert tree.match([1, 2, 3]).num_tokens == 0
    receipt.release()
    tree.evict("full", 9)
    assert tree.num_namespaces == 0


def test_a_receipt_goes_to_the_namespace_that_insert_moves_it_to():
    tree = RadixTree(1)
    receipt = tree.match_and_lock([1], namespace="a")
    tree.insert([], [], namespace="b", receipt=receipt)
    tree.insert([1], [1], namespace="c", receipt=receipt)
    tree.extend([1, 2], [1, 2], receipt)
    assert [tree.match([1, 2], namespace=name).num_tokens for name in "abc"] == [0, 0, 2]


def test_new_blocks_have_no_spans():
    tree = RadixTree(2)
    tree.insert([1, 1], [1], spans=[(0, 2, b"cat")])
    receipt = tree.match_and_lock([1, 1], spans=[(0, 2, b"cat")])
    tree.extend([1, 1, 2, 2], [1, 2], receipt)
    assert tree.match([1, 1, 2, 2], spans=[(0, 2, b"cat")]).num_tokens == 4
    assert tree.match([1, 1, 2, 2]).num_tokens == 0
    assert tree.match([1, 1, 2, 2], spans=[(0, 2, b"cat"), (2, 3, b"dog")]).num_tokens == 2


def test_new_blocks_inherit_priority_and_rank_from_the_receipt_s_end():
    tree = RadixTree(1, policy="priority")
    first = tree.match_and_lock([])
    tree.insert([1], [1], receipt=first, priority=80)
    second = first.fork()
    for token, receipt in ((2, first), (3, second)):
        tree.extend([1, token], [1, token], receipt)
    tree.insert([9], [9], priority=50)
    tree.release_all([first, second])
    assert tree.evict("full", 3).blocks.tolist() == [9, 2, 3]


def test_spare_room_of_grown_nodes_stays_within_half_of_what_is_live():
    tree, receipts = RadixTree(64), []
    for sequence in range(64):
        receipt = tree.match_and_lock([])
        tokens = np.full(64 * 200, sequence, np.int32)
        for length in range(1, 200):
            tree.extend(tokens[: length * 64], blocks(length, 1 + sequence * 200), receipt)
        receipts.append(receipt)
    tree.check_invariants()
    live = 64 * 199 * (64 + 1) * 4
    assert live < tree.nbytes < 1.5 * live
    for receipt in receipts:
        receipt.release()
    tree.evict("full", 64 * 150)
    tree.check_invariants()


@together(
    ("tokens", "ids", "options", "error"),
    [
        ([1, 1, 2, 2, 3], [3, 4, 5], {}, None),
        ([1, 1], [3], {}, ShapeError),
        ([1, 1, 2, 2, 3, 3], [3, 4], {}, ShapeError),
        ([1, 1, 2, 2, 3, 3], [3, 4, 0], {}, InvalidBlock),
        ([1, 1, 2, 2, 3, 3], [3, 4, -5], {}, InvalidBlock),
        ([1, 1, 2, 2, 3, 3], [3, 4, 3], {}, DoubleFree),
        ([1, 1, 2, 2, 3, 3, 4, 4], [3, 4, 6, 6], {}, DoubleFree),
        ([1, 1, 2, 2, 3, 3], [3, 4, 2**31], {}, InvalidBlock),
        ([1, 1, 2, 2, 3, 0.5], [3, 4, 5], {}, UnsupportedDtype),
        ([[1, 1]], [3], {}, ShapeError),
        ([1, 1, 2, 2, 3, 3], 5, {}, ShapeError),
        ([1, 1, 2, 2, 3, 3], [3, 4, 5], {"time": "now"}, UnsupportedDtype),
        ([1, 1, 2, 2, 3, 3], [3, 4, 5], {"time": float("inf")}, ShapeError),
    ],
)
def test_a_refused_extension_changes_nothing(tokens, ids, options, error):
    tree = RadixTree(2)
    receipt = tree.match_and_lock([])
    tree.insert([1, 1, 2, 2], [3, 4], receipt=receipt)
    before = snapshot(tree)
    if error is None:
        done = tree.extend(tokens, ids, receipt)
        assert (done.num_tokens, done.num_old_tokens, done.taken.tolist()) == (4, 4, [])
    else:
        with pytest.raises(error):
            tree.extend(tokens, ids, receipt, **options)
    assert (snapshot(tree), receipt.num_tokens) == (before, 4)
    tree.check_invariants()
    assert tree.extend([1, 1, 2, 2, 3, 3, 4, 4], [3, 4, 5, 6], receipt).taken.tolist() == [5, 6]  # no claim remains


def test_a_refused_extension_leaves_no_namespace():
    tree = RadixTree(1)
    receipt = tree.match_and_lock([1], namespace="new")
    with pytest.raises(InvalidBlock):
        tree.extend([1], [0], receipt)
    assert snapshot(tree) == ([(0, 0)], 0, 1, 0)
    tree.check_invariants()


def test_only_an_unreleased_receipt_of_this_tree_can_be_extended():
    tree, other = RadixTree(1), RadixTree(1)
    receipt = tree.match_and_lock([1])
    with pytest.raises(InvalidSequence):
        other.extend([1], [1], receipt)
    receipt.release()
    with pytest.raises(DoubleFree):
        tree.extend([1], [1], receipt)
    for wrong in (None, 5):
        with pytest.raises(TypeError):
            tree.extend([1], [1], wrong)
    assert tree.num_nodes == 0
