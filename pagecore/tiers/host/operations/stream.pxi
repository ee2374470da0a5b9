"""Streaming: blocks that pass between the device and stores through leased host blocks, which are in no tree."""

from libc.stdint cimport int32_t, int64_t

from pagecore.cache.prefix._prefix cimport PrefixCache
from pagecore.cache.sequences._sequences cimport PrefixHold, Sequence, require
from pagecore.cache.state._state cimport CacheState, Held, StoredBlocks
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.radix._native cimport NativeMatch, Query
from pagecore.index.radix._radix cimport array_of
from pagecore.native.std cimport vector


cdef class StreamedPart:
    """Blocks of a prefix of the device that are copied to a lease of host blocks.

    The blocks of the device are held until the copy ends, the lease until `drop`.

    Attributes
    ----------
    places : list of numpy.ndarray
        int32 indices in the prefix of the copied blocks, of each group.
    pairs : list of numpy.ndarray
        int32 ``[n, (device block, host block)]`` of each group.
    is_running : bool
        True until the copy has ended.
    """

    options = None
    num_receipts = 0
    is_lost = False  # the end of its copies releases it

    @property
    def blocks(self):
        """Blocks of the device that are held, of each group."""
        return self.sources.arrays

    cdef int plan(self, HostIndex host, Path path, int64_t begin, int64_t end, vector[int64_t]& counts) except -1:
        """List the blocks of the device in [begin, end), and their number in each group."""
        cdef PrefixCache prefix = self.state.prefix
        cdef vector[int32_t] found
        cdef int32_t group, lane
        cdef int64_t i
        counts.assign(<size_t>len(host.pools), 0)
        self.source_ids.resize(<size_t>len(host.pools))
        self.places = []
        for group in range(host.num_lanes):
            lane = prefix.lane_of[group]
            found.clear()
            for i in range(begin, min(end, path.num_blocks)):
                if path.ids[lane][i] != 0:
                    found.push_back(<int32_t>i)
                    self.source_ids[group].push_back(path.ids[lane][i])
            counts[group] = <int64_t>found.size()
            self.places.append(array_of(found))
        return 0

    cdef int pin(self, HostIndex host, Path path) except -1:
        """Hold the blocks of the device, and list the copies."""
        cdef PrefixCache prefix = self.state.prefix
        cdef vector[int32_t] flat
        cdef size_t group, i
        self.pairs = []
        for group in range(<size_t>len(host.pools)):
            flat.clear()
            for i in range(self.source_ids[group].size()):
                flat.push_back(self.source_ids[group][i])
                flat.push_back(self.lease.stored.blocks[group][i])
            self.pairs.append(array_of(flat).reshape(-1, 2))
        self.sources = StoredBlocks(prefix.tables.pools[:prefix.num_lanes])
        self.source_ids.resize(<size_t>prefix.num_lanes)
        self.sources.reserve(self.source_ids)
        prefix.transfers.add(self)
        self.receipt = path.receipt
        path.receipt = None
        self.sources.share()
        self.is_running = True
        return 0

    cdef void end_copy(self) noexcept:
        cdef RetentionHint no_hint
        self.is_running = False
        if self.receipt is not None:
            self.receipt.drop(no_hint)
            self.receipt = None
            self.sources.release()
            self.state.prefix.transfers.discard(self)
        if self.is_dropped and self.lease is not None:
            self.lease.give_up()

    # -- for Python ----------------------------------------------------------------------------------------------

    @property
    def host_blocks(self):
        """Leased blocks of the host, of each group and then of the states; None for a part without blocks."""
        return None if self.lease is None else self.lease.blocks

    def drop(self):
        """Give the host blocks back, after the copy if it still runs; a second call does nothing."""
        _guard = Held(self.state.lock)
        self.is_dropped = True
        if not self.is_running and self.lease is not None:
            self.lease.give_up()

    def finish(self):
        """Note that the copy has ended."""
        _guard = Held(self.state.lock)
        self.end_copy()

    def give_up(self):
        """Do what `finish` does."""
        self.finish()


def stage(CacheState state not None, HostIndex host not None, ids, options, int64_t begin, int64_t end, copy):
    """Copy blocks [begin, end) of a prefix from the device to a new lease; return the StreamedPart.

    The result is None if too much of the host is pinned, and a part without blocks if the device has lost block `begin`
    of a group without a window. The part ends before the first block that the device lacks in such a group.

    Parameters
    ----------
    copy : callable
        ``copy(part)`` copies ``part.pairs``. If it returns True, it calls ``part.finish()`` later.
    """
    cdef PrefixKey key = prefix_key(host.block_size, ids, options)
    cdef StreamedPart part = StreamedPart.__new__(StreamedPart)
    cdef Path path = Path()
    cdef vector[int64_t] counts
    cdef int64_t limit = min(end, key.num_blocks)
    _guard = Held(state.lock)
    state.begin()
    host.sweep()
    part.state = state
    path.pin(state.prefix.tree, key.key, key.query(limit), limit)
    try:
        part.plan(host, path, begin, limit, counts)
        if path.num_blocks <= begin:
            return part
        if not host.can_make_room(counts) or not host.make_room(counts):
            return None
        part.lease = take_lease(host, counts)
        if part.lease is None:
            return None
        part.pin(host, path)
        if copy(part):
            return part
    except BaseException:
        part.is_dropped = True
        part.end_copy()
        raise
    finally:
        path.release()
    part.end_copy()
    return part


