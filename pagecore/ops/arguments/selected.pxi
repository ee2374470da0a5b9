"""Blocks or tokens that key heads select: conversion and checks of shapes. The kernels check the contents."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU, INT64
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport Indices, index_array
from pagecore.ops.arguments._overlap cimport check_apart
from pagecore.ops.cpu.args cimport Selection

from pagecore.errors import ShapeError, UnsupportedOption


cdef class Selected:
    """Lists of blocks or tokens, one for each sequence and key head."""

    cdef void fill(self, Selection* selection) noexcept:
        selection.data = self.entries.data
        selection.width = self.entries.shape_[2]
        selection.sequence_stride, selection.head_stride = self.entries.strides_[0], self.entries.strides_[1]
        selection.wide = self.entries.dtype_code == INT64
        selection.unit, selection.by_block = self.unit, self.by_block
        if self.counts is not None:
            selection.counts = self.counts.data
            selection.counts_sequence_stride = self.counts.strides_[0]
            selection.counts_head_stride = self.counts.strides_[1]
            selection.counts_wide = self.counts.dtype_code == INT64

    cdef bint is_on_host(self) noexcept:
        return are_on_host((self.entries, self.counts))

    cdef Selected on_host(self, const Place* place):
        cdef Selected copy = Selected()
        copy.entries, copy.counts = to_host(self.entries, place), to_host(self.counts, place)
        copy.unit, copy.by_block, copy.name = self.unit, self.by_block, self.name
        return copy

    cdef int send(self, Tensor lens, int64_t room, const Place* place) except -1:
        if self.is_on_host():
            self.check(lens if lens.device_type == CPU else None, room)
        self.entries = to_device(self.entries, self.name, place)
        if self.counts is not None:
            self.counts = to_device(self.counts, f"the counts of {self.name}", place)
        return 0

    cdef int check(self, Tensor lens, int64_t room) except -1:
        """Raise the errors of a call on the host; without lengths, sequences have at most `room` tokens."""
        cdef Tensor entries = self.entries, counts = self.counts
        cdef Indices lengths = index_array(lens), row, amounts
        cdef int64_t i, head, k, count, entry, before, length = -1, limit, width = entries.shape_[2]
        limit = (room + self.unit - 1) // self.unit
        row.size, row.stride, row.wide = width, entries.itemsize, entries.dtype_code == INT64
        for i in range(entries.shape_[0]):
            if lens is not None:
                length = lengths.at(i)
                limit = (length + self.unit - 1) // self.unit
            for head in range(entries.shape_[1]):
                row.data = entries.data + i * entries.strides_[0] + head * entries.strides_[1]
                count = width
                if counts is not None:
                    amounts.data = counts.data + i * counts.strides_[0] + head * counts.strides_[1]
                    amounts.wide = counts.dtype_code == INT64
                    count = amounts.at(0)
                if not 0 <= count <= width:
                    raise ShapeError(
                        f"the count of {self.name}[{i}, {head}] is {count}; expected 0 to {width}, the last extent of "
                        f"{self.name}"
                    )
                before = -1
                for k in range(count):
                    entry = row.at(k)
                    if counts is None and entry < 0:
                        break
                    if not 0 <= entry < limit:
                        owner = "a row of block_table" if lens is None else f"sequence {i} of {length} tokens"
                        raise ShapeError(
                            f"{self.name}[{i}, {head}, {k}] is {entry} and {owner} has {limit}; use 0 to {limit - 1}, "
                            "and counts if a list is shorter"
                        )
                    if entry <= before:
                        raise ShapeError(
                            f"{self.name}[{i}, {head}, {k}] is {entry} after {before}; a list must ascend, as "
                            "pagecore.select returns it"
                        )
                    before = entry
        return 0

    cdef int check_apart_from(self, Tensor out) except -1:
        check_apart(out, "out", self.entries, self.name)
        return check_apart(out, "out", self.counts, f"the counts of {self.name}")


cdef Selected read_selected(
        object blocks, object block_counts, object indices, object index_counts, int64_t num_sequences,
        int64_t num_kv_heads, int64_t block_size, const Place* place):
    cdef bint by_block = blocks is not None
    if by_block and indices is not None:
        raise UnsupportedOption("blocks and indices are both given; pass one of them")
    if not by_block and block_counts is not None:
        raise UnsupportedOption("block_counts is given without blocks; pass blocks too, or index_counts with indices")
    if indices is None and index_counts is not None:
        raise UnsupportedOption("index_counts is given without indices; pass indices too, or block_counts with blocks")
    if not by_block and indices is None:
        return None
    cdef Selected selected = Selected()
    selected.by_block, selected.name = by_block, "blocks" if by_block else "indices"
    counts, counts_name = (block_counts, "block_counts") if by_block else (index_counts, "index_counts")
    selected.unit = block_size if by_block else 1
    selected.entries = given_indices(
        blocks if by_block else indices, selected.name, 3, "[num_sequences, num_kv_heads, num_selected]", place)
    check_length(selected.entries, selected.name, 0, num_sequences, "one list for each of seq_lens")
    check_length(selected.entries, selected.name, 1, num_kv_heads, "one list for each key-value head")
    if counts is not None:
        selected.counts = given_indices(counts, counts_name, 2, "[num_sequences, num_kv_heads]", place)
        check_length(selected.counts, counts_name, 0, num_sequences, "one count for each of seq_lens")
        check_length(selected.counts, counts_name, 1, num_kv_heads, "one count for each key-value head")
    return selected
