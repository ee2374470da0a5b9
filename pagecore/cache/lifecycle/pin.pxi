"""Pins: cached prefixes that are held without a sequence."""

from libc.stdint cimport int32_t, int64_t

from pagecore.cache.prefix._prefix cimport PrefixCache
from pagecore.cache.state._state cimport CacheState, Held, StoredBlocks
from pagecore.index.radix._native cimport NativeMatch, RetentionHint
from pagecore.index.radix._radix cimport Prefix, Receipt, read_prefix
from pagecore.native.std cimport span, vector

from pagecore.errors import InvalidSequence


cdef class PinnedPrefix:
    """The receipt and the blocks of a pin: one of the `transfers` of a prefix cache.

    Attributes
    ----------
    receipt : Receipt
    blocks : tuple of numpy.ndarray
        Blocks of each group, 0 where a window needs none, then the state slot: int32, copies.
    is_lost : bool
        Its PrefixPin was collected.
    """

    cdef PrefixCache prefix
    cdef readonly Receipt receipt
    cdef StoredBlocks stored
    cdef readonly bint is_lost

    @property
    def blocks(self):
        return self.stored.arrays

    def give_up(self):
        """Let the prefix be evicted; the caller holds the lock of the cache, and calls it once."""
        cdef RetentionHint no_hint
        self.receipt.drop(no_hint)
        self.stored.release()
        self.prefix.transfers.discard(self)


cdef class PrefixPin:
    """A cached prefix that stays until `release`; `PagedKVCache.pin_prefix` makes it.

    As a context manager it is released at the end of the block. A pin that is garbage-collected is released by the next
    operation of the cache.
    """

    cdef CacheState state
    cdef PinnedPrefix held  # None once released, and if nothing is pinned

    def __init__(self, *_, **__):
        raise InvalidSequence("a PrefixPin cannot be made directly; use PagedKVCache.pin_prefix")

    def __del__(self):
        if self.held is not None:
            self.held.is_lost = True
            self.state.num_lost += 1
            self.held = None

    @property
    def num_tokens(self):
        """Tokens of the pinned prefix; 0 once it is released."""
        return 0 if self.held is None else self.held.receipt.depth() * self.state.block_size

    def release(self):
        """Let the prefix be evicted again; a second call does nothing."""
        _guard = Held(self.state.lock)
        if self.held is not None:
            self.state.begin()
            self.held.give_up()
            self.held = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def __repr__(self):
        return f"PrefixPin({self.num_tokens} tokens)"


def pin(CacheState state not None, ids, options, int64_t most):
    """Pin the cached prefix of `ids`, up to `most` tokens; see `PagedKVCache.pin_prefix`."""
    cdef PrefixPin pinned = PrefixPin.__new__(PrefixPin)
    cdef PinnedPrefix held = PinnedPrefix.__new__(PinnedPrefix)
    cdef PrefixCache prefix = state.prefix
    cdef Prefix wanted
    cdef NativeMatch found
    _guard = Held(state.lock)
    state.begin()
    pinned.state = state
    if prefix is None:
        return pinned
    if state.observer is not None:
        state.observer.adding(ids, options, most)
    wanted = read_prefix(state.block_size, ids, options.namespace, options.spans, most)
    held.receipt = prefix.tree.blank_receipt(wanted.key)
    wanted.space = 0 if wanted.key is None else prefix.tree.spaces.get(wanted.key, -1)
    found = prefix.tree.native.match(wanted.query(), wanted.limit)
    if found.blocks == 0:
        return pinned
    held.prefix = prefix
    held.stored = blocks_of(state, found)
    prefix.tree.reserve_moves(1)
    prefix.transfers.add(held)
    # The set has it: from here on nothing fails.
    prefix.tree.lock(found, held.receipt, prefix.now)
    held.stored.share()
    pinned.held = held
    return pinned


cdef StoredBlocks blocks_of(CacheState state, const NativeMatch& found):
    """Return a holder of the blocks and the state of a match, which does not hold them yet."""
    cdef PrefixCache prefix = state.prefix
    cdef StoredBlocks stored
    cdef vector[vector[int32_t]] like
    cdef int32_t lane, group
    pools = state.tables.pools if state.states is None else (*state.tables.pools, state.states.checkpoints)
    stored = StoredBlocks(pools)
    like.resize(<size_t>len(pools))
    for lane in range(prefix.num_lanes):
        group = prefix.groups[lane]
        like[group].resize(<size_t>found.blocks)
        prefix.tree.native.copy_blocks(
            found.node, found.offset, lane, span[int32_t](like[group].data(), <size_t>found.blocks)
        )
    if state.states is not None:
        like[prefix.num_lanes].push_back(found.state)
    stored.reserve(like)
    return stored
