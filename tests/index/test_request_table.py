"""RequestTable beyond its twin: bad input, sizes, buffers."""

import numpy as np
import pytest

from pagecore.errors import (
    InvalidBlock,
    InvalidSequence,
    NotEnoughMemory,
    OutOfRows,
    ShapeError,
    UnsupportedDtype,
)
from pagecore.index import RequestTable
from tests.together import together


def snapshot(requests):
    requests.check_invariants()
    return requests.table.tolist(), [requests.length(row) for row in range(requests.num_used)], requests.num_free


@pytest.fixture(params=["int32", "int64"])
def requests(request):
    """Rows 0 to 2 of 4 in use, of 3, 1 and 0 slots."""
    requests = RequestTable(4, 6, request.param)
    requests.allocate(3)
    requests.write(0, 0, [42, 17, 88])
    requests.write(1, 0, 9)
    return requests


def test_the_lowest_rows_are_allocated_first():
    requests = RequestTable(5, 2)
    assert requests.allocate(4).tolist() == [0, 1, 2, 3]
    requests.free([2, 0])
    rows = requests.try_allocate(3)
    assert (rows.tolist(), rows.dtype) == ([0, 2, 4], np.int32)
    assert (requests.num_used, requests.num_free) == (5, 0)
    assert requests.try_allocate(1) is None
    assert requests.allocate(0).shape == (0,)


@pytest.mark.parametrize(
    ("n", "error"),
    [(2, OutOfRows), (2**80, OutOfRows), (-1, ShapeError), (-(2**80), ShapeError), (1.0, UnsupportedDtype),
     (None, UnsupportedDtype), ([1], UnsupportedDtype)],
)  # fmt: skip
def test_an_allocation_that_fails_takes_no_row(requests, n, error):
    before = snapshot(requests)
    with pytest.raises(error):
        requests.allocate(n)
    assert snapshot(requests) == before
    assert requests.allocate(1).tolist() == [3]


@together(
    ("rows", "error"),
    [(3, InvalidSequence), (4, InvalidSequence), (-1, InvalidSequence), (2**40, InvalidSequence),
     (-(2**80), InvalidSequence), ([0, 1, 0], InvalidSequence), ([0, 3], InvalidSequence),
     ([0, 1, 2**33], InvalidSequence), (np.array([0, 2**33]), InvalidSequence),
     ([[0]], ShapeError), (0.0, UnsupportedDtype), (None, UnsupportedDtype),
     (True, UnsupportedDtype), ("0", UnsupportedDtype)],
)  # fmt: skip
def test_rows_that_are_not_in_use_are_refused_and_nothing_changes(requests, rows, error):
    before = snapshot(requests)
    with pytest.raises(error):
        requests.free(rows)
    if str(rows) != str([0, 1, 0]):  # rows may repeat in a write
        with pytest.raises(error):
            requests.write(rows, 0, np.ones(np.size(rows), int))
    if np.ndim(rows) == 0:
        for call in (requests.length, requests.read, lambda row: requests.read(row, 0, 2)):
            with pytest.raises((InvalidSequence, UnsupportedDtype)):
                call(3 if rows is True else rows)
    assert snapshot(requests) == before


def test_a_row_reads_zero_when_it_is_taken_again(requests):
    requests.free(0)
    assert requests.allocate(1).tolist() == [0]
    assert requests.length(0) == 0
    assert requests.read(0).tolist() == []
    assert requests.read(0, 6).tolist() == [0] * 6


def test_one_row_takes_many_slots_and_many_rows_one_each_unless_counts_say_otherwise(requests):
    requests.write(2, 1, [5, 6])
    requests.write([0, 1], [3, 1], [1, 2])
    assert [requests.read(row).tolist() for row in range(3)] == [[42, 17, 88, 1], [9, 2], [0, 5, 6]]
    requests.write([0, 1], 4, [3, 4, 5, 6], 2)
    requests.write([0, 2], [0, 3], [7, 8, 9], counts=[1, 2])
    assert requests.read(0).tolist() == [7, 17, 88, 1, 3, 4]
    assert requests.read(1).tolist() == [9, 2, 0, 0, 5, 6]
    assert requests.read(2).tolist() == [0, 5, 6, 8, 9]


