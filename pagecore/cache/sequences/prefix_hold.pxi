"""The prefix cache's record of one sequence: its receipt, its published blocks and its retention options."""

from libc.math cimport INFINITY, NAN
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t
from libc.string cimport memset
from libcpp.algorithm cimport rotate

from pagecore.index.radix._native cimport HintRange, HintRanges, RetentionHint
from pagecore.index.radix._radix cimport RadixTree, key_of, read_marks

# Tiers whose offers a sequence remembers: more than a cache has at a time.
cdef enum:
    MAX_NOTES = 4


cdef class PrefixHold:
    """A sequence's hold on its published prefix; empty until `PrefixCache.attach` or `inherit` fills it.

    Parameters
    ----------
    tree : RadixTree
    options : RetentionOptions
    max_blocks : int
        Blocks that a row has room for. Spans are read up to there, since the sequence may grow into them.
    shares_ahead : bool
        The row may share blocks past the end of its receipt.
    """

    def __cinit__(self, RadixTree tree=None, options=None, int32_t max_blocks=0, bint shares_ahead=False):
        self.priority = self.rank = self.valued_at = NAN
        self.time_to_live = INFINITY
        self.publish_limit = INT32_MAX
        if tree is None:
            return
        self.options = options
        self.receipt = tree.blank_receipt(None if options.namespace is None else key_of(options.namespace))
        if shares_ahead:
            self.ahead = tree.blank_receipt(self.receipt.key)
        self.offers_whole = options.spans is not None or tree.policy in ("priority", "rank")
        if options.spans is not None:
            read_marks(options.spans, tree.block_size, max_blocks, self.marks)
        if options.priority is not None:
            self.priority = options.priority
        if options.priority_ranges is not None:
            self.read_ranges(options.priority_ranges, tree.block_size)
        if options.time_to_live is not None:
            self.time_to_live = options.time_to_live
        if options.rank is not None:
            self.rank = options.rank

    cdef int read_ranges(self, tuple given, int64_t block_size) except -1:
        """Read ``(end, priority, seconds)`` of each range; a block belongs to that of its first token."""
        cdef HintRange one
        for end, priority, seconds in given:
            one.end = INT64_MAX if end is None else (<int64_t>end + block_size - 1) // block_size
            one.hint.priority = NAN if priority is None else <double>priority
            one.hint.expiry = INFINITY
            one.hint.rank = NAN
            self.ranges.push_back(one)
            self.ranges_to_live.push_back(INFINITY if seconds is None else <double>seconds)
        return 0

    cdef BackupNote* note_of(self, int64_t tier) noexcept:
        cdef size_t i
        for i in range(self.backups.size()):
            if self.backups[i].tier == tier:
                rotate(self.backups.begin() + i, self.backups.begin() + i + 1, self.backups.end())
                return &self.backups.back()
        return NULL

    cdef BackupNote* make_note(self, int64_t tier) except NULL:
        cdef BackupNote note
        cdef BackupNote* found = self.note_of(tier)
        if found != NULL:
            return found
        memset(&note, 0, sizeof(BackupNote))
        note.tier = tier
        self.backups.push_back(note)
        if self.backups.size() > MAX_NOTES:
            self.backups.erase(self.backups.begin(), self.backups.begin() + 1)
        return &self.backups.back()

    cdef void shorten_notes(self, int32_t num_blocks, int32_t state_tokens) noexcept:
        cdef size_t i
        for i in range(self.backups.size()):
            self.backups[i].num_blocks = min(self.backups[i].num_blocks, num_blocks)
            if self.backups[i].state_tokens > state_tokens:
                self.backups[i].state_tokens = 0

    cdef bint needs_values(self, double now) noexcept:
        cdef double shortest = self.time_to_live
        cdef double seconds
        if self.priority != self.priority and self.rank != self.rank and self.ranges.empty():
            return False
        for seconds in self.ranges_to_live:
            shortest = min(shortest, seconds)
        return self.valued_at != self.valued_at or (shortest < INFINITY and self.valued_at != now)

    cdef bint has_ahead(self) noexcept:
        return self.ahead is not None and self.ahead.native.node >= 0

    cdef bint has_component_ahead(self, int32_t component) noexcept:
        return self.has_ahead() and (self.ahead.native.components >> component) & 1 != 0

    cdef int32_t truncated_block(self) noexcept:
        if not self.truncated_ahead:
            return self.published
        return <int32_t>self.ahead.depth() - 1

    cdef PrefixHold blank_copy(self):
        cdef PrefixHold other = PrefixHold.__new__(PrefixHold)
        other.receipt = self.receipt.tree.blank_receipt(self.receipt.key)
        if self.ahead is not None:
            other.ahead = self.receipt.tree.blank_receipt(self.receipt.key)
        other.marks.assign(self.marks.begin(), self.marks.end())
        other.options = self.options
        other.offers_whole = self.offers_whole
        other.is_ended = self.is_ended
        other.is_private = self.is_private
        other.publish_limit = self.publish_limit
        other.offered_state = self.offered_state
        other.priority = self.priority
        other.time_to_live = self.time_to_live
        other.rank = self.rank
        other.ranges.assign(self.ranges.begin(), self.ranges.end())
        other.ranges_to_live.assign(self.ranges_to_live.begin(), self.ranges_to_live.end())
        other.valued_at = self.valued_at
        return other

    cdef RetentionHint hint(self, double now) noexcept:
        cdef RetentionHint hint
        hint.priority = self.priority
        hint.expiry = INFINITY if self.time_to_live == INFINITY else now + self.time_to_live
        hint.rank = self.rank
        return hint

    cdef HintRanges hint_ranges(self, double now) noexcept:
        cdef size_t i
        for i in range(self.ranges.size()):
            self.ranges[i].hint.expiry = now + self.ranges_to_live[i]
        return HintRanges(self.ranges.data(), self.ranges.size())
