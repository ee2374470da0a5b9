"""Attention plans as torch tensors: their shape, and checks of what they are made for."""

from __future__ import annotations

from typing import Any

import torch

from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype
from pagecore.ops.cuda.schedule._schedule import plan_shape


def empty_plan(seq_lens: Any, num_tokens: Any, num_query_heads: int, num_kv_heads: int, has_sinks: bool = False) -> Any:
    """Return an uninitialised plan; on the host its width is 0, because each call plans its batch itself."""
    rows, width = plan_shape(seq_lens.shape[0], num_tokens, num_query_heads, num_kv_heads, has_sinks)
    shape = (rows, 0 if seq_lens.device.type == "cpu" else width)
    return seq_lens.new_empty(shape, dtype=torch.uint8)


def check_lengths(cu_query_lens: Any, seq_lens: Any) -> None:
    """Raise if shape, dtype or device of the lengths are not those that a plan needs."""
    for name, array in (("seq_lens", seq_lens), ("cu_query_lens", cu_query_lens)):
        if array is None:
            continue
        if array.ndim != 1:
            raise ShapeError(f"{name} has shape {tuple(array.shape)}; it must have 1 axis")
        if array.dtype not in (torch.int32, torch.int64):
            raise UnsupportedDtype(f"{name} is {array.dtype}; it must be int32 or int64: convert it")
        if array.device != seq_lens.device:
            raise DeviceError(f"{name} is on {array.device} and seq_lens on {seq_lens.device}; move one to the other")
    if cu_query_lens is not None and cu_query_lens.shape[0] != seq_lens.shape[0] + 1:
        raise ShapeError(
            f"cu_query_lens has {cu_query_lens.shape[0]} entries; expected {seq_lens.shape[0] + 1}, one more than "
            "seq_lens"
        )


def check_plan(plan: Any, query: Any, key_cache: Any, lens: Any, has_sinks: bool) -> None:
    """Raise ShapeError if `plan` was not made for batches of these sizes."""
    if plan is None:
        return
    expected = empty_plan(lens, query.shape[0], query.shape[1], key_cache.shape[2], has_sinks)
    if plan.dtype != expected.dtype or plan.ndim != 2 or tuple(plan.shape) != tuple(expected.shape):
        raise ShapeError(
            f"plan has dtype {plan.dtype} and shape {tuple(plan.shape)}; expected {expected.dtype} and "
            f"{tuple(expected.shape)} for these arrays: pass the result of plan_attention for this batch"
        )
