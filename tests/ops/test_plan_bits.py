"""With batch_invariant the bits of a row do not depend on tiles, splits, blocks or other rows."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from pagecore.ops import paged_attention, plan_attention
from tests.ops.cases import DTYPES
from tests.ops.instruction_sets import on_every_isa

pytestmark = pytest.mark.slow

BLOCK, KV_HEADS, DIM = 16, 2, 96


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    return DTYPES[request.param]


def make_cache(rng, length, block=BLOCK, dim=DIM, dtype=np.float32):
    """Return a sequence in shuffled blocks: caches, its row of the block table, and the dense keys and values."""
    keys, values = rng.standard_normal((2, length, KV_HEADS, dim), np.float32).astype(dtype)
    width = -(-length // block)
    table = (rng.permutation(width + 2)[:width] + 1).astype(np.int32)
    caches = np.full((2, width + 4, block, KV_HEADS, dim), np.nan, dtype)
    position = np.arange(length)
    for cache, plain in zip(caches, (keys, values), strict=True):
        cache[table[position // block], position % block] = plain
    return caches, table[None], (keys, values)


@functools.cache
def make_prompt(seed, length, count, dtype):
    """Return the last `count` queries of a sequence, its caches and its row of the block table, all read-only."""
    rng = np.random.default_rng(seed)
    caches, table, _ = make_cache(rng, length, dtype=dtype)
    query = rng.standard_normal((count, 3 * KV_HEADS, DIM), np.float32).astype(dtype)
    for array in (query, caches, table):
        array.flags.writeable = False
    return query, caches, table


def invariant_plan(count, length, **options):
    """Attend from the last `count` rows of one sequence."""
    return plan_attention(
        [0, count],
        [length],
        num_query_heads=3 * KV_HEADS,
        num_kv_heads=KV_HEADS,
        window=options.get("window"),
        batch_invariant=True,
    )


def attend(query, caches, table, length, **options):
    """Attend from all rows of one sequence in one call; return output and lse as bytes."""
    plan = invariant_plan(len(query), length, **options)
    out, lse = paged_attention(
        query, *caches, table, [length], cu_query_lens=[0, len(query)], return_lse=True, plan=plan, **options
    )
    return out.view(np.uint16), lse.view(np.uint32)


OPTIONS = {
    "plain": {},
    "window": {"window": 1700},
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi_slopes": np.geomspace(0.5, 0.01, 3 * KV_HEADS).astype(np.float32)},
    "sinks": {"sinks": np.linspace(-1, 1, 3 * KV_HEADS, dtype=np.float32)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@on_every_isa
def test_a_row_has_the_same_bits_alone_and_in_a_prompt(options, dtype):
    length, count = 2500, 70
    query, caches, table = make_prompt(1, length, count, dtype)
    out, lse = attend(query, caches, table, length, **options)
    for row in (0, 1, 31, count - 1):
        alone, alone_lse = attend(query[row : row + 1], caches, table, length - (count - 1 - row), **options)
        np.testing.assert_array_equal(alone[0], out[row])
        np.testing.assert_array_equal(alone_lse[0], lse[row])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@on_every_isa
def test_fixed_splits_have_the_bits_of_none(options, dtype):
    """A long prompt is not split, but its last rows alone are."""
    length, long = 5000, 150
    query, caches, table = make_prompt(2, length, long, dtype)
    assert invariant_plan(long, length, **options).num_partial_rows == 0
    whole = attend(query, caches, table, length, **options)
    for count in (1, 5):
        assert invariant_plan(count, length, **options).num_partial_rows > 0
        for split, all_rows in zip(attend(query[-count:], caches, table, length, **options), whole, strict=True):
            np.testing.assert_array_equal(split, all_rows[-count:])


@pytest.mark.parametrize("block", [1, 3, 64, 100])
@on_every_isa
def test_the_block_size_changes_no_bits(block, dtype):
    query = np.random.default_rng(3).standard_normal((20, 3 * KV_HEADS, DIM), np.float32).astype(dtype)
    results = []
    for size in (BLOCK, block):
        caches, table, _ = make_cache(np.random.default_rng(4), 333, size, dtype=dtype)
        results.append(attend(query, caches, table, 333))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@on_every_isa
def test_a_nan_value_reaches_only_the_rows_that_attend_to_it():
    rng = np.random.default_rng(5)
    length = 200
    caches, table, _ = make_cache(rng, length)
    query = rng.standard_normal((40, 3 * KV_HEADS, DIM), np.float32)
    clean, _ = attend(query, caches, table, length)
    poisoned = 181  # the queries are positions 160 to 199; rows of 20 and 21 share a register block
    caches[1][table[0, poisoned // BLOCK], poisoned % BLOCK] = np.nan
    out, _ = attend(query, caches, table, length)
    np.testing.assert_array_equal(out[:21], clean[:21])
    assert np.isnan(out[21:].view(np.float32)).all()


@on_every_isa
def test_a_masked_nan_reaches_no_row():
    rng = np.random.default_rng(6)
    length, count = 150, 3
    caches, table, _ = make_cache(rng, length)
    query = rng.standard_normal((count, 3 * KV_HEADS, DIM), np.float32)
    mask = rng.random((count, length)) < 0.5
    mask[:, 64:96] = False  # blocks that no query attends to need no valid block id
    nowhere = table.copy()
    nowhere[0, 4:6] = [-1, 2**31 - 1]
    clean, clean_lse = attend(query, caches, table, length, mask=mask.ravel())
    for position in np.flatnonzero(~mask.any(axis=0)):
        caches[:, table[0, position // BLOCK], position % BLOCK] = np.nan
    only_second = mask[1] & ~mask[0] & ~mask[2]
    position = int(np.flatnonzero(only_second)[0])
    caches[:, table[0, position // BLOCK], position % BLOCK] = np.inf
    out, lse = attend(query, caches, nowhere, length, mask=mask.ravel())
    np.testing.assert_array_equal(out[[0, 2]], clean[[0, 2]])
    np.testing.assert_array_equal(lse[[0, 2]], clean_lse[[0, 2]])
