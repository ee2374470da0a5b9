"""Recurrent layers from scratch: the states one token after the other, without slots, chunks or batches.

The oracle of the states that the demo serves; it shares no recurrence with `linear`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pagecore.serving.demo.recurrent import RecurrentInputs, RecurrentLayer, silu

__all__ = ["recurrence"]


def recurrence(layer: RecurrentLayer, inputs: RecurrentInputs) -> NDArray[Any]:
    """Return the outputs ``[T, heads * value_dim]`` of one whole text, in the dtype of the inputs."""
    sizes, length, dtype = layer.sizes, len(inputs.channels), inputs.channels.dtype
    before = np.zeros((sizes.kernel - 1, sizes.channels), dtype)
    windows = sliding_window_view(np.concatenate([before, inputs.channels]), sizes.kernel, axis=0)
    query, key, value = layer.heads(silu((windows * layer.filter).sum(axis=-1)))
    decay, strength = np.exp(inputs.log_decay), inputs.strength
    state = np.zeros((sizes.heads, sizes.value_dim, sizes.key_dim), dtype)
    read = np.empty_like(value)
    for token in range(length):
        state *= decay[token, :, None, None]
        seen = (state @ key[token, :, :, None])[..., 0] if layer.is_delta else 0
        update = strength[token, :, None] * (value[token] - seen)
        state += update[:, :, None] * key[token, :, None]
        read[token] = (state @ query[token, :, :, None])[..., 0]
    return layer.skipped(read, value).reshape(length, -1)
