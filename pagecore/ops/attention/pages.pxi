"""Flat lists of pages, as FlashInfer and SGLang pass them, and block tables: conversions on the host."""

from libc.stdint cimport INT32_MAX, int64_t

from pagecore.arrays.tensors._tensor cimport as_tensor
from pagecore.ops.arguments._arguments cimport index_tensor, read_size

import numpy as np

from pagecore.arrays import like
from pagecore.errors import InvalidBlock, InvalidSequence, ShapeError


def table_from_pages(indptr, indices, last_page_len, block_size):
    """Return the block table and the lengths of sequences whose blocks are listed one sequence after another.

    The lists are those of FlashInfer's `plan` (``paged_kv_indptr``, ``paged_kv_indices``, ``paged_kv_last_page_len``)
    and of SGLang (``kv_indptr``, ``kv_indices``, with a block size of 1). All arrays are on the host.

    Parameters
    ----------
    indptr : integers, [B + 1]
        The blocks of sequence i are ``indices[indptr[i]]`` to ``indices[indptr[i + 1] - 1]``.
    indices : integers, [at least indptr[-1]]
        Block ids.
    last_page_len : integers, [B], or None
        Tokens in the last block of each sequence, 1 to `block_size`; 0 to `block_size`, and ignored, for a sequence
        without blocks. None if all last blocks are full.
    block_size : int

    Returns
    -------
    block_table : array, [B, max_blocks]
        int32, filled with the null block 0, for `paged_attention` and `gather_blocks`. max_blocks is at least 1.
    seq_lens : array, [B]
        int32. Both are new arrays in the framework of `indices`.

    Raises
    ------
    ShapeError
        The arrays do not match, or a length is out of range.
    InvalidBlock
        A block id is negative or does not fit int32.
    UnsupportedDtype, DeviceError
        Arrays do not hold integers, or are not on the host.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> table, lens = pagecore.table_from_pages([0, 2, 3], np.array([7, 4, 9]), [3, 16], block_size=16)
    >>> table.tolist(), lens.tolist()
    ([[7, 4], [9, 0]], [19, 16])
    """
    size = read_size(block_size, "block_size", 1)
    offsets = integers(indptr, "indptr", 1, "[num_sequences + 1]")
    pages = integers(indices, "indices", 1, "[num_blocks]")
    counts = page_counts(offsets, pages.size)
    pages = pages[offsets[0] : offsets[-1]]
    if (wrong := first_wrong(pages)) >= 0:
        raise InvalidBlock(f"indices[{offsets[0] + wrong}] is {pages[wrong]}; a block id is 0 to {INT32_MAX}")
    last = size if last_page_len is None else last_lengths(last_page_len, counts, size)
    lens = np.where(counts > 0, (counts - 1) * size + last, 0)
    check_lens(lens)
    table = np.zeros((counts.size, int(counts.max(initial=1))), np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = pages
    return in_framework(table, indices), in_framework(lens, indices)


def pages_from_table(block_table, seq_lens, block_size, *, rows=None):
    """Return the flat lists of blocks of sequences: the inverse of `table_from_pages`.

    Kernels of FlashInfer run on a cache with these lists: ``cache.block_table(group)`` and the lengths and rows of a
    batch are the arguments. All arrays are on the host.

    Parameters
    ----------
    block_table : integers, [B, max_blocks], or [more, max_blocks] with `rows`
        Entries past the length of a sequence are not read.
    seq_lens : integers, [B]
    block_size : int
    rows : integers, [B], optional
        Row of `block_table` for each sequence.

    Returns
    -------
    indptr, indices, last_page_len : array, [B + 1], [indptr[-1]] and [B]
        int32, new, in the framework of `block_table`; see `table_from_pages`.

    Raises
    ------
    ShapeError
        The arrays do not match, or a length is negative or exceeds its row of the table.
    InvalidBlock, InvalidSequence
        A block id is negative or does not fit int32, or a row is outside the table.
    UnsupportedDtype, DeviceError
        Arrays do not hold integers, or are not on the host.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> lists = pagecore.pages_from_table(np.array([[7, 4], [9, 0]]), [19, 16], block_size=16)
    >>> [array.tolist() for array in lists]
    [[0, 2, 3], [7, 4, 9], [3, 16]]
    """
    size = read_size(block_size, "block_size", 1)
    table = index_tensor(block_table, "block_table", 2, "[num_sequences, max_blocks]", NULL).numpy()
    lens = integers(seq_lens, "seq_lens", 1, "[num_sequences]")
    picked = picked_rows(table, rows, lens.size)
    check_lens(lens)
    counts = -(-lens // size)
    if (counts > table.shape[1]).any():
        wrong = int(np.argmax(counts > table.shape[1]))
        raise ShapeError(
            f"seq_lens[{wrong}] is {lens[wrong]}, which takes {counts[wrong]} blocks of {size} tokens; block_table has "
            f"{table.shape[1]} in a row"
        )
    offsets = np.concatenate([[0], np.cumsum(counts)])
    if offsets[-1] > INT32_MAX:
        raise ShapeError(f"the sequences have {offsets[-1]} blocks; offsets must fit int32: convert fewer at a time")
    width = counts.max(initial=0)
    wanted = np.arange(width) < counts[:, None]
    pages = table[:, :width][picked][wanted].astype(np.int64, copy=False)
    if (wrong := first_wrong(pages)) >= 0:
        row, column = np.argwhere(wanted)[wrong]
        raise InvalidBlock(f"block {column} of sequence {row} is {pages[wrong]}; a block id is 0 to {INT32_MAX}")
    last = lens - np.maximum(counts - 1, 0) * size
    return tuple(in_framework(array, block_table) for array in (offsets, pages, last))


cdef object integers(object array, str name, int ndim, str axes):
    """Return integers of the host as an int64 array of NumPy."""
    return index_tensor(array, name, ndim, axes, NULL).numpy().astype(np.int64, copy=False)


cdef object page_counts(object offsets, int64_t num_pages):
    if offsets.size == 0:
        raise ShapeError("indptr has no entries; it must have one more than there are sequences")
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        wrong = int(np.argmax(falls)) + 1
        raise ShapeError(f"indptr[{wrong}] is {offsets[wrong]}, less than the entry before, {offsets[wrong - 1]}")
    if offsets[0] < 0 or offsets[-1] > num_pages:
        raise ShapeError(f"indptr goes from {offsets[0]} to {offsets[-1]}; indices has {num_pages} entries")
    return np.diff(offsets)


cdef Py_ssize_t first_wrong(object numbers) except? -2:
    """Return the index of the first number that is negative or does not fit int32; -1 if there is none."""
    # Two comparisons: if an operand of a chained one raises, Cython frees the result before it twice.
    if numbers.size == 0 or (numbers.min() >= 0 and numbers.max() <= INT32_MAX):
        return -1
    return np.argmax((numbers < 0) | (numbers > INT32_MAX))


cdef object last_lengths(object last_page_len, object counts, int64_t size):
    last = integers(last_page_len, "last_page_len", 1, "[num_sequences]")
    if last.size != counts.size:
        raise ShapeError(f"last_page_len has {last.size} entries and indptr {counts.size + 1}; it must have one less")
    bad = (last > size) | (last < np.minimum(counts, 1))
    if bad.any():
        wrong = int(np.argmax(bad))
        raise ShapeError(
            f"last_page_len[{wrong}] is {last[wrong]} and the sequence has {counts[wrong]} blocks of {size} tokens; it "
            f"must be 1 to {size}, or 0 to {size} for a sequence without blocks"
        )
    return last


cdef int check_lens(object lens) except -1:
    if (wrong := first_wrong(lens)) >= 0:
        raise ShapeError(f"sequence {wrong} has length {lens[wrong]}; lengths are 0 to {INT32_MAX}")
    return 0


cdef object picked_rows(object table, object rows, int64_t num_sequences):
    """Return the rows of the table, one for each sequence, or a slice of all rows."""
    if rows is None:
        if table.shape[0] != num_sequences:
            raise ShapeError(
                f"block_table has {table.shape[0]} rows for {num_sequences} sequences; it must have one for each of "
                "seq_lens, or pass rows= to pick some"
            )
        return slice(None)
    picked = integers(rows, "rows", 1, "[num_sequences]")
    if picked.size != num_sequences:
        raise ShapeError(f"rows has {picked.size} entries and seq_lens {num_sequences}; both must have one a sequence")
    if picked.size and (picked.min() < 0 or picked.max() >= table.shape[0]):
        wrong = int(np.argmax((picked < 0) | (picked >= table.shape[0])))
        raise InvalidSequence(f"rows[{wrong}] is {picked[wrong]}; block_table has rows 0 to {table.shape[0] - 1}")
    return picked


cdef object in_framework(object values, object example):
    """Return a copy of integers as int32 in the framework of `example`."""
    return like(as_tensor(np.array(values, np.int32)), example)
