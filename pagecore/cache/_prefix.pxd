from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp.vector cimport vector

from pagecore.cache._sequence cimport Sequence
from pagecore.index._block_tables cimport BlockTables
from pagecore.index._radix_query cimport Int32Pointer, Query, RetentionHint
from pagecore.index._radix_tree cimport NativeMatch, RadixTree


cdef class PrefixCache:
    cdef readonly RadixTree tree
    cdef readonly str policy
    cdef BlockTables tables
    cdef list by_row                # the sequence in each row of the tables; None for a free row
    cdef list pools                 # of each lane
    cdef vector[int32_t] groups     # of each lane: those without a window come first
    cdef vector[int32_t] components  # of each group
    cdef vector[int32_t] lane_of    # of each group
    cdef vector[int64_t] num_seen   # of each window: earlier tokens that the next one sees, the window less itself
    cdef int32_t num_full
    cdef int32_t num_lanes
    cdef int32_t block_size
    cdef object clock               # None where the policy needs no time
    cdef readonly double now        # of this call; minus infinity without a clock
    cdef int32_t num_cut
    cdef int32_t num_duplicated     # sequences with duplicates
    cdef readonly int64_t num_evicted_blocks
    cdef int64_t num_hits, num_misses, num_query_tokens, num_hit_tokens
    # Scratch, as large as it gets, so that nothing below allocates.
    cdef vector[Int32Pointer] lanes
    cdef vector[int32_t] ids
    cdef vector[int32_t] places
    cdef vector[vector[uint64_t]] met
    cdef vector[int64_t] counts
    cdef vector[int64_t] left

    # Before a change: these may fail, and change nothing that shows.
    cdef int tick(self) except -1
    cdef int name_spaces(self, list sequences) except -1
    cdef int reserve_moves(self, int64_t count) except -1
    cdef int match_sequence(self, Sequence sequence, int64_t max_blocks, NativeMatch* found) except -1
    # A change: these cannot fail.
    cdef void attach(self, Sequence sequence, NativeMatch& found) noexcept
    cdef void publish(self, list sequences, bint may_share) noexcept
    cdef void publish_one(self, Sequence sequence, bint may_share) noexcept
    cdef void truncate(self, Sequence sequence, int32_t length) noexcept
    cdef void leave(self, Sequence sequence) noexcept
    cdef void release(self, Sequence sequence, const RetentionHint& hint) noexcept
    cdef void note_truncated(self, Sequence sequence) noexcept
    cdef void note_duplicates(self, Sequence sequence, bint has_duplicates) noexcept
    # The truncated block of a sequence that is about to write into it: the tree gives it up, or takes another's copy.
    cdef void give_up_truncated(self, Sequence sequence) noexcept
    # Frees `left` blocks of each group by eviction, as far as there are; 0 where nothing was left to give up.
    cdef int64_t free_blocks(self, vector[int64_t]& left) noexcept
    cdef int64_t clear(self) noexcept
    # Blocks of each group that only the tree holds: all of them can be freed.
    cdef void count_evictable(self, vector[int64_t]& out) noexcept
    # Takes from `missing` what eviction can free for a step in which `writers` write into truncated blocks.
    cdef void subtract_evictable(
        self, vector[int64_t]& missing, list writers, const vector[int32_t]& first_blocks
    ) noexcept

    cdef Query query_of(self, Sequence sequence, int32_t num_blocks) noexcept
    cdef int32_t num_unshared(self, Sequence sequence, int32_t first, int32_t last) noexcept
    cdef void shorten(self, Sequence sequence, int32_t num_blocks) noexcept
    cdef void hand_over(self, Sequence sequence, int32_t lane) noexcept
    cdef int32_t find_heir(self, Sequence sequence, int32_t lane, int32_t block) noexcept
    cdef int32_t own_block(self, Sequence sequence, int32_t place, int32_t lane) noexcept
    cdef int32_t shared_block(self, Sequence sequence, int32_t place, int32_t lane) noexcept
    cdef int32_t known_block(self, Sequence sequence, int32_t place, int32_t lane) noexcept
    cdef int32_t exchange(self, Sequence sequence, int32_t place, int32_t lane) noexcept
    cdef bint is_released_by(self, Sequence sequence, int32_t lane, list writers) noexcept
    cdef void count_unused(self, vector[int64_t]& counts) noexcept
    cdef int64_t reclaim(self, vector[int64_t]& left) noexcept
    cdef void find_unused(self, Sequence sequence, int32_t lane) noexcept
    cdef int64_t evict(self, int32_t component, int64_t amount, vector[int64_t]& left) noexcept
