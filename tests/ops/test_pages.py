"""Flat lists of pages and block tables: each conversion against the loops of the reference, and what is refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from pagecore import as_tensor, errors, ops
from tests.reference import pages as reference
from tests.together import together

LENGTHS = [[20, 1, 0, 16, 33], [0, 0], [], [1], [100]]


def random_table(lens: list[int], block_size: int, dtype: str = "int32", rows: int | None = None) -> Any:
    """Return a table with garbage past the blocks of each sequence."""
    rng = np.random.default_rng(len(lens))
    width = max([-(-length // block_size) for length in lens], default=0) + 2
    return rng.integers(0, 50, (len(lens) if rows is None else rows, width)).astype(dtype)


@together("lens", LENGTHS)
@together("block_size", [1, 5, 16])
@together("dtype", ["int32", "int64", "uint16"])
def test_lists_are_the_blocks_of_each_sequence_and_give_the_table_back(lens, block_size, dtype):
    table = random_table(lens, block_size, dtype)
    lists = ops.pages_from_table(table, lens, block_size)
    assert [array.tolist() for array in lists] == [*reference.pages_from_table(table, lens, block_size)]
    assert {array.dtype for array in lists} == {np.dtype("int32")}
    rows, _ = reference.table_from_pages(*lists, block_size)
    back, back_lens = ops.table_from_pages(*lists, block_size)
    assert back_lens.tolist() == lens
    assert back.shape == (len(lens), max([1, *map(len, rows)]))
    assert back.tolist() == [[*row, *[0] * (back.shape[1] - len(row))] for row in rows]


def test_without_lengths_every_last_page_is_full():
    indptr, indices = [0, 2, 2, 5], [7, 3, 9, 1, 4]
    table, lens = ops.table_from_pages(indptr, indices, None, 8)
    assert (table.tolist(), lens.tolist()) == ([[7, 3, 0], [0, 0, 0], [9, 1, 4]], [16, 0, 24])
    assert lens.tolist() == reference.table_from_pages(indptr, indices, None, 8)[1]


@together("last", [0, 1, 8])
def test_the_last_page_of_a_sequence_without_pages_is_ignored(last):
    """FlashInfer's users compute ``(length - 1) % page_size + 1``, which is the page size for a length of 0."""
    indptr, indices, last_page_len = [0, 2, 2, 3], [7, 3, 9], [4, last, 8]
    table, lens = ops.table_from_pages(indptr, indices, last_page_len, 8)
    assert (table.tolist(), lens.tolist()) == ([[7, 3], [0, 0], [9, 0]], [12, 0, 8])
    assert lens.tolist() == reference.table_from_pages(indptr, indices, last_page_len, 8)[1]


def test_lists_may_be_a_part_of_longer_ones():
    table, lens = ops.table_from_pages([2, 3, 5], np.array([-1, -1, 4, 8, 6, -1]), [1, 2], 4)
    assert (table.tolist(), lens.tolist()) == ([[4, 0], [8, 6]], [1, 6])


def test_rows_pick_from_a_table_of_requests():
    table, lens, rows = random_table([40] * 6, 4), [5, 0, 40], [4, 0, 1]
    lists = ops.pages_from_table(table, lens, 4, rows=rows)
    assert [array.tolist() for array in lists] == [*reference.pages_from_table(table[rows], lens, 4)]


def test_a_few_rows_of_a_large_table_take_little_memory():
    table = np.zeros((1000, 4096), np.int32)
    table[7, :3] = [5, 6, 8]
    tracemalloc.start()
    try:
        lists = ops.pages_from_table(table, [40], 16, rows=[7])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert lists[1].tolist() == [5, 6, 8]
    assert peak < table.nbytes / 100


def test_attention_over_the_table_of_lists():
    rng = np.random.default_rng(0)
    key_cache, value_cache = rng.standard_normal((2, 9, 4, 2, 8)).astype(np.float32)
    query = rng.standard_normal((3, 2, 8)).astype(np.float32)
    table, lens = ops.table_from_pages([0, 3, 3, 4], [8, 2, 5, 7], [2, 0, 4], 4)
    out = ops.paged_attention(query, key_cache, value_cache, table, lens)
    expected = ops.paged_attention(query, key_cache, value_cache, [[8, 2, 5], [0, 0, 0], [7, 0, 0]], [10, 0, 4])
    np.testing.assert_array_equal(out, expected)


