from libc.stdint cimport int32_t, int64_t

from pagecore.cache.prefix._prefix cimport PrefixCache
from pagecore.cache.sequences._sequences cimport BackupNote, PrefixHold, Sequence
from pagecore.cache.state._state cimport CacheState, StoredBlocks
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.radix._native cimport HintRange, HintRanges, Mark, NativeMatch, NativeReceipt, Query, RetentionHint
from pagecore.index.radix._radix cimport RadixTree, Receipt
from pagecore.native.std cimport vector


# index.pxi

cdef class HostIndex:
    cdef readonly RadixTree tree
    cdef readonly tuple pools           # BlockPool of each group, then that of the state slots
    cdef readonly PrefixCache prefix    # of the device
    cdef vector[int32_t] groups         # of each lane of the tree: those without a window come first
    cdef vector[int32_t] components     # of each group
    cdef int32_t num_full               # lanes without a window
    cdef int32_t num_lanes
    cdef bint has_states
    cdef bint uses_hints                # the policy orders by values that sequences carry
    cdef public bint is_exclusive       # what the device has as well is evicted first
    cdef public double min_priority     # what has a smaller one leaves the device without a copy
    cdef readonly int64_t block_size
    cdef public object tail             # SpilledTail of a path that is still on the device; None for none
    cdef readonly object leases         # WeakSet of the Leases that hold blocks
    cdef vector[NativeReceipt] lost     # receipts of holds that were collected without a release
    cdef size_t num_holding             # Number of EntryHolds with a receipt
    cdef int64_t number                 # among the host tiers of the cache, from 1 on
    cdef int64_t num_evictions          # times that blocks or states left the tree
    cdef int64_t num_offers             # backups that were noted in the hold of their sequence
    cdef readonly int64_t num_evicted_blocks
    cdef readonly int64_t num_evicted_states
    cdef readonly int64_t num_cut       # backups for which there was not enough room

    # The pool of a group, or of the states for num_lanes.
    cdef BlockPool pool(self, size_t group)
    # Before a hold takes a receipt: room for the receipts of all holds, because a destructor cannot fail.
    cdef int reserve_lost(self) except -1
    # First call of every operation: releases lost receipts, and forgets empty namespaces.
    cdef int sweep(self) except -1
    # Returns True if eviction can make `needed` blocks of each group free, states last.
    cdef bint can_make_room(self, const vector[int64_t]& needed) noexcept
    # Returns True if a prefix of `num_blocks` blocks needs the block of a component at an index to be reused.
    cdef bint is_needed(self, int32_t component, int64_t index, int64_t num_blocks) noexcept
    # Evicts until the pools have `needed` free blocks of each group, states last; returns False if they do not.
    cdef bint make_room(self, const vector[int64_t]& needed) noexcept
    cdef int64_t evict(self, int32_t component, int64_t amount) noexcept
    cdef void free_gone(self, const vector[vector[int32_t]]& gone) noexcept


# Number of a namespace in a tree; -1 if the tree does not have it. `key` is the result of key_of; None: 0.
cdef int32_t space_of(RadixTree tree, object key) except -2


# path.pxi

cdef class Path:
    cdef RadixTree tree
    cdef Receipt receipt
    cdef int64_t num_blocks
    cdef vector[vector[int32_t]] ids    # of each lane of the tree; 0 where a window has none

    # Pins the blocks that the full component has of a query, up to `limit`, and what windows have before their end.
    cdef int pin(self, RadixTree tree, object key, const Query& query, int64_t limit) except -1
    # Reads the ids; the tree may replace those of pinned blocks, too.
    cdef int read(self) except -1
    cdef void release(self) noexcept


# Offers entries of a prefix to the host's tree, which takes those that it lacks; returns the number of leading blocks
# that the tree has then. `lanes` has the host block at each index of the prefix, 0 for none; the ids that the tree has
# are filled in. A state of `state_blocks` blocks is offered if that is above 0.
cdef int64_t publish(
    HostIndex host, object key, Query query, vector[vector[int32_t]]& lanes, int64_t num_blocks, int64_t state_blocks,
    int32_t state_slot, const RetentionHint& hint, HintRanges ranges, double now
) except -1


# lease.pxi

cdef class EntryLease:
    cdef object __weakref__
    cdef readonly HostIndex index
    cdef StoredBlocks stored    # of each group, states last

    cdef void give_up(self) noexcept


cdef class EntryHold(EntryLease):
    cdef Receipt receipt
    cdef double rank            # of the prefix after the release; NaN leaves it
    cdef readonly int64_t num_tokens
    cdef readonly int64_t state_tokens  # tokens before the state that it holds; 0 for none

    # Takes a receipt, for which the index has room; see `HostIndex.reserve_lost`.
    cdef void take_receipt(self, Receipt receipt) noexcept


