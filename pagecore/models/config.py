"""A model's config.json as the specs of its layers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat

from pagecore.arrays import DType, as_dtype
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.models.families import FAMILIES, FLAT, TEXT_MODELS, Family
from pagecore.models.fields import Fields, open_config, shown
from pagecore.models.unserved import FULL, SLIDING, unserved_attention, unserved_kind
from pagecore.storage import AttentionSpec
from pagecore.storage.checks import LAYERS_MAX
from pagecore.storage.spec import CACHE_DTYPES

__all__ = ["ModelConfig", "read_model_config", "specs_from_config"]

Config = str | os.PathLike[str] | Mapping[str, Any]
Sinks = Iterable[Iterable[SupportsFloat]]


@dataclass(frozen=True)
class ModelConfig:
    """What a model's config says of its key-value cache.

    Attributes
    ----------
    model_type : str
        The family, of the text model where it is part of a larger one.
    layers : tuple of AttentionSpec
        One a model layer.
    max_length : int or None
        Tokens that the model was made for (`max_position_embeddings`); None where the config does not say.
    """

    model_type: str
    layers: tuple[AttentionSpec, ...]
    max_length: int | None


def specs_from_config(config: Config, *, dtype: object = "auto", sinks: Sinks | None = None) -> list[AttentionSpec]:
    """The spec of each layer of a Hugging Face model, for `PagedKVCache(layers=...)`.

    Serves the model types llama, qwen2, qwen2_moe, qwen3, qwen3_moe, mistral, ministral, mixtral, gemma, gemma2,
    gemma3_text, phi, phi3, gpt_neox, gpt_oss, gpt2, glm, glm4, glm4_moe, olmo2, olmo3, starcoder2, cohere, cohere2,
    granite, seed_oss and minimax_m2, and the text models of the multimodal gemma3, mistral3, glm4v, qwen2_vl,
    qwen2_5_vl, qwen3_vl and qwen3_vl_moe. Latent attention (DeepSeek-V3), linear-attention and recurrent states
    (Qwen3-Next, Mamba) and chunked attention (Llama 4) are refused by name. A field that a file may leave out has the
    default of transformers 5; a field that decides what is stored or attended, and that the family does not read, is
    refused, never ignored.

    Parameters
    ----------
    config : str, path or dict
        A config.json, the folder that it is in, or its fields.
    dtype : {"auto", "bfloat16", "float16", "float32"} or anything that names one of these
        What key and value are stored as. "auto" is the model's `dtype` (or `torch_dtype`), bfloat16 where it says none.
    sinks : array_like [layers][query heads], optional
        The learned sinks of a family that has them (gpt_oss). They are weights, which no config holds: without them
        the specs have a sink of 0.0 for each query head, which is right for planning, not for attending.

    Returns
    -------
    list of AttentionSpec
        One a model layer, with heads, dims, dtype, window, scale, softcap and sinks.

    Raises
    ------
    ConfigError
        A file that cannot be read, a missing field, a value that cannot be, fields that contradict each other. It is a
        ShapeError, and names file and field.
    UnsupportedOption
        A `model_type` that is not known, or attention that is not served, by the name of its field.
    UnsupportedDtype
        A dtype that no cache is served in.
    """
    return list(read_model_config(config, dtype=dtype, sinks=sinks).layers)


def read_model_config(config: Config, *, dtype: object = "auto", sinks: Sinks | None = None) -> ModelConfig:
    """What `specs_from_config` gives, with the model's type and longest length; the same arguments and errors."""
    whole = open_config(config)
    model_type, fields = _text_model(whole)
    family = FAMILIES[model_type]
    fields.defaults = {"max_position_embeddings": None, **family.defaults}
    fields.aliases = family.aliases
    fields.check_aliases()
    _refuse_unserved(fields, model_type, unserved_attention(fields.given))
    num_layers = fields.integer("num_hidden_layers", most=LAYERS_MAX)
    heads = fields.integer("num_attention_heads")
    kv_heads = _kv_heads(fields, heads)
    head_dim = _head_dim(fields, heads)
    windows = _windows(fields, family, num_layers)
    _refuse_unread(fields, model_type, head_dim, kv_heads, windows)
    stored = _dtype(whole, fields) if isinstance(dtype, str) and dtype == "auto" else as_dtype(dtype)
    softcap = _softcap(fields)
    layers = tuple(
        AttentionSpec(
            kv_heads,
            head_dim,
            dtype=stored,
            window=window,
            num_query_heads=heads,
            scale=family.scale(fields, head_dim, layer),
            softcap=softcap,
            sinks=sink,
        )
        for layer, (window, sink) in enumerate(zip(windows, _sinks(model_type, num_layers, heads, sinks), strict=True))
    )
    length = fields.value("max_position_embeddings")
    return ModelConfig(model_type, layers, None if length is None else fields.integer("max_position_embeddings"))


