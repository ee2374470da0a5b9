"""The prefix cache: computed blocks that outlive their sequence, for others that begin alike.

The tree decides which blocks are cached, and the pools count their holders; this module keeps the two in agreement.
Its callers hold the lock of the cache.

P1: the tree holds one reference to every block that it knows, each sequence one to every block of its row.
P2: a block that a row shares with the tree lies on the path that the sequence's receipt holds. So nobody else holds a
    block that the tree calls evictable, and giving it up frees it. The converse does not hold: a receipt may hold
    blocks that no row uses, because their window has moved on, or because the sequence computed the same tokens in
    blocks of its own ("duplicates"). Those can be freed too.
P3: the first `published` blocks of a sequence are those of its receipt's path, token by token. The path is one block
    longer where the sequence was truncated inside a block ("cut"), which it shares with the tree until it writes.

A change is planned by calls that may fail and change nothing that shows, and made by calls that cannot fail: they
allocate nothing and run no Python code. Publishing is the exception: where the tree lacks memory, the blocks stay
unpublished until the next commit.
"""

from libc.math cimport INFINITY
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint64_t
from libcpp.algorithm cimport fill
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.cache._hold cimport PrefixHold
from pagecore.cache._sequence cimport Sequence, num_whole
from pagecore.index._block_pool cimport BlockPool
from pagecore.index._block_tables cimport BlockTables
from pagecore.index._radix_query cimport Int32s, Marks, Query, RetentionHint
from pagecore.index._radix_tree cimport NativeMatch, RadixTree

import numpy as np

from pagecore.cache.retention import as_finite
from pagecore.errors import PagecoreError, UnsupportedOption


