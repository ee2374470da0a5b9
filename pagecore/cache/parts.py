"""The parts of a paged cache that its operations share."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor, as_tensor
from pagecore.cache.layers.groups import Group, Layer, layer_number
from pagecore.cache.layers.operations import LayerOps
from pagecore.cache.memory.store import Store
from pagecore.cache.prefix._prefix import PrefixCache
from pagecore.cache.sequences._sequences import CrossContents
from pagecore.cache.staging.tables import Staging
from pagecore.cache.state._state import CacheState
from pagecore.errors import UnsupportedOption
from pagecore.index import BlockPool, BlockTables
from pagecore.storage import Spec, StateSpec, TensorParallel
from pagecore.storage.checks import shown


class SwappedBlocks(Protocol):
    """A memory that holds the blocks of swapped sequences, as statistics and recounts see it."""

    @property
    def num_used_blocks(self) -> int:
        """Blocks in use, summed over the groups."""

    def check_invariants(self) -> None:
        """Recount every block from the sequences that hold it."""

    def shares(self, host: object) -> bool:
        """Return True if the blocks are those of a host tier."""

    def blocks_in(self, host: object) -> list[tuple[NDArray[np.int32], ...]]:
        """Return the blocks that each sequence holds of a host tier, by pool; empty for another tier."""

    def wait(self) -> None:
        """Wait until a device has made the copies that were submitted so far."""


class SavedMemory(Protocol):
    """Memory of a cache whose pages can be given back; see `pagecore.cache.methods.saver`."""

    is_released: bool

    def require_memory(self) -> None:
        """Raise DeviceError while the pages are given back."""


@dataclass(frozen=True, slots=True, eq=False)
class CrossParts:
    """Parts of a cache that only cross attention needs.

    Attributes
    ----------
    contents : CrossContents
        Encoder outputs, and the block tables of the cross groups.
    staging : Staging or None
        Copy of these tables on the device; None on the host.
    first_group : int
        Number of the first cross group in the cache.
    """

    contents: CrossContents
    staging: Staging | None
    first_group: int


@dataclass(frozen=True, slots=True, eq=False)
class CacheParts:
    """Everything that the operations of one paged cache need.

    `PagedKVCache` owns one, and its operations take it instead of the cache.

    Attributes
    ----------
    state : CacheState
        Block tables, prefix cache, sequences and the lock.
    store : Store
        Pools of bytes; empty for ``device="none"``.
    staging : Staging or None
        Copy of the block tables on the device; None on the host.
    layers : list of Layer
        Group and index of each model layer.
    ops : list of LayerOps
        Operations of each model layer.
    groups : list of Group
    group_ops : list of LayerOps
        Operations of each group's first layer, which plan for the group.
    block_tables : list of Tensor
        Block table of each group on the cache's device: int32 ``[max_sequences + 1, max_blocks]``.
    device, index_dtype, eviction_policy : str
    block_size, max_tokens_per_sequence : int
    num_slots : int
        Slots of the smallest pool: a step that computes more tokens is short of blocks.
    scrub, recompute_last_block : bool
    parallel : TensorParallel
    cross : CrossParts or None
        Parts of cross attention; None for a cache without it.
    saver : SavedMemory or None
        Memory whose pages can be given back; None for a cache without `memory_saver`.
    swap_spaces : WeakSet of SwappedBlocks
        Swap spaces that serve the cache.
    exports : dict of bytes to str
        Exports of sequences that other processes may read from the memory of the cache: address by identifier.
    """

    state: CacheState
    store: Store
    staging: Staging | None
    layers: list[Layer]
    ops: list[LayerOps]
    groups: list[Group]
    group_ops: list[LayerOps]
    block_tables: list[Tensor]
    device: str
    index_dtype: Literal["int64", "int32"]
    eviction_policy: str
    block_size: int
    max_tokens_per_sequence: int
    num_slots: int
    scrub: bool
    recompute_last_block: bool
    parallel: TensorParallel
    cross: CrossParts | None = None
    saver: SavedMemory | None = None
    swap_spaces: weakref.WeakSet[SwappedBlocks] = field(default_factory=weakref.WeakSet)
    exports: dict[bytes, str] = field(default_factory=dict)

    @property
    def tables(self) -> BlockTables:
        """Block tables on the host."""
        return self.state.tables

    @property
    def prefix(self) -> PrefixCache | None:
        """The prefix cache, if the cache has one."""
        return self.state.prefix

    @property
    def state_specs(self) -> list[Spec]:
        """Spec of each layer that keeps a state."""
        return [layer.spec for layer in self.layers if layer.keeps_state]

    @property
    def checkpoint_specs(self) -> list[StateSpec]:
        """Spec of the stored checkpoints of each layer that keeps a state."""
        return [spec.checkpoint_spec for spec in self.state_specs if isinstance(spec, StateSpec)]

    @property
    def num_groups(self) -> int:
        """Number of groups of layers."""
        return len(self.groups)

    @property
    def token_groups(self) -> list[Group]:
        """Groups whose blocks hold the tokens of sequences: all but those of cross attention, which come last."""
        return self.groups[: self.tables.num_groups]

    @property
    def cached_groups(self) -> list[Group]:
        """Groups whose blocks a prefix has: those of tokens, without the tails of sealed blocks, which come last."""
        return [group for group in self.token_groups if not group.is_tail]

    @property
    def seals_blocks(self) -> bool:
        """True for a cache with sealed blocks."""
        return self.state.seals is not None

    @property
    def block_pools(self) -> tuple[BlockPool, ...]:
        """Pool of the block ids of each group."""
        return self.tables.pools if self.cross is None else self.tables.pools + self.cross.contents.tables.pools

    @property
    def row_lengths(self) -> Tensor:
        """Length of each row on the cache's device: int32 ``[max_sequences + 1]``."""
        return as_tensor(self.tables.row_lengths) if self.staging is None else self.staging.row_lengths

    def layer(self, layer: int) -> Layer:
        """Return the place of a model layer; raise ShapeError if the cache does not have it."""
        return self.layers[layer_number(layer, len(self.layers))]

    def ops_of(self, layer: int) -> LayerOps:
        """Return the operations of a model layer; raise ShapeError if the cache does not have it."""
        return self.ops[layer_number(layer, len(self.layers))]


class PartsOwner:
    """Base class of caches that consist of `CacheParts`."""

    _parts: CacheParts


def parts_of(cache: object) -> CacheParts:
    """Return the parts of a paged cache; raise UnsupportedOption for any other object."""
    if not isinstance(cache, PartsOwner):
        raise UnsupportedOption(f"cache is {shown(cache)}; expected a PagedKVCache")
    return cache._parts
