"""Pinned paths of a prefix tree, and the entries that a path of the host's tree takes."""

from libc.stdint cimport int32_t, int64_t

from pagecore.index.radix._native cimport (
    HintRanges,
    Int32Pointer,
    Int32s,
    NativeMatch,
    Query,
    RetentionHint,
    State,
    States,
)
from pagecore.index.radix._radix cimport RadixTree
from pagecore.native.std cimport span, vector

from pagecore.errors import NotEnoughMemory


cdef class Path:
    """The longest prefix of a query that the full component of a tree has, pinned, and its ids."""

    cdef int pin(self, RadixTree tree, object key, const Query& query, int64_t limit) except -1:
        cdef NativeMatch found
        cdef Query own = query
        own.space = space_of(tree, key)
        self.tree = tree
        self.ids.resize(<size_t>tree.num_lanes)
        receipt = tree.blank_receipt(key)
        found = tree.native.match(own, limit)
        tree.reserve_moves(1)
        receipt.native = tree.native.reserved_lock_full(found)
        self.receipt = receipt
        self.num_blocks = found.full_blocks
        try:
            self.read()
        except BaseException:
            self.release()
            raise
        return 0

    cdef int read(self) except -1:
        cdef size_t lane
        for lane in range(self.ids.size()):
            self.ids[lane].resize(<size_t>self.num_blocks)
            if self.num_blocks > 0:
                self.tree.native.known_tail(
                    self.receipt.native.node,
                    <int32_t>lane,
                    span[int32_t](self.ids[lane].data(), <size_t>self.num_blocks),
                )
        return 0

    cdef void release(self) noexcept:
        cdef RetentionHint no_hint
        if self.receipt is not None:
            self.receipt.drop(no_hint)
            self.receipt = None


cdef int64_t publish(
    HostIndex host, object key, Query query, vector[vector[int32_t]]& lanes, int64_t num_blocks, int64_t state_blocks,
    int32_t state_slot, const RetentionHint& hint, HintRanges ranges, double now
) except -1:
    cdef Path path = Path()
    path.pin(host.tree, key, query, num_blocks)
    try:
        num_blocks = merge(host, path, lanes, num_blocks)
        if num_blocks > 0:
            offer(host, path, key, query, lanes, num_blocks, state_blocks, state_slot, hint, ranges, now)
    finally:
        path.release()
    return num_blocks


cdef int64_t merge(HostIndex host, Path path, vector[vector[int32_t]]& lanes, int64_t num_blocks) noexcept:
    """Fill in the ids that the path has; return the number of leading blocks without a gap in the full component."""
    cdef size_t lane
    cdef int64_t i
    for lane in range(lanes.size()):
        for i in range(path.num_blocks):
            if path.ids[lane][i] != 0:
                lanes[lane][i] = path.ids[lane][i]
    for lane in range(<size_t>host.num_full):
        for i in range(path.num_blocks, num_blocks):
            if lanes[lane][i] == 0:
                num_blocks = i
                break
    return num_blocks


cdef int offer(
    HostIndex host, Path path, object key, Query query, vector[vector[int32_t]]& lanes, int64_t num_blocks,
    int64_t state_blocks, int32_t state_slot, const RetentionHint& hint, HintRanges ranges, double now
) except -1:
    cdef RadixTree tree = host.tree
    cdef vector[Int32Pointer] pointers
    cdef States states
    cdef State state
    cdef size_t lane
    cdef bint is_inserted
    for lane in range(lanes.size()):
        pointers.push_back(lanes[lane].data())
    if 0 < state_blocks <= num_blocks:
        state.blocks = state_blocks
        state.id = state_slot
        states = States(&state, 1)
    query.tokens = Int32s(query.tokens.data(), <size_t>(num_blocks * host.block_size))
    query.space = tree._space(key)
    is_inserted = tree.try_insert_raw(path.receipt, query, pointers, states, hint, ranges, now)
    if query.space > 0:
        tree.native.drop_namespace_if_empty(query.space)
    if not is_inserted:
        raise NotEnoughMemory(f"no memory for {num_blocks} blocks of the host's prefix tree; free some")
    # The tree has the entries: from here on nothing fails.
    for lane in range(lanes.size()):
        host.pool(host.groups[lane]).share_raw(tree.inserted.taken[lane].data(), tree.inserted.taken[lane].size())
    if host.has_states:
        host.pool(host.num_lanes).share_raw(
            tree.inserted.taken[host.num_lanes].data(), tree.inserted.taken[host.num_lanes].size()
        )
    return 0
