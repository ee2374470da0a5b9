"""The operators as torch's own, in `torch.ops.pagecore`: for eager code, `torch.compile` and `torch.export`.

Importing this module registers them, without compiling anything against torch:

    write_kv, plan_attention, paged_attention, paged_attention_lse, paged_attention_out, merge_attention, copy_blocks

The functions here have the arguments of `pagecore.write_kv` and its kin, and call those operators. `as_torch` shows a
pool's planes, a batch's arrays, or any `pagecore.Tensor`, as torch tensors over the same memory. The operators have no
gradients. On CUDA they run on torch's current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch._C._functorch import (
    TransformType,
    is_functorch_wrapped_tensor,
)
from torch._C._functorch import (
    get_interpreter_stack as _transforms,
)
from torch.autograd import forward_ad

from pagecore import ops
from pagecore.arrays import Tensor
from pagecore.arrays.frameworks import refuse_negative_strides
from pagecore.arrays.refusals import brief
from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.ops.cuda._device_plan import plan_lengths, plan_shape

__all__ = ["as_torch", "copy_blocks", "merge_attention", "paged_attention", "plan_attention", "write_kv"]

Window: TypeAlias = int | tuple[int | None, int | None] | None
Scale: TypeAlias = torch.Tensor | float | None

_ATTENTION = (
    "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, {out}*, "
    "Tensor? rows=None, Tensor? cu_query_lens=None, float? scale=None, bool causal=True, SymInt window_left=-1, "
    "SymInt window_right=-1, float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? mask=None, "
    "Tensor? key_scale=None, Tensor? value_scale=None, Tensor? plan=None"
)
_PLAN = (
    "Tensor? cu_query_lens, Tensor seq_lens, *, SymInt num_tokens, int num_query_heads, int num_kv_heads, "
    "bool causal=True, SymInt window_left=-1, SymInt window_right=-1"
)
_WRITE = (
    "Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, *, "
    "Tensor? key_scale=None, Tensor? value_scale=None"
)
_SCHEMAS = {
    "write_kv": f"({_WRITE}) -> ()",
    "plan_attention": f"({_PLAN}) -> Tensor",
    "paged_attention": f"({_ATTENTION.format(out='')}) -> Tensor",
    "paged_attention_lse": f"({_ATTENTION.format(out='')}) -> (Tensor, Tensor)",
    "paged_attention_out": f"({_ATTENTION.format(out='Tensor(a!) out, ')}) -> ()",
    "merge_attention": "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    "copy_blocks": "(Tensor(a!)[] caches, Tensor pairs, *, bool independent=False) -> ()",
}
# Of sparse tensors pagecore says by name which argument it cannot view; torch would list its backends.
_DISPATCH_KEYS = ("CPU", "CUDA", "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA")
# Inductor hands on caches as they lie in memory: a copy that is contiguous would be as large as the cache.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


# ---- what the operators do


def _write(key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, **scales: Any) -> None:
    ops.write_kv(key, value, key_cache, value_cache, slot_mapping, **scales)


def _plan(cu_query_lens: Any, seq_lens: Any, **options: Any) -> Any:
    _check_lengths(cu_query_lens, seq_lens)
    plan = _new_plan(seq_lens, options["num_tokens"], options["num_query_heads"], options["num_kv_heads"])
    if seq_lens.device.type == "cuda":
        window = options.pop("window_left", -1), options.pop("window_right", -1)
        plan_lengths(plan, seq_lens, cu_query_lens, **options, window=window)
    return plan


def _new_plan(seq_lens: Any, num_tokens: Any, num_query_heads: int, num_kv_heads: int) -> Any:
    """An empty one on the host, where each call plans its batch itself."""
    rows, width = plan_shape(seq_lens.shape[0], num_tokens, num_query_heads, num_kv_heads)
    shape = (rows, 0 if seq_lens.device.type == "cpu" else width)
    return seq_lens.new_empty(shape, dtype=torch.uint8)


def _check_lengths(cu_query_lens: Any, seq_lens: Any) -> None:
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
            f"cu_query_lens has {cu_query_lens.shape[0]} entries and seq_lens {seq_lens.shape[0]}; it must have one "
            "more"
        )


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


def _copy(caches: list[Any], pairs: Any, *, independent: bool = False) -> None:
    ops.copy_blocks(caches, pairs, independent=independent)


# ---- what they return where only shapes are traced, and what is refused there already


def _trace_write(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, **scales: Any) -> None:
    _check_traced(("key", key, 3), ("value", value, 3), ("key_cache", key_cache, 4), ("value_cache", value_cache, 4))
    _refuse_without_memory(key, slot_mapping=slots, **scales)
    _refuse_moving(key_cache=key_cache, value_cache=value_cache)


def _trace_plan(cu_query_lens: Any, seq_lens: Any, **options: Any) -> Any:
    _check_lengths(cu_query_lens, seq_lens)
    return _new_plan(seq_lens, options["num_tokens"], options["num_query_heads"], options["num_kv_heads"])


def _trace_attention(query: Any, key_cache: Any, value_cache: Any, table: Any, lens: Any, **options: Any) -> Any:
    _check_traced(("query", query, 3), ("key_cache", key_cache, 4), ("value_cache", value_cache, 4))
    _refuse_without_memory(query, block_table=table, seq_lens=lens, **options)
    _check_plan(options.get("plan"), query, key_cache, lens)
    return query.new_empty((query.shape[0], query.shape[1], value_cache.shape[3]))


def _trace_attention_lse(query: Any, *arrays: Any, **options: Any) -> Any:
    out = _trace_attention(query, *arrays, **options)
    return out, query.new_empty((query.shape[0], query.shape[1]), dtype=torch.float32)


def _trace_attention_out(
    query: Any, key_cache: Any, value_cache: Any, table: Any, lens: Any, out: Any, **options: Any
) -> None:
    expected = _trace_attention(query, key_cache, value_cache, table, lens, **options)
    _check_traced(("query", query, 3), ("out", out, 3))
    if out.dtype != expected.dtype:
        raise UnsupportedDtype(f"out is {out.dtype}; it must be {expected.dtype}, as query is")
    _refuse_moving(out=out)


def _trace_merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    _check_traced(("out_a", out_a, 3), ("lse_a", lse_a, 2), ("out_b", out_b, 3), ("lse_b", lse_b, 2))
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _trace_copy(caches: list[Any], pairs: Any, **_: bool) -> None:
    for place, cache in enumerate(caches):
        _refuse_moving(**{f"caches[{place}]": cache})
        _refuse_without_memory(cache, pairs=pairs)


def _check_plan(plan: Any, query: Any, key_cache: Any, lens: Any) -> None:
    if plan is None:
        return
    expected = _new_plan(lens, query.shape[0], query.shape[1], key_cache.shape[2])
    if plan.dtype != expected.dtype or plan.ndim != 2 or tuple(plan.shape) != tuple(expected.shape):
        raise ShapeError(
            f"plan has dtype {plan.dtype} and shape {tuple(plan.shape)}, the plan of these arrays {expected.dtype} and "
            f"{tuple(expected.shape)}; pass what plan_attention returns for this batch"
        )


def _check_traced(first: tuple[str, Any, int], *others: tuple[str, Any, int]) -> None:
    for name, array, ndim in (first, *others):
        if array.ndim != ndim:
            raise ShapeError(f"{name} has shape {tuple(array.shape)}; it must have {ndim} axes")
        if not array.is_floating_point():
            raise UnsupportedDtype(f"{name} is {array.dtype}; float32, float16 and bfloat16 are served: convert it")
        if array.device != first[1].device:
            raise DeviceError(f"{name} is on {array.device} and {first[0]} on {first[1].device}; move one to the other")
        if array.requires_grad and torch.is_grad_enabled():
            raise UnsupportedOption(
                f"{name} requires grad, and the operator has no gradient; pass {name}.detach() (what is computed under "
                "torch.no_grad() requires none)"
            )


def _refuse_without_memory(first: Any, **others: Any) -> None:
    """One on "meta" beside others that are not: torch takes the call for a trace then, and computes nothing."""
    for name, array in others.items():
        if isinstance(array, torch.Tensor) and (array.device.type == "meta") != (first.device.type == "meta"):
            raise DeviceError(f"{name} is on {array.device} and the others on {first.device}; move one to the other")


def _refuse_moving(**mutated: Any) -> None:
    """A view made in the graph: where its offset is no number yet, torch 2.13 loses it, and writes elsewhere."""
    for name, array in mutated.items():
        offset = array.storage_offset()
        if isinstance(offset, torch.SymInt) and not offset.node.expr.is_Symbol:
            raise UnsupportedOption(
                f"{name} is a view whose offset is known at run time alone, and torch.compile would write elsewhere; "
                "make the view outside of the compiled function, mark_static() the cache, or leave dynamic=True out"
            )


_BODIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "write_kv": (_write, _trace_write),
    "plan_attention": (_plan, _trace_plan),
    "paged_attention": (_attend, _trace_attention),
    "paged_attention_lse": (_attend_lse, _trace_attention_lse),
    "paged_attention_out": (_attend_out, _trace_attention_out),
    "merge_attention": (_merge, _trace_merge),
    "copy_blocks": (_copy, _trace_copy),
}


def _register() -> torch.library.Library:
    library = torch.library.Library("pagecore", "DEF")
    for name, schema in _SCHEMAS.items():
        body, traced = _BODIES[name]
        library.define(name + schema, tags=_TAGS)
        for key in _DISPATCH_KEYS:
            library.impl(name, body, key)
        torch.library.register_fake(f"pagecore::{name}", traced, lib=library)
    return library


# Held for as long as the module is: the registration ends with it.
_library = _register()
_write_kv = torch.ops.pagecore.write_kv.default
_plan_attention = torch.ops.pagecore.plan_attention.default
_paged_attention = torch.ops.pagecore.paged_attention.default
_paged_attention_lse = torch.ops.pagecore.paged_attention_lse.default
_paged_attention_out = torch.ops.pagecore.paged_attention_out.default
_merge_attention = torch.ops.pagecore.merge_attention.default
_copy_blocks = torch.ops.pagecore.copy_blocks.default


# ---- the same with the arguments of pagecore's own functions


_WIDEST = 2**31 - 1  # a window that no sequence reaches
_WRITTEN = "key value key_cache value_cache slot_mapping"
_ATTENDED = "query key_cache value_cache block_table seq_lens out"

# What torch takes for each option without a word; of what is something else `_check_option` decides.
_ARRAY = (torch.Tensor, type(None))
_NUMBER = (float, int, torch.SymFloat, torch.SymInt)
_OPTIONS = {
    **dict.fromkeys(("rows", "cu_query_lens", "sinks", "alibi_slopes", "mask", "key_scale", "value_scale"), _ARRAY),
    "plan": _ARRAY,
    "scale": (*_NUMBER, type(None)),
    "softcap": _NUMBER,
    "causal": (int,),
}


def _check_arguments(*arrays: object, options: dict[str, Any] | None = None, names: str = _ATTENDED) -> None:
    """Refuse what torch itself would refuse without a remedy, or take and give gradients of 0 for.

    `names` are those of the arrays; the last one names all that follow.
    """
    for array in arrays:
        if not isinstance(array, torch.Tensor):
            place = next(place for place, each in enumerate(arrays) if each is array)
            named = names.split()
            raise _no_tensor(array, f"is given as {named[min(place, len(named) - 1)]}")
    if options:
        for name, value in options.items():
            if name in _OPTIONS and not isinstance(value, _OPTIONS[name]):
                _check_option(name, value)
    if not torch.compiler.is_compiling() and (_transforms() or forward_ad._current_level >= 0):
        _refuse_gradients((*arrays, *(options or {}).values()))


def _check_option(name: str, value: Any) -> None:
    if _OPTIONS[name] is _ARRAY:
        raise _no_tensor(value, f"is given as {name}")
    if name == "causal":
        if not isinstance(value, np.bool_):
            raise UnsupportedOption(f"causal is {brief(value)}; it must be True or False")
        return
    if isinstance(value, torch.Tensor) and value.requires_grad:
        raise UnsupportedOption(f"{name} requires grad, and the operator has no gradient; pass {name}.item()")
    if not isinstance(value, np.number | torch.Tensor) or value.ndim:
        raise UnsupportedOption(f"{name} is {brief(value)}; it must be a number")


def _no_tensor(array: object, how: str) -> UnsupportedDtype:
    remedy = "as_torch(tensor)" if type(array) is Tensor else "torch.as_tensor(array)"
    return UnsupportedDtype(
        f"a {type(array).__module__}.{type(array).__name__} {how}; the operators take torch tensors alone: pass "
        f"{remedy}, or call pagecore's own function"
    )


def _refuse_gradients(given: tuple[Any, ...]) -> None:
    """Under torch.func an operator without a gradient is a constant to torch, and so it is to forward mode."""
    is_differentiated = any(
        transform.key() in (TransformType.Grad, TransformType.Jvp) for transform in _transforms() or ()
    )
    for array in (each for each in given if isinstance(each, torch.Tensor)):
        is_wrapped = is_differentiated and is_functorch_wrapped_tensor(array)
        if is_wrapped or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(array).tangent is not None):
            raise UnsupportedOption(
                "an operator is differentiated by torch.func or in forward mode, and it has no gradient; call it "
                "outside of what is differentiated, on plain tensors, or attend by other means"
            )


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: Scale = None,
    value_scale: Scale = None,
) -> None:
    """`pagecore.write_kv` as a torch operator; all arrays are torch tensors of one device, the caches are mutated.

    Raises
    ------
    UnsupportedDtype
        What is no torch tensor.
    As `pagecore.write_kv`; while a graph is traced, what does not fit is refused then.
    """
    if key_scale is None and value_scale is None:
        _check_arguments(key, value, key_cache, value_cache, slot_mapping, names=_WRITTEN)
        _write_kv(key, value, key_cache, value_cache, slot_mapping)
        return
    scales = {"key_scale": _each_head(key_scale, key_cache), "value_scale": _each_head(value_scale, key_cache)}
    _check_arguments(key, value, key_cache, value_cache, slot_mapping, options=scales, names=_WRITTEN)
    _write_kv(key, value, key_cache, value_cache, slot_mapping, **scales)


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
    _check_arguments(seq_lens, options=options)
    if num_tokens is None:
        if cu_query_lens is not None:
            raise ShapeError("num_tokens is missing; beside cu_query_lens it must be the number of rows of the query")
        num_tokens = seq_lens.shape[0]
    left, right = _window(window)
    plan: torch.Tensor = _plan_attention(
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
        options["window_left"], options["window_right"] = _window(window)
    if key_scale is not None:
        options["key_scale"] = _each_head(key_scale, key_cache)
    if value_scale is not None:
        options["value_scale"] = _each_head(value_scale, key_cache)
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
        _check_arguments(*arrays, options=options)
        if return_lse:
            both: tuple[torch.Tensor, torch.Tensor] = _paged_attention_lse(*arrays, **options)
            return both
        attended: torch.Tensor = _paged_attention(*arrays, **options)
        return attended
    if return_lse:
        raise UnsupportedOption("out and return_lse are both given; the operator with out= gives no lse: leave one out")
    _check_arguments(*arrays, out, options=options)
    _paged_attention_out(*arrays, out, **options)
    return out


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pagecore.merge_attention` as a torch operator, into fresh tensors."""
    _check_arguments(out_a, lse_a, out_b, lse_b, names="out_a lse_a out_b lse_b")
    merged: tuple[torch.Tensor, torch.Tensor] = _merge_attention(out_a, lse_a, out_b, lse_b)
    return merged


