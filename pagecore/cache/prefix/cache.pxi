"""The prefix cache: computed blocks that outlive their sequence, for sequences with the same prefix.

The tree decides which blocks are cached, and the pools count their holders. This package keeps the two in agreement.
Its callers hold the lock of the cache.

P1: The tree holds one reference to every block that it knows, and each sequence one to every block of its row.
P2: A block that a row shares with the tree lies on the path that a receipt of the sequence covers. An evictable block
    therefore has no other holder, and evicting it frees it. The converse does not hold: a receipt may cover blocks
    that no row uses, because their window has moved on, or because the sequence computed the same tokens in blocks of
    its own ("duplicates"). Those blocks can be freed too.
P3: In a cache with states, a row may hold blocks past the sequence's computed tokens: those that its prefix hit shares
    past the state. `published` counts them, unless the cache has windows: what a row keeps of those begins before the
    state, and the receipt ends there. The receipt `ahead` then covers the blocks that are shared past it, until the
    sequence has published its own: those of groups without a window, and of windows that reach back to the state.
    Where prefixes are sealed blocks, rows share none past the state.
P4: The first `published` blocks of a sequence are those of its receipt's path, token by token. The path is one block
    longer if the sequence was truncated inside a block; it shares that block with the tree until it writes to it.

With states, a prefix can be reused up to a state in the tree, which holds one reference to its slot. A row that reads
or keeps the state holds references of its own, so that the tree may evict any state.

Calls that plan a change may fail and change nothing that the caller can observe. Calls that commit a change cannot
fail: they allocate nothing and run no Python code. Publishing is the exception: where the tree lacks memory, the blocks
stay unpublished until the next commit.
"""

from libc.math cimport INFINITY
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdlib cimport calloc, free

from pagecore.cache.sequences._kept cimport kept_keys
from pagecore.cache.sequences._sequences cimport PrefixHold, Sequence
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.radix._native cimport Int32s, Marks, NativeMatch, Query, RetentionHint
from pagecore.index.radix._radix cimport RadixTree, Receipt
from pagecore.index.states._states cimport StateTable
from pagecore.index.tables._tables cimport BlockTables
from pagecore.native.std cimport span

import math

from pagecore.cache.prefix.retention import as_finite
from pagecore.errors import NotEnoughMemory, UnsupportedOption
from pagecore.storage.checks import shown


