"""Spilling: blocks of the device are evicted in the order of its policy, each after it was copied to the host.

Eviction takes a path from its end, a few blocks at a time, and the host's tree needs a path from its beginning. The end
of a path that is being evicted therefore waits outside of the tree, as a `SpilledTail`, and is published when its last
block has left the device, or when a prompt asks for it. Otherwise the host would keep a second copy of what the device
still has of the path.
"""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcmp
from libcpp.vector cimport vector

from pagecore.cache._lock cimport Held
from pagecore.cache._state cimport CacheState
from pagecore.cache.prefix._cache cimport PrefixCache
from pagecore.cache.prefix._evict cimport evict
from pagecore.index._radix_query cimport Mark, Query
from pagecore.index._radix_tree cimport NativeMatch, RadixTree
from pagecore.index._radix_values cimport array_of
from pagecore.tiers.host._backup cimport Backup
from pagecore.tiers.host._index cimport HostIndex, space_of
from pagecore.tiers.host._lease cimport EntryLease, PrefixKey, prefix_key, take_lease
from pagecore.tiers.host._path cimport Path


cdef class SpilledPart:
    """Blocks of a path that one eviction takes: their copies, and the lease of their host blocks.

    Attributes
    ----------
    pairs : list of numpy.ndarray
        int32 ``[n, (device block, host block)]`` of each group.
    """

    cdef EntryLease lease
    cdef int64_t begin
    cdef int64_t num_blocks
    cdef bint is_running            # the copy has not ended
    cdef bint is_dropped
    cdef readonly list pairs

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

    cdef CacheState state
    cdef HostIndex host
    cdef PrefixKey key
    cdef int64_t start
    cdef int64_t end
    cdef int64_t first                      # leading blocks of the path that the host's tree had at the beginning
    cdef vector[vector[int32_t]] lanes      # of each lane: the host block at each index of the path, 0 for none
    cdef list parts                         # the last ones of the path first

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
        """Return True if a prompt goes on from the device's part of the path into the tail."""
        cdef const int32_t[::1] ids = self.key.ids
        cdef Py_ssize_t count = (self.start + 1) * self.host.block_size
        return (
            tokens.shape[0] >= count and self.key.key == key
            and memcmp(&ids[0], &tokens[0], count * sizeof(int32_t)) == 0
        )

    cdef bint extend(self, int64_t begin, vector[vector[int32_t]]& device, copy) except -1:
        """Copy the blocks [begin, start); return False if the host has no room. Later parts are dropped for them."""
        cdef SpilledPart part = SpilledPart.__new__(SpilledPart)
        cdef vector[int64_t] counts
        cdef int32_t lane, group
        self.count(begin, device, counts)
        while not self.host.make_room(counts):
            if self.parts:
                self.drop_last()
                continue
            for lane in range(self.host.num_full):
                self.start = min(self.start, begin + self.host.pool(self.host.groups[lane]).num_free_raw())
            self.end = self.start
            self.count(begin, device, counts)
            if self.start == begin or not self.host.make_room(counts):
                return False
        part.lease = take_lease(self.host, counts)
        if part.lease is None:
            return False
        part.begin = begin
        part.pairs = [None] * len(self.host.pools)
        for group in range(self.host.num_lanes):
            lane = self.state.prefix.lane_of[group]
            part.pairs[group] = self.list_copies(part.lease, lane, group, begin, device[lane])
            part.num_blocks += len(part.pairs[group])
        try:
            part.is_running = copy(part)
        except BaseException:
            part.drop()
            raise
        self.parts.append(part)
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

    cdef object list_copies(
        self, EntryLease lease, int32_t lane, int32_t group, int64_t begin, const vector[int32_t]& device
    ):
        cdef vector[int32_t] flat
        cdef int64_t i
        cdef size_t k = 0
        for i in range(begin, self.start):
            if device[i] != 0:
                self.lanes[lane][i] = lease.stored.blocks[group][k]
                flat.push_back(device[i])
                flat.push_back(lease.stored.blocks[group][k])
                k += 1
        return array_of(flat).reshape(-1, 2)

    cdef int drop_last(self) except -1:
        """Give up the last part of the path."""
        cdef SpilledPart part = self.parts.pop(0)
        self.end = part.begin
        part.drop()
        return 0

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
        if self.start > one.first and not (one.fit(counts) and one.end == self.start):
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
        tree.match_raw(query, self.start, &found)
        lanes.resize(<size_t>tree.num_lanes)
        if found.full_blocks > 0:
            tree.copy_path_raw(found.full_node, tokens, marks, lanes)
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


