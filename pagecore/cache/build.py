"""Construction of a paged cache: check the arguments, size the pools, and assemble the parts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed
from functools import partial
from typing import SupportsFloat, SupportsIndex

from pagecore.arrays import Tensor, as_tensor
from pagecore.cache import lifecycle
from pagecore.cache.layers.dispatch import layer_ops
from pagecore.cache.layers.groups import Group, Layer, Layers, arrange
from pagecore.cache.layers.operations import LayerOps, StoredOps
from pagecore.cache.memory.adopted import buffers_of, check_source, count_adopted
from pagecore.cache.memory.limits import (
    cache_device,
    check_slots,
    count_blocks,
    refuse_blocks,
    refuse_unserved,
    row_capacity,
    scrub_option,
    slot_dtype,
)
from pagecore.cache.memory.saver import checked_saver
from pagecore.cache.memory.sealer import Sealer, sealed_groups
from pagecore.cache.memory.states import size_states, state_layers
from pagecore.cache.memory.store import Store
from pagecore.cache.parts import CacheParts, CrossParts
from pagecore.cache.sequences._sequences import CrossContents
from pagecore.cache.staging.tables import Staging
from pagecore.cache.state._state import CacheState, Seals
from pagecore.index import BlockPool, BlockTables
from pagecore.storage import KVLayout, TensorParallel
from pagecore.storage.checks import INT32_MAX, ceil_div, flag, require_int
from pagecore.storage.memory.budgets import Memory
from pagecore.storage.pools.allocation import Allocator
from pagecore.storage.specs.parallel import as_parallel
from pagecore.storage.specs.spec import check_block_size, chosen_block_size


def build_parts(
    layers: Layers,
    *,
    num_layers: int | None,
    block_size: int | None,
    num_blocks: int | Listed[int] | None,
    memory: Memory | None,
    max_sequences: int,
    max_tokens_per_sequence: int | None,
    device: str,
    layout: str | KVLayout | None,
    parallel: TensorParallel | None,
    prefix_cache: bool,
    eviction_policy: str,
    index_dtype: str,
    clock: Callable[[], float],
    buffers: object,
    scrub: bool,
    recompute_last_block: bool = False,
    num_states: SupportsIndex | None = None,
    state_ratio: SupportsFloat | None = None,
    num_checkpoints: SupportsIndex | None = None,
    allocator: Allocator | None = None,
    memory_saver: bool = False,
) -> CacheParts:
    """Return the parts of a cache; see `PagedKVCache` for the arguments and errors."""
    refuse_unserved(prefix_cache, eviction_policy)
    recompute_last = flag("recompute_last_block", recompute_last_block)
    ranks = as_parallel(parallel)
    block_size = None if block_size is None else require_int("block_size", block_size)
    max_sequences = require_int("max_sequences", max_sequences, max=None)
    longest = max_tokens_per_sequence
    if longest is not None:
        longest = require_int("max_tokens_per_sequence", longest, max=None)
    device = cache_device(device)
    scrub = scrub_option(scrub, device)
    slots = slot_dtype(index_dtype)
    placed, groups = arrange(layers, num_layers, ranks, attends=device != "none")
    block_size = chosen_block_size((group.spec for group in groups), block_size)
    keeping = state_layers(placed)
    _check_sealed(groups, block_size)
    state_slots, memory = size_states(
        keeping, num_states, state_ratio, memory, max_sequences, device, num_checkpoints, has_blocks=bool(groups)
    )
    check_source(allocator, buffers, device)
    saver = checked_saver(memory_saver, allocator, buffers, device)
    source = allocator if saver is None else saver.allocate
    given, blocks = _sized(groups, block_size, num_blocks, memory, device, longest, layout, buffers)
    check_slots(blocks, block_size, slots)
    max_tokens = row_capacity(groups, blocks, block_size, longest)
    own = [group for group in groups if not group.is_cross]  # groups of cross attention come last
    tables = _make_tables(blocks[: len(own)], block_size, max_sequences, max_tokens)
    staging = Staging(tables, device) if device.startswith("cuda") else None
    specs = () if keeping is None else keeping.specs
    store = Store(groups, blocks, block_size, layout, device, given, scrub, specs, state_slots, source)
    ops = _ops_of(placed, device)
    cross = _cross_parts(groups, blocks, block_size, max_sequences, device)
    cached = str(eviction_policy) if prefix_cache else None
    states = None if keeping is None else keeping.table(tables, state_slots, _residual_of(groups))
    attended = [group.attended for group in own]
    seals = _seals_of(placed, groups, tables, store, staging)
    state = CacheState(tables, attended, cached, clock, lifecycle.remove, scrub, recompute_last, states, seals)
    if cross is not None:
        state.serve_cross(cross.contents)
    parts = CacheParts(
        state=state,
        store=store,
        staging=staging,
        layers=placed,
        ops=ops,
        groups=groups,
        group_ops=[_first_of(group, number, placed, ops) for number, group in enumerate(groups)],
        block_tables=_tables_on_device(tables, staging) + _cross_tables(cross),
        device=device,
        index_dtype=slots,
        eviction_policy=str(eviction_policy),
        block_size=block_size,
        max_tokens_per_sequence=max_tokens,
        num_slots=(min(blocks[: len(own)]) - 1) * block_size if groups else INT32_MAX,
        scrub=scrub,
        recompute_last_block=recompute_last,
        parallel=ranks,
        cross=cross,
        saver=saver,
    )
    if scrub:
        store.zero_adopted()  # last: if the cache cannot be made, the caller's memory is unchanged
    return parts


def _sized(
    groups: list[Group],
    block_size: int,
    num_blocks: int | Listed[int] | None,
    memory: Memory | None,
    device: str,
    longest: int | None,
    layout: str | KVLayout | None,
    buffers: object,
) -> tuple[list[list[Tensor]] | None, list[int]]:
    """Return the caller's buffers of each group, or None, and the number of blocks of each group."""
    if not groups:
        refuse_blocks(buffers=buffers, layout=layout)
    given = buffers_of(buffers, groups, block_size, layout, memory, device)
    if given is not None and num_blocks is None:
        return given, count_adopted(given, groups, block_size, layout)
    return given, count_blocks(groups, block_size, num_blocks, memory, device, longest)


