"""Promotion: a prefix of the host's tree moves into blocks of the device, where `add_sequence` finds it."""

from libc.stdint cimport int32_t, int64_t

from pagecore.cache.state._state cimport CacheState, Held
from pagecore.index.radix._native cimport NativeMatch, Query


def promote(
    CacheState state not None, HostIndex host not None, const int32_t[::1] ids, options, int64_t most,
    int64_t min_tokens, copy, spill=None
):
    """Bring what the host has of a prefix to the device, up to what fits.

    Parameters
    ----------
    most : int
        Longest prefix, in tokens.
    min_tokens : int
        Fewer tokens than these are left in the host.
    copy : callable
        ``copy(pairs, hold)`` copies ``[n, (host block, device block)]`` of each group, states last. If it returns True,
        it has taken the hold and releases it when the copies are done.
    spill : callable, optional
        ``spill(missing)`` evicts blocks of each group, states last, from the device, and saves them; by default they
        are only evicted.

    Returns
    -------
    tuple of (int, int, list of int)
        Tokens that the device has now; tokens that it had before; the numbers of blocks of each group, and of states,
        that were copied, or an empty list.
    """
    cdef PrefixKey key
    cdef Promotion one
    cdef int64_t limit, wanted, fits, before = -1
    cdef int64_t block_size = host.block_size
    cdef int64_t min_blocks = (min_tokens + block_size - 1) // block_size
    _guard = Held(state.lock)
    state.begin()
    host.sweep()
    limit = min(most, ids.shape[0]) // block_size
    if limit <= 0:
        return 0, 0, []
    key = prefix_key(block_size, ids[:limit * block_size], options)
    while True:
        one = Promotion(state, host, key)
        wanted = one.choose(limit, min_blocks)
        if before < 0:
            before = one.num_blocks
        if wanted == 0:
            return one.num_blocks * block_size, before * block_size, []
        try:
            fits = one.take(wanted, spill)
            if fits == wanted:
                if host.is_exclusive:
                    one.hold.rank = -1  # the device has it: the host gives it up first
                if copy(one.pairs, one.hold):
                    one.hold = None
                one.commit(wanted)
                # Windows of both sides together may reach further than those of the host.
                return one.num_reusable(limit) * block_size, before * block_size, list(map(len, one.pairs))
        finally:
            one.end()
            one.release_hold()
        limit = min(fits, wanted - 1)


def match_both(CacheState state not None, HostIndex host not None, const int32_t[::1] ids, options, int64_t most):
    """Return the tokens of a prefix that the device can reuse, and those that the host can; nothing changes."""
    cdef NativeMatch found, there
    cdef PrefixKey key
    cdef Query query
    cdef int64_t limit = min(most, ids.shape[0]) // host.block_size
    if limit <= 0:
        return 0, 0
    key = prefix_key(host.block_size, ids[:limit * host.block_size], options)
    query = key.query(limit)
    _guard = Held(state.lock)
    query.space = space_of(state.prefix.tree, key.key)
    there = state.prefix.tree.native.match(query, limit)
    query.space = space_of(host.tree, key.key)
    found = host.tree.native.match(query, limit)
    return there.blocks * host.block_size, found.blocks * host.block_size
