"""RadixTree: worked examples, promises of each call, bad input."""

from types import MappingProxyType

import numpy as np
import pytest

from pagecore.errors import DoubleFree, InvalidBlock, InvalidSequence, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.index import RadixTree


def blocks(count, first=1):
    return np.arange(first, first + count, dtype=np.int32)


def snapshot(tree):
    figures = [(tree.evictable(name), tree.protected(name)) for name in tree.components]
    return figures, tree.num_nodes, tree.num_receipts, tree.num_namespaces


# The worked examples.


def test_example_12_a_longer_prompt_resumes_at_the_state():
    tree = RadixTree(1, states=True)
    tree.insert(range(230), blocks(230), states=[(192, 3)])
    match = tree.match(range(400))
    assert (match.num_full_tokens, match.num_tokens) == (230, 192)
    assert match.num_full_tokens - match.num_tokens == 38
    assert match.state == 3


def test_example_13_an_evicted_state_leaves_the_one_before():
    tree = RadixTree(1, states=True)
    tree.insert(range(192), blocks(192), states=[(192, 3)])
    tree.insert(range(280), blocks(280), states=[(256, 7)])
    match = tree.match(range(400))
    assert (match.num_tokens, match.num_full_tokens - match.num_tokens, match.state) == (256, 24, 7)
    with tree.match_and_lock(range(192)):
        assert tree.evict("state", 9).states.tolist() == [7]
    match = tree.match(range(400))
    assert (match.num_tokens, match.num_full_tokens - match.num_tokens, match.state) == (192, 88, 3)


