"""Move sequences out of the blocks of a cache into a swap space, and back.

Both functions take the lock of the cache, plan, copy the bytes into blocks that no sequence uses yet, and then commit
by calls that cannot fail; see `CacheState`.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagecore.cache.prefix._prefix cimport free_blocks, free_slots, number_namespaces, publish
from pagecore.cache.sequences._sequences cimport Sequence, require_each
from pagecore.cache.state._state cimport CacheState, Held, StoredBlocks
from pagecore.index._integers cimport const_int32
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.tables._native cimport Int32s
from pagecore.native.std cimport span, vector

from pagecore.cache.sequences._sequences import as_list
from pagecore.errors import InvalidSequence, OutOfBlocks, OutOfRows


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
        publish(state.prefix, transfer.sequences)
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
    cdef SwapIn arrival
    sequences = as_list(sequences)
    _guard = Held(state.lock)
    state.begin()
    arrival = SwapIn(state, require_swapped(state, sequences))
    error = arrival.shortage(refuse)
    if error is not None:
        return error
    arrival.reserve(moves)
    arrival.make_room()
    if state.prefix is not None:
        number_namespaces(state.prefix, arrival.coming)  # again: code of the observer has run
    error = arrival.take()
    if error is not None:
        return error
    arrival.copy()
    arrival.add_rows()
    # The rows are there: from here on nothing fails.
    arrival.settle()
    arrival.publish_blocks()
    return None


cdef class SwapIn:
    """Sequences on their way back into the cache; the methods are the phases of `swap_in`, in their order."""

    cdef CacheState state
    cdef list coming               # the sequences, in the order of `transfers`
    cdef list transfers, contents  # one Transfer from each space: of sequences, and of encoder outputs
    cdef tuple pools
    cdef list needed               # new blocks of each of `pools`
    cdef list copies               # argument of Transfer.copy for each of `transfers`, then of `contents`
    cdef list arrivals             # StoredBlocks of each sequence
    cdef vector[int32_t] rows, lengths
    cdef vector[vector[span[const_int32]]] spans  # of each sequence and group: its new blocks
    cdef vector[bint] is_exact

    def __cinit__(self, CacheState state not None, list coming not None):
        self.state = state
        self.pools = cache_pools(state)
        if state.prefix is not None:
            number_namespaces(state.prefix, coming)
        self.transfers = plan_arrival(state, coming)
        self.contents = plan_contents(state, coming)
        self.needed = needed_by(self.transfers, <size_t>len(self.pools))
        self.coming = []
        for each in self.transfers:
            self.coming.extend((<Transfer>each).sequences)

    cdef object shortage(self, refuse):
        """Return the error if rows or blocks are short, else None."""
        cdef CacheState state = self.state
        cdef Py_ssize_t num_contents = 0
        if len(self.coming) > state.tables.num_free_rows():
            return OutOfRows(
                f"{len(self.coming)} rows are needed and {state.tables.num_free_rows()} of "
                f"{state.tables.max_sequences} are free; remove a sequence or swap one out, or raise max_sequences"
            )
        if state.cross is None:
            return refuse(self.needed, self.pools)
        for each in self.contents:
            num_contents += len((<Transfer>each).sequences)
        state.cross.require_rows(num_contents)
        cross_needed = needed_by(self.contents, <size_t>state.cross.tables.num_groups)
        all_pools = tuple(in_order(state, list(self.pools), list(state.cross.tables.pools)))
        return refuse(in_order(state, self.needed, cross_needed), all_pools)

    cdef int reserve(self, moves) except -1:
        """Make all that the later phases need, before the first change."""
        cdef Sequence sequence
        cdef size_t i, num_groups = <size_t>self.state.tables.num_groups
        self.copies = []
        self.arrivals = []
        for each in self.transfers:
            self.copies.append(moves((<Transfer>each).space, True)[0])
            self.arrivals.extend((<Transfer>each).arriving)
        for each in self.contents:
            self.copies.append(moves((<Transfer>each).space, True)[1])
        self.spans.resize(len(self.coming))
        for i in range(self.spans.size()):
            sequence = <Sequence>self.coming[i]
            self.spans[i].resize(num_groups)
            self.lengths.push_back(sequence.computed)
            self.is_exact.push_back(sequence.swap_space.is_exact)
        self.rows.reserve(len(self.coming))
        if self.state.prefix is not None:  # each is published by up to two calls; see `Transfer.cover_shared`
            self.state.prefix.reserve_moves(4 * len(self.coming))
        return 0

    cdef int make_room(self) except -1:
        """Evict what the prefix cache holds of the blocks and slots that are short."""
        cdef CacheState state = self.state
        cdef vector[int64_t] missing
        if state.prefix is None:
            return 0
        self.list_missing(missing)
        if state.observer is not None:
            state.observer.evicting(evictable_counts(state, missing))
            self.list_missing(missing)
        free_blocks(state.prefix, missing)
        if state.states is not None:
            free_slots(state.prefix, max(0, self.needed[len(self.pools) - 1] - state.states.checkpoints.num_free))
        return 0

    cdef int list_missing(self, vector[int64_t]& missing) except -1:
        """Write the number of blocks that each pool lacks."""
        cdef size_t group
        missing.resize(<size_t>len(self.pools))
        for group in range(missing.size()):
            missing[group] = max(0, self.needed[group] - (<BlockPool>self.pools[group]).num_free_raw())
        return 0

    cdef object take(self):
        """Take the new blocks; return the error if eviction has freed fewer than it could have, else None."""
        for each in self.transfers + self.contents:
            if not (<Transfer>each).take():
                free = [(<BlockPool>pool).num_free_raw() for pool in self.pools]
                return OutOfBlocks(
                    f"{self.needed} blocks and states are needed and {free} are free after eviction; "
                    "remove a sequence or swap one out",
                    tuple(self.needed),
                    tuple(free),
                )
        if self.state.tenants is not None:
            for each in self.transfers:
                self.state.tenants.doubt((<Transfer>each).lease.blocks)
        return None

    cdef int copy(self) except -1:
        """Copy the bytes to the new blocks."""
        for each, planes in zip(self.transfers + self.contents, self.copies):
            (<Transfer>each).copy(planes)
        return 0

    cdef int add_rows(self) except -1:
        """Give each sequence and each encoder output a row of its new blocks, or none of them."""
        cdef CacheState state = self.state
        cdef StoredBlocks arriving
        cdef size_t i, group, num_groups = <size_t>state.tables.num_groups
        for i in range(self.spans.size()):
            arriving = <StoredBlocks>self.arrivals[i]
            for group in range(num_groups):
                self.spans[i][group] = span[const_int32](arriving.blocks[group].data(), arriving.blocks[group].size())
        try:
            for i in range(self.spans.size()):
                self.rows.push_back(state.tables.add_raw(self.spans[i], self.lengths[i] if num_groups == 0 else -1))
            state.tables.truncate_raw(self.rows.data(), self.lengths.data(), <Py_ssize_t>self.rows.size(), False)
            add_content_rows(state, self.contents)
        except BaseException:
            state.tables.remove_raw(self.rows.data(), <Py_ssize_t>self.rows.size())
            remove_content_rows(state, self.contents)
            raise
        return 0

    cdef void settle(self) noexcept:
        """Commit: the sequences are in their rows, and the spaces release their blocks."""
        cdef CacheState state = self.state
        cdef Sequence sequence
        cdef size_t i
        for i in range(self.rows.size()):
            sequence = <Sequence>self.coming[i]
            if state.states is not None:
                restore_state(state, sequence, self.rows[i], self.arrivals[i])
            (<StoredBlocks>sequence.stored).release()
            sequence.stored = sequence.swap_space = None
            if sequence.cross is not None:
                sequence.cross.num_swapped -= 1
            sequence.row = self.rows[i]
            state.by_row[self.rows[i]] = sequence
            if state.tenants is not None:
                state.tenants.own_row(self.rows[i], sequence.tenant)
            if state.prefix is not None and not self.is_exact[i]:
                # Its keys and values were rounded: other sequences must not reuse them.
                sequence.hold.published = INT32_MAX
        for each in self.transfers:
            (<Transfer>each).lease.release()
        take_back_contents(state, self.contents)
        if state.prefix is not None and state.cross is not None:
            for i in range(self.rows.size()):
                keep_private(<Sequence>self.coming[i])

    cdef void publish_blocks(self) noexcept:
        """Offer the blocks of the sequences to the prefix cache."""
        if self.state.prefix is not None:
            for each in self.transfers:
                (<Transfer>each).publish(self.state.prefix)


cdef void keep_private(Sequence sequence) noexcept:
    """Mark a sequence as private if its encoder output has no key: a swap space may have rounded it."""
    if sequence.cross is not None and sequence.cross.key is None:
        sequence.hold.is_private = True
        sequence.hold.published = INT32_MAX


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
    cdef list spaces = [], stored = []
    for sequence in coming:
        spaces.append((<Sequence>sequence).swap_space)
        stored.append((<Sequence>sequence).stored)
    return plan_transfers(coming, spaces, stored, cache_pools(state))


cdef list require_swapped(CacheState state, list sequences):
    cdef list checked = require_each(state, sequences, False)
    for sequence in checked:
        if (<Sequence>sequence).swap_space is None:
            raise InvalidSequence(
                f"sequence {(<Sequence>sequence).id!r} is not swapped out; pass only sequences with is_swapped True"
            )
    return checked


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