def copy_blocks(
    caches: torch.Tensor | Sequence[torch.Tensor], pairs: torch.Tensor, *, independent: bool = False
) -> None:
    """`pagecore.copy_blocks` as a torch operator; the caches are mutated."""
    listed = list(caches) if isinstance(caches, Sequence) else [caches]
    _check_arguments(pairs, *listed, names="pairs caches")
    _copy_blocks(listed, pairs, independent=bool(independent))


# ---- memory of pagecore as torch tensors


def as_torch(tensor: Tensor, *, read_only: bool = False) -> torch.Tensor:
    """A torch tensor over the memory of a `pagecore.Tensor`: `cache.key(0)`, `batch.positions`, a pool's plane.

    Zero-copy in every dtype of the table, bfloat16 and float8 among them. Each side keeps the memory alive, not the
    other: the cache may go first, or the torch tensor.

    Parameters
    ----------
    tensor : Tensor
    read_only : bool
        Show read-only memory too, such as `cache.block_table(0)`, for the operators to read. torch cannot guard it:
        whoever writes to it breaks what its owner counts on.

    Raises
    ------
    UnsupportedOption
        The tensor is read-only, and `read_only` does not allow for it; or it has negative strides.
    UnsupportedDtype
        No `pagecore.Tensor`.
    """
    if type(tensor) is not Tensor:
        raise UnsupportedDtype(
            f"tensor is a {type(tensor).__name__}; it must be a pagecore.Tensor, as pagecore.as_tensor returns it"
        )
    if tensor.readonly and not read_only:
        raise UnsupportedOption(
            "the tensor is read-only, which torch cannot say of a tensor; pass read_only=True where nobody writes to "
            "it, or copy it first"
        )
    refuse_negative_strides(tensor)
    shown: torch.Tensor = torch.from_dlpack(tensor)
    return shown


