"""Publishing: full, computed and known blocks of a sequence become blocks of the tree, and its receipt covers them."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagecore.cache.sequences._sequences cimport PrefixHold, Sequence, num_whole
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.radix._native cimport Query, State, States


cdef int number_namespaces(PrefixCache prefix, list sequences) except -1:
    cdef Sequence sequence
    for sequence in sequences:
        if sequence.hold.receipt.key is None:
            sequence.hold.namespace_number = 0
        elif sequence.hold.receipt.native.node < 0:
            sequence.hold.namespace_number = prefix.tree._space(sequence.hold.receipt.key)
    return 0


cdef void publish(PrefixCache prefix, list sequences) noexcept:
    cdef Sequence sequence
    for sequence in sequences:
        publish_one(prefix, sequence, 0)


cdef int32_t num_complete(PrefixCache prefix, Sequence sequence) noexcept:
    cdef int32_t whole = num_whole(sequence, prefix.block_size)
    if prefix.publishes_sealed:
        whole = min(whole, sequence.sealed // prefix.block_size)
    return min(whole, sequence.hold.published if sequence.hold.is_ended else sequence.hold.publish_limit)


cdef int32_t num_publishable(PrefixCache prefix, Sequence sequence, int32_t whole, int32_t shared) noexcept:
    cdef PrefixHold hold = sequence.hold
    cdef int32_t first
    whole = min(whole, hold.published if hold.is_ended else hold.publish_limit)
    if whole > hold.published:
        # Otherwise another row would have blocks of the tree that its receipt does not cover.
        first = max(hold.published, min(shared, whole))
        whole = first + num_unshared(prefix, sequence, first, whole)
    return max(whole, hold.published)


cdef void publish_one(PrefixCache prefix, Sequence sequence, int32_t shared) noexcept:
    cdef PrefixHold hold = sequence.hold
    cdef int32_t checkpoint = new_checkpoint(prefix, sequence)
    cdef int32_t whole = num_publishable(prefix, sequence, num_complete(prefix, sequence), shared)
    if checkpoint > whole * <int64_t>prefix.block_size or hold.truncated_inside_block:
        checkpoint = 0  # offered by a later call
    if (whole > hold.published or checkpoint > 0) and (
        hold.namespace_number >= 0 or hold.receipt.native.node >= 0
    ):
        if try_publish(prefix, sequence, whole, checkpoint):
            hold.published = whole
            hold.offered_state = max(hold.offered_state, checkpoint)
            prefix.note_truncated(hold)
            if hold.has_ahead() and hold.receipt.depth() >= hold.ahead.depth():
                prefix.release_ahead(hold)
    if hold.receipt.native.node < 0 and hold.namespace_number > 0:
        prefix.tree.native.drop_namespace_if_empty(hold.namespace_number)
        hold.namespace_number = -1


cdef void renew_values(PrefixCache prefix, Sequence sequence) noexcept:
    cdef PrefixHold hold = sequence.hold
    if hold.is_ended or hold.truncated_inside_block or hold.published in (0, INT32_MAX):
        return
    if hold.needs_values(prefix.now):
        try_publish(prefix, sequence, hold.published, 0)


cdef bint try_publish(PrefixCache prefix, Sequence sequence, int32_t num_blocks, int32_t checkpoint) noexcept:
    """Offer the first blocks of a sequence, and its checkpoint if there is one; return False if memory is short."""
    cdef PrefixHold hold = sequence.hold
    cdef Query query = prefix.query_of(sequence, num_blocks)
    cdef States states
    cdef State state
    cdef int32_t lane
    for lane in range(prefix.num_lanes):
        prefix.lanes[lane] = prefix.tables.row_raw(sequence.row, prefix.groups[lane]).data()
    if checkpoint > 0:
        state.blocks = checkpoint // prefix.block_size
        state.id = prefix.states.checkpoint_raw(sequence.row)
        states = States(&state, 1)
    if hold.offers_whole or checkpoint > 0:
        if not prefix.tree.try_insert_raw(
            hold.receipt, query, prefix.lanes, states, hold.hint(prefix.now), hold.hint_ranges(prefix.now), prefix.now
        ):
            return False
        hold.valued_at = prefix.now
    elif not prefix.tree.try_extend_raw(hold.receipt, query, prefix.lanes):
        return False
    for lane in range(prefix.num_lanes):
        (<BlockPool>prefix.pools[lane]).share_raw(
            prefix.tree.inserted.taken[lane].data(), prefix.tree.inserted.taken[lane].size()
        )
        if prefix.tree.inserted.duplicates[lane].size() > 0:
            prefix.note_duplicates(hold, True)
    if checkpoint > 0:
        prefix.states.checkpoints.share_raw(
            prefix.tree.inserted.taken[prefix.num_lanes].data(), prefix.tree.inserted.taken[prefix.num_lanes].size()
        )
    return True


cdef int32_t new_checkpoint(PrefixCache prefix, Sequence sequence) noexcept:
    cdef int32_t length
    if prefix.states is None or sequence.hold.is_ended or sequence.hold.published == INT32_MAX:
        return 0
    length = prefix.states.checkpoint_length_raw(sequence.row)
    return length if length != sequence.hold.offered_state else 0


cdef int32_t num_unshared(PrefixCache prefix, Sequence sequence, int32_t first, int32_t last) noexcept:
    """Return the number of blocks in [first, last) before the first that has another holder."""
    cdef int32_t lane, begin
    cdef size_t count = <size_t>(last - first)
    for lane in range(prefix.num_lanes):
        begin = first
        if sequence.hold.has_component_ahead(prefix.component_of(lane)):  # its blocks have holders that are covered
            begin = max(first, min(prefix.num_held(sequence.hold), first + <int32_t>count))
        count = begin - first + (<BlockPool>prefix.pools[lane]).num_unshared_raw(
            prefix.tables.row_raw(sequence.row, prefix.groups[lane]).data() + begin, count - (begin - first)
        )
    return <int32_t>count
