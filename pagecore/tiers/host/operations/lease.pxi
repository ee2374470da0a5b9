"""Host blocks that a transfer holds: leases of new blocks, and holds of cached prefixes."""

from libc.math cimport NAN
from libc.stdint cimport int32_t, int64_t

from pagecore.cache.prefix._prefix cimport read_counts
from pagecore.cache.state._state cimport CacheState, Held, StoredBlocks
from pagecore.index.radix._native cimport HintRanges, Int32s, Marks, NativeMatch, Query, ReceiptPointer, RetentionHint
from pagecore.index.radix._radix cimport Prefix, Receipt, key_of, read_marks, read_prefix
from pagecore.native.std cimport vector

import numpy as np

from pagecore.errors import DoubleFree, ShapeError


cdef class EntryLease:
    """Host blocks of each lane that one transfer holds; given back by `release`, or when the lease is collected.

    Attributes
    ----------
    blocks : tuple of numpy.ndarray
        int32 ids of each group, then the slots of states. In an `EntryHold` a group has the block at each index of the
        prefix, 0 where a window has none.
    """

    @property
    def blocks(self):
        """Ids of each group, then the slots of states: int32 arrays, copies."""
        return self.stored.arrays

    @property
    def is_held(self):
        """False after the lease was released."""
        return self.stored.num_held > 0

    @property
    def num_receipts(self):
        """Pins of the host's tree that the lease has."""
        return 0

    def release(self):
        """Give the blocks back; a second call does nothing."""
        self.give_up()

    cdef void give_up(self) noexcept:
        self.stored.release()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()


cdef class EntryHold(EntryLease):
    """A prefix of the host's tree, held while its bytes are read.

    Attributes
    ----------
    num_tokens : int
        Tokens of the prefix.
    state_tokens : int
        Tokens before the state whose slot is in `blocks`; 0 for none.
    """

    @property
    def num_receipts(self):
        """Pins of the host's tree that the hold has."""
        return 0 if self.receipt is None else 1

    def __del__(self):
        # The blocks go back to their pools without the lock; a receipt waits for the next call that has it.
        if self.receipt is not None:
            self.index.lost.push_back(self.receipt.native)  # reserved
            self.index.num_holding -= 1
            self.receipt.native.components = 0
            self.receipt = None

    def __cinit__(self):
        self.rank = NAN

    cdef void take_receipt(self, Receipt receipt) noexcept:
        self.receipt = receipt
        self.index.num_holding += 1

    cdef void give_up(self) noexcept:
        cdef RetentionHint hint
        hint.rank = self.rank
        self.stored.release()
        if self.receipt is not None:
            self.receipt.drop(hint)
            self.receipt = None
            self.index.num_holding -= 1


