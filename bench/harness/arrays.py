"""Arrays of the benches that move bytes: paged caches in both head orders."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import pagecore

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def huge_empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return memory as a pool allocates it: from 4 MiB on, aligned to 2 MiB with huge pages advised."""
    return pagecore.empty(shape, dtype).numpy()


def bits(array: np.ndarray) -> np.ndarray:
    """View an array as unsigned integers, which NumPy copies faster than dtypes that it does not know."""
    return array.view(f"u{array.itemsize}")


def paged_cache(num_blocks: int, block_size: int, num_heads: int, head_dim: int, dtype: str, heads: str) -> np.ndarray:
    """Return zeros, logically [blocks, block size, heads, dim] in either memory order, with all pages touched."""
    by_head = heads == "HND"
    inner = (num_heads, block_size) if by_head else (block_size, num_heads)
    memory = np.empty((num_blocks, *inner, head_dim), DTYPES[dtype])
    memory[...] = 0
    return memory.swapaxes(1, 2) if by_head else memory
