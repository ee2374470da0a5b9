"""Checks and conversions of arguments before torch dispatches an operator."""

from __future__ import annotations

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

from pagecore.arrays import Tensor
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption, shown
from pagecore.ops import SealedBlocks

Window: TypeAlias = int | tuple[int | None, int | None] | None
Scale: TypeAlias = torch.Tensor | float | None

_WINDOW_MAX = 2**31 - 1  # wider than any sequence is long
WRITE_ARRAYS = "key value key_cache value_cache slot_mapping"
SEALED_PLANES = ("sealed_key", "sealed_value", "sealed_key_scale", "sealed_value_scale")
ATTENTION_ARRAYS = "query key_cache value_cache block_table seq_lens out"

# Types of each option that torch accepts without a check; `_check_option` decides about other types.
_ARRAY = (torch.Tensor, type(None))
_NUMBER = (float, int, torch.SymFloat, torch.SymInt)
_LARGEST = torch.finfo(torch.float32).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of a float8 query or output
_BOOLS = (bool, np.bool_, torch.SymBool)
# Given for a layer or for each head.
_FACTORS = ("key_scale", "value_scale", "query_scale", "output_scale")
_OPTIONS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("rows", "cu_query_lens", "sinks", "alibi_slopes", "mask", "tree_mask", "positions", "plan"), _ARRAY
    ),
    **dict.fromkeys((*_FACTORS, "key_scale_cache", "value_scale_cache", "cu_parts"), _ARRAY),
    **dict.fromkeys(("blocks", "block_counts", "indices", "index_counts"), _ARRAY),
    **dict.fromkeys(("key_min", "key_max", "label", "label_channels"), _ARRAY),
    **dict.fromkeys((*SEALED_PLANES, "sealed_block_table", "sealed_lens"), _ARRAY),
    "scale": (*_NUMBER, type(None)),
    **dict.fromkeys(("softcap", "key_global_scale", "value_global_scale"), _NUMBER),
    "causal": (bool,),
}
_NUMERIC = (*_FACTORS, "scale", "softcap", "key_global_scale", "value_global_scale")


def check_arguments(*arrays: object, options: dict[str, Any] | None = None, names: str = ATTENTION_ARRAYS) -> None:
    """Raise for arguments that torch would reject without a remedy, or would accept and give gradients of 0.

    Parameters
    ----------
    *arrays : object
        Must be torch tensors.
    options : dict, optional
        The other arguments by name.
    names : str
        Names of `arrays`, separated by spaces; the last one names all further arrays.
    """
    for array in arrays:
        if not isinstance(array, torch.Tensor):
            position = next(position for position, each in enumerate(arrays) if each is array)
            listed = names.split()
            raise _not_a_tensor(array, listed[min(position, len(listed) - 1)])
    if options:
        for name, value in options.items():
            if name in _OPTIONS and (not isinstance(value, _OPTIONS[name]) or (name in _NUMERIC and _is_bool(value))):
                _check_option(name, value)
    if not torch.compiler.is_compiling() and (_transforms() or forward_ad._current_level >= 0):
        _refuse_gradients((*arrays, *(options or {}).values()))


def _check_option(name: str, value: Any) -> None:
    if name in _FACTORS and _is_bool(value):
        raise UnsupportedOption(f"{name} is {shown(value)}; it must be a number, or a tensor of one for each head")
    if _OPTIONS[name] is _ARRAY:
        raise _not_a_tensor(value, name)
    if name == "causal":
        if not isinstance(value, int | np.bool_) or value not in (0, 1):
            raise UnsupportedOption(f"causal is {shown(value)}; it must be True or False")
        return
    if isinstance(value, torch.Tensor) and value.requires_grad:
        raise UnsupportedOption(f"{name} requires grad, and the operator has no gradient; pass {name}.item()")
    if not isinstance(value, np.number | torch.Tensor) or value.ndim or _is_bool(value):
        raise UnsupportedOption(f"{name} is {shown(value)}; it must be a number")


def _is_bool(value: object) -> bool:
    return isinstance(value, _BOOLS) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool)


def _not_a_tensor(array: object, name: str) -> UnsupportedDtype:
    remedy = "as_torch(tensor)" if type(array) is Tensor else "torch.as_tensor(array)"
    kind = f"{type(array).__module__}.{type(array).__name__}".removeprefix("builtins.")
    return UnsupportedDtype(
        f"{name} is a {kind}; expected a torch.Tensor: pass {remedy}, or call the function of the package pagecore"
    )


def _refuse_gradients(given: tuple[Any, ...]) -> None:
    """Refuse torch.func and forward mode, which treat an operator without a gradient as a constant."""
    is_differentiated = any(
        transform.key() in (TransformType.Grad, TransformType.Jvp) for transform in _transforms() or ()
    )
    for array in (each for each in given if isinstance(each, torch.Tensor)):
        is_wrapped = is_differentiated and is_functorch_wrapped_tensor(array)
        if is_wrapped or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(array).tangent is not None):
            raise UnsupportedOption(
                "torch.func or forward mode differentiates an operator of pagecore, which has no gradient; call the "
                "operator outside of the differentiated function, or use another implementation of attention"
            )


