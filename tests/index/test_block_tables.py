"""BlockTables beyond its twin: exact ids, plain and grouped forms, limits, lifetimes."""

import gc

import numpy as np
import pytest

from pagecore.errors import (
    DoubleFree,
    OutOfBlocks,
    OutOfRows,
    PagecoreError,
    ShapeError,
)
from pagecore.index import BlockPool, BlockTables, StepBuffers
from tests.index.tables import make, make_two_groups, snapshot


@pytest.fixture
def two_groups():
    return make_two_groups()


# Rows.


def test_rows_are_added_lowest_first_until_all_are_used():
    _, tables = make(max_sequences=3)
    assert [tables.add() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OutOfRows):
        tables.add()
    with pytest.raises(OutOfRows):
        tables.fork(1)
    tables.remove([2, 0])
    assert [tables.fork(1), tables.add()] == [0, 2]


def test_a_prefix_is_shared_and_counts_as_tokens():
    pool, tables = make()
    tables.extend(tables.add(), 12)
    row = tables.add(prefix=[0, 2, 3])
    assert tables.length(row) == tables.capacity(row) == 12
    assert tables.blocks(row).tolist() == [0, 2, 3]
    assert pool.ref_counts()[1:4].tolist() == [1, 2, 2]


def test_reorder_is_simultaneous():
    pool, tables = make()
    for count in (3, 5, 9):
        tables.extend(tables.add(), count)
    before = [tables.blocks(row).tolist() for row in range(3)]
    tables.reorder([0, 1, 2], [1, 0, 1])
    assert [tables.blocks(row).tolist() for row in range(3)] == [before[1], before[0], before[1]]
    assert [tables.length(row) for row in range(3)] == [5, 3, 5]
    assert pool.num_used == 3
    tables.check_invariants(exclusive=True)


def test_a_removed_row_gives_its_blocks_back_tail_first():
    pool, tables = make()
    tables.extend(tables.add(), 12)
    tables.remove(0)
    assert pool.allocate(3).tolist() == [1, 2, 3]


# Copy-on-write.


def test_a_shared_block_is_copied_by_all_writers_but_the_last():
    pool, tables = make()
    tables.extend(tables.add(), 6)
    tables.fork(0)
    tables.fork(0)
    assert tables.shortage([0, 1, 2], 1) == 0
    assert tables.extend([0, 1, 2], 1).tolist() == [3 * 4 + 2, 4 * 4 + 2, 2 * 4 + 2]
    assert tables.take_copies().tolist() == [[2, 3], [2, 4]]
    assert tables.take_copies().shape == (0, 2)
    assert pool.ref_counts()[1:5].tolist() == [3, 1, 1, 1]


def test_shortage_counts_no_copy_for_the_last_holder():
    pool, tables = make(num_blocks=4)
    tables.extend(tables.add(), 6)
    tables.fork(0)
    assert pool.num_free == 1
    assert tables.shortage([0, 1], 1) == 0
    tables.extend([0, 1], 1)
    assert pool.num_free == 0
    assert tables.take_copies().tolist() == [[2, 3]]


def test_a_block_with_another_holder_is_copied_unless_it_has_no_tokens():
    pool, tables = make()
    tables.extend(tables.add(), 10)
    tables.truncate(0, 6, keep_capacity=True)
    pool.share([2, 3])
    tables.extend(0, 4)
    assert tables.blocks(0).tolist() == [1, 4, 5]
    assert tables.take_copies().tolist() == [[2, 4]]


def test_a_shared_block_that_starts_at_the_length_is_replaced_without_a_copy():
    pool, tables = make()
    tables.extend(tables.add(), 10)
    tables.truncate(0, 8, keep_capacity=True)
    pool.share(3)
    tables.extend(0, 1)
    assert tables.blocks(0).tolist() == [1, 2, 4]
    assert tables.take_copies().shape == (0, 2)


def test_a_copy_whose_target_was_freed_is_left_out():
    _, tables = make()
    tables.extend(tables.add(), 6)
    tables.fork(0)
    tables.extend(1, 1)
    tables.remove(1)
    assert tables.take_copies().shape == (0, 2)


def test_a_copy_whose_target_was_freed_and_taken_again_is_left_out():
    _, tables = make()
    tables.extend(tables.add(), 6)
    tables.fork(0)
    tables.extend(1, 1)  # 2 -> 3
    tables.remove(1)
    tables.extend(tables.add(), 1)
    assert tables.blocks(1).tolist() == [3]
    assert tables.take_copies().shape == (0, 2)


def test_a_copy_into_a_freed_block_is_kept_if_a_later_copy_reads_it():
    _, tables = make()
    tables.extend(tables.add(), 6)
    tables.fork(0)
    tables.extend(1, 1)  # 2 -> 3
    tables.fork(1)
    tables.extend(2, 1)  # 3 -> 4
    tables.remove(1)
    assert tables.take_copies().tolist() == [[2, 3], [3, 4]]


# Several groups.


def test_one_short_group_stops_all(two_groups):
    two_groups.pools[1].allocate(2)
    before = snapshot(two_groups)
    assert two_groups.shortage([0], [8]) == (0, 2)
    with pytest.raises(OutOfBlocks) as short:
        two_groups.extend([0], [8])
    assert (short.value.requested, short.value.available) == ((3, 5), (4, 3))
    assert snapshot(two_groups) == before


def test_a_pool_of_two_groups_serves_them_in_order():
    pool = BlockPool(4)
    tables = BlockTables([pool, pool], block_sizes=[4, 2], max_sequences=2, max_blocks_per_sequence=8)
    tables.add()
    assert tables.shortage(0, 4) == (0, 0)
    assert tables.shortage(0, 6) == (0, 2)
    with pytest.raises(OutOfBlocks) as short:
        tables.extend(0, 6)
    assert (short.value.requested, short.value.available) == ((2, 3), (3, 1))
    assert [slots.tolist() for slots in tables.extend(0, 4)] == [[4, 5, 6, 7], [4, 5, 6, 7]]


