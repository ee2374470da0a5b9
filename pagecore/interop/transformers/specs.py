"""Specs of the layers of a transformers model, from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from packaging.version import Version

from pagecore.errors import UnsupportedOption
from pagecore.models import specs_from_config
from pagecore.models.families import FAMILIES
from pagecore.models.latent import LATENT_FAMILIES
from pagecore.models.unserved import FULL, SLIDING, unserved_kind
from pagecore.storage import AttentionSpec, LatentSpec

# The first version of transformers whose DeepSeek models pass latents to the cache.
_PASSES_LATENTS = Version("5.15.1")
# Rotary embeddings whose angles depend on the length of the text: keys that they rotated serve no other text.
_LENGTH_DEPENDENT = {"dynamic", "longrope"}


def specs_of_model(config: Any, dtype: str) -> list[AttentionSpec] | list[LatentSpec]:
    """Return the spec of each layer.

    Known families are read by `specs_from_config`; the fields of other configs are read with their usual meaning. If a
    model uses them otherwise, its first forward pass raises, because keys and windows are compared with the specs.

    Parameters
    ----------
    config : PretrainedConfig
        Config of the text model.
    dtype : str
        Name of the dtype of keys and values.

    Raises
    ------
    UnsupportedOption
        The number of heads or dims is missing, or a layer has neither full nor sliding-window attention (latent
        attention, linear-attention or recurrent states, chunked attention).
    PagecoreError
        As `specs_from_config`.
    """
    if config.model_type in FAMILIES:
        return specs_from_config(config.to_dict(), dtype=dtype)
    if config.model_type in LATENT_FAMILIES:
        latent = specs_from_config(config.to_dict(), dtype=dtype)
        return latent if Version(transformers.__version__) >= _PASSES_LATENTS else _expanded(config, dtype)
    attention = unserved_kind(config.model_type, lambda name: _given(config, name))
    if attention is not None:
        raise UnsupportedOption(
            f"the {config.model_type} has {attention}, which a PagedCache does not support; use another cache"
        )
    heads = _number(config, "num_attention_heads")
    kv_heads = 1 if _given(config, "multi_query") else _given(config, "num_key_value_heads") or heads
    head_dim = _given(config, "head_dim") or _number(config, "hidden_size") // heads
    return [
        AttentionSpec(kv_heads, head_dim, dtype=dtype, window=window, num_query_heads=heads)
        for window in _windows(config)
    ]


def _expanded(config: Any, dtype: str) -> list[AttentionSpec]:
    """Return the specs of a model with latent attention that passes expanded keys and values to the cache."""
    heads = _number(config, "num_attention_heads")
    key_dim = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
    spec = AttentionSpec(heads, key_dim, _number(config, "v_head_dim"), dtype=dtype, num_query_heads=heads)
    return [spec] * _number(config, "num_hidden_layers")


def keys_depend_on_length(config: Any) -> bool:
    """Return True if the model's rotary embedding depends on the length of the text."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    return any(parameters.get("rope_type", parameters.get("type")) in _LENGTH_DEPENDENT for parameters in each)


def _windows(config: Any) -> list[int | None]:
    """Return the window of each layer, read in the same way as by transformers' own caches."""
    window = _given(config, "sliding_window") if _given(config, "use_sliding_window") is not False else None
    kinds = _given(config, "layer_types")
    if kinds is None:
        kinds = [FULL if window is None else SLIDING] * _number(config, "num_hidden_layers")
    for layer, kind in enumerate(kinds):
        if kind not in (FULL, SLIDING) or (kind == SLIDING and window is None):
            raise UnsupportedOption(
                f"layer {layer} of the {config.model_type} is {kind!r} with sliding_window = {window}; a PagedCache "
                f"supports {FULL!r}, and {SLIDING!r} with a window: use another cache"
            )
    return [window if kind == SLIDING else None for kind in kinds]


def _given(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # only later versions of transformers have a subclass of their own
        raise UnsupportedOption(
            f"{name} in the config of the {config.model_type} differs between layers; pass "
            "layers=[AttentionSpec(...), ...], one for each layer"
        ) from None


def _number(config: Any, name: str) -> int:
    number = _given(config, name)
    if not isinstance(number, int) or number < 1:
        raise UnsupportedOption(
            f"the config of the {config.model_type} has {name} = {number!r}; expected an integer of at least 1: pass "
            "layers=[AttentionSpec(...), ...], one for each layer"
        )
    return number
