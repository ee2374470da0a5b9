"""Fake implementations of the operators: result shapes for tracing, and the errors that tracing can already raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.interop.torch.arguments import SEALED_PLANES
from pagecore.interop.torch.plans import check_lengths, check_plan, empty_plan

_CODES = (torch.int8, torch.uint8)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_QUERY_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_WRITTEN = ("key_scale_cache", "value_scale_cache", "key_min", "key_max", "label")


def _write_kv(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, **options: Any) -> None:
    _check_traced(("key", key, 3), ("value", value, 3), ("key_cache", key_cache, 4), ("value_cache", value_cache, 4))
    _refuse_meta_mix(key, slot_mapping=slots, **options)
    written = {name: options[name] for name in _WRITTEN if options.get(name) is not None}
    _refuse_symbolic_offset(key_cache=key_cache, value_cache=value_cache, **written)


def _plan_attention(cu_query_lens: Any, seq_lens: Any, **options: Any) -> Any:
    check_lengths(cu_query_lens, seq_lens)
    has_sinks = options.get("sink_tokens", 0) > 0
    return empty_plan(seq_lens, options["num_tokens"], options["num_query_heads"], options["num_kv_heads"], has_sinks)


def _paged_attention(query: Any, key_cache: Any, value_cache: Any, table: Any, lens: Any, **options: Any) -> Any:
    _check_traced(("query", query, 3), ("key_cache", key_cache, 4), ("value_cache", value_cache, 4))
    _refuse_meta_mix(query, block_table=table, seq_lens=lens, **options)
    check_plan(options.get("plan"), query, key_cache, lens, options.get("sink_tokens", 0) > 0)
    dim = value_cache.shape[3] * (2 if value_cache.dtype == torch.uint8 else 1)  # a byte of a format holds two numbers
    dtype = query.dtype
    if dtype in _QUERY_CODES:
        dtype = torch.float16 if key_cache.dtype == value_cache.dtype == torch.float16 else torch.bfloat16
    if options.get("output_scale") is not None:
        dtype = torch.float8_e4m3fn
    return query.new_empty((query.shape[0], query.shape[1], dim), dtype=dtype)


def _paged_attention_lse(query: Any, *arrays: Any, **options: Any) -> Any:
    out = _paged_attention(query, *arrays, **options)
    return out, query.new_empty((query.shape[0], query.shape[1]), dtype=torch.float32)


def _paged_attention_out(
    query: Any, key_cache: Any, value_cache: Any, table: Any, lens: Any, out: Any, **options: Any
) -> None:
    expected = _paged_attention(query, key_cache, value_cache, table, lens, **options)
    _check_traced(("query", query, 3), ("out", out, 3))
    if options.get("output_scale") is not None and out.dtype != torch.float8_e4m3fn:
        raise UnsupportedOption(
            f"output_scale is given and out is {out.dtype}; only an output in float8_e4m3fn has a scale: leave "
            "output_scale out, or pass a tensor of that dtype"
        )
    taken = dict.fromkeys((*(_FLOATS if query.dtype in _QUERY_CODES else (expected.dtype,)), torch.float8_e4m3fn))
    if out.dtype not in taken:
        raise UnsupportedDtype(f"out is {out.dtype}; it must be {' or '.join(map(str, taken))}")
    _refuse_symbolic_offset(out=out)


def _merge_attention(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, mask: Any = None) -> Any:
    _check_traced(("out_a", out_a, 3), ("lse_a", lse_a, 2), ("out_b", out_b, 3), ("lse_b", lse_b, 2))
    _refuse_meta_mix(out_a, mask=mask)
    if mask is not None:
        _check_mask(mask, out_a.shape[0])
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _merge_attention_parts(outs: Any, lses: Any, cu_parts: Any = None) -> Any:
    first = 1 if cu_parts is None else 0  # axis of the parts
    _check_traced(("outs", outs, first + 3), ("lses", lses, first + 2))
    if cu_parts is None:
        num_tokens = outs.shape[0]
    else:
        _refuse_meta_mix(outs, cu_parts=cu_parts)
        _check_parts(cu_parts)
        num_tokens = cu_parts.shape[0] - 1
    heads, dim = outs.shape[first + 1 :]
    return outs.new_empty((num_tokens, heads, dim)), lses.new_empty((num_tokens, heads))


def _hadamard(x: Any) -> Any:
    if x.ndim == 0:
        raise ShapeError("x has no axes; it must be [..., D]")
    _check_traced(("x", x, x.ndim))
    return x.new_empty(x.shape)


def _seal_kv(key_cache: Any, value_cache: Any, *arrays: Any) -> None:
    *planes, pairs = arrays
    _check_traced(("key_cache", key_cache, 4), ("value_cache", value_cache, 4))
    written = dict(zip(SEALED_PLANES, planes, strict=True))
    _refuse_meta_mix(key_cache, pairs=pairs, **written)
    _refuse_symbolic_offset(**written)


def _unseal_kv(*arrays: Any) -> None:
    *planes, key_cache, value_cache, pairs = arrays
    _check_traced(("key_cache", key_cache, 4), ("value_cache", value_cache, 4))
    _refuse_meta_mix(key_cache, pairs=pairs, **dict(zip(SEALED_PLANES, planes, strict=True)))
    _refuse_symbolic_offset(key_cache=key_cache, value_cache=value_cache)


def _copy_blocks(caches: list[Any], pairs: Any, **_: bool) -> None:
    for position, cache in enumerate(caches):
        _refuse_symbolic_offset(**{f"caches[{position}]": cache})
        _refuse_meta_mix(cache, pairs=pairs)


def _check_traced(first: tuple[str, Any, int], *others: tuple[str, Any, int]) -> None:
    for name, array, ndim in (first, *others):
        if array.ndim != ndim:
            raise ShapeError(f"{name} has shape {tuple(array.shape)}; it must have {ndim} axes")
        if not (array.is_floating_point() or (name.endswith("_cache") and array.dtype in _CODES)):
            raise UnsupportedDtype(f"{name} is {array.dtype}; float32, float16 and bfloat16 are served: convert it")
        if array.device != first[1].device:
            raise DeviceError(f"{name} is on {array.device} and {first[0]} on {first[1].device}; move one to the other")
        if array.requires_grad and torch.is_grad_enabled():
            raise UnsupportedOption(
                f"{name} requires grad, and the operator has no gradient; pass {name}.detach(), or compute it under "
                "torch.no_grad()"
            )


def _check_mask(mask: Any, num_tokens: Any) -> None:
    if mask.dtype != torch.bool:
        raise UnsupportedDtype(f"mask is {mask.dtype}; it must be bool, True where both parts count: pass mask != 0")
    if mask.ndim != 1:
        raise ShapeError(f"mask has shape {tuple(mask.shape)}; it must have 1 axis: [num_tokens]")
    if mask.shape[0] != num_tokens:
        raise ShapeError(f"mask has {mask.shape[0]} entries; it must have {num_tokens}, as the outputs have tokens")


def _check_parts(cu_parts: Any) -> None:
    is_index = cu_parts.dtype in (torch.int32, torch.int64)
    is_integer = not (cu_parts.is_floating_point() or cu_parts.is_complex() or cu_parts.dtype == torch.bool)
    if not is_index and (cu_parts.is_cuda or not is_integer):
        raise UnsupportedDtype(f"cu_parts is {cu_parts.dtype}; it must be int32 or int64: convert it")
    if cu_parts.ndim != 1:
        raise ShapeError(f"cu_parts has shape {tuple(cu_parts.shape)}; it must have 1 axis: [num_tokens + 1]")
    if cu_parts.shape[0] == 0:
        raise ShapeError("cu_parts is empty; it must have one entry more than there are tokens, the first of them 0")


def _refuse_meta_mix(first: Any, **others: Any) -> None:
    """Refuse to mix "meta" tensors with others: torch would trace the call instead of computing it."""
    for name, array in others.items():
        if isinstance(array, torch.Tensor) and (array.device.type == "meta") != (first.device.type == "meta"):
            raise DeviceError(f"{name} is on {array.device} and the others on {first.device}; move one to the other")


def _refuse_symbolic_offset(**mutated: Any) -> None:
    """Refuse to mutate a view whose offset is symbolic: torch 2.13 drops the offset and writes to another place."""
    for name, array in mutated.items():
        offset = array.storage_offset()
        if isinstance(offset, torch.SymInt) and not offset.node.expr.is_Symbol:
            raise UnsupportedOption(
                f"{name} is a view whose offset is only known at run time, and torch.compile would write to another "
                "place; create the view outside of the compiled function, call mark_static() on the cache, or leave "
                "dynamic=True out"
            )


FAKES: dict[str, Callable[..., Any]] = {
    "write_kv": _write_kv,
    "plan_attention": _plan_attention,
    "paged_attention": _paged_attention,
    "paged_attention_lse": _paged_attention_lse,
    "paged_attention_out": _paged_attention_out,
    "merge_attention": _merge_attention,
    "merge_attention_parts": _merge_attention_parts,
    "hadamard": _hadamard,
    "seal_kv": _seal_kv,
    "unseal_kv": _unseal_kv,
    "copy_blocks": _copy_blocks,
}
