"""Layers of ``cache.layers`` with a state: one tensor of the batch for each plane, which the model updates in place."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import cache_utils

from pagecore.errors import UnsupportedOption
from pagecore.interop.transformers.inputs.arguments import CACHE

_Layer: Any = getattr(cache_utils, "LinearAttentionLayer", object)
# Before version 5.21 transformers has other caches for some hybrid models, or layers with other attributes.
SERVED = hasattr(cache_utils.Cache, "get_recurrent_state")


@dataclass(frozen=True)
class Segment:
    """Columns of a forward pass after which rows keep a checkpoint; a recurrent layer computes them in one call.

    Attributes
    ----------
    end : int
        Columns of the pass up to the end of the segment.
    blank : Tensor or None
        Rows without tokens up to there, whose states stay zero; None if there are none.
    rows, slots : Tensor or None
        Rows that keep a checkpoint at `end`, and the slot of each; None if there are none.
    """

    end: int
    blank: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    slots: torch.Tensor | None = None


class StateTensors(_Layer):  # type: ignore[misc]
    """The states of one layer, ``[rows, *shape]`` for each plane, in the batch of the current generation.

    The model reads and updates them as those of transformers' own layer. A layer without tensors has no tokens.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.planes: list[torch.Tensor] = []  # [num_slots, *shape] each: checkpoints, in the order of `tensors`
        self._segments: Listed[Segment] | None = None
        self.has_run = False

    @property
    def segments(self) -> Listed[Segment]:
        """Segments of the forward pass that runs now."""
        if self._segments is None:
            raise UnsupportedOption(
                "a recurrent layer was called with a PagedCache outside of a forward pass of the cache's model; call "
                f"the model with {CACHE}=cache"
            )
        return self._segments

    @property
    def has_state(self) -> bool:
        """True if tokens were computed before."""
        return bool(self.has_previous_state[0])

    @property
    def num_rows(self) -> int:
        """Number of rows; 0 before the first tokens."""
        return len(self.tensors()[0]) if self.tensors() else 0

    def tensors(self) -> list[torch.Tensor]:
        """Return the states, the window of the convolution first."""
        return [each for each in (self.conv_states[0], self.recurrent_states[0]) if each is not None]

    def start(self, segments: Listed[Segment]) -> None:
        """Begin a forward pass."""
        self._segments, self.has_run = segments, False

    def stop(self) -> None:
        """End the forward pass."""
        self._segments = None

    def settle(self, segment: Segment) -> None:
        """Zero rows without tokens, and copy checkpoints to their slots, after a segment was computed."""
        for index, states in enumerate(self.tensors()):
            if segment.blank is not None:
                states[segment.blank] = 0
            if segment.rows is not None:
                self.planes[index][segment.slots] = states[segment.rows]
        self.has_run = True

    def clear(self) -> None:
        """Drop the states of all rows."""
        super().__init__()

    def select(self, rows: torch.Tensor) -> None:
        """Replace row i by row ``rows[i]``."""
        for states in (self.conv_states, self.recurrent_states):
            if states[0] is not None:
                states[0] = states[0].index_select(0, rows.to(states[0].device))

    def load(self, slots: torch.Tensor) -> None:
        """Let row i continue from the state in slot ``slots[i]``: a checkpoint, or zeros."""
        given = [plane.index_select(0, slots) for plane in self.planes]
        self.conv_states[0], self.conv_kernel_size[0] = given[0], given[0].shape[-1]
        self.dtype, self.device = given[0].dtype, given[0].device
        self.is_conv_states_initialized[0] = self.has_previous_state[0] = True
        if len(given) > 1:
            self.recurrent_states[0], self.is_recurrent_states_initialized[0] = given[1], True

    def crop(self, *_: Any) -> NoReturn:
        """Raise UnsupportedOption: `PagedCache.crop` crops all layers together."""
        raise UnsupportedOption("a layer of a PagedCache cannot be cropped alone; call cache.crop()")


class PagedStateLayer(StateTensors):
    """A recurrent layer without attention, such as a gated delta rule or a Mamba layer."""
