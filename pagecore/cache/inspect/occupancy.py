"""Occupancy of a cache: the blocks that its sequences use, read from its block tables."""

from __future__ import annotations

from pagecore.cache.inspect._block_map import count_sequences
from pagecore.cache.inspect.stats import CacheStats
from pagecore.cache.parts import CacheParts
from pagecore.cache.prefix._prefix import evictable, prefix_figures
from pagecore.index import StateTable


def measure(parts: CacheParts) -> CacheStats:
    """Return the statistics of a cache, under its lock."""
    state, tables, block_size = parts.state, parts.tables, parts.block_size
    pools = parts.block_pools
    num_resident, num_tokens, num_swapped, num_swapped_tokens, wasted = count_sequences(
        state.listed(), tables, tables.pools, block_size
    )
    num_evictable = 0 if parts.prefix is None else sum(evictable(parts.prefix))
    used = sum(pool.num_used for pool in pools) - num_evictable
    held = used * block_size
    wasted += wasted_by_contents(parts)
    return CacheStats(
        num_sequences=num_resident + num_swapped,
        num_tokens=num_tokens,
        num_blocks=sum(pool.num_blocks - 1 for pool in pools),
        num_free_blocks=sum(pool.num_free for pool in pools),
        num_used_blocks=used,
        num_evictable_blocks=num_evictable,
        fragmentation=wasted / held if held else 0.0,
        num_copied_blocks=state.num_copied_blocks,
        num_scrubbed_blocks=state.num_scrubbed_blocks,
        nbytes=parts.store.nbytes,
        num_swapped_sequences=num_swapped,
        num_swapped_tokens=num_swapped_tokens,
        num_swapped_blocks=sum(space.num_used_blocks for space in parts.swap_spaces),
        num_states=0 if state.states is None else state.states.num_slots - 1,
        num_free_states=0 if state.states is None else state.states.slots.num_free,
        **_checkpoints(state.states),
        **({} if parts.prefix is None else prefix_figures(parts.prefix)),
    )


def _checkpoints(states: StateTable | None) -> dict[str, int]:
    """Return the fields of `CacheStats` that count slots of quantised checkpoints."""
    if states is None or not states.num_checkpoints:
        return {}
    return {"num_checkpoints": states.num_checkpoints - 1, "num_free_checkpoints": states.checkpoints.num_free}


def wasted_by_contents(parts: CacheParts) -> int:
    """Return the slots of blocks of encoder outputs that hold no token, over all cross-attention groups."""
    if parts.cross is None:
        return 0
    lengths = parts.cross.contents.tables.row_lengths
    slots = -(-lengths // parts.block_size) * parts.block_size
    return int((slots - lengths).sum()) * parts.cross.contents.tables.num_groups