def three_nodes(block_size):
    tree = RadixTree(block_size, states=True)
    for end, states in ((192, [(192, 3)]), (256, []), (320, [(320, 7)])):
        tree.insert(range(end), blocks(end // block_size), states=states)
    assert tree.num_nodes == 3
    return tree


def test_example_14_a_hole_shows_where_a_checkpoint_would_help():
    match = three_nodes(1).match(range(280))
    assert (match.num_full_tokens, match.num_tokens, match.state, match.checkpoint) == (280, 192, 3, 256)
    assert match.blocks.tolist() == list(range(1, 193))  # node A
    assert three_nodes(16).match(range(280)).num_full_tokens == 272


# Lookup and insertion.


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_only_whole_blocks_are_kept_and_matched(block_size, extra):
    tree = RadixTree(block_size)
    length = 4 * block_size + extra
    kept = tree.insert(range(length), blocks(5)[: length // block_size])
    assert kept.num_tokens == length // block_size * block_size
    assert tree.match(range(100 * block_size)).num_tokens == kept.num_tokens
    assert tree.match(range(kept.num_tokens), max_tokens=kept.num_tokens - 1).num_tokens == max(
        0, kept.num_tokens - block_size
    )


def test_match_changes_nothing_and_agrees_token_by_token():
    tree = RadixTree(4)
    tree.insert(range(64), blocks(16))
    for position in range(64):
        tokens = list(range(64))
        tokens[position] = -1
        assert tree.match(tokens).num_tokens == position // 4 * 4
    assert tree.num_nodes == 1


def test_insert_returns_taken_and_duplicate_blocks():
    tree = RadixTree(2)
    tree.insert([1, 2, 3, 4], [5, 6])
    again = tree.insert([1, 2, 3, 4, 7, 8], [5, 9, 10])
    assert (again.num_tokens, again.num_old_tokens) == (6, 4)
    assert again.taken.tolist() == [10]
    assert again.duplicates.tolist() == [9]
    assert tree.match([1, 2, 3, 4, 7, 8]).blocks.tolist() == [5, 6, 10]


@pytest.mark.parametrize("way", ["insert", "extend"])
def test_a_prefix_that_ends_inside_a_node_uses_no_block_after_it(way):
    tree = RadixTree(block_size=1)
    tree.insert(range(6), blocks(6))
    tree.insert(range(10, 14), blocks(4, first=10))
    if way == "insert":
        tree.insert(range(4), blocks(4, first=20))
    else:
        with tree.match_and_lock(range(3)) as receipt:
            tree.extend(range(4), blocks(4, first=20), receipt)
    tree.check_invariants()
    assert tree.evict("full", 6).blocks.tolist() == [6, 5, 13, 12, 11, 10]


@pytest.mark.parametrize("policy", ["lfu", "slru"])
def test_blocks_after_a_prefix_that_was_hit_have_no_hits(policy):
    tree = RadixTree(block_size=1, policy=policy)
    tree.insert(range(10, 12), blocks(2, first=10))
    tree.match_and_lock(range(10, 12)).release()
    with tree.match_and_lock([]) as receipt:
        tree.extend(range(2), blocks(2), receipt)
        tree.match_and_lock(range(2)).release()
        tree.extend(range(4), blocks(4), receipt)
    tree.check_invariants()
    assert tree.evict("full", 6).blocks.tolist() == [4, 3, 11, 10, 2, 1]


def test_a_priority_is_that_of_the_inserted_prefix_alone():
    tree = RadixTree(block_size=1, policy="priority")
    tree.insert(range(6), blocks(6))
    tree.insert(range(10, 14), blocks(4, first=10))
    tree.insert(range(4), blocks(4), priority=90)
    assert tree.evict("full", 10).blocks.tolist() == [6, 5, 13, 12, 11, 10, 4, 3, 2, 1]


def test_evict_is_exact_and_trims_the_tail_of_the_worst_leaf():
    tree = RadixTree(1)
    tree.insert([0, 1, 2, 3, 4], [1, 2, 3, 4, 5])
    tree.insert([0, 1, 9], [1, 2, 6])
    with tree.match_and_lock([0, 1, 2]):
        assert (tree.evictable(), tree.protected()) == (3, 3)
        gone = tree.evict("full", 1)
        assert (gone.amount, gone.blocks.tolist()) == (1, [5])
        assert tree.evict("full", 99).blocks.tolist() == [4, 6]
        assert tree.evict("full", 1).amount == 0
    assert tree.evict("full", 2).blocks.tolist() == [3, 2]
    assert tree.match([0, 1, 2]).blocks.tolist() == [1]


@pytest.mark.parametrize(
    ("policy", "order"),
    [("lru", [2, 4, 3, 1]), ("mru", [1, 3, 4, 2]), ("fifo", [1, 2, 3, 4]), ("filo", [4, 3, 2, 1]),
     ("lfu", [2, 4, 3, 1]), ("slru", [2, 4, 3, 1])],
)  # fmt: skip
def test_each_policy_has_its_order(policy, order):
    tree = RadixTree(1, policy=policy)
    for token in (1, 2, 3, 4):
        tree.insert([token], [token])
    for token in (3, 1, 1):
        tree.match_and_lock([token]).release()
    assert [tree.evict("full", 1).blocks.tolist()[0] for _ in range(4)] == order


def test_a_priority_falls_back_after_its_time():
    tree = RadixTree(1, policy="priority")
    tree.insert([1], [1], time=0.0, priority=90, time_to_live=10)
    tree.insert([2], [2], priority=50)
    tree.insert([3], [3], priority=10)
    tree.insert([4], [4])
    assert tree.evict("full", 1, time=9.0).blocks.tolist() == [3]
    assert tree.evict("full", 1, time=10.0).blocks.tolist() == [1]
    assert tree.evict("full", 2).blocks.tolist() == [4, 2]


def test_the_lowest_rank_is_evicted_first():
    tree = RadixTree(1, policy="rank")
    for token, rank in ((1, 3.0), (2, -1.0), (3, None)):
        tree.insert([token], [token], rank=rank)
    tree.match_and_lock([2]).release(rank=7.5)
    assert tree.evict("full", 3).blocks.tolist() == [3, 1, 2]


def test_a_window_needs_its_last_tokens_alone():
    tree = RadixTree(1, windows=[3])
    tree.insert(range(8), (blocks(8), [0, 0, 0, 14, 15, 16, 17, 18]))
    match = tree.match(range(8))
    assert match.num_tokens == match.num_full_tokens == 8
    assert match.blocks[1].tolist() == [0, 0, 0, 0, 0, 16, 17, 18]
    assert tree.match(range(5)).num_tokens == 0
    with tree.match_and_lock(range(8)) as receipt:
        assert (tree.protected("window"), tree.evictable("window")) == (3, 2)
        assert tree.evict("window", 9).blocks[1].tolist() == [14, 15]
        receipt.release("window")
        assert (tree.protected("full"), tree.evictable("window")) == (8, 3)
    assert tree.evict("window", 1).blocks[1].tolist() == [16]
    assert tree.match(range(8)).num_tokens == 0
    refilled = tree.insert(range(8), (blocks(8), [0, 0, 0, 0, 0, 26, 27, 28]))
    assert (refilled.taken[1].tolist(), refilled.duplicates[1].tolist()) == ([26], [27, 28])
    gone = tree.evict("full", 1)
    assert [lane.tolist() for lane in gone.blocks] == [[8], [18]]


def test_a_receipt_moves_with_what_its_sequence_publishes():
    tree = RadixTree(2, windows=[4])
    receipt = tree.match_and_lock(range(2))
    for end in range(2, 21, 2):
        tree.insert(range(end), (blocks(end // 2), blocks(end // 2)), receipt=receipt)
        assert (receipt.num_tokens, tree.protected("full"), tree.protected("window")) == (
            end,
            end // 2,
            min(2, end // 2),
        )
        tree.check_invariants()
    receipt.release()
    assert tree.protected("full") == tree.protected("window") == 0


def test_a_state_is_evicted_with_the_tail_that_it_follows():
    tree = RadixTree(1, states=True)
    tree.insert(range(4), blocks(4), states=[(2, 8), (4, 9)])
    gone = tree.evict("full", 1)
    assert (gone.blocks.tolist(), gone.states.tolist()) == ([4], [9])
    tree.check_invariants()
    assert tree.match(range(4)).num_tokens == 2


def test_a_window_that_was_filled_again_is_evicted_whole():
    tree = RadixTree(1, windows=[4])
    tree.insert(range(4), (blocks(4), blocks(4)))
    assert tree.evict("window", 3).blocks[1].tolist() == [1, 2, 3]
    tree.insert(range(4), (blocks(4), [5, 6, 0, 7]))
    assert tree.evict("window", 9).blocks[1].tolist() == [5, 6, 4]
    tree.check_invariants()


def test_a_split_below_a_receipt_keeps_it_whole():
    tree = RadixTree(1)
    tree.insert(range(4), blocks(4))
    with tree.match_and_lock(range(4)) as receipt:
        tree.insert([0, 1, 9], [1, 2, 5])
        tree.check_invariants()
        assert (tree.evict("full", 9).blocks.tolist(), receipt.num_tokens) == ([5], 4)
    assert tree.evictable() == 4


def test_a_window_that_ends_within_a_block_needs_that_block():
    tree = RadixTree(4, windows=[5])
    tree.insert(range(12), (blocks(3), [0, 0, 7]))
    assert tree.match(range(12)).num_tokens == 0
    tree.insert(range(12), (blocks(3), [0, 6, 7]))
    assert tree.match(range(12)).num_tokens == 12


# Namespaces and spans.


def test_namespaces_are_equal_only_in_type_and_value():
    names = [None, 1, True, 1.0, "1", b"1", ("1",), (1,), (True,), ((1,),), ("a", "b"), "ab", ("ab",), ""]
    tree = RadixTree(1)
    for i, name in enumerate(names):
        assert tree.match([5], namespace=name).num_tokens == 0
        tree.insert([5], [i + 1], namespace=name)
    assert [tree.match([5], namespace=name).blocks.tolist() for name in names] == [[i + 1] for i in range(len(names))]
    assert tree.num_namespaces == len(names) - 1
    tree.evict("full", len(names))
    assert (tree.num_namespaces, tree.num_nodes) == (0, 0)


def test_spans_key_the_blocks_that_they_overlap_and_no_others():
    tree = RadixTree(4)
    tokens = [7] * 16
    tree.insert(tokens, blocks(4), spans=[(5, 9, b"cat")])
    assert tree.match(tokens, spans=[(5, 9, b"cat")]).num_tokens == 16
    for spans in (None, [(5, 9, b"dog")], [(5, 9, b"cat\0")], [(4, 9, b"cat")], [(5, 10, b"cat")], [(5, 9, 3)]):
        assert tree.match(tokens, spans=spans).num_tokens == 4
    assert tree.match(tokens, spans=[(5, 9, b"cat"), (13, 14, 1)]).num_tokens == 12


# Bad input.


@pytest.mark.parametrize(
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
        ([1, 2], [9], {"time": float("nan")}, ShapeError),
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


@pytest.mark.parametrize(
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


# Batches and large trees.


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


def test_a_chain_as_deep_as_its_tokens_needs_no_stack():
    tree = RadixTree(1)
    tokens, ids = np.zeros(20_000, np.int32), blocks(20_000)
    tree.insert(tokens, ids)
    for end in range(1, 20_000, 2):
        tree.match_and_lock(tokens[:end]).release()
    assert tree.num_nodes == 10_001
    tree.check_invariants()
    assert tree.evict("full", 20_000).blocks.tolist() == ids.tolist()[::-1]


def test_memory_is_steady_under_churn_and_near_what_is_live():
    rng = np.random.default_rng(0)
    tree, free, sizes = RadixTree(4), list(range(1, 4097)), []
    for step in range(4000):
        tokens = rng.integers(0, 2, rng.integers(4, 200)).astype(np.int32)
        if len(free) < 60:
            free += tree.evict("full", int(rng.integers(60, 200))).blocks.tolist()
        offered = free[: len(tokens) // 4]
        taken = set(tree.insert(tokens, offered, namespace=("tenant", int(rng.integers(9)))).taken.tolist())
        free = [block for block in free if block not in taken]
        if step % 1000 == 999:
            tree.check_invariants()
            sizes.append(tree.nbytes)
    assert max(sizes[1:]) <= 1.5 * sizes[0]


def test_repr_shows_the_options_and_the_size_of_a_tree():
    tree = RadixTree(2, policy="slru", states=True)
    tree.insert([1, 2], [7], states=[(2, 1)])
    receipt = tree.match_and_lock([1, 2])
    assert repr(tree) == "RadixTree(2, policy='slru', components=('full', 'state')): 1 nodes, 1 receipts"
    receipt.release()
