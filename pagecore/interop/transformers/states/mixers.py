"""Recurrent layers of a model, called once for each segment of a forward pass.

A call of a recurrent layer leaves one state, that after its last column. To keep a checkpoint inside a pass, the module
of the layer computes the columns up to the checkpoint in one call and the others in the next, which continues from the
state. Attention and all other layers compute the pass at once. The rows of a batch may keep checkpoints at different
columns.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pagecore.errors import UnsupportedOption
from pagecore.interop.transformers.inputs.arguments import cache_in
from pagecore.interop.transformers.states.layers import StateTensors
from pagecore.interop.transformers.tracing import untraced

# Names of the argument of a recurrent layer that marks columns with tokens.
MASKS = ("attention_mask", "conv_mask")
# Options that join several texts in one row.
_PACKED = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")


@dataclass
class _Wrapped:
    """A module that is called in segments.

    Attributes
    ----------
    parameters : tuple of str
        Names of the arguments of its forward method.
    previous : callable or None
        Another library's replacement of that method.
    single : bool
        The module computes columns after a state one by one: its scan always begins without a state.
    holders : int
        Number of caches that it is wrapped for.
    """

    parameters: tuple[str, ...]
    previous: Callable[..., Any] | None
    single: bool
    holders: int = 0


_wrapped: weakref.WeakKeyDictionary[torch.nn.Module, _Wrapped] = weakref.WeakKeyDictionary()


def recurrent_modules(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """Return the module that updates the state of each recurrent layer, by the index of the layer."""
    found: dict[int, torch.nn.Module] = {}
    for module in model.get_decoder().modules():
        layer: Any = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and hasattr(module, "conv_kernel_size"):
            found[layer] = module
    return found


def call_in_segments(modules: Iterable[torch.nn.Module], cache: Cache, *, single: bool) -> None:
    """Let modules compute the segments of a pass of `cache` one by one, until the cache is deleted.

    With `single`, columns that follow a state are computed one by one.
    """
    for module in modules:
        if module not in _wrapped:
            parameters = tuple(inspect.signature(type(module).forward).parameters)[1:]
            previous = None if _is_ours(module) else module.__dict__.get("forward")
            _wrapped[module] = _Wrapped(parameters, previous, single)
            module.forward = types.MethodType(forward, module)
        _wrapped[module].holders += 1
        weakref.finalize(cache, _release, weakref.ref(module)).atexit = False


@untraced
def forward(module: Any, *arguments: Any, **options: Any) -> Any:
    """Compute the columns of a call in segments if it has a PagedCache. Takes the place of the module's method."""
    # The name is that of the method, by which a pickled model finds it again.
    wrapped = _wrapped.get(module)
    if wrapped is None:
        return type(module).forward(module, *arguments, **options)
    original = wrapped.previous or types.MethodType(type(module).forward, module)
    given = dict(zip(wrapped.parameters, arguments, strict=False)) | options
    cache = cache_in(given)
    layer = cache.layers[module.layer_idx] if isinstance(cache, Cache) else None
    if not isinstance(layer, StateTensors):
        return original(*arguments, **options)
    for name in _PACKED:
        if given.get(name) is not None:
            raise UnsupportedOption(f"{name} is given, and a PagedCache has one state a row; pass one text in each row")
    return _run(original, given, layer, wrapped.single)


def _run(original: Callable[..., Any], given: dict[str, Any], layer: StateTensors, single: bool) -> Any:
    named = next((name for name in MASKS if given.get(name) is not None), MASKS[0])
    columns, mask = given["hidden_states"], given.get(named)
    if mask is not None:
        mask = mask[:, -columns.shape[1] :]  # Mamba's models pass on the mask of all columns
    outputs: list[tuple[torch.Tensor, ...]] = []
    is_tuple = False
    start = 0
    for segment in layer.segments:
        step = 1 if single and layer.has_state else segment.end - start
        for column in range(start, segment.end, step):
            part = given | {"hidden_states": columns[:, column : column + step]}
            if mask is not None:
                part[named] = mask[:, column : column + step]
            output = original(**part)
            is_tuple = isinstance(output, tuple)
            outputs.append(output if is_tuple else (output,))
        if any(each.requires_grad for each in outputs[-1]):
            raise UnsupportedOption(
                "the states of the forward pass require grad, and a paged cache has no gradients; run the model under "
                "torch.no_grad() or torch.inference_mode(), as generate does"
            )
        layer.settle(segment)
        start = segment.end
    joined = outputs[0] if len(outputs) == 1 else tuple(torch.cat(each, dim=1) for each in zip(*outputs, strict=True))
    return joined if is_tuple else joined[0]


def _is_ours(module: torch.nn.Module) -> bool:
    """Return True if the method of a module is replaced by `forward`, as in a deep copy of a wrapped module."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is forward


def _release(reference: weakref.ref[torch.nn.Module]) -> None:
    module = reference()
    if module is None:
        return
    wrapped = _wrapped[module]
    wrapped.holders -= 1
    if wrapped.holders:
        return
    del _wrapped[module]
    if not _is_ours(module):
        return
    if wrapped.previous is None:
        del module.forward
    else:
        module.forward = wrapped.previous
