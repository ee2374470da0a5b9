"""What the twin does not show of BlockTables: bad input, plain and grouped forms, limits, lifetimes."""

import gc
import weakref

import numpy as np
import pytest

from pagecore.errors import (
    DoubleFree,
    InvalidBlock,
    InvalidSequence,
    NotEnoughMemory,
    OutOfBlocks,
    OutOfRows,
    PagecoreError,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.index import BlockPool, BlockTables, StepBuffers


def make(num_blocks=17, block_size=4, max_sequences=4, max_blocks=8, **options):
    pool = BlockPool(num_blocks, **options)
    tables = BlockTables(pool, block_sizes=block_size, max_sequences=max_sequences, max_blocks_per_sequence=max_blocks)
    return pool, tables


def snapshot(tables):
    """Everything that can be seen, in the tables and their pools."""
    groups = range(tables.num_groups)
    live = [row for row in range(tables.max_sequences) if is_live(tables, row)]
    pools = [(pool.ref_counts().tolist(), pool.num_free) for pool in tables.pools]
    rows = [(row, tables.length(row), tables.capacity(row)) for row in live]
    return [tables.table(group).tolist() for group in groups], pools, rows, tables.num_pending_copies


def is_live(tables, row):
    try:
        tables.length(row)
    except InvalidSequence:
        return False
    return True


@pytest.fixture
def two_groups():
    """Rows 0 (7 tokens) and 1 (its fork), 4 free blocks in group 0 and 5 in group 1."""
    pools = [BlockPool(7), BlockPool(10)]
    tables = BlockTables(pools, block_sizes=[4, 2], max_sequences=3, max_blocks_per_sequence=8)
    tables.extend([tables.add()], [7])
    tables.fork(0)
    return tables


# Bad input.

BAD_ROWS = [(2, InvalidSequence), (3, InvalidSequence), (-1, InvalidSequence), (2**40, InvalidSequence),
            ([0, 0], InvalidSequence), ([0, 2**80], InvalidSequence), (1.5, UnsupportedDtype), (None, UnsupportedDtype),
            ([[0]], ShapeError), ("0", UnsupportedDtype), (True, UnsupportedDtype)]  # fmt: skip


@pytest.mark.parametrize(("rows", "error"), BAD_ROWS)
@pytest.mark.parametrize(
    "call",
    [
        lambda tables, rows: tables.extend(rows, 1),
        lambda tables, rows: tables.try_extend(rows, 1),
        lambda tables, rows: tables.shortage(rows, 1),
        lambda tables, rows: tables.prepare(rows, 1, StepBuffers(4, 8, 2)),
        lambda tables, rows: tables.truncate(rows, 0),
        lambda tables, rows: tables.release_before(rows, 0, 4),
        lambda tables, rows: tables.remove(rows),
        lambda tables, rows: tables.reorder(rows, [0] * np.size(rows)),
    ],
)
def test_bad_rows_are_refused_and_nothing_changes(two_groups, call, rows, error):
    before = snapshot(two_groups)
    with pytest.raises(error):
        call(two_groups, rows)
    assert snapshot(two_groups) == before
    two_groups.check_invariants(exclusive=True)


@pytest.mark.parametrize("row", [2, -1, 99, 2**80])
@pytest.mark.parametrize("name", ["fork", "length", "capacity", "blocks", "lengths"])
def test_a_row_that_is_not_in_use_is_refused(two_groups, name, row):
    with pytest.raises(InvalidSequence):
        getattr(two_groups, name)(row)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda t: t.extend([0, 1], [1, -1]), ShapeError),
        (lambda t: t.extend([0, 1], [1, 10]), ShapeError),  # 17 tokens in a row of 8 blocks of 2
        (lambda t: t.extend(0, 2**31 - 1), ShapeError),
        (lambda t: t.extend(0, 2**31), ShapeError),
        (lambda t: t.extend(0, 2**80), ShapeError),
        (lambda t: t.extend([0, 1], [1]), ShapeError),
        (lambda t: t.extend([0], [1, 1]), ShapeError),
        (lambda t: t.extend([0], [1.0]), UnsupportedDtype),
        (lambda t: t.extend([0, 1], [9, 9]), OutOfBlocks),
        (lambda t: t.prepare([0, 1], [9, 9], StepBuffers(4, 32, 2)), OutOfBlocks),
        (lambda t: t.prepare([0, 1], 3, StepBuffers(1, 32, 2)), ShapeError),
        (lambda t: t.prepare([0, 1], 3, StepBuffers(2, 5, 2)), ShapeError),
        (lambda t: t.prepare([0, 1], 1, StepBuffers(2, 5, 1)), ShapeError),
        (lambda t: t.prepare([0, 1], 1, None), TypeError),
        (lambda t: t.truncate(0, 8), ShapeError),
        (lambda t: t.truncate([0, 1], [0, -1]), ShapeError),
        (lambda t: t.truncate([0, 1], [0]), ShapeError),
        (lambda t: t.release_before([0, 1], 0, [4, 8]), ShapeError),
        (lambda t: t.release_before([0, 1], 0, [4, -1]), ShapeError),
        (lambda t: t.release_before([0, 1], 0, [4]), ShapeError),
        (lambda t: t.release_before(0, 2, 4), ShapeError),
        (lambda t: t.release_before(0, -1, 4), ShapeError),
        (lambda t: t.reorder([0, 1], [1]), ShapeError),
        (lambda t: t.reorder([0, 1], [1, 2]), InvalidSequence),
        (lambda t: t.add([1, 2]), PagecoreError),
        (lambda t: t.add([[1]]), ShapeError),
        (lambda t: t.add([[1], [1]]), ShapeError),
        (lambda t: t.add([[1, 2], [1, 2, 3]]), ShapeError),
        (lambda t: t.add([[0] * 9, [0] * 18]), ShapeError),
        (lambda t: t.add([[1, 0], [0, 0, 0, 0]]), InvalidBlock),
        (lambda t: t.add([[1, 2], [0, 0, 0, 10]]), InvalidBlock),
        (lambda t: t.add([[1, 2], [1, 2, 3, 9]]), DoubleFree),
        (lambda t: t.add([[1, 2], [1, 2, 3, -4]]), InvalidBlock),
        (lambda t: t.blocks(0, 2), ShapeError),
        (lambda t: t.table(2), ShapeError),
        (lambda t: t.table(-1), ShapeError),
        (lambda t: t.take_copies(5), ShapeError),
    ],
)
def test_a_refused_call_changes_nothing_in_any_group(two_groups, call, error):
    before = snapshot(two_groups)
    with pytest.raises(error):
        call(two_groups)
    assert snapshot(two_groups) == before
    two_groups.check_invariants(exclusive=True)