def save_victims(CacheState state not None, HostIndex host not None, missing, copy, done):
    """Evict blocks of the device in the order of its policy, each after it was copied; return their number.

    Parameters
    ----------
    missing : list of int
        Blocks of each group to evict, and then states, in a cache with states.
    copy : callable
        ``copy(one)`` copies ``one.pairs`` before anything that the device is given later. If it returns True, it calls
        ``one.finish()`` later.
    done : callable
        ``done(backup)`` is called for each Backup that was published at once.
    """
    cdef PrefixCache prefix = state.prefix
    cdef vector[int64_t] left = missing
    cdef vector[int64_t] freed
    cdef int64_t wanted = 0, evicted = 0
    cdef int32_t group, component, free_slots = 0
    _guard = Held(state.lock)
    host.sweep()
    if prefix.states is not None:
        free_slots = prefix.states.checkpoints.num_free_raw()
    for group in range(prefix.num_lanes):
        if prefix.components[group] == 0:
            wanted = max(wanted, left[group])
    freed.assign(<size_t>prefix.num_lanes, 0)
    evicted += evict_saved(state, host, 0, wanted, freed, copy, done)
    for group in range(prefix.num_lanes):
        if prefix.components[group] > 0:
            evicted += evict_saved(
                state, host, prefix.components[group], left[group] + freed[group], freed, copy, done
            )
    if prefix.states is not None:
        component = <int32_t>len(prefix.tree.components) - 1
        wanted = left[prefix.num_lanes] - (prefix.states.checkpoints.num_free_raw() - free_slots)
        evicted += evict_saved(state, host, component, wanted, freed, copy, done)
    return evicted


cdef int64_t evict_saved(
    CacheState state, HostIndex host, int32_t component, int64_t wanted, vector[int64_t]& freed, copy, done
) except -1:
    """Evict up to `wanted` blocks of a component, one node after the other, each after it was copied."""
    cdef int64_t evicted = 0, step
    cdef int32_t node, count
    while evicted < wanted:
        node = state.prefix.tree.next_victim_raw(component, &count)
        if node < 0:
            break
        step = min(wanted - evicted, max(count, 1))
        if component == 0 and host.is_exclusive and not host.has_states:
            save_end(state, host, node, step, copy, done)
        else:
            save_path(state, host, node, copy, done)
        step = evict(state.prefix, component, step, freed)
        if step == 0:
            break
        evicted += step
    return evicted


cdef int save_end(CacheState state, HostIndex host, int32_t node, int64_t num_blocks, copy, done) except -1:
    """Copy the last blocks of a path, which are about to be evicted, and publish them when the path is complete."""
    cdef PrefixCache prefix = state.prefix
    cdef SpilledTail tail = host.tail
    cdef vector[int32_t] tokens
    cdef vector[Mark] marks
    cdef vector[vector[int32_t]] lanes
    cdef object key = prefix.tree.space_keys[prefix.tree.copy_path_raw(node, tokens, marks, lanes)]
    cdef int64_t begin = <int64_t>tokens.size() // host.block_size - num_blocks
    if tail is not None and not tail.continues_at(key, tokens, marks):
        publish_tail(state, host, copy, done)
        tail = None
    if tail is None:
        tail = new_tail(state, host, key, tokens, marks)
    if tail.first > begin:
        publish_tail(state, host, copy, done)
        return save_path(state, host, node, copy, done)
    if not tail.extend(begin, lanes, copy):
        host.tail = None
        return 0
    host.tail = tail
    if begin == tail.first:
        publish_tail(state, host, copy, done)
    return 0


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
    tail.key.marks = marks
    tail.key.num_blocks = tail.start = tail.end = <int64_t>tokens.size() // host.block_size
    tail.lanes.resize(<size_t>state.prefix.num_lanes)
    for lane in range(state.prefix.num_lanes):
        tail.lanes[lane].resize(<size_t>tail.end)
    query = tail.key.query(tail.end)
    query.space = space_of(host.tree, key)
    host.tree.match_raw(query, tail.end, &found)
    tail.first = found.full_blocks
    return tail


