"""One promotion of a prefix from host blocks to device blocks: choice, room, copies and commit."""

from libc.stdint cimport int32_t, int64_t

from pagecore.cache.prefix._prefix cimport free_blocks, free_slots, num_unused_states, subtract_evictable
from pagecore.cache.state._state cimport CacheState, StoredBlocks
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.radix._native cimport HintRanges, Int32Pointer, NativeMatch, Query, RetentionHint, State, States
from pagecore.index.radix._radix cimport Receipt, array_of
from pagecore.native.std cimport span, vector

from pagecore.errors import NotEnoughMemory

# Evictions of one promotion: the first may turn blocks of the path's windows into holes.
cdef enum: MAX_EVICTIONS = 4


cdef class Promotion:
    """One promotion: the prefix, the pinned paths of both trees, and the new blocks of the device.

    Attributes
    ----------
    num_blocks : int
        Blocks of the prefix that the device has after the promotion.
    pairs : list of numpy.ndarray
        int32 ``[n, (host block, device block)]`` of each group, then of the state slots.
    hold : EntryHold
        The host's blocks, to be released once they were read.
    """

    def __cinit__(self, CacheState state not None, HostIndex host not None, PrefixKey key not None):
        self.state = state
        self.host = host
        self.prefix = state.prefix
        self.key = key
        self.device = Path()
        self.places.resize(<size_t>self.prefix.num_lanes)

    cdef int64_t choose(self, int64_t limit, int64_t min_blocks) except -1:
        """Pin the longest reusable prefix of the host, up to `limit` blocks; return the blocks that it has.

        The result is 0, and nothing is pinned, if the host has less than `min_blocks` more than the device.
        """
        cdef NativeMatch found, there
        cdef Query query = self.key.query(limit)
        cdef Receipt receipt
        query.space = space_of(self.prefix.tree, self.key.key)
        there = self.prefix.tree.native.match(query, limit)
        query.space = space_of(self.host.tree, self.key.key)
        found = self.host.tree.native.match(query, limit)
        self.num_blocks = there.blocks
        if found.blocks == 0:
            return 0
        receipt = self.host.tree.blank_receipt(self.key.key)
        self.host.tree.lock(found, receipt, self.prefix.now)  # counts as a use of the host's prefix in any case
        if found.blocks < there.blocks + max(min_blocks, 1):
            self.unlock(receipt)
            return 0
        try:
            self.hold_host(receipt, found)
        except BaseException:
            self.unlock(receipt)
            raise
        return found.blocks

    cdef void unlock(self, Receipt receipt) noexcept:
        cdef RetentionHint no_hint
        receipt.drop(no_hint)

    cdef int hold_host(self, Receipt receipt, const NativeMatch& found) except -1:
        """Take a reference to each host block of a locked match."""
        cdef EntryHold held = EntryHold.__new__(EntryHold)
        cdef vector[vector[int32_t]] like
        cdef int32_t lane
        held.index = self.host
        held.stored = StoredBlocks(self.host.pools)
        like.resize(<size_t>len(self.host.pools))
        for lane in range(self.host.num_lanes):
            like[self.host.groups[lane]].resize(<size_t>found.blocks)
            self.host.tree.native.known_tail(
                receipt.native.node, lane, span[int32_t](like[self.host.groups[lane]].data(), <size_t>found.blocks)
            )
        if self.host.has_states:
            like[self.host.num_lanes].push_back(found.state)
        self.state_slot = found.state
        held.stored.reserve(like)
        self.host.reserve_lost()
        self.host.leases.add(held)
        held.stored.share()
        held.take_receipt(receipt)
        held.num_tokens = found.blocks * self.host.block_size
        self.hold = held
        return 0

    cdef int64_t take(self, int64_t num_blocks, spill) except -1:
        """Take device blocks for what the device lacks of the held prefix; return the blocks that a prefix may have.

        The result is `num_blocks` if all are taken; otherwise nothing is.
        """
        cdef vector[int64_t] missing, left
        cdef vector[int32_t] no_blocks
        cdef int64_t room, slots
        cdef size_t group
        cdef int32_t _evictions
        cdef bint is_short
        self.device.pin(self.prefix.tree, self.key.key, self.key.query(num_blocks), num_blocks)
        for _evictions in range(MAX_EVICTIONS):
            self.list_missing(num_blocks, missing)
            is_short = False
            for group in range(missing.size()):
                missing[group] -= (<BlockPool>self.prefix.tables.pools[group]).num_free_raw()
                is_short = is_short or missing[group] > 0
            slots = 0
            if self.prefix.states is not None:
                slots = 1 - self.prefix.states.checkpoints.num_free_raw()
            if not is_short and slots <= 0:
                self.allocate()
                return num_blocks
            if slots > 0 and slots > num_unused_states(self.prefix):
                return 0
            left = missing
            subtract_evictable(self.prefix, left, [], no_blocks)
            room = num_blocks
            for group in range(left.size()):
                if left[group] > 0:
                    room = min(room, num_blocks - left[group] if self.prefix.components[group] == 0 else 0)
            if room < num_blocks:
                return room
            left = missing
            if spill is not None:
                spill([max(0, count) for count in left] + ([max(0, slots)] if self.prefix.states is not None else []))
                self.device.read()
                continue
            free_blocks(self.prefix, left)
            if slots > 0:
                free_slots(self.prefix, slots)
            self.device.read()
        return 0

    cdef int list_missing(self, int64_t num_blocks, vector[int64_t]& counts) except -1:
        cdef int32_t lane, component
        cdef int64_t i
        counts.assign(<size_t>self.prefix.num_lanes, 0)
        held = self.hold.stored
        for lane in range(self.prefix.num_lanes):
            self.places[lane].clear()
            component = self.prefix.components[self.prefix.groups[lane]]
            for i in range(num_blocks):
                if (<StoredBlocks>held).blocks[self.prefix.groups[lane]][i] == 0:
                    continue
                if not self.host.is_needed(component, i, num_blocks):
                    continue
                if i >= self.device.num_blocks or self.device.ids[lane][i] == 0:
                    self.places[lane].push_back(<int32_t>i)
            counts[self.prefix.groups[lane]] = <int64_t>self.places[lane].size()
        return 0

    cdef int allocate(self) except -1:
        """Take the device's blocks, and list the copies."""
        cdef vector[vector[int32_t]] like
        cdef vector[int32_t] flat
        cdef int32_t lane, group
        cdef size_t i
        cdef int32_t num_lanes = self.prefix.num_lanes
        cdef StoredBlocks source = self.hold.stored
        pools = self.prefix.tables.pools[:num_lanes]
        like.resize(<size_t>num_lanes)
        for lane in range(num_lanes):
            like[self.prefix.groups[lane]].resize(self.places[lane].size())
        if self.prefix.states is not None:
            pools = (*pools, self.prefix.states.checkpoints)
            like.resize(<size_t>num_lanes + 1)
            like[num_lanes].resize(1)
        self.lease = StoredBlocks(pools)
        self.lease.reserve(like)
        if not self.lease.allocate():
            raise NotEnoughMemory("blocks that were counted as free are in use; promote under the lock of the cache")
        self.pairs = []
        for group in range(<int32_t>like.size()):
            flat.clear()
            if group < num_lanes:
                lane = self.prefix.lane_of[group]
                for i in range(self.places[lane].size()):
                    flat.push_back(source.blocks[group][self.places[lane][i]])
                    flat.push_back(self.lease.blocks[group][i])
            else:
                flat.push_back(self.state_slot)
                flat.push_back(self.lease.blocks[group][0])
            self.pairs.append(array_of(flat).reshape(-1, 2))
        if self.state.tenants is not None:
            self.tenant = self.state.tenants.number_of(self.key.key)
            self.state.tenants.doubt(self.lease.blocks)
        return 0

    cdef int commit(self, int64_t num_blocks) except -1:
        """Insert the copied blocks into the device's tree."""
        cdef vector[vector[int32_t]] lanes
        cdef vector[Int32Pointer] pointers
        cdef Query query = self.key.query(num_blocks)
        cdef RetentionHint no_hint
        cdef HintRanges no_ranges
        cdef States states
        cdef State state
        cdef int32_t lane, group
        cdef size_t i
        cdef bint is_inserted
        self.device.read()  # code of the caller may have run since
        lanes.resize(<size_t>self.prefix.num_lanes)
        for lane in range(self.prefix.num_lanes):
            group = self.prefix.groups[lane]
            lanes[lane].assign(self.device.ids[lane].begin(), self.device.ids[lane].end())
            lanes[lane].resize(<size_t>num_blocks)
            for i in range(self.places[lane].size()):
                if lanes[lane][self.places[lane][i]] == 0:
                    lanes[lane][self.places[lane][i]] = self.lease.blocks[group][i]
            pointers.push_back(lanes[lane].data())
        if self.prefix.states is not None:
            state.blocks = num_blocks
            state.id = self.lease.blocks[self.prefix.num_lanes][0]
            states = States(&state, 1)
        query.space = self.prefix.tree._space(self.key.key)
        is_inserted = self.prefix.tree.try_insert_raw(
            self.device.receipt, query, pointers, states, no_hint, no_ranges, self.prefix.now
        )
        if query.space > 0:
            self.prefix.tree.native.drop_namespace_if_empty(query.space)
        if not is_inserted:
            raise NotEnoughMemory(f"no memory for {num_blocks} blocks of the prefix tree; free some")
        # The device's tree has the blocks: from here on nothing fails.
        self.share_taken()
        return 0

    cdef void share_taken(self) noexcept:
        cdef int32_t lane, group
        cdef size_t i
        for lane in range(self.prefix.num_lanes):
            group = self.prefix.groups[lane]
            (<BlockPool>self.prefix.pools[lane]).share_raw(
                self.prefix.tree.inserted.taken[lane].data(), self.prefix.tree.inserted.taken[lane].size()
            )
            if self.state.tenants is not None:
                for i in range(self.lease.blocks[group].size()):
                    self.state.tenants.last[group][self.lease.blocks[group][i]] = self.tenant
        lane = self.prefix.num_lanes
        if self.prefix.states is not None:
            self.prefix.states.checkpoints.share_raw(
                self.prefix.tree.inserted.taken[lane].data(), self.prefix.tree.inserted.taken[lane].size()
            )

    cdef int64_t num_reusable(self, int64_t limit) except -1:
        """Return the blocks of the prefix that the device can reuse now."""
        cdef NativeMatch found
        cdef Query query = self.key.query(limit)
        query.space = space_of(self.prefix.tree, self.key.key)
        found = self.prefix.tree.native.match(query, limit)
        return found.blocks

    cdef void end(self) noexcept:
        """Release what the promotion holds of the device; the tree keeps what it took."""
        self.device.release()
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    cdef void release_hold(self) noexcept:
        if self.hold is not None:
            self.hold.give_up()
            self.hold = None
