"""Inputs of the attention bench: random contiguous key and value, and copies of them in scattered blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.harness.arrays import DTYPES, bits, huge_empty

# Random numbers are slow to generate, so these are repeated; no two nearby rows begin alike.
NUM_RANDOM = 1_000_003


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences of equal context; a decode step has one query for each."""

    query_heads: int
    kv_heads: int
    dim: int
    sequences: int
    context: int

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def title(self) -> str:
        return f"{self.sequences} x {self.context:,}, {self.query_heads}/{self.kv_heads} x {self.dim}"

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "sequences": self.sequences,
            "context": self.context,
            "query_heads": self.query_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.dim,
        }

    def nbytes(self, dtype: str) -> int:
        """Return the bytes of key and value."""
        return 2 * self.sequences * self.context * self.kv_heads * self.dim * int(DTYPES[dtype].itemsize)

    def query(self, dtype: str, tokens: int) -> np.ndarray:
        """Return random queries ``[tokens, query heads, dim]``."""
        random = np.random.default_rng(1)
        return random.standard_normal((tokens, self.query_heads, self.dim), dtype=np.float32).astype(DTYPES[dtype])


class Load:
    """Contiguous key and value of some sequences: ``[sequences, kv heads, context, dim]``."""

    def __init__(self, shape: Shape, dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
        each = (shape.sequences, shape.kv_heads, shape.context, shape.dim)
        self.key, self.value = huge_empty(each, dtype), huge_empty(each, dtype)
        random = np.random.default_rng(0).standard_normal(NUM_RANDOM, dtype=np.float32).astype(DTYPES[dtype])
        for plane, numbers in ((self.key, random), (self.value, random[::-1])):
            flat = bits(plane).reshape(-1)
            for start in range(0, flat.size, NUM_RANDOM):
                part = flat[start : start + NUM_RANDOM]
                part[:] = bits(numbers)[: part.size]


class Paged:
    """The key and value of a load in scattered blocks.

    Attributes
    ----------
    key_cache, value_cache : array ``[blocks, block size, kv heads, dim]``
        Logical shape. In memory the heads of a block are outside (HND) or inside (NHD) its tokens.
    table : int32 array ``[sequences, blocks a sequence]``
    seq_lens : int32 array ``[sequences]``
    """

    def __init__(self, load: Load, block_size: int = 16, heads: str = "HND") -> None:
        shape = load.shape
        each = shape.context // block_size
        count = shape.sequences * each
        self.table = (1 + np.random.default_rng(0).permutation(count)).astype(np.int32).reshape(shape.sequences, each)
        self.seq_lens = np.full(shape.sequences, shape.context, np.int32)
        inner = (shape.kv_heads, block_size) if heads == "HND" else (block_size, shape.kv_heads)
        logical = []
        for plane in (load.key, load.value):
            memory = huge_empty((count + 1, *inner, shape.dim), load.dtype)
            cache = memory.swapaxes(1, 2) if heads == "HND" else memory
            bits(memory)[0] = 0
            for sequence, blocks in zip(bits(plane), self.table, strict=True):
                bits(memory)[blocks] = _in_blocks(sequence, block_size, heads)
            logical.append(cache)
        self.key_cache, self.value_cache = logical


def _in_blocks(sequence: np.ndarray, block_size: int, heads: str) -> np.ndarray:
    """Return one sequence ``[heads, tokens, dim]`` as blocks, in memory order."""
    blocks = sequence.reshape(sequence.shape[0], -1, block_size, sequence.shape[2])
    return blocks.transpose(1, 0, 2, 3) if heads == "HND" else blocks.transpose(1, 2, 0, 3)
