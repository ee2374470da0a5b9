"""Order in which a tree evicts states: those that save the least go first, by branches, hits and age."""

import pytest

from pagecore.index import RadixTree


def cache_path(tree, ids, first, state):
    """Insert a path with a state after its first `state` tokens; blocks and states count from `first`."""
    tree.insert(ids, range(first, first + len(ids)), states=[(state, first)])


def states_before(tree, kept, blocks=1, most=600):
    """Return the number of states, each after `blocks` blocks, that come and go one at a time before `kept` goes."""
    for i in range(most):
        cache_path(tree, [1000 + i, *range(blocks)], 10_000 + 20 * i, blocks)
        if kept in tree.evict("state", 1).states.tolist():
            return i
    raise AssertionError(f"state {kept} stays")


@pytest.mark.parametrize("hits", [0, 1, 3, 20])
def test_a_state_before_a_branch_stays_8_times_longer_and_as_long_again_for_each_of_up_to_seven_hits(hits):
    tree = RadixTree(1, states=True, state_interval=1)
    cache_path(tree, [1, 2, 3], 10, 2)
    cache_path(tree, [1, 2, 4, 4], 20, 4)  # [1, 2] is now a branch, whose state is the oldest
    for _ in range(hits):
        tree.match_and_lock([1, 2]).release()
    # Two states at a time are in the tree: one that is evicted and one of the next turn of the clock.
    assert states_before(tree, 10, blocks=2) == 2 * 8 * (1 + min(hits, 7)) - 2


@pytest.mark.parametrize("times", [1, 2, 5, 9])
def test_a_state_stays_in_proportion_to_the_blocks_that_it_saves(times):
    tree = RadixTree(1, states=True, state_interval=1)
    cache_path(tree, range(1, 2 * times + 1), 10, 2 * times)
    cache_path(tree, [500, 0], 100, 2)
    assert states_before(tree, 10, blocks=2) == 2 * times - 2


def test_a_state_after_a_branch_saves_what_the_state_of_the_branch_does_not():
    tree = RadixTree(1, states=True, state_interval=1)
    cache_path(tree, [1, 2, 3, 4, 5], 10, 4)
    cache_path(tree, [1, 2, 3, 4, 6, 6], 20, 6)  # 2 blocks after the branch
    cache_path(tree, [7, 7, 7], 30, 3)
    assert tree.evict("state", 2).states.tolist() == [20, 30]


def test_a_state_with_a_later_one_saves_a_third_of_what_the_state_before_it_does_not():
    tree = RadixTree(1, states=True, state_interval=1)
    tree.insert(range(1, 9), range(10, 18), states=[(2, 10), (8, 11)])
    tree.insert(range(1, 10), range(10, 19), states=[(9, 12)])  # the state after 8 blocks saves 6 / 3, that after 9 all
    for first, blocks in ((100, 1), (200, 3), (300, 10)):
        cache_path(tree, [first] * blocks, first, blocks)
    assert tree.evict("state", 6).states.tolist() == [10, 100, 11, 200, 12, 300]


def test_an_unused_branch_goes_before_a_used_one_and_states_without_a_branch_go_by_age():
    tree = RadixTree(1, states=True, state_interval=1)
    for first in (10, 100):
        cache_path(tree, [first, 2, 3], first, 2)
        cache_path(tree, [first, 2, 4, 4], first + 10, 4)
    tree.match_and_lock([10, 2]).release()
    gone = [tree.evict("state", 1).states.tolist()[0] for _ in range(4)]
    assert gone == [20, 110, 100, 10]


def test_a_used_branch_stays_and_another_policy_passes_over_nothing():
    for policy, first in (("lru", 20), ("fifo", 10)):
        tree = RadixTree(1, states=True, state_interval=1, policy=policy)
        cache_path(tree, [1, 2, 3], 10, 2)
        cache_path(tree, [1, 2, 4, 4], 20, 4)
        assert tree.evict("state", 1).states.tolist() == [first]


def test_a_branch_below_the_end_of_a_block_counts_for_the_state_before_it():
    tree = RadixTree(1, states=True, state_interval=1)
    cache_path(tree, [1, 2, 3, 4], 10, 1)
    tree.insert([1, 2, 3, 5], [20, 21, 22, 23])
    cache_path(tree, [7, 7], 30, 2)
    assert tree.evict("state", 1).states.tolist() == [30]
    tree = RadixTree(1, states=True, state_interval=1)
    cache_path(tree, [1, 2, 3, 4], 10, 1)
    tree.insert([1, 2, 3, 5], range(20, 24), states=[(2, 20)])  # the branch belongs to the deeper state
    assert tree.evict("state", 1).states.tolist() == [10]


def test_a_state_that_its_own_sequence_has_passed_goes_before_older_ones_of_others():
    tree = RadixTree(1, states=True, state_interval=1)
    cache_path(tree, [7, 8], 70, 2)
    cache_path(tree, [1, 2], 10, 2)
    tree.insert([1, 2, 3], [10, 11, 12], states=[(3, 12)])
    first = tree.evict("state", 1).states.tolist()
    assert len(first) == 1
    assert tree.match([7, 8, 9]).num_tokens == 2
    assert tree.match([1, 2, 3, 4]).num_tokens == 3
    assert tree.match([1, 2, 4]).num_tokens == 0
    tree.insert([7, 8, 9], [70, 71, 72], states=[(3, 72)])
    tree.insert([7, 8, 5], [70, 71, 75])  # a branch: the state before it stays
    assert tree.evict("state", 2).amount == 2
    assert tree.match([7, 8, 5]).num_tokens == 2
    tree.check_invariants()
