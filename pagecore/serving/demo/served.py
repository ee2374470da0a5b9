"""Recurrent layers of a model over the states of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagecore.serving.demo.recurrent import RecurrentInputs
from pagecore.serving.demo.states import StepStates, advance
from pagecore.storage import StateSpec

if TYPE_CHECKING:
    from pagecore.cache import Batch, PagedKVCache
    from pagecore.serving.demo.model import Model

__all__ = ["ServedStates"]

Array = NDArray[Any]


class ServedStates:
    """The recurrent layers of a model, computed step by step over the state slots of a cache.

    Attributes
    ----------
    checkpoints : int
        Checkpoints that the steps so far have written.
    """

    def __init__(self, model: Model, cache: PagedKVCache) -> None:
        self.checkpoints = 0
        self._model = model
        specs = {layer: cache.spec(layer) for layer in model.recurrent}
        self._chunk = {layer: spec.chunk for layer, spec in specs.items() if isinstance(spec, StateSpec)}
        self._planes = {
            layer: (cache.plane("conv", layer).numpy(), cache.plane("temporal", layer).numpy())
            for layer in model.recurrent
        }
        self._slots: StepStates | None = None

    def begin(self, batch: Batch) -> None:
        """Take the slots of a step; nothing happens for a model without recurrent layers."""
        if not self._planes:
            return
        self._slots = StepStates.of(
            np.asarray(batch.cu_query_lens)[: batch.num_sequences + 1],
            np.asarray(batch.positions),
            batch.state_read,
            batch.state_write,
            batch.checkpoint_write,
            batch.checkpoint_lengths,
        )
        self.checkpoints += int(np.count_nonzero(self._slots.cuts))

    def recur(self, layer: int, inputs: RecurrentInputs) -> Array:
        """Compute one layer of the step, and write its states."""
        assert self._slots is not None
        return advance(self._model.recurrent[layer], inputs, *self._planes[layer], self._slots, self._chunk[layer])
