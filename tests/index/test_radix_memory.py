"""RadixTree: lists of held ids, and memory in proportion to them."""

import numpy as np
import pytest

from pagecore.errors import ShapeError, UnsupportedDtype
from pagecore.index import RadixTree
from tests.index.radix import blocks

SMALL = 16384  # bytes: a tree with nothing in it


def fill(tree, count):
    rng = np.random.default_rng(0)
    for i in range(count):
        tree.insert(rng.integers(0, 50, 8).astype(np.int32), blocks(4, 1 + 4 * i))


def test_held_blocks_are_listed_by_lane_in_order():
    tree = RadixTree(1, full=1, windows=[2], states=True)
    tree.insert([1, 2, 3], ([70000, 3, 9], [0, 40000, 2]), states=[(3, 6), (2, 64)][::-1])
    assert tree.held_blocks().tolist() == [3, 9, 70000]
    assert tree.held_blocks(1).tolist() == [2, 40000]
    assert tree.held_states().tolist() == [6, 64]
    assert tree.held_blocks().dtype == tree.held_states().dtype == np.int32
    tree.evict("full", 1)
    assert tree.held_blocks().tolist() == [3, 70000]
    assert RadixTree(1).held_states().tolist() == RadixTree(1).held_blocks().tolist() == []


@pytest.mark.parametrize(
    ("lane", "error"), [(2, ShapeError), (-1, ShapeError), (2**70, ShapeError), ("full", UnsupportedDtype)]
)
def test_a_lane_that_does_not_exist_is_refused(lane, error):
    with pytest.raises(error):
        RadixTree(1, full=1, windows=[2]).held_blocks(lane)


@pytest.mark.parametrize("policy", ["lru", "priority"])
def test_a_drain_returns_the_memory(policy):
    tree = RadixTree(2, policy=policy, windows=[4])
    for seed in range(3):
        rng = np.random.default_rng(seed)
        for i in range(3000):
            own = blocks(4, 1 + 4 * i)
            tree.insert(rng.integers(0, 50, 8).astype(np.int32), (own, own))
        assert tree.nbytes > 20 * SMALL
        tree.evict("full", 10**9)
        tree.check_invariants()
        assert tree.nbytes < SMALL


@pytest.mark.parametrize("held", [range(1), range(0, 4000, 500), range(3999, 4000)])
def test_the_rest_of_a_large_tree_can_be_used_and_grow_again(held):
    tree = RadixTree(2)
    receipts = {}
    rng = np.random.default_rng(1)
    for i in range(4000):
        tokens = rng.integers(0, 50, 8).astype(np.int32)
        tree.insert(tokens, blocks(4, 1 + 4 * i))
        if i in held:
            receipts[tree.match_and_lock(tokens)] = tokens
    large = tree.nbytes
    while tree.evict("full", 97).amount:  # bit by bit
        pass
    tree.check_invariants()
    for receipt, tokens in receipts.items():
        match = tree.match(tokens)
        assert match.num_tokens == receipt.num_tokens == 8
        assert set(match.blocks.tolist()) <= set(tree.held_blocks().tolist())
    for i in range(1000):
        tree.insert([1000 + i, 1], [100000 + i])
        tree.evict("full", 1)
    tree.check_invariants()
    if held == range(1):  # the node of lowest id
        assert tree.nbytes < large / 8
    tree.release_all(receipts)
    tree.evict("full", 10**9)
    assert tree.nbytes < SMALL
    fill(tree, 400)
    tree.check_invariants()


def test_ids_far_apart_take_no_memory_after_their_eviction():
    tree = RadixTree(1)
    for i in range(100):
        tree.insert([i], [1 + i * 10**6])
    assert tree.nbytes > 100 * 4096
    tree.evict("full", 100)
    assert tree.nbytes < 3 * SMALL
    tree.insert([5], [1 + 10**6])
    assert tree.held_blocks().tolist() == [1 + 10**6]


def test_batches_with_and_without_common_ids_are_checked_alike():
    rng = np.random.default_rng(3)
    for share in (0, 8):
        tree = RadixTree(1)
        common = rng.integers(0, 9, share)
        entries = [
            {
                "tokens": np.concatenate([common, rng.integers(10, 10**6, 8)]).astype(np.int32),
                "blocks": np.concatenate([blocks(share), blocks(8, 1000 + 8 * i)]),
            }
            for i in range(16)
        ]
        done = tree.insert_all(entries)
        assert [len(one.taken) for one in done] == [8 + share] + [8] * 15
        assert all(one.duplicates.size == 0 for one in done)
        tree.check_invariants()


def test_a_tree_that_shrank_twice_has_room_for_every_node():
    # Room for the eviction queues shrinks with that for nodes; a later look must not make the room for nodes larger.
    tree = RadixTree(1, policy="filo")
    number = 0
    for most, least, looks in ((30, 4, 5), (22, 11, 5), (40, 9, 60), (26, 8, 1), (22, 10, 20), (30, 0, 9)):
        while tree.num_nodes < most:
            number += 1
            tree.insert([number], [number])
            tree.check_invariants()
        for _ in range(looks):  # memory is returned now and then
            tree.evict("full", max(0, tree.num_nodes - least))
        tree.check_invariants()