def test_a_row_remembers_how_far_it_was_written(requests):
    requests.write(0, 1, [1])
    assert requests.length(0) == 3
    requests.write(0, 5, [1])
    assert requests.length(0) == 6
    requests.write(1, 4, [])
    requests.write([1, 2], [6, 6], [], counts=0)
    assert [requests.length(row) for row in (1, 2)] == [1, 0]


def test_later_slots_of_one_write_win(requests):
    requests.write([2, 2, 2], [0, 1, 0], [1, 2, 3])
    assert requests.read(2).tolist() == [3, 2]


def test_a_row_is_read_by_the_arguments_of_range(requests):
    assert requests.read(0).tolist() == [42, 17, 88]
    assert requests.read(0, 2).tolist() == [42, 17]
    assert requests.read(0, 1, 3).tolist() == [17, 88]
    assert requests.read(0, 5).tolist() == [42, 17, 88, 0, 0]
    assert requests.read(0, 6, 6).tolist() == []
    assert requests.read(0, start=1).tolist() == [17, 88]
    assert requests.read(0, stop=1).tolist() == [42]
    assert requests.read(row=0, start=2, stop=4).tolist() == [88, 0]
    for arguments, names in (((0, 1, 2, 3), {}), ((0, 1), {"stop": 2}), ((), {})):
        with pytest.raises(TypeError):
            requests.read(*arguments, **names)


@pytest.mark.parametrize("bounds", [(7,), (-1,), (0, 7), (3, 2), (-1, 2), (7, 7), (2**80,), (-(2**80), 3)])
def test_positions_outside_a_row_are_refused(requests, bounds):
    with pytest.raises(ShapeError):
        requests.read(0, *bounds)


@pytest.mark.parametrize("bounds", [(1.0,), ("1",), ([1],), (0, 2.0)])
def test_positions_that_are_not_ints_are_refused(requests, bounds):
    with pytest.raises(UnsupportedDtype):
        requests.read(0, *bounds)


def test_read_returns_a_copy(requests):
    slots = requests.read(0)
    assert slots.dtype == requests.dtype
    slots[:] = 0
    assert requests.read(0).tolist() == [42, 17, 88]


@together(
    ("arguments", "error"),
    [
        (([0], [4], [1, 2, 3]), ShapeError),
        ((0, 6, 1), ShapeError),
        ((0, 2**31 - 1, 1), ShapeError),
        ((0, 2**31 - 1, [1], [2**31 - 1]), ShapeError),
        ((0, 2**40, 1), ShapeError),
        ((0, np.array([2**40]), 1), ShapeError),
        ((0, -1, 1), ShapeError),
        ((0, -1, []), ShapeError),
        (([0, 1], [0, 0], [1, 2, 3]), ShapeError),
        (([0, 1], [0, 0], [1]), ShapeError),
        (([0, 1], [0], [1, 2]), ShapeError),
        (([0], [0, 0], [1]), ShapeError),
        (([0, 1], 0, [1, 2, 3], [1, 1]), ShapeError),
        (([0, 1], 0, [1, 2, 3], [4, -1]), ShapeError),
        (([0, 1], 0, [1, 2, 3], [3]), ShapeError),
        (([0, 1], 0, [1, 2, 3], [1, 2, 0]), ShapeError),
        (([], [], [1]), ShapeError),
        (([0, 3], 0, [1, 2]), InvalidSequence),
        (([0, 1], [0, 6], [1, 2]), ShapeError),
        ((0, 0, [2**80]), InvalidBlock),
        ((0, 0, [1, -(2**80)]), InvalidBlock),
        ((0, 0, np.array([2**63], np.uint64)), InvalidBlock),
        ((0, 0, [1.0]), UnsupportedDtype),
        ((0, 0, None), UnsupportedDtype),
        ((0, 0, "1"), UnsupportedDtype),
        ((0, 0, [True]), UnsupportedDtype),
        ((0, 0, [[1]]), ShapeError),
        ((0, 0.0, [1]), UnsupportedDtype),
        ((0, None, [1]), UnsupportedDtype),
        ((0, 0, [1], [1.0]), UnsupportedDtype),
    ],
)
def test_a_refused_write_changes_nothing_in_any_row(requests, arguments, error):
    before = snapshot(requests)
    with pytest.raises(error):
        requests.write(*arguments)
    assert snapshot(requests) == before


