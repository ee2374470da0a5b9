"""Specs of the layers of a transformers model, from its config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pagecore.errors import UnsupportedOption, shown
from pagecore.models import specs_from_config
from pagecore.models.families.registry import FAMILIES
from pagecore.models.layer_types import FULL, SLIDING
from pagecore.models.layers.unsupported import UNATTENDED_TYPES, unsupported_layers
from pagecore.storage import Alias, AttentionSpec, CrossSpec, LatentSpec, RowSpec, StateSpec
from pagecore.storage.specs.sealing import format_of_layer

_READ = {name: family for name, family in FAMILIES.items() if family.states is None}
# Rotary embeddings whose angles depend on the length of the text: keys that they rotated serve no other text.
_LENGTH_DEPENDENT = {"dynamic", "longrope"}


def specs_of_model(
    config: Any, dtype: str, format: str | None = None, *, latents: bool = True
) -> list[AttentionSpec | LatentSpec]:
    """Return the spec of each layer.

    Known families are read by `specs_from_config`; the fields of other configs are read with their usual meaning. If a
    model uses them otherwise, its first forward pass raises, because keys and windows are compared with the specs.

    Parameters
    ----------
    config : PretrainedConfig
        Config of the text model.
    dtype : str
        Name of the dtype of keys and values.
    format : str, optional
        Format in which they are stored; by default as they are. The model's `quantization_config` is not read: its
        format needs the scales of the checkpoint.
    latents : bool
        True if latent attention stores latents; False if it stores the expanded keys and values of all heads.

    Raises
    ------
    UnsupportedOption
        The number of heads or dims is missing, or a layer has neither full, sliding-window, chunked (Llama 4) nor
        latent attention (an indexer, linear-attention or recurrent states).
    PagecoreError
        As `specs_from_config`.
    """
    attention = UNATTENDED_TYPES.get(config.model_type)
    if config.model_type in _READ and attention is None:
        if _READ[config.model_type].stores_latents and not latents:
            return _expanded(config, dtype, format)
        return _of_family(config, dtype, format)
    attention = attention or unsupported_layers(config.model_type, lambda name: _given(config, name))
    if attention is not None:
        raise UnsupportedOption(
            f"the {config.model_type} has {attention}, which a PagedCache does not support; use another cache"
        )
    return attention_specs(config, _windows(config), dtype, format)


def attention_specs(
    config: Any, windows: Iterable[int | None], dtype: str, format: str | None
) -> list[AttentionSpec | LatentSpec]:
    """Return the spec of a layer for each window, from fields of the config with their usual meaning."""
    # In a decoder of BART's kin, num_attention_heads and num_key_value_heads are those of the encoder.
    own = _given(config, "decoder_attention_heads")
    heads = own or _number(config, "num_attention_heads")
    kv_heads = 1 if _given(config, "multi_query") else own or _given(config, "num_key_value_heads") or heads
    head_dim = _given(config, "head_dim") or _number(config, "hidden_size") // heads
    return [
        AttentionSpec(
            kv_heads,
            head_dim,
            dtype=dtype,
            window=window,
            num_query_heads=heads,
            format=format_of_layer(format, window),
        )
        for window in windows
    ]


def latent_specs(
    config: Any, windows: Iterable[int | None], dtype: str, format: str | None, scale: float
) -> list[AttentionSpec | LatentSpec]:
    """Return the spec of a layer with latent attention for each window, from fields of the config."""
    latent, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
    heads = _number(config, "num_attention_heads")
    return [LatentSpec(latent, rope, num_query_heads=heads, scale=scale, dtype=dtype, format=format) for _ in windows]


class StorageOptions(NamedTuple):
    """Formats and rotations of layers whose specs are read from a config; as for `AttentionSpec`."""

    format: str | None = None
    value_format: str | None = None
    key_rotation: str | None = None
    value_rotation: str | None = None


def refuse_stored(stored: StorageOptions) -> None:
    """Raise UnsupportedOption for a format or rotation next to specs of the caller."""
    for name, given in stored._asdict().items():
        if given is not None:
            raise UnsupportedOption(f"{name} is {shown(given)}, and layers are given; give their specs the {name}")


def refuse_format_of_states(who: str, format: str | None) -> None:
    """Raise UnsupportedOption for a format of the keys and values of a model that has none."""
    if format is not None:
        raise UnsupportedOption(
            f"format is {shown(format)}, but the {who} stores states and no keys and values; leave it out, or pass "
            'checkpoint_format="int8"'
        )


def refuse_cross_layers(who: str, layers: Iterable[object]) -> None:
    """Raise UnsupportedOption for layers that attend to images or to the output of an encoder."""
    for layer, spec in enumerate(layers):
        if isinstance(spec, CrossSpec):
            raise UnsupportedOption(
                f"layer {layer} of the {who} attends to images or to an encoder (a CrossSpec), which a PagedCache does "
                "not support; use another cache"
            )


def count_layers(config: Any) -> int:
    """Return the number of layers of a cache of the model: of the decoder in the kin of BART, and of all loops."""
    layers: int = _given(config, "decoder_layers") or _number(config, "num_hidden_layers")
    return layers + _layers_of_later_loops(config)


def _layers_of_later_loops(config: Any) -> int:
    """Return the number of layers that the loops of Dory after the first one store."""
    return (config.n_recurrent_loops - 1) * config.n_recurrent_layers if config.model_type == "dory" else 0


def _by_cache_layer(config: Any, specs: list[Any]) -> list[Any]:
    """Return specs in the order of transformers' cache: later loops follow all layers of the model.

    Raises
    ------
    UnsupportedOption
        Loops before the last one read the cached keys themselves.
    """
    later = _layers_of_later_loops(config)
    if later and config.recurrent_kv_cache_mode != "per_loop":
        raise UnsupportedOption(
            f"the {config.model_type} has recurrent_kv_cache_mode = {config.recurrent_kv_cache_mode!r}, and loops "
            'before the last one read cached keys outside of the attention; set it to "per_loop", or use another cache'
        )
    end = config.n_input_layers + config.n_recurrent_layers
    return [*specs[:end], *specs[end + later :], *specs[end : end + later]]


def keys_depend_on_length(config: Any) -> bool:
    """Return True if the model's rotary embedding depends on the length of the text."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    return any(parameters.get("rope_type", parameters.get("type")) in _LENGTH_DEPENDENT for parameters in each)


