"""Move sequences out of the blocks of a cache into a swap space, and back.

Both functions take the lock of the cache, plan, copy the bytes into blocks that no sequence uses yet, and then commit
by calls that cannot fail; see `CacheState`.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.cache._lock cimport Held
from pagecore.cache._sequence cimport Sequence, require_each
from pagecore.cache._state cimport CacheState
from pagecore.cache.cross._contents cimport CrossContent, CrossContents
from pagecore.cache.prefix._evict cimport free_blocks, free_slots
from pagecore.cache.prefix._publish cimport number_namespaces, publish
from pagecore.cache.step._cross cimport contents_to_write
from pagecore.cache.swap._stored cimport StoredBlocks, copy_vector
from pagecore.cache.swap._transfer cimport Transfer
from pagecore.index._block_pool cimport BlockPool
from pagecore.index._block_tables_native cimport Int32s
from pagecore.index._integers cimport const_int32

from pagecore.cache._sequence import as_list
from pagecore.errors import InvalidSequence, OutOfRows


def swap_out(CacheState state not None, sequences, space, refuse, moves):
    """Move the computed blocks of sequences into `space`; return None, or the error if the space lacks blocks.

    Parameters
    ----------
    refuse : callable
        ``refuse(needed, pools)`` returns an error if the pools of the space have too few blocks, else None.
    moves : callable
        ``moves(space, False)`` returns the argument of `Transfer.copy`.
    """
    cdef Transfer transfer, cross
    cdef vector[int32_t] rows
    cdef Sequence sequence
    cdef size_t i
    cdef Py_ssize_t num_groups = len(state.tables.pools)
    sequences = as_list(sequences)
    _guard = Held(state.lock)
    state.begin()
    transfer = Transfer(space, require_each(state, sequences, True), token_pools(state, space))
    if state.prefix is not None:
        number_namespaces(state.prefix, transfer.sequences)
    transfer.old.resize(len(transfer.sequences))
    for i in range(transfer.old.size()):
        sequence = <Sequence>transfer.sequences[i]
        rows.push_back(sequence.row)
        read_row(state, sequence, transfer.old[i])
        if state.states is not None:
            (<StoredBlocks>transfer.arriving[i]).checkpoint_length = state.states.checkpoint_length_raw(sequence.row)
    transfer.plan()
    cross = plan_departure(state, transfer.sequences, space, space.block_pools[num_groups:])
    error = refuse(in_order(state, transfer.needed(), cross.needed()), space.pools)
    if error is not None:
        return error
    planes, cross_planes = moves(space, False)
    transfer.take()
    cross.take()
    transfer.copy(planes)
    cross.copy(cross_planes)
    if state.prefix is not None:
        publish(state.prefix, transfer.sequences, False)
    state.tables.remove_raw(rows.data(), <Py_ssize_t>rows.size())
    # The rows are gone: from here on nothing fails.
    if state.states is not None:
        state.states.remove_raw(Int32s(rows.data(), rows.size()))
    for i in range(rows.size()):
        sequence = <Sequence>transfer.sequences[i]
        (<StoredBlocks>transfer.arriving[i]).share()
        sequence.stored = transfer.arriving[i]
        sequence.swap_space = space
        sequence.row = -1
        state.by_row[rows[i]] = None
        if state.prefix is not None:
            state.prefix.leave(sequence)
        if sequence.cross is not None:
            sequence.cross.num_swapped += 1
    transfer.lease.release()
    store_contents(state, cross)
    return None


def swap_in(CacheState state not None, sequences, refuse, moves):
    """Move sequences back into rows and blocks; return None, or the error if rows or blocks are short.

    Cached blocks that were evicted to make room stay evicted if copying fails.

    Parameters
    ----------
    refuse : callable
        ``refuse(needed, pools)`` returns an error if the cache has too few blocks, evictable ones counted, else None.
    moves : callable
        ``moves(space, True)`` returns the argument of `Transfer.copy`.
    """
    cdef list coming, transfers, copies, arrivals
    cdef vector[int64_t] missing
    cdef vector[int32_t] rows, lengths
    cdef vector[vector[span[const_int32]]] spans
    cdef vector[bint] is_exact
    cdef Sequence sequence
    cdef StoredBlocks arriving
    cdef size_t i, k, group
    cdef size_t num_groups = len(state.tables.pools)
    cdef tuple pools = cache_pools(state)
    cdef bint may_share = True
    sequences = as_list(sequences)
    _guard = Held(state.lock)
    state.begin()
    coming = require_swapped(state, sequences)
    if state.prefix is not None:
        number_namespaces(state.prefix, coming)
    transfers = plan_arrival(state, coming)
    cross_transfers = plan_contents(state, coming)
    needed = []
    for group in range(<size_t>len(pools)):
        needed.append(0)
        for each in transfers:
            needed[group] += (<Transfer>each).distinct[group].size()
    if len(coming) > state.tables.num_free_rows():
        return OutOfRows(
            f"{len(coming)} rows are needed and {state.tables.num_free_rows()} of {state.tables.max_sequences} are "
            "free; remove a sequence or swap one out, or raise max_sequences"
        )
    if state.cross is None:
        error = refuse(needed, pools)
    else:
        state.cross.require_rows(sum([len((<Transfer>each).sequences) for each in cross_transfers]))
        cross_needed = needed_by(cross_transfers, <size_t>state.cross.tables.num_groups)
        all_pools = tuple(in_order(state, list(pools), list(state.cross.tables.pools)))
        error = refuse(in_order(state, needed, cross_needed), all_pools)
    if error is not None:
        return error
    for group in range(<size_t>len(pools)):
        missing.push_back(max(0, needed[group] - (<BlockPool>pools[group]).num_free_raw()))
    copies = []
    coming = []
    for each in transfers:
        copies.append(moves((<Transfer>each).space, True)[0])
        coming.extend((<Transfer>each).sequences)
    cross_copies = []
    for each in cross_transfers:
        cross_copies.append(moves((<Transfer>each).space, True)[1])
    spans.resize(len(coming))
    for i in range(spans.size()):
        spans[i].resize(num_groups)
        lengths.push_back((<Sequence>coming[i]).computed)
        is_exact.push_back((<Sequence>coming[i]).swap_space.is_exact)
        may_share = may_share and (<Sequence>coming[i]).known >= (<Sequence>coming[i]).computed
    rows.reserve(len(coming))
    if state.prefix is not None:
        if state.observer is not None:
            state.observer.evicting(evictable_counts(state, missing))
            for group in range(<size_t>len(pools)):
                missing[group] = max(0, needed[group] - (<BlockPool>pools[group]).num_free_raw())
        free_blocks(state.prefix, missing)
        if state.states is not None:
            free_slots(state.prefix, max(0, needed[len(pools) - 1] - state.states.checkpoints.num_free))
    for each in transfers:
        (<Transfer>each).take()
        if state.tenants is not None:
            state.tenants.doubt((<Transfer>each).lease.blocks)
    for each in cross_transfers:
        (<Transfer>each).take()
    for each, planes in zip(transfers + cross_transfers, copies + cross_copies):
        (<Transfer>each).copy(planes)
    i = 0
    arrivals = []
    for each in transfers:
        for k in range((<Transfer>each).old.size()):
            arriving = <StoredBlocks>(<Transfer>each).arriving[k]
            arrivals.append(arriving)
            for group in range(num_groups):
                spans[i][group] = span[const_int32](arriving.blocks[group].data(), arriving.blocks[group].size())
            i += 1
    try:
        for i in range(spans.size()):
            rows.push_back(state.tables.add_raw(spans[i], lengths[i] if num_groups == 0 else -1))
        state.tables.truncate_raw(rows.data(), lengths.data(), <Py_ssize_t>rows.size(), False)
        add_content_rows(state, cross_transfers)
    except BaseException:
        state.tables.remove_raw(rows.data(), <Py_ssize_t>rows.size())
        remove_content_rows(state, cross_transfers)
        raise
    # The rows are there: from here on nothing fails.
    for i in range(rows.size()):
        sequence = <Sequence>coming[i]
        if state.states is not None:
            restore_state(state, sequence, rows[i], arrivals[i])
        (<StoredBlocks>sequence.stored).release()
        sequence.stored = sequence.swap_space = None
        if sequence.cross is not None:
            sequence.cross.num_swapped -= 1
        sequence.row = rows[i]
        state.by_row[rows[i]] = sequence
        if state.tenants is not None:
            state.tenants.own_row(rows[i], sequence.tenant)
        if state.prefix is not None and not is_exact[i]:
            sequence.hold.published = INT32_MAX  # its keys and values were rounded: other sequences must not reuse them
    for each in transfers:
        (<Transfer>each).lease.release()
    take_back_contents(state, cross_transfers)
    if state.prefix is not None:
        # Blocks that several of them share may be published if the ids of all of them are known.
        publish(state.prefix, coming, may_share)
    return None


cdef int read_row(CacheState state, Sequence sequence, vector[vector[int32_t]]& blocks) except -1:
    """Write the blocks of an idle sequence that have computed tokens; spare capacity is left out."""
    cdef size_t group, count = <size_t>((sequence.computed + state.block_size - 1) // state.block_size)
    cdef const int32_t* row
    cdef size_t num_groups = <size_t>state.tables.num_groups
    blocks.resize(<size_t>len(cache_pools(state)))
    for group in range(num_groups):
        row = state.tables.row_raw(sequence.row, <int64_t>group).data()
        blocks[group].assign(row, row + count)
    if state.states is not None:
        blocks[num_groups].push_back(state.states.slot_raw(sequence.row))
        blocks.back().push_back(state.states.checkpoint_raw(sequence.row))
        if state.states.is_quantised():
            blocks.back().push_back(state.states.resting_raw(sequence.row))
    return 0


cdef void restore_state(CacheState state, Sequence sequence, int32_t row, StoredBlocks arriving) noexcept:
    cdef int32_t length = (<StoredBlocks>sequence.stored).checkpoint_length
    cdef size_t last = arriving.blocks.size() - 1
    if state.states.is_quantised():
        state.states.restore_raw(
            row, sequence.computed, arriving.blocks[last - 1][0], arriving.blocks[last][1], length,
            arriving.blocks[last][0]
        )
    else:
        state.states.restore_raw(row, sequence.computed, arriving.blocks[last][0], 0, length, arriving.blocks[last][1])


cdef tuple cache_pools(CacheState state):
    """Return the pool of each group, and in a cache with states of their slots and of quantised checkpoints."""
    if state.states is None:
        return state.tables.pools
    if state.states.is_quantised():
        return (*state.tables.pools, state.states.slots, state.states.checkpoints)
    return (*state.tables.pools, state.states.slots)


cdef list evictable_counts(CacheState state, const vector[int64_t]& missing):
    """Return the missing blocks of each group and states that eviction can free: not the slots of running states."""
    cdef list counts = list(missing)
    if state.states is not None and state.states.is_quantised():
        del counts[state.tables.num_groups]
    return counts


cdef tuple token_pools(CacheState state, space):
    """Return the pools of a space that take what the pools of `cache_pools` hold."""
    cdef tuple pools = space.block_pools[:state.tables.num_groups]
    if state.states is None:
        return pools
    if state.states.is_quantised():
        return (*pools, space.state_slots, space.checkpoint_slots)
    return (*pools, space.state_slots)


cdef list in_order(CacheState state, list own, list contents):
    """Return the entries of all groups, those of encoder outputs last, and then that of the states."""
    cdef Py_ssize_t num_groups = state.tables.num_groups
    return own[:num_groups] + contents + own[num_groups:]


cdef list plan_arrival(CacheState state, list coming):
    """Plan one transfer from each space that holds any of the sequences."""
    cdef Transfer transfer
    cdef size_t i
    by_space = {}
    for sequence in coming:
        by_space.setdefault(id((<Sequence>sequence).swap_space), []).append(sequence)
    transfers = []
    for some in by_space.values():
        transfer = Transfer((<Sequence>some[0]).swap_space, some, cache_pools(state))
        transfer.old.resize(len(some))
        for i in range(transfer.old.size()):
            copy_vector(transfer.old[i], (<StoredBlocks>(<Sequence>some[i]).stored).blocks)
        transfer.plan()
        transfers.append(transfer)
    return transfers


cdef list require_swapped(CacheState state, list sequences):
    cdef list checked = require_each(state, sequences, False)
    for sequence in checked:
        if (<Sequence>sequence).swap_space is None:
            raise InvalidSequence(
                f"sequence {(<Sequence>sequence).id!r} is not swapped out; pass only sequences with is_swapped True"
            )
    return checked


# -- encoder outputs -------------------------------------------------------------------------------------------------

cdef Transfer plan_departure(CacheState state, list sequences, space, tuple pools):
    """Plan the transfer of the encoder outputs whose last resident holders are among the sequences."""
    cdef Transfer transfer
    cdef CrossContent content
    cdef Int32s blocks
    cdef size_t i, group
    cdef list leaving = []
    if state.cross is not None:
        leaving = leaving_contents(sequences)
    transfer = Transfer(space, leaving, pools)
    transfer.old.resize(len(leaving))
    for i in range(transfer.old.size()):
        content = <CrossContent>leaving[i]
        transfer.old[i].resize(len(pools))
        for group in range(transfer.old[i].size()):
            blocks = state.cross.tables.row_raw(content.row, <int64_t>group)
            transfer.old[i][group].assign(blocks.data(), blocks.data() + blocks.size())
    transfer.plan()
    return transfer


cdef list leaving_contents(list sequences):
    cdef dict counts = {}
    cdef list leaving = []
    cdef CrossContent content
    for each in sequences:
        content = (<Sequence>each).cross
        if content is not None and content.row >= 0 and content.writer is None:
            counts[content] = counts.get(content, 0) + 1
    for each, count in counts.items():
        content = <CrossContent>each
        if content.num_swapped + <int32_t>count == content.num_holders:
            leaving.append(content)
    return leaving


cdef void store_contents(CacheState state, Transfer transfer) noexcept:
    """Commit a departure: the space holds the contents' blocks, and their rows are free."""
    cdef CrossContent content
    cdef size_t i
    for i in range(transfer.old.size()):
        content = <CrossContent>transfer.sequences[i]
        (<StoredBlocks>transfer.arriving[i]).share()
        content.stored = transfer.arriving[i]
        content.space = transfer.space
        state.cross.tables.remove_raw(&content.row, 1)
        content.row = -1
    transfer.lease.release()


