"""Bytes that move between a cache and its swap spaces, and the room that they need.

Preemption by swapping, as in PagedAttention (Kwon et al. 2023, section 4.5): what is computed already is moved away and
back instead of being computed again. Everything here runs under the lock of the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Listed
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.arrays import Tensor
from pagecore.cache._lifecycle import require_live
from pagecore.cache._sequence import Sequence
from pagecore.cache._stored import hold
from pagecore.cache._swap import num_distinct, stored_blocks, swap_in, swap_out
from pagecore.cache.limits import out_of_blocks, with_evictable
from pagecore.cache.swap import SwapSpace
from pagecore.errors import InvalidSequence, OutOfBlocks, OutOfRows, ShapeError
from pagecore.index import BlockPool
from pagecore.index._integers import int32_array

if TYPE_CHECKING:
    from pagecore.cache.paged import PagedKVCache

# A group, and the planes of one name in each of its layers: sources and targets.
Planes = tuple[int, list[Tensor], list[Tensor]]
SPACE_ADVICE = " of the swap space; swap something in, or make the space larger"
CACHE_ADVICE = "; remove a sequence or swap one out"


def move_out(cache: PagedKVCache, sequences: Any, space: SwapSpace) -> OutOfBlocks | None:
    """Move the computed blocks of sequences into a space; returns why that cannot be, or None when it is done."""
    if not isinstance(space, SwapSpace) or space.cache is not cache:
        raise InvalidSequence(f"expected a swap space of this cache (SwapSpace(cache)), got {space!r}")
    return swap_out(cache._state, sequences, space, partial(_short, SPACE_ADVICE), partial(_moves, cache))


def move_in(cache: PagedKVCache, sequences: Any) -> OutOfBlocks | OutOfRows | None:
    """Move sequences back into blocks and rows of the cache; returns why that cannot be, or None when it is done."""
    return swap_in(cache._state, sequences, partial(_short_of_cache, cache), partial(_moves, cache))


def _short(advice: str, needed: Listed[int], pools: Listed[BlockPool]) -> OutOfBlocks | None:
    """Return the refusal to take blocks of each pool; None where they are free."""
    free = [pool.num_free for pool in pools]
    if all(count <= available for count, available in zip(needed, free, strict=True)):
        return None
    return out_of_blocks(needed, free, "are free", advice)


def _short_of_cache(cache: PagedKVCache, needed: Listed[int], pools: Listed[BlockPool]) -> OutOfBlocks | None:
    """Return the refusal to take blocks of the cache, cached ones that nobody uses counted as free."""
    refusal = _short(CACHE_ADVICE, needed, pools)
    if refusal is None or cache._prefix is None:
        return refusal
    evictable = cache._prefix.evictable()
    if all(count <= pool.num_free + more for count, pool, more in zip(needed, pools, evictable, strict=True)):
        return None
    return with_evictable(refusal, evictable)


# -- bytes -----------------------------------------------------------------------------------------------------------


def _moves(cache: PagedKVCache, space: SwapSpace, is_arrival: bool) -> tuple[int | None, list[Planes]]:
    """Return the stream of the last step, which has computed what moves, and the planes that are copied."""
    stream = None
    if cache._staging is not None:
        stream = cache._staging.stream
        cache._staging.refuse_captured(stream)
    sides = (space.kv_pools, cache._store.pools) if is_arrival else (cache._store.pools, space.kv_pools)
    moved: list[Planes] = []
    # A cache without bytes has no pools of them.
    for group, pools in enumerate(zip(*sides, strict=True)):
        # Plane by plane: only those that are per token have an axis of tokens.
        for plane in pools[0].spec.planes:
            source, target = ([pool.plane(plane.name, i) for i in range(pool.num_layers)] for pool in pools)
            moved.append((group, source, target))
    return stream, moved


# -- room ------------------------------------------------------------------------------------------------------------


def shortage_with_swapped(cache: PagedKVCache, sequences: list[Sequence], counts: ArrayLike) -> int:
    """Return the blocks that a swap_in of those that are out, and then a prepare, lack in the scarcest group."""
    each = int32_array(counts, "count", ShapeError)
    each = np.full(len(sequences), each) if each.ndim == 0 else each
    if len(each) != len(sequences):
        raise ShapeError(f"{len(each)} counts are given for {len(sequences)} sequences; give one for each")
    state = cache._state
    require_live(state, sequences)
    coming = [(one, count) for one, count in zip(sequences, each.tolist(), strict=True) if one.is_swapped]
    staying = [(one, count) for one, count in zip(sequences, each.tolist(), strict=True) if not one.is_swapped]
    needed = _needed(cache, coming)
    # Held for a moment, so that the tables count without them what the rows lack.
    held, counts_held = hold(state.tables.pools, needed)
    missing: tuple[int, ...] = state.tables.shortage([one.row for one, _ in staying], [count for _, count in staying])
    del held
    lacking = [n - taken + lack for n, taken, lack in zip(needed, counts_held, missing, strict=True)]
    if cache._prefix is not None:
        lacking = cache._prefix.lacking(lacking, [one for one, count in staying if count])
    return max(0, *lacking)


def _needed(cache: PagedKVCache, coming: list[tuple[Sequence, int]]) -> list[int]:
    """Return the blocks of each group for sequences that come back together, each to grow by a count."""
    needed = [sum(_growth(cache, sequence, count) for sequence, count in coming)] * cache.num_groups
    by_space: dict[int, list[tuple[Sequence, int]]] = {}
    for sequence, count in coming:
        by_space.setdefault(id(sequence.swap_space), []).append((sequence, count))
    for some in by_space.values():
        held = [stored_blocks(sequence) for sequence, _ in some]
        distinct = num_distinct(cache._state, [sequence for sequence, _ in some])
        for group in range(cache.num_groups):
            needed[group] += distinct[group] + _num_copies(cache, some, [blocks[group] for blocks in held])
    return needed


def _num_copies(cache: PagedKVCache, some: list[tuple[Sequence, int]], held: list[NDArray[np.int32]]) -> int:
    """Return the number of copies on write: the last holder of a block writes into it, every other into a copy."""
    holders = Counter(block for blocks in held for block in blocks.tolist() if block)
    writers = Counter(
        int(blocks[sequence.num_computed_tokens // cache.block_size])
        for (sequence, count), blocks in zip(some, held, strict=True)
        if count and sequence.num_computed_tokens % cache.block_size
    )
    return sum(min(n, holders[block] - 1) for block, n in writers.items() if block)


def _growth(cache: PagedKVCache, sequence: Sequence, count: int) -> int:
    """Return the blocks past those that are stored, for `count` more tokens."""
    length = sequence.num_computed_tokens
    if count < 0:
        raise ShapeError(f"a count is {count}; counts are 0 or more")
    if length + count > cache.max_tokens_per_sequence:
        raise ShapeError(
            f"sequence {sequence.id!r} would have {length + count} tokens; a row holds at most "
            f"{cache.max_tokens_per_sequence}: make the cache with a larger max_tokens_per_sequence or num_blocks"
        )
    return -(-(length + count) // cache.block_size) - -(-length // cache.block_size)
