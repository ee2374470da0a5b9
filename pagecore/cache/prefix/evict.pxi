"""Eviction: blocks that only the tree holds, counted and freed.

Two kinds of blocks can be freed: those that the tree calls evictable, because no receipt covers them, and those that
receipts cover but no row uses ("unused": duplicates, and blocks that a window has passed).
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp.algorithm cimport fill

from pagecore.cache.sequences._kept cimport KeptKeys, first_kept, sink_blocks
from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.radix._radix cimport Prefix, key_of, read_prefix
from pagecore.native.std cimport span, vector


# -- count -------------------------------------------------------------------------------------------------------------


cdef void count_evictable(PrefixCache prefix, vector[int64_t]& out) noexcept:
    """Write the number of blocks of each group that eviction can free."""
    cdef int32_t group
    for group in range(prefix.num_lanes):
        out[group] = prefix.tree.native.evictable(prefix.components[group])
    count_unused(prefix, prefix.counts)
    for group in range(prefix.num_lanes):
        out[group] += prefix.counts[group]


cdef void subtract_evictable(
    PrefixCache prefix, vector[int64_t]& missing, list writers, const vector[int32_t]& first_blocks
) noexcept:
    cdef int32_t group, lane
    cdef bint is_short = False
    for group in range(prefix.num_lanes):
        missing[group] -= prefix.tree.native.evictable(prefix.components[group])
        is_short = is_short or missing[group] > 0
    if not is_short:
        return
    count_unused(prefix, prefix.counts)
    for group in range(prefix.num_lanes):
        missing[group] -= prefix.counts[group]
    for writer in writers:
        for lane in range(prefix.num_lanes):
            group = prefix.groups[lane]
            if not first_blocks.empty() and (<Sequence>writer).hold.truncated_block() < first_blocks[group]:
                continue  # the step does not write to that block
            missing[group] -= becomes_exclusive(prefix, <Sequence>writer, lane, writers)


cdef void count_unused(PrefixCache prefix, vector[int64_t]& counts) noexcept:
    """Count the unused blocks of each group, each block once."""
    cdef int32_t lane, block, block_index
    cdef uint64_t bit
    fill(counts.begin(), counts.end(), 0)
    if prefix.num_duplicated == 0 and prefix.kept.empty():
        return
    for lane in range(prefix.num_lanes):
        fill(prefix.counted[lane].begin(), prefix.counted[lane].end(), 0)
    for candidate in prefix.by_row:
        if candidate is None or not may_have_unused(prefix, <Sequence>candidate):
            continue
        for lane in range(prefix.num_lanes):
            find_unused(prefix, <Sequence>candidate, lane)
            for block_index in prefix.block_indices:
                block = prefix.ids[block_index]
                bit = (<uint64_t>1) << (block & 63)
                if prefix.counted[lane][block >> 6] & bit == 0:
                    prefix.counted[lane][block >> 6] |= bit
                    counts[prefix.groups[lane]] += 1


cdef bint may_have_unused(PrefixCache prefix, Sequence sequence) noexcept:
    return not prefix.kept.empty() or sequence.hold.has_duplicates


cdef void find_unused(PrefixCache prefix, Sequence sequence, int32_t lane) noexcept:
    """Write the indices of the unused blocks of a sequence's path to `block_indices`, and the path to `ids`."""
    cdef int64_t end = sequence.hold.receipt.depth()
    cdef int64_t first = 0
    cdef int64_t last = end if sequence.hold.has_duplicates else 0
    cdef KeptKeys keys
    if lane >= prefix.num_full:
        keys = prefix.kept[lane - prefix.num_full]
        first = prefix.tree.native.first_needed(prefix.components[prefix.groups[lane]], end)
        if not sequence.hold.has_duplicates:
            last = min(end, first_kept(keys, sequence.computed) // prefix.block_size)
            while last < end and prefix.own_block(sequence, <int32_t>last, lane) == 0:
                last += 1  # the row released it before the sequence was cut
    prefix.block_indices.clear()
    if first < last:
        find_held_once(prefix, sequence, lane, first, last, end)
    if first > 0 and sequence.hold.has_duplicates:
        find_unused_sinks(prefix, sequence, lane, min(end, sink_blocks(keys, prefix.block_size)))


cdef void find_held_once(
    PrefixCache prefix, Sequence sequence, int32_t lane, int64_t first, int64_t last, int64_t end
) noexcept:
    """Write the indices of the blocks [first, last) of a path that only the tree holds."""
    prefix.tree.native.known_tail(
        sequence.hold.receipt.native.node, lane, span[int32_t](prefix.ids + first, <size_t>(end - first))
    )
    (<BlockPool>prefix.pools[lane]).find_held_once_raw(
        prefix.ids + first, <size_t>(last - first), prefix.block_indices
    )
    for i in range(prefix.block_indices.size()):
        prefix.block_indices[i] += <int32_t>first


cdef void find_unused_sinks(PrefixCache prefix, Sequence sequence, int32_t lane, int64_t count) noexcept:
    """Add the blocks of sinks of which the sequence has duplicates."""
    cdef int32_t block_index, block
    for block_index in range(<int32_t>count):
        block = prefix.tree.native.known_id(sequence.hold.receipt.native.node, block_index, lane)
        if block != 0 and (<BlockPool>prefix.pools[lane]).ref_count_raw(block) == 1:
            prefix.ids[block_index] = block
            prefix.block_indices.push_back(block_index)


# -- free --------------------------------------------------------------------------------------------------------------


cdef int64_t free_blocks(PrefixCache prefix, vector[int64_t]& left) noexcept:
    cdef int32_t group
    cdef int64_t given_up = 0
    cdef int64_t wanted = 0
    cdef bint is_short = False
    for group in range(prefix.num_lanes):
        is_short = is_short or left[group] > prefix.tree.native.evictable(prefix.components[group])
    if is_short:
        given_up += reclaim_unused(prefix, left)
    for group in range(prefix.num_lanes):
        if prefix.components[group] == 0:
            wanted = max(wanted, left[group])
    if wanted > 0:
        given_up += evict(prefix, 0, wanted, left)
    for group in range(prefix.num_lanes):
        if prefix.components[group] != 0 and left[group] > 0:
            given_up += evict(prefix, prefix.components[group], left[group], left)
    return given_up


cdef int64_t evict(PrefixCache prefix, int32_t component, int64_t amount, vector[int64_t]& left) noexcept:
    """Evict up to `amount` blocks of a component; subtract the freed blocks of each group from `left`."""
    cdef int64_t evicted, given_up = 0
    while amount > 0:
        evicted = prefix.tree.evict_raw(component, amount)
        if evicted == 0:
            break
        given_up += evicted
        amount -= evicted
        free_gone(prefix, prefix.tree.gone_raw, left)
    return given_up


cdef void free_gone(PrefixCache prefix, const vector[vector[int32_t]]& gone, vector[int64_t]& left) noexcept:
    """Drop the references to what the tree evicted; subtract the freed blocks of each group from `left`."""
    cdef int32_t lane, freed
    for lane in range(prefix.num_lanes):
        freed = (<BlockPool>prefix.pools[lane]).free_raw(gone[lane].data(), gone[lane].size())
        left[prefix.groups[lane]] -= freed
        prefix.num_evicted_blocks += freed
    free_evicted_states(prefix, gone[prefix.num_lanes])


cdef int64_t free_evicted_states(PrefixCache prefix, const vector[int32_t]& gone) noexcept:
    """Drop the references to states that the tree evicted; return the number of freed slots."""
    if prefix.states is None:
        return 0
    prefix.num_evicted_states += <int64_t>gone.size()
    return prefix.states.checkpoints.free_raw(gone.data(), gone.size())


cdef int64_t free_slots(PrefixCache prefix, int64_t wanted) noexcept:
    cdef int64_t freed = 0, step
    while freed < wanted:
        step = evict_states(prefix, wanted - freed)
        if step < 0:
            break
        freed += step
    return freed


cdef int64_t evict_states(PrefixCache prefix, int64_t amount) noexcept:
    """Evict up to `amount` states; return the number of slots that this freed, or -1 if no state is left."""
    if prefix.tree.evict_raw(<int32_t>prefix.kept.size() + 1, amount) == 0:
        return -1
    return free_evicted_states(prefix, prefix.tree.gone_raw[prefix.num_lanes]) + free_checkpoints(prefix)


cdef int64_t free_checkpoints(PrefixCache prefix) noexcept:
    """Drop the evicted states that idle rows keep as their checkpoints; return the number of freed slots.

    Otherwise the tree would lose states of other prefixes, and their slots would stay with rows.
    """
    cdef int32_t row, slot
    cdef int64_t freed = 0
    cdef size_t i
    for i in range(prefix.tree.gone_raw[prefix.num_lanes].size()):
        slot = prefix.tree.gone_raw[prefix.num_lanes][i]
        if prefix.states.checkpoints.ref_count_raw(slot) == 0:
            continue
        for row in range(<int32_t>len(prefix.by_row)):
            if keeps_for_itself(prefix, row, slot):
                prefix.states.forget_checkpoint_raw(row)
        freed += prefix.states.checkpoints.ref_count_raw(slot) == 0
    return freed


cdef bint keeps_for_itself(PrefixCache prefix, int32_t row, int32_t slot) noexcept:
    """Return True if a slot is the checkpoint of an idle row."""
    cdef object holder = prefix.by_row[row]
    return holder is not None and (<Sequence>holder).pending < 0 and prefix.states.checkpoint_raw(row) == slot


cdef int64_t num_unused_states(PrefixCache prefix) except -1:
    """Return the number of states whose only holders are the tree and idle rows, as checkpoints."""
    cdef vector[int32_t] states, holders
    cdef int32_t row, slot
    cdef int64_t count = 0
    states = prefix.tree.native.held_ids(prefix.tree.num_lanes)
    holders.resize(<size_t>prefix.states.checkpoints.num_blocks, 1)
    for row in range(<int32_t>len(prefix.by_row)):
        if prefix.by_row[row] is not None and (<Sequence>prefix.by_row[row]).pending < 0:
            holders[prefix.states.checkpoint_raw(row)] += 1
    for slot in states:
        count += prefix.states.checkpoints.ref_count_raw(slot) == holders[slot]
    return count


cdef int64_t reclaim_unused(PrefixCache prefix, vector[int64_t]& left) noexcept:
    """Free unused blocks by substituting the sequences' own blocks for them in the tree."""
    cdef int32_t lane, group, block_index, freed
    cdef int64_t given_up = 0
    if prefix.num_duplicated == 0 and prefix.kept.empty():
        return 0
    for candidate in prefix.by_row:
        if candidate is None or not may_have_unused(prefix, <Sequence>candidate):
            continue
        for lane in range(prefix.num_lanes):
            group = prefix.groups[lane]
            if left[group] <= 0:
                continue
            find_unused(prefix, <Sequence>candidate, lane)
            for block_index in prefix.block_indices:
                if left[group] <= 0:
                    break
                freed = prefix.substitute(<Sequence>candidate, block_index, lane)
                left[group] -= freed
                prefix.num_evicted_blocks += freed
                given_up += 1
    return given_up


cdef int64_t clear(PrefixCache prefix) noexcept:
    cdef int32_t group, component
    cdef int64_t freed = 0
    count_evictable(prefix, prefix.left)
    for group in range(prefix.num_lanes):
        freed += prefix.left[group]
    reclaim_unused(prefix, prefix.left)
    for component in range(<int32_t>prefix.kept.size() + 1):
        evict(prefix, component, prefix.tree.native.evictable(component), prefix.left)
    if prefix.states is not None:
        free_slots(prefix, prefix.states.checkpoints.num_blocks)
    for group in range(prefix.num_lanes):
        freed -= prefix.left[group]
    return freed


# -- for Python --------------------------------------------------------------------------------------------------------


def evictable(PrefixCache prefix not None):
    """Return the number of blocks of each group that eviction can free, as a list of int."""
    count_evictable(prefix, prefix.left)
    return list(prefix.left) + [0] * (prefix.tables.num_groups - prefix.num_lanes)


def unused_states(PrefixCache prefix not None):
    """Return the number of states that eviction can free."""
    return 0 if prefix.states is None else num_unused_states(prefix)


def evict_prefix(PrefixCache prefix not None, ids, options, int64_t keep):
    """Evict the end of a cached prefix back to `keep` tokens; return the number of freed blocks."""
    cdef Prefix wanted = read_prefix(prefix.block_size, ids, options.namespace, options.spans, None)
    cdef vector[vector[int32_t]] gone
    cdef int64_t freed = prefix.num_evicted_blocks
    prefix.tree.evict_path_raw(wanted, keep, gone)
    free_gone(prefix, gone, prefix.left)
    return prefix.num_evicted_blocks - freed


def evict_namespace(PrefixCache prefix not None, namespace):
    """Evict all cached prefixes of a namespace; return the number of freed blocks."""
    cdef vector[vector[int32_t]] gone
    cdef int64_t freed = prefix.num_evicted_blocks
    prefix.tree.evict_namespace_raw(None if namespace is None else key_of(namespace), gone)
    free_gone(prefix, gone, prefix.left)
    return prefix.num_evicted_blocks - freed


cdef int read_counts(object counts, vector[int64_t]& out) except -1:
    for count in counts:
        out.push_back(<int64_t>count)
    return 0


def lacking(PrefixCache prefix not None, missing, list writers not None):
    """Return the blocks of each group that a step lacks after eviction; `writers` bring tokens to the step."""
    cdef vector[int64_t] left
    cdef vector[int32_t] all_blocks
    read_counts(missing, left)
    truncated = [each for each in writers if (<Sequence>each).hold.truncated_inside_block]
    subtract_evictable(prefix, left, truncated, all_blocks)
    return [max(0, count) for count in left]