cdef list plan_contents(CacheState state, list coming):
    """Plan one transfer from each space that holds an encoder output of the sequences."""
    cdef Transfer transfer
    cdef size_t i
    cdef list transfers = []
    cdef dict by_space = {}
    if state.cross is None:
        return transfers
    for content in stored_contents(coming):
        by_space.setdefault(id((<CrossContent>content).space), []).append(content)
    for some in by_space.values():
        transfer = Transfer((<CrossContent>some[0]).space, some, state.cross.tables.pools)
        transfer.old.resize(len(some))
        for i in range(transfer.old.size()):
            copy_vector(transfer.old[i], (<StoredBlocks>(<CrossContent>some[i]).stored).blocks)
        transfer.plan()
        transfers.append(transfer)
    return transfers


cdef list stored_contents(list sequences):
    """Return the encoder outputs of the sequences that are in swap spaces, each once."""
    cdef dict seen = {}
    for each in sequences:
        if (<Sequence>each).cross is not None and (<Sequence>each).cross.stored is not None:
            seen[(<Sequence>each).cross] = None
    return list(seen)


cdef list needed_by(list transfers, size_t num_groups):
    """Return the number of new blocks of each group that several transfers need."""
    cdef size_t group
    needed = []
    for group in range(num_groups):
        needed.append(sum([(<Transfer>each).distinct[group].size() for each in transfers]))
    return needed


