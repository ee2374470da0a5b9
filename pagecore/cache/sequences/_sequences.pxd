from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.index.radix._native cimport HintRange, HintRanges, Mark, RetentionHint
from pagecore.index.radix._radix cimport RadixTree, Receipt
from pagecore.index.tables._tables cimport BlockTables
from pagecore.native.std cimport vector


# cross_contents.pxi

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


# prefix_hold.pxi

# Note of the blocks of a sequence that a host tier was offered; only to skip offers that bring nothing.
ctypedef struct BackupNote:
    int64_t tier            # its number among those of the cache
    int64_t number          # of the newest offer, among all of the tier
    int64_t evictions       # of the tier, before that offer
    int32_t num_blocks
    int32_t state_tokens    # before the newest checkpoint; 0 for none
    bint is_running         # the copies of the newest offer have not ended


cdef class PrefixHold:
    cdef Receipt receipt
    # Pins the components whose blocks the row shares past `receipt`, in a cache with states and windows; not held, or
    # None, where there are none.
    cdef Receipt ahead
    cdef vector[Mark] marks     # of the spans, up to the length of a row
    cdef bint offers_whole      # published from the start each time: it has spans, or a value that the tree keeps
    cdef double priority        # NaN for none
    cdef double time_to_live    # infinite for none
    cdef double rank            # NaN for none
    cdef vector[HintRange] ranges           # priorities by block, in place of `priority`; empty for none
    cdef vector[double] ranges_to_live      # seconds of each range, infinite for none
    cdef double valued_at       # time at which the published blocks last got their values; NaN if they never did
    # Number of its namespace in the tree; valid while the receipt is not empty, or within one call.
    cdef int32_t namespace_number
    # Leading blocks of the sequence that the tree has and the receipt covers; INT32_MAX: publish none, until the
    # sequence is truncated to 0 tokens.
    cdef int32_t published
    # Its keys depend on an encoder output that its namespace does not name, because it has no digest or a swap space
    # rounded it: it is never published, not even after a truncation to 0 tokens.
    cdef bint is_private
    # Blocks that may be published: later ones were revoked, or follow such a block. INT32_MAX: all.
    cdef int32_t publish_limit
    # Tokens of the newest checkpoint that was offered to the tree; 0 for none, and in a cache without states.
    cdef int32_t offered_state
    # The prefix that was found when the sequence was added; it is not counted yet if the sequence is tentative.
    cdef int32_t asked_tokens, hit_blocks, shared_blocks
    cdef bint is_tentative
    # No step has computed tokens of the sequence, or the observer of the cache has not counted its prefix yet.
    cdef bint is_new
    # The sequence was cut to what it reuses, and has computed nothing since.
    cdef bint begins_again
    # Origin of the reused prefix, as the observer of the cache notes it; None if all of it was cached.
    cdef object origin
    # Of each host tier that was offered blocks: those of the few tiers whose notes were used last, in that order.
    cdef vector[BackupNote] backups
    # Number of the last call that replaced a whole computed block of the sequence; 0 before the first. While it is the
    # same, equal numbers of computed blocks have the same tokens.
    cdef int64_t version
    cdef object options         # the RetentionOptions; None in an empty hold of a cache without a prefix cache
    # The sequence was compacted: blocks past `published` are never published, because tokens before them are missing.
    cdef bint is_ended
    # The sequence was truncated inside block `published`, and the receipt still covers that block; or inside the last
    # block of `ahead`.
    cdef bint truncated_inside_block
    cdef bint truncated_ahead
    # The sequence owns blocks whose content the tree already has from another sequence.
    cdef bint has_duplicates

    # True if `ahead` is held; if it pins a component.
    cdef bint has_ahead(self) noexcept
    cdef bint has_component_ahead(self, int32_t component) noexcept
    # Index of the block inside which the sequence was truncated.
    cdef int32_t truncated_block(self) noexcept
    cdef int read_ranges(self, tuple given, int64_t block_size) except -1
    # True if the published blocks have not got their values yet, or have had them for a part of their time to live.
    cdef bint needs_values(self, double now) noexcept
    # The note of a host tier, which it makes the last: NULL if there is none; a new one then. It moves the other notes.
    cdef BackupNote* note_of(self, int64_t tier) noexcept
    cdef BackupNote* make_note(self, int64_t tier) except NULL
    # Limits what the tiers were offered: they lack what the sequence computes next in place of the rest.
    cdef void shorten_notes(self, int32_t num_blocks, int32_t state_tokens) noexcept
    # An empty hold with the same options.
    cdef PrefixHold blank_copy(self)
    cdef RetentionHint hint(self, double now) noexcept
    # The ranges, whose priorities expire later than `now`; valid until the next call.
    cdef HintRanges hint_ranges(self, double now) noexcept


# sequence.pxi

cdef class Sequence:
    cdef readonly object id
    cdef object owner           # the CacheState; None before it is in a cache, and after it was removed
    cdef readonly int32_t row   # in the cache's block tables; -1 once removed, and while swapped out
    cdef readonly object swap_space  # the space that holds its blocks while it is swapped out; else None
    cdef object stored          # its StoredBlocks in that space; else None
    cdef int32_t* ids           # the known token ids
    cdef int32_t ids_capacity
    cdef int32_t known          # number of known ids
    cdef int32_t computed       # number of tokens whose key and value are written
    cdef int32_t sealed         # number of leading tokens in sealed blocks, a multiple of the block size
    cdef int32_t dropped        # number of tokens that compact removed: positions run ahead of the cache by it
    cdef int32_t compacted      # number of computed tokens after the last compact; 0 without one
    cdef int32_t cached         # number of computed tokens that came from the prefix cache
    cdef int32_t matched        # tokens in blocks that the prefix cache shared when the sequence was added
    cdef CrossContent cross     # its encoder output; None if it has none yet, or in a cache without cross attention
    cdef object namespace       # that of an encoder output which it gets later; None in a cache without cross attention
    cdef PrefixHold hold        # the prefix cache's record of the sequence; None in a cache without a prefix cache
    cdef int64_t tenant         # of its namespace in `Tenants`; 0 in a cache that does not scrub
    cdef int32_t pending        # tokens of the step in flight; -1 without one
    cdef object flight          # the Step in flight; None without one
    cdef int32_t step_index     # its index among the sequences of that step
    cdef uint64_t last_list     # number of the last checked list that had this sequence: finds duplicates without a set

    # Reserves room for `count` more ids; raises NotEnoughMemory or ShapeError.
    cdef int reserve(self, int64_t count) except -1
    # Adds ids for which room was reserved.
    cdef void append(self, const int32_t* ids, int32_t count) noexcept


# Returns the number of leading blocks that are full of computed tokens with known ids.
cdef inline int32_t num_whole(Sequence sequence, int32_t block_size) noexcept:
    return min(sequence.known, sequence.computed) // block_size


# Returns a sequence that is not in a cache yet.
cdef Sequence new_sequence(object id, const int32_t[::1] ids)

# Returns `sequence` as a live Sequence of `owner`; with `idle`, it must have a row and no step in flight.
cdef Sequence require(object owner, object sequence, bint idle)
# Returns `sequences` as a list in which each passed `require` and none occurs twice.
cdef list require_each(object owner, object sequences, bint idle)
