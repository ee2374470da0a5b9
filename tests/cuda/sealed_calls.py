"""Calls of paged_attention with sealed blocks on a device, and what they have to return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pagecore import SealedBlocks
from pagecore.ops import paged_attention, plan_attention
from tests.cuda.attention_cases import LIMITS
from tests.cuda.kit import Kit
from tests.ops.cases import assert_lse_close, assert_output_close
from tests.ops.sealed_cases import SealedCase
from tests.reference import attention as reference


def run(cuda: Kit, case: SealedCase, *, on_host: tuple[str, ...] = (), **more: Any) -> tuple[Any, Any]:
    """Call paged_attention into a poisoned output; return output and lse on the host."""
    plain = case.plain
    names = ("query", "key_cache", "value_cache", "block_table", "seq_lens")
    arguments: dict[str, Any] = dict(zip(names, plain.arrays, strict=True)) | plain.options | more
    planes = dict(zip(SealedBlocks._fields, case.sealed, strict=True))
    for given in (arguments, planes):
        for name, value in given.items():
            if isinstance(value, np.ndarray) and name not in on_host:
                given[name] = cuda.put(value.view(np.int64) if value.dtype == np.uint64 else value)
    out = cuda.empty((*plain.query.shape[:2], case.value_numbers.shape[3]), str(plain.query.dtype))
    _, lse = paged_attention(**arguments, sealed=SealedBlocks(**planes), out=out, return_lse=True)
    return cuda.get(out), cuda.get(lse)


def expect(case: SealedCase, **more: Any) -> tuple[Any, Any]:
    query, _, _, table, lens = case.plain.arrays
    arrays = (query, case.key_numbers, case.value_numbers, table, lens)
    return reference.paged_attention(*arrays, **case.plain.options, **more)


def expect_of_kernels(case: SealedCase, *, batch_invariant: bool = False) -> tuple[Any, Any]:
    """Return what the kernels of a call without a selection compute: prefill_sealed rounds the numbers first.

    It serves sequences with more than 16 packed rows, and all sequences of a batch-invariant call.
    """
    query, key_cache = case.plain.query, case.plain.key_cache
    expected = expect(case)
    if not has_matrix_prompts(case):
        return expected
    numbers = (each.astype(query.dtype) for each in (case.key_numbers, case.value_numbers))
    rounded = expect(replace(case, key_numbers=next(numbers), value_numbers=next(numbers)))
    cu = case.plain.options.get("cu_query_lens", np.arange(len(case.plain.seq_lens) + 1))
    sizes = np.diff(cu)
    is_prompt = np.zeros(len(query), bool)
    is_prompt[: cu[-1]] = np.repeat((sizes * (query.shape[1] // key_cache.shape[2]) > 16) | batch_invariant, sizes)
    out, lse = (
        np.where(is_prompt.reshape(-1, *[1] * (one.ndim - 1)), one, other)
        for one, other in zip(rounded, expected, strict=True)
    )
    return out, lse


def has_matrix_prompts(case: SealedCase) -> bool:
    """Return True if matrix instructions serve the prompts of a case, whose rows are aligned."""
    query, (size, _, dim), sealed = case.plain.query, case.plain.key_cache.shape[1:], case.sealed
    dims, group = (dim, case.plain.value_cache.shape[3]), size // sealed.key_scale.shape[2]
    return (
        query.dtype != np.float32
        and query.dtype == case.plain.key_cache.dtype
        and max(dims) <= 256
        and not any(each % 8 for each in dims)
        and size % 16 == group % 16 == 0
        and (query.dtype != np.float16 or sealed.key_scale.dtype == sealed.value_scale.dtype == np.float16)
    )


def check(cuda: Kit, case: SealedCase, *, planned: dict[str, Any] | None = None, **more: Any) -> None:
    if planned is not None:
        more["plan"] = plan_of(cuda, case, **planned)
    out, lse = run(cuda, case, **more)
    expected = expect_of_kernels(case, batch_invariant=bool(planned and planned.get("batch_invariant")))
    assert_output_close(out, expected[0])
    assert_lse_close(lse, expected[1], str(case.plain.query.dtype))


def plan_of(cuda: Kit, case: SealedCase, **more: Any) -> Any:
    plain = case.plain
    heads = {"num_query_heads": plain.query.shape[1], "num_kv_heads": plain.key_cache.shape[2]}
    kinds = {name: plain.options[name] for name in LIMITS if name in plain.options}
    return plan_attention(
        plain.options.get("cu_query_lens"), plain.seq_lens, device=cuda.device, **heads, **kinds, **more
    )
