"""Memory of a swap space: pools of its own, or those of a host tier."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from typing import Protocol

from pagecore.arrays import DType, as_dtype, strided
from pagecore.cache.layers.groups import Group
from pagecore.cache.memory.limits import count_blocks
from pagecore.cache.memory.states import StateSizes
from pagecore.cache.parts import CacheParts
from pagecore.errors import NotEnoughMemory, UnsupportedDtype, UnsupportedOption
from pagecore.index import BlockPool, StateTable
from pagecore.storage import CrossSpec, KVLayout, KVPool, Plane, StatePool, StateSpec, parse_memory
from pagecore.storage.checks import INT32_MAX, flag, require_pool
from pagecore.storage.memory.budgets import Memory
from pagecore.storage.memory.page_locked import page_locked
from pagecore.storage.pools.layout import as_layout
from pagecore.storage.specs.spec import CACHE_DTYPES


class SharedHost(Protocol):
    """A host tier, as a swap space that shares its memory sees it; pools are of each group, then of the states."""

    @property
    def block_pools(self) -> Listed[BlockPool]:
        """Pools of block ids."""

    @property
    def kv_pools(self) -> Listed[KVPool]:
        """Bytes of the groups; empty without bytes."""

    @property
    def state_pool(self) -> StatePool | None:
        """Bytes of the states: those of checkpoints, if they are quantised."""

    @property
    def num_available(self) -> int:
        """Free and evictable blocks of the scarcest group."""

    @property
    def is_closed(self) -> bool:
        """True after the tier was closed."""

    def make_room(self, counts: Listed[int]) -> bool:
        """Evict until `counts` blocks of each pool are free; return False if they cannot be."""

    def check_invariants(self) -> None:
        """Recount every block from its holders."""


@dataclass(frozen=True)
class SwapMemory:
    """Pools of a swap space.

    Attributes
    ----------
    block_pools : tuple of BlockPool
        Block ids of each group.
    kv_pools : list of KVPool
        Bytes of each group; empty for a cache without bytes.
    state_slots, checkpoint_slots : BlockPool or None
        Slots of states and of quantised checkpoints.
    state_pool, checkpoint_pool : StatePool or None
        Their bytes.
    is_exact : bool
        True if values come back bit for bit.
    """

    block_pools: tuple[BlockPool, ...]
    kv_pools: list[KVPool]
    state_slots: BlockPool | None = None
    state_pool: StatePool | None = None
    checkpoint_slots: BlockPool | None = None
    checkpoint_pool: StatePool | None = None
    is_exact: bool = True

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """Pools of the groups, then those of the states and of quantised checkpoints."""
        slots = (self.state_slots, self.checkpoint_slots)
        return (*self.block_pools, *(pool for pool in slots if pool is not None))

    @property
    def nbytes(self) -> int:
        """Bytes of all groups and states; 0 for a cache without bytes."""
        of_states = [pool.nbytes for pool in (self.state_pool, self.checkpoint_pool) if pool is not None]
        return sum(pool.nbytes for pool in self.kv_pools) + sum(of_states)


def own_memory(
    parts: CacheParts,
    num_blocks: int | Listed[int] | None,
    memory: Memory | None,
    num_states: int | None,
    num_checkpoints: int | None,
    layout: str | KVLayout | None,
    dtype: DType | str | None,
    scrub: bool | None,
) -> SwapMemory:
    """Return new memory for a space; see `SwapSpace` for the arguments and errors."""
    is_scrubbed = parts.scrub if scrub is None else flag("scrub", scrub)
    if is_scrubbed and not parts.scrub:
        raise UnsupportedOption(
            "scrub is True, but the cache has scrub=False: whole blocks are moved, and those of the cache may hold "
            "values of another namespace; make the cache with scrub=True"
        )
    groups = [_converted(group, dtype) for group in parts.groups]
    sizes, memory = _size_states(parts, num_states, num_checkpoints, memory)
    blocks = count_blocks(groups, parts.block_size, num_blocks, memory)
    order = None if layout is None else as_layout(layout)
    states = [spec for spec in parts.state_specs if isinstance(spec, StateSpec)]
    return SwapMemory(
        tuple(BlockPool(n, order="address") for n in blocks),
        # Zipped with the cache's pools: a cache without bytes has none.
        [
            _host_pool(parts, group, n, order or pool.layout, is_scrubbed)
            for group, n, pool in zip(groups, blocks, parts.store.pools, strict=False)
        ],
        _slots(sizes.num_states),
        _state_pool(parts, states, sizes.num_states, is_scrubbed),
        _slots(sizes.num_checkpoints),
        _state_pool(parts, parts.checkpoint_specs, sizes.num_checkpoints, is_scrubbed),
        all(one.spec.planes == other.spec.planes for one, other in zip(groups, parts.groups, strict=True)),
    )


def shared_memory(
    parts: CacheParts, host: SharedHost, num_states: int | None, num_blocks: int | Listed[int] | None = None
) -> SwapMemory:
    """Return the memory of a host tier, and pools of the space's own for what a tier does not hold.

    A tier stores prefixes and checkpoints: tails of sealed blocks have pools of `num_blocks` blocks each, by default
    those of the cache, and running states have slots next to quantised checkpoints.
    """
    shared = tuple(host.block_pools)
    lanes = len(parts.cached_groups)
    tails, pools = _tail_memory(parts, num_blocks)
    blocks, kv_pools = shared[:lanes] + tails, [*host.kv_pools, *pools]
    if not quantises(parts):
        slots = shared[-1] if parts.state.states is not None else None
        return SwapMemory(blocks, kv_pools, slots, host.state_pool)
    num_slots = _size_states(parts, num_states, 2, None)[0].num_states
    states = [spec for spec in parts.state_specs if isinstance(spec, StateSpec)]
    pool = _state_pool(parts, states, num_slots, parts.scrub)
    return SwapMemory(blocks, kv_pools, _slots(num_slots), pool, shared[-1], host.state_pool)


def _tail_memory(parts: CacheParts, num_blocks: int | Listed[int] | None) -> tuple[tuple[BlockPool, ...], list[KVPool]]:
    """Return pools for the tails of sealed blocks; none without them."""
    first = len(parts.cached_groups)
    groups = parts.groups[first:]
    if not groups:
        return (), []
    given = [pool.num_blocks for pool in parts.block_pools[first:]] if num_blocks is None else num_blocks
    counts = count_blocks(groups, parts.block_size, given, None)
    pools = [
        _host_pool(parts, group, count, pool.layout, parts.scrub)
        for group, count, pool in zip(groups, counts, parts.store.pools[first:], strict=False)
    ]
    return tuple(BlockPool(count, order="address") for count in counts), pools


def quantises(parts: CacheParts) -> bool:
    """Return True if the cache has quantised checkpoints."""
    return parts.state.states is not None and parts.state.states.num_checkpoints > 0


def _slots(count: int) -> BlockPool | None:
    return BlockPool(count, order="address") if count else None


def _host_pool(parts: CacheParts, group: Group, num_blocks: int, layout: KVLayout, scrub: bool) -> KVPool:
    """Return a pool in host memory; page-locked, and reachable from the device, for a cache on CUDA."""
    buffers = None
    if parts.staging is not None:
        bound = layout.bind(group.spec.planes, group.num_layers, num_blocks, parts.block_size)
        sizes = [bound.buffer_nbytes(i) for i in range(bound.num_buffers)]
        buffers = [page_locked(size, parts.device, zeroed=scrub) for size in sizes]
    device = "cpu" if buffers is None else parts.device
    is_new = scrub and buffers is None
    return KVPool(group.spec, group.num_layers, num_blocks, parts.block_size, layout, device, buffers, scrub=is_new)


def _size_states(
    parts: CacheParts, num_states: int | None, num_checkpoints: int | None, memory: Memory | None
) -> tuple[StateSizes, Memory | None]:
    """Return the state slots of a space, and the memory that is left for blocks."""
    states = parts.state.states
    if states is None:
        if num_states is not None:
            raise UnsupportedOption("num_states is given, but no layer of the cache keeps a state; leave it out")
        if num_checkpoints is not None:
            raise UnsupportedOption("num_checkpoints is given, but no layer of the cache keeps a state; leave it out")
        return StateSizes(), memory
    if num_checkpoints is not None and not states.num_checkpoints:
        raise UnsupportedOption(
            "num_checkpoints is given, but the cache has no quantised checkpoints; leave it out, or give its "
            "StateSpecs checkpoint_format"
        )
    slots = states.num_slots if num_states is None else require_pool("num_states", num_states, "slot")
    kept = None if num_checkpoints is None else require_pool("num_checkpoints", num_checkpoints, "slot")
    if memory is None:
        default = max(slots, states.num_checkpoints) if num_states is None else slots
        return _with_checkpoints(states, slots, default if kept is None else kept), None
    slots, left = _within(parts, parse_memory(memory, "cpu"), slots, kept, is_given=num_states is not None)
    return _with_checkpoints(states, slots, slots if kept is None else kept), left


def _within(parts: CacheParts, budget: int, slots: int, kept: int | None, *, is_given: bool) -> tuple[int, int | None]:
    """Return the state slots that fit in `budget` bytes, and the bytes left for blocks; None without blocks.

    `slots` is the number asked for, or that of the cache; `kept` is the number of quantised checkpoints, or None for
    one with each state.
    """
    each = sum(plane.nbytes for spec in parts.state_specs for plane in spec.planes)
    checkpoint = sum(spec.nbytes for spec in parts.checkpoint_specs) if quantises(parts) else 0
    if kept is None:
        each += checkpoint
    else:
        budget -= kept * checkpoint
    if not is_given:
        of_groups = sum(
            pool.num_blocks * group.bytes_per_block(parts.block_size)
            for pool, group in zip(parts.block_pools, parts.groups, strict=True)
        )
        slots = max(2, budget * slots // (slots * each + of_groups))
    if not parts.groups:
        slots = slots if is_given else min(budget // each, INT32_MAX)
        if slots < 2 or slots * each > budget:
            raise NotEnoughMemory(
                f"{max(slots, 2)} state slots of {each} bytes do not fit in a memory of {max(budget, 0)} bytes; give "
                "more memory"
            )
        return slots, None
    if slots * each >= budget:
        raise NotEnoughMemory(f"{slots} state slots of {each} bytes fill a memory of {budget} bytes; give more memory")
    return slots, budget - slots * each


def _with_checkpoints(states: StateTable, slots: int, kept: int) -> StateSizes:
    return StateSizes(slots, kept if states.num_checkpoints else 0)


def _state_pool(parts: CacheParts, specs: Listed[StateSpec], num_slots: int, scrub: bool) -> StatePool | None:
    """Return slots in host memory; page-locked, and reachable from the device, for a cache on CUDA."""
    if not num_slots or parts.store.states is None:
        return None
    if parts.staging is None:
        pool = StatePool(specs, num_slots)
        if scrub:
            pool.zero(range(1, num_slots))
        return pool
    buffers = []
    for plane in (plane for spec in specs for plane in spec.planes):
        held = page_locked(num_slots * plane.nbytes, parts.device, zeroed=scrub)
        buffers.append(strided(held, (num_slots, *plane.shape), None, 0, plane.dtype))
    return StatePool(specs, num_slots, device=parts.device, buffers=buffers)


@dataclass(frozen=True)
class _Planes:
    """A spec of stored planes only, without any attention options."""

    planes: tuple[Plane, ...]
    window: int | None = None


def _converted(group: Group, dtype: DType | str | None) -> Group:
    """Return the group with its floats stored as `dtype`."""
    if dtype is None:
        return group
    target = as_dtype(dtype)
    for name, one in [("dtype", target), *((f"plane {plane.name!r}", plane.dtype) for plane in group.spec.planes)]:
        if str(one) not in CACHE_DTYPES:
            raise UnsupportedDtype(
                f"{name} is {one}; a swap space converts between {', '.join(CACHE_DTYPES)}: leave dtype out"
            )
    if isinstance(group.spec, CrossSpec):
        return Group(group.spec.with_dtype(target), group.num_layers)
    planes = tuple(replace(plane, dtype=target) for plane in group.spec.planes)
    return Group(_Planes(planes), group.num_layers)
