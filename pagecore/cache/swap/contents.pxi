"""Encoder outputs that move with their sequences between a cache and its swap spaces.

An output goes to a space with its last sequence on the device, and comes back with the first that returns.
"""

from libc.stdint cimport int32_t, int64_t

from pagecore.cache.sequences._sequences cimport CrossContent, CrossContents, Sequence
from pagecore.cache.state._state cimport CacheState, StoredBlocks
from pagecore.cache.step._step cimport contents_to_write
from pagecore.index.tables._native cimport Int32s
from pagecore.native.std cimport vector


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
    cdef list contents, spaces = [], stored = []
    if state.cross is None:
        return []
    contents = stored_contents(coming)
    for each in contents:
        spaces.append((<CrossContent>each).space)
        stored.append((<CrossContent>each).stored)
    return plan_transfers(contents, spaces, stored, state.cross.tables.pools)


cdef list stored_contents(list sequences):
    """Return the encoder outputs of the sequences that are in swap spaces, each once."""
    cdef dict seen = {}
    for each in sequences:
        if (<Sequence>each).cross is not None and (<Sequence>each).cross.stored is not None:
            seen[(<Sequence>each).cross] = None
    return list(seen)


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
