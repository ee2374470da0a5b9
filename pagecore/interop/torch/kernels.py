"""Eager implementations of the operators, for host and CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagecore import ops
from pagecore.errors import UnsupportedOption
from pagecore.interop.torch.plans import check_lengths, empty_plan
from pagecore.ops.cuda.schedule._schedule import plan_lengths

# Fields of SealedBlocks by the arguments of the operators.
_SEALED = {f"sealed_{name}": name for name in ops.SealedBlocks._fields}


def _write_kv(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    key_scale: Any = None,
    value_scale: Any = None,
    key_scale_cache: Any = None,
    value_scale_cache: Any = None,
    **options: Any,
) -> None:
    scales = {
        "key_scale": _one_scale("key", key_scale, key_scale_cache),
        "value_scale": _one_scale("value", value_scale, value_scale_cache),
    }
    ops.write_kv(key, value, key_cache, value_cache, slot_mapping, **scales, **options)


def _one_scale(name: str, factor: Any, plane: Any) -> Any:
    if factor is not None and plane is not None:
        raise UnsupportedOption(
            f"{name}_scale and {name}_scale_cache are both given; a format has given factors or stored scales: pass "
            f"one (the factor of nvfp4 is {name}_global_scale)"
        )
    return factor if plane is None else plane


def _plan_attention(cu_query_lens: Any, seq_lens: Any, **options: Any) -> Any:
    check_lengths(cu_query_lens, seq_lens)
    has_sinks = options.get("sink_tokens", 0) > 0
    plan = empty_plan(seq_lens, options["num_tokens"], options["num_query_heads"], options["num_kv_heads"], has_sinks)
    if seq_lens.device.type == "cuda":
        _take_window(options)
        plan_lengths(plan, seq_lens, cu_query_lens, **options)
    return plan


def _take_window(options: dict[str, Any]) -> None:
    """Replace the sides of a window by `window`, unless it is unbounded: a chunk excludes a window."""
    sides = (options.pop("window_left", -1), options.pop("window_right", -1))
    if sides != (-1, -1):
        options["window"] = sides


def _paged_attention(*arrays: Any, **options: Any) -> Any:
    if options:
        _take_window(options)
        if not _SEALED.keys().isdisjoint(options):
            planes = {name: options.pop(option, None) for option, name in _SEALED.items()}
            options["sealed"] = ops.SealedBlocks(**planes)
    return ops.paged_attention(*arrays, **options)


def _paged_attention_lse(*arrays: Any, **options: Any) -> Any:
    return _paged_attention(*arrays, return_lse=True, **options)


def _paged_attention_out(
    query: Any, key_cache: Any, value_cache: Any, table: Any, seq_lens: Any, out: Any, **options: Any
) -> None:
    _paged_attention(query, key_cache, value_cache, table, seq_lens, out=out, **options)


def _merge_attention(*arrays: Any, mask: Any = None) -> Any:
    return ops.merge_attention(*arrays, mask=mask)


def _merge_attention_parts(outs: Any, lses: Any, cu_parts: Any = None) -> Any:
    return ops.merge_attention_parts(outs, lses, cu_parts)


def _hadamard(x: Any) -> Any:
    return ops.hadamard(x)


def _seal_kv(key_cache: Any, value_cache: Any, *arrays: Any) -> None:
    *planes, pairs = arrays
    ops.seal_kv(key_cache, value_cache, ops.SealedBlocks(*planes), pairs)


def _unseal_kv(*arrays: Any) -> None:
    *planes, key_cache, value_cache, pairs = arrays
    ops.unseal_kv(ops.SealedBlocks(*planes), key_cache, value_cache, pairs)


def _copy_blocks(caches: list[Any], pairs: Any, *, independent: bool = False) -> None:
    ops.copy_blocks(caches, pairs, independent=independent)


KERNELS: dict[str, Callable[..., Any]] = {
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
