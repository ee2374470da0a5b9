"""Attention over paged caches, its plans, and merging of results."""

from __future__ import annotations

from typing import Any

import torch

from pagecore import ops
from pagecore.errors import ShapeError, UnsupportedOption, shown
from pagecore.interop.torch import registration
from pagecore.interop.torch.arguments import (
    SMALLEST_SCALE,
    Scale,
    Window,
    check_arguments,
    limits,
    one_scale,
    per_head_scale,
    refuse_stream,
    take_sealed,
)


def plan_attention(
    cu_query_lens: torch.Tensor | None,
    seq_lens: torch.Tensor,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    num_tokens: int | None = None,
    causal: bool = True,
    window: Window = None,
    chunk: int | None = None,
    sink_tokens: int | None = None,
    tree: bool = False,
) -> torch.Tensor:
    """Plan the attention of one batch as a torch operator, once for all layers of a step.

    Pass the plan to every call of `paged_attention` with the same lengths, heads, causality and window; a call without
    a plan plans its batch itself. On CUDA a kernel writes the plan: nothing is copied to the host, the host does not
    wait, and a captured graph plans again in each replay. On the host the plan is empty, and each call plans its batch
    itself.

    Parameters
    ----------
    cu_query_lens : Tensor, integers [B + 1], or None
        Prefix sums of the query lengths. None: one query per sequence.
    seq_lens : Tensor, integers [B]
        Number of keys of each sequence, new tokens included.
    num_query_heads, num_kv_heads : int
    num_tokens : int, optional
        Rows of the query, padding included. Required with `cu_query_lens`; defaults to B without it.
    causal : bool
    window : int, (int or None, int or None), optional
    chunk, sink_tokens : int, optional
        `causal`, `window`, `chunk` and `sink_tokens` must equal those of the calls that use the plan.
    tree : bool
        The calls pass `tree_mask`; required if they have a window too.

    Returns
    -------
    Tensor, uint8 [B + 1, bytes]
        A new tensor on the device of `seq_lens`. Calls that use one plan must run one after the other on one stream:
        they share counters inside the plan, which each call resets.

    Raises
    ------
    UnsupportedDtype
        An argument is not a torch tensor, or its dtype is not an integer.
    ShapeError, DeviceError, UnsupportedOption
        Shapes or devices do not match, or an option is invalid. Only `pagecore.debug(True)` checks that a plan was made
        for the lengths, causality and window of a call.
    """
    options: dict[str, Any] = {"cu_query_lens": cu_query_lens, "causal": causal}
    check_arguments(seq_lens, options=options, names="seq_lens")
    if num_tokens is None:
        if cu_query_lens is not None:
            raise ShapeError("num_tokens is missing; with cu_query_lens, pass the number of rows of the query")
        num_tokens = seq_lens.shape[0]
    plan: torch.Tensor = registration.plan_attention(
        cu_query_lens,
        seq_lens,
        num_tokens=num_tokens,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        causal=causal,
        **limits(window, chunk, sink_tokens),
        tree=tree,
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
    chunk: int | None = None,
    sink_tokens: int | None = None,
    key_scale: Scale = None,
    value_scale: Scale = None,
    query_scale: Scale = None,
    output_scale: Scale = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend to paged keys and values: `pagecore.paged_attention` as a torch operator.

    Takes all options of `pagecore.paged_attention` except `stream`, since the operator runs on torch's current stream.
    All tensors are on one device.

    Parameters
    ----------
    query : Tensor, [T, Hq, D]
    key_cache : Tensor, [num_blocks, block_size, Hkv, D]
    value_cache : Tensor, [num_blocks, block_size, Hkv, Dv]
        Numbers, or the codes of a format; the last axis of uint8 codes has half the length.
    block_table : Tensor, integers [rows, max_blocks]
    seq_lens : Tensor, integers [B]
    window : int, (int or None, int or None), optional
    chunk, sink_tokens : int, optional
    key_scale, value_scale : float, Tensor [Hkv] or Tensor [num_blocks, block_size, Hkv, groups], optional
        A given factor, or the plane of the scales of a format.
    query_scale : float, or Tensor [Hkv] or of one number, optional
        Factor of a float8 query.
    output_scale : float, or Tensor of one number, optional
        Divisor of an output in float8_e4m3fn. Numbers become tensors on the device of the caches, which is a launch.
    out : Tensor, [T, Hq, Dv], optional
        Mutated and returned. Not supported together with `return_lse`.
    return_lse : bool
    **options
        Passed on; `sealed` is a `SealedBlocks` of tensors, and `plan` must be a result of `plan_attention` of this
        module. A call without a plan plans its batch itself.

    Returns
    -------
    Tensor, [T, Hq, Dv], or (Tensor, Tensor)
        With `return_lse` also the log-sum-exp, float32 [T, Hq].

    Raises
    ------
    UnsupportedDtype
        An array is not a torch tensor.
    UnsupportedOption
        `stream`, an `AttentionPlan`, or `out` with `return_lse`.
    PagecoreError
        As `pagecore.paged_attention`. Tracing a graph already raises for shapes, dtypes and devices.
    """
    if window is not None or chunk is not None or sink_tokens is not None:
        options |= limits(window, chunk, sink_tokens)
    if key_scale is not None:
        options["key_scale"] = per_head_scale("key_scale", key_scale, key_cache)
    if value_scale is not None:
        options["value_scale"] = per_head_scale("value_scale", value_scale, key_cache)
    if query_scale is not None:
        options["query_scale"] = per_head_scale("query_scale", query_scale, key_cache, SMALLEST_SCALE)
    if output_scale is not None:
        options["output_scale"] = one_scale("output_scale", output_scale, key_cache, SMALLEST_SCALE)
    if options:
        _take_options(options)
    arrays = (query, key_cache, value_cache, block_table, seq_lens)
    if return_lse is not True and return_lse is not False:
        raise UnsupportedOption(f"return_lse is {shown(return_lse)}; it must be True or False")
    if out is None:
        check_arguments(*arrays, options=options)
        # Inductor moves a call with one result to its first use, which may be after a later write to the caches; that
        # write would then copy them. It leaves a call with two results where it is.
        if return_lse or torch.compiler.is_compiling():
            both: tuple[torch.Tensor, torch.Tensor] = registration.paged_attention_lse(*arrays, **options)
            return both if return_lse else both[0]
        attended: torch.Tensor = registration.paged_attention(*arrays, **options)
        return attended
    if return_lse:
        raise UnsupportedOption(
            "out and return_lse are both given; the operator with out= does not return the lse: leave one out"
        )
    check_arguments(*arrays, out, options=options)
    registration.paged_attention_out(*arrays, out, **options)
    return out


def _take_options(options: dict[str, Any]) -> None:
    """Replace what the operators take by other arguments; refuse what they do not take."""
    refuse_stream(options)
    take_sealed(options)
    if type(options.get("plan")) is ops.AttentionPlan:
        raise UnsupportedOption(
            "plan is an AttentionPlan, which the torch operator does not take; pass the result of "
            "pagecore.interop.torch.plan_attention, or call pagecore.paged_attention"
        )


def merge_attention(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys: `pagecore.merge_attention` as a torch operator.

    Parameters
    ----------
    out_a, out_b : Tensor, [T, H, D]
    lse_a, lse_b : Tensor, float32 [T, H]
    mask : Tensor, bool [T], optional

    Returns
    -------
    out : Tensor, [T, H, D]
    lse : Tensor, float32 [T, H]
        New tensors.

    Raises
    ------
    UnsupportedDtype
        An array is not a torch tensor.
    PagecoreError
        As `pagecore.merge_attention`.
    """
    names = "out_a lse_a out_b lse_b"
    check_arguments(out_a, lse_a, out_b, lse_b, names=names, options={"mask": mask})
    merged: tuple[torch.Tensor, torch.Tensor] = registration.merge_attention(out_a, lse_a, out_b, lse_b, mask=mask)
    return merged


def merge_attention_parts(
    outs: torch.Tensor, lses: torch.Tensor, cu_parts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over any number of disjoint sets of keys: `pagecore.merge_attention_parts` as a torch operator.

    Parameters
    ----------
    outs : Tensor, [T, N, H, D], or [P, H, D] with `cu_parts`
    lses : Tensor, float32 [T, N, H], or [P, H] with `cu_parts`
    cu_parts : Tensor, int32 or int64 [T + 1], optional

    Returns
    -------
    out : Tensor, [T, H, D]
    lse : Tensor, float32 [T, H]
        New tensors.

    Raises
    ------
    UnsupportedDtype
        An array is not a torch tensor.
    PagecoreError
        As `pagecore.merge_attention_parts`.
    """
    check_arguments(outs, lses, names="outs lses", options={"cu_parts": cu_parts})
    merged: tuple[torch.Tensor, torch.Tensor] = registration.merge_attention_parts(outs, lses, cu_parts)
    return merged
