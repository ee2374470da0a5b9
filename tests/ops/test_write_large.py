"""write_kv with streaming stores and on several threads keeps the promises of small calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import ops
from tests.ops.block_cases import poisoned, twin_of, untouched_beside
from tests.ops.cases import DTYPES, LAYOUTS, empty_cache, random_numbers
from tests.thinning import in_turn

pytestmark = pytest.mark.slow

# Written bytes at which calls begin to use streaming stores, for common L2 sizes; and a larger number.
SIZES = [128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 5 << 20]
HEADS, BLOCK = 4, 16


THREADS = [1, 2, 5]


@pytest.fixture(params=THREADS, ids="{} threads".format)
def _threads(request):
    pagecore.set_num_threads(request.param)
    yield
    pagecore.set_num_threads(None)


def new_rows(count: int, dim: int, dtype: str, offset: int = 0) -> Any:
    """Return random numbers at an address with a given remainder modulo 64."""
    rows, _ = poisoned((count, HEADS, dim), DTYPES[dtype], offset=offset)
    rows[...] = random_numbers(np.random.default_rng(count + dim), rows.shape, np.dtype(np.float32))
    return rows


def runs_of_slots(num_slots: int, count: int, longest: int, seed: int = 0) -> Any:
    """Return every slot once, in runs of up to `longest`, with some that are skipped."""
    rng = np.random.default_rng(seed)
    starts = np.arange(0, num_slots, longest)
    slots = np.concatenate([np.arange(start, min(start + longest, num_slots)) for start in rng.permutation(starts)])
    slots = slots[:count].copy()
    slots[rng.random(slots.size) < 0.03] = -1
    return slots


def write_as_numpy(rows: Any, cache: Any, slots: Any) -> None:
    """Oracle: write the last token of each slot."""
    tokens = np.flatnonzero(slots >= 0)[::-1]
    places, last = np.unique(slots[tokens], return_index=True)
    with np.errstate(over="ignore"):
        cache[places // cache.shape[1], places % cache.shape[1]] = rows[tokens[last]].astype(cache.dtype)


def check(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
    """Write, and compare all memory under the caches."""
    twins = [twin_of(cache) for cache in (key_cache, value_cache)]
    for (_memory, _copy, twin), rows in zip(twins, (key, value), strict=True):
        write_as_numpy(rows, twin, slots)
    ops.write_kv(key, value, key_cache, value_cache, slots)
    for memory, copy, _twin in twins:
        assert memory.tobytes() == bytes(copy)


@pytest.mark.parametrize(
    ("layout", "dtypes", "_threads"),
    in_turn(LAYOUTS, [(a, b) for a in DTYPES for b in DTYPES], over=[THREADS]),
    indirect=["_threads"],
    ids=str,
)
@pytest.mark.usefixtures("_threads")
def test_every_pair_of_dtypes_in_every_layout(layout, dtypes):
    key, value = new_rows(700, 128, dtypes[0]), new_rows(700, 100, dtypes[0], 16)
    caches = [empty_cache(layout, (60, BLOCK, HEADS, dim), DTYPES[dtypes[1]]) for dim in (128, 100)]
    check(key, value, *caches, runs_of_slots(60 * BLOCK, 700, 40))


@pytest.mark.parametrize(
    ("nbytes", "heads", "offset", "_threads", "longest"),
    in_turn(SIZES, ["NHD", "HND"], [0, 16, 2, 62], over=[THREADS, [1, 5, BLOCK]]),
    indirect=["_threads"],
)
@pytest.mark.usefixtures("_threads")
def test_bytes_next_to_the_rows_are_kept_at_every_size(heads, nbytes, offset, longest):
    """Sizes just under, at and over the start of streaming, at addresses inside of lines."""
    dim, dtype = 64, "bfloat16"
    count = nbytes // (2 * HEADS * dim * 2)
    for tokens in (count - 1, count, count + 1):
        blocks = -(-tokens // BLOCK) + 3
        shape = (blocks, BLOCK, HEADS, dim) if heads == "NHD" else (blocks, HEADS, BLOCK, dim)
        made = [poisoned(shape, DTYPES[dtype], offset=offset) for _ in range(2)]
        caches = [cache if heads == "NHD" else cache.swapaxes(1, 2) for cache, _ in made]
        rows = [new_rows(tokens, dim, dtype, shift) for shift in (0, 48)]
        check(*rows, *caches, runs_of_slots(blocks * BLOCK, tokens, longest))
        assert all(untouched_beside(cache, buffer) for cache, buffer in made)


@pytest.mark.parametrize(
    ("dim", "to", "_threads", "heads"),
    in_turn([1, 7, 33, 63, 65, 129, 300], DTYPES, over=[THREADS, ["NHD", "HND"]]),
    indirect=["_threads"],
)
@pytest.mark.usefixtures("_threads")
def test_rows_that_are_not_whole_lines(dim, to, heads):
    count = 3_000_000 // (HEADS * dim * 4) // BLOCK * BLOCK
    rows = [new_rows(count, dim, "float32", offset) for offset in (0, 4)]
    caches = [empty_cache(heads, (count // BLOCK + 2, BLOCK, HEADS, dim), DTYPES[to]) for _ in range(2)]
    check(*rows, *caches, runs_of_slots((count // BLOCK + 2) * BLOCK, count, 11))


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.usefixtures("_threads")
def test_of_equal_slots_the_last_token_wins_on_any_number_of_threads(dim, index_dtype):
    """Each slot is written about twenty times. If two threads shared a slot, either could be last."""
    count = 2_000_000 // (HEADS * dim * 4)
    rows = [new_rows(count, dim, "float32") for _ in range(2)]
    slots = np.random.default_rng(0).integers(-1, count // 20, count).astype(index_dtype)
    for heads in ("NHD", "HND"):
        for to in ("float32", "float16"):
            blocks = count // 20 // 12 + 1
            caches = [empty_cache(heads, (blocks, 12, HEADS, dim), DTYPES[to]) for _ in range(2)]
            check(*rows, *caches, slots)


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.usefixtures("_threads")
def test_scales_divide_head_by_head(to):
    rows = [new_rows(900, 128, "float32") for _ in range(2)]
    scales = np.asarray([0.25, 3.0, 1.0, 7.0], np.float32)
    for heads in ("NHD", "HND"):
        caches = [empty_cache(heads, (60, BLOCK, HEADS, 128), DTYPES[to]) for _ in range(2)]
        expected = [cache.copy() for cache in caches]
        slots = runs_of_slots(60 * BLOCK, 900, 16)
        for cache, new, divisor in zip(expected, rows, (scales[:, None], np.float32(2)), strict=True):
            write_as_numpy(new / divisor, cache, slots)
        ops.write_kv(*rows, *caches, slots, key_scale=scales, value_scale=2.0)
        for cache, want in zip(caches, expected, strict=True):
            assert cache.tobytes() == want.tobytes()


@pytest.mark.parametrize("bad", [960, 2**31 - 1])
@pytest.mark.usefixtures("_threads")
def test_one_bad_slot_leaves_a_large_call_undone(bad):
    rows = [new_rows(900, 128, "float32") for _ in range(2)]
    caches = [empty_cache("NHD", (60, BLOCK, HEADS, 128), DTYPES["float32"]) for _ in range(2)]
    slots = runs_of_slots(60 * BLOCK, 900, 16).astype(np.int32)
    slots[899] = bad
    before = [cache.tobytes() for cache in caches]
    with pytest.raises(pagecore.errors.InvalidBlock, match=rf"\[899\] is {bad}"):
        ops.write_kv(*rows, *caches, slots)
    assert [cache.tobytes() for cache in caches] == before
