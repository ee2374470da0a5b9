"""Checks of what torch would refuse without a remedy, and arguments as the operators take them."""

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
from pagecore.arrays.refusals import brief
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption

Window: TypeAlias = int | tuple[int | None, int | None] | None
Scale: TypeAlias = torch.Tensor | float | None

_WIDEST = 2**31 - 1  # a window that no sequence reaches
WRITTEN = "key value key_cache value_cache slot_mapping"
ATTENDED = "query key_cache value_cache block_table seq_lens out"

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


def check_arguments(*arrays: object, options: dict[str, Any] | None = None, names: str = ATTENDED) -> None:
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


def each_head(scale: Scale, key_cache: torch.Tensor) -> Any:
    """One number for each key head, as the operators take it; what is no number as it is, to be refused."""
    if not isinstance(scale, (*_NUMBER, np.number)) or not isinstance(key_cache, torch.Tensor):
        return scale
    if key_cache.ndim != 4:
        raise ShapeError(f"key_cache has shape {tuple(key_cache.shape)}; it must have 4 axes")
    return torch.full((key_cache.shape[2],), float(scale), dtype=torch.float32, device=key_cache.device)


def window_sides(window: Window) -> tuple[int, int]:
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
