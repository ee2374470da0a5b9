"""Recurrences of Mamba-2 and gated delta layers, token by token and chunk by chunk, batched over sequences.

Each head has a state S ``[value_dim, key_dim]``. A token decays it by a = exp(log_decay), adds the product of an update
u ``[value_dim]`` and its key k, and reads it with its query q:

    S_t = a S_(t-1) + u k^T        o = S_t q
    Mamba-2       u = b v                          (Dao and Gu, 2024)
    gated delta   u = b (v - a S_(t-1) k)          (Yang et al., 2024)

where b is the strength of the token. A token with log_decay 0 and strength 0 leaves the state unchanged, so that such
tokens pad sequences of unequal length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["HeadTokens", "chunk_form", "step_form"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class HeadTokens:
    """Tokens of a recurrence, T for each of n sequences.

    Attributes
    ----------
    query, key : array [n, H, T, key_dim]
    value : array [n, H, T, value_dim]
    log_decay, strength : array [n, H, T]
        `log_decay` is not positive.
    """

    query: Array
    key: Array
    value: Array
    log_decay: Array
    strength: Array

    def part(self, start: int, stop: int) -> HeadTokens:
        """Return tokens `start` to `stop` of every sequence; they alias these."""
        parts = (array[:, :, start:stop] for array in (self.query, self.key, self.value, self.log_decay, self.strength))
        return HeadTokens(*parts)


def step_form(state: Array, tokens: HeadTokens, *, is_delta: bool) -> tuple[Array, Array]:
    """Return the states ``[n, H, value_dim, key_dim]`` after one token and its outputs ``[n, H, 1, value_dim]``."""
    decayed = np.exp(tokens.log_decay)[..., None] * state
    value = tokens.value
    if is_delta:
        value = value - tokens.key @ decayed.swapaxes(-1, -2)
    update = tokens.strength[..., None] * value
    after = decayed + update.swapaxes(-1, -2) * tokens.key
    return after, tokens.query @ after.swapaxes(-1, -2)


def chunk_form(state: Array, tokens: HeadTokens, *, is_delta: bool) -> tuple[Array, Array]:
    """Return the states after T tokens and the outputs ``[n, H, T, value_dim]`` by products of matrices.

    The updates of a chunk depend on each other in the delta rule only, through a triangular system.
    """
    length = tokens.key.shape[2]
    total = np.cumsum(tokens.log_decay, axis=-1)
    # Decay of an update between its token (columns) and a later one (rows).
    between = np.exp(np.where(np.tri(length, dtype=bool), total[..., :, None] - total[..., None, :], -np.inf))
    before = np.exp(total)[..., None]
    value, strength = tokens.value, tokens.strength[..., None]
    if is_delta:
        earlier = np.tri(length, k=-1, dtype=state.dtype)
        mixed = strength * between * earlier * (tokens.key @ tokens.key.swapaxes(-1, -2))
        expected = before * (tokens.key @ state.swapaxes(-1, -2))
        update = np.linalg.solve(np.eye(length, dtype=state.dtype) + mixed, strength * (value - expected))
    else:
        update = strength * value
    output = before * (tokens.query @ state.swapaxes(-1, -2))
    output += (between * (tokens.query @ tokens.key.swapaxes(-1, -2))) @ update
    left = between[..., -1, :, None]
    after = before[..., -1:, :] * state + (left * update).swapaxes(-1, -2) @ tokens.key
    return after, output
