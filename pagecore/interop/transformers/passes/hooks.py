"""Hooks on a model that report its forward passes and calls of `generate` to the generation of a paged cache."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pagecore.interop.transformers.inputs.arguments import CACHE, CACHES, cache_in
from pagecore.interop.transformers.passes.generation import Generation
from pagecore.interop.transformers.tracing import untraced


def register_hooks(model: PreTrainedModel, cache: Cache, generation: Generation) -> None:
    """Hook forward passes and `generate` of a model; the hooks are removed when the cache is deleted.

    Most models run their base model, which gets more arguments than the decoder inside it; some (OPT) only run the
    decoder. So both are hooked.

    Parameters
    ----------
    model : PreTrainedModel
    cache : Cache
        Only passes with this object as an argument of one of the names in `CACHES` are reported.
    generation : Generation
        Receives the reports.
    """
    base, decoder = model.base_model, model.get_decoder()
    # The base model of a model with an encoder gets the encoder's ids.
    hooked = (decoder,) if decoder is base or generation.has_encoder else (base, decoder)
    for module in hooked:
        _hook_module(module, cache, generation)
    if generation.has_encoder:
        _hook_encoder(model, cache, generation)
    if model.can_generate():
        _wrap_generate(model, cache, generation)


def _hook_encoder(model: PreTrainedModel, cache: Cache, generation: Generation) -> None:
    """Report each run of the encoder: within `generate` it starts the rows over, as for each segment of a Whisper."""
    reference = weakref.ref(generation)

    def encode(*_: Any) -> None:
        own = reference()
        if own is not None:
            own.enter_encoder()

    hook = model.get_encoder().register_forward_pre_hook(encode)
    weakref.finalize(cache, hook.remove).atexit = False


def _hook_module(module: torch.nn.Module, cache: Cache, generation: Generation) -> None:
    cache_reference, generation_reference = weakref.ref(cache), weakref.ref(generation)
    names = list(inspect.signature(module.forward).parameters)

    def running(given: dict[str, Any]) -> Generation | None:
        own = cache_reference()
        return generation_reference() if own is not None and cache_in(given) is own else None

    @untraced
    def enter(called: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given = dict(zip(names, arguments, strict=False)) | options
        own = running(given)
        if own is None:
            return None
        left = own.without_computed(given)
        own.enter(left, called)
        return None if left is given else ((), left)

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
    """Replacement of ``model.generate`` that lets a paged cache read the whole prompt first.

    transformers has no hook there, and removes the columns that the cache holds from the prompt before it calls the
    model. The attribute ``model.generate`` is this object while the model has a paged cache. A deep copy of the model
    has the method of its class.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._previous = model.__dict__.get("generate")  # another library's replacement, or None
        self._generations: dict[int, weakref.ref[Generation]] = {}  # by the identity of their caches
        self.__signature__ = inspect.signature(model.generate)
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Generate; if the call has a paged cache of this model, its generation reads the prompt first."""
        model = self._model()
        assert model is not None
        given = cache_in(options)
        generation = self._generations[id(given)]() if id(given) in self._generations else None
        if generation is not None:
            arguments, options = self._by_name(arguments, options)
            options = generation.enter_generate(model, arguments, options)
            named = inspect.signature(type(model).forward).parameters
            name = "cache_params" if "cache_params" in named else CACHE
            options = {each: value for each, value in options.items() if each not in CACHES} | {name: given}
            generation.gets_whole_prompt = name == "cache_params" or (name == "cache" and all(given.is_linear))
        generate = types.MethodType(type(model).generate, model) if self._previous is None else self._previous
        try:
            return generate(*arguments, **options)
        finally:
            if generation is not None:
                generation.is_generating = generation.gets_whole_prompt = False

    def _by_name(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with all but the first by name, such as a positional `generation_config`."""
        taken = [
            name for name, each in self.__signature__.parameters.items() if each.kind == each.POSITIONAL_OR_KEYWORD
        ]
        later = dict(zip(taken[1:], arguments[1:], strict=False))
        if len(arguments) > len(taken) or later.keys() & options.keys():
            return arguments, options  # generate raises for these
        return arguments[:1], later | options

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = self._model()
        copied = memo.get(id(model))
        return self if copied is None else types.MethodType(type(copied).generate, copied)

    def add(self, cache: Cache, generation: Generation) -> None:
        """Register a cache; it is unregistered when it is deleted."""
        self._generations[id(cache)] = weakref.ref(generation)
        weakref.finalize(cache, self._remove, id(cache)).atexit = False

    def _remove(self, identity: int) -> None:
        del self._generations[identity]
        model = self._model()
        if model is None or self._generations or model.__dict__.get("generate") is not self:
            return
        if self._previous is None:
            del model.generate
        else:
            model.generate = self._previous


def _wrap_generate(model: PreTrainedModel, cache: Cache, generation: Generation) -> None:
    hook = model.__dict__.get("generate")
    if not isinstance(hook, GenerateWrapper):
        hook = GenerateWrapper(model)
        model.generate = hook
    hook.add(cache, generation)
