"""The values that the memory planner returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pagecore.models import ModelConfig
from pagecore.serving.memory_classes import DevicePlan
from pagecore.storage import Spec, StateSpec
from pagecore.storage.specs.attended import chunk_of, sink_tokens_of
from pagecore.storage.specs.cross_spec import is_cross
from pagecore.storage.specs.spec import window_of

__all__ = ["ContextPlan", "GroupPlan", "MemoryPlan", "ModelPlan", "StatePlan"]


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

    @property
    def sink_tokens(self) -> int:
        """First tokens that a query attends to in addition to its window."""
        return sink_tokens_of(self.spec)

    def as_json(self) -> dict[str, Any]:
        """Return the group as a dict of plain values."""
        return {
            "num_layers": self.num_layers,
            "window": self.window,
            "chunk": self.chunk,
            "sink_tokens": self.sink_tokens,
            "cross": self.is_cross,
            "num_blocks": self.num_blocks,
            "planes": _planes(self.spec),
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_block": self.bytes_per_block,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """Recurrent states, as one rank stores them.

    Attributes
    ----------
    specs : tuple of StateSpec
        Spec of each layer with a state, as sharded to one rank.
    num_slots : int
        Slots, the null slot counted, as `PagedKVCache(memory=..., state_ratio=...)` divides the memory.
    state_ratio : float or None
        Bytes of states over bytes of blocks; None for a model without attention, whose states take all memory.
    num_checkpoints : int
        Slots of quantised checkpoints, the null slot counted; 0 if checkpoints have slots of states.
    """

    specs: tuple[StateSpec, ...]
    num_slots: int
    state_ratio: float | None
    num_checkpoints: int = 0

    @property
    def num_layers(self) -> int:
        """Number of layers with a state."""
        return len(self.specs)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot, which is the state of a sequence in all layers."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def bytes_per_checkpoint(self) -> int:
        """Bytes of one checkpoint, of all layers."""
        return sum(spec.checkpoint_nbytes for spec in self.specs)

    def as_json(self) -> dict[str, Any]:
        """Return the states as a dict of plain values."""
        return {
            "num_layers": self.num_layers,
            "num_slots": self.num_slots,
            "bytes_per_slot": self.bytes_per_slot,
            "num_checkpoints": self.num_checkpoints,
            "bytes_per_checkpoint": self.bytes_per_checkpoint,
            "state_ratio": self.state_ratio,
            "chunk": self.specs[0].chunk,
            "interval": self.specs[0].interval,
            "planes": [_planes(spec) for spec in dict.fromkeys(self.specs)],
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
    slots_per_request : int
        State slots that a request holds; 0 for a model without states.
    requests : int
        Requests that fit as `PagedKVCache(memory=...)` divides the memory: if each group has its `num_blocks`, and the
        states their `num_slots`.
    best_num_blocks : tuple of int or None
        Blocks of each group, the null block counted, in proportion to the blocks that a request of this length holds;
        None if not even one request fits. Groups with windows have more for one prompt in steps of 512 tokens, if that
        costs no request. Pass them as `PagedKVCache(num_blocks=[...])`.
    best_num_states : int or None
        State slots that go with `best_num_blocks`, the null slot counted, for `PagedKVCache(num_states=...)`; None for
        a model without states, and if not even one request fits.
    best_requests : int
        Requests that fit with `best_num_blocks` and `best_num_states`.
    best_num_checkpoints : int or None
        Slots of quantised checkpoints that go with them, for `PagedKVCache(num_checkpoints=...)`; None without them.
    """

    context: int
    blocks_per_request: tuple[int, ...]
    slots_per_request: int
    requests: int
    best_num_blocks: tuple[int, ...] | None
    best_num_states: int | None
    best_requests: int
    best_num_checkpoints: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a dict of plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Blocks, tokens and requests that fit into the memory of one rank.

    Attributes
    ----------
    memory : int
        Bytes for keys, values and states on one rank.
    ranks, block_size : int
    num_blocks : int
        Blocks of the largest group on one rank, the null block counted; 0 for a model without attention. Groups with
        windows may have fewer. Cross attention, whose blocks hold encoder tokens, is not counted.
    groups : tuple of GroupPlan
        Groups in the order of their first layers, those of cross attention last, as in `PagedKVCache`.
    states : StatePlan or None
        Slots of the recurrent states; None for a model without states.
    contexts : tuple of ContextPlan
    """

    memory: int
    ranks: int
    block_size: int
    num_blocks: int
    groups: tuple[GroupPlan, ...]
    states: StatePlan | None
    contexts: tuple[ContextPlan, ...]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in all layers of all groups; encoder tokens are not counted."""
        return sum(group.bytes_per_token for group in self.groups if not group.is_cross)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that fit, over all sequences; groups whose window frees blocks hold a part of them."""
        return max(self.num_blocks - 1, 0) * self.block_size

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
            "states": None if self.states is None else self.states.as_json(),
            "contexts": [context.as_json() for context in self.contexts],
        }


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model, and the plan of its memory.

    Attributes
    ----------
    model : ModelConfig
    memory : MemoryPlan
        Memory of the cache.
    device : DevicePlan or None
        Memory of the whole device; None if the plan was made for a memory of the cache.
    """

    model: ModelConfig
    memory: MemoryPlan
    device: DevicePlan | None = None

    def as_json(self) -> dict[str, Any]:
        """Return model and plan as one dict of plain values."""
        model = {
            "model_type": self.model.model_type,
            "num_layers": self.model.num_layers,
            "max_length": self.model.max_length,
        }
        return model | self.memory.as_json() | {"device": None if self.device is None else self.device.as_json()}


def _planes(spec: Spec) -> dict[str, Any]:
    return {plane.name: {"shape": plane.shape, "dtype": str(plane.dtype)} for plane in spec.planes}
