"""Views of native memory: contents, lifetime, and safety as arguments."""

import numpy as np
import pytest

from pagecore.index import RequestTable, StepBuffers
from tests.index.tables import make


def test_the_lengths_of_all_rows_are_a_view_that_changes_with_the_tables():
    _, tables = make(num_blocks=33, max_sequences=4)
    lengths = tables.row_lengths
    assert (lengths.dtype, lengths.shape, lengths.flags.c_contiguous) == (np.dtype(np.int32), (5,), True)
    assert lengths.tolist() == [0, 0, 0, 0, 0]
    rows = [tables.add() for _ in range(4)]
    tables.extend(rows, [7, 3, 9, 1])
    assert lengths.tolist() == [7, 3, 9, 1, 0]
    buffers = StepBuffers(4, 8)
    tables.prepare([3, 1], [2, 5], buffers)
    assert lengths.tolist() == [7, 8, 9, 3, 0]
    tables.truncate([0, 2], [4, 0])
    tables.remove(3)
    assert lengths.tolist() == [4, 8, 0, 0, 0]
    assert tables.fork(1) == 3
    tables.reorder([0, 1], [1, 0])
    assert lengths.tolist() == [8, 4, 0, 8, 0]
    assert tables.lengths([0, 1, 2, 3]).tolist() == lengths[:4].tolist()
    assert np.shares_memory(lengths, tables.row_lengths)


def test_the_lengths_of_all_rows_are_read_only_and_outlive_the_tables():
    _, tables = make()
    lengths = tables.row_lengths
    with pytest.raises(ValueError, match="read-only"):
        lengths[0] = 3
    with pytest.raises(ValueError, match="WRITEABLE"):
        lengths.flags.writeable = True
    tables.extend(tables.add(), 5)
    del tables
    assert lengths.tolist() == [5, 0, 0, 0, 0]


def test_lengths_that_a_call_changes_are_read_before_it_changes_them():
    _, tables = make(num_blocks=33)
    first, second, third = (tables.add() for _ in range(3))
    tables.extend([first, second], [3, 5])
    tables.extend([second, first], tables.row_lengths[:2])
    assert tables.row_lengths[:2].tolist() == [8, 8]
    tables.extend([first, second, third], [1, 3, 14])
    tables.truncate([second, third], tables.row_lengths[:2])
    assert tables.row_lengths[:3].tolist() == [9, 9, 11]
    tables.check_invariants()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_slots_of_a_table_are_read_before_it_is_written(dtype):
    requests = RequestTable(2, 6, dtype)
    first, second = requests.allocate(2)
    requests.write(first, 0, [1, 2, 3, 4, 5])
    requests.write(first, 1, requests.table[first, :5])
    assert requests.read(first).tolist() == [1, 1, 2, 3, 4, 5]
    requests.write(second, 0, [7, 8])
    requests.write([second, first], 0, requests.table.reshape(-1), 6)
    assert requests.table.tolist() == [[7, 8, 0, 0, 0, 0], [1, 1, 2, 3, 4, 5]]
    requests.check_invariants()
