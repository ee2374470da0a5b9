"""The arrays of a step as tensors, on the host or on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from pagecore.arrays import Tensor, as_tensor
from pagecore.index import StateBuffers, StepBuffers


@dataclass(frozen=True)
class StateArrays:
    """The state slots of a batch in one memory, on the host or on a device; see `Batch` for shapes and dtypes."""

    state_read: Tensor
    state_write: Tensor
    checkpoint_write: Tensor
    checkpoint_lengths: Tensor
    draft_read: Tensor | None
    draft_write: Tensor | None


@dataclass(frozen=True)
class StepArrays:
    """The arrays of a batch in one memory, on the host or on a device; see `Batch` for shapes and dtypes.

    `slot_mappings` has one array for each group of layers, as `BatchGroup.slot_mapping`. `states` is None in a cache
    without layers that keep states, and `sealed_lens` in one without sealed blocks.
    """

    rows: Tensor
    query_lens: Tensor
    cu_query_lens: Tensor
    seq_lens: Tensor
    positions: Tensor
    token_ids: Tensor
    slot_mappings: tuple[Tensor, ...]
    tree_mask: Tensor | None = None
    states: StateArrays | None = None
    sealed_lens: Tensor | None = None


def arrays_of(
    buffers: StepBuffers,
    view: Callable[[NDArray[Any]], Tensor] = as_tensor,
    states: StateBuffers | None = None,
    state_view: Callable[[NDArray[Any]], Tensor] = as_tensor,
) -> StepArrays:
    """Return the arrays of a step as tensors; `view` makes a tensor of each, `state_view` of those of the states."""
    return StepArrays(
        rows=view(buffers.rows),
        query_lens=view(buffers.query_lens),
        cu_query_lens=view(buffers.cu_query_lens),
        seq_lens=view(buffers.seq_lens),
        positions=view(buffers.positions),
        token_ids=view(buffers.token_ids),
        slot_mappings=tuple(view(array) for array in buffers.slot_mappings),
        tree_mask=None if buffers.tree_mask is None else view(buffers.tree_mask),
        states=None if states is None else _state_arrays(states, state_view),
        sealed_lens=None if buffers.sealed_lens is None else view(buffers.sealed_lens),
    )


def _state_arrays(states: StateBuffers, view: Callable[[NDArray[Any]], Tensor]) -> StateArrays:
    return StateArrays(
        state_read=view(states.state_read),
        state_write=view(states.state_write),
        checkpoint_write=view(states.checkpoint_write),
        checkpoint_lengths=view(states.checkpoint_lengths),
        draft_read=None if states.draft_read is None else view(states.draft_read),
        draft_write=None if states.draft_write is None else view(states.draft_write),
    )
