"""RadixTree: what is evicted, in the order of each policy, with windows and states."""

import pytest

from pagecore.errors import UnsupportedOption
from pagecore.index import RadixTree
from tests.index.radix import blocks


@pytest.mark.parametrize("policy", ["lfu", "slru:1"])
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


@pytest.mark.parametrize(
    ("policy", "order"),
    [("slru:1", [3, 4, 1, 2]), ("slru:0.4", [3, 4, 1, 2]), ("slru:0.3", [3, 1, 4, 2]), ("slru", [3, 1, 4, 2]),
     ("slru:0", [3, 1, 2, 4])],
)  # fmt: skip
def test_slru_protects_the_last_hits_up_to_its_share(policy, order):
    tree = RadixTree(1, policy=policy)
    for token in (1, 2, 3):
        tree.insert([token], [token])
    for token in (1, 2):
        tree.match_and_lock([token]).release()
    tree.insert([4], [4])
    assert [tree.evict("full", 1).blocks.tolist()[0] for _ in range(4)] == order
    assert tree.policy == policy


def test_a_hit_of_slru_returns_a_prefix_that_lost_its_protection():
    tree = RadixTree(1, policy="slru")
    for first in (10, 20):
        tree.insert([first, first + 1], [first, first + 1])
    for first in (10, 20, 10):
        tree.match_and_lock([first, first + 1]).release()
    tree.insert([30], [30])
    assert tree.evict("full", 5).blocks.tolist() == [21, 20, 30, 11, 10]


@pytest.mark.parametrize("share", ["", "x", "1.1", "-0.1", "nan", "0.1:2", "0_1", " 0.1"])
def test_a_share_of_slru_is_between_0_and_1(share):
    with pytest.raises(UnsupportedOption, match="share after 'slru:' is a number from 0 to 1"):
        RadixTree(policy=f"slru:{share}")
    with pytest.raises(UnsupportedOption, match="slru or slru:SHARE"):
        RadixTree(policy="lru:0.1")


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


@pytest.mark.parametrize(("min_kept", "kept"), [(0, 1), (1, 1), (2, 2), (3, 3), (9, 4)])
def test_a_node_keeps_some_blocks_of_a_window_while_others_have_more(min_kept, kept):
    tree = RadixTree(2, windows=[2], min_kept=min_kept)
    for first in (10, 20):
        tree.insert(range(first, first + 8), (first + blocks(4), first + blocks(4)))
    first, second = [11, 12, 13, 14], [21, 22, 23, 24]
    expected = [*first[: 4 - kept], *second[: 4 - kept], *first[4 - kept :]]
    assert tree.evict("window", 8 - kept).blocks[1].tolist() == expected
    assert tree.min_kept == min_kept


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


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "priority", "rank"])
def test_windows_give_up_first_what_is_far_from_the_end_of_a_prefix(policy):
    tree = RadixTree(block_size=512, windows=[512], policy=policy)  # 2 blocks are near the end, and one is needed
    tokens = list(range(6 * 512))
    tree.insert(tokens, (blocks(6), blocks(6)))
    tree.insert(tokens[::-1], (blocks(6, first=11), blocks(6, first=11)))
    expected = [1, 2, 3, 11, 12, 13, 4, 5, 14, 15, 6, 16]
    assert [tree.evict("window", 1).blocks[1].tolist()[0] for _ in expected] == expected
    tree.check_invariants()


@pytest.mark.parametrize("policy", ["fifo", "filo", "mru"])
def test_orders_by_insertion_evict_whole_windows(policy):
    tree = RadixTree(block_size=512, windows=[512], policy=policy)
    tokens = list(range(6 * 512))
    tree.insert(tokens, (blocks(6), blocks(6)))
    tree.insert(tokens[::-1], (blocks(6, first=11), blocks(6, first=11)))
    first = [1, 2, 3, 4, 5, 6] if policy == "fifo" else [11, 12, 13, 14, 15, 16]
    assert tree.evict("window", 6).blocks[1].tolist() == first
