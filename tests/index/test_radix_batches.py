"""RadixTree: calls for all sequences of a step."""

from types import MappingProxyType

import numpy as np
import pytest

from pagecore.errors import DoubleFree, UnsupportedDtype, UnsupportedOption
from pagecore.index import RadixTree
from tests.index.radix import snapshot


def test_batched_calls_agree_with_single_calls():
    tree = RadixTree(2)
    entries = [{"tokens": [0, 0, i, i], "blocks": [1 if i == 0 else 100 + i, 10 + i]} for i in range(4)]
    results = tree.insert_all(entries)
    assert [done.duplicates.tolist() for done in results] == [[], [101], [102], [103]]
    prompts = [[0, 0, i, i, 5] for i in range(5)]
    receipts = tree.match_and_lock_all(prompts)
    assert [receipt.match.num_tokens for receipt in receipts] == [4, 4, 4, 4, 2]
    assert [match.blocks.tolist() for match in tree.match_all(prompts)] == [r.match.blocks.tolist() for r in receipts]
    before = snapshot(tree)
    with pytest.raises(UnsupportedDtype):
        tree.match_and_lock_all([[0, 0], [0.5]])
    assert snapshot(tree) == before
    tree.release_all(receipts)
    assert tree.protected() == 0


@pytest.mark.parametrize(
    ("window", "blocks", "lengths"), [({"windows": [2]}, 3, (3, 2)), ({"windows": [0], "chunks": [2]}, 1, (1, 8))]
)
def test_a_batch_pins_every_prefix_where_tokens_without_ids_follow(window, blocks, lengths):
    tree = RadixTree(1, full=0, **window)
    tree.insert(range(8), [*range(11, 11 + blocks), *[0] * (8 - blocks)])
    receipts = tree.match_and_lock_all([list(range(length)) for length in lengths])
    assert [(each.match.num_tokens, each.num_tokens) for each in receipts] == [(length, length) for length in lengths]
    tree.check_invariants()
    receipts[0].release()
    tree.evict("window", 9)
    for block in receipts[1].match.blocks:
        assert block == 0 or block in tree.held_blocks()
    receipts[1].release()
    tree.evict("window", 9)
    assert tree.num_nodes == 0
    tree.check_invariants()


@pytest.mark.parametrize("windows", [[2], [1, 3]])
def test_a_batch_without_full_lanes_pins_what_single_calls_pin(windows):
    rng = np.random.default_rng(0)
    for _ in range(60):
        trees = [RadixTree(1, full=0, windows=windows) for _ in range(2)]
        for first in range(100, 700, 100):
            tokens = rng.integers(0, 2, 12)
            ids = np.arange(first, first + 12)
            lanes = [np.where(ids < first + rng.integers(2, 12), ids, 0) for _ in windows]
            for tree in trees:
                tree.insert(tokens, lanes if len(windows) > 1 else lanes[0])
        prompts = [rng.integers(0, 2, rng.integers(1, 13)) for _ in range(5)]
        together = trees[0].match_and_lock_all(prompts)
        apart = [trees[1].match_and_lock(prompt) for prompt in prompts]
        assert [each.num_tokens for each in together] == [each.num_tokens for each in apart]
        for tree in trees:
            tree.check_invariants()
        for name in trees[0].components:
            assert trees[0].protected(name) == trees[1].protected(name)
            assert trees[0].evictable(name) == trees[1].evictable(name)
        trees[0].release_all(together)
        assert trees[0].protected() == 0
        trees[0].check_invariants()


ONE_BLOCK_TWO_PREFIXES = {
    "another prefix": ({"tokens": [5, 5], "blocks": [9]}, {"tokens": [6, 6], "blocks": [9]}),
    "another place": ({"tokens": [5, 5, 7, 7], "blocks": [9, 10]}, {"tokens": [5, 5], "blocks": [10]}),
    "another first block": (
        {"tokens": [5, 5, 7, 7], "blocks": [9, 10]},
        {"tokens": [6, 6, 7, 7], "blocks": [11, 10]},
    ),
    "another new namespace": (
        {"tokens": [5, 5], "blocks": [9], "namespace": "a"},
        {"tokens": [5, 5], "blocks": [9], "namespace": "b"},
    ),
    "another image": (
        {"tokens": [5, 5], "blocks": [9], "spans": [(0, 2, b"a")]},
        {"tokens": [5, 5], "blocks": [9], "spans": [(0, 2, b"b")]},
    ),
    "another prefix, of a state": (
        {"tokens": [5, 5], "blocks": [9], "states": [(2, 3)]},
        {"tokens": [6, 6], "blocks": [10], "states": [(2, 3)]},
    ),
    "a duplicate first": ({"tokens": [1, 1], "blocks": [9]}, {"tokens": [6, 6], "blocks": [9]}),
}


