"""Rare cases of the radix tree that the random machines reach too rarely to detect a fault."""

import pytest

from pagecore.errors import DoubleFree
from pagecore.index import RadixTree


def used(tree, *prefixes):
    """Match and release, in this order."""
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
def test_a_component_is_in_use_until_it_is_released(component):
    tree = two_prefixes(component)
    first = tree.match_and_lock([1])
    used(tree, [2])
    first.release()
    assert evict_one(tree, component) == [2]


@pytest.mark.parametrize("component", ["full", "window", "state"])
def test_the_rank_of_a_release_applies_to_every_component(component):
    tree = two_prefixes("state" if component == "state" else "window", policy="rank")
    tree.match_and_lock([1]).release(rank=1.0)
    tree.match_and_lock([2]).release(rank=-1.0)
    if component == "full":
        assert tree.evict("full", 1).blocks[0].tolist() == [12]
    else:
        assert evict_one(tree, component) == [2]


def test_a_window_filled_again_below_a_split_is_found_when_the_split_is_undone():
    tree = RadixTree(1, windows=[6])
    tokens, full = list(range(11)), list(range(101, 112))
    receipt = tree.match_and_lock([])
    tree.insert(tokens[:10], [full[:10], list(range(1, 11))])
    assert tree.evict("window", 6).blocks[1].tolist() == [1, 2, 3, 4, 5, 6]
    tree.insert(tokens[:10], [full[:10], [0] * 10], receipt=receipt)  # holds the window from block 4 on
    tree.insert(tokens[:10], [full[:10], [0, 0, 0, 0, 25, 26, 0, 0, 0, 0]])
    tree.extend(tokens, [full, [0] * 10 + [27]], receipt)  # from block 5 on: no split before block 4
    tree.check_invariants()
    assert tree.num_nodes == 2
    assert tree.evict("window", 1).blocks[1].tolist() == [25]


def test_a_split_where_a_receipt_ends_is_not_undone():
    tree = RadixTree(1, windows=[2])
    receipt = tree.match_and_lock([])
    tree.insert([1, 2, 3, 4], [[11, 12, 13, 14], [1, 2, 3, 4]], receipt=receipt)
    other = tree.match_and_lock([1, 2])
    other.release("window")
    tree.extend([1, 2, 3, 4, 5], [[11, 12, 13, 14, 15], [1, 2, 3, 4, 5]], receipt)
    tree.check_invariants()
    assert (other.num_tokens, receipt.num_tokens) == (2, 5)


def test_a_joined_node_finds_the_first_id_of_its_window():
    tree = RadixTree(1, windows=[4])
    full, window = list(range(11, 20)), list(range(1, 10))
    tree.insert(full[:6], [full[:6], window[:6]])
    used(tree, full[:2], full[:5], full[:6], full[:2])  # nodes end after 1, 2, 5 and 6 blocks
    assert tree.evict("window", 1).blocks[1].tolist() == [3]
    receipt = tree.match_and_lock([])
    tree.extend(full[:6], [full[:6], [0] * 6], receipt)
    before = tree.num_nodes
    tree.extend(full, [full, [0] * 6 + window[6:]], receipt)
    tree.check_invariants()
    assert tree.num_nodes == before - 1
    assert tree.evict("window", 9).blocks[1].tolist() == [1, 2, 4, 5]


def test_a_leaf_that_lost_its_tail_and_its_window_takes_new_blocks():
    tree = RadixTree(1, windows=[3])
    tree.insert([1, 2, 3, 4], [[11, 12, 13, 14], [1, 2, 3, 4]])
    tree.evict("window", 3)
    tree.evict("full", 2)
    receipt = tree.match_and_lock([])
    tree.insert([1, 2], [[11, 12], [0, 0]], receipt=receipt)
    tree.extend([1, 2, 7], [[11, 12, 17], [0, 0, 7]], receipt)
    tree.check_invariants()
    receipt.release()
    assert tree.evict("window", 1).blocks[1].tolist() == [7]


