"""The cases of the attention tests, and random writes, as arrays of JAX; jax itself comes from the test's fixture."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ops.cases import DTYPES, Array, Case, assert_lse_close, assert_output_close

# Those of paged_attention that are arrays, and so arguments of a jitted function.
ARRAY_OPTIONS = ("rows", "cu_query_lens", "sinks", "alibi_slopes", "mask")


def laid_out(array: Array, layout: str) -> Array:
    """A copy of a cache with its axes in the order of `layout`, in one piece."""
    return np.ascontiguousarray(array.swapaxes(1, 2) if layout == "HND" else array)


def attend(jax: Any, interop: Any, case: Case, layout: str = "NHD", **more: Any) -> tuple[Array, Array]:
    """Output and lse of a jitted call, whose every array is traced."""
    arrays = {name: case.options[name] for name in ARRAY_OPTIONS if name in case.options}
    static = {name: value for name, value in case.options.items() if name not in arrays}
    caches = [laid_out(cache, layout) for cache in (case.key_cache, case.value_cache)]

    @jax.jit
    def call(operands: Any, options: Any) -> Any:
        return interop.paged_attention(*operands, **options, **static, layout=layout, return_lse=True, **more)

    out, lse = call((case.query, *caches, case.block_table, case.seq_lens), arrays)
    return np.asarray(out), np.asarray(lse)


def check(jax: Any, interop: Any, case: Case, layout: str = "NHD") -> None:
    """Compares a jitted call with the oracle, and to the bit with a call outside of JAX."""
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
    """(key, value), (key_cache, value_cache) and slots of 6 blocks of 4 tokens, two of them skipped."""
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal((num_tokens, 2, dim)).astype(DTYPES[rows_dtype]) for dim in (16, 24)]
    caches = [rng.standard_normal((6, 4, 2, dim)).astype(DTYPES[cache_dtype]) for dim in (16, 24)]
    slots = rng.permutation(24)[:num_tokens].astype(np.int32)
    slots[[1, num_tokens - 1]] = -1
    return rows, caches, slots


def written(rows: list[Array], caches: list[Array], slots: Array, **scales: Any) -> list[Array]:
    """What the caches hold after `pagecore.write_kv`."""
    from pagecore import write_kv

    after = [cache.copy() for cache in caches]
    write_kv(*rows, *after, slots, **scales)
    return after


def same(got: Any, expected: Any) -> bool:
    """Whether arrays have the same dtypes and bits."""
    pairs = list(zip(got, expected, strict=True))
    return all(str(a.dtype) == str(b.dtype) and np.asarray(a).tobytes() == b.tobytes() for a, b in pairs)
