"""What fits: a model's layers and a memory as blocks, tokens and requests, before anything is allocated."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, SupportsIndex

from pagecore.cache.layers import Group, Layers, arrange
from pagecore.cache.limits import count_blocks
from pagecore.errors import ShapeError
from pagecore.models import ModelConfig, read_model_config
from pagecore.storage import Spec, TensorParallel, parse_memory
from pagecore.storage.checks import INT32_MAX, require_int, shown
from pagecore.storage.memory import Memory
from pagecore.storage.spec import window_of

__all__ = ["ContextPlan", "GroupPlan", "MemoryPlan", "ModelPlan", "plan_memory", "plan_model"]

# Tokens of the requests that a model is planned for where none are said, and then its longest.
CONTEXTS = (2048, 8192, 32768)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Layers that share a pool, as one rank stores them.

    Attributes
    ----------
    spec : Spec
        The rank's share of what each layer stores.
    num_layers : int
        Layers that store; aliases are not among them.
    bytes_per_block : int
        Of one block in all layers of the group.
    bytes_per_token : float
        Of one token in all layers of the group.
    """

    spec: Spec
    num_layers: int
    bytes_per_block: int
    bytes_per_token: float

    @property
    def window(self) -> int | None:
        """How many keys a query sees; None for all."""
        return window_of(self.spec)

    def as_json(self) -> dict[str, Any]:
        """The group as plain values."""
        return {
            "num_layers": self.num_layers,
            "window": self.window,
            "planes": {plane.name: {"shape": plane.shape, "dtype": str(plane.dtype)} for plane in self.spec.planes},
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_block": self.bytes_per_block,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPlan:
    """How many requests fit at once, each `context` tokens long.

    Attributes
    ----------
    context : int
        Tokens of each request, prompt and answer.
    blocks_per_request : tuple of int
        What a request holds of each group.
    requests : int
        That fit where every group has the plan's `num_blocks`, as `PagedKVCache(memory=...)` shares memory out.
    best_num_blocks : tuple of int or None
        For `PagedKVCache(num_blocks=[...])`: blocks of each group, the null block counted, in proportion to what a
        request of this length holds of it. None where not even one request fits. Such a cache needs its
        `max_tokens_per_sequence` said, which is what the smallest pool holds by default.
    best_requests : int
        That fit then.
    """

    context: int
    blocks_per_request: tuple[int, ...]
    requests: int
    best_num_blocks: tuple[int, ...] | None
    best_requests: int

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What fits into a memory; of one rank, as every figure here.

    Attributes
    ----------
    memory : int
        Bytes for key and value.
    ranks, block_size : int
    num_blocks : int
        Of each group, the null block counted.
    groups : tuple of GroupPlan
        In the order of their first layers, which is that of `PagedKVCache`.
    contexts : tuple of ContextPlan
    """

    memory: int
    ranks: int
    block_size: int
    num_blocks: int
    groups: tuple[GroupPlan, ...]
    contexts: tuple[ContextPlan, ...]

    @property
    def bytes_per_token(self) -> float:
        """Of one token in all layers of all groups."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit, whoever they belong to; more of them where a window lets blocks go."""
        return (self.num_blocks - 1) * self.block_size

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        return {
            "memory": self.memory,
            "ranks": self.ranks,
            "block_size": self.block_size,
            "bytes_per_token": self.bytes_per_token,
            "num_blocks": self.num_blocks,
            "num_tokens": self.num_tokens,
            "groups": [group.as_json() for group in self.groups],
            "contexts": [context.as_json() for context in self.contexts],
        }


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model and what of it fits."""

    model: ModelConfig
    memory: MemoryPlan

    def as_json(self) -> dict[str, Any]:
        """Both as plain values."""
        model = {
            "model_type": self.model.model_type,
            "num_layers": len(self.model.layers),
            "max_length": self.model.max_length,
        }
        return model | self.memory.as_json()


def plan_memory(
    specs: Layers,
    memory: Memory,
    *,
    ranks: int = 1,
    block_size: int = 16,
    context: SupportsIndex | Iterable[SupportsIndex] = (),
    device: str = "cpu",
) -> MemoryPlan:
    """How many blocks, tokens and requests fit into the memory of one rank.

    A request of n tokens holds ``ceil(n / block_size)`` blocks of a group that attends to everything. Of a group with
    a window of W it holds at most ``ceil((W - 1) / block_size) + 1``: the W keys that its next query sees seldom begin
    with a block, so one block more than they fill. While its prompt is computed in steps of c tokens it holds up to
    ``ceil((W + c - 2) / block_size) + 1``; that is not counted, so leave room for one prompt.

    Parameters
    ----------
    specs : spec or list of specs
        One a model layer, of the whole model; `Alias` entries store nothing.
    memory : int, str or float
        For key and value on one rank, as `PagedKVCache` takes it: bytes, "8GiB", or a fraction of what is free here.
    ranks : int
        Tensor parallel: each rank holds its share of the heads (see `TensorParallel`).
    block_size : int
        Tokens a block.
    context : int or iterable of int
        Lengths of requests to plan for.
    device : str
        Whose free memory a fraction is of.

    Raises
    ------
    NotEnoughMemory
        The memory holds fewer than two blocks of every group.
    ShapeError
        Numbers that are none, heads that `ranks` cannot share, a memory that makes more blocks than ids can count.
    UnsupportedOption
        Layers that are no specs, or that are not known to be shared.
    DeviceError
        A fraction of a device that is not there.
    """
    ranks = require_int("ranks", ranks)
    block_size = require_int("block_size", block_size)
    contexts = [require_int("context", length) for length in _listed(context)]
    _, groups = arrange(specs, None, TensorParallel(0, ranks))
    budget = parse_memory(memory, device)
    num_blocks = count_blocks(groups, block_size, None, budget)[0]
    planned = tuple(_group(group, block_size) for group in groups)
    return MemoryPlan(
        memory=budget,
        ranks=ranks,
        block_size=block_size,
        num_blocks=num_blocks,
        groups=planned,
        contexts=tuple(_plan_context(planned, num_blocks, budget, block_size, length) for length in contexts),
    )


def plan_model(
    config: str | os.PathLike[str] | Mapping[str, Any],
    memory: Memory,
    *,
    ranks: int = 1,
    block_size: int = 16,
    context: SupportsIndex | Iterable[SupportsIndex] | None = None,
    dtype: object = "auto",
    device: str = "cpu",
) -> ModelPlan:
    """`plan_memory` of a config.json; without `context`, of a few lengths up to the longest that it was made for."""
    model = read_model_config(config, dtype=dtype)
    if context is None:
        longest = model.max_length or INT32_MAX
        lengths = [length for length in CONTEXTS if length < longest]
        context = [*lengths, longest] if model.max_length else lengths
    plan = plan_memory(model.layers, memory, ranks=ranks, block_size=block_size, context=context, device=device)
    return ModelPlan(model, plan)


def blocks_held(spec: Spec, context: SupportsIndex, block_size: SupportsIndex) -> int:
    """Blocks that a request of `context` tokens holds of a group, at most; see `plan_memory`."""
    length, size, window = require_int("context", context), require_int("block_size", block_size), window_of(spec)
    blocks = -(-length // size)
    return blocks if window is None else min(blocks, -(-(window - 1) // size) + 1)


def _listed(context: SupportsIndex | Iterable[SupportsIndex]) -> list[Any]:
    # An array has __index__ whatever its shape, so types tell too little.
    given: Any = context
    try:
        return [operator.index(given)]
    except TypeError:
        pass
    try:
        return list(given)
    except TypeError:
        raise ShapeError(f"context is {shown(context)}; give a number of tokens, or a list of them") from None


def _group(group: Group, block_size: int) -> GroupPlan:
    block = group.bytes_per_block(block_size)
    return GroupPlan(
        spec=group.spec, num_layers=group.num_layers, bytes_per_block=block, bytes_per_token=block / block_size
    )


def _plan_context(
    groups: Sequence[GroupPlan], num_blocks: int, memory: int, block_size: int, context: int
) -> ContextPlan:
    held = [blocks_held(group.spec, context, block_size) for group in groups]
    null = sum(group.bytes_per_block for group in groups)
    one = sum(count * group.bytes_per_block for count, group in zip(held, groups, strict=True))
    # A pool ends where ids do, however much memory there is.
    best = min((memory - null) // one, (INT32_MAX - 1) // max(held))
    return ContextPlan(
        context=context,
        blocks_per_request=tuple(held),
        requests=min((num_blocks - 1) // count for count in held),
        best_num_blocks=tuple(best * count + 1 for count in held) if best else None,
        best_requests=best,
    )
