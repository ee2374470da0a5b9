"""Bad input to BlockTables: a typed error, with nothing changed in any row, group or pool."""

import numpy as np
import pytest

from pagecore.errors import (
    DoubleFree,
    InvalidBlock,
    InvalidSequence,
    NotEnoughMemory,
    OutOfBlocks,
    PagecoreError,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.index import BlockPool, BlockTables, StepBuffers
from tests.index.tables import make_two_groups, snapshot
from tests.together import together


@pytest.fixture
def two_groups():
    return make_two_groups()


BAD_ROWS = [(2, InvalidSequence), (3, InvalidSequence), (-1, InvalidSequence), (2**40, InvalidSequence),
            ([0, 0], InvalidSequence), ([0, 2**80], InvalidSequence), (1.5, UnsupportedDtype), (None, UnsupportedDtype),
            ([[0]], ShapeError), ("0", UnsupportedDtype), (True, UnsupportedDtype)]  # fmt: skip


@together(("rows", "error"), BAD_ROWS)
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


@together(
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
        (lambda t: t.release_before(0, 0, 4, -1), ShapeError),
        (lambda t: t.release_before(0, -1, 4), ShapeError),
        (lambda t: t.reorder([0, 1], [1]), ShapeError),
        (lambda t: t.reorder([0, 1], [1, 2]), InvalidSequence),
        (lambda t: t.add([1, 2]), PagecoreError),
        (lambda t: t.add([[1]]), ShapeError),
        (lambda t: t.add([[1], [1]]), ShapeError),
        (lambda t: t.add([[1, 2], [1, 2, 3]]), ShapeError),
        (lambda t: t.add([[0] * 9, [0] * 18]), ShapeError),
        (lambda t: t.add([[1, 0], [0, 0, 0, 0]], 3), InvalidBlock),
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
def test_an_unsuitable_out_is_refused(two_groups, out):
    before = snapshot(two_groups)
    with pytest.raises((ShapeError, UnsupportedDtype)):
        two_groups.extend([0, 1], 1, out=out)
    assert snapshot(two_groups) == before


@together(
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


@pytest.mark.parametrize("arguments", [(-1, 4), (4, -1), (2**31, 4), (4, 2**31), (4, 4, -1), (4, 4, 2**40), (2**80, 4)])
def test_impossible_step_buffers_are_refused(arguments):
    with pytest.raises(ShapeError):
        StepBuffers(*arguments)


def test_an_unknown_slot_dtype_is_refused_by_name():
    with pytest.raises(UnsupportedOption, match="int64 or int32"):
        StepBuffers(4, 4, 1, "int16")


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (np.zeros((3, 2), np.int32), UnsupportedDtype),
        (np.zeros((3, 2), np.float32), UnsupportedDtype),
        (np.zeros((3, 3), np.int64), ShapeError),
        (np.zeros((6, 2), np.int64)[::2], ShapeError),
        (np.zeros(6, np.int64), ShapeError),
        (np.broadcast_to(np.int64(0), (3, 2)), ShapeError),
        ([[0, 0]], ShapeError),
    ],
)
def test_changes_are_written_only_to_pairs_of_int64(two_groups, out, error):
    two_groups.follow_changes()
    with pytest.raises(error):
        two_groups.take_changes(out)
    taken = np.zeros((99, 2), np.int64)
    assert two_groups.take_changes(taken) == 2 * (2 + 4) + 2


def test_changes_that_are_not_recorded_are_refused(two_groups):
    with pytest.raises(UnsupportedOption, match="follow_changes"):
        two_groups.take_changes(np.zeros((3, 2), np.int64))


def test_changes_of_tables_beyond_int32_are_refused():
    tables = BlockTables(BlockPool(9), block_sizes=4, max_sequences=2**15, max_blocks_per_sequence=2**16)
    with pytest.raises(ShapeError, match="changes can be followed in up to 2147483647"):
        tables.follow_changes()