@together("slot", [2**31, -(2**31) - 1, 2**40, 2**63 - 1, -(2**63)])
@together("make", [list, np.array])
def test_a_slot_that_int32_cannot_hold_is_refused_and_int64_holds_it(slot, make):
    narrow, wide = RequestTable(1, 40), RequestTable(1, 40, dtype="int64")
    narrow.allocate(1), wide.allocate(1)
    slots = make([*range(30), slot, 1])
    with pytest.raises(InvalidBlock, match=str(slot)):
        narrow.write(0, 0, slots)
    assert (narrow.length(0), narrow.table.any()) == (0, False)
    wide.write(0, 0, slots)
    assert wide.read(0).tolist() == [*range(30), slot, 1]


def test_an_int_beyond_64_bits_is_refused():
    requests = RequestTable(1, 4, dtype="int64")
    requests.allocate(1)
    for slot in (2**63, 2**80, -(2**63) - 1):
        with pytest.raises(InvalidBlock, match=str(slot)):
            requests.write(0, 0, slot)
    assert requests.length(0) == 0


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31), -1, 0])
def test_the_ends_of_int32_are_held(value):
    requests = RequestTable(1, 4)
    requests.allocate(1)
    requests.write(0, 3, value)
    assert requests.read(0).tolist() == [0, 0, 0, value]


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda v: np.array(v, np.int32),
        lambda v: np.array(v, np.int64),
        lambda v: np.array(v, np.uint16),
        lambda v: np.array(v, ">i8"),
        lambda v: np.repeat(np.array(v, np.int64), 2)[::2],
        lambda v: [np.int8(x) for x in v],
        lambda v: memoryview(np.array(v, np.int32)),
    ],
)
def test_rows_and_slots_are_accepted_in_every_integer_container(requests, make):
    requests.write(make([2, 1]), make([0, 1]), make([5, 6, 7]), make([2, 1]))
    assert [requests.read(row).tolist() for row in (1, 2)] == [[9, 7], [5, 6]]
    requests.free(make([2, 1]))
    assert requests.num_used == 1


def test_the_table_is_a_read_only_view_that_changes_with_the_rows(requests):
    table = requests.table
    assert (table.shape, table.dtype, table.flags.writeable) == ((4, 6), np.dtype(requests.dtype), False)
    requests.write(2, 0, [3])
    assert table[2].tolist() == [3, 0, 0, 0, 0, 0]
    assert np.shares_memory(table, requests.table)
    with pytest.raises(ValueError, match="read-only"):
        table[0, 0] = 1
    kept = RequestTable(2, 2)
    row = kept.allocate(2)[1]
    kept.write(row, 0, [8, 9])
    view = kept.table
    del kept
    assert view.tolist() == [[0, 0], [8, 9]]


@together(
    ("arguments", "error"),
    [
        ((0, 4), ShapeError),
        ((4, 0), ShapeError),
        ((-1, 4), ShapeError),
        ((2**31 - 1, 4), ShapeError),
        ((4, 2**31), ShapeError),
        ((2**80, 4), ShapeError),
        ((4, -(2**80)), ShapeError),
        ((4.0, 4), UnsupportedDtype),
        ((4, None), UnsupportedDtype),
        ((2**31 - 2, 2**31 - 1), NotEnoughMemory),
        ((2**31 - 2, 2**31 - 1, "int64"), NotEnoughMemory),
        ((4, 4, "int16"), UnsupportedDtype),
        ((4, 4, None), UnsupportedDtype),
        ((4, 4, float), UnsupportedDtype),
        ((4, 4, object()), UnsupportedDtype),
    ],
)
def test_an_impossible_table_is_refused(arguments, error):
    with pytest.raises(error):
        RequestTable(*arguments)


def test_a_large_table_costs_nothing_until_it_is_written():
    requests = RequestTable(4096, 1 << 20)
    rows = requests.allocate(4096)
    requests.write(rows, (1 << 20) - 1, rows)
    assert requests.read(4095, (1 << 20) - 2, 1 << 20).tolist() == [0, 4095]
    assert requests.nbytes > 2**34
    assert (requests.num_requests, requests.max_context, requests.dtype) == (4096, 1 << 20, "int32")
    assert "4096 rows in use" in repr(requests)
