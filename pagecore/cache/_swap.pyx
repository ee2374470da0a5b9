"""Sequences leave the blocks of a cache for a swap space, and come back.

Both functions take the lock of the cache, plan, copy the bytes into blocks that nobody sees yet, and then commit by
calls that cannot fail; see `CacheState`.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.cache._sequence cimport Sequence, require_each
from pagecore.cache._state cimport CacheState
from pagecore.cache._stored cimport StoredBlocks
from pagecore.index._block_pool cimport BlockPool
from pagecore.index._integers cimport const_int32

import numpy as np

from pagecore.cache._sequence import as_list
from pagecore.errors import InvalidSequence, OutOfRows


def computed_blocks(CacheState state not None, Sequence sequence not None):
    """Return the blocks with computed tokens of an idle sequence: int32 of each group."""
    count = (sequence.computed + state.block_size - 1) // state.block_size
    return tuple([state.tables.blocks(sequence.row, group)[:count] for group in range(state.tables.num_groups)])


def stored_blocks(Sequence sequence not None):
    """Return the blocks that a swap space holds for a sequence: int32 of each group."""
    return (<StoredBlocks>sequence.stored).arrays


def distinct_blocks(list held, Py_ssize_t num_groups):
    """Return the blocks of each group, ascending and each once, without holes."""
    distinct = []
    for group in range(num_groups):
        entries = np.concatenate([blocks[group] for blocks in held] or [np.zeros(0, np.int32)])
        distinct.append(np.unique(entries[entries != 0]))
    return distinct


def renamed_blocks(tuple blocks, list old, tuple new):
    """Return the blocks of a sequence, of each group, under their new ids; holes stay holes."""
    renamed = []
    for group, entries in enumerate(blocks):
        named = np.zeros_like(entries)
        is_block = entries != 0
        named[is_block] = new[group][np.searchsorted(old[group], entries[is_block])]
        renamed.append(named)
    return tuple(renamed)


def swap_out(CacheState state not None, sequences, space, refuse, transfer):
    """Move computed blocks into `space`; returns the error that says why that cannot be, or None when it is done.

    `refuse(needed, pools)` returns an error where the pools of the space have too few blocks; `transfer(pairs)` copies
    bytes, given (source, target) blocks of each group.
    """
    cdef list leaving, stored
    cdef vector[int32_t] rows
    cdef StoredBlocks lease
    cdef Sequence sequence
    cdef size_t i
    sequences = as_list(sequences)
    with state.lock:
        state.begin()
        leaving = require_each(state, sequences, True)
        if state.prefix is not None:
            state.prefix.name_spaces(leaving)
            leaving = require_each(state, sequences, True)
        held = [computed_blocks(state, sequence) for sequence in leaving]
        distinct = distinct_blocks(held, state.tables.num_groups)
        pools = space.block_pools
        error = refuse([len(ids) for ids in distinct], pools)
        if error is not None:
            return error
        lease = StoredBlocks.allocate(pools, [len(ids) for ids in distinct])
        transfer([np.stack(pair, axis=1) for pair in zip(distinct, lease.arrays)])
        stored = [StoredBlocks.share(pools, renamed_blocks(blocks, distinct, lease.arrays)) for blocks in held]
        for sequence in leaving:
            rows.push_back(sequence.row)
        if state.prefix is not None:
            state.prefix.publish(leaving, False)
        state.tables.remove_raw(rows.data(), <Py_ssize_t>rows.size())
        # The rows are gone: from here on nothing fails.
        for i in range(rows.size()):
            sequence = <Sequence>leaving[i]
            sequence.stored = stored[i]
            sequence.swap_space = space
            sequence.row = -1
            state.by_row[rows[i]] = None
            if state.prefix is not None:
                state.prefix.leave(sequence)
        return None


def swap_in(CacheState state not None, sequences, refuse, transfer):
    """Move sequences back into rows and blocks; returns the error that says why that cannot be, or None when done.

    `refuse(needed, pools)` returns an error where the cache has too few blocks, cached ones counted; `transfer(space,
    pairs)` copies bytes. Cached blocks that were evicted to make room stay evicted where a later part fails.
    """
    cdef list coming
    cdef vector[int64_t] missing
    cdef vector[int32_t] rows, lengths
    cdef vector[vector[span[const_int32]]] spans
    cdef StoredBlocks lease
    cdef const int32_t[::1] blocks
    cdef Sequence sequence
    cdef size_t i, group
    cdef size_t num_groups = state.tables.num_groups
    cdef bint may_share = True
    sequences = as_list(sequences)
    with state.lock:
        state.begin()
        coming = require_swapped(state, sequences)
        if state.prefix is not None:
            state.prefix.name_spaces(coming)
            coming = require_swapped(state, sequences)
        by_space = {}
        for sequence in coming:
            by_space.setdefault(id(sequence.swap_space), []).append(sequence)
        parts = []
        for some in by_space.values():
            held = [stored_blocks(sequence) for sequence in some]
            parts.append((some[0].swap_space, some, held, distinct_blocks(held, state.tables.num_groups)))
        needed = [sum([len(part[3][group]) for part in parts]) for group in range(num_groups)]
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
        if max(missing, default=0) > 0:
            state.prefix.free_blocks(missing)
        leases, arrived = [], {}
        for space, some, held, distinct in parts:
            lease = StoredBlocks.allocate(pools, [len(ids) for ids in distinct])
            leases.append(lease)
            transfer(space, [np.stack(pair, axis=1) for pair in zip(distinct, lease.arrays)])
            for sequence, stored in zip(some, held):
                arrived[sequence] = renamed_blocks(stored, distinct, lease.arrays)
        for sequence in coming:
            spans.resize(spans.size() + 1)
            lengths.push_back(sequence.computed)
            may_share = may_share and sequence.known >= sequence.computed
            for each in arrived[sequence]:
                blocks = each
                spans.back().push_back(
                    span[const_int32](&blocks[0] if blocks.shape[0] else NULL, <size_t>blocks.shape[0])
                )
        exact = [sequence.swap_space.is_exact for sequence in coming]
        rows.reserve(len(coming))
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
            if not exact[i]:
                sequence.published = INT32_MAX  # rounded: not what its tokens say, and of use to itself alone
        for each in leases:
            (<StoredBlocks>each).release()
        if state.prefix is not None:
            # All that share a block hold it at once, unless one has ids that are yet to come.
            state.prefix.publish(coming, may_share)
        return None


cdef list require_swapped(CacheState state, list sequences):
    cdef list checked = require_each(state, sequences, False)
    for sequence in checked:
        if (<Sequence>sequence).swap_space is None:
            raise InvalidSequence(
                f"sequence {(<Sequence>sequence).id!r} is not swapped out; it is in the cache already"
            )
    return checked


def check_stored(CacheState state not None, Sequence sequence not None, space):
    """Raise InvalidSequence where a sequence is inconsistent with the blocks that `space` holds for it."""
    count = (sequence.computed + state.block_size - 1) // state.block_size
    if sequence.row != -1 or any([len(entries) != count for entries in stored_blocks(sequence)]):
        raise InvalidSequence(f"{sequence!r} is inconsistent with the blocks that {space!r} holds for it")
