"""Arrays that the tables expose or fill: the block table, dense tables, the buffers of a step."""

import gc
import weakref

import numpy as np
import pytest

from pagecore.errors import (
    ShapeError,
    UnsupportedDtype,
)
from pagecore.index import StepBuffers
from tests.index.tables import make
from tests.together import together


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


def test_step_buffers_are_freed_with_their_last_user_and_arrays_outlive_them():
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
    _, tables = make(num_blocks=64)
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


def test_a_shorter_step_is_followed_by_padding_only():
    _, tables = make(num_blocks=64)
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


@together(
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
def test_fill_refuses_unsuitable_buffers_and_writes_nothing(out, lengths):
    _, tables = make()
    tables.extend([tables.add(), tables.add()], [9, 2])
    with pytest.raises((ShapeError, UnsupportedDtype)):
        tables.fill([0, 1], out, lengths=lengths)
    assert (out == 77).all()
    assert lengths is None or (lengths == 77).all()
