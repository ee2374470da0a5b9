"""Swap space: a second memory for the blocks of sequences that are swapped out."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import DType, as_dtype, strided
from pagecore.arrays._make import pinned
from pagecore.cache._lock import Held
from pagecore.cache._sequence import Sequence
from pagecore.cache.layers import Group
from pagecore.cache.limits import count_blocks
from pagecore.cache.parts import CacheParts, PartsOwner, parts_of
from pagecore.cache.state_layers import StateSizes
from pagecore.cache.swap._contents import stored_content_blocks
from pagecore.cache.swap._swap import check_stored, stored_blocks
from pagecore.errors import NotEnoughMemory, PagecoreError, UnsupportedDtype, UnsupportedOption
from pagecore.index import BlockPool, StateTable
from pagecore.storage import CrossSpec, KVLayout, KVPool, Plane, StatePool, StateSpec, parse_memory
from pagecore.storage.checks import INT32_MAX, flag, require_int, shown
from pagecore.storage.layout import as_layout
from pagecore.storage.memory import Memory
from pagecore.storage.spec import CACHE_DTYPES

NONE = np.zeros(0, np.int32)
T = TypeVar("T")


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

    def make_room(self, counts: Listed[int]) -> bool:
        """Evict until `counts` blocks of each pool are free; return False if they cannot be."""

    def check_invariants(self) -> None:
        """Recount every block from its holders."""


class SwapSpace:
    """Host memory for the computed blocks of sequences that are swapped out of one cache.

    Parameters
    ----------
    cache : PagedKVCache
        The cache that the space serves. A cache may have several spaces.
    num_blocks : int or list of int
        Blocks of each group, including the null block; a list has one entry per group. Exclusive with `memory`.
    memory : int, str or float
        Memory budget for all groups, as for `PagedKVCache`.
    num_states : int, optional
        Slots for states, including the null slot, if the cache has layers that keep states: two for each sequence, its
        state and its checkpoint. By default with `num_blocks` the number of the cache, and with `memory` the share
        that states have of the bytes of the cache.
    num_checkpoints : int, optional
        Slots for quantised checkpoints, including the null slot, if the cache has them: two for each sequence, its
        checkpoint and the one from which it continues. By default `num_states`.
    layout : str or KVLayout, optional
        Memory layout of the blocks; by default that of the cache.
    dtype : str or anything that names a dtype, optional
        Store float32, float16 or bfloat16 instead of the cache's own float dtype. Values are rounded to it when they
        are swapped out; by default they come back bit for bit. States and checkpoints always do.
    scrub : bool, optional
        Zero the memory when the space is made; by default as the cache does. True requires a cache with `scrub`:
        whole blocks are moved, and only in such a cache do they hold nothing but zeros and values of the sequence's own
        namespace. In other caches the slots past the computed tokens may hold values of another namespace, which are
        then copied into the space too.
    host : HostTier, optional
        A host tier of the cache whose memory the space shares, instead of memory of its own: swapped blocks take blocks
        of the tier, and evict what it caches if they are short. Exclusive with the other options, but for `num_states`
        in a cache with quantised checkpoints: the tier stores checkpoints, and the space has slots of its own for the
        states of running sequences.

    Attributes
    ----------
    cache : PagedKVCache

    Notes
    -----
    A cache with ``device="none"`` has spaces without bytes: block ids only. A cache on CUDA has spaces of page-locked
    memory, which the device reads and writes in the order of the stream of the last step; the host does not wait. A
    space is used under the lock of its cache.

    Raises
    ------
    ShapeError, NotEnoughMemory
        Sizes that do not fit.
    UnsupportedOption, UnsupportedDtype
        An object that is not a cache; a dtype that is not a float, or a dtype for planes that do not store floats.

    Examples
    --------
    >>> from pagecore.cache import PagedKVCache, SwapSpace
    >>> from pagecore.storage import AttentionSpec
    >>> cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=5)
    >>> space = SwapSpace(cache, num_blocks=9)
    >>> sequence = cache.add_sequence(range(20))
    >>> cache.commit(cache.prepare([sequence], 20))
    >>> cache.swap_out([sequence], space)
    >>> cache.num_available, space.num_available, sequence.is_swapped
    (4, 6, True)
    >>> cache.swap_in([sequence])
    >>> cache.num_available, space.num_available, sequence.num_computed_tokens
    (2, 8, 20)
    """

    def __init__(
        self,
        cache: PartsOwner,
        *,
        num_blocks: int | Listed[int] | None = None,
        memory: Memory | None = None,
        num_states: int | None = None,
        num_checkpoints: int | None = None,
        layout: str | KVLayout | None = None,
        dtype: DType | str | None = None,
        scrub: bool | None = None,
        host: SharedHost | None = None,
    ) -> None:
        parts = parts_of(cache)
        # Of quantised checkpoints.
        self.checkpoint_slots: BlockPool | None = None
        self.checkpoint_pool: StatePool | None = None
        self._host = host
        if host is not None:
            own: dict[str, object] = {"num_blocks": num_blocks, "memory": memory, "num_checkpoints": num_checkpoints}
            if not _quantises(parts):
                own["num_states"] = num_states
            self._share(cache, parts, host, own | {"layout": layout, "dtype": dtype, "scrub": scrub}, num_states)
            return
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
        self.cache = cache
        self._parts = parts
        # True if values come back bit for bit.
        self.is_exact = all(
            one.spec.planes == other.spec.planes for one, other in zip(groups, parts.groups, strict=True)
        )
        self.block_pools = tuple(BlockPool(n, order="address") for n in blocks)
        self._take_states(parts, sizes, is_scrubbed)
        if sizes.num_checkpoints:
            self.checkpoint_slots = BlockPool(sizes.num_checkpoints, order="address")
            self.checkpoint_pool = _state_pool(parts, parts.checkpoint_specs, sizes.num_checkpoints, is_scrubbed)
        self.pools = self._listed_pools()
        # Zipped with the cache's pools: a cache without bytes has none.
        self.kv_pools = [
            _host_pool(parts, group, n, order or pool.layout, is_scrubbed)
            for group, n, pool in zip(groups, blocks, parts.store.pools, strict=False)
        ]
        self._start(parts)

    def _take_states(self, parts: CacheParts, sizes: StateSizes, scrub: bool) -> None:
        """Make the slots of the states."""
        slots = sizes.num_states
        self.state_slots = BlockPool(slots, order="address") if slots else None
        specs = [spec for spec in parts.state_specs if isinstance(spec, StateSpec)]
        self.state_pool = _state_pool(parts, specs, slots, scrub)

    def _listed_pools(self) -> tuple[BlockPool, ...]:
        """Return the pools of the groups, then those of the states and of quantised checkpoints."""
        slots = (self.state_slots, self.checkpoint_slots)
        return (*self.block_pools, *(pool for pool in slots if pool is not None))

    def _share(
        self,
        cache: PartsOwner,
        parts: CacheParts,
        host: SharedHost,
        own: dict[str, object],
        num_states: int | None,
    ) -> None:
        """Take the pools of a host tier."""
        given = [name for name, value in own.items() if value is not None]
        if given:
            raise UnsupportedOption(f"host is given, and {given[0]} too; the space has the tier's memory: leave it out")
        if getattr(host, "cache", None) is not cache:
            raise UnsupportedOption(f"host is {shown(host)}; expected a HostTier of this cache")
        if parts.cross is not None:
            raise UnsupportedOption(
                "the cache has cross-attention layers, whose blocks a host tier leaves out; give the space num_blocks"
            )
        self.cache, self._parts, self.is_exact = cache, parts, True
        shared = tuple(host.block_pools)
        self.block_pools = shared[: parts.num_groups]
        self.kv_pools = list(host.kv_pools)
        if _quantises(parts):
            self._take_states(parts, _size_states(parts, num_states, 2, None)[0], parts.scrub)
            self.checkpoint_slots, self.checkpoint_pool = shared[-1], host.state_pool
        else:
            self.state_slots = shared[-1] if parts.state.states is not None else None
            self.state_pool = host.state_pool
        self.pools = self._listed_pools()
        self._start(parts)

    def _start(self, parts: CacheParts) -> None:
        staging = parts.staging
        self._last_use = None if staging is None else staging.runtime.make_event(staging.device)
        parts.swap_spaces.add(self)

    def serves(self, parts: CacheParts) -> bool:
        """Return True if the space serves the cache with these parts."""
        return self._parts is parts

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group, including the null block."""
        return tuple(pool.num_blocks for pool in self.block_pools)

    @property
    def num_available(self) -> int:
        """Free blocks of the scarcest group; with `host`, and those that it can evict.

        Free slots, for a cache whose layers all keep states.
        """
        if self._host is None:
            return min(pool.num_free for pool in self.block_pools or self.pools)
        available = self._host.num_available
        if self.block_pools or self.state_slots is None or self.checkpoint_slots is None:
            return available
        return min(available, self.state_slots.num_free)  # running states have slots of the space's own

    @property
    def num_states(self) -> int:
        """State slots, including the null slot; 0 for a cache without layers that keep states."""
        return 0 if self.state_slots is None else self.state_slots.num_blocks

    @property
    def num_checkpoints(self) -> int:
        """Slots of quantised checkpoints, including the null slot; 0 without them."""
        return 0 if self.checkpoint_slots is None else self.checkpoint_slots.num_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks in use by sequences, summed over the groups."""
        if self._host is None:
            return sum(pool.num_used for pool in self.block_pools)
        return sum(len(np.unique(blocks[blocks != 0])) for blocks in self._held_blocks())

    @property
    def num_sequences(self) -> int:
        """Sequences whose blocks the space holds."""
        return len(self._held())

    @property
    def nbytes(self) -> int:
        """Bytes of all groups and states; 0 for a cache without bytes."""
        of_states = [pool.nbytes for pool in (self.state_pool, self.checkpoint_pool) if pool is not None]
        return sum(pool.nbytes for pool in self.kv_pools) + sum(of_states)

    def check_invariants(self) -> None:
        """Recount every block from the sequences that hold it; raise `PagecoreError` if the counts differ."""
        with Held(self._parts.state.lock):
            held = self._held()
            for sequence in held:
                check_stored(self._parts.state, sequence, self)
            if self._host is not None:
                self._host.check_invariants()  # counts the blocks of sequences, too
                return
            own = [stored_blocks(sequence) for sequence in held]
            contents = stored_content_blocks(self._parts.state, self)
            num_groups, last = len(self._parts.token_groups), len(self.block_pools)
            for group, pool in enumerate(self.pools):
                is_content = num_groups <= group < last
                # The slots of states and checkpoints are after the blocks of the sequence's own groups.
                place = group if group < num_groups else group - last + num_groups
                listed, place = (contents, group - num_groups) if is_content else (own, place)
                pool.check_invariants()
                entries = np.concatenate([blocks[place] for blocks in listed] or [NONE])
                counts = np.bincount(entries[entries != 0], minlength=pool.num_blocks)
                if not np.array_equal(counts, pool.ref_counts()):
                    raise PagecoreError(f"group {group} of {self!r}: reference counts do not match the holders")

    def shares(self, host: object) -> bool:
        """Return True if the space has the memory of `host`."""
        return self._host is not None and self._host is host

    def make_room(self, needed: Listed[int]) -> None:
        """Evict what a shared host tier caches until `needed` blocks of each pool are free, if it can."""
        if self._host is not None:
            self._host.make_room(self._of_host(needed))

    def _of_host(self, by_pool: Listed[T]) -> list[T]:
        """Return the entries of the pools that a host tier has."""
        own = {id(self.state_slots)} if self.checkpoint_slots is not None else set()
        return [entry for entry, pool in zip(by_pool, self.pools, strict=True) if id(pool) not in own]

    def blocks_in(self, host: object) -> list[tuple[NDArray[np.int32], ...]]:
        """Return the blocks that each sequence holds of a host tier, by pool; empty for another tier."""
        held = self._held() if self.shares(host) else []
        return [tuple(self._of_host(stored_blocks(sequence))) for sequence in held]

    def _held_blocks(self) -> list[NDArray[np.int32]]:
        held = self.blocks_in(self._host)
        return [np.concatenate([blocks[group] for blocks in held] or [NONE]) for group in range(len(self.block_pools))]

    def wait(self) -> None:
        """Wait until a device has made the copies that were submitted so far."""
        if self._last_use is not None:
            self._last_use.synchronize()

    def _held(self) -> list[Sequence]:
        return [sequence for sequence in self._parts.state.listed() if sequence.swap_space is self]

    def note_use(self) -> None:
        """Record an event on the stream of the cache, to which copies of the space's blocks were just submitted."""
        if self._last_use is not None:
            assert self._parts.staging is not None
            self._last_use.record(self._parts.staging.stream)

    def __del__(self) -> None:
        # Submitted copies must finish before their memory is freed.
        last_use = getattr(self, "_last_use", None)
        if last_use is None or sys.is_finalizing():
            return
        try:
            last_use.synchronize()
        except Exception as error:  # a destructor warns and never raises
            message = f"the memory of a swap space is freed while a device may still copy to or from it: {error}"
            warnings.warn(message, ResourceWarning, stacklevel=1)

    def __repr__(self) -> str:
        blocks = sum(self.num_blocks) - len(self.block_pools)
        return f"SwapSpace({self.num_sequences} sequences, {self.num_used_blocks} of {blocks} blocks used)"


