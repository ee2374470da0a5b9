"""Rows whose shared blocks hold keys and values of more tokens than count as computed."""

import numpy as np
import pytest

from pagecore.errors import InvalidBlock, OutOfBlocks, ShapeError
from pagecore.index import BlockPool, BlockTables, StepBuffers
from tests.index.tables import make, snapshot


def with_prefix(length, num_blocks=17):
    """Row 0 has 12 tokens in blocks 1 to 3; row 1 shares them, and has computed `length` of them."""
    pool, tables = make(num_blocks)
    tables.extend(tables.add(), 12)
    tables.add(tables.blocks(0), length)
    return pool, tables


def test_steps_over_shared_tokens_write_nothing_and_take_no_blocks():
    pool, tables = with_prefix(4)
    assert (tables.length(1), tables.capacity(1)) == (4, 12)
    assert tables.extend(1, 3).tolist() == [-1, -1, -1]
    assert tables.extend(1, 7).tolist() == [-1] * 5 + [16, 17]  # the first token after the prefix is in a new block
    assert tables.blocks(1).tolist() == [1, 2, 3, 4]
    assert pool.ref_counts()[1:5].tolist() == [2, 2, 2, 1]
    assert tables.take_copies().tolist() == []
    tables.check_invariants(exclusive=True)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 11, 12])
def test_a_step_over_the_end_of_the_prefix(length):
    _, tables = with_prefix(length)
    buffers = StepBuffers(4, 32)
    assert tables.shortage(1, 14 - length) == 0
    tables.prepare([1], [14 - length], buffers)
    assert buffers.slot_mappings[0][: 14 - length].tolist() == [-1] * (12 - length) + [16, 17]
    assert buffers.positions[: 14 - length].tolist() == list(range(length, 14))
    assert buffers.seq_lens[0] == 14


def test_shared_blocks_are_not_counted_as_copies():
    pool, tables = with_prefix(5, num_blocks=4)
    assert pool.num_free == 0
    assert tables.extend(1, 7).tolist() == [-1] * 7
    with pytest.raises(OutOfBlocks):
        tables.extend(1, 1)


def test_forks_and_reordered_rows_share_alike():
    _, tables = with_prefix(4)
    child = tables.fork(1)
    assert tables.extend(child, 9).tolist() == [-1] * 8 + [16]
    tables.reorder([child], [1])
    assert tables.extend(child, 9).tolist() == [-1] * 8 + [16]
    tables.reorder([child], [0])
    assert tables.extend(child, 1).tolist() == [16]


@pytest.mark.parametrize("keep_capacity", [False, True])
def test_truncating_ends_the_sharing(keep_capacity):
    _, tables = with_prefix(6)
    tables.extend(1, 2)
    tables.truncate(1, 5, keep_capacity=keep_capacity)
    assert tables.extend(1, 1).tolist() == [4 * 4 + 1]  # block 2 is copied to block 4
    assert tables.take_copies().tolist() == [[2, 4]]


def test_rows_that_keep_their_length_go_on_sharing():
    """A step of which all tokens were accepted is cut to the length that it has."""
    _, tables = with_prefix(4)
    tables.extend(1, 4)
    tables.truncate(1, 8, keep_capacity=True)
    assert tables.extend(1, 4).tolist() == [-1] * 4


def test_groups_share_by_their_own_block_sizes():
    tables = BlockTables([BlockPool(20), BlockPool(20)], block_sizes=[4, 2], max_sequences=2, max_blocks_per_sequence=8)
    tables.extend(tables.add(), 8)
    tables.add([tables.blocks(0, 0), tables.blocks(0, 1)], 3)
    slots = tables.extend(1, 6)
    assert [part.tolist() for part in slots] == [[-1] * 5 + [12], [-1] * 5 + [10]]


@pytest.mark.parametrize(
    ("prefix", "length", "error"),
    [([1, 2, 3], 13, ShapeError), ([1, 2, 3], -1, ShapeError), ([], 1, ShapeError), ([0, 2, 3], 3, InvalidBlock),
     ([1, 2, 0], 4, InvalidBlock), (None, 2**70, ShapeError), ([0, 0, 0], 0, InvalidBlock)],
)  # fmt: skip
def test_lengths_outside_of_the_prefix_and_holes_after_it_are_refused(prefix, length, error):
    _, tables = with_prefix(4)
    before = snapshot(tables)
    with pytest.raises(error):
        tables.add(prefix, length)
    assert snapshot(tables) == before
    assert tables.add([0, 2, 3], 4) == 2  # a hole before the computed tokens end
    np.testing.assert_array_equal(tables.extend(2, 8), [-1] * 8)


def test_groups_may_share_different_numbers_of_blocks():
    pools = [BlockPool(9), BlockPool(9)]
    tables = BlockTables(pools, block_sizes=4, max_sequences=2, max_blocks_per_sequence=6)
    tables.extend(tables.add(), 12)
    other = tables.add([tables.blocks(0, 0), tables.blocks(0, 1)[:1]], 4)
    assert (tables.length(other), tables.capacity(other)) == (4, 4)
    first, second = (slots.tolist() for slots in tables.extend(other, 9))
    assert first == [-1] * 8 + [16]
    assert second == [*range(16, 24), 24]
    assert tables.blocks(other, 1).tolist() == [1, 4, 5, 6]
    tables.check_invariants(exclusive=True)
    with pytest.raises(ShapeError, match="length is 8 and the prefix has 4 tokens in group 1"):
        tables.add([tables.blocks(0, 0), tables.blocks(0, 1)[:1]], 8)
    with pytest.raises(ShapeError, match="give blocks for the same tokens"):
        tables.add([tables.blocks(0, 0), tables.blocks(0, 1)[:1]])


def test_tables_without_groups_have_lengths_alone():
    tables = BlockTables([], block_sizes=[4], max_sequences=2, max_blocks_per_sequence=5)
    row = tables.add()
    step = StepBuffers(2, 8, 0)
    tables.prepare([row], [7], step)
    assert step.positions[:7].tolist() == list(range(7))
    assert (tables.length(row), tables.capacity(row), step.slot_mappings) == (7, 20, ())
    child = tables.fork(row)
    tables.truncate([child], [3])
    assert tables.lengths([row, child]).tolist() == [7, 3]
    with pytest.raises(ShapeError, match="the step has 9 tokens; the buffers have room for 8"):
        tables.prepare([row], [9], step)
    with pytest.raises(ShapeError, match="a row holds at most 20"):
        tables.prepare([row], [14], step)
    tables.check_invariants(exclusive=True)
    with pytest.raises(ShapeError, match="group is 0; the tables have no groups"):
        tables.table()
    with pytest.raises(ShapeError, match="2 block sizes are given for 0 pools"):
        BlockTables([], block_sizes=[4, 4], max_sequences=2, max_blocks_per_sequence=5)
