"""Hooks by which a cache learns of its model's calls of `generate` and of its forward passes that run with it."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pagecore.interop.transformers.generation import Generation
from pagecore.interop.transformers.tracing import untraced


def register_hooks(model: PreTrainedModel, cache: Cache, generation: Generation) -> None:
    """Tell the cache of the model's calls of `generate` and forward passes, until it is gone.

    Most models run their base model, which knows more of what is given than the decoder within; some (OPT) run the
    decoder alone.
    """
    base, decoder = model.base_model, model.get_decoder()
    for module in (base,) if decoder is base else (base, decoder):
        _register_on(module, cache, generation)
    if model.can_generate():
        _register_on_generate(model, cache, generation)


def _register_on(module: torch.nn.Module, cache: Cache, generation: Generation) -> None:
    cache_reference, generation_reference = weakref.ref(cache), weakref.ref(generation)
    names = list(inspect.signature(module.forward).parameters)

    def running(given: dict[str, Any]) -> Generation | None:
        own = cache_reference()
        return generation_reference() if own is not None and given.get("past_key_values") is own else None

    @untraced
    def enter(called: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = dict(zip(names, arguments, strict=False)) | options
        own = running(given)
        if own is not None:
            own.enter(given, called)

    @untraced
    def leave(called: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        own = running(dict(zip(names, arguments, strict=False)) | options)
        if own is not None:
            own.leave(called, has_failed=output is None)

    for hook in (
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, with_kwargs=True, always_call=True),
    ):
        weakref.finalize(cache, hook.remove).atexit = False


class GenerateWrapper:
    """`generate` of a model that has paged caches: a cache reads the prompt before the model runs with it.

    transformers has no hook there, and cuts off what the cache holds before any hook of the model runs. The attribute
    ``model.generate`` is this object while the model has a cache; a deep copy of the model has its own method.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._replaced = model.__dict__.get("generate")  # somebody else's
        self._generations: dict[int, weakref.ref[Generation]] = {}  # by the identity of their caches
        self.__signature__ = inspect.signature(model.generate)
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Generate, with a cache of this model only after it has read the prompt."""
        model = self._model()
        assert model is not None
        given = options.get("past_key_values")
        generation = self._generations[id(given)]() if id(given) in self._generations else None
        if generation is not None:
            options = generation.enter_generate(model, arguments, options)
        generate = types.MethodType(type(model).generate, model) if self._replaced is None else self._replaced
        return generate(*arguments, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = self._model()
        copied = memo.get(id(model))
        return self if copied is None else types.MethodType(type(copied).generate, copied)

    def add(self, cache: Cache, generation: Generation) -> None:
        """Let a cache read the prompts of calls that are given it."""
        self._generations[id(cache)] = weakref.ref(generation)
        weakref.finalize(cache, self._forget, id(cache)).atexit = False

    def _forget(self, identity: int) -> None:
        del self._generations[identity]
        model = self._model()
        if model is None or self._generations or model.__dict__.get("generate") is not self:
            return
        if self._replaced is None:
            del model.generate
        else:
            model.generate = self._replaced


def _register_on_generate(model: PreTrainedModel, cache: Cache, generation: Generation) -> None:
    hook = model.__dict__.get("generate")
    if not isinstance(hook, GenerateWrapper):
        hook = GenerateWrapper(model)
        model.generate = hook
    hook.add(cache, generation)
