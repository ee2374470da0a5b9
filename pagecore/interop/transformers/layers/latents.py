"""Latents of a model's attention: passed on to the attention implementation without expanding them.

Since transformers 5.15.1 the attention of DeepSeek and its kin passes latents to ``cache.update`` and expands what it
gets back to keys and values with its method ``expand_kv``. With a `PagedCache` that method returns the latents as they
are, marked as stored; the attention implementation multiplies each query by the key half of ``kv_b_proj`` (absorbs it),
attends to the paged latents, and multiplies the output by the value half. Nothing is expanded.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pagecore.interop.transformers.implementation import NAME
from pagecore.interop.transformers.layers.attention import stored_keys

# Number of caches for which a module passes its latents on.
_holders: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


def caches_latents(model: PreTrainedModel) -> bool:
    """Return True if the attention of the model stores latents; False if it stores expanded keys and values."""
    return next(_latent_modules(model), None) is not None


def latent_scale(model: PreTrainedModel) -> float:
    """Return the factor of the scores of latent attention; for a model that stores latents."""
    return float(next(_latent_modules(model)).scaling)


def pass_latents_on(model: PreTrainedModel, cache: Cache) -> None:
    """Let the attention of the model pass stored latents on without expanding them, until `cache` is deleted."""
    for module in _latent_modules(model):
        if module not in _holders:
            module.expand_kv = types.MethodType(expand_kv, module)
        _holders[module] = _holders.get(module, 0) + 1
        weakref.finalize(cache, _release, weakref.ref(module)).atexit = False


def expand_kv(module: torch.nn.Module, latent: torch.Tensor, rope: torch.Tensor) -> tuple[Any, Any]:
    """Return stored latents as they are; expand others to keys and values. Takes the place of the module's method."""
    # The name is that of the method, by which a pickled model finds it again.
    if stored_keys(latent) is not None and module.config._attn_implementation == NAME:
        return latent, rope
    expanded: tuple[Any, Any] = type(module).expand_kv(module, latent, rope)
    return expanded


def _latent_modules(model: PreTrainedModel) -> Iterator[Any]:
    for module in model.modules():
        if hasattr(module, "kv_b_proj") and callable(getattr(type(module), "expand_kv", None)):
            yield module


def _release(reference: weakref.ref[torch.nn.Module]) -> None:
    module = reference()
    if module is None:
        return
    _holders[module] -= 1
    if not _holders[module]:
        del _holders[module]
        module.__dict__.pop("expand_kv", None)