def _text_model(whole: Fields) -> tuple[str, Fields]:
    """The type and the fields of the model that has a key-value cache."""
    model_type = _model_type(whole)
    if model_type not in TEXT_MODELS:
        return model_type, whole
    expected = TEXT_MODELS[model_type]
    if model_type in FLAT and whole.given("text_config") is None:
        return expected, whole
    fields = whole.inner("text_config")
    if fields.given("model_type") not in (None, expected):
        raise UnsupportedOption(f"{whole.source}: {fields.told('model_type')}; a {model_type} has a {expected} in it")
    return expected, fields


def _refuse_unserved(fields: Fields, model_type: str, attention: str | None) -> None:
    if attention is not None:
        raise UnsupportedOption(
            f"{fields.source}: model_type is {shown(model_type)}, which has {attention}; pagecore serves key and value "
            "of full and of sliding-window attention"
        )


def _model_type(fields: Fields) -> str:
    model_type = fields.value("model_type")
    if not isinstance(model_type, str) or model_type not in {*FAMILIES, *TEXT_MODELS}:
        is_nested = isinstance(fields.given("text_config"), Mapping)
        for part in [*([fields.inner("text_config")] if is_nested else []), fields]:
            _refuse_unserved(fields, model_type, unserved_kind(part.given("model_type"), part.given))
        known = ", ".join(sorted([*FAMILIES, *TEXT_MODELS]))
        raise UnsupportedOption(
            f"{fields.source}: {fields.told('model_type')}, which is not known; it may be {known}: "
            "for another model write its AttentionSpecs out"
        )
    return model_type


def _kv_heads(fields: Fields, heads: int) -> int:
    if "num_key_value_heads" not in fields.defaults or fields.value("num_key_value_heads") is None:
        return heads
    kv_heads = fields.integer("num_key_value_heads")
    if heads % kv_heads:
        fields.refuse(
            f"{fields.told('num_key_value_heads')}, not a divisor of {fields.name('num_attention_heads')} {heads}; "
            "each key-value head serves the same number of query heads"
        )
    return kv_heads


def _head_dim(fields: Fields, heads: int) -> int:
    hidden = fields.integer("hidden_size")
    default = fields.defaults.get("head_dim")
    # Null where the family's default is a number means nothing that one could count on: integer() refuses it.
    if "head_dim" in fields.defaults and (default is not None or fields.given("head_dim") is not None):
        return fields.integer("head_dim")
    if hidden % heads:
        fields.refuse(
            f"{fields.name('hidden_size')} is {hidden}, not a multiple of {fields.name('num_attention_heads')} "
            f"{heads}, and head_dim is not given; give head_dim, or correct one of the two"
        )
    return hidden // heads


def _windows(fields: Fields, family: Family, num_layers: int) -> list[int | None]:
    """The window of each layer."""
    if "sliding_window" not in family.defaults:
        return [None] * num_layers
    switched_off = "use_sliding_window" in family.defaults and not fields.flag("use_sliding_window")
    # A window that is switched off means nothing: published files hold any number there.
    given = None if switched_off else fields.value("sliding_window")
    window = None if given is None else fields.integer("sliding_window")
    slides = _listed_layers(fields, num_layers)
    if slides is None:
        slides = [not switched_off and family.slides(fields, layer) for layer in range(num_layers)]
    if window is None and any(slides):
        reason = fields.told("use_sliding_window") if switched_off else fields.told("sliding_window")
        fields.refuse(f"layer {slides.index(True)} is {SLIDING!r}, but {reason}; a window is needed, or full attention")
    return [window if slide else None for slide in slides]


