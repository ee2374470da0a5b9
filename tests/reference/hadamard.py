"""Hadamard transforms in float64, by Sylvester's matrices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LARGEST_BLOCK = 256


def block_of(dim: int) -> int:
    """Return the largest power of two that divides a dim, up to 256."""
    block = 1
    while dim % (2 * block) == 0 and block < LARGEST_BLOCK:
        block *= 2
    return block


def sylvester(size: int) -> NDArray[np.float64]:
    """Return the orthonormal matrix of a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


def hadamard(rows: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return each block of the rows [..., D] times its matrix."""
    block = block_of(rows.shape[-1])
    blocks = rows.astype(np.float64).reshape(*rows.shape[:-1], -1, block)
    return (blocks @ sylvester(block)).reshape(rows.shape)


def with_outliers(rows: NDArray[np.generic], every: int = 29, factor: float = 12.0) -> NDArray[np.generic]:
    """Return a copy with large channels, as keys of transformers have them."""
    scaled = rows.copy()
    scaled[..., 3::every] *= np.asarray(factor, rows.dtype)
    return scaled
