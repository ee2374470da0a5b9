"""The end of a path that is being evicted: it waits outside of the host's tree, in host blocks of its own."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcmp

from pagecore.cache.prefix._prefix cimport PrefixCache
from pagecore.cache.state._state cimport CacheState
from pagecore.index.radix._native cimport Mark, NativeMatch, Query
from pagecore.index.radix._radix cimport RadixTree, array_of
from pagecore.native.std cimport vector


cdef class SpilledPart:
    """Blocks of a path that one eviction takes: their copies, and the lease of their host blocks.

    Attributes
    ----------
    pairs : list of numpy.ndarray
        int32 ``[n, (device block, host block)]`` of each group.
    """

    options = None
    num_receipts = 0

    def drop(self):
        """Give the host blocks back, after the copy if it still runs."""
        self.is_dropped = True
        if not self.is_running:
            self.lease.give_up()

    def finish(self):
        """Note that the copy has ended; the tail publishes the blocks."""
        self.is_running = False
        if self.is_dropped:
            self.lease.give_up()

    def give_up(self):
        """Do what `finish` does."""
        self.finish()


cdef class SpilledTail:
    """The blocks [start, end) of a path, which were evicted; the device has those before `start`."""

    @property
    def num_leases(self):
        """Leases of host blocks."""
        return len(self.parts)

    @property
    def tokens(self):
        """Token ids of the path, int32."""
        return self.key.ids[:self.end * self.host.block_size]

    @property
    def num_device_tokens(self):
        """Tokens of the path before the tail."""
        return self.start * self.host.block_size

    cdef bint continues_at(self, object key, vector[int32_t]& tokens, vector[Mark]& marks):
        """Return True if a path ends where the tail starts."""
        cdef const int32_t[::1] ids = self.key.ids
        cdef size_t count = <size_t>(self.start * self.host.block_size)
        return (
            tokens.size() == count and self.key.key == key
            and memcmp(&ids[0], tokens.data(), count * sizeof(int32_t)) == 0
            and have_same_marks(self.key.marks, marks, self.start)
        )

    cdef bint is_asked_for(self, object key, const int32_t[::1] tokens):
        """Return True if a prompt continues from the device's part of the path into the tail."""
        cdef const int32_t[::1] ids = self.key.ids
        cdef Py_ssize_t count = (self.start + 1) * self.host.block_size
        return (
            tokens.shape[0] >= count and self.key.key == key
            and memcmp(&ids[0], &tokens[0], count * sizeof(int32_t)) == 0
        )

    cdef bint is_within(self, PrefixKey prefix):
        """Return True if a prefix has all blocks of the path."""
        cdef const int32_t[::1] ids = self.key.ids
        cdef const int32_t[::1] others = prefix.ids
        return (
            self.end <= prefix.num_blocks and self.key.key == prefix.key
            and memcmp(&ids[0], &others[0], <size_t>(self.end * self.host.block_size) * sizeof(int32_t)) == 0
            and have_same_marks(self.key.marks, prefix.marks, self.end)
        )

    cdef bint extend(self, int64_t begin, vector[vector[int32_t]]& device, copy) except -1:
        """Copy the blocks [begin, start); return False if the host has no room. Later parts are dropped for them."""
        cdef SpilledPart part = SpilledPart.__new__(SpilledPart)
        cdef vector[int64_t] counts
        cdef int32_t lane, group
        self.count(begin, device, counts)
        while not self.host.make_room(counts):
            if self.parts:
                self.shorten(counts)
                continue
            for lane in range(self.host.num_full):
                self.start = min(self.start, begin + self.host.pool(self.host.groups[lane]).num_free_raw())
            self.end = self.start
            self.count(begin, device, counts)
            if self.start == begin or not self.host.make_room(counts):
                return False
        part.begin = begin
        part.pairs = [None] * len(self.host.pools)
        part.lease = take_lease(self.host, counts)
        if part.lease is None:
            return False
        try:
            for group in range(self.host.num_lanes):
                lane = self.state.prefix.lane_of[group]
                part.pairs[group] = self.list_copies(part.lease, group, begin, device[lane])
                part.num_blocks += len(part.pairs[group])
            part.is_running = copy(part)
            self.parts.append(part)
        except BaseException:
            part.drop()
            raise
        for group in range(self.host.num_lanes):
            lane = self.state.prefix.lane_of[group]
            self.take_blocks(part.lease, lane, group, begin, device[lane])
        self.start = begin
        return True

    cdef int count(self, int64_t begin, vector[vector[int32_t]]& device, vector[int64_t]& counts) except -1:
        """Write the number of the device's blocks of each group in [begin, start)."""
        cdef int32_t lane
        cdef int64_t i
        counts.assign(<size_t>len(self.host.pools), 0)
        for lane in range(self.host.num_lanes):
            for i in range(begin, self.start):
                counts[self.host.groups[lane]] += device[lane][i] != 0
        return 0

    cdef object list_copies(self, EntryLease lease, int32_t group, int64_t begin, const vector[int32_t]& device):
        """Return the pairs of the device's blocks in [begin, start) and those of a lease, int32 ``[n, 2]``."""
        cdef vector[int32_t] flat
        cdef int64_t i
        cdef size_t k = 0
        for i in range(begin, self.start):
            if device[i] != 0:
                flat.push_back(device[i])
                flat.push_back(lease.stored.blocks[group][k])
                k += 1
        return array_of(flat).reshape(-1, 2)

    cdef void take_blocks(
        self, EntryLease lease, int32_t lane, int32_t group, int64_t begin, const vector[int32_t]& device
    ) noexcept:
        """Write the blocks of a lease to the places of the device's blocks in [begin, start)."""
        cdef int64_t i
        cdef size_t k = 0
        for i in range(begin, self.start):
            if device[i] != 0:
                self.lanes[lane][i] = lease.stored.blocks[group][k]
                k += 1

    cdef int drop_last(self) except -1:
        """Drop the last part of the path."""
        cdef SpilledPart part = self.parts.pop(0)
        self.end = part.begin
        part.drop()
        return 0

    cdef int shorten(self, vector[int64_t]& counts) except -1:
        """Drop blocks at the end of the path for `counts` of each group; all of its last part if its copy runs."""
        cdef int64_t missing = 1
        cdef int32_t group
        for group in range(self.host.num_lanes):
            missing = max(missing, counts[group] - self.host.pool(group).num_free_raw())
        return self.cut_last(self.end - missing)

    cdef int cut(self, int64_t end) except -1:
        """Drop the blocks from `end` on, or more where copies run."""
        while self.parts and self.end > end:
            self.cut_last(end)
        return 0

    cdef int cut_last(self, int64_t end) except -1:
        """Drop the blocks of the last part from `end` on; all of it if its copy runs."""
        cdef SpilledPart part = self.parts[0]
        cdef int64_t i
        cdef int32_t lane, group
        cdef size_t dropped
        if part.is_running or end <= part.begin:
            return self.drop_last()
        for group in range(self.host.num_lanes):
            lane = self.state.prefix.lane_of[group]
            dropped = 0
            for i in range(end, self.end):
                dropped += self.lanes[lane][i] != 0
            part.lease.stored.drop_last(group, dropped)
        self.end = end
        return 0

    cdef bint fit_beginning(self, const vector[int64_t]& counts) except -1:
        """Make room for what the host lacks before the tail, at the cost of its end; return False if nothing is left.

        The tail drops nothing for the blocks of windows, which the beginning may lack.
        """
        cdef vector[int64_t] needed = counts
        cdef int32_t group
        for group in range(self.host.num_lanes):
            if self.host.components[group] > 0:
                needed[group] = 0
        while not self.host.make_room(needed):
            if not self.parts:
                return False
            self.shorten(needed)
        return len(self.parts) > 0

    cdef bint fill(self, Backup one) except -1:
        """Plan the copy of what the host lacks before the tail; return False if nothing connects the two."""
        cdef PrefixCache prefix = self.state.prefix
        cdef vector[int64_t] counts
        cdef int64_t num_blocks
        cdef int32_t lane
        one.key = self.key
        one.end = self.start
        one.hint.rank = 0
        one.path = Path()
        one.path.pin(self.host.tree, self.key.key, self.key.query(self.start), self.start)
        one.first = one.path.num_blocks
        num_blocks = self.read_device(one.lanes)
        if max(num_blocks, one.first) < self.start:
            return False
        for lane in range(prefix.num_lanes):
            one.lanes[lane].resize(<size_t>self.start)
        one.list_missing(counts)
        if self.start > one.first and not (self.fit_beginning(counts) and one.fit(counts)):
            return False
        one.take(0, counts)
        if one.lease is None:
            return False
        one.end = self.end
        for lane in range(prefix.num_lanes):
            one.lanes[lane].resize(<size_t>self.end)
            for i in range(self.start, self.end):
                one.lanes[lane][i] = self.lanes[lane][i]
        return True

    cdef int64_t read_device(self, vector[vector[int32_t]]& lanes) except -1:
        """Write the device's blocks of the path before the tail; return their number.

        No receipt is taken: it would count as a use of the path, which is the next to be evicted.
        """
        cdef RadixTree tree = self.state.prefix.tree
        cdef NativeMatch found
        cdef vector[int32_t] tokens
        cdef vector[Mark] marks
        cdef Query query = self.key.query(self.start)
        query.space = space_of(tree, self.key.key)
        found = tree.native.match(query, self.start)
        lanes.resize(<size_t>tree.num_lanes)
        if found.full_blocks > 0:
            tree.native.copy_path(found.full_node, tokens, marks, lanes)
        return found.full_blocks


