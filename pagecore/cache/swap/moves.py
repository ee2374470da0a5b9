"""Moves between a cache and its swap spaces: swap_out and swap_in.

Preemption by swapping, as in PagedAttention (Kwon et al. 2023, section 4.5): keys and values are moved to host memory
and back instead of being computed again. Everything here runs under the lock of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from functools import partial
from typing import Any

from pagecore.arrays import Tensor
from pagecore.cache.memory.limits import out_of_blocks, with_evictable
from pagecore.cache.parts import CacheParts
from pagecore.cache.prefix._prefix import evictable, unused_states
from pagecore.cache.swap._swap import swap_in, swap_out
from pagecore.cache.swap.space import SwapSpace
from pagecore.errors import InvalidSequence, OutOfBlocks, OutOfRows
from pagecore.index import BlockPool
from pagecore.storage import StatePool
from pagecore.storage.checks import shown

# A group, and the planes of one name in each of its layers: sources and targets. States follow the groups of tokens.
Planes = tuple[int, list[Tensor], list[Tensor]]
# A stream, and the planes to copy on it.
Moves = tuple[int | None, list[Planes]]
SPACE_ADVICE = " of the swap space; swap a sequence in, or make the space larger"
# Pools after those of the blocks.
SLOTS = ("state slots", "slots of quantised checkpoints")
CACHE_ADVICE = "; remove a sequence or swap one out"


def move_out(parts: CacheParts, sequences: Any, space: SwapSpace) -> OutOfBlocks | None:
    """Move the computed blocks of sequences into a space; return None, or the error if the space lacks blocks."""
    if not isinstance(space, SwapSpace) or not space.serves(parts):
        raise InvalidSequence(f"expected a swap space of this cache (SwapSpace(cache)), got {shown(space)}")
    space.require_open()
    return swap_out(parts.state, sequences, space, partial(_short_of_space, parts, space), partial(_moves, parts))


def move_in(parts: CacheParts, sequences: Any) -> OutOfBlocks | OutOfRows | None:
    """Move sequences back into rows and blocks of the cache; return None, or the error if rows or blocks are short."""
    if parts.saver is not None:
        parts.saver.require_memory()
    return swap_in(parts.state, sequences, partial(_short_of_cache, parts), partial(_moves, parts))


def _short(parts: CacheParts, advice: str, needed: Listed[int], pools: Listed[BlockPool]) -> OutOfBlocks | None:
    """Return the error if a pool has fewer free blocks than needed."""
    free = [pool.num_free for pool in pools]
    return _refusal(parts, needed, free, advice)


def _refusal(parts: CacheParts, needed: Listed[int], free: Listed[int], advice: str) -> OutOfBlocks | None:
    """Return the error for blocks of each group, state slots and checkpoints of which fewer are free."""
    count = parts.num_groups
    if any(wanted > left for wanted, left in zip(needed[:count], free[:count], strict=True)):
        return out_of_blocks(needed[:count], free[:count], "free", advice)
    for name, wanted, left in zip(SLOTS, needed[count:], free[count:], strict=False):
        if wanted > left:
            return OutOfBlocks(f"{wanted} {name} are needed and {left} are free{advice}", wanted, left)
    return None


def _short_of_space(
    parts: CacheParts, space: SwapSpace, needed: Listed[int], pools: Listed[BlockPool]
) -> OutOfBlocks | None:
    """Return the error if the space has too few blocks, also after a shared host tier has evicted what it can."""
    if any(count > pool.num_free for count, pool in zip(needed, pools, strict=True)):
        space.make_room(needed)
    return _short(parts, SPACE_ADVICE, needed, pools)


def _short_of_cache(parts: CacheParts, needed: Listed[int], pools: Listed[BlockPool]) -> OutOfBlocks | None:
    """Return the error if a pool of the cache has fewer free and evictable blocks than needed."""
    refusal = _short(parts, CACHE_ADVICE, needed, pools)
    if refusal is None or parts.prefix is None:
        return refusal
    count, cached = parts.num_groups, [*evictable(parts.prefix)]
    cached += [0] * (count - len(cached))  # nothing evicts encoder outputs
    running = [0] if parts.state.states is not None and parts.state.states.num_checkpoints else []
    more = [*cached, *running, unused_states(parts.prefix)][: len(pools)]
    available = [pool.num_free + evicted for pool, evicted in zip(pools, more, strict=True)]
    if any(wanted > left for wanted, left in zip(needed[:count], available[:count], strict=True)):
        free = [pool.num_free for pool in pools[:count]]
        return with_evictable(out_of_blocks(needed[:count], free, "free", CACHE_ADVICE), cached)
    return _refusal(parts, needed, available, CACHE_ADVICE)


def _moves(parts: CacheParts, space: SwapSpace, is_arrival: bool) -> tuple[Moves, Moves]:
    """Return the stream of the last step, which computed the moved blocks, and the planes to copy between.

    The first entry moves the tokens of sequences. The second moves encoder outputs; its groups count from 0.
    """
    stream = None
    if parts.staging is not None:
        stream = parts.staging.stream
        parts.staging.refuse_captured(stream)
        parts.store.await_arrivals()
    sides = (space.kv_pools, parts.store.pools) if is_arrival else (parts.store.pools, space.kv_pools)
    num_groups = len(parts.token_groups)
    moved: list[Planes] = []
    moved_outputs: list[Planes] = []
    # A cache without bytes has no pools, so that nothing is copied.
    for group, pools in enumerate(zip(*sides, strict=True)):
        # Plane by plane: only planes per token have a token axis.
        for plane in pools[0].spec.planes:
            source, target = ([pool.plane(plane.name, i) for i in range(pool.num_layers)] for pool in pools)
            if group < num_groups:
                moved.append((group, source, target))
            else:
                moved_outputs.append((group - num_groups, source, target))
    if parts.store.states is not None and space.state_pool is not None:
        both = (space.state_pool, parts.store.states) if is_arrival else (parts.store.states, space.state_pool)
        moved += [(num_groups, *planes) for planes in _alike(*both)]
    if parts.store.quantiser is not None and space.checkpoint_pool is not None:
        own = parts.store.quantiser.pool
        both = (space.checkpoint_pool, own) if is_arrival else (own, space.checkpoint_pool)
        moved += [(num_groups + 1, *planes) for planes in _alike(*both)]
    return (stream, moved), (stream, moved_outputs)


def _alike(source: StatePool, target: StatePool) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return the planes of two pools of states; each call of `transfer_blocks` takes planes of equal second axes."""
    alike: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
    for one, other in zip(source.planes(), target.planes(), strict=True):
        sources, targets = alike.setdefault(one.shape[1], ([], []))
        sources.append(one)
        targets.append(other)
    return list(alike.values())
