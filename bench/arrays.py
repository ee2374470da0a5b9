"""Arrays that the benches of bytes move: paged caches in either order of heads."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def paged_cache(num_blocks: int, block_size: int, num_heads: int, head_dim: int, dtype: str, heads: str) -> np.ndarray:
    """Zeros, logically [blocks, block size, heads, dim] whatever the order in memory; its pages are there already."""
    by_head = heads == "HND"
    inner = (num_heads, block_size) if by_head else (block_size, num_heads)
    memory = np.empty((num_blocks, *inner, head_dim), DTYPES[dtype])
    memory[...] = 0
    return memory.swapaxes(1, 2) if by_head else memory