# Tokens, spans and namespace of a prefix, which the object owns.
cdef class PrefixKey:
    cdef object ids
    cdef object key             # of the namespace
    cdef vector[Mark] marks
    cdef int64_t num_blocks

    cdef Query query(self, int64_t num_blocks) except *


cdef PrefixKey prefix_key(int64_t block_size, const int32_t[::1] ids, object options)
# Spans of a prefix as a tuple of (start, end, digest); None if it has none.
cdef object spans_of(PrefixKey prefix, int64_t block_size)
# A lease of `counts` blocks of each group, states last; None if they are short. The caller has made room.
cdef EntryLease take_lease(HostIndex index, const vector[int64_t]& counts)


# backup.pxi

cdef class Backup:
    cdef CacheState state
    cdef HostIndex host
    cdef PrefixKey key
    cdef readonly object options
    cdef PrefixHold hold                        # of the sequence; None for the copy of an evicted path
    cdef RetentionHint hint
    cdef vector[HintRange] ranges               # values by block, in place of `hint`; empty for none
    cdef EntryLease lease
    cdef list parts                             # earlier parts of the copy, whose blocks are in `lanes`; None for none
    cdef Path path                              # of the host, pinned
    cdef vector[vector[int32_t]] lanes          # of each lane: the new host block at each index, 0 for none
    cdef int64_t end                            # blocks of the prefix
    cdef int64_t state_blocks
    cdef int32_t state_slot                     # of the host
    cdef readonly Receipt receipt               # of the device, while the copy runs
    cdef StoredBlocks sources                   # the same
    cdef vector[vector[int32_t]] source_ids     # of each group, states last
    cdef int64_t first                          # blocks that the host had before
    cdef int64_t number                         # among the host's offers; 0 if the hold of the sequence has no note
    cdef bint is_cut                            # the host has no room for something that the prefix needs
    cdef readonly int64_t num_blocks
    cdef readonly list pairs

    # Lists what the host lacks of a sequence, and takes host blocks for it; returns False if there is nothing to do. A
    # host that orders by values takes those of a sequence although it lacks none of its blocks.
    cdef bint plan(self, Sequence sequence, int64_t most, bint is_last) except -1
    cdef bint has_copies(self) noexcept
    # Sets `state_blocks` to the blocks before the state to copy, 0 for none; returns the state's slot.
    cdef int32_t choose_state(self, Sequence sequence, int32_t checkpoint) except -1
    # Returns True if the host has the state at the end of `state_blocks` blocks.
    cdef bint has_state(self) except -1
    cdef int read_path(self, Sequence sequence) except -1
    # Leaves the device's block of each place that the host lacks in `lanes`, and writes their number by group.
    cdef int list_missing(self, vector[int64_t]& counts) except -1
    # Makes room in the host; if it is short, shortens the prefix to what fits. Returns False if nothing does.
    cdef bint fit(self, vector[int64_t]& counts) except -1
    cdef int64_t keep_last(self, int32_t lane, int64_t room) noexcept
    # Notes in the hold of the sequence that its first blocks and its checkpoint were offered.
    cdef void note_offer(self, int32_t published, int32_t checkpoint) noexcept
    # Returns the note in the hold of the sequence if it is of this backup, else NULL.
    cdef BackupNote* own_note(self) noexcept
    # Takes the host's blocks, lists the copies, and replaces the device's blocks in `lanes` by the host's.
    cdef int take(self, int32_t slot, const vector[int64_t]& counts) except -1
    cdef int pin_sources(self, Sequence sequence) except -1
    # Publishes the copied blocks in the host's tree, and releases what the backup holds.
    cdef int settle(self) except -1
    # Lets the next backup of the sequence copy the blocks again, unless a later one has: nothing was published.
    cdef void forget(self) noexcept
    cdef void release(self) noexcept


# promotion.pxi

