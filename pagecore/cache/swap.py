"""A second memory for the blocks of sequences that are swapped out."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pagecore.arrays import DType, as_dtype
from pagecore.arrays._make import pinned
from pagecore.cache._lock import Held
from pagecore.cache._sequence import Sequence
from pagecore.cache._swap import check_stored, stored_blocks
from pagecore.cache.layers import Group
from pagecore.cache.limits import count_blocks
from pagecore.errors import PagecoreError, UnsupportedDtype, UnsupportedOption
from pagecore.index import BlockPool
from pagecore.storage import KVLayout, KVPool, Plane
from pagecore.storage.checks import flag
from pagecore.storage.layout import as_layout
from pagecore.storage.memory import Memory
from pagecore.storage.spec import CACHE_DTYPES

if TYPE_CHECKING:
    from pagecore.cache.paged import PagedKVCache

NONE = np.zeros(0, np.int32)


class SwapSpace:
    """Host memory for the computed blocks of sequences that are swapped out of one cache.

    Parameters
    ----------
    cache : PagedKVCache
        The cache that it serves. A cache may have several spaces.
    num_blocks : int or list of int
        Blocks of each group, the null block counted; a list has one entry a group. Exclusive with `memory`.
    memory : int, str or float
        Budget for all groups, as `PagedKVCache` takes it.
    layout : str or KVLayout, optional
        How the blocks lie in memory; as in the cache by default.
    dtype : str or anything that names a dtype, optional
        Store float32, float16 or bfloat16 instead of the cache's own floats. What comes back is then rounded to it;
        by default it comes back bit for bit.
    scrub : bool, optional
        Zero the memory when the space is made; as the cache does by default. Only a cache with `scrub` serves it: what
        moves is whole blocks, so that a block of the space holds what the block of the cache held, and in such a cache
        that is zeros and numbers of the sequence's own namespace. In other caches the slots past the computed tokens
        may hold another namespace's numbers, which then lie in the space, too.

    A cache of ``device="none"`` has spaces without bytes: block ids only. A cache on CUDA has spaces of page-locked
    memory, which its device reads and writes in the order of the stream that the last step was given to; the host waits
    for nothing. A space is used under the lock of its cache.

    Raises
    ------
    ShapeError, NotEnoughMemory
        Sizes that do not fit.
    UnsupportedOption, UnsupportedDtype
        What is no cache; a dtype that is no float, or for planes that hold none.

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
        cache: PagedKVCache,
        *,
        num_blocks: int | Listed[int] | None = None,
        memory: Memory | None = None,
        layout: str | KVLayout | None = None,
        dtype: DType | str | None = None,
        scrub: bool | None = None,
    ) -> None:
        # By what it needs: PagedKVCache is made with this module, which cannot import it.
        if not hasattr(cache, "_swap_spaces"):
            raise UnsupportedOption(f"cache is {cache!r}; a swap space serves a PagedKVCache")
        is_scrubbed = cache.scrub if scrub is None else flag("scrub", scrub)
        if is_scrubbed and not cache.scrub:
            raise UnsupportedOption(
                "scrub is True, but the cache has scrub=False: its blocks may hold another namespace's numbers, and "
                "they move as a whole; make the cache with scrub=True"
            )
        groups = [_converted(group, dtype) for group in cache._groups]
        blocks = count_blocks(groups, cache.block_size, num_blocks, memory)
        order = None if layout is None else as_layout(layout)
        self.cache = cache
        # Whether what comes back is what went.
        self.is_exact = all(
            one.spec.planes == other.spec.planes for one, other in zip(groups, cache._groups, strict=True)
        )
        self.block_pools = tuple(BlockPool(n, order="address") for n in blocks)
        # Zipped with the cache's pools: there are none where the cache has no bytes.
        self.kv_pools = [
            host_pool(cache, group, n, order or pool.layout, is_scrubbed)
            for group, n, pool in zip(groups, blocks, cache._store.pools, strict=False)
        ]
        self._last_use = None if cache._staging is None else cache._staging.runtime.make_event(cache._staging.device)
        cache._swap_spaces.add(self)

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group, the null block counted."""
        return tuple(pool.num_blocks for pool in self.block_pools)

    @property
    def num_available(self) -> int:
        """Blocks that can be had in the scarcest group."""
        return min(pool.num_free for pool in self.block_pools)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that hold something, summed over the groups."""
        return sum(pool.num_used for pool in self.block_pools)

    @property
    def num_sequences(self) -> int:
        """Sequences that are swapped out to here."""
        return len(self._held())

    @property
    def nbytes(self) -> int:
        """Bytes of all groups; 0 where the cache holds none."""
        return sum(pool.nbytes for pool in self.kv_pools)

    def check_invariants(self) -> None:
        """Recount every block from the sequences that hold it; raises `PagecoreError` where the counts differ."""
        with Held(self.cache._state.lock):
            held = self._held()
            for sequence in held:
                check_stored(self.cache._state, sequence, self)
            for group, pool in enumerate(self.block_pools):
                pool.check_invariants()
                entries = np.concatenate([stored_blocks(sequence)[group] for sequence in held] or [NONE])
                counts = np.bincount(entries[entries != 0], minlength=pool.num_blocks)
                if not np.array_equal(counts, pool.ref_counts()):
                    raise PagecoreError(f"group {group} of {self!r}: reference counts do not match the holders")

    def _held(self) -> list[Sequence]:
        return [sequence for sequence in self.cache._state.listed() if sequence.swap_space is self]

    def note_use(self) -> None:
        """Note that blocks of the space are being copied, in the order of the stream of the cache."""
        if self._last_use is not None:
            assert self.cache._staging is not None
            self._last_use.record(self.cache._staging.stream)

    def __del__(self) -> None:
        # What is on its way must arrive before its memory is another's.
        last_use = getattr(self, "_last_use", None)
        if last_use is None or sys.is_finalizing():
            return
        try:
            last_use.synchronize()
        except Exception as error:  # a destructor warns and never raises
            told = f"blocks of a swap space are given back while a device may still copy them: {error}"
            warnings.warn(told, ResourceWarning, stacklevel=1)

    def __repr__(self) -> str:
        blocks = sum(self.num_blocks) - len(self.block_pools)
        return f"SwapSpace({self.num_sequences} sequences, {self.num_used_blocks} of {blocks} blocks used)"


