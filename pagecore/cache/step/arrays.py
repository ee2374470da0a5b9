"""The arrays of a step as tensors, on the host or on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from pagecore.arrays import Tensor, as_tensor
from pagecore.index import StepBuffers


@dataclass(frozen=True)
class StepArrays:
    """The arrays of a batch in one memory, on the host or on a device; see `Batch` for shapes and dtypes.

    `slot_mappings` has one array for each group of layers, as `BatchGroup.slot_mapping`.
    """

    rows: Tensor
    query_lens: Tensor
    cu_query_lens: Tensor
    seq_lens: Tensor
    positions: Tensor
    token_ids: Tensor
    slot_mappings: tuple[Tensor, ...]
    tree_mask: Tensor | None = None


def arrays_of(buffers: StepBuffers, view: Callable[[NDArray[Any]], Tensor] = as_tensor) -> StepArrays:
    """Return the arrays of a step as tensors; `view` makes a tensor of each."""
    return StepArrays(
        rows=view(buffers.rows),
        query_lens=view(buffers.query_lens),
        cu_query_lens=view(buffers.cu_query_lens),
        seq_lens=view(buffers.seq_lens),
        positions=view(buffers.positions),
        token_ids=view(buffers.token_ids),
        slot_mappings=tuple(view(array) for array in buffers.slot_mappings),
        tree_mask=None if buffers.tree_mask is None else view(buffers.tree_mask),
    )
