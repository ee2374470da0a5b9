"""Recurrent layers from scratch: one token after the other, without slots, chunks or batches.

The oracle of the states that the demo serves; it shares no recurrence with `linear`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.serving.demo.recurrent import RecurrentInputs, RecurrentLayer, silu

__all__ = ["recurrence"]


def recurrence(layer: RecurrentLayer, inputs: RecurrentInputs) -> NDArray[Any]:
    """Return the outputs ``[T, heads * value_dim]`` of one whole text, in the dtype of the inputs."""
    sizes, dtype = layer.sizes, inputs.channels.dtype
    window = np.zeros((sizes.kernel, sizes.channels), dtype)
    state = np.zeros((sizes.heads, sizes.value_dim, sizes.key_dim), dtype)
    outputs = np.empty((len(inputs.channels), sizes.width), dtype)
    for token, channels in enumerate(inputs.channels):
        window = np.concatenate([window[1:], channels[None]])
        query, key, value = layer.heads(silu((window * layer.filter.T).sum(axis=0)))
        state = state * np.exp(inputs.log_decay[token])[:, None, None]
        seen = (state * key[:, None]).sum(axis=-1) if layer.is_delta else 0
        update = inputs.strength[token][:, None] * (value - seen)
        state = state + update[:, :, None] * key[:, None]
        read = (state * query[:, None]).sum(axis=-1)
        outputs[token] = layer.skipped(read, value).reshape(-1)
    return outputs