@pytest.mark.parametrize(
    "out",
    [
        [np.zeros(2, np.int64)],
        np.zeros(2, np.int64),
        [np.zeros(2, np.int64), np.zeros(1, np.int64)],
        [np.zeros(2, np.int64), np.zeros((2, 1), np.int64)],
        [np.zeros(2, np.int64), np.zeros(4, np.int64)[::2]],
        [np.zeros(2, np.int64), np.broadcast_to(np.int64(0), 1)],
        [np.zeros(2, np.int64), np.frombuffer(bytes(16), np.int64)],
        [np.zeros(2, np.int64), [0, 0]],
        [np.zeros(2, np.int64), np.zeros(2, np.float64)],
        [np.zeros(2, np.int64), np.zeros(2, ">i8")],
        [np.zeros(2, np.int64), np.frombuffer(bytearray(25), np.uint8)[1:17].view(np.int64)],
        [np.zeros(2, np.int64), None],
        7,
    ],
)
def test_slots_are_not_written_into_what_cannot_take_them(two_groups, out):
    before = snapshot(two_groups)
    with pytest.raises((ShapeError, UnsupportedDtype)):
        two_groups.extend([0, 1], 1, out=out)
    assert snapshot(two_groups) == before


@pytest.mark.parametrize(
    ("pools", "options", "error"),
    [
        (lambda: BlockPool(4), {"max_sequences": 0}, ShapeError),
        (lambda: BlockPool(4), {"max_sequences": -1}, ShapeError),
        (lambda: BlockPool(4), {"max_sequences": 2**31 - 1}, ShapeError),
        (lambda: BlockPool(4), {"max_blocks_per_sequence": 0}, ShapeError),
        (lambda: BlockPool(4), {"max_blocks_per_sequence": 2**80}, ShapeError),
        (lambda: BlockPool(4), {"max_sequences": 2**31 - 2, "max_blocks_per_sequence": 2**31 - 1}, NotEnoughMemory),
        (lambda: BlockPool(4), {"block_sizes": 0}, ShapeError),
        (lambda: BlockPool(4), {"block_sizes": -4}, ShapeError),
        (lambda: BlockPool(4), {"block_sizes": 2**40}, ShapeError),
        (lambda: BlockPool(4), {"block_sizes": 1.5}, UnsupportedDtype),
        (lambda: BlockPool(4), {"block_sizes": [4, 4]}, ShapeError),
        (lambda: [BlockPool(4), BlockPool(4)], {"block_sizes": [4]}, ShapeError),
        (list, {}, ShapeError),
        (lambda: [BlockPool(4), 7], {"block_sizes": [4, 4]}, UnsupportedOption),
        (lambda: 7, {}, ShapeError),
        (lambda: None, {}, ShapeError),
    ],
)
def test_impossible_tables_are_refused(pools, options, error):
    with pytest.raises(error):
        BlockTables(pools(), **{"block_sizes": 4, "max_sequences": 2, "max_blocks_per_sequence": 2, **options})


