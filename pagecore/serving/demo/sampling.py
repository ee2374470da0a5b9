"""Reproducible sampling: the noise is a function of (seed, request, sample, position)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["noise", "scores"]


def noise(seed: int, request: int, sample: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """Return Gumbel noise, float64 `[vocab_size]`: the argmax of logits + noise is a sample from their softmax."""
    return np.random.default_rng((seed, request, sample, position)).gumbel(size=vocab_size)


def scores(
    logits: NDArray[Any], seed: int, request: int, sample: int, position: int, temperature: float
) -> NDArray[np.float64]:
    """Return the scores, float64 `[vocab_size]`, whose argmax is the token at `position`; temperature 0: the logits."""
    wide = logits.astype(np.float64)
    if temperature == 0:
        return wide
    return wide + temperature * noise(seed, request, sample, position, len(wide))
