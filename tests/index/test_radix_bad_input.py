"""RadixTree: calls that are refused change nothing."""

import numpy as np
import pytest

from pagecore.errors import DoubleFree, InvalidBlock, InvalidSequence, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.index import RadixTree
from tests.index.radix import snapshot
from tests.together import together


@together(
    ("tokens", "ids", "options", "error"),
    [
        ([1.0, 2.0], [1], {}, UnsupportedDtype),
        ([[1, 2]], [1], {}, ShapeError),
        (5, [1], {}, ShapeError),
        (None, [1], {}, UnsupportedDtype),
        ([2**31, 1], [1], {}, ShapeError),
        ([1, 2, 3, 4], [9], {}, ShapeError),
        ([1, 2], 9, {}, ShapeError),
        ([1, 2], [0], {}, InvalidBlock),
        ([1, 2], [-3], {}, InvalidBlock),
        ([1, 2], [2**31], {}, InvalidBlock),
        ([1, 2], ["a"], {}, UnsupportedDtype),
        ([1, 2, 3, 4], [9, 9], {}, DoubleFree),
        ([1, 2], [3], {}, DoubleFree),
        ([1, 2], [9], {"states": [(1, 5)]}, ShapeError),
        ([1, 2], [9], {"states": [(4, 5)]}, ShapeError),
        ([1, 2], [9], {"states": [(0, 5)]}, ShapeError),
        ([1, 2], [9], {"states": [(2, -5)]}, InvalidBlock),
        ([1, 2], [9], {"states": [(2, 4)]}, DoubleFree),
        ([1, 2], [9], {"states": [2]}, ShapeError),
        ([1, 2], [9], {"namespace": []}, UnsupportedDtype),
        ([1, 2], [9], {"namespace": ("a", {})}, UnsupportedDtype),
        ([1, 2], [9], {"namespace": float("nan")}, UnsupportedDtype),
        ([1, 2], [9], {"spans": [(0, 2, 1), (1, 3, 1)]}, ShapeError),
        ([1, 2], [9], {"spans": [(1, 1, 1)]}, ShapeError),
        ([1, 2], [9], {"spans": [(-1, 1, 1)]}, ShapeError),
        ([1, 2], [9], {"spans": [(0, 1)]}, ShapeError),
        ([1, 2], [9], {"spans": [(0, 1, b"")]}, ShapeError),
        ([1, 2], [9], {"spans": [(0, 1, b"x" * 33)]}, ShapeError),
        ([1, 2], [9], {"spans": [(0, 1, 2**300)]}, ShapeError),
        ([1, 2], [9], {"spans": [(0, 1, None)]}, UnsupportedDtype),
        ([1, 2], [9], {"time": "now"}, UnsupportedDtype),
        ([1, 2], [9], {"time": True}, UnsupportedDtype),
        ([1, 2], [9], {"time": float("nan")}, ShapeError),
        *(
            ([1, 2], [9], {"time": value}, UnsupportedDtype)
            for value in (True, np.True_, np.array(True), np.array([False]))
        ),
        ([1, 2], [9], {"priority": 5}, UnsupportedOption),
        ([1, 2], [9], {"rank": 5}, UnsupportedOption),
        ([1, 2], [9], {"time_to_live": 5}, UnsupportedOption),
    ],
)
def test_a_refused_insert_changes_nothing(tokens, ids, options, error):
    tree = RadixTree(2, states=True)
    tree.insert([8, 8, 9, 9], [3, 4], states=[(4, 4)])
    before = snapshot(tree)
    with pytest.raises(error):
        tree.insert(tokens, ids, **options)
    entry = {"tokens": tokens, "blocks": ids, **options}
    time = entry.pop("time", None)
    with pytest.raises(error):
        tree.insert_all([{"tokens": [6, 6], "blocks": [50]}, entry], time=time)
    with pytest.raises(error):
        tree.insert(tokens, ids, **{"namespace": "new", **options})
    assert snapshot(tree) == before
    tree.check_invariants()
    assert tree.insert([1, 2, 3, 4], [9, 50]).taken.tolist() == [9, 50]  # no id is left claimed


def test_receipts_are_released_once_and_to_their_own_tree():
    tree, other = RadixTree(1), RadixTree(1)
    tree.insert([1], [1])
    receipt = tree.match_and_lock([1])
    with pytest.raises(InvalidSequence):
        other.release(receipt)
    with pytest.raises(InvalidSequence):
        other.insert([1], [1], receipt=receipt)
    with pytest.raises(UnsupportedOption):
        receipt.release("state")
    with pytest.raises(DoubleFree):
        tree.release_all([receipt, receipt])
    assert tree.protected() == 1
    receipt.release()
    for use in (receipt.release, receipt.fork, lambda: tree.insert([1], [1], receipt=receipt)):
        with pytest.raises(DoubleFree):
            use()
    for wrong in (None, 5):
        with pytest.raises(TypeError):
            tree.release(wrong)
    assert tree.protected() == 0
    tree.check_invariants()


@together(
    ("options", "error"),
    [
        ({"block_size": 0}, ShapeError),
        ({"block_size": -1, "states": True}, ShapeError),
        ({"block_size": 2**70}, ShapeError),
        ({"block_size": 1.5}, UnsupportedDtype),
        ({"policy": "best"}, UnsupportedOption),
        ({"policy": []}, UnsupportedOption),
        ({"windows": [0]}, ShapeError),
        ({"windows": [1] * 17}, ShapeError),
        ({"full": 0}, ShapeError),
        ({"states": 1}, UnsupportedDtype),
        ({"min_kept": -1}, ShapeError),
        ({"min_kept": 0.5}, UnsupportedDtype),
        ({"state_interval": 64}, UnsupportedOption),
        ({"states": True, "state_interval": 24}, ShapeError),
    ],
)
def test_a_tree_of_impossible_sizes_is_refused(options, error):
    with pytest.raises(error):
        RadixTree(**options)


@pytest.mark.parametrize(
    ("component", "amount", "error"),
    [
        ("window", 1, UnsupportedOption),
        (0, 1, UnsupportedOption),
        ("full", -1, ShapeError),
        ("full", 1.5, UnsupportedDtype),
    ],
)
def test_a_refused_eviction_changes_nothing(component, amount, error):
    tree = RadixTree(1)
    tree.insert([1], [1])
    with pytest.raises(error):
        tree.evict(component, amount)
    assert tree.evictable() == 1
