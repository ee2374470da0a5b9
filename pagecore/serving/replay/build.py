"""Cache, scheduler and tiers of a replay, as its options and its trace need them."""

from __future__ import annotations

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.serving.replay.attend import SPEC
from pagecore.serving.replay.options import DEFAULT_BYTES_PER_TOKEN, UNBOUNDED, ReplayOptions
from pagecore.serving.replay.tiered import ReplayTiers
from pagecore.serving.replay.trace import TraceSummary
from pagecore.serving.scheduling.reuse import cache_options
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import free_memory
from pagecore.storage.checks import INT32_MAX

__all__ = ["build_cache", "build_tiers", "count_blocks"]

# Length of the rows for a trace that cannot be scanned beforehand.
LENGTH_UNSCANNED = 1 << 20
# Blocks of a disk store for such a trace.
DISK_BLOCKS_UNSCANNED = 1 << 14


def count_blocks(name: str, options: ReplayOptions, summary: TraceSummary | None) -> int:
    """Return the number of blocks, the null block counted: as configured, or enough for the whole trace."""
    if not (options.is_unbounded and options.has_blocks):
        return options.num_blocks
    if summary is None:
        raise UnsupportedOption(
            f"blocks is {UNBOUNDED!r}, but trace {name} is the standard input, which cannot be scanned beforehand; "
            "save the trace to a file, or give a number of blocks"
        )
    if summary.num_blocks >= INT32_MAX:
        raise ShapeError(
            f"blocks is {UNBOUNDED!r}, but trace {name} fills {summary.num_blocks} blocks; the largest block id is "
            f"{INT32_MAX}; use a larger block_size or fewer requests"
        )
    return summary.num_blocks + 1


def build_cache(
    options: ReplayOptions, num_blocks: int, summary: TraceSummary | None, num_turns: int = 0
) -> tuple[PagedKVCache, Scheduler]:
    """Return a cache of `num_blocks` blocks and its scheduler; the trace limits number and length of the rows.

    With `num_turns` turns of conversations there are rows for idle runs in addition, up to `max_running` of them.
    """
    if options.attend:
        _check_free_memory(options, num_blocks)
    length = LENGTH_UNSCANNED if summary is None else summary.max_length
    if options.has_blocks:
        length = min(length, (num_blocks - 1) * options.block_size)
    length = min(length, INT32_MAX)
    rows = min(options.max_running, options.max_tokens_per_step)
    if summary is not None:
        rows = min(rows, summary.num_requests)
    all_rows = rows + min(num_turns, rows)
    cache = PagedKVCache(
        SPEC if options.layers is None else options.layers,
        block_size=options.block_size,
        num_blocks=num_blocks if options.is_unbounded and options.has_blocks else options.group_blocks,
        max_sequences=all_rows,
        max_tokens_per_sequence=length,
        device="cpu" if options.attend else "none",
        num_states=_num_states(options, summary, all_rows) if options.states else None,
        num_checkpoints=options.num_checkpoints or None,
        **cache_options(options.evict),
    )
    tokens = min(options.max_tokens_per_step, rows * length)
    space = None
    if options.swap_memory is not None:
        space = SwapSpace(cache, num_blocks=options.num_swap_blocks or None, num_states=options.num_swap_states or None)
    return cache, Scheduler(
        cache,
        max_running=rows,
        max_tokens_per_step=tokens,
        prompt_checkpoints=options.prompt_checkpoints,
        swap_space=space,
        policy=options.policy,
        max_queued=options.max_queued,
    )


def build_tiers(cache: PagedKVCache, options: ReplayOptions, summary: TraceSummary | None) -> ReplayTiers | None:
    """Return the tiers of a replay; None without `host`."""
    if options.host is None:
        return None
    scale = 1.0
    if options.layers is None and not options.attend:
        scale = (options.bytes_per_token or DEFAULT_BYTES_PER_TOKEN) / sum(plane.nbytes for plane in SPEC.planes)
    trace_bytes = 0
    if options.attend:
        _check_free_memory(options, options.host_blocks[0])
        size = options.block_size * sum(plane.nbytes for plane in SPEC.planes)
        trace_bytes = size * (DISK_BLOCKS_UNSCANNED if summary is None else summary.num_blocks)
    return ReplayTiers(
        cache,
        options.host_blocks,
        options.host_states or None,
        *options.places,
        scale=scale,
        bandwidth=options.bytes_per_second,
        trace_bytes=trace_bytes,
        seed=options.seed,
    )


def _num_states(options: ReplayOptions, summary: TraceSummary | None, rows: int) -> int:
    """Return the number of state slots, the null slot counted: as configured, or enough for the whole trace."""
    if options.num_slots or summary is None:
        return options.num_slots
    # A step keeps a checkpoint at most at every point of the grid, and a row needs two slots more.
    grid = options.states[0].prefill_grid(options.block_size)
    return min(1 + 3 * rows + summary.num_computed_tokens // grid, INT32_MAX)


def _check_free_memory(options: ReplayOptions, num_blocks: int) -> None:
    """Raise NotEnoughMemory if the pools of `attend` do not fit in the free memory of this machine."""
    blocks = num_blocks + options.num_swap_blocks
    needed = blocks * options.block_size * sum(plane.nbytes for plane in SPEC.planes)
    free = free_memory()
    if needed > free:
        raise NotEnoughMemory(
            f"attend needs a pool of {needed} bytes ({blocks} blocks of {options.block_size} tokens), but only "
            f"{free} bytes are free here; give less memory or fewer blocks, or turn attend off"
        )