def _each_head(scale: Scale, key_cache: torch.Tensor) -> Any:
    """One number for each key head, as the operators take it; what is no number as it is, to be refused."""
    if not isinstance(scale, (*_NUMBER, np.number)) or not isinstance(key_cache, torch.Tensor):
        return scale
    if key_cache.ndim != 4:
        raise ShapeError(f"key_cache has shape {tuple(key_cache.shape)}; it must have 4 axes")
    return torch.full((key_cache.shape[2],), float(scale), dtype=torch.float32, device=key_cache.device)


def _window(window: Window) -> tuple[int, int]:
    """(left, right), -1 for no bound; a number of keys counts the query's own."""
    if window is None:
        return -1, -1
    if isinstance(window, tuple | list):
        if len(window) != 2:
            raise UnsupportedOption(f"window is {brief(window)}; it must be a number of keys, or (left, right)")
        left, right = (-1 if side is None else _count(side, window) for side in window)
        return left, right
    if _count(window, window) < 1:
        raise UnsupportedOption(f"window is {brief(window)}; it must be at least 1, the query's own key, or None")
    return _count(window, window) - 1, -1


def _count(number: Any, window: Window) -> Any:
    if isinstance(number, int | np.integer):
        return min(max(int(number), -2), _WIDEST)
    if isinstance(number, torch.SymInt):
        return number
    raise UnsupportedOption(f"window is {brief(window)}; it must be a number of keys, or (left, right)")
