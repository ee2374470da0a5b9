"""HostTier: prefixes of a paged cache in host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Listed
from typing import Self, SupportsFloat, SupportsIndex

from pagecore.cache.parts import CacheParts, PartsOwner, parts_of
from pagecore.cache.prefix.retention import checked_priority
from pagecore.cache.state._state import Held
from pagecore.errors import UnsupportedOption
from pagecore.index import BlockPool, RadixTree, check_policy
from pagecore.storage import HostPool, KVPool, StatePool
from pagecore.storage.checks import flag, shown
from pagecore.storage.memory.budgets import Memory
from pagecore.tiers.host.copies.copies import BlockCopies, check_io
from pagecore.tiers.host.copies.streams import make_transfers
from pagecore.tiers.host.methods.backups import BackupMethods
from pagecore.tiers.host.methods.evicting import EvictMethods
from pagecore.tiers.host.methods.layer_copies import CopyMethods
from pagecore.tiers.host.methods.promoting import PromoteMethods
from pagecore.tiers.host.methods.records import Backup, HostStats
from pagecore.tiers.host.methods.streaming import StreamMethods
from pagecore.tiers.host.operations import _operations
from pagecore.tiers.host.operations._operations import HostIndex
from pagecore.tiers.host.sizes import size_tier

# Records of ended backups that `poll` returns at once; callers without stores never ask for them.
MAX_RECORDS = 1024
COUNTED = ("promotions", "promoted", "promoted_bytes", "failed", "backups", "backed_up", "backed_up_bytes")


class HostTier(PromoteMethods, BackupMethods, EvictMethods, StreamMethods, CopyMethods):
    """A second prefix cache in host memory, for blocks that the device evicts.

    The tier has a prefix tree and block pools of its own, with the components of the cache's: groups without a window,
    windows with their sinks and chunks, and states. `backup` copies published blocks to the host, and `promote` copies
    a prefix back into blocks of the cache, where `PagedKVCache.add_sequence` finds it. Blocks of cross-attention layers
    are left out: encoder outputs stay with the cache, and prefixes of the decoder are kept by encoder digest. Every
    call takes the lock of the cache.

    Parameters
    ----------
    cache : PagedKVCache
        A cache with a prefix cache; ``device="none"`` gives a tier of block ids without bytes, for simulation.
    memory : int, str or float
        Memory budget for all groups and states, as for `PagedKVCache`. Exclusive with `num_blocks` and `ratio`.
    num_blocks : int or list of int
        Blocks of each group of tokens, including the null block.
    num_states : int, optional
        Slots of states, including the null slot, in a cache with layers that keep states; by default the number of the
        cache, or the share that states have of its bytes. In a cache whose layers all keep states it takes the place of
        `num_blocks`.
    ratio : float
        Blocks and states of the host over those of the device.
    numa_node : int, optional
        Node of the memory; see `HostMemory`.
    huge_pages : bool
        Ask for huge pages.
    policy : {"lru", "lfu", "fifo", "mru", "filo", "slru", "slru:SHARE", "priority", "rank"}
        Eviction order of the host; see `pagecore.RadixTree`.
    min_priority : float, optional
        Priority, 0 to 100, that a block of a cache with ``eviction_policy="priority"`` needs to be copied to the host,
        and from there to stores: a block with a smaller one is evicted for good, and so is what continues it in a
        backup. A block without a priority has 35. By default all blocks are copied.
    shared : bool
        Memory that other processes can map.
    io : {"auto", "dma", "kernel"}
        Copies on CUDA: "dma" by the copy engines, a copy for each block or, for runs of more blocks than planes, for
        each run and plane; "kernel" by one launch; "auto" by the copy engines where a block of a plane has 64 KiB or
        more. Planes whose blocks are not runs of memory go by a launch.
    pipelined : bool
        On CUDA: promotions load layer by layer on a stream of their own, so that a layer can compute while the next one
        loads. `plane`, `key`, `value`, `write` and `attend` of the cache wait for the event of their layer. Before a
        graph is captured or replayed that uses the cache, call `wait_for_loads`. No effect on the host.

    Attributes
    ----------
    cache : PagedKVCache
    pool : HostPool
    block_pools : tuple of BlockPool
        Pool of each lane: the groups of tokens, then the states.
    policy : str

    Raises
    ------
    ShapeError, NotEnoughMemory
        Sizes that do not fit.
    UnsupportedOption
        An object that is not a paged cache, or a cache without a prefix cache; an unknown policy; `min_priority` for a
        cache with another policy than "priority".

    Notes
    -----
    On CUDA the memory is registered in the background; until that is done nothing is backed up. A prefix that is
    shorter than the room of the device is promoted in part.

    Examples
    --------
    >>> from pagecore import AttentionSpec, PagedKVCache
    >>> from pagecore.tiers.host.tier import HostTier
    >>> cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9)
    >>> tier = HostTier(cache, num_blocks=17)
    >>> with cache.add_sequence(range(64)) as sequence:
    ...     cache.commit(cache.prepare([sequence], 64))
    ...     tier.backup(sequence)
    4
    >>> _ = cache.clear_prefix_cache()
    >>> cache.match_length(range(70)), tier.promote(range(70)), cache.match_length(range(70))
    (0, 64, 64)
    """

    def __init__(
        self,
        cache: PartsOwner,
        *,
        memory: Memory | None = None,
        num_blocks: int | Listed[int] | None = None,
        num_states: SupportsIndex | None = None,
        ratio: SupportsFloat | None = None,
        numa_node: int | None = None,
        huge_pages: bool = True,
        policy: str = "lru",
        min_priority: SupportsFloat | None = None,
        shared: bool = False,
        io: str = "auto",
        pipelined: bool = False,
    ) -> None:
        parts = parts_of(cache)
        if parts.prefix is None:
            raise UnsupportedOption("the cache has prefix_cache=False: a host tier keeps prefixes; make it with True")
        check_policy(policy)
        least = _least_priority(parts, min_priority)
        flag("shared", shared)
        check_io(io)
        pipelines = flag("pipelined", pipelined)
        counts, slots = size_tier(parts, memory, num_blocks, num_states, ratio)
        self.cache = cache
        self._parts = parts
        self.block_pools = tuple(BlockPool(count, order="address") for count in [*counts, *([slots] if slots else [])])
        self._index = HostIndex(parts.prefix, self.block_pools, policy)
        self._index.min_priority = least
        self.pool = HostPool(
            [(group.spec, group.num_layers) for group in parts.cached_groups],
            parts.block_size,
            parts.checkpoint_specs,
            num_blocks=counts,
            num_states=slots,
            device=parts.device,
            heads=_heads_of(parts),
            numa_node=numa_node,
            huge_pages=huge_pages,
            shared=shared,
        )
        self._transfers = make_transfers(parts, self.pool, BlockCopies(parts, self.pool, io), pipelines)
        self._ended: deque[Backup] = deque(maxlen=MAX_RECORDS)
        self._counts = dict.fromkeys(COUNTED, 0)
        self.policy = str(policy)
        self._is_closed = False

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def tree(self) -> RadixTree:
        """Prefix tree of the host."""
        return self._index.tree

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._parts.block_size

    @property
    def tree_lanes(self) -> tuple[int, ...]:
        """The group of each lane of the tree: those without a window come first."""
        return self._index.lane_groups

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Entries of each lane, including the null entry."""
        return tuple(pool.num_blocks for pool in self.block_pools)

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Bytes of an entry of each lane, also in a tier without bytes."""
        return self.pool.payload_bytes

    @property
    def kv_pools(self) -> tuple[KVPool, ...]:
        """Bytes of each group; empty for ``device="none"``."""
        return self.pool.kv_pools

    @property
    def state_pool(self) -> StatePool | None:
        """Bytes of the states; None without states, and for ``device="none"``."""
        return self.pool.state_pool

    @property
    def num_available(self) -> int:
        """Free and evictable blocks of the scarcest group; slots of states, if every layer keeps a state."""
        return min(self._index.available()[: self.num_groups or 1])

    @property
    def nbytes(self) -> int:
        """Bytes of host memory; 0 for ``device="none"``."""
        return self.pool.nbytes

    # -- state ---------------------------------------------------------------------------------------------------

    def stats(self) -> HostStats:
        """Return the current statistics of the tier."""
        with Held(self._parts.state.lock):
            return HostStats(
                num_blocks=sum(self.num_blocks) - self.num_lanes,
                num_cached_blocks=self._index.num_cached(),
                num_evicted_blocks=self._index.num_evicted_blocks,
                num_cached_states=self._index.num_cached_states(),
                num_evicted_states=self._index.num_evicted_states,
                num_promotions=self._counts["promotions"],
                num_promoted_tokens=self._counts["promoted"],
                num_backups=self._counts["backups"],
                num_backed_up_blocks=self._counts["backed_up"],
                num_failed=self._counts["failed"],
                num_pending=self._transfers.num_pending,
                nbytes=self.nbytes,
            )

    @property
    def num_promoted_tokens(self) -> int:
        """Tokens by which promotions extended the device's prefixes so far."""
        return self._counts["promoted"]

    @property
    def promoted_bytes(self) -> int:
        """Bytes copied to the device so far, also in streams; without bytes in the tier, those of modelled entries."""
        return self._counts["promoted_bytes"]

    @property
    def backed_up_bytes(self) -> int:
        """Bytes copied to the host so far; see `promoted_bytes`."""
        return self._counts["backed_up_bytes"]

    @property
    def num_leases(self) -> int:
        """Leases that were neither adopted nor released."""
        with Held(self._parts.state.lock):
            tail = self._index.tail
            waiting = 0 if tail is None else tail.num_leases
            return sum(one.is_held and not one.num_receipts for one in self._listed()) - waiting

    @property
    def num_holds(self) -> int:
        """Holds of prefixes that were not released."""
        return sum(bool(one.num_receipts) for one in self._listed())

    def _listed(self) -> list[_operations.EntryLease]:
        with Held(self._parts.state.lock):
            return [one for one in self._index.leases if isinstance(one, _operations.EntryLease)]

    def check_invariants(self) -> None:
        """Recount every block of the host from its holders; raise `PagecoreError` if the counts differ."""
        with Held(self._parts.state.lock):
            swapped = [blocks for space in self._parts.swap_spaces for blocks in space.blocks_in(self)]
            self._index.check_invariants(swapped, self._transfers.num_backups)

    def close(self) -> None:
        """Wait for the copies, empty the tree and release the memory; a second call does what a failed one has not.

        Leases and holds end; no store may still read or write their blocks. Swap spaces of the tier must be empty.
        """
        if not self._is_closed:
            self.drain()
            self.poll()
            self._is_closed = True
        self.clear()
        for one in self._listed():
            _operations.release(self._parts.state, one)
        self.clear()  # what holds had pinned
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        used = sum(pool.num_used for pool in self.block_pools)
        entries = sum(self.num_blocks) - self.num_lanes
        return f"HostTier({used} of {entries} entries used, {self.nbytes / 2**20:.1f} MiB)"


def _least_priority(parts: CacheParts, given: SupportsFloat | None) -> float:
    """Return the smallest priority of blocks that are copied."""
    if given is None:
        return 0.0
    if parts.eviction_policy != "priority":
        raise UnsupportedOption(
            f"min_priority is {shown(given)}, but the blocks of a cache with eviction_policy={parts.eviction_policy!r} "
            "have no priorities; make the cache with 'priority', or leave it out"
        )
    return checked_priority(given, "min_priority")


def _heads_of(parts: CacheParts) -> str:
    """Return the order of heads and tokens in the cache, which lets a copy move larger pieces."""
    heads = parts.store.pools[0].layout.heads if parts.store.pools else None
    return heads or "HND"
