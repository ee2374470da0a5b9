"""Gathers and scatters larger than the processor's caches, which use streaming stores of whole lines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagecore import ops
from pagecore.arrays.dtypes.dtype import as_dtype
from tests.ops.block_cases import batch_of, poisoned, random_cache, random_numbers, untouched_beside
from tests.reference import blocks as reference
from tests.thinning import in_turn

pytestmark = pytest.mark.slow


DTYPE_PAIRS = [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")]


@pytest.mark.parametrize(
    ("offset", "layout", "heads", "dtypes"),
    in_turn([0, 4, 16, 60], ["NHD", "HND", "padded"], over=[[(8, 128), (3, 37)], DTYPE_PAIRS]),
    ids=str,
)
def test_large_gathers_are_complete_at_any_address(offset, dtypes, heads, layout):
    """Large enough for streaming stores of whole lines, with rows that start and end inside lines."""
    count = (9 << 20) // (heads[0] * heads[1] * as_dtype(dtypes[1]).itemsize) // 16 * 16 + 16
    table, lens = batch_of([count - 16 - 3, 7, 12], 16, count // 16 + 3, holes=0.02)
    cache = random_cache(layout, (count // 16 + 3, 16, *heads), dtypes[0])
    out, buffer = poisoned((count, *heads), as_dtype(dtypes[1]).numpy, offset=offset)
    ops.gather_blocks(cache, table, lens, out=out)
    expected = np.zeros_like(out)
    gather_by_index(cache, table, lens, expected)
    assert out.tobytes() == expected.tobytes()
    assert untouched_beside(out, buffer)


@pytest.mark.parametrize(("offset", "dtypes", "layout"), in_turn([0, 4, 16], DTYPE_PAIRS, over=[["NHD", "HND"]]))
def test_large_scatters_are_complete_at_any_address(offset, dtypes, layout):
    heads, blocks = (4, 40), 1 + (10 << 20) // (16 * 160 * as_dtype(dtypes[1]).itemsize)
    shape = (blocks, 16, *heads) if layout == "NHD" else (blocks, heads[0], 16, heads[1])
    memory, buffer = poisoned(shape, as_dtype(dtypes[1]).numpy, offset=offset)
    cache = memory if layout == "NHD" else memory.transpose(0, 2, 1, 3)
    table, lens = batch_of([(blocks - 4) * 16 - 5, 30], 16, blocks)
    values = random_numbers((int(lens.sum()), *heads), dtypes[0])
    before = cache.copy()
    ops.scatter_blocks(values, cache, table, lens)
    for expected, got in zip(scatter_by_index(values, before, table, lens), cache, strict=True):
        assert got.tobytes() == expected.tobytes()
    assert untouched_beside(memory, buffer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_sequences_that_share_a_block_the_later_one_stays_when_streamed(dtype):
    """The shorter array ends inside a line, the longer one does not; both begin at the same byte."""
    cache, buffer = poisoned((1200, 16, 3, 100), as_dtype(dtype).numpy)
    cache[...] = 0
    lens = [15 * 16, *[5, 16, 3] * 300, 1000 * 16]
    table = np.zeros((len(lens), 1000), np.int32)
    table[0, :15] = np.arange(1, 16)
    table[1:-1, 0] = np.repeat(np.random.default_rng(0).permutation(np.arange(20, 320)), 3)
    table[-1] = np.arange(199, 1199)
    values = random_numbers((sum(lens), 3, 100), "float32")
    expected = np.zeros_like(cache)
    reference.scatter(values.astype(cache.dtype), expected, table, lens)
    ops.scatter_blocks(values.astype(cache.dtype), cache, table, lens)
    assert cache.tobytes() == expected.tobytes()
    assert untouched_beside(cache, buffer)


def slots_of(table: Any, lens: Any, block_size: int) -> tuple[Any, Any]:
    places = np.concatenate([np.arange(n) for n in lens])
    row = np.repeat(np.arange(len(lens)), lens)
    return table[row, places // block_size], places % block_size


def gather_by_index(cache: Any, table: Any, lens: Any, out: Any) -> None:
    blocks, offsets = slots_of(table, lens, cache.shape[1])
    out[...] = reference.cast(cache[blocks, offsets], out.dtype)
    out[blocks == 0] = 0


def scatter_by_index(values: Any, cache: Any, table: Any, lens: Any) -> Any:
    blocks, offsets = slots_of(table, lens, cache.shape[1])
    cache[blocks, offsets] = reference.cast(values, cache.dtype)
    return cache
