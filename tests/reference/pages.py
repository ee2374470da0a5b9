"""Conversions between flat lists of pages and block tables, one block at a time: the oracle of the ops."""

from __future__ import annotations

from collections.abc import Sequence


def table_from_pages(
    indptr: Sequence[int], indices: Sequence[int], last_page_len: Sequence[int] | None, block_size: int
) -> tuple[list[list[int]], list[int]]:
    """Return the rows of the table, without padding, and the lengths."""
    rows, lens = [], []
    for i in range(len(indptr) - 1):
        row = [int(page) for page in indices[indptr[i] : indptr[i + 1]]]
        last = block_size if last_page_len is None else int(last_page_len[i])
        rows.append(row)
        lens.append((len(row) - 1) * block_size + last if row else 0)
    return rows, lens


def pages_from_table(
    rows: Sequence[Sequence[int]], seq_lens: Sequence[int], block_size: int
) -> tuple[list[int], list[int], list[int]]:
    """Return indptr, indices and last_page_len of the first tokens of each row."""
    indptr, indices, last = [0], [], []
    for row, length in zip(rows, seq_lens, strict=True):
        blocks = [row[position // block_size] for position in range(0, length, block_size)]
        indices += [int(block) for block in blocks]
        indptr.append(len(indices))
        last.append((length - 1) % block_size + 1 if length else 0)
    return indptr, indices, last
