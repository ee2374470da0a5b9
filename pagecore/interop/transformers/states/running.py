"""The running states of a batch, and their checkpoints in the slots of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagecore.errors import UnsupportedOption
from pagecore.interop.transformers.inputs.arguments import Mask
from pagecore.interop.transformers.states.layers import Segment, StateTensors

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Checkpoints:
    """Slots of the states of a step, ``[rows]`` each.

    Attributes
    ----------
    read : Integers
        Slot of the state before the step.
    lengths, slots : Integers
        Number of tokens after which a row keeps a checkpoint in the step, and its slot; slot 0 for a row without.
    """

    read: Integers
    lengths: Integers
    slots: Integers


def plan_segments(
    before: Integers, is_token: Mask, checkpoints: Checkpoints | None, device: torch.device
) -> list[Segment]:
    """Return the segments of a pass: they end where a row keeps a checkpoint, and after the last column.

    Rows have `before` tokens ``[rows]`` before the columns `is_token` ``[rows, columns]``.
    """
    columns = is_token.shape[1]
    counts = before[:, None] + is_token.cumsum(axis=1)
    at = np.zeros(len(is_token), np.int64)  # end of the column after which a row keeps a checkpoint; 0 if it keeps none
    if checkpoints is not None:
        reached = (counts == checkpoints.lengths[:, None]) & is_token & (checkpoints.slots > 0)[:, None]
        at = np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, 0)
    segments: list[Segment] = []
    for end in sorted({*at[at > 0].tolist(), columns}):
        rows = _index(at == end, device)
        slots = None
        if rows is not None and checkpoints is not None:
            slots = torch.from_numpy(checkpoints.slots[at == end]).to(device)
        segments.append(Segment(end, _index(counts[:, end - 1] == 0, device), rows, slots))
    return segments


def refuse_padding_after_tokens(before: Integers, is_token: Mask) -> None:
    """Raise UnsupportedOption if a row has padding after tokens, which would become a part of its state."""
    is_late = ~is_token & ((before[:, None] + is_token.cumsum(axis=1)) > 0)
    if is_late.any():
        row, column = np.unravel_index(int(is_late.argmax()), is_late.shape)
        raise UnsupportedOption(
            f"column {column} of row {row} is padding after tokens, and the recurrent layers of the model would add it "
            "to their states; pad prompts on the left (padding_side='left')"
        )


class RunningStates:
    """The states of all recurrent layers, one row of their tensors for each row of the batch.

    States: empty -> running (the first pass) -> empty (`clear`); running or empty -> stale (`mark_stale`) -> running
    (the next pass). Stale states are read from the slots of their checkpoints when a pass begins.

    Parameters
    ----------
    layers : mapping
        Recurrent layers of ``cache.layers``, by index; empty for a model without.
    device : torch.device
        Device of the model.
    """

    def __init__(self, layers: Mapping[int, StateTensors], device: torch.device) -> None:
        self._layers = dict(layers)
        self._device = device
        self._is_stale = False

    def __bool__(self) -> bool:
        return bool(self._layers)

    @property
    def num_rows(self) -> int:
        """Number of rows of the running states; 0 if there are none."""
        return next((layer.num_rows for layer in self._layers.values()), 0)

    def clear(self) -> None:
        """Drop the states of all rows."""
        self._is_stale = False
        for layer in self._layers.values():
            layer.clear()

    def mark_stale(self) -> None:
        """Let all rows continue from their checkpoints."""
        self.clear()
        self._is_stale = True

    def select(self, parents: Listed[int]) -> None:
        """Replace row i by row ``parents[i]``."""
        if self._layers and list(parents) != list(range(self.num_rows)):
            rows = torch.as_tensor(list(parents), device=self._device)
            for layer in self._layers.values():
                layer.select(rows)

    def start(self, before: Integers, is_token: Mask, checkpoints: Checkpoints | None) -> None:
        """Begin a pass over the columns `is_token` ``[rows, columns]``; rows have `before` tokens ``[rows]``."""
        segments = plan_segments(before, is_token, checkpoints, self._device)
        if self._is_stale and checkpoints is not None:
            slots = torch.from_numpy(checkpoints.read).to(self._device)
            for layer in self._layers.values():
                layer.load(slots)
        self._is_stale = False
        for layer in self._layers.values():
            layer.start(segments)

    def stop(self) -> None:
        """End the forward pass."""
        for layer in self._layers.values():
            layer.stop()

    def layers_not_run(self) -> list[int]:
        """Return the recurrent layers that the forward pass has not called."""
        return [index for index, layer in self._layers.items() if not layer.has_run]


def _index(mask: Mask, device: torch.device) -> torch.Tensor | None:
    """Return the indices of True, or None if there are none."""
    return torch.from_numpy(np.flatnonzero(mask)).to(device) if mask.any() else None
