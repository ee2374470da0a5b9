"""The operators as torch's own, in `torch.ops.pagecore`: for eager code, `torch.compile` and CUDA graphs.

Importing this module registers them, without compiling anything against torch:

    write_kv, paged_attention, paged_attention_lse, paged_attention_out, merge_attention, copy_blocks

The functions here have the arguments of `pagecore.write_kv` and its kin, and call those operators. `as_torch` shows a
pool's planes, a batch's arrays, or any `pagecore.Tensor`, as torch tensors over the same memory. The operators have no
gradients. On CUDA they run on torch's current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pagecore import ops
from pagecore.arrays import Tensor, like
from pagecore.errors import UnsupportedDtype, UnsupportedOption

_ATTENTION = (
    "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, {out}*, "
    "Tensor? rows=None, Tensor? cu_query_lens=None, float? scale=None, bool causal=True, SymInt window_left=-1, "
    "SymInt window_right=-1, float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? mask=None, "
    "Tensor? key_scale=None, Tensor? value_scale=None"
)
_WRITE = (
    "Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, *, "
    "Tensor? key_scale=None, Tensor? value_scale=None"
)
_SCHEMAS = {
    "write_kv": f"({_WRITE}) -> ()",
    "paged_attention": f"({_ATTENTION.format(out='')}) -> Tensor",
    "paged_attention_lse": f"({_ATTENTION.format(out='')}) -> (Tensor, Tensor)",
    "paged_attention_out": f"({_ATTENTION.format(out='Tensor(a!) out, ')}) -> ()",
    "merge_attention": "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    "copy_blocks": "(Tensor(a!)[] caches, Tensor pairs) -> ()",
}


# ---- what the operators do, and what they return where only shapes are traced


def _write(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, **scales: Any) -> None:
    ops.write_kv(key, value, key_cache, value_cache, slot_mapping, **scales)


def _attend(*arrays: Any, window_left: int = -1, window_right: int = -1, **options: Any) -> Any:
    return ops.paged_attention(*arrays, window=(window_left, window_right), **options)


def _attend_lse(*arrays: Any, **options: Any) -> Any:
    return _attend(*arrays, return_lse=True, **options)


def _attend_out(
    query: Any, key_cache: Any, value_cache: Any, table: Any, seq_lens: Any, out: Any, **options: Any
) -> None:
    _attend(query, key_cache, value_cache, table, seq_lens, out=out, **options)


def _merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    return ops.merge_attention(out_a, lse_a, out_b, lse_b)


def _copy(caches: list[Any], pairs: Any) -> None:
    ops.copy_blocks(caches, pairs)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _attended(query: Any, _key_cache: Any, value_cache: Any, *_: Any, **__: Any) -> Any:
    return query.new_empty((query.shape[0], query.shape[1], value_cache.shape[3]))


def _attended_lse(query: Any, *arrays: Any, **options: Any) -> Any:
    lse = query.new_empty((query.shape[0], query.shape[1]), dtype=torch.float32)
    return _attended(query, *arrays, **options), lse


def _merged(out_a: Any, lse_a: Any, *_: Any) -> Any:
    return torch.empty_like(out_a, memory_format=torch.contiguous_format), lse_a.new_empty(lse_a.shape)


_BODIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "write_kv": (_write, _nothing),
    "paged_attention": (_attend, _attended),
    "paged_attention_lse": (_attend_lse, _attended_lse),
    "paged_attention_out": (_attend_out, _nothing),
    "merge_attention": (_merge, _merged),
    "copy_blocks": (_copy, _nothing),
}


def _register() -> torch.library.Library:
    library = torch.library.Library("pagecore", "DEF")
    for name, schema in _SCHEMAS.items():
        body, fake = _BODIES[name]
        library.define(name + schema)
        for device in ("CPU", "CUDA"):
            library.impl(name, body, device)
        torch.library.register_fake(f"pagecore::{name}", fake, lib=library)
    return library


# Held for as long as the module is: the registration ends with it.
_library = _register()
_operators = torch.ops.pagecore


# ---- the same with the arguments of pagecore's own functions


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | float | None = None,
    value_scale: torch.Tensor | float | None = None,
) -> None:
    """`pagecore.write_kv` as a torch operator; all arrays are torch tensors of one device, the caches are mutated."""
    scales = [_number(scale, key_cache) for scale in (key_scale, value_scale)]
    _operators.write_kv.default(
        key, value, key_cache, value_cache, slot_mapping, key_scale=scales[0], value_scale=scales[1]
    )


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    window: int | tuple[int | None, int | None] | None = None,
    key_scale: torch.Tensor | float | None = None,
    value_scale: torch.Tensor | float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`pagecore.paged_attention` as a torch operator: every option but `plan` and `stream`.

    All arrays are torch tensors of one device. A plan cannot be an argument of an operator: each call plans its batch
    itself. With `out`, which is mutated and returned, `return_lse` is refused.
    """
    left, right = _window(window)
    arrays = (query, key_cache, value_cache, block_table, seq_lens)
    options |= {
        "window_left": left,
        "window_right": right,
        "key_scale": _number(key_scale, key_cache),
        "value_scale": _number(value_scale, key_cache),
    }
    if out is None:
        name = "paged_attention_lse" if return_lse else "paged_attention"
        return getattr(_operators, name).default(*arrays, **options)
    if return_lse:
        raise UnsupportedOption("out and return_lse are both given; the operator with out= gives no lse: leave one out")
    _operators.paged_attention_out.default(*arrays, out, **options)
    return out


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pagecore.merge_attention` as a torch operator, into fresh tensors."""
    return _operators.merge_attention.default(out_a, lse_a, out_b, lse_b)


def copy_blocks(caches: torch.Tensor | Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """`pagecore.copy_blocks` as a torch operator; the caches are mutated."""
    _operators.copy_blocks.default([caches] if isinstance(caches, torch.Tensor) else list(caches), pairs)


def as_torch(tensor: Tensor) -> torch.Tensor:
    """A torch tensor over the memory of a `pagecore.Tensor`: `cache.key(0)`, `batch.positions`, a pool's plane.

    Zero-copy in every dtype of the table, bfloat16 and float8 among them. Each side keeps the memory alive, not the
    other: the cache may go first, or the torch tensor.

    Raises
    ------
    UnsupportedOption
        The tensor is read-only, as `cache.block_table` is, which torch cannot say of a tensor; or has negative strides.
    """
    if type(tensor) is not Tensor:
        raise UnsupportedDtype(f"a {type(tensor).__name__} is no pagecore.Tensor; make one with pagecore.as_tensor")
    shown: torch.Tensor = like(tensor, _EXAMPLE)
    return shown


_EXAMPLE = torch.empty(0)


def _number(scale: torch.Tensor | float | None, key_cache: torch.Tensor) -> torch.Tensor | None:
    """One number for each key head, as the operators take it."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale
    return torch.full((key_cache.shape[2],), float(scale), dtype=torch.float32, device=key_cache.device)


def _window(window: int | tuple[int | None, int | None] | None) -> tuple[int, int]:
    """(left, right), -1 for no bound; a number of keys counts the query's own."""
    if window is None:
        return -1, -1
    if isinstance(window, tuple | list):
        if len(window) != 2:
            raise UnsupportedOption(f"window is {window!r}; it must be a number of keys, or (left, right)")
        left, right = (-1 if side is None else side for side in window)
        return left, right
    if window < 1:
        raise UnsupportedOption(f"window is {window!r}; it must be at least 1, the query's own key, or None")
    return window - 1, -1
