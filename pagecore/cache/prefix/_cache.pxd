from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.cache.sequences._kept cimport KeptKeys
from pagecore.cache.sequences._prefix_hold cimport PrefixHold
from pagecore.cache.sequences._sequence cimport Sequence
from pagecore.index.radix._radix_query cimport Int32Pointer, Query, RetentionHint
from pagecore.index.radix._radix_tree cimport NativeMatch, RadixTree, Receipt
from pagecore.index.states._state_table cimport StateTable
from pagecore.index.tables._block_tables cimport BlockTables
from pagecore.native.std cimport vector


cdef class PrefixCache:
    cdef readonly RadixTree tree
    cdef readonly str policy
    cdef BlockTables tables
    cdef StateTable states          # None in a cache without states
    cdef list by_row                # the sequence in each row of the tables; None for a free row
    cdef list pools                 # of each lane
    cdef vector[int32_t] groups     # of each lane: those without a window come first
    cdef vector[int32_t] components  # of each group
    cdef vector[int32_t] lane_of    # of each group
    cdef vector[KeptKeys] kept      # of each window
    cdef bint gives_up_last         # a hit ends one block earlier
    cdef int32_t num_full           # lanes without a window
    cdef bint shares_ahead          # states, windows and lanes without a window: rows share past their receipts
    cdef int32_t num_lanes
    cdef int32_t block_size
    cdef object clock               # None where the policy does not use time
    cdef readonly double now        # time of the current call; minus infinity without a clock
    cdef int32_t num_truncated      # holds with `truncated_inside_block`
    cdef int32_t num_duplicated     # holds with `has_duplicates`
    cdef readonly int64_t num_evicted_blocks
    cdef readonly int64_t num_evicted_states
    cdef readonly set transfers     # holders of blocks and one `receipt` each: copies that run, and pins
    cdef int64_t num_hits, num_misses, num_query_tokens, num_hit_tokens, num_shared_tokens
    # Scratch of the largest size that is needed, so that no change allocates.
    cdef vector[Int32Pointer] lanes
    cdef int32_t* ids               # of the longest row; its pages are committed when they are written
    cdef vector[int32_t] block_indices
    cdef vector[vector[uint64_t]] counted
    cdef vector[int64_t] counts
    cdef vector[int64_t] left

    # Plan: these may fail, and change nothing that the caller can observe.
    cdef int tick(self) except -1
    cdef int reserve_moves(self, int64_t count) except -1
    cdef int match_sequence(self, Sequence sequence, int64_t max_blocks, NativeMatch* found) except -1
    # Commit: these cannot fail.
    cdef void attach(self, Sequence sequence, NativeMatch& found) noexcept
    cdef void inherit(
        self, Sequence child, PrefixHold hold, PrefixHold source, int32_t published, bint has_duplicates
    ) noexcept
    cdef void truncate(self, Sequence sequence, int32_t length) noexcept
    cdef void shorten(self, PrefixHold hold, int32_t num_blocks) noexcept
    cdef void leave(self, Sequence sequence) noexcept
    cdef void release(self, Sequence sequence, const RetentionHint& hint) noexcept

    cdef void shorten_ahead(self, PrefixHold hold, int32_t length) noexcept
    cdef void release_ahead(self, PrefixHold hold) noexcept
    cdef int32_t component_of(self, int32_t lane) noexcept
    # Blocks of a lane that a new row shares.
    cdef int64_t num_shared(self, const NativeMatch& found, int32_t lane) noexcept
    # Copies their ids, for which `out` has room, and returns their number.
    cdef size_t copy_shared(self, const NativeMatch& found, int32_t lane, int32_t* out) noexcept
    # Leading blocks of a sequence that are the tree's, in the lane that shares most.
    cdef int32_t num_held(self, PrefixHold hold) noexcept
    # The receipt that covers a block; the sequence's first receipt if none does.
    cdef Receipt cover(self, Sequence sequence, int32_t block_index, int32_t lane)
    cdef Query query_of(self, Sequence sequence, int32_t num_blocks) noexcept
    cdef void note_truncated(self, PrefixHold hold) noexcept
    cdef void note_duplicates(self, PrefixHold hold, bint has_duplicates) noexcept
    # Blocks of a sequence's row and of the path that its receipt covers, by their index in the row.
    cdef int32_t own_block(self, Sequence sequence, int32_t block_index, int32_t lane) noexcept
    cdef int32_t shared_block(self, Sequence sequence, int32_t block_index, int32_t lane) noexcept
    cdef int32_t tree_block(self, Sequence sequence, int32_t block_index, int32_t lane) noexcept
    cdef int32_t substitute(self, Sequence sequence, int32_t block_index, int32_t lane) noexcept