def host_pool(cache: PagedKVCache, group: Group, num_blocks: int, layout: KVLayout, scrub: bool) -> KVPool:
    """Blocks in host memory that the ops which move blocks of the cache reach."""
    buffers = None
    if cache._staging is not None:
        bound = layout.bind(group.spec.planes, group.num_layers, num_blocks, cache.block_size)
        sizes = [bound.buffer_nbytes(i) for i in range(bound.num_buffers)]
        buffers = [pinned(size, cache.device, zeroed=scrub) for size in sizes]
    device = "cpu" if buffers is None else cache.device
    is_new = scrub and buffers is None
    return KVPool(group.spec, group.num_layers, num_blocks, cache.block_size, layout, device, buffers, scrub=is_new)


@dataclass(frozen=True)
class _Planes:
    """A spec that says what is stored, and nothing of how it is attended to."""

    planes: tuple[Plane, ...]
    window: int | None = None


def _converted(group: Group, dtype: DType | str | None) -> Group:
    """The group with its floats stored as `dtype`."""
    if dtype is None:
        return group
    target = as_dtype(dtype)
    for name, one in [("dtype", target), *((f"plane {plane.name!r}", plane.dtype) for plane in group.spec.planes)]:
        if str(one) not in CACHE_DTYPES:
            raise UnsupportedDtype(
                f"{name} is {one}; a swap space converts between {', '.join(CACHE_DTYPES)}: leave dtype out"
            )
    return Group(_Planes(tuple(replace(plane, dtype=target) for plane in group.spec.planes)), group.num_layers)
