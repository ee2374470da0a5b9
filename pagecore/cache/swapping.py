"""Sequences leave the cache's blocks for a swap space, and come back bit for bit.

Preemption by swapping, as in PagedAttention (Kwon et al. 2023, section 4.5): what is computed already is moved away and
back instead of being computed again. Everything here runs under the lock of the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache._sequence import Sequence, move, require_swapped, rows_of
from pagecore.cache.limits import out_of_blocks
from pagecore.cache.swap import NONE, Blocks, SwapSpace, entries_of, give_back
from pagecore.errors import InvalidSequence, OutOfBlocks, OutOfRows, ShapeError
from pagecore.index import BlockPool
from pagecore.index._integers import int32_array
from pagecore.ops import transfer_blocks
from pagecore.storage import KVPool

if TYPE_CHECKING:
    from pagecore.cache.paged import PagedKVCache

Ids = NDArray[np.int32]


def as_list(sequences: Any) -> list[Sequence]:
    """One sequence, or several, as a list."""
    if isinstance(sequences, Sequence):
        return [sequences]
    try:
        return list(sequences)
    except TypeError:
        raise InvalidSequence(f"sequences is {sequences!r}; give what add_sequence returned, in a list") from None


def move_out(cache: PagedKVCache, sequences: list[Sequence], space: SwapSpace) -> OutOfBlocks | None:
    """Move the computed blocks of sequences into a space; returns why that cannot be, or None when it is done."""
    if not isinstance(space, SwapSpace) or space.cache is not cache:
        raise InvalidSequence(f"{space!r} is no swap space of this cache; make it with SwapSpace(cache)")
    rows, stream = rows_of(cache, sequences), _stream_of(cache)
    held = [_computed_blocks(cache, sequence) for sequence in sequences]
    distinct = _distinct(held, cache.num_groups)
    refusal = _short(distinct, space._block_pools, " of the swap space; swap something in, or make the space larger")
    if refusal is not None:
        return refusal
    cache._publish(sequences)
    stored = _copied(held, distinct, cache._store.pools, space._block_pools, space._kv_pools, stream)
    space._used()
    try:
        cache._tables.remove(rows)
    except BaseException:
        give_back(space._block_pools, stored)
        raise
    for sequence, blocks in zip(sequences, stored, strict=True):
        space._held[sequence] = blocks
        move(sequence, -1, space)
        if cache._prefix is not None:
            cache._prefix.leave(sequence)
    return None


def move_in(cache: PagedKVCache, sequences: list[Sequence]) -> OutOfBlocks | OutOfRows | None:
    """Move sequences back into blocks and rows of the cache; returns why that cannot be, or None when it is done."""
    require_swapped(cache, sequences)
    tables, pools, stream = cache._tables, cache._block_pools, _stream_of(cache)
    parts = [(space, some, _distinct(held, len(pools)), held) for space, some, held in _by_space(sequences)]
    needed = [np.concatenate([ids[group] for _, _, ids, _ in parts] or [NONE]) for group in range(len(pools))]
    refusal = _rowless(cache, len(sequences)) or _make_room(cache, needed)
    if refusal is not None:
        return refusal
    arrived: list[Blocks] = []
    rows: list[int] = []
    try:
        for space, _, distinct, held in parts:
            arrived += _copied(held, distinct, space._kv_pools, pools, cache._store.pools, stream)
            space._used()
        rows += (tables.add(prefix=blocks) for blocks in arrived)
        moved = [sequence for _, some, _, _ in parts for sequence in some]
        rounded = [sequence for space, some, _, _ in parts if not space.is_exact for sequence in some]
        tables.truncate(rows, [sequence.num_computed_tokens for sequence in moved])
    except BaseException:
        tables.remove(rows)
        raise
    finally:
        # The rows hold the blocks now, or nobody does.
        give_back(pools, arrived)
    for sequence, row in zip(moved, rows, strict=True):
        _space_of(sequence)._drop(sequence)
        move(sequence, row, None)
    if cache._prefix is not None:
        cache._prefix.come_back(moved, rounded)
    return None


def shortage_with_swapped(cache: PagedKVCache, sequences: list[Sequence], counts: ArrayLike) -> int:
    """Blocks that swapping in those that are out, all at once, and then a prepare would lack in the scarcest group."""
    each = int32_array(counts, "count", ShapeError)
    each = np.full(len(sequences), each) if each.ndim == 0 else each
    if len(each) != len(sequences):
        raise ShapeError(f"{len(each)} counts are given for {len(sequences)} sequences; give one for each")
    is_out = np.array([isinstance(one, Sequence) and one.is_swapped for one in sequences], bool)
    rows = rows_of(cache, [one for one, out in zip(sequences, is_out, strict=True) if not out])
    coming = [(one, count) for one, count, out in zip(sequences, each.tolist(), is_out, strict=True) if out]
    needed = _needed(cache, coming)
    pools = cache._block_pools
    # Held for a moment, so that the tables count without them what the rows lack.
    held = [pool.allocate(min(count, pool.num_free)) for pool, count in zip(pools, needed, strict=True)]
    try:
        missing: tuple[int, ...] = cache._tables.shortage(rows, each[~is_out])
    finally:
        for pool, blocks in zip(pools, held, strict=True):
            pool.free(blocks[::-1])
    lacking = [count - len(blocks) + lack for count, blocks, lack in zip(needed, held, missing, strict=True)]
    if cache._prefix is not None:
        lacking = cache._prefix.eviction.lacking(lacking, sequences, each)
    return max(0, *lacking)


# -- blocks on their way ---------------------------------------------------------------------------------------------


def _computed_blocks(cache: PagedKVCache, sequence: Sequence) -> Blocks:
    """The blocks with computed tokens; room that a sequence has beyond them stays behind."""
    count = -(-sequence.num_computed_tokens // cache.block_size)
    return tuple(cache._tables.blocks(sequence.row, group)[:count] for group in range(cache.num_groups))


def _distinct(held: list[Blocks], num_groups: int) -> list[Ids]:
    """The blocks of each group, ascending and each once: what several sequences share is moved once."""
    return [np.unique(entries_of(held, group)) for group in range(num_groups)]


def _short(needed: list[Ids], pools: list[BlockPool], where: str) -> OutOfBlocks | None:
    """The refusal to take as many blocks of each pool; None where they are free."""
    counts, free = tuple(map(len, needed)), tuple(pool.num_free for pool in pools)
    if all(count <= available for count, available in zip(counts, free, strict=True)):
        return None
    return out_of_blocks(counts, free, "are free", where)


def _make_room(cache: PagedKVCache, needed: list[Ids]) -> OutOfBlocks | None:
    """Have as many blocks of each pool free, by eviction where need be; returns why that cannot be."""
    refusal = _short(needed, cache._block_pools, "; remove a sequence or swap one out")
    if refusal is None or cache._prefix is None:
        return refusal
    missing = [max(0, len(ids) - pool.num_free) for ids, pool in zip(needed, cache._block_pools, strict=True)]
    return None if cache._prefix.eviction.make_room(missing) else cache._prefix.eviction.with_evictable(refusal)


def _rowless(cache: PagedKVCache, count: int) -> OutOfRows | None:
    """The refusal to take as many rows; None where they are free."""
    free = cache.max_sequences - cache._tables.num_rows
    if count <= free:
        return None
    return OutOfRows(
        f"{count} rows are needed and {free} of {cache.max_sequences} are free; remove a sequence or swap one out, or "
        "raise max_sequences"
    )


def _copied(
    held: list[Blocks],
    distinct: list[Ids],
    sources: list[KVPool],
    pools: list[BlockPool],
    targets: list[KVPool],
    stream: int | None,
) -> list[Blocks]:
    """The same sequences in new blocks of `pools`, bytes and all; every entry holds a reference."""
    taken: list[Ids] = []
    try:
        for pool, ids in zip(pools, distinct, strict=True):
            taken.append(pool.allocate(len(ids)))
        # A cache without bytes has no pools of them.
        for source, target, old, new in zip(sources, targets, distinct, taken, strict=False):
            _transfer(source, target, np.stack([old, new], axis=1), stream)
        arrived = [tuple(map(_renamed, blocks, distinct, taken)) for blocks in held]
        for group, pool in enumerate(pools):
            pool.share(entries_of(arrived, group))
    finally:
        # The entries hold the blocks now, or nobody does.
        for pool, new in zip(pools, taken, strict=False):
            pool.free(new[::-1])
    return arrived


def _stream_of(cache: PagedKVCache) -> int | None:
    """On CUDA that of the last step, which has computed what moves; DeviceError where it is being captured."""
    if cache._staging is None:
        return None
    cache._staging.refuse_captured(cache._staging.stream)
    return cache._staging.stream


def _transfer(source: KVPool, target: KVPool, pairs: Ids, stream: int | None) -> None:
    """Block pairs[i, 0] of the source to block pairs[i, 1] of the target, in every layer and plane."""
    # Plane by plane: only those that are per token have an axis of tokens.
    for plane in source.spec.planes:
        sources, targets = ([pool.plane(plane.name, i) for i in range(pool.num_layers)] for pool in (source, target))
        transfer_blocks(sources, targets, pairs, stream=stream)


def _renamed(blocks: Ids, old: Ids, new: Ids) -> Ids:
    """Blocks of a sequence by their new names; holes stay holes."""
    renamed = np.zeros_like(blocks)
    is_block = blocks != 0
    renamed[is_block] = new[np.searchsorted(old, blocks[is_block])]
    return renamed


def _space_of(sequence: Sequence) -> SwapSpace:
    assert sequence.swap_space is not None
    return sequence.swap_space


def _by_space(sequences: Iterable[Sequence]) -> list[tuple[SwapSpace, list[Sequence], list[Blocks]]]:
    """Each space, which of the sequences it holds, and their blocks there."""
    grouped: dict[SwapSpace, list[Sequence]] = {}
    for sequence in sequences:
        grouped.setdefault(_space_of(sequence), []).append(sequence)
    return [(space, some, [space._held[sequence] for sequence in some]) for space, some in grouped.items()]


# -- what coming back takes ------------------------------------------------------------------------------------------


def _needed(cache: PagedKVCache, coming: list[tuple[Sequence, int]]) -> list[int]:
    """Blocks of each group for sequences that come back together, each to grow by a count."""
    require_swapped(cache, [sequence for sequence, _ in coming])
    needed = [sum(_growth(cache, sequence, count) for sequence, count in coming)] * cache.num_groups
    counts = dict(coming)
    for _, some, held in _by_space(counts):
        for group in range(cache.num_groups):
            entries = entries_of(held, group)
            if len(some) == 1:
                needed[group] += len(entries)
                continue
            writers = Counter(
                int(blocks[group][sequence.num_computed_tokens // cache.block_size])
                for sequence, blocks in zip(some, held, strict=True)
                if counts[sequence] and sequence.num_computed_tokens % cache.block_size
            )
            # The last holder of a block writes into it, every other into a copy.
            copies = sum(min(n, int((entries == block).sum()) - 1) for block, n in writers.items())
            needed[group] += len(np.unique(entries)) + copies
    return needed


def _growth(cache: PagedKVCache, sequence: Sequence, count: int) -> int:
    """Blocks past those that are stored, for `count` more tokens."""
    length = sequence.num_computed_tokens
    if count < 0:
        raise ShapeError(f"a count is {count}; counts are 0 or more")
    if length + count > cache.max_tokens_per_sequence:
        raise ShapeError(
            f"sequence {sequence.id!r} would have {length + count} tokens; a row holds at most "
            f"{cache.max_tokens_per_sequence}: make the cache with a larger max_tokens_per_sequence or num_blocks"
        )
    return -(-(length + count) // cache.block_size) - -(-length // cache.block_size)
