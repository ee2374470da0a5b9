from libc.stdint cimport int32_t
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

    cdef const int32_t* _blocks(self, Sequence sequence, size_t lane)
