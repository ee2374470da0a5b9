"""Memory planner: blocks, tokens and requests of a model that fit into a memory, before anything is allocated."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, SupportsIndex

from pagecore.cache.demand import blocks_at_once
from pagecore.cache.layers import Group, Layers, arrange
from pagecore.cache.limits import count_blocks
from pagecore.errors import ShapeError
from pagecore.models import ModelConfig, read_model_config
from pagecore.storage import Spec, TensorParallel, parse_memory
from pagecore.storage.attended import chunk_of
from pagecore.storage.checks import INT32_MAX, require_int, shown
from pagecore.storage.cross_spec import is_cross
from pagecore.storage.memory import Memory
from pagecore.storage.spec import window_of

__all__ = ["ContextPlan", "GroupPlan", "MemoryPlan", "ModelPlan", "plan_memory", "plan_model"]

# Default lengths of requests to plan for; the longest that the model supports is added.
CONTEXTS = (2048, 8192, 32768)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Layers that share a pool, as one rank stores them.

    Attributes
    ----------
    spec : Spec
        Spec of each layer, as sharded to one rank.
    num_layers : int
        Number of layers that store, without aliases.
    num_blocks : int
        Blocks of the group, the null block counted, as `PagedKVCache(memory=...)` divides the memory.
    bytes_per_block : int
        Bytes of one block in all layers of the group.
    bytes_per_token : float
        Bytes of one token in all layers of the group.
    """

    spec: Spec
    num_layers: int
    num_blocks: int
    bytes_per_block: int
    bytes_per_token: float

    @property
    def window(self) -> int | None:
        """Number of keys that a query attends to; None for all, and for chunks."""
        return window_of(self.spec)

    @property
    def is_cross(self) -> bool:
        """True for cross attention: the blocks hold encoder tokens, up to `max_tokens` of the spec a request."""
        return is_cross(self.spec)

    @property
    def chunk(self) -> int | None:
        """Tokens of a chunk of chunked local attention; None without chunks."""
        return chunk_of(self.spec)

    def as_json(self) -> dict[str, Any]:
        """Return the group as a dict of plain values."""
        return {
            "num_layers": self.num_layers,
            "window": self.window,
            "chunk": self.chunk,
            "cross": self.is_cross,
            "num_blocks": self.num_blocks,
            "planes": {plane.name: {"shape": plane.shape, "dtype": str(plane.dtype)} for plane in self.spec.planes},
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_block": self.bytes_per_block,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPlan:
    """Number of concurrent requests of `context` tokens that fit.

    Attributes
    ----------
    context : int
        Tokens of each request, prompt and answer together.
    blocks_per_request : tuple of int
        Blocks of each group that a request holds.
    requests : int
        Requests that fit as `PagedKVCache(memory=...)` divides the memory: if each group has its `num_blocks`.
    best_num_blocks : tuple of int or None
        Blocks of each group, the null block counted, in proportion to the blocks that a request of this length holds;
        None if not even one request fits. Pass them as `PagedKVCache(num_blocks=[...])`.
    best_requests : int
        Requests that fit with `best_num_blocks`.
    """

    context: int
    blocks_per_request: tuple[int, ...]
    requests: int
    best_num_blocks: tuple[int, ...] | None
    best_requests: int

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a dict of plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Blocks, tokens and requests that fit into the memory of one rank.

    Attributes
    ----------
    memory : int
        Bytes for keys and values on one rank.
    ranks, block_size : int
    num_blocks : int
        Blocks of the largest group on one rank, the null block counted. Groups with windows may have fewer. Cross
        attention, whose blocks hold encoder tokens, is not counted.
    groups : tuple of GroupPlan
        Groups in the order of their first layers, as in `PagedKVCache`.
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
        """Bytes of one token in all layers of all groups; encoder tokens are not counted."""
        return sum(group.bytes_per_token for group in self.groups if not group.is_cross)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that fit, over all sequences; groups whose window frees blocks hold a part of them."""
        return (self.num_blocks - 1) * self.block_size

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a dict of plain values."""
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
    """A model, and the plan of its memory."""

    model: ModelConfig
    memory: MemoryPlan

    def as_json(self) -> dict[str, Any]:
        """Return model and plan as one dict of plain values."""
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
    """Plan the blocks, tokens and requests that fit into the memory of one rank.

    A request of n tokens holds ``ceil(n / block_size)`` blocks of a group with full attention. Of a group with a window
    of W tokens it holds at most ``ceil((W - 1) / block_size) + 1`` blocks, because the window rarely starts at a block
    boundary, and of a group with chunks of C tokens ``ceil(C / block_size)`` where `block_size` divides C. Of a group
    with cross attention it holds the blocks of `max_tokens` encoder tokens. While the
    prompt is computed in steps of c tokens, the request holds up to ``ceil((W + c - 2) / block_size) + 1`` blocks. The
    division of the memory has room for one prompt in steps of 512 tokens; the numbers of requests and the best splits
    do not count prompts, which a `Scheduler` computes in smaller steps while windows are short of blocks.

    Parameters
    ----------
    specs : spec or list of specs
        Specs of the layers of the whole model; `Alias` entries store nothing.
    memory : int, str or float
        Memory for keys and values on one rank, as for `PagedKVCache`: bytes, a string such as "8GiB", or a fraction of
        the free memory of `device`.
    ranks : int
        Number of tensor-parallel ranks; each holds its share of the heads (see `TensorParallel`).
    block_size : int
        Tokens of a block.
    context : int or iterable of int
        Lengths of requests to plan for.
    device : str
        Device whose free memory a fraction refers to.

    Returns
    -------
    MemoryPlan

    Raises
    ------
    NotEnoughMemory
        The memory holds fewer than two blocks of every group.
    ShapeError
        A number is out of range, `ranks` does not divide the heads, or the memory holds more blocks than there are ids.
    UnsupportedOption
        The layers are not specs, or it is not known how to shard them.
    DeviceError
        `memory` is a fraction and the device does not exist.
    """
    ranks = require_int("ranks", ranks)
    block_size = require_int("block_size", block_size)
    contexts = [require_int("context", length) for length in _listed(context)]
    _, groups = arrange(specs, None, TensorParallel(0, ranks))
    budget = parse_memory(memory, device)
    num_blocks = count_blocks(groups, block_size, None, budget)
    planned = tuple(_group(group, blocks, block_size) for group, blocks in zip(groups, num_blocks, strict=True))
    return MemoryPlan(
        memory=budget,
        ranks=ranks,
        block_size=block_size,
        num_blocks=max(count for count, group in zip(num_blocks, groups, strict=True) if not group.is_cross),
        groups=planned,
        contexts=tuple(_plan_context(groups, num_blocks, budget, block_size, length) for length in contexts),
    )


def plan_model(
    config: str | os.PathLike[str] | Mapping[str, Any],
    memory: Memory,
    *,
    ranks: int = 1,
    block_size: int = 16,
    context: SupportsIndex | Iterable[SupportsIndex] | None = None,
    dtype: object = "auto",
    format: str | None = "auto",
    device: str = "cpu",
) -> ModelPlan:
    """Plan a model from its config.json.

    `context` defaults to a few lengths up to the longest of the model; `dtype` and `format` are those of
    `specs_from_config`.
    """
    model = read_model_config(config, dtype=dtype, format=format)
    if context is None:
        longest = model.max_length or INT32_MAX
        lengths = [length for length in CONTEXTS if length < longest]
        context = [*lengths, longest] if model.max_length else lengths
    plan = plan_memory(model.layers, memory, ranks=ranks, block_size=block_size, context=context, device=device)
    return ModelPlan(model, plan)


def blocks_held(spec: Spec, context: SupportsIndex, block_size: SupportsIndex) -> int:
    """Return the number of blocks of a group that a request of `context` tokens holds at most; see `plan_memory`."""
    return blocks_at_once(Group(spec, 1), require_int("context", context), require_int("block_size", block_size))


def _listed(context: SupportsIndex | Iterable[SupportsIndex]) -> list[Any]:
    # Arrays of any shape have __index__, so the type does not decide.
    given: Any = context
    try:
        return [operator.index(given)]
    except TypeError:
        pass
    try:
        return list(given)
    except TypeError:
        raise ShapeError(f"context is {shown(context)}; expected a number of tokens or a list of them") from None


def _group(group: Group, num_blocks: int, block_size: int) -> GroupPlan:
    block = group.bytes_per_block(block_size)
    return GroupPlan(
        spec=group.spec,
        num_layers=group.num_layers,
        num_blocks=num_blocks,
        bytes_per_block=block,
        bytes_per_token=block / block_size,
    )


def _plan_context(
    groups: Sequence[Group], num_blocks: Sequence[int], memory: int, block_size: int, context: int
) -> ContextPlan:
    held = [blocks_at_once(group, context, block_size) for group in groups]
    null = sum(group.bytes_per_block(block_size) for group in groups)
    one = sum(count * group.bytes_per_block(block_size) for count, group in zip(held, groups, strict=True))
    # The number of block ids limits a pool too.
    best = min((memory - null) // one, (INT32_MAX - 1) // max(held))
    return ContextPlan(
        context=context,
        blocks_per_request=tuple(held),
        requests=min((blocks - 1) // count for blocks, count in zip(num_blocks, held, strict=True)),
        best_num_blocks=tuple(best * count + 1 for count in held) if best else None,
        best_requests=best,
    )
