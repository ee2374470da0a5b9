"""What the layers of a transformers model store, by its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models import specs_from_config
from pagecore.models.families import FAMILIES
from pagecore.models.unserved import FULL, SLIDING, unserved_kind
from pagecore.storage import AttentionSpec

# Rotary embeddings whose angles depend on the length of the text: keys that they rotated serve no other text.
_LENGTH_DEPENDENT = {"dynamic", "longrope"}


def specs_of_model(config: Any, dtype: str) -> list[AttentionSpec]:
    """The spec of each layer: `specs_from_config` for the families that it knows, the fields' usual meaning for others.

    Where they mean something else, the first pass of the model is refused: a layer's keys and its window must be those
    of its spec.

    Raises
    ------
    UnsupportedOption
        A config without a number of heads or dims, or with layers of neither full nor sliding-window attention:
        latent attention, linear-attention or recurrent states, chunked attention.
    As `specs_from_config`.
    """
    if config.model_type in FAMILIES:
        return specs_from_config(config.to_dict(), dtype=dtype)
    attention = unserved_kind(config.model_type, lambda name: _given(config, name))
    if attention is not None:
        raise UnsupportedOption(
            f"the {config.model_type} has {attention}, which a PagedCache does not serve: use another cache"
        )
    heads = _number(config, "num_attention_heads")
    kv_heads = 1 if _given(config, "multi_query") else _given(config, "num_key_value_heads") or heads
    head_dim = _given(config, "head_dim") or _number(config, "hidden_size") // heads
    return [
        AttentionSpec(kv_heads, head_dim, dtype=dtype, window=window, num_query_heads=heads)
        for window in _windows(config)
    ]


def keys_depend_on_length(config: Any) -> bool:
    """Return True if the model's rotary embedding depends on the length of the text."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    return any(parameters.get("rope_type", parameters.get("type")) in _LENGTH_DEPENDENT for parameters in each)


def _windows(config: Any) -> list[int | None]:
    """The window of each layer, as transformers' own caches read them."""
    window = _given(config, "sliding_window") if _given(config, "use_sliding_window") is not False else None
    kinds = _given(config, "layer_types")
    if kinds is None:
        kinds = [FULL if window is None else SLIDING] * _number(config, "num_hidden_layers")
    for layer, kind in enumerate(kinds):
        if kind not in (FULL, SLIDING) or (kind == SLIDING and window is None):
            raise UnsupportedOption(
                f"layer {layer} of the {config.model_type} is {kind!r} with a sliding_window of {window}; a PagedCache "
                f"serves {FULL!r}, and {SLIDING!r} with a window: use another cache"
            )
    return [window if kind == SLIDING else None for kind in kinds]


def _given(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers has a class of its own for it, in its later versions alone
        raise UnsupportedOption(
            f"the config of the {config.model_type} has {name} that differs between layers; give "
            "layers=[AttentionSpec(...), ...], one for each layer"
        ) from None


def _number(config: Any, name: str) -> int:
    number = _given(config, name)
    if not isinstance(number, int) or number < 1:
        raise UnsupportedOption(
            f"the config of the {config.model_type} has {name} = {number!r}, which tells nothing of what its layers "
            "store; give layers=[AttentionSpec(...), ...], one for each layer"
        )
    return number
