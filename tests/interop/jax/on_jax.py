"""Cases of the attention tests and random writes as arrays of JAX; the module jax comes from the fixture of a test."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ops.cases import DTYPES, Array, Case, assert_lse_close, assert_output_close

# Options of paged_attention that are arrays, and therefore arguments of a jitted function.
ARRAY_OPTIONS = ("rows", "cu_query_lens", "sinks", "alibi_slopes", "mask")


def laid_out(array: Array, layout: str) -> Array:
    """Return a contiguous copy of a cache with its axes in the order of `layout`."""
    return np.ascontiguousarray(array.swapaxes(1, 2) if layout == "HND" else array)


def attend(jax: Any, interop: Any, case: Case, layout: str = "NHD", **more: Any) -> tuple[Array, Array]:
    """Return output and lse of a jitted call in which every array is traced."""
    arrays = {name: case.options[name] for name in ARRAY_OPTIONS if name in case.options}
    static = {name: value for name, value in case.options.items() if name not in arrays}
    caches = [laid_out(cache, layout) for cache in (case.key_cache, case.value_cache)]

    @jax.jit
    def call(operands: Any, options: Any) -> Any:
        return interop.paged_attention(*operands, **options, **static, layout=layout, return_lse=True, **more)

    out, lse = call((case.query, *caches, case.block_table, case.seq_lens), arrays)
    return np.asarray(out), np.asarray(lse)


def check(jax: Any, interop: Any, case: Case, layout: str = "NHD") -> None:
    """Compare a jitted call with the float64 oracle, and bit for bit with a call outside of JAX."""
    out, lse = attend(jax, interop, case, layout)
    expected = case.expect()
    assert_output_close(out, expected[0], case.magnitude())
    assert_lse_close(lse, expected[1], str(case.query.dtype))
    plain, plain_lse = case.run(return_lse=True)
    assert out.tobytes() == plain.tobytes()
    assert lse.tobytes() == plain_lse.tobytes()


def random_write(
    seed: int = 0, rows_dtype: str = "float32", cache_dtype: str = "float32", num_tokens: int = 9
) -> tuple[list[Array], list[Array], Array]:
    """Return (key, value), (key_cache, value_cache) of 6 blocks of 4 tokens, and slots, two of them negative."""
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal((num_tokens, 2, dim)).astype(DTYPES[rows_dtype]) for dim in (16, 24)]
    caches = [rng.standard_normal((6, 4, 2, dim)).astype(DTYPES[cache_dtype]) for dim in (16, 24)]
    slots = rng.permutation(24)[:num_tokens].astype(np.int32)
    slots[[1, num_tokens - 1]] = -1
    return rows, caches, slots


def written(rows: list[Array], caches: list[Array], slots: Array, **scales: Any) -> list[Array]:
    """Return copies of the caches after `pagecore.write_kv`."""
    from pagecore import write_kv

    after = [cache.copy() for cache in caches]
    write_kv(*rows, *after, slots, **scales)
    return after


def same(got: Any, expected: Any) -> bool:
    """Return True if the arrays have equal dtypes and bits."""
    pairs = list(zip(got, expected, strict=True))
    return all(str(a.dtype) == str(b.dtype) and np.asarray(a).tobytes() == b.tobytes() for a, b in pairs)