def _host_pool(parts: CacheParts, group: Group, num_blocks: int, layout: KVLayout, scrub: bool) -> KVPool:
    """Return a pool in host memory; page-locked, and reachable from the device, for a cache on CUDA."""
    buffers = None
    if parts.staging is not None:
        bound = layout.bind(group.spec.planes, group.num_layers, num_blocks, parts.block_size)
        sizes = [bound.buffer_nbytes(i) for i in range(bound.num_buffers)]
        buffers = [pinned(size, parts.device, zeroed=scrub) for size in sizes]
    device = "cpu" if buffers is None else parts.device
    is_new = scrub and buffers is None
    return KVPool(group.spec, group.num_layers, num_blocks, parts.block_size, layout, device, buffers, scrub=is_new)


def _quantises(parts: CacheParts) -> bool:
    return parts.state.states is not None and parts.state.states.num_checkpoints > 0


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
    slots = states.num_slots if num_states is None else require_int("num_states", num_states, min=2, max=INT32_MAX)
    kept = None if num_checkpoints is None else require_int("num_checkpoints", num_checkpoints, min=2, max=INT32_MAX)
    if memory is None:
        default = max(slots, states.num_checkpoints) if num_states is None else slots
        return _with_checkpoints(states, slots, default if kept is None else kept), None
    # A checkpoint goes with each state.
    budget, each = parse_memory(memory, "cpu"), sum(p.nbytes for spec in parts.state_specs for p in spec.planes)
    one = sum(spec.nbytes for spec in parts.checkpoint_specs) if states.num_checkpoints else 0
    taken = 0 if kept is None else kept * one
    each += one if kept is None else 0
    budget -= taken
    if num_states is None:
        of_groups = sum(
            pool.num_blocks * group.bytes_per_block(parts.block_size)
            for pool, group in zip(parts.block_pools, parts.groups, strict=True)
        )
        slots = max(2, budget * slots // (slots * each + of_groups))
    if not parts.groups:
        slots = slots if num_states is not None else min(budget // each, INT32_MAX)
        if slots < 2 or slots * each > budget:
            raise NotEnoughMemory(
                f"{max(slots, 2)} state slots of {each} bytes do not fit in a memory of {max(budget, 0)} bytes; give "
                "more memory"
            )
        return _with_checkpoints(states, slots, slots if kept is None else kept), None
    if slots * each >= budget:
        raise NotEnoughMemory(f"{slots} state slots of {each} bytes fill a memory of {budget} bytes; give more memory")
    return _with_checkpoints(states, slots, slots if kept is None else kept), budget - slots * each


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
        held = pinned(num_slots * plane.nbytes, parts.device, zeroed=scrub)
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
