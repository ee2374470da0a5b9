"""Bindings of block numbers and stack distances."""

from cython.operator cimport dereference as deref
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libcpp cimport bool as cbool

from pagecore.native.std cimport span, unique_ptr, vector
from pagecore.native.translate cimport raise_python_error

import numpy as np

ctypedef const int32_t const_int32
ctypedef const int64_t const_int64


cdef extern from "pagecore/serving/whatif/block_numbers.hpp" namespace "pagecore::whatif" nogil:
    cdef cppclass BlockNumbers:
        BlockNumbers(double rate) except +raise_python_error
        int32_t find_or_add(uint64_t hash) except +raise_python_error


cdef extern from "pagecore/serving/whatif/stack_distances.hpp" namespace "pagecore::whatif" nogil:
    ctypedef span[const_int32] Blocks "std::span<const int32_t>"
    ctypedef span[const_int64] Capacities "std::span<const int64_t>"

    cdef cppclass PrefixRequest:
        Blocks blocks
        int64_t first
        int64_t reusable
        cbool has_partial

    cdef cppclass StackDistances:
        StackDistances(double rate) except +raise_python_error
        void add(const PrefixRequest& request, Capacities capacities, span[int64_t] hits) except +raise_python_error
        const vector[int64_t]& hits()
        int64_t num_lookups()
        int64_t num_blocks()


cdef class Numbers:
    """Numbers of blocks by their hashes, from 0 in the order in which they are first seen.

    Parameters
    ----------
    rate : float
        Share of the hashes that get a number; the others get -1.
    """

    cdef unique_ptr[BlockNumbers] native

    def __cinit__(self, double rate=1.0):
        self.native.reset(new BlockNumbers(rate))

    def of(self, const uint64_t[::1] hashes):
        """Return the number of each hash: int32, new."""
        cdef Py_ssize_t i
        numbers = np.empty(hashes.shape[0], np.int32)
        cdef int32_t[::1] out = numbers
        with nogil:
            for i in range(hashes.shape[0]):
                out[i] = deref(self.native).find_or_add(hashes[i])
        return numbers


cdef class Stack:
    """Stack of the blocks of all requests so far, and the hits that caches of every capacity would have had.

    Parameters
    ----------
    rate : float
        Share of the blocks that are followed; 1 is exact.
    capacities : ndarray
        int64, ascending: capacities in blocks whose hits `add` returns for each request.
    """

    cdef unique_ptr[StackDistances] native
    cdef vector[int64_t] capacities

    def __cinit__(self, double rate=1.0, capacities=()):
        self.native.reset(new StackDistances(rate))
        for each in capacities:
            self.capacities.push_back(each)

    @property
    def num_lookups(self):
        """Blocks that were looked up, of those that are followed."""
        return deref(self.native).num_lookups()

    def add(self, const int32_t[::1] blocks, int64_t[::1] starts, int64_t[::1] first, int64_t[::1] reusable,
            uint8_t[::1] has_partial):
        """Add requests in their order.

        Parameters
        ----------
        blocks : ndarray
            int32, numbers of the full blocks of all requests.
        starts : ndarray
            int64 ``[n + 1]``: where each request begins in `blocks`.
        first, reusable : ndarray
            int64 ``[n]``: blocks [first, reusable) of each request are looked up.
        has_partial : ndarray
            uint8 ``[n]``: a partial block follows the full blocks.

        Returns
        -------
        hits : ndarray
            int64 ``[n, len(capacities)]``.
        num_blocks : ndarray
            int64 ``[n]``: distinct blocks up to each request.

        Raises
        ------
        MemoryError
            The requests before the one that does not fit are counted.
        """
        cdef Py_ssize_t count = first.shape[0]
        cdef Py_ssize_t width = <Py_ssize_t> self.capacities.size()
        cdef Py_ssize_t i
        cdef PrefixRequest request
        if not (starts.shape[0] == count + 1 and reusable.shape[0] == count and has_partial.shape[0] == count):
            raise ValueError("starts, first, reusable and has_partial describe different numbers of requests")
        if count == 0:
            return np.zeros((0, width), np.int64), np.zeros(0, np.int64)
        if starts[0] < 0 or starts[count] > blocks.shape[0] or (np.diff(starts) < 0).any():
            raise ValueError("starts do not ascend within the blocks")
        hits = np.zeros((count, max(width, 1)), np.int64)
        num_blocks = np.zeros(count, np.int64)
        results = hits[:, :width], num_blocks
        cdef int64_t[:, ::1] hits_out = hits
        cdef int64_t[::1] num_out = num_blocks
        cdef const int32_t* data = &blocks[0] if blocks.shape[0] else NULL
        with nogil:
            for i in range(count):
                request.blocks = Blocks(data + starts[i], <size_t> (starts[i + 1] - starts[i]))
                request.first = first[i]
                request.reusable = reusable[i]
                request.has_partial = has_partial[i] != 0
                deref(self.native).add(
                    request, Capacities(self.capacities.data(), <size_t> width),
                    span[int64_t](&hits_out[i, 0], <size_t> width)
                )
                num_out[i] = deref(self.native).num_blocks()
        return results

    def hits(self):
        """Return int64 ``[largest capacity + 1]``: hits that a cache of c blocks has and one of c - 1 has not."""
        cdef const vector[int64_t]* found = &deref(self.native).hits()
        out = np.zeros(found.size(), np.int64)
        cdef size_t i
        cdef int64_t[::1] view = out
        for i in range(found.size()):
            view[i] = deref(found)[i]
        return out
