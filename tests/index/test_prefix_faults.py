"""Promises of the radix tree that a fault could break unseen by its machines, which meet them too seldom."""

import pytest

from pagecore.index import RadixTree


def used(tree, *prefixes):
    """Match and give back, in this order."""
    for tokens in prefixes:
        tree.match_and_lock(tokens).release()


def test_every_hit_counts_with_lfu():
    tree = RadixTree(1, policy="lfu")
    tree.insert([1], [11])
    tree.insert([2], [12])
    used(tree, [1], [1], [1], [2], [2])
    assert tree.evict("full", 1).blocks.tolist() == [12]


def test_any_number_of_hits_is_as_good_as_one_with_slru():
    tree = RadixTree(1, policy="slru")
    tree.insert([1], [11])
    tree.insert([2], [12])
    used(tree, [1], [1], [1], [2])
    assert tree.evict("full", 1).blocks.tolist() == [11]


def two_prefixes(component, **options):
    """[1] with block 11 and [2] with block 12; 1 and 2 of the component."""
    if component == "window":
        tree = RadixTree(1, windows=[1], **options)
    else:
        tree = RadixTree(1, states=True, state_interval=1, **options)
    for i in (1, 2):
        if component == "window":
            tree.insert([i], [[10 + i], [i]])
        else:
            tree.insert([i], [10 + i], states=[(1, i)])
    return tree


def evict_one(tree, component):
    gone = tree.evict(component, 1)
    return (gone.states if component == "state" else gone.blocks[1]).tolist()


@pytest.mark.parametrize("component", ["window", "state"])
def test_a_component_is_in_use_until_it_is_given_back(component):
    tree = two_prefixes(component)
    first = tree.match_and_lock([1])
    used(tree, [2])
    first.release()
    assert evict_one(tree, component) == [2]


@pytest.mark.parametrize("component", ["window", "state"])
def test_the_rank_of_a_release_is_every_components(component):
    tree = two_prefixes(component, policy="rank")
    tree.match_and_lock([2]).release(rank=-1.0)
    tree.match_and_lock([1]).release(rank=1.0)
    assert evict_one(tree, component) == [2]


def test_a_window_filled_again_below_a_split_is_found_when_the_split_is_undone():
    tree = RadixTree(1, windows=[6])
    tokens, full = list(range(11)), list(range(101, 112))
    receipt = tree.match_and_lock([])
    tree.insert(tokens[:10], [full[:10], list(range(1, 11))])
    assert tree.evict("window", 6).blocks[1].tolist() == [1, 2, 3, 4, 5, 6]
    tree.insert(tokens[:10], [full[:10], [0] * 10], receipt=receipt)  # holds the window from block 4 on
    tree.insert(tokens[:10], [full[:10], [0, 0, 0, 0, 25, 26, 0, 0, 0, 0]])
    tree.extend(tokens, [full, [0] * 10 + [27]], receipt)  # from block 5 on: the split before block 4 is of no use
    tree.check_invariants()
    assert tree.num_nodes == 2
    assert tree.evict("window", 1).blocks[1].tolist() == [25]
