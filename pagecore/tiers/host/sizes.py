"""Sizes of a host tier: blocks of each group and slots of states for a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence as Listed
from typing import NoReturn, SupportsFloat, SupportsIndex

from pagecore.cache.memory.demand import divide_memory
from pagecore.cache.memory.limits import count_blocks, refuse_blocks
from pagecore.cache.parts import CacheParts
from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.storage import parse_memory
from pagecore.storage.checks import INT32_MAX, as_float, ceil_div, require_pool, shown
from pagecore.storage.memory.budgets import Memory
from pagecore.storage.pools.pool_geometry import LANE_ALIGNMENT, SLOT_ALIGNMENT


def size_tier(
    parts: CacheParts,
    memory: Memory | None,
    num_blocks: int | Listed[int] | None,
    num_states: SupportsIndex | None,
    ratio: SupportsFloat | None,
) -> tuple[list[int], int]:
    """Return the blocks of each group of tokens, and the slots of states (0 without); null entries are counted.

    Raises
    ------
    ShapeError, NotEnoughMemory, UnsupportedOption
        Not exactly one of the sizes, or sizes that do not fit; see `HostTier`.
    """
    sizes = {"memory": memory, "num_blocks": num_blocks, "ratio": ratio}
    given = [name for name, value in sizes.items() if value is not None]
    states = parts.state.states
    if not parts.cached_groups:
        refuse_blocks(num_blocks=num_blocks)
        return [], _slots_alone(parts, memory, num_states, ratio)
    if len(given) != 1:
        _refuse_sizes(given, "memory, num_blocks and ratio")
    if num_states is not None and states is None:
        raise UnsupportedOption("num_states is given, but no layer of the cache keeps a state; leave it out")
    slots = 0 if states is None else states.checkpoints.num_blocks
    if num_states is not None:
        slots = require_pool("num_states", num_states, "slot")
    if ratio is not None:
        return _scaled(parts, ratio, slots, num_states is None)
    groups = parts.cached_groups
    if num_blocks is not None:
        return count_blocks(groups, parts.block_size, num_blocks, None), slots
    assert memory is not None
    budget = parse_memory(memory, "cpu")
    bytes_of = [_aligned(group.bytes_per_block(parts.block_size)) for group in groups]
    each = _aligned(sum(spec.nbytes for spec in parts.checkpoint_specs))
    if slots and num_states is None:
        pools = parts.tables.pools[: len(groups)]
        of_groups = sum(pool.num_blocks * size for pool, size in zip(pools, bytes_of, strict=True))
        slots = max(2, min(budget * slots // (slots * each + of_groups), INT32_MAX))
    # Lanes are aligned, too.
    left = budget - slots * each - LANE_ALIGNMENT * (len(groups) + (slots > 0))
    least = sum(2 * size for size in bytes_of)
    if left < least:
        raise NotEnoughMemory(
            f"memory is {shown(budget)} bytes; {slots} state slots and two blocks of each group take "
            f"{shown(budget - left + least)}, rounded up to pages: give more memory, or num_blocks"
        )
    counted = divide_memory(groups, parts.block_size, left, parts.max_tokens_per_sequence)
    # The division counts payloads; entries are aligned.
    taken = sum(count * size for count, size in zip(counted, bytes_of, strict=True))
    shrunk = [max(2, min(count * left // max(taken, left), INT32_MAX)) for count in counted]
    return shrunk, slots


def _refuse_sizes(given: list[str], sizes: str) -> NoReturn:
    what = f"given are {', '.join(given)}" if given else "no size is given"
    raise ShapeError(f"{what}; give exactly one of {sizes}")


def _slots_alone(
    parts: CacheParts, memory: Memory | None, num_states: SupportsIndex | None, ratio: SupportsFloat | None
) -> int:
    """Return the slots of states for a cache whose layers all keep states."""
    sizes = {"memory": memory, "num_states": num_states, "ratio": ratio}
    given = [name for name, value in sizes.items() if value is not None]
    if len(given) != 1:
        _refuse_sizes(given, "memory, num_states and ratio")
    if num_states is not None:
        return require_pool("num_states", num_states, "slot")
    if ratio is not None:
        assert parts.state.states is not None
        return _scaled(parts, ratio, parts.state.states.checkpoints.num_blocks, True)[1]
    assert memory is not None
    budget = parse_memory(memory, "cpu")
    each = _aligned(sum(spec.nbytes for spec in parts.checkpoint_specs))
    slots = budget // LANE_ALIGNMENT * LANE_ALIGNMENT // each
    if slots < 2:
        raise NotEnoughMemory(
            f"memory is {shown(budget)} bytes; two state slots take "
            f"{shown(ceil_div(2 * each, LANE_ALIGNMENT) * LANE_ALIGNMENT)}, rounded up to pages: give more memory, or "
            "num_states"
        )
    return min(slots, INT32_MAX)


def _scaled(parts: CacheParts, ratio: SupportsFloat, slots: int, scales_states: bool) -> tuple[list[int], int]:
    factor = as_float("ratio", ratio)
    if not (math.isfinite(factor) and factor > 0):
        raise ShapeError(f"ratio is {shown(ratio)}; give the host's bytes over the device's, a number above 0")
    counts = [_times(pool.num_blocks, factor) for pool in parts.tables.pools[: len(parts.cached_groups)]]
    return counts, _times(slots, factor) if slots and scales_states else slots


def _times(count: int, factor: float) -> int:
    most = 1 + (count - 1) * factor
    if most > INT32_MAX:
        raise ShapeError(f"a pool would have {most:.3g} blocks, more than {INT32_MAX}: use a smaller ratio")
    return max(2, int(most))


def _aligned(num_bytes: int) -> int:
    return ceil_div(num_bytes, SLOT_ALIGNMENT) * SLOT_ALIGNMENT
