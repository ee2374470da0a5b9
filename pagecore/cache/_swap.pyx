"""Sequences leave the blocks of a cache for a swap space, and come back.

Both functions take the lock of the cache, plan, copy the bytes into blocks that nobody sees yet, and then commit by
calls that cannot fail; see `CacheState`.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libcpp.algorithm cimport lower_bound, sort, unique
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.cache._lock cimport Held
from pagecore.cache._sequence cimport Sequence, require_each
from pagecore.cache._state cimport CacheState
from pagecore.cache._stored cimport StoredBlocks, copy_vector
from pagecore.index._block_pool cimport BlockPool
from pagecore.index._integers cimport const_int32, new_int32

from pagecore.cache._sequence import as_list
from pagecore.errors import InvalidSequence, OutOfRows
from pagecore.ops import transfer_blocks


cdef class Transfer:
    """Sequences that move together between one space and the cache: their blocks before and after.

    Blocks that several of them share are moved once. `pairs` has (source, target) of each group, int32 [n, 2].
    """
    cdef object space
    cdef list sequences
    cdef vector[vector[vector[int32_t]]] old    # of each sequence and group; holes are 0
    cdef vector[vector[int32_t]] distinct       # of each group, ascending
    cdef StoredBlocks lease                     # the new blocks, in the order of `distinct`
    cdef list arriving                          # StoredBlocks of each sequence: the new blocks under their places
    cdef list pairs
    cdef vector[int32_t*] pair_data

    def __cinit__(self, space, list sequences not None, tuple pools not None):
        self.space = space
        self.sequences = sequences
        self.arriving = []
        for _ in sequences:
            self.arriving.append(StoredBlocks(pools))
        self.lease = StoredBlocks(pools)

    cdef int plan(self) except -1:
        """List the distinct blocks of `old`, and make room for everything that the new ones need."""
        cdef size_t group, i
        cdef int32_t* data = NULL
        cdef size_t num_groups = len(self.lease.pools)
        cdef int32_t block
        self.distinct.resize(num_groups)
        for i in range(self.old.size()):
            (<StoredBlocks>self.arriving[i]).reserve(self.old[i])
            for group in range(num_groups):
                for block in self.old[i][group]:
                    if block != 0:
                        self.distinct[group].push_back(block)
        self.pairs = []
        for group in range(num_groups):
            sort(self.distinct[group].begin(), self.distinct[group].end())
            self.distinct[group].erase(
                unique(self.distinct[group].begin(), self.distinct[group].end()), self.distinct[group].end()
            )
            array = new_int32(<Py_ssize_t>(2 * self.distinct[group].size()), &data)
            self.pair_data.push_back(data)
            self.pairs.append(array.reshape(-1, 2))
        self.lease.reserve(self.distinct)
        return 0

    def needed(self):
        """Return how many blocks of each group are needed."""
        cdef size_t group
        counts = []
        for group in range(self.distinct.size()):
            counts.append(self.distinct[group].size())
        return counts

    cdef bint take(self) noexcept:
        """Take the new blocks, and say where everything goes; False, with nothing taken, where there are too few."""
        cdef size_t group, i, k, place
        cdef StoredBlocks arriving
        if not self.lease.allocate():
            return False
        for group in range(self.distinct.size()):
            for k in range(self.distinct[group].size()):
                self.pair_data[group][2 * k] = self.distinct[group][k]
                self.pair_data[group][2 * k + 1] = self.lease.blocks[group][k]
            for i in range(self.old.size()):
                arriving = <StoredBlocks>self.arriving[i]
                for k in range(arriving.blocks[group].size()):
                    if self.old[i][group][k] != 0:
                        place = self.index_of(group, self.old[i][group][k])
                        arriving.blocks[group][k] = self.lease.blocks[group][place]
        return True

    cdef int copy(self, planes) except -1:
        """Copy the bytes of the blocks: `planes` has the stream, and (group, sources, targets) for each plane."""
        stream, moved = planes
        for group, sources, targets in moved:
            transfer_blocks(sources, targets, self.pairs[group], stream=stream)
        if stream is not None:
            self.space.note_use()
        return 0

    cdef size_t index_of(self, size_t group, int32_t block) noexcept:
        return <size_t>(
            lower_bound(self.distinct[group].begin(), self.distinct[group].end(), block) - self.distinct[group].begin()
        )


cdef int read_row(CacheState state, Sequence sequence, vector[vector[int32_t]]& blocks) except -1:
    """Copy the blocks with computed tokens of an idle sequence; spare capacity stays behind."""
    cdef size_t group, count = <size_t>((sequence.computed + state.block_size - 1) // state.block_size)
    cdef const int32_t* row
    blocks.resize(<size_t>state.tables.num_groups)
    for group in range(blocks.size()):
        row = state.tables.row_raw(sequence.row, <int64_t>group).data()
        blocks[group].assign(row, row + count)
    return 0


def swap_out(CacheState state not None, sequences, space, refuse, moves):
    """Move computed blocks into `space`; returns the error that says why that cannot be, or None when it is done.

    `refuse(needed, pools)` returns an error where the pools of the space have too few blocks; `moves(space, False)`
    returns what `Transfer.copy` takes.
    """
    cdef Transfer transfer
    cdef vector[int32_t] rows
    cdef Sequence sequence
    cdef size_t i
    sequences = as_list(sequences)
    _guard = Held(state.lock)
    state.begin()
    transfer = Transfer(space, require_each(state, sequences, True), space.block_pools)
    if state.prefix is not None:
        state.prefix.name_spaces(transfer.sequences)
    transfer.old.resize(len(transfer.sequences))
    for i in range(transfer.old.size()):
        sequence = <Sequence>transfer.sequences[i]
        rows.push_back(sequence.row)
        read_row(state, sequence, transfer.old[i])
    transfer.plan()
    error = refuse(transfer.needed(), space.block_pools)
    if error is not None:
        return error
    planes = moves(space, False)
    transfer.take()
    transfer.copy(planes)
    if state.prefix is not None:
        state.prefix.publish(transfer.sequences, False)
    state.tables.remove_raw(rows.data(), <Py_ssize_t>rows.size())
    # The rows are gone: from here on nothing fails.
    for i in range(rows.size()):
        sequence = <Sequence>transfer.sequences[i]
        (<StoredBlocks>transfer.arriving[i]).share()
        sequence.stored = transfer.arriving[i]
        sequence.swap_space = space
        sequence.row = -1
        state.by_row[rows[i]] = None
        if state.prefix is not None:
            state.prefix.leave(sequence)
    transfer.lease.release()
    return None


def swap_in(CacheState state not None, sequences, refuse, moves):
    """Move sequences back into rows and blocks; returns the error that says why that cannot be, or None when done.

    `refuse(needed, pools)` returns an error where the cache has too few blocks, cached ones counted; `moves(space,
    True)` returns what `Transfer.copy` takes. Cached blocks that were evicted to make room stay evicted where copying
    fails.
    """
    cdef list coming, transfers, copies
    cdef vector[int64_t] missing
    cdef vector[int32_t] rows, lengths
    cdef vector[vector[span[const_int32]]] spans
    cdef vector[bint] is_exact
    cdef Sequence sequence
    cdef StoredBlocks arriving
    cdef size_t i, k, group
    cdef size_t num_groups = len(state.tables.pools)
    cdef bint may_share = True
    sequences = as_list(sequences)
    _guard = Held(state.lock)
    state.begin()
    coming = require_swapped(state, sequences)
    if state.prefix is not None:
        state.prefix.name_spaces(coming)
    transfers = plan_arrival(state, coming)
    needed = []
    for group in range(num_groups):
        needed.append(0)
        for each in transfers:
            needed[group] += (<Transfer>each).distinct[group].size()
    if len(coming) > state.tables.num_free_rows():
        return OutOfRows(
            f"{len(coming)} rows are needed and {state.tables.num_free_rows()} of {state.tables.max_sequences} are "
            "free; remove a sequence or swap one out, or raise max_sequences"
        )
    pools = state.tables.pools
    error = refuse(needed, pools)
    if error is not None:
        return error
    for group in range(num_groups):
        missing.push_back(max(0, needed[group] - (<BlockPool>pools[group]).num_free_raw()))
    copies = []
    coming = []
    for each in transfers:
        copies.append(moves((<Transfer>each).space, True))
        coming.extend((<Transfer>each).sequences)
    spans.resize(len(coming))
    for i in range(spans.size()):
        spans[i].resize(num_groups)
        lengths.push_back((<Sequence>coming[i]).computed)
        is_exact.push_back((<Sequence>coming[i]).swap_space.is_exact)
        may_share = may_share and (<Sequence>coming[i]).known >= (<Sequence>coming[i]).computed
    rows.reserve(len(coming))
    if state.prefix is not None:
        state.prefix.free_blocks(missing)
    for each in transfers:
        (<Transfer>each).take()
        if state.tenants is not None:
            state.tenants.doubt((<Transfer>each).lease.blocks)
    for each, planes in zip(transfers, copies):
        (<Transfer>each).copy(planes)
    i = 0
    for each in transfers:
        for k in range((<Transfer>each).old.size()):
            arriving = <StoredBlocks>(<Transfer>each).arriving[k]
            for group in range(num_groups):
                spans[i][group] = span[const_int32](arriving.blocks[group].data(), arriving.blocks[group].size())
            i += 1
    try:
        for i in range(spans.size()):
            rows.push_back(state.tables.add_raw(spans[i]))
        state.tables.truncate_raw(rows.data(), lengths.data(), <Py_ssize_t>rows.size(), False)
    except BaseException:
        state.tables.remove_raw(rows.data(), <Py_ssize_t>rows.size())
        raise
    # The rows are there: from here on nothing fails.
    for i in range(rows.size()):
        sequence = <Sequence>coming[i]
        (<StoredBlocks>sequence.stored).release()
        sequence.stored = sequence.swap_space = None
        sequence.row = rows[i]
        state.by_row[rows[i]] = sequence
        if state.tenants is not None:
            state.tenants.own_row(rows[i], sequence.tenant)
        if not is_exact[i]:
            sequence.published = INT32_MAX  # rounded: not what its tokens say, and of use to itself alone
    for each in transfers:
        (<Transfer>each).lease.release()
    if state.prefix is not None:
        # All that share a block hold it at once, unless one has ids that are yet to come.
        state.prefix.publish(coming, may_share)
    return None


cdef list plan_arrival(CacheState state, list coming):
    """Plan a transfer from each space that holds some of the sequences."""
    cdef Transfer transfer
    cdef size_t i
    by_space = {}
    for sequence in coming:
        by_space.setdefault(id((<Sequence>sequence).swap_space), []).append(sequence)
    transfers = []
    for some in by_space.values():
        transfer = Transfer((<Sequence>some[0]).swap_space, some, state.tables.pools)
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
                f"sequence {(<Sequence>sequence).id!r} is not swapped out; it is in the cache already"
            )
    return checked


def stored_blocks(Sequence sequence not None):
    """Return the blocks that a swap space holds for a sequence: int32 of each group, copies."""
    return (<StoredBlocks>sequence.stored).arrays


def num_distinct(CacheState state not None, list sequences not None):
    """Return how many blocks of each group several swapped sequences hold together."""
    cdef list transfers = plan_arrival(state, sequences)
    return [sum(counts) for counts in zip(*[(<Transfer>each).needed() for each in transfers])]


def check_stored(CacheState state not None, Sequence sequence not None, space):
    """Raise InvalidSequence where a sequence is inconsistent with the blocks that `space` holds for it."""
    count = (sequence.computed + state.block_size - 1) // state.block_size
    if sequence.row != -1 or any([len(entries) != count for entries in stored_blocks(sequence)]):
        raise InvalidSequence(f"{sequence!r} is inconsistent with the blocks that {space!r} holds for it")
