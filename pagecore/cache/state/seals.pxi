"""Sealed blocks of sequences: which blocks an operation seals, and the call that quantises them."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.index._integers cimport new_int32
from pagecore.index.tables._native cimport BlockCopy
from pagecore.index.tables._tables cimport BlockTables
from pagecore.native.std cimport vector

import numpy as np


cdef class Seals:
    """Groups of sealed blocks, each with the group of its newest tokens, its tail.

    S1: `Sequence.sealed` is a multiple of the block size, and at most `Sequence.computed`.
    S2: The blocks of the first `sealed` tokens are sealed in the group of sealed blocks. In the tail, a row holds those
        of the tokens from there on; sealed ones only after an operation that has sealed more than `reach` asks for.
    S3: Blocks of the group of sealed blocks that are not sealed belong to rows: the prefix cache has sealed ones only.

    Parameters
    ----------
    tables : BlockTables
    groups : list of (int, int)
        Number of each tail, and of its group of sealed blocks.
    residual : int
        Newest tokens that a commit leaves in the tail.
    quantise : Sealer or None
        Called with a list that has an array int32 ``[n, 2]`` for each tail: blocks of the tail, and the sealed blocks
        that they become. None for a cache without bytes. Its method `restore` takes pairs of the other order.
    """

    def __cinit__(self, BlockTables tables not None, list groups not None, int32_t residual, quantise):
        cdef int32_t tail, sealed
        self.tables = tables
        self.block_size = tables.block_sizes[0]
        self.residual = residual
        self.quantise = quantise
        for tail, sealed in groups:
            self.tails.push_back(tail)
            self.sealed.push_back(sealed)
        self.pairs.resize(self.tails.size())

    cdef bint has_tail(self, int32_t group) noexcept:
        cdef int32_t tail
        for tail in self.tails:
            if tail == group:
                return True
        return False

    cdef bint has_sealed(self, int32_t group) noexcept:
        cdef int32_t sealed
        for sealed in self.sealed:
            if sealed == group:
                return True
        return False

    cdef bint cuts(self, Sequence sequence, int64_t length) noexcept:
        return length < sequence.sealed and length % self.block_size > 0

    cdef int32_t reach(self, Sequence sequence, int64_t length) noexcept:
        cdef int64_t whole = max(0, length - self.residual) // self.block_size * self.block_size
        return max(sequence.sealed, <int32_t>whole)

    cdef void begin(self) noexcept:
        cdef size_t tail
        for tail in range(self.pairs.size()):
            self.pairs[tail].clear()

    cdef int add(self, Sequence sequence, int32_t length) except -1:
        cdef size_t tail
        cdef int32_t at
        cdef BlockCopy pair
        cdef const int32_t* newest
        cdef const int32_t* sealed
        if length <= sequence.sealed:
            return 0
        for tail in range(self.tails.size()):
            newest = self.tables.row_raw(sequence.row, self.tails[tail]).data()
            sealed = self.tables.row_raw(sequence.row, self.sealed[tail]).data()
            for at in range(sequence.sealed // self.block_size, length // self.block_size):
                pair.source, pair.target = newest[at], sealed[at]
                self.pairs[tail].push_back(pair)
        return 0

    cdef list run(self):
        if self.pairs[0].empty():
            return None
        # A copy: code of the caller that runs from here on may seal other blocks.
        cdef vector[vector[BlockCopy]] pairs
        pairs.assign(self.pairs.begin(), self.pairs.end())
        arrays = []
        for tail in range(pairs.size()):
            arrays.append(distinct_pairs(pairs[tail]))
        if self.quantise is not None:
            self.quantise(arrays)
        return arrays


cdef object distinct_pairs(const vector[BlockCopy]& pairs):
    """Return pairs of blocks as an array; of several pairs with one sealed block, which forks share, the first."""
    cdef int32_t* data = NULL
    array = new_int32(<Py_ssize_t>(2 * pairs.size()), &data)
    memcpy(data, pairs.data(), pairs.size() * sizeof(BlockCopy))
    array = array.reshape(-1, 2)
    if pairs.size() == 1:
        return array
    _, first = np.unique(array[:, 1], return_index=True)
    return array if len(first) == len(array) else array[first]
