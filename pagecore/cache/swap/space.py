"""Swap space: a second memory for the blocks of sequences that are swapped out."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence as Listed
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import DType
from pagecore.cache.parts import CacheParts, PartsOwner, parts_of
from pagecore.cache.sequences._sequences import Sequence
from pagecore.cache.state._state import Held
from pagecore.cache.swap._swap import check_stored, stored_blocks, stored_content_blocks
from pagecore.cache.swap.memory import SharedHost, own_memory, quantises, shared_memory
from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.index import BlockPool
from pagecore.storage import KVLayout
from pagecore.storage.checks import shown
from pagecore.storage.memory.budgets import Memory

NONE = np.zeros(0, np.int32)
T = TypeVar("T")


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
        of the tier, and evict what it caches if they are short. Exclusive with the other options, but for what the tier
        does not store: `num_states` in a cache with quantised checkpoints, whose running sequences have slots of the
        space's own, and `num_blocks` in one with sealed blocks, for the groups of their newest tokens; by default as in
        the cache.

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
        if host is None:
            taken = own_memory(parts, num_blocks, memory, num_states, num_checkpoints, layout, dtype, scrub)
        else:
            own: dict[str, object] = {"memory": memory, "num_checkpoints": num_checkpoints}
            if not parts.seals_blocks:
                own["num_blocks"] = num_blocks
            if not quantises(parts):
                own["num_states"] = num_states
            _check_host(cache, parts, host, own | {"layout": layout, "dtype": dtype, "scrub": scrub})
            taken = shared_memory(parts, host, num_states, num_blocks)
        self.cache, self._parts, self._host, self._memory = cache, parts, host, taken
        self.block_pools, self.pools, self.kv_pools = taken.block_pools, taken.pools, taken.kv_pools
        self.state_slots, self.state_pool = taken.state_slots, taken.state_pool
        self.checkpoint_slots, self.checkpoint_pool = taken.checkpoint_slots, taken.checkpoint_pool
        self.is_exact = taken.is_exact
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
        available = min([self._host.num_available, *(pool.num_free for pool in self._own_tails)])
        if self.block_pools or self.state_slots is None or self.checkpoint_slots is None:
            return available
        return min(available, self.state_slots.num_free)  # running states have slots of the space's own

    @property
    def _own_tails(self) -> tuple[BlockPool, ...]:
        """Pools of tails of sealed blocks, which a host tier does not have; none without `host`."""
        return () if self._host is None else self.block_pools[len(self._parts.cached_groups) :]

    @property
    def _own_pools(self) -> tuple[BlockPool, ...]:
        """All pools, or with `host` those of tails, and of running states next to quantised checkpoints."""
        if self._host is None:
            return self.pools
        if self.state_slots is None or self.checkpoint_slots is None:
            return self._own_tails
        return (*self._own_tails, self.state_slots)

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
        shared = sum(len(np.unique(blocks[blocks != 0])) for blocks in self._held_blocks())
        return shared + sum(pool.num_used for pool in self._own_tails)

    @property
    def num_sequences(self) -> int:
        """Sequences whose blocks the space holds."""
        return len(self._held())

    @property
    def nbytes(self) -> int:
        """Bytes of all groups and states; 0 for a cache without bytes."""
        return self._memory.nbytes

    def check_invariants(self) -> None:
        """Recount every block from the sequences that hold it; raise `PagecoreError` if the counts differ."""
        with Held(self._parts.state.lock):
            held = self._held()
            for sequence in held:
                check_stored(self._parts.state, sequence, self)
            if self._host is not None:
                self._host.check_invariants()  # counts the blocks of sequences, too
            own = [stored_blocks(sequence) for sequence in held]
            contents = stored_content_blocks(self._parts.state, self)
            num_groups, last, own_pools = len(self._parts.token_groups), len(self.block_pools), self._own_pools
            for group, pool in enumerate(self.pools):
                if pool not in own_pools:
                    continue
                is_content = num_groups <= group < last
                # The slots of states and checkpoints are after the blocks of the sequence's own groups.
                place = group if group < num_groups else group - last + num_groups
                listed, place = (contents, group - num_groups) if is_content else (own, place)
                pool.check_invariants()
                entries = np.concatenate([blocks[place] for blocks in listed] or [NONE])
                counts = np.bincount(entries[entries != 0], minlength=pool.num_blocks)
                if not np.array_equal(counts, pool.ref_counts()):
                    raise PagecoreError(f"group {group} of {self!r}: reference counts do not match the holders")

    def require_open(self) -> None:
        """Raise UnsupportedOption if the space has the memory of a host tier that was closed."""
        if self._host is not None and self._host.is_closed:
            raise UnsupportedOption("the host tier of the swap space is closed; make another tier and another space")

    def shares(self, host: object) -> bool:
        """Return True if the space has the memory of `host`."""
        return self._host is not None and self._host is host

    def make_room(self, needed: Listed[int]) -> None:
        """Evict what a shared host tier caches until `needed` blocks of each pool are free, if it can."""
        if self._host is not None:
            self._host.make_room(self._of_host(needed))

    def _of_host(self, by_pool: Listed[T]) -> list[T]:
        """Return the entries of the pools that a host tier has."""
        own = self._own_pools
        return [entry for entry, pool in zip(by_pool, self.pools, strict=True) if pool not in own]

    def blocks_in(self, host: object) -> list[tuple[NDArray[np.int32], ...]]:
        """Return the blocks that each sequence holds of a host tier, by pool; empty for another tier."""
        held = self._held() if self.shares(host) else []
        return [tuple(self._of_host(stored_blocks(sequence))) for sequence in held]

    def _held_blocks(self) -> list[NDArray[np.int32]]:
        held = self.blocks_in(self._host)
        lanes = len(self.block_pools) - len(self._own_tails)
        return [np.concatenate([blocks[group] for blocks in held] or [NONE]) for group in range(lanes)]

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


def _check_host(cache: PartsOwner, parts: CacheParts, host: SharedHost, own: dict[str, object]) -> None:
    """Refuse a host tier that the space cannot share, or options that it would ignore."""
    given = [name for name, value in own.items() if value is not None]
    if given:
        raise UnsupportedOption(f"host is given, and {given[0]} too; the space has the tier's memory: leave it out")
    if getattr(host, "cache", None) is not cache:
        raise UnsupportedOption(f"host is {shown(host)}; expected a HostTier of this cache")
    if host.is_closed:
        raise UnsupportedOption("the host tier is closed; make another one")
    if parts.cross is not None:
        raise UnsupportedOption(
            "the cache has cross-attention layers, whose blocks a host tier leaves out; give the space num_blocks"
        )
