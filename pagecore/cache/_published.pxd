from libc.stdint cimport int32_t, uint64_t
from libcpp.vector cimport vector

from pagecore.cache._sequence cimport Sequence
from pagecore.index._block_tables cimport BlockTables
from pagecore.index._radix_query cimport Int32Pointer
from pagecore.index._radix_tree cimport RadixTree, Receipt


cdef class Rows:
    cdef RadixTree tree
    cdef BlockTables tables
    cdef tuple pools               # of each lane
    cdef vector[int32_t] groups    # of each lane
    cdef vector[Int32Pointer] lanes  # scratch
    cdef vector[int32_t] ids         # scratch
    cdef vector[int32_t] places      # scratch
    cdef vector[vector[uint64_t]] met      # by lane: a bit for each block that the search has met
    cdef vector[vector[int32_t]] meetings  # the same, listed

    cdef const int32_t* _blocks(self, Sequence sequence, size_t lane)