def test_a_state_keeps_its_own_age_when_nodes_are_joined():
    tree = RadixTree(1, windows=[3], states=True, state_interval=1)
    tokens, full, window = list(range(8)), list(range(11, 19)), list(range(1, 9))
    tree.insert(tokens[:6], [full[:6], window[:6]], states=[(5, 1)])
    tree.insert([9], [[29], [9]], states=[(1, 2)])
    receipt = tree.match_and_lock([])
    tree.insert(tokens[:6], [full[:6], window[:6]], receipt=receipt)  # splits before block 3
    used(tree, [9], tokens[:5])
    tree.extend(tokens, [full, window], receipt)  # nothing distinguishes blocks 3 and 4 any more
    tree.check_invariants()
    assert tree.evict("state", 1).states.tolist() == [2]


def test_an_extension_of_a_shared_end_inherits_its_priority_and_expiry():
    tree = RadixTree(1, policy="priority")
    receipt = tree.match_and_lock([])
    tree.insert([1], [11], receipt=receipt, priority=80, time_to_live=5, time=0)
    tree.insert([9], [19], priority=50)
    other = receipt.fork()
    tree.extend([1, 2], [11, 12], receipt)
    receipt.release()
    other.release()
    assert tree.evict("full", 0, time=4).amount == 0
    tree.insert([8], [18], priority=60)
    assert tree.evict("full", 1).blocks.tolist() == [19]
    assert tree.evict("full", 1, time=5).blocks.tolist() == [12]


def test_an_extension_advances_the_clock():
    tree = RadixTree(1, policy="priority")
    tree.insert([1], [11], priority=80, time_to_live=5, time=0)
    tree.insert([9], [19], priority=50)
    receipt = tree.match_and_lock([7])
    tree.extend([7], [17], receipt, time=5)
    assert tree.evict("full", 1).blocks.tolist() == [11]


def tail_without_anything():
    tree = RadixTree(1, full=0, windows=[1])
    tree.insert([1, 2, 3, 4], [11, 12, 0, 0])
    return tree


def test_an_empty_tail_is_removed_when_a_sequence_leaves_its_node():
    tree = tail_without_anything()
    tree.extend([1, 2, 9], [0, 0, 19], tree.match_and_lock([]))
    assert tree.num_nodes == 2
    tree = tail_without_anything()
    tree.insert([1, 2, 9], [0, 0, 19])
    assert tree.num_nodes == 2


def test_an_empty_tail_is_removed_when_the_prefix_before_it_is_locked():
    tree = tail_without_anything()
    receipt = tree.match_and_lock([1, 2, 3, 4])
    assert receipt.num_tokens == 2
    assert tree.match([1, 2, 3, 4]).num_full_tokens == 2


def test_a_batch_may_offer_one_state_for_one_prefix_and_no_block_for_two_places():
    tree = RadixTree(1, states=True, state_interval=1)
    entry = {"tokens": [1, 2], "blocks": [11, 12], "states": [(2, 1)]}
    assert tree.insert_all([entry, entry])[1].taken_states.tolist() == []
    with pytest.raises(DoubleFree):
        tree.insert_all([{"tokens": [5, 6], "blocks": [21, 22]}, {"tokens": [5, 6], "blocks": [23, 21]}])
    assert tree.protected() + tree.evictable() == 2


def test_a_released_receipt_pins_nothing_even_if_its_node_is_reused():
    tree = RadixTree(1)
    for i in range(1, 100):
        tree.insert([i], [i])
    receipt = tree.match_and_lock([99])
    receipt.release()
    assert (receipt.num_tokens, receipt.components) == (0, ())
    tree.evict("full", 99)  # and the memory of the nodes is returned
    assert receipt.num_tokens == 0


def test_a_block_in_the_place_of_one_with_an_image_has_no_image():
    tree = RadixTree(1)
    image = [(2, 3, b"cat")]
    tree.insert([1, 2, 3], [11, 12, 13], spans=image)
    assert tree.evict("full", 1).blocks.tolist() == [13]
    receipt = tree.match_and_lock([1, 2])
    tree.extend([1, 2, 3], [11, 12, 14], receipt)
    assert tree.match([1, 2, 3]).blocks.tolist() == [11, 12, 14]
    assert tree.match([1, 2, 3], spans=image).blocks.tolist() == [11, 12]
