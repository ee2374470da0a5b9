"""Re-entrant calls of a RadixTree: arguments whose `__float__`, `__index__`, `__eq__` or `__hash__` use the tree."""

import gc

import numpy as np
import pytest

from pagecore.errors import DoubleFree, ShapeError, UnsupportedDtype
from pagecore.index import RadixTree
from tests.together import together


class Number:
    """Number whose first conversion runs `act`."""

    def __init__(self, value, act):
        self.value, self.act = value, act

    def converted(self):
        act, self.act = self.act, lambda: None
        act()
        return self.value

    def __float__(self):
        return float(self.converted())

    def __index__(self):
        return int(self.converted())


class Name:
    """Namespace whose first comparison runs `act`."""

    def __init__(self, value, act=lambda: None):
        self.value, self.act = value, act

    def __hash__(self):
        return 7

    def __eq__(self, other):
        act, self.act = self.act, lambda: None
        act()
        return isinstance(other, Name) and self.value == other.value


def tree_with_receipt(**options):
    tree = RadixTree(1, **options)
    tree.insert([1, 2, 3], [11, 12, 13])
    return tree, tree.match_and_lock([1, 2])


def check(tree):
    tree.check_invariants()
    assert tree.num_receipts >= 0


@together(
    "call",
    [
        lambda tree, receipt: tree.release(receipt, time=Number(1, receipt.release)),
        lambda tree, receipt: tree.release(receipt, rank=Number(1, receipt.release)),
        lambda tree, receipt: tree.release_all([receipt], time=Number(1, receipt.release)),
        lambda tree, receipt: tree.extend([1, 2, 9], [11, 12, 19], receipt, time=Number(1, receipt.release)),
        lambda tree, receipt: tree.insert([1, 9], [11, 19], receipt=receipt, time=Number(1, receipt.release)),
        lambda tree, receipt: tree.insert_all(
            [
                {"tokens": [1, 9], "blocks": [11, 19], "receipt": receipt},
                {"tokens": [5], "blocks": [8], "rank": Number(5, receipt.release)},
            ]
        ),
        lambda tree, receipt: tree.block_at(receipt, Number(0, receipt.release)),
        lambda tree, receipt: tree.replace(receipt, 0, Number(21, receipt.release)),
        lambda tree, receipt: tree.replace(receipt, 0, 21, Number(0, receipt.release)),
    ],
)
def test_a_receipt_that_an_argument_releases_is_refused(call):
    tree, receipt = tree_with_receipt(policy="rank")
    with pytest.raises(DoubleFree):
        call(tree, receipt)
    check(tree)
    assert (tree.num_receipts, tree.evictable()) == (0, 3)
    assert tree.held_blocks().tolist() == [11, 12, 13]


def test_an_argument_may_evict_what_is_about_to_be_matched():
    tree = RadixTree(1)
    tree.insert([1, 2, 3], [11, 12, 13])
    match = tree.match([1, 2, 3], max_tokens=Number(3, lambda: tree.evict("full", 2)))
    assert match.blocks.tolist() == [11]
    receipt = tree.match_and_lock([1], time=Number(0, lambda: tree.evict("full", 9)))
    assert receipt.num_tokens == 0
    check(tree)


def test_a_later_prefix_of_a_list_may_end_the_namespace_of_an_earlier_one():
    tree = RadixTree(1)
    tree.insert([1, 2], [11, 12], namespace="a")

    def give_its_number_to_another():
        tree.evict("full", 2)
        tree.insert([1, 2], [21, 22], namespace="b")

    prefixes = [[1, 2], [1, 2]]
    most = [None, Number(2, give_its_number_to_another)]
    first, second = tree.match_all(prefixes, namespaces=["a", None], max_tokens=most)
    assert (first.num_tokens, second.num_tokens) == (0, 0)
    check(tree)


@pytest.mark.parametrize("method", ["match", "match_and_lock", "insert"])
def test_a_namespace_may_use_the_tree_while_it_is_compared(method):
    tree = RadixTree(1)
    for value in ("a", "b"):
        tree.insert([1, 2], [11, 12] if value == "a" else [21, 22], namespace=Name(value))

    def act():
        tree.evict("full", 9)
        tree.insert([1], [31], namespace=Name("b"))

    own = [[41, 42]] if method == "insert" else []
    found = getattr(tree, method)([1, 2], *own, namespace=Name("b", act))
    if method == "match":
        assert found.blocks.tolist() == [31]
    elif method == "insert":
        assert (found.taken.tolist(), found.duplicates.tolist()) == ([42], [41])
    else:
        assert found.match.blocks.tolist() == [31]
        found.release()
    check(tree)
    tree.evict("full", 9)
    assert (tree.num_namespaces, tree.num_nodes) == (0, 0)


def test_two_equal_namespaces_added_at_once_are_one():
    tree = RadixTree(1)
    late = Name("a", lambda: tree.insert([1], [12], namespace=Name("a")))
    other = Name("b")
    tree.insert([1], [11], namespace=other)
    tree.insert([1], [12], namespace=late)
    assert tree.match([1], namespace=Name("a")).blocks.tolist() == [12]
    assert tree.num_namespaces == 2


def test_freed_namespaces_run_their_own_code_after_the_call():
    tree = RadixTree(1)
    seen = []

    class Dying(Name):
        __hash__ = Name.__hash__

        def __del__(self):
            tree.check_invariants()
            seen.append(tree.num_nodes)
            tree.insert([5], [51], namespace="c")

    tree.insert([1], [11], namespace=Dying("a"))
    gone = tree.evict("full", 1)
    assert gone.blocks.tolist() == [11]
    assert seen == [0]
    assert tree.match([5], namespace="c").blocks.tolist() == [51]
    check(tree)


def test_lanes_that_vanish_while_they_are_read_are_not_missed():
    tree = RadixTree(1, windows=[2])
    lanes = []

    class Shrinking(list):
        def __len__(self):
            return 2

    lanes = Shrinking([[11]])
    with pytest.raises(ShapeError, match="expected blocks as a tuple of 2 arrays"):
        tree.insert([1], lanes)

    class Lane:
        def __array__(self, dtype=None, copy=None):
            both.pop()
            return np.array([11])

    both = [Lane(), [12]]
    assert tree.insert([1], both).num_tokens == 1
    check(tree)


def test_a_digest_is_an_int_or_bytes_and_nothing_that_poses_as_them():
    class Long:
        def to_bytes(self, *_, **__):
            return b"x" * 4096

    class Digest:
        def __index__(self):
            return Long()

    with pytest.raises(UnsupportedDtype, match="give bytes or an int"):
        RadixTree(1).match([1], spans=[(0, 1, Digest())])


@together("threshold", range(1, 12))
def test_a_finalizer_that_evicts_during_a_match_finds_nothing_half_read(threshold):
    class Trap:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            tree.evict("full", 3)

    tree = RadixTree(1, full=2, states=True, state_interval=1)
    tree.insert([1, 2, 3], ([11, 12, 13], [21, 22, 23]), states=[(1, 5)])
    before = gc.get_threshold()
    gc.collect()
    Trap()
    gc.set_threshold(threshold)
    try:
        match = tree.match([1, 2, 3])
    finally:
        gc.set_threshold(*before)
    assert [lane.tolist() for lane in match.shared_blocks] in ([[11, 12, 13], [21, 22, 23]], [[], []])
    gc.collect()
    check(tree)
