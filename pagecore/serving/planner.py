"""Memory planner: blocks, tokens and requests of a model that fit into a memory, before anything is allocated."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, SupportsFloat, SupportsIndex

from pagecore.cache.layers.groups import Group, Layers
from pagecore.cache.memory.demand import PROMPT_TOKENS, blocks_at_once
from pagecore.errors import ShapeError
from pagecore.models import read_model_config
from pagecore.serving.budget import DeviceOptions
from pagecore.serving.budget.device import plan_device
from pagecore.serving.budget.options import device_bytes
from pagecore.serving.checks import as_instance
from pagecore.serving.hybrid import arrange_hybrid, checkpoints_held, divide_hybrid, slots_held, with_checkpoints
from pagecore.serving.plans import ContextPlan, GroupPlan, MemoryPlan, ModelPlan, StatePlan
from pagecore.storage import Spec, TensorParallel, parse_memory
from pagecore.storage.checks import INT32_MAX, require_int, shown
from pagecore.storage.memory.budgets import Memory
from pagecore.storage.pools.state_pool import checked_ratio
from pagecore.storage.specs.spec import chosen_block_size

__all__ = [
    "ContextPlan",
    "DeviceOptions",
    "GroupPlan",
    "MemoryPlan",
    "ModelPlan",
    "StatePlan",
    "plan_memory",
    "plan_model",
]

# Default lengths of requests to plan for; the longest that the model supports is added.
CONTEXTS = (2048, 8192, 32768)


def plan_memory(
    specs: Layers,
    memory: Memory,
    *,
    ranks: int = 1,
    block_size: int | None = None,
    context: SupportsIndex | Iterable[SupportsIndex] = (),
    state_ratio: SupportsFloat = 0.9,
    device: str = "cpu",
    max_tokens: int | None = None,
) -> MemoryPlan:
    """Plan the blocks, tokens and requests that fit into the memory of one rank.

    A request of n tokens holds ``ceil(n / block_size)`` blocks of a group with full attention. Of a group with a window
    of W tokens it holds at most ``ceil((W - 1) / block_size) + 1`` blocks, because the window rarely starts at a block
    boundary, and of a group with chunks of C tokens ``ceil(C / block_size)`` where `block_size` divides C. Of a group
    with cross attention it holds the blocks of `max_tokens` encoder tokens. While the
    prompt is computed in steps of c tokens, the request holds up to ``ceil((W + c - 2) / block_size) + 1`` blocks. The
    division of the memory has room for one prompt in steps of 512 tokens, and so has a best split where that costs no
    request. The numbers of requests do not count that room: if windows lack it, a `Scheduler` admits the last
    requests when others end.

    A request of a model with recurrent states holds the slot that its steps write, and from ``lcm(chunk, block_size)``
    tokens on one with its newest checkpoint. Another slot, for the checkpoint that a step keeps, is not counted: it is
    taken from the cached states.

    Parameters
    ----------
    specs : spec or list of specs
        Specs of the layers of the whole model; `Alias` entries store nothing.
    memory : int, str or float
        Memory for keys, values and states on one rank, as for `PagedKVCache`: bytes, a string such as "8GiB", or a
        fraction of the free memory of `device`.
    ranks : int
        Number of tensor-parallel ranks; each holds its share of the heads (see `TensorParallel`).
    block_size : int, optional
        Tokens of a block; by default as for `PagedKVCache`.
    context : int or iterable of int
        Lengths of requests to plan for.
    state_ratio : float
        Bytes of states over bytes of blocks, for a model with both.
    device : str
        Device whose free memory a fraction refers to.
    max_tokens : int, optional
        The longest sequence; groups are divided as by ``PagedKVCache(max_tokens_per_sequence=max_tokens)``.

    Returns
    -------
    MemoryPlan

    Raises
    ------
    NotEnoughMemory
        The memory holds fewer than two blocks of every group, or two state slots.
    ShapeError
        A number is out of range, `ranks` does not divide the heads or channels, or the memory holds more blocks than
        there are ids.
    UnsupportedOption
        The layers are not specs, or it is not known how to shard them.
    DeviceError
        `memory` is a fraction and the device does not exist.
    """
    ranks = require_int("ranks", ranks)
    given_ratio = checked_ratio(state_ratio)
    contexts = [require_int("context", length) for length in _listed(context)]
    groups, states = arrange_hybrid(specs, TensorParallel(0, ranks))
    block_size = chosen_block_size((group.spec for group in groups), block_size)
    longest = None if max_tokens is None else require_int("max_tokens", max_tokens)
    budget = parse_memory(memory, device)
    num_blocks, slots = divide_hybrid(groups, states, block_size, budget, given_ratio, max_tokens=longest)
    planned = tuple(_group(group, blocks, block_size) for group, blocks in zip(groups, num_blocks, strict=True))
    ratio = given_ratio if groups and states else None
    plan = MemoryPlan(
        memory=budget,
        ranks=ranks,
        block_size=block_size,
        num_blocks=max((n for n, group in zip(num_blocks, groups, strict=True) if not group.is_cross), default=0),
        groups=planned,
        states=StatePlan(
            specs=states,
            num_slots=slots.num_states,
            state_ratio=ratio,
            num_checkpoints=slots.num_checkpoints,
        )
        if states
        else None,
        contexts=(),
    )
    return replace(plan, contexts=tuple(_plan_context(groups, plan, length) for length in contexts))


def plan_model(
    config: str | os.PathLike[str] | Mapping[str, Any],
    memory: Memory | None = None,
    *,
    ranks: int = 1,
    block_size: int | None = None,
    context: SupportsIndex | Iterable[SupportsIndex] | None = None,
    dtype: object = "auto",
    format: str | None = "auto",
    value_format: str | None = None,
    state_ratio: SupportsFloat = 0.9,
    device: str = "cpu",
    device_memory: int | str | None = None,
    options: DeviceOptions | None = None,
    checkpoint_format: str | None = None,
) -> ModelPlan:
    """Plan a model from its config.json, for a memory of the cache or for the whole memory of a device.

    Groups are divided as by ``PagedKVCache(memory=..., max_tokens_per_sequence=...)`` with the longest sequence of the
    model.

    Parameters
    ----------
    config : str, path or dict
        As for `specs_from_config`, as are `dtype`, `format` and `value_format`.
    memory : int, str or float, optional
        Memory for keys, values and states on one rank, as for `plan_memory`.
    ranks, state_ratio, device
        As for `plan_memory`.
    block_size : int, optional
        Tokens of a block; by default 16, the size of sealed blocks ("kivi2"), or the least multiple of 16 that rows of
        several tokens need (`RowSpec`).
    context : int or iterable of int, optional
        Lengths of requests to plan for; a few lengths up to the longest of the model by default.
    device_memory : int or str, optional
        Memory of one device, such as "80GiB", in place of `memory`: weights and reserves are subtracted from it.
    options : DeviceOptions, optional
        Weights, parallelism, steps, drafts and images, for `device_memory`.
    checkpoint_format : {"int8"}, optional
        Format of the checkpoints of recurrent states, see `StateSpec`.

    Returns
    -------
    ModelPlan

    Raises
    ------
    NotEnoughMemory
        As `plan_memory`; or `device_memory` is smaller than weights and reserves: the message has the missing GiB.
    ConfigError
        The config lacks a field that a figure needs; the message names it.
    ShapeError
        `memory` and `device_memory`, or neither; `options` without `device_memory`.
    """
    if (memory is None) == (device_memory is None):
        raise ShapeError(
            f"memory is {shown(memory)} and device_memory is {shown(device_memory)}; give exactly one of them"
        )
    model = read_model_config(config, dtype=dtype, format=format, value_format=value_format, block_size=block_size)
    size = chosen_block_size(model.layers, block_size)
    if checkpoint_format is not None:
        model = replace(model, layers=with_checkpoints(model.layers, checkpoint_format))
    longest = model.max_length or INT32_MAX
    if context is None:
        lengths = [length for length in CONTEXTS if length < longest]
        context = [*lengths, longest] if model.max_length else lengths

    def plan(layers: Layers, memory: Memory, ranks: int) -> MemoryPlan:
        return plan_memory(
            layers,
            memory,
            ranks=ranks,
            block_size=size,
            context=context,
            state_ratio=state_ratio,
            device=device,
            max_tokens=model.max_length,
        )

    if device_memory is None:
        if options is not None:
            as_instance("options", options, DeviceOptions)
            given = [each.name for each in fields(options) if getattr(options, each.name) != each.default]
            raise ShapeError(
                f"options are given without device_memory ({', '.join(given) or 'all have their defaults'}); give "
                "device_memory instead of memory, or leave them out"
            )
        assert memory is not None
        return ModelPlan(model, plan(model.layers, memory, ranks))
    if options is not None:
        as_instance("options", options, DeviceOptions)
    return plan_device(config, model, device_bytes("device_memory", device_memory), ranks, options, plan)


def blocks_held(spec: Spec, context: SupportsIndex, block_size: SupportsIndex) -> int:
    """Return the number of blocks of a group that a request of `context` tokens holds at most; see `plan_memory`."""
    return blocks_at_once(Group(spec, 1), require_int("context", context), require_int("block_size", block_size))


def _listed(context: SupportsIndex | Iterable[SupportsIndex]) -> list[Any]:
    # Arrays of any shape have __index__, so the type does not decide.
    given: Any = context
    try:
        operator.index(given)
        return [given]
    except Exception:  # __index__ of a foreign object may raise anything
        pass
    try:
        return list(given)
    except TypeError as error:
        raise ShapeError(f"context is {shown(context)}; expected a number of tokens or a list of them") from error


def _group(group: Group, num_blocks: int, block_size: int) -> GroupPlan:
    block = group.bytes_per_block(block_size)
    return GroupPlan(
        spec=group.spec,
        num_layers=group.num_layers,
        num_blocks=num_blocks,
        bytes_per_block=block,
        bytes_per_token=block / block_size,
    )


def _plan_context(groups: Sequence[Group], plan: MemoryPlan, context: int) -> ContextPlan:
    states, block_size = plan.states, plan.block_size
    held = [blocks_at_once(group, context, block_size) for group in groups]
    slots = 0 if states is None else slots_held(states.specs, context, block_size)
    # Bytes of each block and slot, the null ones of every pool, and the bytes of one request.
    sizes = [group.bytes_per_block(block_size) for group in groups]
    counts = [group.num_blocks for group in plan.groups]
    needs = list(held)
    if states is not None:
        sizes, counts, needs = [*sizes, states.bytes_per_slot], [*counts, states.num_slots], [*held, slots]
    kept = 0 if states is None else checkpoints_held(states.specs, context, block_size)
    if states is not None and states.num_checkpoints:
        sizes, counts = [*sizes, states.bytes_per_checkpoint], [*counts, states.num_checkpoints]
        needs.append(max(kept, 1))  # so that a cache has the least number of them
    one = sum(count * size for count, size in zip(needs, sizes, strict=True))
    # The number of block ids limits a pool too.
    best = min((plan.memory - sum(sizes)) // one, (INT32_MAX - 1) // max(needs))
    spare = _prompt_blocks(groups, context, block_size, plan.memory - sum(sizes) - best * one)
    split = tuple(best * count + 1 + more for count, more in zip(held, spare, strict=True))
    return ContextPlan(
        context=context,
        blocks_per_request=tuple(held),
        slots_per_request=slots,
        requests=min((count - 1) // need for count, need in zip(counts, needs, strict=True)),
        best_num_blocks=split if best else None,
        best_num_states=best * slots + 1 if best and slots else None,
        best_num_checkpoints=best * needs[-1] + 1 if best and states is not None and states.num_checkpoints else None,
        best_requests=best,
    )


def _prompt_blocks(groups: Sequence[Group], context: int, block_size: int, memory: int) -> list[int]:
    """Return the blocks that a prompt in steps of `PROMPT_TOKENS` needs in addition, or the share that `memory` holds.

    Without them the last request waits until another one ends, because admission waits for these blocks of windows.
    """
    more = [
        blocks_at_once(group, context, block_size, PROMPT_TOKENS) - blocks_at_once(group, context, block_size)
        for group in groups
    ]
    price = sum(count * group.bytes_per_block(block_size) for count, group in zip(more, groups, strict=True))
    return [count * min(memory, price) // price for count in more] if price else more
