"""Name and dtypes of the attention implementation, and the check that a model uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from pagecore.errors import UnsupportedOption, shown

NAME = "pagecore"
# Dtypes of queries, keys and values.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Models that attend to keys other than those that they store, such as copies for each expert.
_REPEATING = frozenset({"jetmoe"})
# Models whose masks have no window: transformers' caches drop the keys before it.
_WINDOW_IN_CACHE_ONLY = frozenset({"kyutai_speech_to_text", "moshi"})
REMEDY = f'call model.set_attn_implementation("{NAME}")'


def check_implementation(model: PreTrainedModel) -> None:
    """Raise UnsupportedOption unless the attention implementation of the model is "pagecore"."""
    config = model.config.get_text_config(decoder=True)
    if config.model_type in _REPEATING:
        raise UnsupportedOption(
            f"the {type(model).__name__} repeats keys and values after storing them; use another cache"
        )
    name = config._attn_implementation
    if name == NAME:
        return
    if not getattr(type(model), "_can_set_attn_implementation", lambda: True)():
        raise UnsupportedOption(
            f"the {type(model).__name__} computes attention by code of its own, which transformers cannot replace; use "
            "another cache"
        )
    raise UnsupportedOption(f"the model's attention implementation is {name!r}; {REMEDY}")


def has_window_in_cache_only(attention: torch.nn.Module) -> bool:
    """Return True for attention of a model whose window is that of its cache, and in no mask."""
    return getattr(getattr(attention, "config", None), "model_type", None) in _WINDOW_IN_CACHE_ONLY


def device_of(model: PreTrainedModel, options: Mapping[str, Any]) -> str:
    """Return the device of a cache; raise UnsupportedOption if the `options` of the cache name another one."""
    if "device" in options:
        raise UnsupportedOption(
            f"device is {shown(options['device'])}, but the cache of a model is on its device, {model.device}; leave "
            "it out, and move the model"
        )
    return "cpu" if model.device.type == "cpu" else str(model.device)
