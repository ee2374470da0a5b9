"""The host's prefix tree and block pools, in agreement: the tree holds one reference to every block that it knows."""

from libc.stdint cimport int32_t, int64_t

from pagecore.cache.prefix._prefix cimport PrefixCache, read_counts
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.radix._native cimport NativeMatch, RetentionHint
from pagecore.index.radix._radix cimport Prefix, RadixTree, key_of, read_prefix
from pagecore.native.std cimport vector

import weakref

import numpy as np

from pagecore.errors import PagecoreError


cdef class HostIndex:
    """A second prefix tree with the components of the device's, and the pools of its blocks.

    Every call is made under the lock of the cache.

    Parameters
    ----------
    prefix : PrefixCache
        Prefix cache of the device.
    pools : tuple of BlockPool
        Pool of each group, then that of the state slots in a cache with states.
    policy : str
        Eviction policy. "lru" is the policy "rank" of a tree whose ranks are 0, and below 0 for what the device has as
        well, if the index is exclusive.
    """

    def __cinit__(self, PrefixCache prefix not None, tuple pools not None, str policy):
        cdef int32_t lane
        cdef RadixTree like = prefix.tree
        self.prefix = prefix
        self.pools = pools
        self.has_states = prefix.states is not None
        self.tree = RadixTree(
            like.block_size, full=prefix.num_full, windows=like.windows, chunks=like.chunks, sinks=like.sinks,
            states=self.has_states, state_interval=like.state_interval, min_kept=like.min_kept,
            policy="rank" if policy == "lru" else policy,
        )
        self.uses_hints = policy in ("priority", "rank")
        self.min_priority = 0
        self.groups.assign(prefix.groups.begin(), prefix.groups.end())
        self.components.assign(prefix.components.begin(), prefix.components.end())
        self.num_full = prefix.num_full
        self.num_lanes = prefix.num_lanes
        self.block_size = like.block_size
        self.leases = weakref.WeakSet()
        prefix.num_tiers += 1
        self.number = prefix.num_tiers
        for lane in range(self.num_lanes):
            self.tree.native.reserve_ids(lane, self.pool(self.groups[lane]).num_blocks)
        self.tree.reserve_moves(1)

    cdef BlockPool pool(self, size_t group):
        return <BlockPool>self.pools[group]

    cdef int sweep(self) except -1:
        cdef RetentionHint no_hint
        while not self.lost.empty():
            self.tree.native.unlock(self.lost.back(), self.tree.every_component, no_hint)
            self.lost.pop_back()
        self.tree._forget_dead()
        return 0

    cdef int reserve_lost(self) except -1:
        # Not by the number of leases: a collector clears the references to them before it collects them.
        self.lost.reserve(self.lost.size() + self.num_holding + 1)
        return 0

    cdef bint can_make_room(self, const vector[int64_t]& needed) noexcept:
        cdef size_t group
        cdef int32_t component
        for group in range(needed.size()):
            component = self.components[group] if group < <size_t>self.num_lanes else len(self.tree.components) - 1
            if needed[group] > self.pool(group).num_free_raw() + self.tree.native.evictable(component):
                return False
        return True

    cdef bint is_needed(self, int32_t component, int64_t index, int64_t num_blocks) noexcept:
        cdef int64_t first
        if component == 0:
            return True
        first = self.tree.native.first_needed(component, num_blocks)
        return index >= first or index * self.block_size < <int64_t>self.tree.sinks[component - 1]

    cdef bint make_room(self, const vector[int64_t]& needed) noexcept:
        cdef size_t group
        cdef int32_t component
        cdef int64_t wanted = 1
        cdef bint is_enough = True
        # A block that a lease holds as well does not become free when the tree gives it up: evict until enough are.
        while wanted > 0:
            wanted = 0
            for group in range(<size_t>self.num_lanes):
                if self.components[group] == 0:
                    wanted = max(wanted, needed[group] - self.pool(group).num_free_raw())
            if wanted > 0 and self.evict(0, wanted) == 0:
                break
        for group in range(needed.size()):
            component = self.components[group] if group < <size_t>self.num_lanes else len(self.tree.components) - 1
            wanted = needed[group] - self.pool(group).num_free_raw()
            while component > 0 and wanted > 0 and self.evict(component, wanted) > 0:
                wanted = needed[group] - self.pool(group).num_free_raw()
            is_enough = is_enough and wanted <= 0
        return is_enough

    cdef int64_t evict(self, int32_t component, int64_t amount) noexcept:
        cdef int64_t evicted
        self.tree.native.advance(self.prefix.now)  # expire priorities first
        evicted = self.tree.evict_raw(component, amount)
        self.free_gone(self.tree.gone_raw)
        return evicted

    cdef void free_gone(self, const vector[vector[int32_t]]& gone) noexcept:
        """Drop the references to what the tree evicted."""
        cdef int32_t lane
        for lane in range(<int32_t>gone.size()):
            self.num_evictions += not gone[lane].empty()
        for lane in range(self.num_lanes):
            self.num_evicted_blocks += self.pool(self.groups[lane]).free_raw(gone[lane].data(), gone[lane].size())
        if self.has_states:
            self.num_evicted_states += self.pool(self.num_lanes).free_raw(
                gone[self.num_lanes].data(), gone[self.num_lanes].size()
            )

    # -- for Python ----------------------------------------------------------------------------------------------

    @property
    def num_groups(self):
        """Number of groups of tokens."""
        return self.num_lanes

    @property
    def lane_groups(self):
        """Group of each lane of the tree."""
        return tuple(self.groups)

    def free(self, counts):
        """Evict until `counts` blocks of each group are free, states last; return False if they cannot be."""
        cdef vector[int64_t] needed
        read_counts(counts, needed)
        self.sweep()
        cdef bint is_enough = self.can_make_room(needed) and self.make_room(needed)
        return is_enough

    def available(self):
        """Return the free and evictable blocks of each group, states last, as a list of int."""
        cdef size_t group
        counts = []
        for group in range(<size_t>len(self.pools)):
            component = self.components[group] if group < <size_t>self.num_lanes else len(self.tree.components) - 1
            counts.append(self.pool(group).num_free_raw() + self.tree.native.evictable(component))
        return counts

    def clear(self):
        """Evict everything that is not pinned; return the number of freed blocks."""
        cdef int32_t component
        cdef int64_t before = self.num_evicted_blocks
        self.sweep()
        for component in range(<int32_t>len(self.tree.components)):
            while self.evict(component, self.tree.native.evictable(component)) > 0:
                pass
        self.sweep()
        return self.num_evicted_blocks - before

    def evict_prefix(self, ids, options, int64_t keep):
        """Evict the end of a prefix back to `keep` tokens, except for what is pinned or what others continue."""
        cdef Prefix wanted = read_prefix(self.block_size, ids, options.namespace, options.spans, None)
        cdef vector[vector[int32_t]] gone
        self.sweep()
        self.tree.evict_path_raw(wanted, keep, gone)
        self.free_gone(gone)
        self.sweep()

    def evict_namespace(self, namespace):
        """Evict all prefixes of a namespace, except for what is pinned."""
        cdef vector[vector[int32_t]] gone
        self.sweep()
        self.tree.evict_namespace_raw(None if namespace is None else key_of(namespace), gone)
        self.free_gone(gone)
        self.sweep()

    def path_length(self, ids, options):
        """Return the tokens of a prefix whose blocks the device or the host has, whether or not they can be reused."""
        cdef Prefix wanted = read_prefix(self.block_size, ids, options.namespace, options.spans, None)
        return max(num_blocks_of(self.prefix.tree, wanted), num_blocks_of(self.tree, wanted)) * self.block_size

    def num_cached(self):
        """Return the blocks of all groups that the tree holds."""
        return sum([len(self.tree.held_blocks(lane)) for lane in range(self.num_lanes)])

    def num_cached_states(self):
        """Return the states that the tree holds."""
        return len(self.tree.held_states()) if self.has_states else 0

    def check_invariants(self, others, int64_t num_pins):
        """Recount every block from the tree, the leases and `others`; raise PagecoreError if the counts differ.

        Parameters
        ----------
        others : list of list of numpy.ndarray
            Blocks of each group, states last, that other holders have a reference to each; 0 for none.
        num_pins : int
            Pins of the tree that transfers hold.
        """
        self.sweep()
        self.tree.check_invariants()
        leases = list(self.leases)
        held = [*[lease.blocks for lease in leases if lease.is_held], *others]
        for group, pool in enumerate(self.pools):
            pool.check_invariants()
            holders = np.zeros(pool.num_blocks, np.int64)
            for blocks in held:
                holders += np.bincount(blocks[group], minlength=pool.num_blocks)
            holders[0] = 0
            if group == self.num_lanes:
                holders[self.tree.held_states()] += 1
            else:
                holders[self.tree.held_blocks(self.prefix.lane_of[group])] += 1
            if not np.array_equal(holders, pool.ref_counts()):
                raise PagecoreError(f"host group {group}: reference counts do not match the holders (tree + leases)")
        num_pins += sum([lease.num_receipts for lease in leases])
        if self.tree.num_receipts != num_pins:
            raise PagecoreError(f"{self.tree.num_receipts} receipts of the host are held for {num_pins} transfers")


cdef int32_t space_of(RadixTree tree, object key) except -2:
    return 0 if key is None else tree.spaces.get(key, -1)


cdef int64_t num_blocks_of(RadixTree tree, Prefix wanted) except -1:
    """Return the blocks of a prefix that the full component of a tree has."""
    cdef NativeMatch found
    wanted.space = space_of(tree, wanted.key)
    found = tree.native.match(wanted.query(), wanted.limit)
    return found.full_blocks