cdef class PrefixCache:
    """The prefix tree of a cache, kept in agreement with its block tables and pools.

    Groups without a window are the lanes of the tree's full component; each group with a window is a component of its
    own.

    Parameters
    ----------
    windows : list of (int or None)
        Window of each group.
    tables : BlockTables
    by_row : list
        The sequence in each row of the tables, or None; kept up to date by the cache.
    policy : str
        Eviction policy of the tree.
    clock : callable
        Time in seconds; called by the policy "priority" alone.
    """

    def __cinit__(self, list windows not None, BlockTables tables not None, list by_row not None, str policy, clock):
        if not callable(clock):
            raise UnsupportedOption(f"clock is {clock!r}; give a function that returns seconds")
        full = [group for group, window in enumerate(windows) if window is None]
        windowed = [group for group, window in enumerate(windows) if window is not None]
        for group in windowed:
            self.num_seen.push_back(min(<object>windows[group] - 1, INT32_MAX))
        self.block_size = tables.block_sizes[0]
        self.tree = RadixTree(
            self.block_size, full=len(full), windows=[max(seen, 1) for seen in self.num_seen], policy=policy
        )
        self.policy = policy
        self.tables = tables
        self.by_row = by_row
        self.clock = clock if policy == "priority" else None
        self.now = -INFINITY
        self.num_full = len(full)
        self.num_lanes = len(windows)
        self.components.resize(self.num_lanes)
        self.lane_of.resize(self.num_lanes)
        self.pools = []
        for lane, group in enumerate([*full, *windowed]):
            self.groups.push_back(group)
            self.lane_of[group] = lane
            self.components[group] = 0 if lane < self.num_full else 1 + lane - self.num_full
            self.pools.append(tables.pools[group])
        self._reserve_scratch()

    def _reserve_scratch(self):
        cdef int32_t lane
        cdef int64_t row = self.tables.max_blocks_per_sequence
        self.lanes.resize(self.num_lanes)
        self.ids.resize(row)
        self.places.reserve(row)
        self.counts.resize(self.num_lanes)
        self.left.resize(self.num_lanes)
        self.met.resize(self.num_lanes)
        for lane in range(self.num_lanes):
            self.met[lane].resize((<BlockPool>self.pools[lane]).num_blocks // 64 + 1)
            self.tree.reserve_ids_raw(lane, (<BlockPool>self.pools[lane]).num_blocks)
        self.tree.reserve_raw(1)

    # -- plan ----------------------------------------------------------------------------------------------------

    cdef int tick(self) except -1:
        """Ask the clock, before anything changes: its answer holds for the whole of a call."""
        if self.clock is not None:
            self.now = as_finite("the clock's time", self.clock())
            self.tree.advance_raw(self.now)
        self.tree._forget_dead()
        return 0

    cdef int name_spaces(self, list sequences) except -1:
        """Have a number in the tree for the namespace of each sequence that may publish its first block.

        The numbers are good until code of the caller may run or the lock is given up: publish before that.
        """
        cdef Sequence sequence
        for sequence in sequences:
            if sequence.hold.receipt.key is None:
                sequence.hold.space = 0
            elif sequence.hold.receipt.native.node < 0:
                sequence.hold.space = self.tree.space_raw(sequence.hold.receipt)
        return 0

    cdef int reserve_moves(self, int64_t count) except -1:
        return self.tree.reserve_raw(count)

    cdef int match_sequence(self, Sequence sequence, int64_t max_blocks, NativeMatch* found) except -1:
        cdef PrefixHold hold = sequence.hold
        cdef object space = None if hold.receipt.key is None else self.tree.spaces.get(hold.receipt.key, -1)
        hold.space = 0 if space is None else space
        return self.tree.match_raw(self.query_of(sequence, sequence.known // self.block_size), max_blocks, found)

    cdef Query query_of(self, Sequence sequence, int32_t num_blocks) noexcept:
        cdef Query query
        cdef PrefixHold hold = sequence.hold
        query.tokens = Int32s(sequence.ids, <size_t>num_blocks * self.block_size)
        query.marks = Marks(hold.marks.data(), hold.marks.size())
        query.space = hold.space
        return query

    # -- sequences come, go and publish --------------------------------------------------------------------------

    cdef void attach(self, Sequence sequence, NativeMatch& found) noexcept:
        """Hold what was found for a new sequence, and count it."""
        self.tree.lock_raw(found, sequence.hold.receipt)
        sequence.published = <int32_t>found.blocks
        self.num_query_tokens += sequence.known
        self.num_hit_tokens += found.blocks * self.block_size
        self.num_hits += found.blocks > 0
        self.num_misses += found.blocks == 0

    cdef void publish(self, list sequences, bint may_share) noexcept:
        cdef Sequence sequence
        for sequence in sequences:
            self.publish_one(sequence, may_share)

    cdef void publish_one(self, Sequence sequence, bint may_share) noexcept:
        """Offer the full, computed and known blocks of a sequence, and move its hold to their end.

        Blocks that other rows share are published only with `may_share`: those rows are offered too. `name_spaces`
        comes first.
        """
        cdef int32_t whole = num_whole(sequence, self.block_size)
        cdef PrefixHold hold = sequence.hold
        cdef int32_t lane
        cdef bint is_kept
        if whole > sequence.published and not may_share:
            # Another row would have blocks of the tree that its receipt does not hold.
            whole = sequence.published + self.num_unshared(sequence, sequence.published, whole)
        if whole > sequence.published and (hold.space >= 0 or hold.receipt.native.node >= 0):
            for lane in range(self.num_lanes):
                self.lanes[lane] = self.tables.row_raw(sequence.row, self.groups[lane]).data()
            if hold.offers_whole:
                is_kept = self.tree.try_insert_raw(
                    hold.receipt, self.query_of(sequence, whole), self.lanes, hold.hint(self.now), self.now
                )
            else:
                is_kept = self.tree.try_extend_raw(hold.receipt, self.query_of(sequence, whole), self.lanes)
            if is_kept:
                for lane in range(self.num_lanes):
                    (<BlockPool>self.pools[lane]).share_raw(
                        self.tree.inserted.taken[lane].data(), self.tree.inserted.taken[lane].size()
                    )
                    if self.tree.inserted.duplicates[lane].size() > 0:
                        self.note_duplicates(sequence, True)
                sequence.published = whole
                self.note_truncated(sequence)
        if hold.receipt.native.node < 0 and hold.space > 0:
            self.tree.drop_space_raw(hold.space)
            hold.space = -1

    cdef int32_t num_unshared(self, Sequence sequence, int32_t first, int32_t last) noexcept:
        """Return the number of blocks from `first` on, below `last`, before one that has another holder."""
        cdef int32_t lane
        cdef size_t count = <size_t>(last - first)
        for lane in range(self.num_lanes):
            count = (<BlockPool>self.pools[lane]).num_unshared_raw(
                self.tables.row_raw(sequence.row, self.groups[lane]).data() + first, count
            )
        return <int32_t>count

    cdef void truncate(self, Sequence sequence, int32_t length) noexcept:
        """A row was cut to `length` tokens: hold what it still shares, and no more."""
        if sequence.published != INT32_MAX or length == 0:
            sequence.published = min(sequence.published, length // self.block_size)
        self.shorten(sequence, (length + self.block_size - 1) // self.block_size)

    cdef void shorten(self, Sequence sequence, int32_t num_blocks) noexcept:
        self.tree.shorten_raw(sequence.hold.receipt, num_blocks)
        self.note_truncated(sequence)

    cdef void leave(self, Sequence sequence) noexcept:
        """A sequence lost its row, and may come back."""
        self.tree.shorten_raw(sequence.hold.receipt, 0)
        if sequence.published != INT32_MAX:
            sequence.published = 0
        self.note_truncated(sequence)
        self.note_duplicates(sequence, False)

    cdef void release(self, Sequence sequence, const RetentionHint& hint) noexcept:
        """A sequence is gone, and so is its row."""
        self.tree.release_raw(sequence.hold.receipt, hint)
        self.num_cut -= sequence.is_cut
        sequence.is_cut = False
        self.note_duplicates(sequence, False)

    cdef void note_truncated(self, Sequence sequence) noexcept:
        cdef bint is_cut = self.tree.depth_raw(sequence.hold.receipt) > sequence.published
        self.num_cut += <int32_t>is_cut - <int32_t>sequence.is_cut
        sequence.is_cut = is_cut

    cdef void note_duplicates(self, Sequence sequence, bint has_duplicates) noexcept:
        self.num_duplicated += <int32_t>has_duplicates - <int32_t>sequence.has_duplicates
        sequence.has_duplicates = has_duplicates

    # -- blocks of a path ----------------------------------------------------------------------------------------

    cdef int32_t own_block(self, Sequence sequence, int32_t place, int32_t lane) noexcept:
        """Return the block at a place of a sequence's row; 0 for none."""
        cdef Int32s row = self.tables.row_raw(sequence.row, self.groups[lane])
        return row.data()[place] if <size_t>place < row.size() else 0

    cdef int32_t shared_block(self, Sequence sequence, int32_t place, int32_t lane) noexcept:
        """Return that block where it has exactly one other holder, which may be the tree; else 0."""
        cdef int32_t block = self.own_block(sequence, place, lane)
        return block if block != 0 and (<BlockPool>self.pools[lane]).ref_count_raw(block) == 2 else 0

    cdef int32_t known_block(self, Sequence sequence, int32_t place, int32_t lane) noexcept:
        """Return the tree's block there, on the path that the sequence holds; 0 past its end."""
        if self.tree.depth_raw(sequence.hold.receipt) <= place:
            return 0
        return self.tree.block_at_raw(sequence.hold.receipt, place, lane)

    cdef int32_t exchange(self, Sequence sequence, int32_t place, int32_t lane) noexcept:
        """Give the tree the sequence's own block there, or none, for its own; returns the blocks that became free."""
        cdef int32_t own = self.own_block(sequence, place, lane)
        cdef BlockPool pool = <BlockPool>self.pools[lane]
        if own != 0:
            pool.share_raw(&own, 1)
        cdef int32_t old = self.tree.replace_raw(sequence.hold.receipt, place, own, lane)
        return pool.free_raw(&old, 1)

    # -- the truncated block of a sequence that writes ---------------------------------------------------------------

    cdef void give_up_truncated(self, Sequence sequence) noexcept:
        cdef int32_t lane
        self.shorten(sequence, sequence.published)
        for lane in range(self.num_lanes):
            self.hand_over(sequence, lane)

    cdef void hand_over(self, Sequence sequence, int32_t lane) noexcept:
        """Where the tree still has the block, let it go on without it, so that the sequence writes in place."""
        cdef int32_t row, block = self.shared_block(sequence, sequence.published, lane)
        if block != 0:
            row = self.find_heir(sequence, lane, block)
            if row >= 0:
                self.exchange(<Sequence>self.by_row[row], sequence.published, lane)

    cdef int32_t find_heir(self, Sequence sequence, int32_t lane, int32_t block) noexcept:
        """Return the row of a sequence whose own block, or hole, can replace the truncated block in the tree; or -1.

        That is one with a duplicate of it; or any that holds it, where the windows of all that do have moved past it.
        """
        cdef int32_t own, place = sequence.published
        cdef int64_t passed
        cdef int32_t past = -1
        cdef bint is_needed = lane < self.num_full
        if self.num_duplicated == 0 and is_needed:
            return -1
        for candidate in self.by_row:
            if candidate is None or candidate is sequence:
                continue
            if self.known_block(<Sequence>candidate, place, lane) != block:
                continue
            own = self.own_block(<Sequence>candidate, place, lane)
            if own != 0 and own != block:
                return (<Sequence>candidate).row
            passed = 0 if is_needed else (<Sequence>candidate).computed - self.num_seen[lane - self.num_full]
            is_needed = is_needed or own != 0 or place >= max(0, passed) // self.block_size
            past = (<Sequence>candidate).row
        return -1 if is_needed else past

    cdef bint is_released_by(self, Sequence sequence, int32_t lane, list writers) noexcept:
        """True if only `writers`, all of them cut, keep the tree's copy of a sequence's truncated block pinned."""
        cdef int32_t num_pins = self.tree.num_pins_raw(
            sequence.hold.receipt, sequence.published, self.components[self.groups[lane]]
        )
        for writer in writers:
            num_pins -= (<Sequence>writer).hold.receipt.native.node == sequence.hold.receipt.native.node
        return num_pins <= 0

    # -- how many blocks can be freed --------------------------------------------------------------------------------

    cdef void count_evictable(self, vector[int64_t]& out) noexcept:
        cdef int32_t group
        for group in range(self.num_lanes):
            out[group] = self.tree.evictable_raw(self.components[group])
        self.count_unused(self.counts)
        for group in range(self.num_lanes):
            out[group] += self.counts[group]

    cdef void subtract_evictable(
        self, vector[int64_t]& missing, list writers, const vector[int32_t]& first_blocks
    ) noexcept:
        cdef int32_t group, lane, block
        cdef bint is_short = False
        for group in range(self.num_lanes):
            missing[group] -= self.tree.evictable_raw(self.components[group])
            is_short = is_short or missing[group] > 0
        if not is_short:
            return
        self.count_unused(self.counts)
        for group in range(self.num_lanes):
            missing[group] -= self.counts[group]
        for writer in writers:
            for lane in range(self.num_lanes):
                group = self.groups[lane]
                if not first_blocks.empty() and (<Sequence>writer).published < first_blocks[group]:
                    continue  # the step leaves that block alone
                # Once the tree has given it up it has one holder, and is not copied.
                block = self.shared_block(<Sequence>writer, (<Sequence>writer).published, lane)
                if block == 0 or self.known_block(<Sequence>writer, (<Sequence>writer).published, lane) != block:
                    continue
                if self.is_released_by(<Sequence>writer, lane, writers) or (
                    self.find_heir(<Sequence>writer, lane, block) >= 0
                ):
                    missing[group] -= 1

    cdef void find_unused(self, Sequence sequence, int32_t lane) noexcept:
        """List in `places` where the sequence's path has blocks that only the tree holds; their ids are in `ids`."""
        cdef int64_t end = self.tree.depth_raw(sequence.hold.receipt)
        cdef int64_t first = 0
        cdef int64_t last = end if sequence.has_duplicates else 0
        cdef int64_t seen
        if lane >= self.num_full:
            seen = self.num_seen[lane - self.num_full]
            first = max(0, end - (max(seen, 1) + self.block_size - 1) // self.block_size)
            if not sequence.has_duplicates:
                last = min(end, max(0, sequence.computed - seen) // self.block_size)
        self.places.clear()
        if first >= last:
            return
        self.tree.copy_tail_raw(
            sequence.hold.receipt, lane, span[int32_t](self.ids.data() + first, <size_t>(end - first))
        )
        (<BlockPool>self.pools[lane]).find_held_once_raw(self.ids.data() + first, <size_t>(last - first), self.places)
        for i in range(self.places.size()):
            self.places[i] += <int32_t>first

    cdef void count_unused(self, vector[int64_t]& counts) noexcept:
        """Count the blocks of each group that receipts hold and no row uses, each once."""
        cdef int32_t lane, block, place
        cdef uint64_t bit
        fill(counts.begin(), counts.end(), 0)
        if self.num_duplicated == 0 and self.num_seen.empty():
            return
        for lane in range(self.num_lanes):
            fill(self.met[lane].begin(), self.met[lane].end(), 0)
        for candidate in self.by_row:
            if candidate is None or (self.num_seen.empty() and not (<Sequence>candidate).has_duplicates):
                continue
            for lane in range(self.num_lanes):
                self.find_unused(<Sequence>candidate, lane)
                for place in self.places:
                    block = self.ids[place]
                    bit = (<uint64_t>1) << (block & 63)
                    if self.met[lane][block >> 6] & bit == 0:
                        self.met[lane][block >> 6] |= bit
                        counts[self.groups[lane]] += 1

    # -- freeing them ------------------------------------------------------------------------------------------------

    cdef int64_t free_blocks(self, vector[int64_t]& left) noexcept:
        cdef int32_t group
        cdef int64_t given_up = 0
        cdef int64_t wanted = 0
        cdef bint is_short = False
        for group in range(self.num_lanes):
            is_short = is_short or left[group] > self.tree.evictable_raw(self.components[group])
        if is_short:
            given_up += self.reclaim(left)
        for group in range(self.num_lanes):
            if self.components[group] == 0:
                wanted = max(wanted, left[group])
        if wanted > 0:
            given_up += self.evict(0, wanted, left)
        for group in range(self.num_lanes):
            if self.components[group] != 0 and left[group] > 0:
                given_up += self.evict(self.components[group], left[group], left)
        return given_up

    cdef int64_t evict(self, int32_t component, int64_t amount, vector[int64_t]& left) noexcept:
        """Evict up to `amount` blocks of a component; take those that became free of each group from `left`."""
        cdef int32_t lane, freed
        cdef int64_t evicted, given_up = 0
        while amount > 0:
            evicted = self.tree.evict_raw(component, amount)
            if evicted == 0:
                break
            given_up += evicted
            amount -= evicted
            for lane in range(self.num_lanes):
                freed = (<BlockPool>self.pools[lane]).free_raw(
                    self.tree.gone_raw[lane].data(), self.tree.gone_raw[lane].size()
                )
                left[self.groups[lane]] -= freed
                self.num_evicted_blocks += freed
        return given_up

    cdef int64_t reclaim(self, vector[int64_t]& left) noexcept:
        """Free blocks that receipts hold and no row uses, by giving the tree the sequences' own blocks for them."""
        cdef int32_t lane, group, place, freed
        cdef int64_t given_up = 0
        if self.num_duplicated == 0 and self.num_seen.empty():
            return 0
        for candidate in self.by_row:
            if candidate is None or (self.num_seen.empty() and not (<Sequence>candidate).has_duplicates):
                continue
            for lane in range(self.num_lanes):
                group = self.groups[lane]
                if left[group] <= 0:
                    continue
                self.find_unused(<Sequence>candidate, lane)
                for place in self.places:
                    if left[group] <= 0:
                        break
                    freed = self.exchange(<Sequence>candidate, place, lane)
                    left[group] -= freed
                    self.num_evicted_blocks += freed
                    given_up += 1
        return given_up

    cdef int64_t clear(self) noexcept:
        """Give up everything that no row uses; returns how many blocks became free."""
        cdef int32_t group, component
        cdef int64_t freed = 0
        self.count_evictable(self.left)
        for group in range(self.num_lanes):
            freed += self.left[group]
        self.reclaim(self.left)
        for component in range(<int32_t>self.num_seen.size() + 1):
            self.evict(component, self.tree.evictable_raw(component), self.left)
        for group in range(self.num_lanes):
            freed -= self.left[group]
        return freed

    # -- for Python --------------------------------------------------------------------------------------------------

    def figures(self):
        """Return the fields of `CacheStats` that concern the prefix cache."""
        names = [self.tree.components[component] for component in self.components]
        return {
            "num_cached_blocks": sum(self.tree.evictable(name) + self.tree.protected(name) for name in names),
            "num_evicted_blocks": self.num_evicted_blocks,
            "prefix_hits": self.num_hits,
            "prefix_misses": self.num_misses,
            "prefix_query_tokens": self.num_query_tokens,
            "prefix_hit_tokens": self.num_hit_tokens,
        }

    def evictable(self):
        """Return the blocks of each group that only the tree holds, a list of int; all of them can be freed."""
        self.count_evictable(self.left)
        return list(self.left)

    def lacking(self, missing, list writers):
        """Return the blocks of each group that a step lacks even with eviction; `writers` bring tokens to it."""
        cdef vector[int64_t] left = missing
        cdef vector[int32_t] all_blocks
        self.subtract_evictable(left, [each for each in writers if (<Sequence>each).is_cut], all_blocks)
        return [max(0, count) for count in left]

    def cached(self, int32_t group):
        """Return every block of a group that the tree holds: int32, new, ascending."""
        return self.tree.held_blocks(self.lane_of[group])

    def match_length(self, ids, options, most):
        """Return the tokens, up to `most`, that a sequence of these ids would reuse."""
        return self.tree.match(ids, namespace=options.namespace, spans=options.spans, max_tokens=most).num_tokens

    def check_invariants(self, sequences):
        """Recount every block from the rows and the tree; `sequences` lists those of the cache."""
        cdef Sequence sequence
        self.tree.check_invariants()
        for lane, group in enumerate(self.groups):
            pool = self.pools[lane]
            holders = np.bincount(self.tables.table(group).ravel(), minlength=pool.num_blocks)
            holders[0] = 0
            holders[self.tree.held_blocks(lane)] += 1
            if not np.array_equal(holders, pool.ref_counts()):
                raise PagecoreError(
                    f"group {group}: reference counts do not match the holders (block tables + prefix tree)"
                )
        num_cut = num_duplicated = 0
        for sequence in sequences:
            published = 0 if sequence.published == INT32_MAX else sequence.published
            held = self.tree.depth_raw(sequence.hold.receipt)
            if held < published or (held > published) != sequence.is_cut or (sequence.row < 0 and held):
                raise PagecoreError(f"{sequence!r}: receipt covers {held} blocks but {published} were published")
            num_cut += sequence.is_cut
            num_duplicated += sequence.has_duplicates
        if (num_cut, num_duplicated) != (self.num_cut, self.num_duplicated):
            raise PagecoreError(
                f"{num_cut} cut sequences and {num_duplicated} with duplicates were found; "
                f"{self.num_cut} and {self.num_duplicated} are counted"
            )
        if self.tree.num_receipts != len(sequences):
            raise PagecoreError(f"{self.tree.num_receipts} receipts are out for {len(sequences)} sequences")