@pytest.mark.parametrize(
    "arguments", [(-1, 4), (4, -1), (2**31, 4), (4, 2**31), (4, 4, 0), (4, 4, -1), (4, 4, 2**40), (2**80, 4)]
)
def test_impossible_step_buffers_are_refused(arguments):
    with pytest.raises(ShapeError):
        StepBuffers(*arguments)


def test_an_unknown_slot_dtype_is_refused_by_name():
    with pytest.raises(UnsupportedOption, match="int64 or int32"):
        StepBuffers(4, 4, 1, "int16")


# Rows.


def test_rows_are_handed_out_lowest_first_until_there_are_none():
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


def test_a_block_that_somebody_else_holds_is_copied_and_one_without_tokens_is_not():
    pool, tables = make()
    tables.extend(tables.add(), 10)
    tables.truncate(0, 6, keep_capacity=True)
    pool.share([2, 3])
    tables.extend(0, 4)
    assert tables.blocks(0).tolist() == [1, 4, 5]
    assert tables.take_copies().tolist() == [[2, 4]]


def test_a_copy_whose_target_was_freed_is_not_handed_over():
    _, tables = make()
    tables.extend(tables.add(), 6)
    tables.fork(0)
    tables.extend(1, 1)
    tables.remove(1)
    assert tables.take_copies().shape == (0, 2)


def test_a_copy_into_a_freed_block_is_handed_over_if_a_later_copy_reads_it():
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


def test_a_huge_step_that_cannot_be_served_is_refused_before_memory_is_asked_for():
    _, tables = make(num_blocks=4, block_size=1, max_blocks=2**31 - 1, max_sequences=1)
    tables.add()
    with pytest.raises(OutOfBlocks):
        tables.extend(0, 2**31 - 1)
    assert tables.try_extend(0, 2**31 - 1) is None


def test_a_block_given_back_behind_the_tables_is_reported_and_nothing_crashes():
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


# Views and buffers.


def test_the_table_is_a_read_only_view_that_keeps_its_memory():
    pool, tables = make()
    view = tables.table()
    tables.extend(tables.add(), 9)
    assert view.shape == (5, 8)
    assert view[0].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert not view[4].any()
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    del tables
    gc.collect()
    assert view[0, 0] == 1
    assert pool.num_used == 3


def test_references_go_back_when_the_tables_go():
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


def test_step_buffers_die_with_their_last_user_and_arrays_outlive_them():
    class Watched(StepBuffers):
        pass

    buffers = Watched(4, 8, 2)
    watch = weakref.ref(buffers)
    slots = buffers.slot_mappings[1]
    del buffers
    assert watch() is None
    assert (slots == -1).all()


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_step_buffers_are_aligned_and_never_move(dtype):
    pool, tables = make(num_blocks=64)
    rows = [tables.add() for _ in range(3)]
    buffers = StepBuffers(5, 33, 1, dtype)
    arrays = (buffers.rows, buffers.query_lens, buffers.cu_query_lens, buffers.seq_lens, buffers.positions,
              *buffers.slot_mappings)  # fmt: skip
    addresses = [array.ctypes.data for array in arrays]
    assert all(address % 64 == 0 for address in addresses)
    assert buffers.slot_mappings[0].dtype == dtype
    with pytest.raises(ValueError, match="resize"):
        buffers.positions.resize(1000, refcheck=False)
    tables.prepare(rows, [3, 2, 1], buffers)
    tables.prepare(rows[:1], 1, buffers)
    assert [array.ctypes.data for array in arrays] == addresses


