"""Caches, packed arrays and tables for the tests of gather, scatter and transfer, with the memory around them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from pagecore.arrays.dtypes.dtype import as_dtype
from tests.ops.cases import DTYPES, empty_cache

ANY_DTYPE = ["float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "float8_e4m3fn", "float8_e5m2"]
RANKS = [(), (3,), (2, 5), (4, 1), (1, 4), (2, 2, 3), (2, 1, 2, 2, 3)]


def random_bytes(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Return an array of random bits, including NaN, infinities and subnormal numbers."""
    kind = as_dtype(dtype).numpy
    count = int(np.prod(shape)) * kind.itemsize
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8).view(kind).reshape(shape)


def random_numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


def random_cache(layout: str, shape: tuple[int, int, int, int], dtype: str, seed: int = 0) -> Any:
    cache = empty_cache(layout, shape, DTYPES[dtype])
    cache[...] = random_numbers(shape, dtype, seed)
    return cache


def batch_of(
    lens: Any, block_size: int, num_blocks: int, *, holes: float = 0.0, seed: int = 0, ordered: bool = False
) -> tuple[Any, Any]:
    """Return a table of distinct blocks, with garbage past the length of each sequence, and the lengths."""
    rng = np.random.default_rng(seed)
    needed = [-(-n // block_size) for n in lens]
    table = np.where(rng.random((len(lens), max(needed, default=0) + 1)) < 0.5, -7, 2**31 - 1).astype(np.int32)
    ids = np.arange(1, num_blocks) if ordered else rng.permutation(np.arange(1, num_blocks))
    taken = 0
    for row, count in zip(table, needed, strict=True):
        row[:count] = ids[taken : taken + count]
        row[:count][rng.random(count) < holes] = 0
        taken += count
    return table, np.asarray(lens, np.int32)


def poisoned(shape: tuple[int, ...], dtype: np.dtype[Any], *, offset: int = 0) -> tuple[Any, Any]:
    """Return an array inside a buffer of 0x5a bytes, `offset` bytes past a cache line, and the buffer."""
    count = int(np.prod(shape)) * dtype.itemsize
    buffer = np.full(count + 256 + 64, 0x5A, np.uint8)
    start = -buffer.ctypes.data % 64 + 64 + offset
    return buffer[start : start + count].view(dtype).reshape(shape), buffer


def untouched_beside(array: Any, buffer: Any) -> bool:
    start = array.ctypes.data - buffer.ctypes.data
    return bool((buffer[:start] == 0x5A).all() and (buffer[start + array.nbytes :] == 0x5A).all())


def twin_of(array: Any) -> tuple[Any, Any, Any]:
    """Return the memory under an array, a copy of all of it, and the same view of the copy."""
    memory = array
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    copy = bytearray(memory.tobytes())
    start = array.ctypes.data - memory.ctypes.data
    return memory, copy, np.ndarray(array.shape, array.dtype, copy, start, array.strides)


def shuffled_axes(shape: tuple[int, ...], dtype: np.dtype[Any], draw: Any, rng: np.random.Generator) -> Any:
    """Return an array of whole numbers with any order and direction of axes in memory, with or without gaps."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.integers(1, 2)) for _ in shape]
    array = rng.integers(-100, 100, [shape[axis] * gaps[axis] for axis in order]).astype(dtype)
    array = array.transpose(np.argsort(order))
    return array[tuple(slice(None, None, gap * draw(st.sampled_from([1, -1]))) for gap in gaps)]


def is_independent(pairs: Any, *, one_cache: bool = True) -> bool:
    """Return True if pairs may be copied in any order; with `one_cache`, pairs of one block do not count."""
    some = [(int(source), int(target)) for source, target in pairs if not one_cache or source != target]
    targets = [target for _, target in some]
    meet = one_cache and not {source for source, _ in some}.isdisjoint(targets)
    return len(set(targets)) == len(targets) and not meet


def random_pairs(rng: np.random.Generator, num_blocks: int) -> Any:
    """Return independent pairs [n, 2] of a cache: repeated sources, distinct targets, some pairs of one block."""
    ids = rng.permutation(num_blocks)
    targets = ids[: int(rng.integers(1, num_blocks))]
    pairs = np.stack([rng.choice(ids[len(targets) :], len(targets)), targets], axis=1)
    own = np.repeat(rng.integers(0, num_blocks, int(rng.integers(0, 5))), 2).reshape(-1, 2)
    pairs = np.concatenate([pairs, own])
    rng.shuffle(pairs)
    assert is_independent(pairs)
    return pairs