def _expanded(config: Any, dtype: str, format: str | None) -> list[AttentionSpec | LatentSpec]:
    """Return specs of the keys and values that latent attention expands for every head."""
    heads, value_dim = _number(config, "num_attention_heads"), _number(config, "v_head_dim")
    key_dim = _number(config, "qk_nope_head_dim") + _number(config, "qk_rope_head_dim")
    return [
        AttentionSpec(heads, key_dim, value_dim, dtype=dtype, num_query_heads=heads, scale=latent.scale, format=format)
        for latent in _of_family(config, dtype, None)
    ]


def _of_family(config: Any, dtype: str, format: str | None) -> list[AttentionSpec | LatentSpec]:
    """Return the specs of a known family, none of which keeps states or shares keys; refuse layers with an indexer."""
    specs = specs_from_config(config.to_dict(), dtype=dtype, format=format)
    if config.model_type == "dory":
        specs = _by_cache_layer(config, specs)
    if any(isinstance(spec, RowSpec) or (isinstance(spec, LatentSpec) and spec.index_dim) for spec in specs):
        raise UnsupportedOption(
            f"the {config.model_type} selects keys with an indexer, whose keys a PagedCache does not store; use "
            "another cache"
        )
    return [spec for spec in specs if not isinstance(spec, StateSpec | Alias | RowSpec)]


def _windows(config: Any) -> list[int | None]:
    """Return the window of each layer, read in the same way as by transformers' own caches."""
    window = _given(config, "sliding_window") if _given(config, "use_sliding_window") is not False else None
    kinds = _given(config, "layer_types")
    if kinds is None:
        kinds = [FULL if window is None else SLIDING] * count_layers(config)
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