cdef class PrefixCache:
    """The prefix tree of a cache, kept in agreement with its block tables and pools.

    The groups without a window are the lanes of the tree's full component; each group with a window is a component of
    its own.

    Parameters
    ----------
    attended : list of AttendedKeys
        Limits of the keys that a query of each group sees; without the tails of sealed blocks, which are the last
        groups of the tables and have no cached blocks.
    tables : BlockTables
    by_row : list
        The sequence in each row of the tables, or None; the cache keeps the list up to date.
    policy : str
        Eviction policy of the tree.
    clock : callable
        Returns the time in seconds; only the policy "priority" calls it.
    gives_up_last : bool
        A hit drops its last block.
    states : StateTable, optional
        Slots of the rows; None without layers that keep states.
    publishes_sealed : bool
        Publish only blocks that are sealed.
    """

    def __cinit__(
        self,
        list attended not None,
        BlockTables tables not None,
        list by_row not None,
        str policy,
        clock,
        bint gives_up_last=False,
        StateTable states=None,
        bint publishes_sealed=False,
    ):
        if not callable(clock):
            raise UnsupportedOption(f"clock is {shown(clock)}; give a function that returns seconds")
        full = [group for group, keys in enumerate(attended) if not keys.is_limited]
        windowed = [group for group, keys in enumerate(attended) if keys.is_limited]
        for group in windowed:
            self.kept.push_back(kept_keys(group, attended[group]))
        self.gives_up_last = gives_up_last
        self.publishes_sealed = publishes_sealed
        self.block_size = tables.block_sizes[0]
        # A hit has all keys that a sequence keeps: what a row holds is pinned by its receipt (P2).
        self.tree = RadixTree(
            self.block_size,
            full=len(full),
            windows=[
                min(max(keys.window - 1 + keys.lookahead, 0 if keys.chunk else 1), INT32_MAX) for keys in self.kept
            ],
            chunks=[keys.chunk for keys in self.kept],
            sinks=[keys.sinks for keys in self.kept],
            policy=policy,
            states=states is not None,
            state_interval=None if states is None else math.lcm(states.chunk, self.block_size),
            min_kept=2 if gives_up_last else 0,
        )
        self.states = states
        self.policy = policy
        self.tables = tables
        self.transfers = set()
        self.by_row = by_row
        self.clock = clock if policy == "priority" else None
        self.now = -INFINITY
        self.num_full = len(full)
        self.num_lanes = len(attended)
        self.shares_ahead = states is not None and len(full) > 0 and len(windowed) > 0 and not publishes_sealed
        self.components.resize(self.num_lanes)
        self.lane_of.resize(self.num_lanes)
        self.pools = []
        for lane, group in enumerate([*full, *windowed]):
            self.groups.push_back(group)
            self.lane_of[group] = lane
            self.components[group] = 0 if lane < self.num_full else 1 + lane - self.num_full
            self.pools.append(tables.pools[group])
        self._reserve_scratch()

    def __dealloc__(self):
        free(self.ids)

    def _reserve_scratch(self):
        cdef int32_t lane
        cdef int64_t row = self.tables.max_blocks_per_sequence
        self.lanes.resize(self.num_lanes)
        self.ids = <int32_t*>calloc(max(row, 1), sizeof(int32_t))
        if self.ids == NULL:
            raise NotEnoughMemory(f"no memory for a row of {row} blocks; lower max_tokens_per_sequence")
        self.block_indices.reserve(row)
        self.counts.resize(self.num_lanes)
        self.left.resize(self.num_lanes)
        self.counted.resize(self.num_lanes)
        for lane in range(self.num_lanes):
            self.counted[lane].resize((<BlockPool>self.pools[lane]).num_blocks // 64 + 1)
            self.tree.native.reserve_ids(lane, (<BlockPool>self.pools[lane]).num_blocks)
        self.tree.reserve_moves(1)

    # -- plan ----------------------------------------------------------------------------------------------------

    cdef int tick(self) except -1:
        """Read the clock before anything changes; the time holds for the whole call."""
        if self.clock is not None:
            self.now = as_finite("the clock's time", self.clock())
            self.tree.native.advance(self.now)
        self.tree._forget_dead()
        if self.has_lost_watch:
            self.watch(None)
        return 0

    cdef int reserve_moves(self, int64_t count) except -1:
        return self.tree.reserve_moves(count)

    cdef int match_sequence(self, Sequence sequence, int64_t max_blocks, NativeMatch* found) except -1:
        cdef PrefixHold hold = sequence.hold
        cdef object number = None if hold.receipt.key is None else self.tree.spaces.get(hold.receipt.key, -1)
        cdef Query query
        cdef int64_t hit
        hold.namespace_number = 0 if number is None else number
        query = self.query_of(sequence, sequence.known // self.block_size)
        found[0] = self.tree.native.match(query, max_blocks)
        if self.gives_up_last:
            # Tokens past a state are computed again, and their blocks may be shared: the match ends with them.
            hit = found.shared_blocks if self.states is None else found.full_blocks
            if hit > 0:
                found[0] = self.tree.native.match(query, hit - 1)
        if self.publishes_sealed:
            # Tokens past a state are computed again, and written to a tail: the row needs blocks of its own for them.
            found.shared_blocks, found.shared_node, found.shared_offset = found.blocks, found.node, found.offset
            found.ahead = 0
        return 0

    cdef Query query_of(self, Sequence sequence, int32_t num_blocks) noexcept:
        cdef Query query
        cdef PrefixHold hold = sequence.hold
        query.tokens = Int32s(sequence.ids, <size_t>num_blocks * self.block_size)
        query.marks = Marks(hold.marks.data(), hold.marks.size())
        query.space = hold.namespace_number
        return query

    cdef int32_t max_match_length(self, int32_t num_tokens) noexcept:
        """Return the most tokens of a cached prefix that a sequence of some tokens could reuse."""
        return max(0, (num_tokens - 1) // self.block_size - self.gives_up_last) * self.block_size

    # -- commit --------------------------------------------------------------------------------------------------

    cdef void attach(self, Sequence sequence, int32_t row, NativeMatch& found, bint is_tentative) noexcept:
        """Hold the match of a new sequence in a row; count it as a hit or a miss, now or with its first step."""
        sequence.hold.receipt.native = self.tree.native.reserved_lock_shared(found, not is_tentative)
        if self.shares_ahead and found.full_blocks > found.shared_blocks:
            sequence.hold.ahead.native = self.tree.native.reserved_lock_ahead(found)
        sequence.hold.published = <int32_t>found.shared_blocks
        sequence.hold.offered_state = <int32_t>(found.blocks * self.block_size) if found.state >= 0 else 0
        sequence.hold.asked_tokens = sequence.known
        sequence.hold.hit_blocks = <int32_t>found.blocks
        sequence.hold.shared_blocks = <int32_t>(found.full_blocks if self.shares_ahead else found.shared_blocks)
        sequence.hold.is_new = True
        sequence.hold.is_tentative = is_tentative
        self.num_tentative += is_tentative
        if not is_tentative:
            self.count(sequence.hold, row)

    cdef void count_first(self, Sequence sequence, int32_t row) noexcept:
        """Count the prefix of a sequence that was added tentatively, in its first step or when it is copied.

        `row` is that of the sequence or of a copy.
        """
        if sequence.hold.is_tentative:
            self.end_tentative(sequence.hold)
            sequence.hold.asked_tokens = sequence.known
            self.tree.native.count_hit(sequence.hold.receipt.native, sequence.hold.hit_blocks)
            self.count(sequence.hold, row)

    cdef void end_tentative(self, PrefixHold hold) noexcept:
        self.num_tentative -= hold.is_tentative
        hold.is_tentative = False

    cdef void count(self, PrefixHold hold, int32_t row) noexcept:
        """Count the prefix with which a row began as a hit or a miss."""
        cdef Int32s blocks
        cdef int32_t lane
        cdef size_t begun
        if self.counts_lives():
            for lane in range(self.num_lanes):
                blocks = self.tables.row_raw(row, self.groups[lane])
                begun = min(<size_t>self.num_initial_blocks(hold, self.component_of(lane)), blocks.size())
                (<WatchedPool>self.pools[lane]).note_hit(blocks.data(), begun)
        self.num_query_tokens += hold.asked_tokens
        self.num_hit_tokens += hold.hit_blocks * self.block_size
        self.num_shared_tokens += hold.shared_blocks * self.block_size
        self.num_hits += hold.hit_blocks > 0
        self.num_misses += hold.hit_blocks == 0

    cdef int32_t num_initial_blocks(self, PrefixHold hold, int32_t component) noexcept:
        """Return the blocks with which a row of a component began."""
        if hold.shared_blocks > hold.hit_blocks and self.shares_ahead and not hold.has_component_ahead(component):
            return hold.hit_blocks
        return hold.shared_blocks

    cdef void inherit(
        self, Sequence child, PrefixHold hold, PrefixHold source, int32_t published, bint has_duplicates
    ) noexcept:
        """Give `child`, whose row has become a copy of another sequence's, a copy of that sequence's hold `source`.

        `hold` is empty and becomes the copy. The receipt of the child's previous hold is released by the caller.
        """
        cdef PrefixHold old = child.hold
        if old is not None:
            self.end_tentative(old)
            self.num_truncated -= old.truncated_inside_block
            old.truncated_inside_block = old.truncated_ahead = False
            self.note_duplicates(old, False)
        hold.receipt.native = self.tree.native.lock_again(source.receipt.native)
        if source.has_ahead():
            hold.ahead.native = self.tree.native.lock_again(source.ahead.native)
            hold.truncated_ahead = source.truncated_ahead
        hold.namespace_number = source.namespace_number
        child.hold = hold
        hold.published = published
        self.renew_version(hold)
        self.note_truncated(hold)
        self.note_duplicates(hold, has_duplicates)

    cdef void truncate(self, Sequence sequence, int32_t length) noexcept:
        """Shorten the receipt of a sequence whose row was truncated to `length` tokens, before `computed` follows."""
        if sequence.hold.published != INT32_MAX or (length == 0 and not sequence.hold.is_private):
            sequence.hold.published = min(sequence.hold.published, length // self.block_size)
        if sequence.hold.offered_state > length:
            sequence.hold.offered_state = 0
        if length // self.block_size < sequence.computed // self.block_size:
            self.renew_version(sequence.hold)
        # A tier lacks what the sequence computes next in place of the blocks that it forgets.
        sequence.hold.shorten_notes(length // self.block_size, length)
        if sequence.hold.is_tentative:
            sequence.hold.hit_blocks = min(sequence.hold.hit_blocks, length // self.block_size)
            sequence.hold.shared_blocks = min(sequence.hold.shared_blocks, length // self.block_size)
        if sequence.hold.has_ahead():
            self.shorten_ahead(sequence.hold, length)
        self.shorten(sequence.hold, (length + self.block_size - 1) // self.block_size)

    cdef void shorten_ahead(self, PrefixHold hold, int32_t length) noexcept:
        """Let `ahead` end with the last block of a sequence that was truncated to `length` tokens."""
        cdef int32_t num_blocks = (length + self.block_size - 1) // self.block_size
        if num_blocks > hold.ahead.depth():
            return
        if num_blocks <= hold.receipt.depth():
            self.release_ahead(hold)
            return
        self.tree.native.shorten(hold.ahead.native, num_blocks)
        hold.truncated_ahead = length % self.block_size > 0

    cdef void release_ahead(self, PrefixHold hold) noexcept:
        cdef RetentionHint none
        if hold.has_ahead():
            hold.ahead.drop(none)
        if hold.truncated_ahead:
            hold.truncated_ahead = False
            self.note_truncated(hold)

    cdef int64_t num_shared(self, const NativeMatch& found, int32_t lane) noexcept:
        cdef bint is_ahead = (found.ahead >> self.component_of(lane)) & 1 != 0
        return found.full_blocks if self.shares_ahead and is_ahead else found.shared_blocks

    cdef size_t copy_shared(self, const NativeMatch& found, int32_t lane, int32_t* out) noexcept:
        cdef size_t count = <size_t>self.num_shared(found, lane)
        if count > <size_t>found.shared_blocks:
            self.tree.native.copy_ahead(found, lane, span[int32_t](out, count))
        elif count > 0:
            self.tree.native.copy_blocks(found.shared_node, found.shared_offset, lane, span[int32_t](out, count))
        return count

    cdef int32_t component_of(self, int32_t lane) noexcept:
        return self.components[self.groups[lane]]

    cdef int32_t num_held(self, PrefixHold hold) noexcept:
        cdef int32_t published = 0 if hold.published == INT32_MAX else hold.published
        return max(published, <int32_t>hold.ahead.depth()) if hold.has_ahead() else published

    cdef void shorten(self, PrefixHold hold, int32_t num_blocks) noexcept:
        self.tree.native.shorten(hold.receipt.native, num_blocks)
        self.note_truncated(hold)

    cdef void leave(self, Sequence sequence) noexcept:
        """Empty the receipt of a sequence that lost its row and may get another one."""
        self.release_ahead(sequence.hold)
        self.tree.native.shorten(sequence.hold.receipt.native, 0)
        if sequence.hold.published != INT32_MAX:
            sequence.hold.published = 0
        sequence.hold.offered_state = 0
        self.note_truncated(sequence.hold)
        self.note_duplicates(sequence.hold, False)

    cdef void release(self, Sequence sequence, const RetentionHint& hint) noexcept:
        """Release the receipt of a sequence that was removed."""
        self.release_ahead(sequence.hold)
        self.end_tentative(sequence.hold)
        sequence.hold.receipt.drop(hint)
        self.num_truncated -= sequence.hold.truncated_inside_block
        sequence.hold.truncated_inside_block = False
        self.note_duplicates(sequence.hold, False)

    cdef void renew_version(self, PrefixHold hold) noexcept:
        self.num_versions += 1
        hold.version = self.num_versions

    cdef void note_truncated(self, PrefixHold hold) noexcept:
        cdef bint is_inside = hold.truncated_ahead or hold.receipt.depth() > hold.published
        self.num_truncated += <int32_t>is_inside - <int32_t>hold.truncated_inside_block
        hold.truncated_inside_block = is_inside

    cdef void note_duplicates(self, PrefixHold hold, bint has_duplicates) noexcept:
        self.num_duplicated += <int32_t>has_duplicates - <int32_t>hold.has_duplicates
        hold.has_duplicates = has_duplicates

    # -- blocks of a path ----------------------------------------------------------------------------------------

    cdef int32_t own_block(self, Sequence sequence, int32_t block_index, int32_t lane) noexcept:
        """Return the block at an index of the sequence's row; 0 if the row has none."""
        cdef Int32s row = self.tables.row_raw(sequence.row, self.groups[lane])
        return row.data()[block_index] if <size_t>block_index < row.size() else 0

    cdef int32_t shared_block(self, Sequence sequence, int32_t block_index, int32_t lane) noexcept:
        """Return the sequence's own block if it has exactly one other holder (the tree or another row); else 0."""
        cdef int32_t block = self.own_block(sequence, block_index, lane)
        return block if block != 0 and (<BlockPool>self.pools[lane]).ref_count_raw(block) == 2 else 0

    cdef int32_t tree_block(self, Sequence sequence, int32_t block_index, int32_t lane) noexcept:
        """Return the tree's block at an index of the path that a receipt covers; 0 past its end."""
        cdef Receipt receipt = self.cover(sequence, block_index, lane)
        if receipt.depth() <= block_index:
            return 0
        return self.tree.native.known_id(receipt.native.node, block_index, lane)

    cdef Receipt cover(self, Sequence sequence, int32_t block_index, int32_t lane):
        if not sequence.hold.has_component_ahead(self.component_of(lane)):
            return sequence.hold.receipt
        if sequence.hold.receipt.depth() > block_index:
            return sequence.hold.receipt
        return sequence.hold.ahead

    cdef int32_t substitute(self, Sequence sequence, int32_t block_index, int32_t lane) noexcept:
        """Replace the tree's block by the sequence's own block, or by a hole; return the number of freed blocks."""
        cdef int32_t own = self.own_block(sequence, block_index, lane)
        cdef BlockPool pool = <BlockPool>self.pools[lane]
        if own != 0:
            pool.share_raw(&own, 1)
        cdef Receipt receipt = self.cover(sequence, block_index, lane)
        cdef int32_t old = self.tree.native.reserved_replace(receipt.native.node, block_index, lane, own)
        return pool.free_raw(&old, 1)

    # -- for Python ----------------------------------------------------------------------------------------------

    @property
    def is_watched(self):
        """The lives of blocks are timed, for an object that exists."""
        return self.counts_lives() and not self.has_lost_watch

    cdef bint counts_lives(self) noexcept:
        return self.num_lanes > 0 and isinstance(self.pools[0], WatchedPool)

    def watch(self, list watched):
        """Count references through a WatchedPool of each group from now on; None ends that."""
        pools = [(<WatchedPool>pool).pool for pool in self.pools] if self.counts_lives() else list(self.pools)
        self.pools[:] = pools if watched is None else [watched[group] for group in self.groups]
        self.has_lost_watch = False

    def lose_watch(self):
        """End the timing of lives at the next operation; a destructor calls it, which may not have the lock."""
        self.has_lost_watch = True