def test_attention_over_packed_sequences_without_pages():
    rng = np.random.default_rng(0)
    query_lens, lens = [3, 0, 1], [9, 4, 13]
    starts, cu_query_lens = np.cumsum([0, *lens]), np.cumsum([0, *query_lens])
    key, value = rng.standard_normal((2, starts[-1], 2, 16)).astype(np.float32)
    query = rng.standard_normal((cu_query_lens[-1], 4, 16)).astype(np.float32)
    table = starts[:-1, None] + np.arange(max(lens))  # runs past the last token, which is not read
    got = ops.paged_attention(query, key[:, None], value[:, None], table, lens, cu_query_lens=cu_query_lens)
    for i, length in enumerate(lens):
        packed = [array[starts[i] : starts[i + 1]][None] for array in (key, value)]
        rows = slice(cu_query_lens[i], cu_query_lens[i + 1])
        alone = ops.paged_attention(query[rows], *packed, [[0]], [length], cu_query_lens=[0, query_lens[i]])
        np.testing.assert_allclose(got[rows], alone, rtol=0, atol=1e-6)


def test_results_are_arrays_of_the_caller(torch):
    indices = torch.tensor([7, 3, 9])
    table, lens = ops.table_from_pages(torch.tensor([0, 2, 3]), indices, torch.tensor([1, 4]), 4)
    assert (table.dtype, lens.dtype) == (torch.int32, torch.int32)
    lists = ops.pages_from_table(table, lens, 4)
    assert all(isinstance(array, torch.Tensor) for array in lists)
    assert lists[1].tolist() == [7, 3, 9]
    assert type(ops.pages_from_table(as_tensor(np.array([[1]])), [1], 4)[1]).__name__ == "Tensor"


@together(
    ("change", "error", "message"),
    [
        ({"indptr": []}, errors.ShapeError, "indptr has no entries"),
        ({"indptr": [0, 3, 2]}, errors.ShapeError, r"indptr\[2\] is 2, less than the entry before, 3"),
        ({"indptr": [-1, 1, 2]}, errors.ShapeError, "indptr goes from -1 to 2; indices has 3 entries"),
        ({"indptr": [0, 2, -(2**63), -1, 3]}, errors.ShapeError, r"indptr\[2\] is -9223372036854775808, less than"),
        ({"indptr": [0, 2, 4]}, errors.ShapeError, "indptr goes from 0 to 4; indices has 3 entries"),
        ({"indptr": [[0, 2, 3]]}, errors.ShapeError, "indptr"),
        ({"indptr": [0.0, 2.0, 3.0]}, errors.UnsupportedDtype, "indptr holds float64"),
        ({"indices": [7, -3, 9]}, errors.InvalidBlock, r"indices\[1\] is -3; a block id is 0 to 2147483647"),
        ({"indices": [7, 2**31, 9]}, errors.InvalidBlock, r"indices\[1\] is 2147483648"),
        ({"last_page_len": [1]}, errors.ShapeError, "last_page_len has 1 entries and indptr 3"),
        ({"last_page_len": [0, 1]}, errors.ShapeError, r"last_page_len\[0\] is 0 and the sequence has 2 blocks of 4"),
        ({"last_page_len": [4, 5]}, errors.ShapeError, r"last_page_len\[1\] is 5"),
        ({"indptr": [0, 3, 3], "last_page_len": [1, 5]}, errors.ShapeError, r"last_page_len\[1\] is 5"),
        ({"indptr": [0, 3, 3], "last_page_len": [1, -1]}, errors.ShapeError, r"last_page_len\[1\] is -1"),
        ({"block_size": 0}, errors.ShapeError, "block_size is 0; it must be 1 to"),
        ({"block_size": "4"}, errors.ShapeError, "block_size is '4'; it must be a whole number"),
        ({"block_size": 2**31 - 1, "last_page_len": None}, errors.ShapeError, "sequence 0 has length 4294967294"),
    ],
)
def test_invalid_lists_are_refused(change, error, message):
    given = {"indptr": [0, 2, 3], "indices": [7, 3, 9], "last_page_len": [1, 4], "block_size": 4, **change}
    with pytest.raises(error, match=message):
        ops.table_from_pages(**given)


@together(
    ("change", "error", "message"),
    [
        ({"seq_lens": [5]}, errors.ShapeError, "block_table has 2 rows for 1 sequences; .* pass rows="),
        ({"seq_lens": [5, -1]}, errors.ShapeError, "sequence 1 has length -1; lengths are 0 to"),
        ({"seq_lens": [5, 9]}, errors.ShapeError, r"seq_lens\[1\] is 9, which takes 3 blocks of 4 tokens"),
        ({"block_table": [[7, -3], [9, 0]]}, errors.InvalidBlock, "block 1 of sequence 0 is -3; a block id is 0 to"),
        ({"rows": [0]}, errors.ShapeError, "rows has 1 entries and seq_lens 2"),
        ({"rows": [0, 2]}, errors.InvalidSequence, r"rows\[1\] is 2; block_table has rows 0 to 1"),
        ({"block_table": [7, 3]}, errors.ShapeError, "block_table"),
        ({"block_size": -1}, errors.ShapeError, "block_size is -1"),
    ],
)
def test_invalid_tables_are_refused(change, error, message):
    given = {"block_table": [[7, 3], [9, 0]], "seq_lens": [5, 4], "block_size": 4, **change}
    with pytest.raises(error, match=message):
        ops.pages_from_table(**given)
