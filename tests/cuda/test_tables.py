"""scatter_entries: changed entries of block tables are written from a staging buffer into the tables."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore.ops.cuda.moves._moves import scatter_entries
from tests.cuda.kit import Kit
from tests.cuda.memory import calls_of

ENTRY = np.dtype([("index", np.int64), ("block", np.int32), ("pad", np.int32)])


def run(cuda: Kit, index, *, count=None, size=5000, capacity=None):
    """Scatter entries with block numbers from 100 on; return the table before and after."""
    rng = np.random.default_rng(3)
    entries = np.zeros(len(index) if capacity is None else capacity, ENTRY)
    entries["index"][: len(index)] = index
    entries["block"] = np.arange(100, 100 + len(entries))
    entries["pad"] = -7
    before = rng.integers(0, 50, size, np.int32)
    table = cuda.put(before)
    staged = cuda.put(entries.view(np.uint8))
    number = cuda.put(np.asarray([len(index) if count is None else count], np.int32))
    scatter_entries(staged.pointer, number.pointer, len(entries), table, 0)
    return before, cuda.get(table)


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 3000])
def test_entries_are_written_to_their_places_only(cuda, count):
    index = np.random.default_rng(count).permutation(5000)[:count]
    expected, table = run(cuda, index)
    expected[index] = np.arange(100, 100 + count)
    np.testing.assert_array_equal(table, expected)


def test_a_grid_smaller_than_the_number_of_entries_writes_all_of_them(cuda):
    count = 64 * 128 + 77
    _, table = run(cuda, np.arange(count)[::-1], size=count)
    np.testing.assert_array_equal(table, np.arange(100, 100 + count)[::-1])


@pytest.mark.parametrize(("count", "taken"), [(0, 0), (2, 2), (5, 3), (2**31 - 1, 3), (-1, 0)])
def test_the_count_on_the_device_is_clamped_to_the_capacity(cuda, count, taken):
    expected, table = run(cuda, [4, 2, 9], count=count)
    expected[[4, 2, 9][:taken]] = [100, 101, 102][:taken]
    np.testing.assert_array_equal(table, expected)


def test_entries_outside_of_the_table_are_skipped(cuda):
    expected, table = run(cuda, [-1, 5000, 3, 2**62, -(2**62), 2**32 + 1, 4999])
    expected[3], expected[4999] = 102, 106
    np.testing.assert_array_equal(table, expected)


def test_block_numbers_are_not_checked(cuda):
    """The table may hold any int32, -1 included: its owner decides."""
    entries = np.zeros(2, ENTRY)
    entries["index"], entries["block"] = [0, 1], [-1, -(2**31)]
    table, count = cuda.put(np.zeros(2, np.int32)), cuda.put(np.asarray([2], np.int32))
    staged = cuda.put(entries.view(np.uint8))
    scatter_entries(staged.pointer, count.pointer, 2, table, 0)
    np.testing.assert_array_equal(cuda.get(table), entries["block"])


def test_a_call_allocates_nothing_and_does_not_wait(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    table, count = cuda.put(np.zeros(8, np.int32)), cuda.put(np.asarray([1], np.int32))
    staged = cuda.put(np.zeros(4, ENTRY).view(np.uint8))
    assert calls_of(cuda, lambda: scatter_entries(staged.pointer, count.pointer, 4, table, 0)) == {"launches": 1}
