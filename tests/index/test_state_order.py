"""Order in which a tree evicts states: those that save the least go first, by branches, hits and age."""

import pytest

from pagecore.index import RadixTree


def cache_path(tree, ids, first, state):
    """Insert a path with a state after its first `state` tokens; blocks and states count from `first`."""
    tree.insert(ids, range(first, first + len(ids)), states=[(state, first)])


def branch(tree, first, blocks, state):
    """Insert two paths that part after `blocks` blocks, with a state there; ids begin with `first`."""
    cache_path(tree, [first] * blocks + [1], state, blocks)
    tree.insert([first] * blocks + [2], [*range(state, state + blocks), state + blocks + 1])


def branches_before(tree, kept, blocks=2, most=200):
    """Return the number of states before branches, unused, that come and go one at a time before `kept` goes."""
    for i in range(most):
        branch(tree, 1000 + i, blocks, 10_000 + 20 * i)
        if kept in tree.evict("state", 1).states.tolist():
            return i
    raise AssertionError(f"state {kept} stays")


@pytest.mark.parametrize("hits", [0, 1, 3, 20])
def test_a_state_before_a_branch_stays_as_long_again_for_each_of_up_to_seven_hits(hits):
    tree = RadixTree(1, states=True, state_interval=1)
    branch(tree, 5, 2, 10)
    for _ in range(hits):
        tree.match_and_lock([5, 5]).release()
    assert branches_before(tree, 10) == min(hits, 7)


@pytest.mark.parametrize("times", [1, 2, 5, 9])
def test_a_state_stays_in_proportion_to_the_blocks_that_it_saves(times):
    tree = RadixTree(1, states=True, state_interval=1)
    branch(tree, 5, 2 * times, 10)
    assert branches_before(tree, 10) == times - 1


def test_a_state_after_a_branch_saves_what_the_state_of_the_branch_does_not():
    tree = RadixTree(1, states=True, state_interval=1)
    cache_path(tree, [1, 2, 3, 4, 5], 10, 4)
    cache_path(tree, [1, 2, 3, 4, 6, 6], 20, 6)  # 2 blocks after the branch
    cache_path(tree, [7, 7, 7], 30, 3)
    assert tree.evict("state", 2).states.tolist() == [20, 30]


def test_at_first_a_state_with_a_later_one_saves_a_quarter_of_what_the_state_before_it_does_not():
    tree = RadixTree(1, states=True, state_interval=1)
    tree.insert(range(1, 9), range(10, 18), states=[(2, 10), (8, 11)])
    tree.insert(range(1, 10), range(10, 19), states=[(9, 12)])  # the state after 8 blocks saves 6 / 4, that after 9 all
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


def test_states_before_one_that_precedes_a_branch_go_first():
    tree = RadixTree(1, states=True, state_interval=1)
    tree.insert(range(1, 20), range(10, 29), states=[(9, 10), (18, 11)])
    cache_path(tree, [500], 100, 1)
    tree.insert([*range(1, 16), 50], [*range(10, 25), 60], states=[(15, 50)])
    # The prompts part after 15 blocks: the state after 9 serves neither.
    assert tree.evict("state", 1).states.tolist() == [10]
    assert tree.match([*range(1, 16), 9]).num_tokens == 15
    tree.check_invariants()


def test_the_state_before_an_evicted_one_takes_its_branch_over():
    tree = RadixTree(1, states=True, state_interval=1)
    tree.insert(range(1, 20), range(10, 29), states=[(9, 10), (10, 11)])
    tree.insert([*range(1, 13), 50], [*range(10, 22), 60])
    held = tree.match_and_lock(range(1, 10))  # pins the first state
    assert tree.evict("state", 1).states.tolist() == [11]
    held.release()
    cache_path(tree, [500] * 20, 100, 20)
    assert tree.evict("state", 1).states.tolist() == [100]
    tree.check_invariants()


def evict_unused(tree, count, blocks):
    """Let states that continue a sequence come and go without a hit."""
    for i in range(count):
        cache_path(tree, [3000 + i] * blocks, 50_000 + 20 * i, blocks)
        tree.evict("state", 1)


def outlives(tree):
    """Return True if a state that continues a sequence outlives one that has a later state."""
    tree.insert(range(1, 10), range(10, 19), states=[(8, 10), (9, 11)])
    cache_path(tree, [900 + i for i in range(4)], 40, 4)
    gone = tree.evict("state", 3).states.tolist()
    return gone.index(40) > gone.index(10)


def test_states_of_a_kind_that_nothing_reuses_go_earlier():
    fresh, used = (RadixTree(1, states=True, state_interval=1) for _ in range(2))
    evict_unused(used, 200, 2)
    assert outlives(fresh)
    assert not outlives(used)


def test_a_lookup_that_misses_an_evicted_state_counts_as_its_reuse():
    tree = RadixTree(1, states=True, state_interval=1)
    evict_unused(tree, 200, 2)
    for i in range(400):
        path = [8000 + i] * 2
        cache_path(tree, path, 60_000 + 20 * i, 2)
        tree.evict("state", 1)
        tree.match_and_lock([*path, 7]).release()
        tree.match_and_lock([*path, 7]).release()  # counts once
    assert outlives(tree)


def test_states_by_age_leave_in_the_order_of_a_cache_that_knows_no_branches():
    tree = RadixTree(1, states=True, state_interval=1, policy="fifo")
    tree.insert([1, 2, 3], [1, 2, 3], states=[(3, 1)])
    tree.insert([1, 2, 3, 4, 5, 6, 7], range(1, 8), states=[(7, 2)])
    tree.insert([10, 11, 12], [8, 9, 10], states=[(3, 3)])
    tree.insert([1, 2, 3, 4, 5, 60, 70], [1, 2, 3, 4, 5, 11, 12], states=[(7, 4)])
    assert tree.evict("state", 1).states.tolist() == [1]
    assert [tree.match(ids).num_tokens for ids in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 60, 70])] == [0, 7]
    assert tree.match([1, 2, 3, 4, 5, 6, 7]).num_tokens == 7
    assert tree.match([1, 2, 3, 4, 5]).num_full_tokens == 5  # the blocks stay
    assert tree.evict("state", 1).states.tolist() == [2]
    assert [tree.match(ids).num_tokens for ids in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 60, 70])] == [0, 7]
