"""Random paged batches for the attention tests, and the error bounds of every result."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pagecore import ops
from tests.reference import attention as reference

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# Relative Frobenius error of the whole output, and of the worst (token, head) row.
OUTPUT_BOUNDS = {"float32": (2e-6, 1e-5), "float16": (1e-3, 3e-3), "bfloat16": (6e-3, 2e-2)}
LAYOUTS = ("NHD", "HND", "blockwise", "interleaved", "padded", "reversed")


def empty_cache(layout: str, shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> Array:
    """Return a cache of NaN, or of 127, logically ``[num_blocks, block_size, heads, dim]``, in one of LAYOUTS."""
    blocks, tokens, heads, dim = shape
    nan = np.asarray(127 if dtype.kind in "iu" else np.nan, dtype)
    if layout == "NHD":
        return np.full(shape, nan)
    if layout == "HND":
        return np.full((blocks, heads, tokens, dim), nan).transpose(0, 2, 1, 3)
    if layout == "blockwise":  # the second of three layers in a block
        return np.full((blocks, 3, tokens, heads, dim), nan)[:, 1]
    if layout == "interleaved":  # keys and values of a token side by side
        return np.full((blocks, tokens, 2, heads, dim), nan)[:, :, 1]
    if layout == "padded":
        return np.full((blocks, tokens, heads, dim + 3), nan)[..., 1 : dim + 1]
    assert layout == "reversed"
    return np.full(shape, nan)[::-1, ::-1, ::-1]


@dataclass
class Case:
    """The arguments of one call of paged_attention."""

    query: Array
    key_cache: Array
    value_cache: Array
    block_table: Array
    seq_lens: Array
    options: dict[str, Any] = field(default_factory=dict)
    known: tuple[Array, Array, Array | None] | None = None  # expectations of arrays that do not change

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array, Array]:
        return self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens

    def run(self, **more: Any) -> Any:
        return ops.paged_attention(*self.arrays, **self.options, **more)

    def expect(self) -> tuple[Array, Array]:
        return reference.paged_attention(*self.arrays, **self.options)

    def magnitude(self) -> Array | None:
        """Make all values positive: in narrow heads a sum of random values can be near 0."""
        if self.value_cache.shape[3] >= 16:
            return None
        query, key_cache, value_cache, *rest = self.arrays
        return reference.paged_attention(query, key_cache, np.abs(value_cache), *rest, **self.options)[0]

    def check(self, **more: Any) -> None:
        """Run with a poisoned output, and compare output and lse with the oracle."""
        out = np.full((*self.query.shape[:2], self.value_cache.shape[3]), np.nan, self.query.dtype)
        result, lse = self.run(out=out, return_lse=True, **more)
        assert result is out
        expected, expected_lse, magnitude = self.known or (*self.expect(), self.magnitude())
        assert_output_close(out, expected, magnitude)
        assert_lse_close(lse, expected_lse, str(self.query.dtype))


def among(case: Case, sequences: np.ndarray[Any, Any]) -> tuple[Case, np.ndarray[Any, Any]]:
    """Return the given sequences as a separate batch, and the indices of their rows in the query."""
    cu = case.options.get("cu_query_lens", np.arange(len(case.seq_lens) + 1))
    rows = np.concatenate([np.arange(cu[i], cu[i + 1]) for i in sequences])
    options = dict(case.options)
    if "cu_query_lens" in options:
        options["cu_query_lens"] = np.concatenate([[0], np.cumsum(np.diff(cu)[sequences])])
    table, lens = case.block_table[sequences], case.seq_lens[sequences]
    return Case(case.query[rows], case.key_cache, case.value_cache, table, lens, options), rows


def assert_output_close(out: Array, expected: Array, magnitude: Array | None = None) -> None:
    """Check OUTPUT_BOUNDS for the dtype of the output; rows without keys must be exactly 0.

    Errors are relative to `expected`, or to `magnitude` where the caller knows that sums cancel.
    """
    assert out.shape == expected.shape
    whole, worst = OUTPUT_BOUNDS[str(out.dtype)]
    got = out.astype(np.float64)
    assert np.isfinite(got).all(), f"{np.count_nonzero(~np.isfinite(got))} of {got.size} outputs are not finite"
    # Below the smallest normal number of the dtype the rounding error is absolute: half of the smallest subnormal.
    rounding = np.minimum(np.abs(got - expected), float(ml_dtypes.finfo(out.dtype).smallest_subnormal) / 2)
    error = np.linalg.norm(np.abs(got - expected) - rounding, axis=-1)
    size = np.linalg.norm(expected if magnitude is None else magnitude, axis=-1)
    assert (got[size == 0] == 0).all()
    relative = error[size > 0] / size[size > 0]
    assert relative.max(initial=0.0) <= worst, f"worst row is off by {relative.max():.3g}, the bound is {worst:.3g}"
    total = np.linalg.norm(error) / max(np.linalg.norm(size), np.finfo(np.float64).tiny)
    assert total <= whole, f"the output is off by {total:.3g}, the bound is {whole:.3g}"


def assert_lse_close(lse: Array, expected: Array, dtype: str) -> None:
    assert lse.dtype == np.float32
    assert lse.shape == expected.shape
    nothing = np.isneginf(expected)
    assert np.isneginf(lse[nothing]).all()
    got, want = lse[~nothing].astype(np.float64), expected[~nothing]
    bound = 1e-5 * np.maximum(1.0, np.abs(want)) if dtype == "float32" else np.full_like(want, 1e-3)
    assert (np.abs(got - want) <= bound).all(), f"lse is off by {np.abs(got - want).max():.3g}"


@dataclass(frozen=True)
class Shape:
    """Parameters of make_case: numbers of heads, dims, block size, dtypes, layout, lengths."""

    seq_lens: Sequence[int] = (37, 5)
    query_lens: Sequence[int] | None = None
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    block_size: int = 16
    query_dtype: str = "float32"
    cache_dtype: str = "float32"
    layout: str = "NHD"
    index_dtype: str = "int32"
    padding: int = 0  # rows of the query past the last sequence
    shuffle_rows: bool = False  # a table with more rows than the batch, in another order


NUMBERS = 1 << 21


@functools.cache
def _numbers(dtype: np.dtype[Any]) -> Array:
    return np.random.default_rng(0).standard_normal(NUMBERS).astype(dtype)


def random_numbers(rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return a random part of one array of normally distributed numbers, which is cheaper than numbers of its own."""
    size = math.prod(shape)
    if size > NUMBERS // 2:
        return rng.standard_normal(shape).astype(dtype)
    first = int(rng.integers(NUMBERS // 2))  # of any size: more rows begin with the same numbers
    return _numbers(dtype)[first : first + size].reshape(shape)


def fill(cache: Array, blocks: Array, wanted: Array, rng: np.random.Generator) -> None:
    """Write random numbers to the slots of the selected tokens of a sequence."""
    j = np.flatnonzero(wanted)
    numbers = random_numbers(rng, (j.size, *cache.shape[2:]), cache.dtype)
    cache[blocks[j // cache.shape[1]], j % cache.shape[1]] = numbers


def make_case(shape: Shape | None = None, *, seed: int = 0, **options: Any) -> Case:
    """Return a batch with NaN in slots that no query attends to, and garbage in table entries without other slots."""
    shape = shape or Shape()
    rng = np.random.default_rng(seed)
    lens = list(shape.seq_lens)
    query_lens = [1] * len(lens) if shape.query_lens is None else list(shape.query_lens)
    width = max([-(-n // shape.block_size) for n in lens], default=0) + 1
    num_blocks = sum(-(-n // shape.block_size) for n in lens) + 4
    cache_dtype = DTYPES[shape.cache_dtype]
    key_cache = empty_cache(shape.layout, (num_blocks, shape.block_size, shape.heads[1], shape.dims[0]), cache_dtype)
    value_cache = empty_cache(shape.layout, (num_blocks, shape.block_size, shape.heads[1], shape.dims[1]), cache_dtype)

    table_rows = np.arange(len(lens))
    if shape.shuffle_rows:
        table_rows = rng.permutation(len(lens) + 3)[: len(lens)]
        options["rows"] = table_rows.astype(shape.index_dtype)
    table = np.where(rng.random((len(lens) + 3 * shape.shuffle_rows, width)) < 0.5, -1, 2**31 - 1)
    free = iter(rng.permutation(np.arange(1, num_blocks)))
    kinds = {name: options[name] for name in ("causal", "window", "chunk", "sink_tokens") if name in options}
    for row, seq_len, query_len in zip(table_rows, lens, query_lens, strict=True):
        # A key that only the mask hides may be read; a key that causality or the window hides from every query may not.
        wanted = reference.allowed(query_len, seq_len, **kinds).any(axis=0)
        for block in np.unique(np.flatnonzero(wanted) // shape.block_size):
            table[row, block] = next(free)
        fill(key_cache, table[row], wanted, rng)
        fill(value_cache, table[row], wanted, rng)

    if shape.query_lens is not None:
        options["cu_query_lens"] = np.concatenate([[0], np.cumsum(query_lens)]).astype(shape.index_dtype)
    num_tokens = sum(query_lens) + shape.padding
    query_dtype = DTYPES[shape.query_dtype]
    query = random_numbers(rng, (num_tokens, shape.heads[0], shape.dims[0]), query_dtype).copy()
    query[sum(query_lens) :] = np.nan
    return Case(
        query,
        key_cache,
        value_cache,
        table.astype(shape.index_dtype),
        np.asarray(lens, dtype=shape.index_dtype),
        options,
    )


def check_case(shape: Shape, **options: Any) -> None:
    """Check a case; the case and the results of its oracle are those of the last calls with equal arguments.

    A test that runs on every instruction set makes it once.
    """
    _shared(pickle.dumps((shape, options))).check()


@functools.lru_cache(8)
def _shared(call: bytes) -> Case:
    shape, options = pickle.loads(call)
    case = make_case(shape, **options)
    for array in case.arrays:
        array.flags.writeable = False
    case.known = *case.expect(), case.magnitude()
    return case


def random_mask(shape: Shape, seed: int = 1, density: float = 0.6) -> Array:
    """Return a flat mask for the batch, with one row without keys in each sequence."""
    rng = np.random.default_rng(seed)
    query_lens = [1] * len(shape.seq_lens) if shape.query_lens is None else shape.query_lens
    parts = []
    for query_len, seq_len in zip(query_lens, shape.seq_lens, strict=True):
        part = rng.random((query_len, seq_len)) < density
        part[query_len // 2 : query_len // 2 + 1] = False
        parts.append(part.reshape(-1))
    return np.concatenate([np.zeros(0, dtype=bool), *parts])


def snapshot(*arrays: Array) -> Callable[[], bool]:
    """Save the bytes of arrays; return a function that is True if none has changed."""
    before = [a.tobytes() for a in arrays]
    return lambda: all(a.tobytes() == b for a, b in zip(arrays, before, strict=True))
