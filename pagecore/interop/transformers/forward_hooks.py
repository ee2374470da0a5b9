"""Hooks by which a cache learns of its model's calls of `generate` and of its forward passes that run with it."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from pagecore.interop.transformers.tracing import untraced

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pagecore.interop.transformers.cache import PagedCache


def register_hooks(model: PreTrainedModel, cache: PagedCache) -> None:
    """Tell the cache of the model's calls of `generate` and forward passes, until it is gone.

    Most models run their base model, which knows more of what is given than the decoder within; some (OPT) run the
    decoder alone.
    """
    base, decoder = model.base_model, model.get_decoder()
    for module in (base,) if decoder is base else (base, decoder):
        _register_on(module, cache)
    if model.can_generate():
        _register_on_generate(model, cache)


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


class Generate:
    """`generate` of a model that has paged caches: a cache reads the prompt before the model runs with it.

    transformers has no hook there, and cuts off what the cache holds before any hook of the model runs. The attribute
    ``model.generate`` is this object while the model has a cache; a deep copy of the model has its own method.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._replaced = model.__dict__.get("generate")  # somebody else's
        self._caches: dict[int, weakref.ref[PagedCache]] = {}
        self.__signature__ = inspect.signature(model.generate)
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Generate, with a cache of this model only after it has read the prompt."""
        model = self._model()
        assert model is not None
        given = options.get("past_key_values")
        cache = self._caches[id(given)]() if id(given) in self._caches else None
        if cache is not None:
            options = cache._meet_prompt(model, arguments, options)
        generate = types.MethodType(type(model).generate, model) if self._replaced is None else self._replaced
        return generate(*arguments, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = self._model()
        copied = memo.get(id(model))
        return self if copied is None else types.MethodType(type(copied).generate, copied)

    def add(self, cache: PagedCache) -> None:
        """Let a cache read the prompts of calls that are given it."""
        self._caches[id(cache)] = weakref.ref(cache)
        weakref.finalize(cache, self._forget, id(cache)).atexit = False

    def _forget(self, identity: int) -> None:
        del self._caches[identity]
        model = self._model()
        if model is None or self._caches or model.__dict__.get("generate") is not self:
            return
        if self._replaced is None:
            del model.generate
        else:
            model.generate = self._replaced


def _register_on_generate(model: PreTrainedModel, cache: PagedCache) -> None:
    hook = model.__dict__.get("generate")
    if not isinstance(hook, Generate):
        hook = Generate(model)
        model.generate = hook
    hook.add(cache)