cdef class Promotion:
    cdef CacheState state
    cdef HostIndex host
    cdef PrefixCache prefix
    cdef PrefixKey key
    cdef Path device
    cdef StoredBlocks lease
    cdef vector[vector[int32_t]] places     # of each lane: the indices of the blocks that the device lacks
    cdef int32_t state_slot                 # of the host
    cdef int64_t tenant
    cdef readonly EntryHold hold
    cdef readonly int64_t num_blocks
    cdef readonly list pairs

    # Pins the longest reusable prefix of the host, up to `limit` blocks; returns the blocks that it has, or 0 if they
    # are less than `min_blocks` more than those of the device.
    cdef int64_t choose(self, int64_t limit, int64_t min_blocks) except -1
    cdef void unlock(self, Receipt receipt) noexcept
    cdef int hold_host(self, Receipt receipt, const NativeMatch& found) except -1
    # Takes device blocks for what the device lacks of the held prefix; returns the blocks that a prefix may have.
    cdef int64_t take(self, int64_t num_blocks, spill) except -1
    cdef int list_missing(self, int64_t num_blocks, vector[int64_t]& counts) except -1
    cdef int allocate(self) except -1
    # Inserts the copied blocks into the device's tree.
    cdef int commit(self, int64_t num_blocks) except -1
    cdef void share_taken(self) noexcept
    # Returns the blocks of the prefix that the device can reuse now.
    cdef int64_t num_reusable(self, int64_t limit) except -1
    # Releases what the promotion holds of the device; the tree keeps what it took.
    cdef void end(self) noexcept
    cdef void release_hold(self) noexcept


# tail.pxi

cdef class SpilledPart:
    cdef EntryLease lease
    cdef int64_t begin
    cdef int64_t num_blocks
    cdef bint is_running            # the copy has not ended
    cdef bint is_dropped
    cdef readonly list pairs


cdef class SpilledTail:
    cdef CacheState state
    cdef HostIndex host
    cdef PrefixKey key
    cdef int64_t start
    cdef int64_t end
    cdef int64_t first                      # leading blocks of the path that the host's tree had at the beginning
    cdef vector[vector[int32_t]] lanes      # of each lane: the host block at each index of the path, 0 for none
    cdef list parts                         # the last ones of the path first

    # Returns True if a path ends where the tail starts.
    cdef bint continues_at(self, object key, vector[int32_t]& tokens, vector[Mark]& marks)
    # Returns True if a prompt continues from the device's part of the path into the tail.
    cdef bint is_asked_for(self, object key, const int32_t[::1] tokens)
    # Returns True if a prefix has all blocks of the path.
    cdef bint is_within(self, PrefixKey prefix)
    # Copies the blocks [begin, start); returns False if the host has no room. Later parts are dropped for them.
    cdef bint extend(self, int64_t begin, vector[vector[int32_t]]& device, copy) except -1
    cdef int count(self, int64_t begin, vector[vector[int32_t]]& device, vector[int64_t]& counts) except -1
    cdef object list_copies(self, EntryLease lease, int32_t group, int64_t begin, const vector[int32_t]& device)
    cdef void take_blocks(
        self, EntryLease lease, int32_t lane, int32_t group, int64_t begin, const vector[int32_t]& device
    ) noexcept
    cdef int drop_last(self) except -1
    # Drops blocks at the end of the path, so that `counts` of each group come nearer to being free.
    cdef int shorten(self, vector[int64_t]& counts) except -1
    # Drops the blocks from `end` on; those of a part whose copy runs leave together.
    cdef int cut(self, int64_t end) except -1
    cdef int cut_last(self, int64_t end) except -1
    # Makes room for what the host lacks before the tail; returns False if nothing of the tail is left then.
    cdef bint fit_beginning(self, const vector[int64_t]& counts) except -1
    # Plans the copy of what the host lacks before the tail; returns False if nothing connects the two.
    cdef bint fill(self, Backup one) except -1
    cdef int64_t read_device(self, vector[vector[int32_t]]& lanes) except -1


# A tail without parts at the end of a path.
cdef SpilledTail new_tail(
    CacheState state, HostIndex host, object key, vector[int32_t]& tokens, vector[Mark]& marks
)


# stream.pxi

cdef class StreamedPart:
    cdef CacheState state
    cdef EntryLease lease                       # None if the part has no blocks
    cdef StoredBlocks sources                   # of the device, while the copy runs
    cdef vector[vector[int32_t]] source_ids     # of each group
    cdef readonly Receipt receipt               # of the device, while the copy runs
    cdef bint is_dropped
    cdef readonly bint is_running
    cdef readonly list places
    cdef readonly list pairs

    # Lists the blocks of the device in [begin, end), and their number in each group.
    cdef int plan(self, HostIndex host, Path path, int64_t begin, int64_t end, vector[int64_t]& counts) except -1
    # Holds the blocks of the device, and lists the copies.
    cdef int pin(self, HostIndex host, Path path) except -1
    cdef void end_copy(self) noexcept


# Blocks of a sequence before the first one with a smaller priority than the host keeps.
cdef int64_t count_kept(HostIndex host, PrefixHold hold) noexcept