cdef bint have_same_marks(const vector[Mark]& some, const vector[Mark]& others, int64_t num_blocks) noexcept:
    """Return True if the spans of two paths are equal in their first blocks."""
    cdef size_t i = 0, k = 0
    cdef Mark one, other
    while i < some.size() and some[i].block < num_blocks and k < others.size() and others[k].block < num_blocks:
        one, other = some[i], others[k]
        if one.block != other.block or one.start != other.start or one.end != other.end:
            return False
        if one.digest.kind != other.digest.kind or memcmp(one.digest.bytes.data(), other.digest.bytes.data(), 32) != 0:
            return False
        i += 1
        k += 1
    return (i == some.size() or some[i].block >= num_blocks) and (k == others.size() or others[k].block >= num_blocks)


cdef SpilledTail new_tail(
    CacheState state, HostIndex host, object key, vector[int32_t]& tokens, vector[Mark]& marks
):
    cdef SpilledTail tail = SpilledTail.__new__(SpilledTail)
    cdef NativeMatch found
    cdef Query query
    cdef int32_t lane
    tail.state = state
    tail.host = host
    tail.parts = []
    tail.key = PrefixKey.__new__(PrefixKey)
    tail.key.key = key
    tail.key.ids = array_of(tokens)
    tail.key.marks.assign(marks.begin(), marks.end())
    tail.key.num_blocks = tail.start = tail.end = <int64_t>tokens.size() // host.block_size
    tail.lanes.resize(<size_t>state.prefix.num_lanes)
    for lane in range(state.prefix.num_lanes):
        tail.lanes[lane].resize(<size_t>tail.end)
    query = tail.key.query(tail.end)
    query.space = space_of(host.tree, key)
    found = host.tree.native.match(query, tail.end)
    tail.first = found.full_blocks
    return tail