cdef class PrefixKey:
    """The tokens of a prefix, its spans and its namespace."""

    cdef Query query(self, int64_t num_blocks) except *:
        cdef Query query
        cdef const int32_t[::1] ids = self.ids
        if num_blocks > 0:
            query.tokens = Int32s(&ids[0], <size_t>(num_blocks * (ids.shape[0] // self.num_blocks)))
        query.marks = Marks(self.marks.data(), self.marks.size())
        return query


cdef PrefixKey prefix_key(int64_t block_size, const int32_t[::1] ids, object options):
    cdef PrefixKey prefix = PrefixKey.__new__(PrefixKey)
    prefix.num_blocks = ids.shape[0] // block_size
    prefix.ids = np.array(ids[:prefix.num_blocks * block_size], np.int32)
    prefix.key = None if options.namespace is None else key_of(options.namespace)
    if options.spans is not None:
        read_marks(options.spans, block_size, prefix.num_blocks, prefix.marks)
    return prefix


cdef object spans_of(PrefixKey prefix, int64_t block_size):
    """Return the spans of a prefix as a tuple of (start, end, digest); None if it has none."""
    cdef size_t i
    cdef bytes content
    spans = {}
    for i in range(prefix.marks.size()):
        start = prefix.marks[i].block * block_size + prefix.marks[i].start
        content = (<const char*> prefix.marks[i].digest.bytes.data())[:32]
        kind = prefix.marks[i].digest.kind
        digest = int.from_bytes(content, "little", signed=True) if kind < 0 else content[:kind]
        spans[start] = start, prefix.marks[i].block * block_size + prefix.marks[i].end, digest
    return tuple(spans.values()) or None


cdef EntryLease take_lease(HostIndex index, const vector[int64_t]& counts):
    cdef EntryLease lease = EntryLease.__new__(EntryLease)
    cdef vector[vector[int32_t]] like
    cdef size_t group
    like.resize(counts.size())
    for group in range(counts.size()):
        like[group].resize(<size_t>max(counts[group], 0))
    lease.index = index
    lease.stored = StoredBlocks(index.pools)
    lease.stored.reserve(like)
    index.leases.add(lease)
    return lease if lease.stored.allocate() else None


def reserve(CacheState state not None, HostIndex index not None, counts):
    """Return a lease of `counts` blocks of each lane; evict for them, and return None if too much is pinned."""
    cdef vector[int64_t] needed
    read_counts(counts, needed)
    if needed.size() != <size_t>len(index.pools) or min(counts) < 0:
        raise ShapeError(f"counts are {list(counts)!r}; give {len(index.pools)} numbers, one for each lane")
    _guard = Held(state.lock)
    index.sweep()
    if not index.can_make_room(needed) or not index.make_room(needed):
        return None
    lease = take_lease(index, needed)
    return lease


def adopt(CacheState state not None, HostIndex index not None, EntryLease lease not None, ids, options, places):
    """Publish the blocks of a lease; return the leading tokens that the host's tree then has.

    Parameters
    ----------
    places : list of numpy.ndarray
        int64 index of the block in the prefix of each block of each lane, -1 for none; for a state the index of the
        block at whose end it is.
    """
    cdef PrefixKey prefix = prefix_key(index.block_size, ids, options)
    cdef vector[vector[int32_t]] lanes
    cdef const int64_t[::1] indices
    cdef const int32_t[::1] blocks
    cdef RetentionHint no_hint
    cdef HintRanges no_ranges
    cdef int64_t state_blocks = 0
    cdef int32_t slot = 0, lane, group
    cdef Py_ssize_t i
    cdef int64_t num_blocks
    if lease.index is not index:
        raise ShapeError("the lease belongs to another tier; adopt it there")
    if not lease.is_held:
        raise DoubleFree("the lease was released already; reserve another one")
    held = lease.blocks
    check_places(index, prefix.num_blocks, held, places)
    _guard = Held(state.lock)
    lanes.resize(<size_t>index.num_lanes)
    for lane in range(index.num_lanes):
        group = index.groups[lane]
        indices, blocks = places[group], held[group]
        lanes[lane].resize(<size_t>prefix.num_blocks)
        for i in range(blocks.shape[0]):
            if indices[i] >= 0:
                lanes[lane][indices[i]] = blocks[i]
    if index.has_states:
        indices, blocks = places[index.num_lanes], held[index.num_lanes]
        for i in range(blocks.shape[0]):
            if indices[i] + 1 > state_blocks:
                state_blocks, slot = indices[i] + 1, blocks[i]
    try:
        num_blocks = publish(
            index, prefix.key, prefix.query(prefix.num_blocks), lanes, prefix.num_blocks, state_blocks, slot, no_hint,
            no_ranges, index.prefix.now,
        )
    finally:
        lease.give_up()
    return num_blocks * index.block_size


def check_places(HostIndex index not None, int64_t num_blocks, held, places):
    """Raise ShapeError unless `places` has an index below `num_blocks`, or -1, for each block of each lane."""
    if len(places) != len(held) or any([len(a) != len(b) for a, b in zip(places, held)]):
        raise ShapeError(
            f"places have {[len(each) for each in places]} entries; the lease has {[len(each) for each in held]} blocks"
        )
    for each in places:
        if len(each) and (each.min() < -1 or each.max() >= num_blocks):
            raise ShapeError(f"places run from {each.min()} to {each.max()}; the tokens fill {num_blocks} blocks")
        known = each[each >= 0]
        if len(np.unique(known)) != len(known):
            raise ShapeError("places list a block of the prefix twice; give each index once")


def hold(CacheState state not None, HostIndex index not None, ids, options, int64_t most):
    """Return an EntryHold of the longest prefix, up to `most` tokens, that the host's full component has."""
    cdef PrefixKey prefix = prefix_key(index.block_size, ids, options)
    cdef EntryHold held = EntryHold.__new__(EntryHold)
    cdef Path path = Path()
    cdef NativeMatch found
    cdef vector[vector[int32_t]] like
    cdef Query query
    cdef int32_t lane
    cdef int64_t limit = min(prefix.num_blocks, most // index.block_size)
    held.index = index
    held.stored = StoredBlocks(index.pools)
    _guard = Held(state.lock)
    query = prefix.query(limit)
    path.pin(index.tree, prefix.key, query, limit)
    try:
        like.resize(<size_t>len(index.pools))
        for lane in range(index.num_lanes):
            like[index.groups[lane]].assign(path.ids[lane].begin(), path.ids[lane].end())
        if index.has_states:
            query.space = space_of(index.tree, prefix.key)
            found = index.tree.native.match(query, limit)
            if found.state >= 0:
                like[index.num_lanes].push_back(found.state)
                held.state_tokens = found.blocks * index.block_size
        held.stored.reserve(like)
        index.reserve_lost()
        index.leases.add(held)
    except BaseException:
        path.release()
        raise
    held.stored.share()
    held.take_receipt(path.receipt)
    path.receipt = None
    held.num_tokens = path.num_blocks * index.block_size
    return held


def release(CacheState state not None, EntryLease lease not None):
    """Give a lease back under the lock of the cache."""
    _guard = Held(state.lock)
    lease.give_up()


def revoke(CacheState state not None, HostIndex index not None, ids, options, int64_t valid):
    """Evict the block with token `valid` of a prefix and what continues it; holds of it keep their blocks."""
    cdef Prefix wanted = read_prefix(index.block_size, ids, options.namespace, options.spans, None)
    cdef vector[ReceiptPointer] receipts
    cdef vector[vector[int32_t]] gone
    cdef Receipt receipt
    leases = list(index.leases)
    _guard = Held(state.lock)
    index.sweep()
    wanted.space = space_of(index.tree, wanted.key)
    if wanted.space < 0 or valid // index.block_size >= wanted.limit:
        return
    for lease in leases:
        if isinstance(lease, EntryHold) and (<EntryHold>lease).receipt is not None:
            receipt = (<EntryHold>lease).receipt
            receipts.push_back(&receipt.native)
    index.tree.revoke_raw(wanted.query(), valid // index.block_size, receipts, gone)
    index.free_gone(gone)
    index.sweep()
