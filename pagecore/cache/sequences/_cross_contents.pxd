from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.index.tables._block_tables cimport BlockTables
from pagecore.native.std cimport vector


cdef class CrossContent:
    cdef readonly object key            # (namespace, digest) by which later sequences find it; None without a digest
    cdef readonly int32_t num_tokens
    cdef readonly int32_t row           # in the tables of the cross groups; -1 while it has no blocks
    cdef readonly bint is_written
    cdef readonly int32_t num_holders   # sequences
    cdef readonly object writer         # the step in flight that writes it; else None
    cdef int32_t first_slot             # index of its first token among the tokens that `writer` writes
    cdef uint64_t mark                  # number of the last list that had it: finds duplicates without a set
    cdef int32_t num_swapped            # holders that are swapped out
    cdef object stored                  # its StoredBlocks in a swap space, where the last holder took them; else None
    cdef readonly object space          # that space


cdef class CrossContents:
    cdef readonly BlockTables tables
    cdef readonly int32_t max_tokens
    cdef readonly bint is_short         # the last `take` lacked blocks
    cdef int32_t block_size
    cdef dict by_key                    # entries without holders are leftovers of operations that failed
    cdef uint64_t num_lists
    cdef vector[int64_t] needed         # of each group, at the last `count_needed`

    # Returns the content of a key, or a new one; ShapeError if the content of the key has another length. Run no code
    # of the caller between this and `hold`.
    cdef CrossContent find(self, object key, int32_t num_tokens)
    cdef void hold(self, CrossContent content) noexcept
    # Ends the hold of one sequence; the last one frees the blocks. The slots of a step in flight are the caller's.
    cdef void release(self, CrossContent content) noexcept
    # Counts the blocks of each group that contents without blocks need.
    cdef void count_needed(self, list contents) noexcept
    # Gives each content a row and blocks; returns False, with nothing changed, if blocks are short.
    cdef bint take(self, list contents) except -1
    cdef int add_row(self, CrossContent content) except -1
    # Gives a content that has none a row of blocks that the caller holds.
    cdef int add_filled_row(self, CrossContent content, const vector[vector[int32_t]]& blocks) except -1
    # Raises OutOfRows unless `count` more contents can have a row.
    cdef int require_rows(self, Py_ssize_t count) except -1
    # Later sequences do not find the content any more.
    cdef void unlist(self, CrossContent content) noexcept
    # Takes back the row and blocks of a content.
    cdef void free(self, CrossContent content) noexcept