def test_results_are_plain_for_a_plain_pool_and_tuples_for_a_list_of_one():
    _, tables = make()
    grouped = BlockTables([BlockPool(17)], block_sizes=[4], max_sequences=4, max_blocks_per_sequence=8)
    for each in (tables, grouped):
        each.add()
    assert tables.extend(0, 2).tolist() == [4, 5]
    assert [part.tolist() for part in grouped.extend(0, 2)] == [[4, 5]]
    assert (tables.shortage(0, 1), grouped.shortage(0, 1)) == (0, (0,))
    assert tables.take_copies().shape == grouped.take_copies()[0].shape == grouped.take_copies(0).shape == (0, 2)
    tables.pools[0].allocate(15)
    with pytest.raises(OutOfBlocks) as plain:
        tables.extend(0, 30)
    assert (plain.value.requested, plain.value.available) == (7, 0)


# Windows and limits.


def test_holes_count_as_capacity_and_are_filled_without_a_copy():
    pool, tables = make()
    tables.extend(tables.add(), 12)
    assert tables.release_before(0, 0, 11) == 2
    assert tables.release_before(0, 0, 11) == 0
    assert (tables.blocks(0).tolist(), tables.capacity(0)) == ([0, 0, 3], 12)
    tables.truncate(0, 6)
    assert (tables.blocks(0).tolist(), pool.num_used) == ([0, 0], 0)
    tables.extend(0, 1)
    assert tables.blocks(0)[0] == 0
    assert tables.blocks(0)[1] != 0
    assert tables.take_copies().shape == (0, 2)


def test_spare_capacity_is_used_before_new_blocks():
    pool, tables = make()
    tables.extend(tables.add(), 12)
    tables.truncate(0, 5, keep_capacity=True)
    assert (tables.length(0), tables.capacity(0), pool.num_used) == (5, 12, 3)
    assert tables.extend(0, 7).tolist() == list(range(9, 16))
    assert pool.num_used == 3
    tables.truncate(0, 5, keep_capacity=True)
    tables.truncate(0, 5)
    assert (tables.capacity(0), pool.num_used) == (8, 2)


def test_a_row_of_128k_tokens_is_numbered_right_in_one_call():
    pool, tables = make(num_blocks=8194, block_size=16, max_sequences=2, max_blocks=8192, order="address")
    tables.add()
    slots = tables.extend(0, 131072)
    assert np.array_equal(slots, np.arange(16, 16 + 131072))
    with pytest.raises(ShapeError):
        tables.extend(0, 1)
    tables.remove(0)
    assert pool.num_free == 8193


def test_lengths_never_pass_32_bits():
    _, tables = make(num_blocks=4, block_size=2**30, max_blocks=8)
    tables.add()
    with pytest.raises(ShapeError):
        tables.extend(0, 2**31)
    with pytest.raises(ShapeError):
        tables.add(prefix=[0, 0])
    tables.add(prefix=[0])
    tables.extend(1, 5)
    with pytest.raises(ShapeError):
        tables.extend(1, 2**31 - 1 - 2**30 - 4)
    assert (tables.length(1), tables.capacity(1)) == (2**30 + 5, 2**31)


def test_slots_past_32_bits_are_int64_and_int32_refuses_them():
    pool, tables = make(num_blocks=9, block_size=2**30, max_blocks=1, order="lifo")
    for _ in range(4):
        tables.add()
    pool.allocate(4)
    assert tables.extend(0, 2).tolist() == [5 * 2**30, 5 * 2**30 + 1]
    before = snapshot(tables)
    with pytest.raises(ShapeError, match="int64"):
        tables.extend(1, 1, out=np.zeros(1, np.int32))
    with pytest.raises(ShapeError, match="int64"):
        tables.prepare(1, 1, StepBuffers(4, 4, 1, "int32"))
    assert snapshot(tables) == before


def test_a_huge_step_without_blocks_is_refused_before_memory_is_allocated():
    _, tables = make(num_blocks=4, block_size=1, max_blocks=2**31 - 1, max_sequences=1)
    tables.add()
    with pytest.raises(OutOfBlocks):
        tables.extend(0, 2**31 - 1)
    assert tables.try_extend(0, 2**31 - 1) is None


def test_a_block_freed_by_another_holder_is_reported_and_nothing_crashes():
    pool, tables = make()
    tables.extend(tables.add(), 6)
    pool.free(2)
    for call in (
        lambda: tables.extend(0, 1),
        lambda: tables.remove(0),
        lambda: tables.fork(0),
        lambda: tables.truncate(0, 0),
    ):
        with pytest.raises(DoubleFree):
            call()
    with pytest.raises(PagecoreError):
        tables.check_invariants()


def test_references_are_dropped_when_the_tables_are_freed():
    pool, tables = make()
    tables.extend(tables.add(), 9)
    del tables
    gc.collect()
    assert pool.num_used == 0
    pool.check_invariants()


def test_tables_keep_their_pools():
    tables = BlockTables(BlockPool(17), block_sizes=4, max_sequences=4, max_blocks_per_sequence=8)
    gc.collect()
    tables.extend(tables.add(), 9)
    assert tables.pools[0].num_used == 3


def test_the_index_of_a_large_cache_takes_at_most_16_bytes_a_block_in_addition_to_its_tables():
    pool, tables = make(num_blocks=1 << 20, block_size=16, max_sequences=256, max_blocks=8192)
    table = tables.table().nbytes
    assert pool.nbytes + tables.nbytes - table <= 16 * pool.num_blocks