cdef int add_content_rows(CacheState state, list transfers) except -1:
    cdef Transfer transfer
    cdef size_t i
    for each in transfers:
        transfer = <Transfer>each
        for i in range(transfer.old.size()):
            state.cross.add_filled_row(
                <CrossContent>transfer.sequences[i], (<StoredBlocks>transfer.arriving[i]).blocks
            )
    return 0


cdef void remove_content_rows(CacheState state, list transfers) noexcept:
    cdef CrossContent content
    for each in transfers:
        for one in (<Transfer>each).sequences:
            content = <CrossContent>one
            if content.row >= 0:
                state.cross.tables.remove_raw(&content.row, 1)
                content.row = -1


cdef void take_back_contents(CacheState state, list transfers) noexcept:
    """Commit an arrival: the spaces release the contents, which have rows of the cache again."""
    cdef CrossContent content
    for each in transfers:
        for one in (<Transfer>each).sequences:
            content = <CrossContent>one
            (<StoredBlocks>content.stored).release()
            if not content.space.is_exact:
                state.cross.unlist(content)  # its values were rounded: other sequences must not share them
                content.key = None
            content.stored = content.space = None
        (<Transfer>each).lease.release()


def missing_cross(CacheState state not None, list sequences not None, list counts not None):
    """Return the blocks that each cross group lacks for a swap_in, if necessary, and then a step of sequences."""
    cdef vector[int32_t] each
    cdef CrossContents contents = state.cross
    if contents is None:
        return []
    for count in counts:
        each.push_back(<int32_t>count)
    contents.count_needed(contents_to_write(contents, sequences, each.data()) + stored_contents(sequences))
    missing = []
    for needed, free in zip(contents.needed, contents.available()):
        missing.append(max(0, needed - free))
    return missing


