"""New sequences: with a cached prefix, or as a fork of another sequence."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagecore.cache.prefix._prefix cimport number_namespaces, publish_one
from pagecore.cache.sequences._sequences cimport CrossContent, PrefixHold, Sequence, new_sequence, require
from pagecore.cache.state._state cimport CacheState, Held
from pagecore.index._integers cimport const_int32
from pagecore.index.radix._native cimport NativeMatch
from pagecore.index.radix._radix cimport key_of
from pagecore.native.std cimport span, vector

import numpy as np

from pagecore.errors import OutOfRows

NO_IDS = np.zeros(0, np.int32)


def add(
    CacheState state not None, name, const int32_t[::1] ids not None, options, int64_t most, cross=None,
    bint is_tentative=False,
):
    """Add a sequence whose row begins with its cached prefix, up to `most` tokens; see `PagedKVCache.add_sequence`.

    Parameters
    ----------
    cross : tuple of (int, key), optional
        Number of encoder tokens and the key of the encoder's output, see `CrossContent`.
    is_tentative : bool
        The sequence counts as a hit or a miss from its first step on.
    """
    cdef Sequence sequence
    cdef CrossContent content = None
    cdef NativeMatch found
    cdef CachedPrefix prefix
    cdef vector[span[const_int32]] none
    cdef int32_t row
    cdef int64_t length = 0
    _guard = Held(state.lock)
    state.begin()
    if state.observer is not None and state.prefix is not None:
        require_row(state)
        state.observer.adding(ids, options, most)
    sequence = new_sequence(state.new_name(name), ids)
    if state.cross is not None and cross is None:
        sequence.namespace = options.namespace
    if state.prefix is not None:
        sequence.hold = PrefixHold(
            state.prefix.tree, options, state.tables.max_blocks_per_sequence, state.prefix.shares_ahead
        )
    if state.tenants is not None:
        sequence.tenant = state.tenants.number_of(None if options.namespace is None else key_of(options.namespace))
    state.reserve_name(sequence)  # until here code of the caller may run
    require_row(state)
    if cross is not None:
        content = state.cross.find(cross[1], cross[0])
    if state.prefix is None:
        row = state.tables.add_raw(none)
    else:
        state.prefix.match_sequence(sequence, most // state.block_size, &found)
        prefix = found_prefix(state, found)
        state.prefix.reserve_moves(2)
        length = found.blocks * state.block_size
        row = state.tables.add_raw(prefix.spans, length)
        # The row is there: from here on nothing fails.
        sequence.matched = <int32_t>(
            (found.shared_blocks if state.states is None else found.full_blocks) * state.block_size
        )
        state.prefix.attach(sequence, row, found, is_tentative)
        sequence.computed = sequence.cached = <int32_t>length
        if state.seals is not None:
            sequence.sealed = <int32_t>length
        if state.cross is not None and (content is None or content.key is None):
            sequence.hold.is_private = True
            sequence.hold.published = INT32_MAX  # the encoder output that its keys depend on has no name
    if state.states is not None:
        state.states.add_raw(
            row, <int32_t>length, found.state if length > 0 else 0, sequence.matched
        )
    if content is not None:
        sequence.cross = content
        state.cross.hold(content)
    come_alive(state, sequence, row)
    if name is None:
        state.next_number += 1
    return sequence


def fork(CacheState state not None, parent, name):
    """Add a sequence that shares all blocks of `parent`; see `PagedKVCache.fork`."""
    cdef Sequence source, child
    cdef PrefixHold hold
    cdef int32_t row
    _guard = Held(state.lock)
    state.begin()
    source = require(state, parent, True)
    if state.observer is not None and state.prefix is not None:
        require_row(state)
        state.observer.copying([source])
        require(state, parent, True)
    child = new_sequence(state.new_name(name), NO_IDS)
    state.reserve_name(child)  # until here code of the caller may run
    source = require(state, parent, True)
    require_row(state)
    child.reserve(source.known)
    child.append(source.ids, source.known)
    if state.prefix is not None:
        child.hold = source.hold.blank_copy()
        number_namespaces(state.prefix, [source])
        publish_one(state.prefix, source, 0)
    row = state.tables.fork_raw(source.row)
    # The row is there: from here on nothing fails.
    if state.states is not None:
        state.states.fork_raw(source.row, row)
    child.tenant = source.tenant
    child.computed = source.computed
    child.sealed = source.sealed
    child.dropped, child.compacted = source.dropped, source.compacted
    child.cached = source.cached
    child.namespace = source.namespace
    if source.cross is not None:
        child.cross = source.cross
        state.cross.hold(source.cross)
    if state.prefix is not None:
        state.prefix.count_first(source, source.row)
        hold = source.hold
        state.prefix.inherit(child, child.hold, hold, hold.published, hold.has_duplicates)
    come_alive(state, child, row)
    if name is None:
        state.next_number += 1
    return child


cdef class CachedPrefix:
    """Cached blocks of each group that a new row begins with; holes in the tails of sealed blocks."""
    cdef vector[vector[int32_t]] blocks
    cdef vector[span[const_int32]] spans


cdef CachedPrefix found_prefix(CacheState state, const NativeMatch& found):
    cdef CachedPrefix prefix = CachedPrefix.__new__(CachedPrefix)
    cdef size_t group, count, num_groups = <size_t>state.tables.num_groups
    cdef int32_t lane
    prefix.blocks.resize(num_groups)
    prefix.spans.resize(num_groups)
    for group in range(state.prefix.lane_of.size(), num_groups):
        prefix.blocks[group].resize(<size_t>found.shared_blocks)
        prefix.spans[group] = span[const_int32](prefix.blocks[group].data(), prefix.blocks[group].size())
    for group in range(state.prefix.lane_of.size()):
        lane = state.prefix.lane_of[group]
        prefix.blocks[group].resize(<size_t>state.prefix.num_shared(found, lane))
        count = state.prefix.copy_shared(found, lane, prefix.blocks[group].data())
        prefix.spans[group] = span[const_int32](prefix.blocks[group].data(), count)
    return prefix


cdef int require_row(CacheState state) except -1:
    if state.tables.num_free_rows() == 0:
        raise OutOfRows(
            f"all {state.tables.max_sequences} rows are in use; remove a sequence, swap one out or raise max_sequences"
        )
    return 0


cdef void come_alive(CacheState state, Sequence sequence, int32_t row) noexcept:
    sequence.row = row
    state.by_row[row] = sequence
    sequence.owner = state
    state.num_live += 1