def _listed_layers(fields: Fields, num_layers: int) -> list[bool] | None:
    """Which layers slide by `layer_types`; None where the family reads none, or it lists none."""
    if "layer_types" not in fields.defaults or fields.given("layer_types") is None:
        return None
    listed, name = fields.given("layer_types"), fields.name("layer_types")
    if not isinstance(listed, list | tuple):
        fields.refuse(f"{fields.told('layer_types')}; it must be a list with one entry a layer")
    if len(listed) != num_layers:
        fields.refuse(
            f"{name} lists {len(listed)} layers, but {fields.name('num_hidden_layers')} is {num_layers}; make "
            "them agree"
        )
    for layer, kind in enumerate(listed):
        if kind not in (FULL, SLIDING):
            raise UnsupportedOption(
                f"{fields.source}: {name}[{layer}] is {shown(kind)}, which is not served; "
                f"a layer may be {FULL!r} or {SLIDING!r}"
            )
    return [kind == SLIDING for kind in listed]


def _refuse_unread(fields: Fields, model_type: str, head_dim: int, kv_heads: int, windows: list[int | None]) -> None:
    """Refuse a field that would change what is stored or attended, if the family had a use for it."""
    meant: dict[str, object] = {
        "head_dim": head_dim,
        "num_key_value_heads": kv_heads,
        "sliding_window": None,
        "use_sliding_window": any(windows),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "query_pre_attn_scalar": head_dim,
        "attn_logit_softcapping": None,
        "attention_chunk_size": None,
        "attention_multiplier": head_dim**-0.5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "use_bidirectional_attention": False,
        "is_causal": True,
    }
    for name, value in meant.items():
        if name not in fields.defaults and fields.given(name) not in (None, value):
            raise UnsupportedOption(
                f"{fields.source}: {fields.told(name)}, but {model_type} attends as if it were {shown(value)}; "
                f"make it so, or leave it out"
            )


def _dtype(whole: Fields, fields: Fields) -> DType:
    """The dtype of the model's weights; older files call it torch_dtype, and a part may leave it to the whole."""
    for place in (fields, whole):
        said = {name: place.given(name) for name in ("dtype", "torch_dtype") if place.given(name) is not None}
        if len({shown(value).replace("torch.", "", 1) for value in said.values()}) > 1:
            fields.refuse(f"{place.told('dtype')}, but {place.told('torch_dtype')}; leave one of them out")
        for name, value in said.items():
            text = value.removeprefix("torch.") if isinstance(value, str) else ""
            if text not in CACHE_DTYPES:
                raise UnsupportedDtype(
                    f"{fields.source}: {place.told(name)}, which no cache is served in; "
                    f"pass dtype= one of {', '.join(CACHE_DTYPES)}"
                )
            return as_dtype(text)
    return as_dtype("bfloat16")


def _softcap(fields: Fields) -> float:
    name = "attn_logit_softcapping"
    return fields.number(name) if name in fields.defaults and fields.value(name) is not None else 0.0


def _sinks(model_type: str, num_layers: int, heads: int, sinks: Sinks | None) -> list[Iterable[SupportsFloat] | None]:
    if not FAMILIES[model_type].has_sinks:
        if sinks is not None:
            raise UnsupportedOption(f"sinks are given, but {model_type} has none; leave sinks out")
        return [None] * num_layers
    if sinks is None:
        return [(0.0,) * heads] * num_layers
    try:
        rows: list[Iterable[SupportsFloat] | None] = [tuple(row) for row in sinks]
    except TypeError:
        raise ShapeError(f"sinks is a {type(sinks).__name__}; give [layers][query heads] numbers") from None
    counts = [len(tuple(row or ())) for row in rows]
    if counts != [heads] * num_layers:
        raise ShapeError(
            f"sinks has {len(rows)} rows of {' or '.join(map(str, sorted(set(counts)))) or 'no'} numbers; "
            f"{num_layers} layers of {heads} query heads are needed"
        )
    return rows
