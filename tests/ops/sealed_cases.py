"""Attention cases whose older tokens are in sealed blocks, quantised by the plain twin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import pagecore
from pagecore import ops
from tests.ops import kivi_twin as twin
from tests.ops.cases import Array, Case, Shape, assert_lse_close, assert_output_close, make_case, random_numbers
from tests.reference import attention as reference

BITS = {2: "kivi2", 4: "kivi4"}


def empty_sealed(
    num_blocks: int,
    shape: tuple[int, int, int, int],
    bits: tuple[int, int] = (4, 4),
    groups: tuple[int, int] = (16, 32),
    dtype: Any = np.float32,
) -> pagecore.SealedBlocks:
    """Return poisoned sealed blocks for plain caches with blocks of (tokens, heads, key dim, value dim)."""
    size, heads, dim, value_dim = shape
    return pagecore.SealedBlocks(
        key=np.full((num_blocks, heads, size * bits[0] // 32, dim), -1, np.int32),
        value=np.full((num_blocks, size, heads, value_dim * bits[1] // 32), -1, np.int32),
        key_scale=np.full((num_blocks, heads, size // groups[0], 2, dim), np.nan, dtype),
        value_scale=np.full((num_blocks, size, heads, value_dim // groups[1], 2), np.nan, dtype),
    )


@dataclass
class SealedCase:
    """A call with sealed blocks, and the numbers that it must agree with."""

    plain: Case
    sealed: pagecore.SealedBlocks
    key_numbers: Array
    value_numbers: Array

    def run(self, **more: Any) -> Any:
        return ops.paged_attention(*self.plain.arrays, sealed=self.sealed, **self.plain.options, **more)

    def check(self, **more: Any) -> None:
        """Run with a poisoned output, and compare output and lse with float64 over the dequantised numbers."""
        query, _, _, table, lens = self.plain.arrays
        out = np.full((*query.shape[:2], self.value_numbers.shape[3]), np.nan, query.dtype)
        result, lse = self.run(out=out, return_lse=True, **more)
        assert result is out
        arrays = (query, self.key_numbers, self.value_numbers, table, lens)
        expected, expected_lse = reference.paged_attention(*arrays, **self.plain.options)
        assert_output_close(out, expected)
        assert_lse_close(lse, expected_lse, str(query.dtype))


def make_sealed_case(
    shape: Shape,
    bits: tuple[int, int] = (4, 4),
    groups: tuple[int, int] = (16, 32),
    seed: int = 0,
    **options: Any,
) -> SealedCase:
    """Seal random numbers of whole blocks of each sequence, by the twin; the plain caches have NaN in their place."""
    case = make_case(shape, seed=seed, **options)
    rng = np.random.default_rng(seed)
    key, value = case.key_cache, case.value_cache
    size, count = shape.block_size, key.shape[0]
    sealed = empty_sealed(count, (size, key.shape[2], *shape.dims), bits, groups, key.dtype)
    numbers = key.astype(np.float32), value.astype(np.float32)
    table = np.where(rng.random(case.block_table.shape) < 0.5, -1, 2**31 - 1)
    lens = np.zeros(len(shape.seq_lens), np.int64)
    free = iter(rng.permutation(np.arange(1, count)))
    rows = options.get("rows", case.options.get("rows", range(len(lens))))
    for i, (row, length) in enumerate(zip(rows, shape.seq_lens, strict=True)):
        whole = int(rng.integers(0, length // size + 1)) if i else length // size  # all whole blocks of the first
        lens[i] = whole * size
        for j in range(whole):
            block = case.block_table[row, j]
            if not 0 <= block < count:  # no query attends to it
                continue
            table[row, j] = at = next(free)
            for cache in (key, value):
                cache[block] = random_numbers(rng, cache.shape[1:], cache.dtype)
            heads = np.ascontiguousarray(key[block]).swapaxes(0, 1)
            sealed.key[at], sealed.key_scale[at] = twin.quantize(heads, BITS[bits[0]], -2, groups[0])
            sealed.value[at], sealed.value_scale[at] = twin.quantize(value[block], BITS[bits[1]], -1, groups[1])
            read = twin.dequantize(sealed.key[at], BITS[bits[0]], sealed.key_scale[at], -2)
            numbers[0][block] = read.swapaxes(0, 1)
            numbers[1][block] = twin.dequantize(sealed.value[at], BITS[bits[1]], sealed.value_scale[at])
            key[block] = value[block] = np.nan
    dtype = case.block_table.dtype
    return SealedCase(case, sealed._replace(block_table=table.astype(dtype), lens=lens.astype(dtype)), *numbers)


def sealed_among(case: SealedCase, chosen: Array) -> tuple[SealedCase, Array]:
    """Return the chosen sequences, none of which shares a row of the table, as a batch, and their rows of the query."""
    plain, sealed = case.plain, case.sealed
    cu = plain.options.get("cu_query_lens", np.arange(len(plain.seq_lens) + 1))
    rows = np.concatenate([np.arange(cu[i], cu[i + 1]) for i in chosen])
    options = dict(plain.options)
    if "cu_query_lens" in options:
        options["cu_query_lens"] = np.concatenate([[0], np.cumsum(np.diff(cu)[chosen])]).astype(cu.dtype)
    part = replace(
        plain,
        query=plain.query[rows],
        block_table=plain.block_table[chosen],
        seq_lens=plain.seq_lens[chosen],
        options=options,
        known=None,
    )
    sealed = sealed._replace(block_table=sealed.block_table[chosen], lens=sealed.lens[chosen])
    return replace(case, plain=part, sealed=sealed), rows


def sealed_chunks(case: SealedCase, sizes: Iterable[int]) -> Iterator[tuple[SealedCase, slice]]:
    """Yield the queries of a single sequence in chunks, with their rows; its sealed tokens precede all of them."""
    plain, begin = case.plain, 0
    first = plain.seq_lens - len(plain.query)
    for size in sizes:
        rows = slice(begin, begin + size)
        begin += size
        options = plain.options | {"cu_query_lens": np.array([0, size], np.int32)}
        seq_lens = (first + begin).astype(plain.seq_lens.dtype)
        yield replace(case, plain=replace(plain, query=plain.query[rows], seq_lens=seq_lens, options=options)), rows


def keep_sealed(case: SealedCase, sequence: int, length: int) -> SealedCase:
    """Return a case in which a sequence has only its first `length` tokens in sealed blocks.

    The caches have the numbers of the others, rounded to their dtype.
    """
    plain, sealed = case.plain, case.sealed
    size = plain.key_cache.shape[1]
    caches, numbers = (plain.key_cache.copy(), plain.value_cache.copy()), (case.key_numbers, case.value_numbers)
    numbers = tuple(each.copy() for each in numbers)
    for block in plain.block_table[sequence, length // size : sealed.lens[sequence] // size]:
        for cache, each in zip(caches, numbers, strict=True):
            cache[block] = each[block]
            each[block] = cache[block]
    lens = sealed.lens.copy()
    lens[sequence] = length
    plain = replace(plain, key_cache=caches[0], value_cache=caches[1], known=None)
    return SealedCase(plain, sealed._replace(lens=lens), *numbers)