def test_a_shorter_step_leaves_only_padding_behind_it():
    pool, tables = make(num_blocks=64)
    rows = [tables.add() for _ in range(3)]
    buffers = StepBuffers(4, 12)
    tables.prepare(rows, [5, 3, 4], buffers)
    tables.prepare([2, 0], [1, 2], buffers)
    assert (buffers.num_sequences, buffers.num_tokens) == (2, 3)
    assert buffers.rows.tolist() == [2, 0, 4, 4]
    assert buffers.query_lens.tolist() == [1, 2, 0, 0]
    assert buffers.seq_lens.tolist() == [5, 7, 0, 0]
    assert buffers.cu_query_lens.tolist() == [0, 1, 3, 3, 3]
    assert buffers.positions.tolist() == [4, 5, 6] + [0] * 9
    assert (buffers.slot_mappings[0][:3] >= 0).all()
    assert (buffers.slot_mappings[0][3:] == -1).all()
    tables.prepare([], [], buffers)
    buffers.check_invariants()
    assert buffers.rows.tolist() == [4] * 4


def test_buffers_may_serve_tables_of_another_size():
    _, small = make(max_sequences=2)
    _, large = make(max_sequences=9)
    buffers = StepBuffers(4, 8)
    small.prepare(small.add(), 1, buffers)
    assert buffers.rows.tolist() == [0, 2, 2, 2]
    large.prepare(large.add(), 1, buffers)
    assert buffers.rows.tolist() == [0, 9, 9, 9]


def test_fill_writes_a_dense_table_and_clears_the_rest():
    _, tables = make()
    tables.extend([tables.add(), tables.add()], [9, 2])
    out = np.full((4, 5), 77, np.int32)
    lengths = np.full(4, 77, np.int32)
    tables.fill([1, 0, 1], out, lengths=lengths)
    assert out.tolist() == [[4, 0, 0, 0, 0], [1, 2, 3, 0, 0], [4, 0, 0, 0, 0], [0] * 5]
    assert lengths.tolist() == [2, 9, 2, 0]


def test_fill_writes_into_strided_lines():
    _, tables = make()
    tables.extend(tables.add(), 9)
    whole = np.full((4, 6), 77, np.int32)
    tables.fill(0, whole[::2, :4])
    assert whole.tolist() == [[1, 2, 3, 0, 77, 77], [77] * 6, [0, 0, 0, 0, 77, 77], [77] * 6]


@pytest.mark.parametrize(
    ("out", "lengths"),
    [
        (np.full((2, 2), 77, np.int32), None),
        (np.full((1, 8), 77, np.int32), None),
        (np.full(8, 77, np.int32), None),
        (np.full((2, 8), 77, np.int64), None),
        (np.full((2, 16), 77, np.int32)[:, ::2], None),
        (np.broadcast_to(np.int32(77), (2, 8)), None),
        (np.full((2, 8), 77, np.int32), np.full(1, 77, np.int32)),
        (np.full((2, 8), 77, np.int32), np.full((2, 1), 77, np.int32)),
        (np.full((2, 8), 77, np.int32), np.full(2, 77, np.int64)),
    ],
)
def test_fill_refuses_what_it_cannot_write_and_writes_nothing(out, lengths):
    _, tables = make()
    tables.extend([tables.add(), tables.add()], [9, 2])
    with pytest.raises((ShapeError, UnsupportedDtype)):
        tables.fill([0, 1], out, lengths=lengths)
    assert (out == 77).all()
    assert lengths is None or (lengths == 77).all()


def test_the_index_of_a_large_cache_takes_at_most_16_bytes_a_block_beside_its_tables():
    pool, tables = make(num_blocks=1 << 20, block_size=16, max_sequences=256, max_blocks=8192)
    table = tables.table().nbytes
    assert pool.nbytes + tables.nbytes - table <= 16 * pool.num_blocks
