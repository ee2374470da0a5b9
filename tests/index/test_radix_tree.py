"""RadixTree: worked examples, lookup and insertion, namespaces, large trees."""

import numpy as np
import pytest

from pagecore.index import RadixTree
from tests.index.radix import blocks
from tests.together import together

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


@together("block_size", [1, 3, 16, 64])
@together("extra", [-1, 0, 1])
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


# Large trees.


@pytest.mark.slow
def test_a_chain_as_deep_as_its_tokens_needs_no_stack():
    tree = RadixTree(1)
    tokens, ids = np.zeros(20_000, np.int32), blocks(20_000)
    tree.insert(tokens, ids)
    for end in range(19_999, 0, -2):  # each walk ends at the node that it splits, the first one
        tree.match_and_lock(tokens[:end]).release()
    tree.match_and_lock(tokens).release()
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
