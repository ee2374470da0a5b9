"""Blocks or tokens that key heads select: conversion and checks of shapes. The kernels check the contents."""

from libc.stdint cimport int64_t

from pagecore.arrays._tensor cimport Tensor
from pagecore.arrays.codes cimport CPU, INT64
from pagecore.ops._checks cimport check_length
from pagecore.ops._indices cimport given_indices
from pagecore.ops._overlap cimport check_apart
from pagecore.ops._place cimport Place
from pagecore.ops.cpu.args cimport Selection

from pagecore.errors import UnsupportedOption


cdef class Selected:
    """Lists of blocks or tokens, one for each sequence and key head."""

    cdef void fill(self, Selection* selection) noexcept:
        selection.data = self.entries.data
        selection.width = self.entries.shape_[2]
        selection.sequence_stride, selection.head_stride = self.entries.strides_[0], self.entries.strides_[1]
        selection.wide = self.entries.dtype_code == INT64
        selection.unit = self.unit
        if self.counts is not None:
            selection.counts = self.counts.data
            selection.counts_sequence_stride = self.counts.strides_[0]
            selection.counts_head_stride = self.counts.strides_[1]
            selection.counts_wide = self.counts.dtype_code == INT64

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
    selected.name = "blocks" if by_block else "indices"
    counts, counts_name = (block_counts, "block_counts") if by_block else (index_counts, "index_counts")
    if place.device_type != CPU:
        raise UnsupportedOption(
            f"{selected.name} selects keys on the host only; on CUDA pass a mask, or a cache on the host"
        )
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