@pytest.mark.parametrize("entries", ONE_BLOCK_TWO_PREFIXES.values(), ids=ONE_BLOCK_TWO_PREFIXES)
def test_a_batch_that_offers_one_block_for_two_prefixes_changes_nothing(entries):
    tree = RadixTree(2, states=True)
    tree.insert([1, 1], [1])
    before = snapshot(tree)
    with pytest.raises(DoubleFree, match="for two prefixes at once"):
        tree.insert_all(entries)
    assert snapshot(tree) == before
    tree.check_invariants()


@pytest.mark.parametrize("namespace", [None, "new"])
def test_a_batch_may_repeat_a_block_for_one_prefix(namespace):
    tree = RadixTree(2, windows=[2], states=True)
    entries = [
        {"tokens": [5, 5, i, i], "blocks": ([9, 10 + i], [19, 20 + i]), "states": [(2, 3)], "namespace": namespace}
        for i in range(3)
    ]
    first, *others = tree.insert_all(entries)
    assert [lane.tolist() for lane in first.taken] == [[9, 10], [19, 20]]
    for i, done in enumerate(others, 1):
        assert [lane.tolist() for lane in done.taken] == [[10 + i], [20 + i]]
        assert [lane.tolist() for lane in done.duplicates] == [[], []]
    assert tree.num_namespaces == (namespace is not None)
    tree.check_invariants()


def test_an_entry_of_a_batch_is_a_mapping():
    with pytest.raises(UnsupportedDtype, match="expected a dict"):
        RadixTree(2).insert_all([([1, 1], [1])])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"tokens": [1, 1], "blocks": [1], "token": 1}, "an entry has 'token'"),
        ({"tokens": [1, 1], "blocks": [1], "time": 1}, "other than time"),
        ({"tokens": [1, 1]}, "give tokens and blocks"),
        ({"blocks": [1]}, "give tokens and blocks"),
        ({}, "give tokens and blocks"),
    ],
)
def test_an_entry_of_a_batch_has_the_arguments_of_insert(entry, message):
    tree = RadixTree(2)
    with pytest.raises(UnsupportedOption, match=message):
        tree.insert_all([{"tokens": [5, 5], "blocks": [9]}, entry])
    assert tree.num_nodes == 0


def test_an_entry_of_a_batch_may_have_every_argument_of_insert():
    tree = RadixTree(2, states=True, policy="priority")
    receipt = tree.match_and_lock([], namespace="a")
    entry = {
        "tokens": [1, 1, 2, 2],
        "blocks": [7, 8],
        "states": [(2, 3)],
        "namespace": "a",
        "spans": [(0, 2, b"x")],
        "receipt": receipt,
        "priority": 5,
        "time_to_live": 9,
    }
    (done,) = tree.insert_all([MappingProxyType(entry)], time=1)
    assert (done.taken.tolist(), done.taken_states.tolist(), receipt.num_tokens) == ([7, 8], [3], 4)
    assert tree.match([1, 1, 2, 2], namespace="a", spans=[(0, 2, b"x")]).num_full_tokens == 4
    receipt.release()
    tree.insert([3, 3], [9], priority=6, time=1)
    assert tree.evict("full", 2).blocks.tolist() == [8, 7]


def test_an_offer_of_a_batch_meets_what_an_earlier_one_inserts():
    tree = RadixTree(2)
    tree.insert([1, 1], [1])
    done = tree.insert_all(
        [
            {"tokens": [1, 1, 2, 2], "blocks": [1, 2]},
            {"tokens": [1, 1, 3, 3], "blocks": [1, 3]},
            {"tokens": [1, 1, 2, 2, 4, 4], "blocks": [5, 6, 7]},
        ]
    )
    assert [each.taken.tolist() for each in done] == [[2], [3], [7]]
    assert [each.duplicates.tolist() for each in done] == [[], [], [5, 6]]
    assert tree.insert([9, 9], [6]).taken.tolist() == [6]  # the duplicate is not claimed
    tree.check_invariants()
