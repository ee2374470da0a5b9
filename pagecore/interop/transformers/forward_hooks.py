"""Hooks by which a cache is told of the forward passes of its model that run with it."""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch

from pagecore.interop.transformers.tracing import untraced

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pagecore.interop.transformers.cache import PagedCache


def register_hooks(model: PreTrainedModel, cache: PagedCache) -> None:
    """Tell the cache of the model's forward passes, until it is gone.

    Most models run their base model, which knows more of what is given than the decoder within; some (OPT) run the
    decoder alone.
    """
    base, decoder = model.base_model, model.get_decoder()
    for module in (base,) if decoder is base else (base, decoder):
        _register_on(module, cache)


def _register_on(module: torch.nn.Module, cache: PagedCache) -> None:
    reference = weakref.ref(cache)
    names = list(inspect.signature(module.forward).parameters)

    def running(given: dict[str, Any]) -> PagedCache | None:
        own = reference()
        return own if own is not None and given.get("past_key_values") is own else None

    @untraced
    def enter(called: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = dict(zip(names, arguments, strict=False)) | options
        own = running(given)
        if own is not None:
            own._enter(given, called)

    @untraced
    def leave(called: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        own = running(dict(zip(names, arguments, strict=False)) | options)
        if own is not None:
            own._leave(called, has_failed=output is None)

    for hook in (
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, with_kwargs=True, always_call=True),
    ):
        weakref.finalize(cache, hook.remove).atexit = False