def stored_content_blocks(CacheState state not None, space):
    """Return the blocks of each encoder output in a space: lists of one int32 array for each cross group, copies."""
    cdef dict seen = {}
    for content in state.crossed():
        if (<CrossContent>content).space is space:
            seen[content] = (<StoredBlocks>(<CrossContent>content).stored).arrays
    return list(seen.values())


def stored_blocks(Sequence sequence not None):
    """Return the blocks that a swap space holds for a sequence: one int32 array for each group, copies.

    In a cache with states a further array has the slots of its state and its checkpoint; 0 for none. With quantised
    checkpoints the array has the slot of its state, and one more those of its checkpoint and of its state at rest.
    """
    return (<StoredBlocks>sequence.stored).arrays


def num_distinct(CacheState state not None, list sequences not None):
    """Return the number of distinct blocks of each group that several swapped sequences hold, and of state slots."""
    cdef list transfers = plan_arrival(state, sequences)
    return [sum(counts) for counts in zip(*[(<Transfer>each).needed() for each in transfers])]


def check_stored(CacheState state not None, Sequence sequence not None, space):
    """Raise InvalidSequence if a sequence is inconsistent with the blocks that `space` holds for it."""
    count = (sequence.computed + state.block_size - 1) // state.block_size
    held = stored_blocks(sequence)[:state.tables.num_groups]
    if sequence.row != -1 or any([len(entries) != count for entries in held]):
        raise InvalidSequence(f"{sequence!r} is inconsistent with the blocks that {space!r} holds for it")