def deliver(
    CacheState state not None, HostIndex host not None, EntryLease lease not None, ids, options, places, copy,
    spill=None
):
    """Publish the blocks of a lease in the device's tree, up to the first that does not continue what it has, or fit.

    Parameters
    ----------
    places : list of numpy.ndarray
        As for `adopt`. The caller keeps the lease.
    copy, spill : callable
        As for `promote`.

    Returns
    -------
    tuple of (int, list of int)
        Blocks of the prefix that the groups without a window of the device have now; the numbers of blocks of each
        group that were copied, or an empty list.
    """
    cdef PrefixKey key = prefix_key(host.block_size, ids, options)
    cdef Promotion one
    cdef int64_t limit, fits, before
    held = lease.blocks
    check_places(host, key.num_blocks, held, places)
    _guard = Held(state.lock)
    state.begin()
    host.sweep()
    limit = num_connected(state, host, key, places, &before)
    while limit > before:
        one = Promotion(state, host, key)
        try:
            hold_lease(one, held, places, limit)
            fits = one.take(limit, spill)
            if fits == limit:
                if copy(one.pairs, one.hold):
                    one.hold = None
                one.commit(limit)
                return limit, list(map(len, one.pairs))
        finally:
            one.end()
            one.release_hold()
        limit = min(fits, limit - 1)
    return before, []


cdef int64_t num_connected(
    CacheState state, HostIndex host, PrefixKey key, places, int64_t* before
) except -1:
    """Return the blocks that every group without a window has, of the device and `places` together."""
    cdef NativeMatch found
    cdef Query query = key.query(key.num_blocks)
    cdef int64_t count = key.num_blocks
    cdef const int64_t[::1] indices
    cdef vector[int32_t] there
    cdef int32_t group
    cdef Py_ssize_t i
    query.space = space_of(state.prefix.tree, key.key)
    found = state.prefix.tree.native.match(query, key.num_blocks)
    before[0] = found.full_blocks
    for group in range(host.num_lanes):
        if host.components[group] != 0:
            continue
        there.assign(<size_t>key.num_blocks, 0)
        indices = places[group]
        for i in range(indices.shape[0]):
            if indices[i] >= 0:
                there[indices[i]] = 1
        i = found.full_blocks
        while i < key.num_blocks and there[i]:
            i += 1
        count = min(count, <int64_t>i)
    return count


cdef int hold_lease(Promotion one, held, places, int64_t num_blocks) except -1:
    """Let a promotion copy from leased blocks: take a reference to each one before `num_blocks`."""
    cdef EntryHold hold = EntryHold.__new__(EntryHold)
    cdef vector[vector[int32_t]] like
    cdef const int64_t[::1] indices
    cdef const int32_t[::1] blocks
    cdef size_t group
    cdef Py_ssize_t i
    hold.index = one.host
    hold.stored = StoredBlocks(one.host.pools)
    like.resize(<size_t>len(one.host.pools))
    for group in range(<size_t>one.host.num_lanes):
        like[group].resize(<size_t>num_blocks)
        indices, blocks = places[group], held[group]
        for i in range(indices.shape[0]):
            if 0 <= indices[i] < num_blocks:
                like[group][indices[i]] = blocks[i]
    hold.stored.reserve(like)
    one.host.leases.add(hold)
    hold.stored.share()
    hold.num_tokens = num_blocks * one.host.block_size
    one.hold = hold
    return 0


def unsaved(CacheState state not None, HostIndex host not None, sequence, int64_t most, int64_t known):
    """Return the tokens that the host has of a sequence after its last backup, and those that it should have.

    Both are 0 if the backup has copied everything, or if they are `known`. Only the first `most` tokens count, in whole
    blocks.
    """
    cdef Sequence source
    cdef PrefixHold hold
    cdef PrefixKey key
    cdef Query query
    cdef NativeMatch found
    cdef int64_t published
    _guard = Held(state.lock)
    source = require(state, sequence, False)
    hold = source.hold
    published = num_wanted(host, hold, most)
    if source.row < 0 or published in (0, known // host.block_size, num_offered(host, hold)):
        return 0, 0
    key = own_key(state, source, <int32_t>published)
    query = key.query(published)
    query.space = space_of(host.tree, key.key)
    found = host.tree.native.match(query, published)
    return found.full_blocks * host.block_size, published * host.block_size


def device_room(CacheState state not None, HostIndex host not None):
    """Return the free and evictable blocks of each group of the device."""
    cdef int32_t group
    cdef list room = []
    _guard = Held(state.lock)
    for group in range(host.num_lanes):
        room.append(
            (<BlockPool>state.prefix.tables.pools[group]).num_free_raw()
            + state.prefix.tree.native.evictable(state.prefix.components[group])
        )
    return room