def per_head_scale(name: str, scale: Scale, key_cache: torch.Tensor, least: float | None = None) -> Any:
    """Expand a number, or a tensor of one, to a float32 tensor ``[Hkv]``; return any other value unchanged.

    Numbers must be finite as a float32, and at least `least`. The kernel checks tensors that are on the host.
    """
    if _is_bool(scale):
        return scale
    if isinstance(scale, torch.Tensor):
        if scale.shape not in ((), (1,)) or not isinstance(key_cache, torch.Tensor):
            return scale
        return scale.float().reshape(1).repeat(_num_kv_heads(key_cache))  # its value may be on a device
    if not isinstance(scale, (*_NUMBER, np.number)) or not isinstance(key_cache, torch.Tensor):
        return scale
    num_kv_heads = _num_kv_heads(key_cache)
    return torch.full((num_kv_heads,), _checked(name, scale, least), dtype=torch.float32, device=key_cache.device)


def one_scale(name: str, scale: Scale, key_cache: torch.Tensor, least: float) -> Any:
    """Return a number of at least `least` as a float32 tensor ``[1]``; return any other value unchanged."""
    if _is_bool(scale) or not isinstance(scale, (*_NUMBER, np.number)) or not isinstance(key_cache, torch.Tensor):
        return scale
    return torch.full((1,), _checked(name, scale, least), dtype=torch.float32, device=key_cache.device)


def _checked(name: str, scale: Any, least: float | None) -> float:
    number = float(scale)
    if not abs(number) <= _LARGEST:
        raise UnsupportedOption(f"{name} is {number}; it must be finite as a float32")
    if least is not None and number < least:
        raise UnsupportedOption(f"{name} holds {number}; as a float32 it must be {least:.3g} or more")
    return number


def _num_kv_heads(key_cache: torch.Tensor) -> int:
    if key_cache.ndim != 4:
        raise ShapeError(f"key_cache has shape {tuple(key_cache.shape)}; it must have 4 axes")
    num_kv_heads: int = key_cache.shape[2]
    return num_kv_heads


def limits(window: Window, chunk: int | None, sink_tokens: int | None) -> dict[str, Any]:
    """Return the arguments of the operators for the limits that are not None."""
    given: dict[str, Any] = {}
    if window is not None:
        given["window_left"], given["window_right"] = window_sides(window)
    for name, count in (("chunk", chunk), ("sink_tokens", sink_tokens)):
        if count is None:
            continue
        if not isinstance(count, int | np.integer) or isinstance(count, bool):
            raise UnsupportedOption(f"{name} is {shown(count)}; it counts keys and must be an integer or None")
        given[name] = min(int(count), _WINDOW_MAX)
    return given


def take_sealed(options: dict[str, Any]) -> None:
    """Replace `sealed` by the arguments of the operators; raise UnsupportedOption unless it is a SealedBlocks."""
    sealed = options.pop("sealed", None)
    if sealed is None:
        return
    if not isinstance(sealed, SealedBlocks):
        raise UnsupportedOption(f"sealed is {shown(sealed)}; pass a SealedBlocks")
    options |= {f"sealed_{name}": array for name, array in sealed._asdict().items()}


def refuse_stream(options: dict[str, Any]) -> None:
    """Remove `stream`, which the operators lack; raise UnsupportedOption unless it is None."""
    if options.pop("stream", None) is not None:
        raise UnsupportedOption(
            "stream is not an option of the torch operators, which run on torch's current stream; leave stream out, or "
            "call the function of the package pagecore"
        )


def is_plane(scale: Any) -> bool:
    """Return whether a scale is a plane of stored scales, ``[num_blocks, block_size, Hkv, groups]``."""
    return isinstance(scale, torch.Tensor) and scale.ndim > 1


def window_sides(window: Window) -> tuple[int, int]:
    """Return ``(left, right)`` of the option `window`, -1 for no bound.

    A single number counts the query's own key: 1 is a left side of 0.
    """
    if window is None:
        return -1, -1
    if isinstance(window, tuple | list):
        if len(window) != 2:
            raise UnsupportedOption(f"window is {shown(window)}; it must be a number of keys, or (left, right)")
        left, right = (-1 if side is None else _count(side, window) for side in window)
        return left, right
    if _count(window, window) < 1:
        raise UnsupportedOption(f"window is {shown(window)}; it must be at least 1, the query's own key, or None")
    count = _count(window, window)
    return (-1 if isinstance(count, int) and count == _WINDOW_MAX else count - 1), -1


def _count(number: Any, window: Window) -> Any:
    if isinstance(number, int | np.integer) and not isinstance(number, bool):
        return min(max(int(number), -2), _WINDOW_MAX)
    if isinstance(number, torch.SymInt):
        return number
    raise UnsupportedOption(f"window is {shown(window)}; it must be a number of keys, or (left, right)")
