"""The arrays of a step that the operations of a layer use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagecore.arrays import Tensor
from pagecore.cache.layers.scratch import RowScratch
from pagecore.ops import AttentionPlan
from pagecore.storage import KVPool


@dataclass(frozen=True)
class SealedInputs:
    """The sealed blocks that a step attends to, next to the newest tokens of its layers.

    Attributes
    ----------
    block_table : Tensor
        int32 ``[cache.max_sequences + 1, max_blocks]``: the whole block table of the group of sealed blocks.
    lens : Tensor
        int32 ``[max_sequences]``: the number of tokens of each sequence that are in sealed blocks; 0 for padding.
    pool : KVPool or None
        The planes of the group; None for a cache without bytes.
    """

    block_table: Tensor
    lens: Tensor
    pool: KVPool | None


@dataclass(frozen=True)
class BatchGroup:
    """The part of a batch that one group of layers needs.

    Attributes
    ----------
    slot_mapping : Tensor
        int64 (or the cache's index dtype) ``[max_tokens]``: the slot of each new token; -1 for padding. Of a layer
        with cross attention ``[max_cross_tokens]``: the slot of each encoder token that the step writes.
    block_table : Tensor
        int32 ``[cache.max_sequences + 1, max_blocks]``: the whole block table of the group, an alias of
        `PagedKVCache.block_table`. `Batch.rows` lists the rows of the step, and `CrossArrays.rows` those of its
        encoder outputs.
    plan : AttentionPlan or None
        Plan of the step's attention; None if the spec does not specify its number of query heads.
    sealed : SealedInputs or None
        Of layers with sealed blocks; slots and block table are then those of the newest tokens.
    """

    slot_mapping: Tensor
    block_table: Tensor
    plan: AttentionPlan | None
    sealed: SealedInputs | None = None


class EncoderInputs(Protocol):
    """The encoder tokens of a step, as a layer with cross attention uses them; `CrossArrays` has them."""

    @property
    def rows(self) -> Tensor:
        """Row of each sequence's encoder output in the block tables of cross-attention groups."""

    @property
    def seq_lens(self) -> Tensor:
        """Encoder tokens of each sequence."""

    @property
    def num_tokens(self) -> int:
        """Number of encoder tokens that the step writes."""

    @property
    def max_tokens(self) -> int:
        """Number of encoder tokens that the batch has room for."""


class StepInputs(Protocol):
    """The arrays of a step that the operations of a layer use; `Batch` has them."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the step."""

    @property
    def num_tokens(self) -> int:
        """Number of new tokens of the step."""

    @property
    def max_tokens(self) -> int:
        """Number of new tokens that the batch has room for."""

    @property
    def rows(self) -> Tensor:
        """Row of each sequence in the block tables."""

    @property
    def seq_lens(self) -> Tensor:
        """Length of each sequence including its new tokens."""

    @property
    def cu_query_lens(self) -> Tensor:
        """Start of each sequence's new tokens in the flat arrays."""

    @property
    def tree_mask(self) -> Tensor | None:
        """Bits of the step's trees; None without trees."""

    @property
    def cross(self) -> EncoderInputs | None:
        """Encoder tokens; None in a cache without cross-attention layers."""

    @property
    def _scratch(self) -> RowScratch:
        """Arrays for rotated rows."""
