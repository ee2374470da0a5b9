from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.cache.sequences._kept cimport KeptKeys
from pagecore.cache.sequences._sequences cimport PrefixHold, Sequence
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.radix._native cimport Int32Pointer, NativeMatch, Query, RetentionHint
from pagecore.index.radix._radix cimport RadixTree, Receipt
from pagecore.index.states._states cimport StateTable
from pagecore.index.tables._tables cimport BlockTables
from pagecore.native.std cimport vector


# watched.pxi

# Durations in buckets: `counts` has one more entry than there are bounds.
cdef class Durations:
    cdef vector[int64_t] bounds     # ns, ascending
    cdef vector[int64_t] counts
    cdef double total               # ns

    cdef void add(self, int64_t duration) noexcept


cdef class WatchedPool(BlockPool):
    cdef readonly BlockPool pool
    cdef vector[int32_t] sample_of  # number of each sampled block; 0 for the others
    # Of each sample, in ns: the time at which the tree took the block, and that of its last use; 0 if the tree has not
    # taken it since the start.
    cdef vector[int64_t] taken_at
    cdef vector[int64_t] used_at
    cdef Durations lifetimes, idle_times, reuse_gaps

    # Note that the tree's blocks are part of a prefix hit.
    cdef void note_hit(self, const int32_t* blocks, size_t count) noexcept


# cache.pxi

cdef class PrefixCache:
    cdef readonly RadixTree tree
    cdef readonly str policy
    cdef BlockTables tables
    cdef StateTable states          # None in a cache without states
    cdef list by_row                # the sequence in each row of the tables; None for a free row
    cdef list pools                 # of each lane
    cdef bint has_lost_watch        # the object that timed the lives of blocks was collected
    cdef vector[int32_t] groups     # of each lane: those without a window come first
    cdef vector[int32_t] components  # of each group
    cdef vector[int32_t] lane_of    # of each group but the tails of sealed blocks, which come last
    cdef vector[KeptKeys] kept      # of each window
    cdef bint publishes_sealed      # blocks are published once they are sealed
    cdef bint gives_up_last         # a hit ends one block earlier
    cdef int32_t num_full           # lanes without a window
    cdef bint shares_ahead          # states, windows and lanes without a window: rows share past their receipts
    cdef int32_t num_lanes
    cdef int32_t block_size
    cdef object clock               # None where the policy does not use time
    cdef readonly double now        # time of the current call; minus infinity without a clock
    cdef int32_t num_truncated      # holds with `truncated_inside_block`
    cdef int32_t num_tentative      # holds that are not counted yet
    cdef int32_t num_duplicated     # holds with `has_duplicates`
    cdef int64_t num_versions       # calls that have replaced whole computed blocks of sequences
    cdef int64_t num_tiers          # host tiers that the cache has had; the newest has this number
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
    cdef bint counts_lives(self) noexcept
    cdef int reserve_moves(self, int64_t count) except -1
    cdef int match_sequence(self, Sequence sequence, int64_t max_blocks, NativeMatch* found) except -1
    cdef int32_t max_match_length(self, int32_t num_tokens) noexcept
    # Commit: these cannot fail.
    cdef void attach(self, Sequence sequence, int32_t row, NativeMatch& found, bint is_tentative) noexcept
    cdef void count_first(self, Sequence sequence, int32_t row) noexcept
    cdef void end_tentative(self, PrefixHold hold) noexcept
    cdef void count(self, PrefixHold hold, int32_t row) noexcept
    cdef int32_t num_initial_blocks(self, PrefixHold hold, int32_t component) noexcept
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
    # Note that other tokens take the place of a whole block that the sequence of a hold has computed.
    cdef void renew_version(self, PrefixHold hold) noexcept
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


# publish.pxi

# Number the namespace of each sequence that may publish its first block. The numbers are valid until code of the caller
# may run or the lock is released: publish before that.
cdef int number_namespaces(PrefixCache prefix, list sequences) except -1

# Offer the full, computed and known blocks of sequences to the tree, and extend their receipts over them; cannot fail.
# Blocks that other rows share are published among the first `shared` of a sequence only, which all of these rows
# publish.
# Call `number_namespaces` before.
cdef void publish(PrefixCache prefix, list sequences) noexcept
cdef void publish_one(PrefixCache prefix, Sequence sequence, int32_t shared) noexcept
# Returns how many of the first `whole` blocks of a sequence can be in the tree.
cdef int32_t num_publishable(PrefixCache prefix, Sequence sequence, int32_t whole, int32_t shared) noexcept
# Returns how many blocks of a sequence the tree may have, if no other row holds them: those that are complete, known
# and, next to sealed blocks, sealed.
cdef int32_t num_complete(PrefixCache prefix, Sequence sequence) noexcept

# Give the published blocks of a sequence that is being removed the values of its options: they may all come from other
# sequences, and their time to live begins now.
cdef void renew_values(PrefixCache prefix, Sequence sequence) noexcept


# truncated.pxi

# Release the tree's claim on the block inside which a sequence was truncated, before the sequence writes to it.
cdef void give_up_truncated(PrefixCache prefix, Sequence sequence) noexcept

# Return True if the sequence will be the only holder of its truncated block of a lane once all `writers` gave theirs
# up, so that its write needs no copy.
cdef bint becomes_exclusive(PrefixCache prefix, Sequence sequence, int32_t lane, list writers) noexcept


# evict.pxi

# Append numbers of blocks by group. Cython's own conversion of a list would copy the vector, and an allocation that
# fails there ends the process.
cdef int read_counts(object counts, vector[int64_t]& out) except -1

# Subtract from `missing` the blocks of each group that eviction can free for a step in which `writers` write to the
# blocks inside which they were truncated; `first_blocks` as in `StepPlan`.
cdef void subtract_evictable(
    PrefixCache prefix, vector[int64_t]& missing, list writers, const vector[int32_t]& first_blocks
) noexcept

# Evict until `left` blocks of each group are freed or nothing more can be evicted; subtract the freed blocks from
# `left`, and return the number of blocks that the tree evicted.
cdef int64_t free_blocks(PrefixCache prefix, vector[int64_t]& left) noexcept

# Evict up to `amount` blocks of a component; subtract the freed blocks of each group from `left`, and return the number
# of blocks that the tree evicted.
cdef int64_t evict(PrefixCache prefix, int32_t component, int64_t amount, vector[int64_t]& left) noexcept

# Drop the references to what the tree evicted, by lane, states last; subtract the freed blocks of each group from
# `left`.
cdef void free_gone(PrefixCache prefix, const vector[vector[int32_t]]& gone, vector[int64_t]& left) noexcept

# Evict states until `wanted` slots are freed or no state is left; return the number of freed slots. A state that a row
# holds too frees none.
cdef int64_t free_slots(PrefixCache prefix, int64_t wanted) noexcept

# Evict up to `amount` states, also those that idle rows keep as their checkpoints; return the number of slots that this
# freed, or -1 if no state is left.
cdef int64_t evict_states(PrefixCache prefix, int64_t amount) noexcept

# The number of states that only the tree holds.
cdef int64_t num_unused_states(PrefixCache prefix) except -1

# Evict every block that no row uses, and every state; return the number of freed blocks.
cdef int64_t clear(PrefixCache prefix) noexcept
