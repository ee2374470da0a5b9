"""Queries about sequences and available blocks."""

from libc.stdint cimport int32_t, int64_t

from pagecore.cache.prefix._prefix cimport clear as clear_prefix
from pagecore.cache.sequences._kept cimport KeptKeys, sink_blocks
from pagecore.cache.sequences._sequences cimport Sequence, require, require_each
from pagecore.cache.state._state cimport CacheState, Held

from pagecore.cache.prefix._prefix import (
    evict_namespace as evict_space,
    evict_prefix as evict_cached,
    evictable,
    revoke_block,
    revoke_prefix as revoke_cached,
)
from pagecore.cache.sequences._sequences import as_list
from pagecore.errors import InvalidSequence


def require_live(CacheState state not None, sequences):
    """Return `sequences` as a list; raise InvalidSequence for one that is not in the cache or listed twice."""
    return require_each(state, as_list(sequences), False)


def available(CacheState state not None):
    """Return the number of blocks of each group that are free or can be freed by eviction."""
    _guard = Held(state.lock)
    state.sweep()
    cached = [0] * state.tables.num_groups if state.prefix is None else evictable(state.prefix)
    counts = []
    for pool, more in zip(state.tables.pools, cached):
        counts.append(pool.num_free + more)
    return counts if state.cross is None else counts + state.cross.available()


def clear(CacheState state not None):
    """Evict every cached block that no row uses; return the number of freed blocks."""
    _guard = Held(state.lock)
    state.begin()
    return 0 if state.prefix is None else clear_prefix(state.prefix)


def evict_prefix(CacheState state not None, ids, options, keep):
    """Evict the end of a cached prefix back to `keep` tokens; return the number of freed blocks."""
    _guard = Held(state.lock)
    state.begin()
    return 0 if state.prefix is None else evict_cached(state.prefix, ids, options, keep)


def evict_namespace(CacheState state not None, namespace):
    """Evict all cached prefixes of a namespace; return the number of freed blocks."""
    _guard = Held(state.lock)
    state.begin()
    return 0 if state.prefix is None else evict_space(state.prefix, namespace)


def revoke_prefix(CacheState state not None, ids, options, valid):
    """Revoke the block with token `valid` of a cached prefix and what continues it; see `PrefixMethods`."""
    _guard = Held(state.lock)
    state.begin()
    return {} if state.prefix is None else revoke_cached(state.prefix, state.listed(), ids, options, valid)


def revoke_blocks(CacheState state not None, blocks, int32_t group):
    """Revoke blocks of a group and what continues them; see `PrefixMethods`."""
    _guard = Held(state.lock)
    state.begin()
    affected = {}
    for block in blocks if state.prefix is not None else ():
        for sequence, valid in revoke_block(state.prefix, state.listed(), group, block).items():
            affected[sequence] = min(valid, affected.get(sequence, valid))
    return affected


def held_from(CacheState state not None, sequence, int32_t group):
    """Return the position of the first token whose key and value a group still has; see `PagedKVCache.held_from`."""
    cdef Sequence checked
    cdef KeptKeys keys
    cdef int64_t holes, held, sinks = 0
    cdef const int32_t* blocks
    _guard = Held(state.lock)
    state.sweep()
    checked = require(state, sequence, False)
    if checked.swap_space is not None:
        raise InvalidSequence(f"sequence {checked.id!r} is swapped out; swap it in first")
    if group >= state.tables.num_groups:  # of cross attention, which keeps every encoder token
        return 0
    held = (<int64_t>checked.computed + state.block_size - 1) // state.block_size
    blocks = state.tables.row_raw(checked.row, group).data()
    for keys in state.kept:
        if keys.group == group:
            sinks = min(held, sink_blocks(keys, state.block_size))
    holes = sinks
    while holes < held and blocks[holes] == 0:
        holes += 1
    return holes * state.block_size if holes > sinks else 0


def shared_length(CacheState state not None, sequences, int32_t group):
    """Return the tokens at the beginning of sequences that are in the same blocks; see `PagedKVCache.shared_length`."""
    cdef Sequence each
    cdef KeptKeys keys
    cdef int64_t shared, same
    cdef const int32_t* first
    cdef const int32_t* blocks
    _guard = Held(state.lock)
    state.sweep()
    cdef list listed = require_each(state, sequences, False)
    for each in listed:
        if each.swap_space is not None:
            raise InvalidSequence(f"sequence {each.id!r} is swapped out; swap it in first")
    for keys in state.kept:
        if keys.group == group:
            return 0
    if not listed:
        return 0
    each = listed[0]
    first = state.tables.row_raw(each.row, group).data()
    shared = each.computed // state.block_size
    for each in listed:
        blocks = state.tables.row_raw(each.row, group).data()
        shared, same = min(shared, each.computed // state.block_size), 0
        if state.seals is not None and state.seals.has_sealed(group):
            shared = min(shared, each.sealed // state.block_size)
        while same < shared and blocks[same] == first[same]:
            same += 1
        shared = same
    return shared * state.block_size
