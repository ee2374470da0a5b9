from libc.stdint cimport int32_t, int64_t

from pagecore.index.radix._radix_query cimport HintRange, HintRanges, Mark, RetentionHint
from pagecore.index.radix._radix_tree cimport RadixTree, Receipt
from pagecore.native.std cimport vector


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
    # Leading blocks of the sequence that the tree has and the receipt covers; INT32_MAX: never publish it.
    cdef int32_t published
    # Blocks that may be published: later ones were revoked, or follow such a block. INT32_MAX: all.
    cdef int32_t publish_limit
    # Tokens of the newest checkpoint that was offered to the tree; 0 for none, and in a cache without states.
    cdef int32_t offered_state
    # Blocks, and tokens of the newest checkpoint, that were offered to a tier; only to skip offers that bring nothing.
    cdef int32_t backed_up, backed_up_state
    cdef object options         # the RetentionOptions; None in an empty hold of a cache without a prefix cache
    # The sequence was compacted: blocks past `published` are never published, because tokens before them are missing.
    cdef bint is_sealed
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
    # An empty hold with the same options.
    cdef PrefixHold blank_copy(self)
    cdef RetentionHint hint(self, double now) noexcept
    # The ranges, whose priorities expire later than `now`; valid until the next call.
    cdef HintRanges hint_ranges(self, double now) noexcept
