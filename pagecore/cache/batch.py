"""What one forward pass needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor, as_tensor
from pagecore.cache._step import BatchTicket, Step
from pagecore.cache.layers import layer_number
from pagecore.index import StepBuffers
from pagecore.ops import AttentionPlan


@dataclass(frozen=True)
class StepArrays:
    """The arrays of a batch in one place, on the host or on a device; see `Batch`.

    `slot_mappings` has one for each group of layers, as `BatchGroup` has it.
    """

    rows: Tensor
    query_lens: Tensor
    cu_query_lens: Tensor
    seq_lens: Tensor
    positions: Tensor
    token_ids: Tensor
    slot_mappings: tuple[Tensor, ...]


@dataclass(frozen=True)
class BatchGroup:
    """The part of a batch that one group of layers needs.

    Attributes
    ----------
    slot_mapping : Tensor
        int64 (or the cache's index dtype) ``[max_tokens]``: the slot of each new token, -1 past the last.
    block_table : Tensor
        int32 ``[cache.max_sequences + 1, max_blocks]``: the whole table of the group; `Batch.rows` picks from it.
        As `PagedKVCache.block_table` gives it.
    plan : AttentionPlan or None
        How the attention of this step is split; None where the spec does not say its query heads.
    """

    slot_mapping: Tensor
    block_table: Tensor
    plan: AttentionPlan | None


class Batch:
    """The arrays of one forward pass, at fixed addresses, filled by `PagedKVCache.prepare`.

    A batch serves `write` and `attend` from its prepare until it is committed or abandoned. As a context manager it
    abandons a step that is still in flight when an exception ends the block; a batch that is collected abandons its
    step too.

    A batch has room for `max_sequences` and `max_tokens`; what the step does not use is padding: length 0, slot -1,
    and a row of the block table that holds null blocks only. The arrays are Tensors that alias the batch:
    ``numpy.asarray(batch.positions)`` and ``torch.from_dlpack(batch.positions)`` copy nothing. The next prepare into
    the batch overwrites them; on CUDA, where they are device memory, in the order of the stream that it is given. Keep
    a batch on CUDA, and its cache, until the device has done what it was given to do with them.

    Attributes
    ----------
    rows : Tensor, int32 [max_sequences]
        Row of each sequence in the block tables.
    query_lens, seq_lens : Tensor, int32 [max_sequences]
        New tokens of each sequence, and its length with them.
    cu_query_lens : Tensor, int32 [max_sequences + 1]
        Where each sequence's new tokens start in the flat arrays.
    positions : Tensor, int32 [max_tokens]
        Position of each new token in its sequence.
    token_ids : Tensor, int32 [max_tokens]
        Id of each new token, as far as it was known when the step was prepared; -1 for the others.
    host : StepArrays
        The same arrays on the host, where they were made.
    """

    def __init__(
        self,
        step: Step,
        layer_groups: list[int],
        tables: list[Tensor],
        plans: list[AttentionPlan | None],
    ):
        self._step = step
        self._ticket = BatchTicket(step)
        self._layer_groups = layer_groups
        self.host = arrays_of(step.buffers)
        shown = self.host if step.staged is None else step.staged.arrays
        self.rows = shown.rows
        self.query_lens = shown.query_lens
        self.cu_query_lens = shown.cu_query_lens
        self.seq_lens = shown.seq_lens
        self.positions = shown.positions
        self.token_ids = shown.token_ids
        self._groups = [BatchGroup(*parts) for parts in zip(shown.slot_mappings, tables, plans, strict=True)]

    @property
    def max_sequences(self) -> int:
        """Sequences that the batch has room for."""
        return self._buffers.max_sequences

    @property
    def max_tokens(self) -> int:
        """New tokens that the batch has room for."""
        return self._buffers.max_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences of the step."""
        return self._buffers.num_sequences

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return self._buffers.num_tokens

    @property
    def in_flight(self) -> bool:
        """Whether a prepared step waits for commit or abandon."""
        return self._step.in_flight

    def group(self, layer: int) -> BatchGroup:
        """Slot mapping, block table and plan of the group that model layer `layer` is in."""
        return self._groups[self._group_of(layer)]

    def copied_blocks(self, layer: int) -> NDArray[np.int32]:
        """Copy-on-write of the step, in the pool of model layer `layer`: (source, target) blocks, int32 ``[n, 2]``.

        A cache that holds bytes has copied them. With ``device="none"`` the owner of the bytes copies them, in this
        order and in every layer of the group, before the step writes.
        """
        return self._step.copied()[self._group_of(layer)]

    def _group_of(self, layer: int) -> int:
        return self._layer_groups[layer_number(layer, len(self._layer_groups))]

    @property
    def _buffers(self) -> StepBuffers:
        return self._step.buffers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.in_flight:
            self._step.abandon()

    def __repr__(self) -> str:
        sequences = f"{self.num_sequences} of {self.max_sequences} sequences"
        return f"Batch({sequences}, {self.num_tokens} of {self.max_tokens} tokens)"


def arrays_of(buffers: StepBuffers, view: Callable[[NDArray[Any]], Tensor] = as_tensor) -> StepArrays:
    """The arrays of a step as Tensors; `view` makes one of each."""
    return StepArrays(
        rows=view(buffers.rows),
        query_lens=view(buffers.query_lens),
        cu_query_lens=view(buffers.cu_query_lens),
        seq_lens=view(buffers.seq_lens),
        positions=view(buffers.positions),
        token_ids=view(buffers.token_ids),
        slot_mappings=tuple(view(array) for array in buffers.slot_mappings),
    )