def _make_tables(blocks: Listed[int], block_size: int, max_sequences: int, max_tokens: int) -> BlockTables:
    """Return the block tables of groups with the given numbers of blocks; they count rows without a group, too."""
    return BlockTables(
        [BlockPool(n) for n in blocks],
        block_sizes=[block_size] * max(1, len(blocks)),
        max_sequences=max_sequences,
        max_blocks_per_sequence=ceil_div(max_tokens, block_size),
    )


def _cross_parts(
    groups: Listed[Group], blocks: Listed[int], block_size: int, max_sequences: int, device: str
) -> CrossParts | None:
    """Return the parts of cross attention; None if no group has it."""
    first = sum(not group.is_cross for group in groups)
    if first == len(groups):
        return None
    limits = [group.max_cross_tokens or INT32_MAX for group in groups[first:]]
    most = min(*limits, *((count - 1) * block_size for count in blocks[first:]), INT32_MAX)
    tables = _make_tables(blocks[first:], block_size, max_sequences, most)
    staging = Staging(tables, device) if device.startswith("cuda") else None
    return CrossParts(CrossContents(tables, most), staging, first)


def _tables_on_device(tables: BlockTables, staging: Staging | None) -> list[Tensor]:
    if staging is not None:
        return staging.block_tables
    return [as_tensor(tables.table(group)) for group in range(tables.num_groups)]


def _cross_tables(cross: CrossParts | None) -> list[Tensor]:
    return [] if cross is None else _tables_on_device(cross.contents.tables, cross.staging)


def _ops_of(layers: list[Layer], device: str) -> list[LayerOps]:
    """Return the operations of each layer; layers with the same spec object share them."""
    made: dict[int, LayerOps] = {}
    for layer in layers:
        if id(layer.spec) not in made:
            made[id(layer.spec)] = layer_ops(layer.spec, device)
    return [made[id(layer.spec)] for layer in layers]


def _first_of(group: Group, number: int, layers: list[Layer], ops: list[LayerOps]) -> LayerOps:
    """Return the operations of a group's first layer; those of a group of sealed blocks only store."""
    found = (one for layer, one in zip(layers, ops, strict=True) if layer.group == number)
    return next(found, None) or StoredOps(group.spec)


def _check_sealed(groups: list[Group], block_size: int) -> None:
    """Raise an error for sealed blocks of another size."""
    if any(group.is_tail for group in groups):
        for group in groups:
            check_block_size(group.spec, block_size)


def _seals_of(
    layers: list[Layer], groups: list[Group], tables: BlockTables, store: Store, staging: Staging | None
) -> Seals | None:
    """Return the groups of sealed blocks; None without any."""
    pairs = list(sealed_groups(layers).items())
    if not pairs:
        return None
    stream, is_captured = partial(_stream_of, staging), partial(_is_captured, staging)
    sealer = Sealer(store, groups, pairs, stream, is_captured) if store.pools else None
    return Seals(tables, pairs, _residual_of(groups), sealer)


def _residual_of(groups: list[Group]) -> int:
    """Return the newest tokens that commits leave unsealed; 0 without sealed blocks."""
    return max((group.attended.window or 0 for group in groups if group.is_tail), default=1) - 1


def _stream_of(staging: Staging | None) -> int | None:
    """Return the stream of the last step; None on the host."""
    if staging is None:
        return None
    staging.refuse_captured(staging.stream)
    return staging.stream


def _is_captured(staging: Staging | None) -> bool:
    return staging is not None and staging.runtime.is_capturing(staging.stream)
