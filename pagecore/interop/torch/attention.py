"""Attention over paged caches, its plans, and merging of results."""

from __future__ import annotations

from typing import Any

import torch

from pagecore import ops
from pagecore.arrays.refusals import brief
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.interop.torch import registration
from pagecore.interop.torch.arguments import Scale, Window, check_arguments, each_head, window_sides


def plan_attention(
    cu_query_lens: torch.Tensor | None,
    seq_lens: torch.Tensor,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    num_tokens: int | None = None,
    causal: bool = True,
    window: Window = None,
) -> torch.Tensor:
    """Plan the attention of one batch as a torch operator, once for all layers of a step.

    The result goes to every call of `paged_attention` that has these lengths, heads, causality and window; calls
    without a plan each plan their batch again. On CUDA a kernel plans: nothing is copied, nothing waits, and a captured
    graph plans anew in each replay. On the host a plan is empty, and each call plans its batch itself.

    Parameters
    ----------
    cu_query_lens : integers, [B + 1], or None
        None is one query for each sequence.
    seq_lens : integers, [B]
        Keys of each sequence, the new ones included.
    num_query_heads, num_kv_heads : int
    num_tokens : int, optional
        Rows of the query, padding included; with `cu_query_lens` it must be given, without it is B.
    causal, window
        As the calls have them.

    Returns
    -------
    uint8, [B + 1, bytes]
        A new tensor on the device of `seq_lens`. Calls with it must follow each other on one stream: they share
        counters that lie in it, and leave them as they were.

    Raises
    ------
    UnsupportedDtype, UnsupportedOption, ShapeError, DeviceError
        What is not a torch tensor, and arrays that do not fit each other. That a plan is one of the call's lengths,
        causality and window is checked under `pagecore.debug(True)` alone.
    """
    options: dict[str, Any] = {"cu_query_lens": cu_query_lens, "causal": causal}
    check_arguments(seq_lens, options=options)
    if num_tokens is None:
        if cu_query_lens is not None:
            raise ShapeError("num_tokens is missing; beside cu_query_lens it must be the number of rows of the query")
        num_tokens = seq_lens.shape[0]
    left, right = window_sides(window)
    plan: torch.Tensor = registration.plan_attention(
        cu_query_lens,
        seq_lens,
        num_tokens=num_tokens,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        causal=causal,
        window_left=left,
        window_right=right,
    )
    return plan


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    window: Window = None,
    key_scale: Scale = None,
    value_scale: Scale = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`pagecore.paged_attention` as a torch operator: every option but `stream`.

    All arrays are torch tensors of one device. `plan` is what `plan_attention` of this module returns; without one each
    call plans its batch itself. With `out`, which is mutated and returned, `return_lse` is refused.

    Raises
    ------
    UnsupportedDtype
        What is no torch tensor.
    As `pagecore.paged_attention`; while a graph is traced, what does not fit is refused then.
    """
    if window is not None:
        options["window_left"], options["window_right"] = window_sides(window)
    if key_scale is not None:
        options["key_scale"] = each_head(key_scale, key_cache)
    if value_scale is not None:
        options["value_scale"] = each_head(value_scale, key_cache)
    if options.pop("stream", None) is not None:
        raise UnsupportedOption("stream is given; a torch operator takes none: leave it out, or call pagecore's own")
    if type(options.get("plan")) is ops.AttentionPlan:
        raise UnsupportedOption(
            "plan is an AttentionPlan, which no operator takes; pass what plan_attention of this module returns, or "
            "call pagecore's own function"
        )
    arrays = (query, key_cache, value_cache, block_table, seq_lens)
    if return_lse is not True and return_lse is not False:
        raise UnsupportedOption(f"return_lse is {brief(return_lse)}; it must be True or False")
    if out is None:
        check_arguments(*arrays, options=options)
        if return_lse:
            both: tuple[torch.Tensor, torch.Tensor] = registration.paged_attention_lse(*arrays, **options)
            return both
        attended: torch.Tensor = registration.paged_attention(*arrays, **options)
        return attended
    if return_lse:
        raise UnsupportedOption("out and return_lse are both given; the operator with out= gives no lse: leave one out")
    check_arguments(*arrays, out, options=options)
    registration.paged_attention_out(*arrays, out, **options)
    return out


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pagecore.merge_attention` as a torch operator, into fresh tensors."""
    check_arguments(out_a, lse_a, out_b, lse_b, names="out_a lse_a out_b lse_b")
    merged: tuple[torch.Tensor, torch.Tensor] = registration.merge_attention(out_a, lse_a, out_b, lse_b)
    return merged