cdef int publish_tail(CacheState state, HostIndex host, copy, done) except -1:
    """Publish the tail that waits, along with what the host lacks before it; drop it if nothing connects the two."""
    cdef SpilledTail tail = host.tail
    cdef SpilledPart part
    cdef Backup one
    cdef bint is_running = False
    host.tail = None
    if tail is None or not tail.parts:
        return 0
    one = Backup.__new__(Backup)
    one.state = state
    one.host = host
    one.parts = tail.parts
    for each in tail.parts:
        part = each
        is_running = is_running or part.is_running
    try:
        if not tail.fill(one):
            one.release()
        elif (one.num_blocks == 0 and not is_running) or not copy(one):
            one.settle()
            done(one)
    except BaseException:
        one.release()
        raise
    return 0


cdef int save_path(CacheState state, HostIndex host, int32_t node, copy, done) except -1:
    """Copy what the host lacks of the path that ends with a node of the device's tree, and publish it."""
    cdef Backup one = Backup.__new__(Backup)
    one.state = state
    one.host = host
    try:
        if not plan_path(one, node):
            one.release()
        elif one.num_blocks == 0 and one.state_blocks == 0:
            one.settle()  # the host has it all: it is the most recent there now
        elif not copy(one):
            one.settle()
            done(one)
    except BaseException:
        one.release()
        raise
    return 0


cdef bint plan_path(Backup one, int32_t node) except -1:
    """List what the host lacks of a path, and take host blocks for it; return False if there is no room."""
    cdef PrefixCache prefix = one.state.prefix
    cdef vector[int64_t] counts
    cdef vector[int32_t] tokens
    cdef int32_t space, state
    one.key = PrefixKey.__new__(PrefixKey)
    space = prefix.tree.copy_path_raw(node, tokens, one.key.marks, one.lanes)
    state = prefix.tree.state_of_raw(node)
    one.key.ids = array_of(tokens)
    one.key.key = prefix.tree.space_keys[space]
    one.end = one.key.num_blocks = <int64_t>tokens.size() // one.host.block_size
    one.hint.rank = 0
    one.path = Path()
    one.path.pin(one.host.tree, one.key.key, one.key.query(one.end), one.end)
    one.first = one.path.num_blocks
    one.state_blocks = one.end if state >= 0 else 0
    if one.state_blocks > 0 and one.has_state():
        one.state_blocks = 0
    one.list_missing(counts)
    if not one.fit(counts):
        return False
    one.take(state, counts)
    return one.lease is not None


# -- the tail --------------------------------------------------------------------------------------------------------


def publish_waiting(CacheState state not None, HostIndex host not None, copy, done):
    """Publish the end of a path whose beginning is still on the device; the host then has the path twice."""
    _guard = Held(state.lock)
    if host.tail is not None:
        host.sweep()
        publish_tail(state, host, copy, done)


def publish_for(CacheState state not None, HostIndex host not None, const int32_t[::1] ids, options, copy, done):
    """Do what `publish_waiting` does, if a prompt goes on into the end that waits."""
    cdef PrefixKey key
    _guard = Held(state.lock)
    if host.tail is None:
        return
    key = prefix_key(host.block_size, ids, options)
    if key.num_blocks > 0 and (<SpilledTail>host.tail).is_asked_for(key.key, key.ids):
        host.sweep()
        publish_tail(state, host, copy, done)


def drop_waiting(CacheState state not None, HostIndex host not None):
    """Give up the end that waits."""
    cdef SpilledTail tail
    _guard = Held(state.lock)
    tail = host.tail
    host.tail = None
    if tail is not None:
        while tail.parts:
            tail.drop_last()
