"""Hooks by which a cache is told of the forward passes of its model that run with it."""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch

from pagecore.interop.transformers.attention import untraced

if TYPE_CHECKING:
    from pagecore.interop.transformers.cache import PagedCache


def follow(module: torch.nn.Module, cache: PagedCache) -> None:
    """Tell the cache of the module's forward passes, until it is gone."""
    reference = weakref.ref(cache)
    names = list(inspect.signature(module.forward).parameters)

    def running(given: dict[str, Any]) -> PagedCache | None:
        own = reference()
        return own if own is not None and given.get("past_key_values") is own else None

    @untraced
    def enter(_: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = dict(zip(names, arguments, strict=False)) | options
        own = running(given)
        if own is not None:
            own._enter(given)

    @untraced
    def leave(_: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        own = running(dict(zip(names, arguments, strict=False)) | options)
        if own is not None:
            own._leave(has_failed=output is None)

    for hook in (
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, with_kwargs=True, always_call=True),
    ):
        weakref.finalize(cache, hook.remove).atexit = False
