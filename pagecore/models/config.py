"""Specs of a model's layers from its config.json."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.models.dtypes import stored_dtype
from pagecore.models.encoder_decoder import ENCODER_DECODERS, decoder_specs
from pagecore.models.families import FAMILIES, FLAT, RENAMED, TEXT_MODELS, Family
from pagecore.models.fields import Fields, open_config, shown
from pagecore.models.latent import latent_spec
from pagecore.models.quantization import requested_format
from pagecore.models.unserved import CHUNKED_LAYER, FULL, SLIDING, unserved_attention, unserved_kind
from pagecore.storage import AttentionSpec, LatentSpec

__all__ = ["ModelConfig", "read_model_config", "specs_from_config"]

Config = str | os.PathLike[str] | Mapping[str, Any]
Sinks = Iterable[Iterable[SupportsFloat]]


@dataclass(frozen=True)
class ModelConfig:
    """The key-value cache of a model, as described by its config.

    Attributes
    ----------
    model_type : str
        The model family; for a multimodal model that of its text model.
    layers : tuple of AttentionSpec or LatentSpec
        One spec for each model layer. Of a model with an encoder: the decoder's own layers, then a `CrossSpec` for the
        cross attention of each.
    max_length : int or None
        Maximum sequence length in tokens (`max_position_embeddings`); None if the config does not have it.
    """

    model_type: str
    layers: tuple[AttentionSpec | LatentSpec, ...]
    max_length: int | None


def specs_from_config(
    config: Config, *, dtype: object = "auto", sinks: Sinks | None = None, format: str | None = "auto"
) -> list[AttentionSpec | LatentSpec]:
    """Return the spec of each layer of a Hugging Face model, for `PagedKVCache(layers=...)`.

    Supported model types are llama, qwen2, qwen2_moe, qwen3, qwen3_moe, mistral, ministral, mixtral, gemma, gemma2,
    gemma3_text, phi, phi3, gpt_neox, gpt_oss, gpt2, glm, glm4, glm4_moe, llama4_text, olmo2, olmo3, starcoder2, cohere,
    cohere2, granite, seed_oss and minimax_m2, and the text models of the multimodal gemma3, llama4, mistral3, glm4v,
    qwen2_vl, qwen2_5_vl, qwen3_vl and qwen3_vl_moe. The latent attention of deepseek_v2, deepseek_v3, kimi_k2, axk1,
    glm4_moe_lite, minicpm3, mistral4, longcat_flash and youtu, and of the text model of kimi_k25, gives a `LatentSpec`,
    that of deepseek_v32 and glm_moe_dsa one with `index_dim` in layers with an indexer. The decoders of whisper, bart
    and t5 give an `AttentionSpec` for each layer, and then a `CrossSpec` for the cross attention of each.
    Linear-attention and recurrent states (Qwen3-Next, Mamba) raise UnsupportedOption. Missing fields have the defaults
    of transformers 5. A field that would change the cache or the attention, and that the family does not read, raises;
    it is never ignored.

    Parameters
    ----------
    config : str, path or dict
        Path of a config.json or of its folder, or its fields.
    dtype : {"auto", "bfloat16", "float16", "float32"} or a dtype object with one of these names
        Dtype of keys and values. "auto" uses the model's `dtype` (or `torch_dtype`), bfloat16 if it has neither.
    sinks : array_like [layers][query heads], optional
        The learned sinks of a family that has them (gpt_oss). Sinks are weights and not part of a config. Without them
        the specs have sinks of 0.0, which is sufficient for memory planning, but not for attention.
    format : str or None
        Format of stored keys and values, as for `AttentionSpec`, or of latents, as for `LatentSpec.with_format`; None
        stores them in `dtype`. "auto" uses the one that the config's `quantization_config` asks for (`kv_cache_scheme`
        of compressed-tensors and ModelOpt, `kv_cache_quant_algo` of ModelOpt), else none. Scales are weights and not
        part of a config; pass those of a checkpoint by ``dataclasses.replace(spec, key_scale=..., value_scale=...)``.

    Returns
    -------
    list of AttentionSpec or LatentSpec
        One spec for each model layer, with heads, dims, dtype, format, window or chunk, scale, softcap and sinks.

    Raises
    ------
    ConfigError
        The file cannot be read, a field is missing or invalid, or fields contradict each other. A ShapeError whose
        message names file and field.
    UnsupportedOption
        The `model_type` is unknown, its attention is not supported, or no format stores the keys and values as the
        config asks; the message names the field.
    UnsupportedDtype
        A cache cannot have the dtype.
    """
    return list(read_model_config(config, dtype=dtype, sinks=sinks, format=format).layers)


def read_model_config(
    config: Config, *, dtype: object = "auto", sinks: Sinks | None = None, format: str | None = "auto"
) -> ModelConfig:
    """Return the specs together with the model's type and maximum length.

    Parameters, errors and supported models are those of `specs_from_config`.

    Returns
    -------
    ModelConfig
    """
    whole = open_config(config)
    given_type = whole.given("model_type")
    if isinstance(given_type, str) and given_type in ENCODER_DECODERS:
        return _encoder_decoder(whole, dtype, sinks, format)
    model_type, fields = _text_model(whole)
    family = FAMILIES[model_type]
    fields.defaults = {"max_position_embeddings": None, **family.defaults}
    fields.aliases = family.aliases
    fields.check_aliases()
    own = {"kv_lora_rank"} if family.stores_latents else set()
    unread = unserved_attention(lambda name: None if name in own else fields.given(name))
    _refuse_unserved(fields, model_type, unread)
    num_layers = family.count_layers(fields)
    heads = fields.integer("num_attention_heads")
    if family.stores_latents:
        return _latent_model(whole, fields, model_type, num_layers, heads, dtype, sinks, format)
    kv_heads = _kv_heads(fields, heads)
    head_dim = _head_dim(fields, heads)
    windows = _windows(fields, family, num_layers)
    _refuse_unread(fields, model_type, head_dim, kv_heads, windows)
    stored = stored_dtype(whole, fields, dtype)
    stored_format = requested_format(whole, fields, format)
    softcap = _softcap(fields)
    layers = tuple(
        AttentionSpec(
            kv_heads,
            head_dim,
            dtype=stored,
            num_query_heads=heads,
            scale=family.scale(fields, head_dim, layer),
            softcap=softcap,
            sinks=sink,
            format=stored_format,
            window=None if family.has_chunks else window,
            chunk=window if family.has_chunks else None,
        )
        for layer, (window, sink) in enumerate(zip(windows, _sinks(model_type, num_layers, heads, sinks), strict=True))
    )
    return ModelConfig(model_type, layers, _max_length(fields))


def _encoder_decoder(whole: Fields, dtype: object, sinks: Sinks | None, format: str | None) -> ModelConfig:
    """Return the specs of a family with an encoder: the decoder's own layers, then its cross-attention layers."""
    model_type = str(whole.given("model_type"))
    if sinks is not None:
        raise UnsupportedOption(f"sinks are given, but {model_type} has no sinks; leave sinks out")
    stored = stored_dtype(whole, whole, dtype)
    layers, longest = decoder_specs(whole, model_type, stored, requested_format(whole, whole, format))
    return ModelConfig(model_type, layers, longest)


def _latent_model(
    whole: Fields,
    fields: Fields,
    model_type: str,
    num_layers: int,
    heads: int,
    dtype: object,
    sinks: Sinks | None,
    format: str | None,
) -> ModelConfig:
    """Return the specs of a family with latent attention; layers differ at most by their index keys."""
    _sinks(model_type, num_layers, heads, sinks)
    spec = latent_spec(fields, heads, stored_dtype(whole, fields, dtype), requested_format(whole, fields, format))
    layers = (spec,) * num_layers
    indexes = FAMILIES[model_type].indexes
    if indexes is not None:
        indexed = replace(spec, index_dim=fields.integer("index_head_dim"))
        layers = tuple(indexed if each else spec for each in indexes(fields, num_layers))
    _refuse_unread(fields, model_type, fields.integer("qk_nope_head_dim") + spec.rope_dim, heads, [None] * num_layers)
    return ModelConfig(model_type, layers, _max_length(fields))


def _max_length(fields: Fields) -> int | None:
    length = fields.value("max_position_embeddings")
    return None if length is None else fields.integer("max_position_embeddings")


def _text_model(whole: Fields) -> tuple[str, Fields]:
    """Return the type and the fields of the text model, which has the key-value cache."""
    model_type = _model_type(whole)
    if model_type not in TEXT_MODELS:
        return model_type, whole
    expected = TEXT_MODELS[model_type]
    if model_type in FLAT and whole.given("text_config") is None:
        return expected, whole
    fields = whole.inner("text_config")
    if fields.given("model_type") not in (None, expected, RENAMED.get(expected)):
        raise UnsupportedOption(
            f"{whole.source}: {fields.describe('model_type')}; the text model of a {model_type} must be a {expected}"
        )
    return expected, fields


def _refuse_unserved(fields: Fields, model_type: str, attention: str | None) -> None:
    if attention is not None:
        raise UnsupportedOption(
            f"{fields.source}: model_type is {shown(model_type)}, which has {attention}; pagecore only supports full, "
            "sliding-window, chunked (llama4) and latent attention"
        )


def _model_type(fields: Fields) -> str:
    model_type = fields.value("model_type")
    if not isinstance(model_type, str) or model_type not in {*FAMILIES, *TEXT_MODELS}:
        is_nested = isinstance(fields.given("text_config"), Mapping)
        for part in [*([fields.inner("text_config")] if is_nested else []), fields]:
            _refuse_unserved(fields, model_type, unserved_kind(part.given("model_type"), part.given))
        known = ", ".join(sorted([*FAMILIES, *TEXT_MODELS, *ENCODER_DECODERS]))
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('model_type')}, which is unknown; expected one of {known}: for another "
            "model pass a list of specs"
        )
    return model_type


def _kv_heads(fields: Fields, heads: int) -> int:
    if "num_key_value_heads" not in fields.defaults or fields.value("num_key_value_heads") is None:
        return heads
    kv_heads = fields.integer("num_key_value_heads")
    if heads % kv_heads:
        fields.refuse(
            f"{fields.describe('num_key_value_heads')}; it must divide {fields.name('num_attention_heads')}, which is "
            f"{heads}"
        )
    return kv_heads


def _head_dim(fields: Fields, heads: int) -> int:
    hidden = fields.integer("hidden_size")
    default = fields.defaults.get("head_dim")
    # If the family's default is a number, null has no defined meaning, and integer() raises for it.
    if "head_dim" in fields.defaults and (default is not None or fields.given("head_dim") is not None):
        return fields.integer("head_dim")
    if hidden % heads:
        fields.refuse(
            f"{fields.name('hidden_size')} is {hidden}, not a multiple of {fields.name('num_attention_heads')} "
            f"{heads}, and head_dim is missing; add head_dim, or correct one of the two"
        )
    return hidden // heads


def _windows(fields: Fields, family: Family, num_layers: int) -> list[int | None]:
    """Return the window of each layer, or its chunk in a family with chunks."""
    size = "attention_chunk_size" if family.has_chunks else "sliding_window"
    if size not in family.defaults:
        return [None] * num_layers
    switched_off = "use_sliding_window" in family.defaults and not fields.flag("use_sliding_window")
    # Published files hold arbitrary numbers in a window that is switched off.
    given = None if switched_off else fields.value(size)
    window = None if given is None else fields.integer(size)
    kind = CHUNKED_LAYER if family.has_chunks else SLIDING
    slides = _listed_layers(fields, num_layers, kind)
    if slides is None:
        slides = [not switched_off and family.slides(fields, layer) for layer in range(num_layers)]
    if window is None and any(slides):
        reason = fields.describe("use_sliding_window" if switched_off else size)
        what = "size" if family.has_chunks else "window"
        fields.refuse(f"layer {slides.index(True)} is {kind!r}, but {reason}; set a {what}, or make the layer {FULL!r}")
    return [window if slide else None for slide in slides]


def _listed_layers(fields: Fields, num_layers: int, limited: str) -> list[bool] | None:
    """Return True for each layer of type `limited` in `layer_types`; None if the family or config does not have it."""
    if "layer_types" not in fields.defaults or fields.given("layer_types") is None:
        return None
    listed, name = fields.given("layer_types"), fields.name("layer_types")
    if not isinstance(listed, list | tuple):
        fields.refuse(f"{fields.describe('layer_types')}; it must be a list with one entry for each layer")
    if len(listed) != num_layers:
        fields.refuse(
            f"{name} lists {len(listed)} layers, but {fields.name('num_hidden_layers')} is {num_layers}; they must be "
            "equal"
        )
    for layer, kind in enumerate(listed):
        if kind not in (FULL, limited):
            raise UnsupportedOption(
                f"{fields.source}: {name}[{layer}] is {shown(kind)}, which is not supported; "
                f"expected {FULL!r} or {limited!r}"
            )
    return [kind == limited for kind in listed]


def _refuse_unread(fields: Fields, model_type: str, head_dim: int, kv_heads: int, windows: list[int | None]) -> None:
    """Raise for a field that the family does not read, unless its value equals what the family does anyway."""
    implied: dict[str, object] = {
        "head_dim": head_dim,
        "num_key_value_heads": kv_heads,
        "sliding_window": None,
        "use_sliding_window": any(windows),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "query_pre_attn_scalar": head_dim,
        "attn_logit_softcapping": None,
        "attention_chunk_size": None,
        "index_topk": None,
        "attention_multiplier": head_dim**-0.5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "use_bidirectional_attention": False,
        "is_causal": True,
    }
    for name, value in implied.items():
        if name not in fields.defaults and fields.given(name) not in (None, value):
            raise UnsupportedOption(
                f"{fields.source}: {fields.describe(name)}, but {model_type} attends as if it were {shown(value)}; "
                "set it so, or leave it out"
            )


def _softcap(fields: Fields) -> float:
    name = "attn_logit_softcapping"
    return fields.number(name) if name in fields.defaults and fields.value(name) is not None else 0.0


def _sinks(model_type: str, num_layers: int, heads: int, sinks: Sinks | None) -> list[Iterable[SupportsFloat] | None]:
    if not FAMILIES[model_type].has_sinks:
        if sinks is not None:
            raise UnsupportedOption(f"sinks are given, but {model_type} has no sinks; leave sinks out")
        return [None] * num_layers
    if sinks is None:
        return [(0.0,) * heads] * num_layers
    try:
        rows: list[Iterable[SupportsFloat] | None] = [tuple(row) for row in sinks]
    except TypeError:
        raise ShapeError(f"sinks is a {type(sinks).__name__}; expected [layers][query heads] numbers") from None
    counts = [len(tuple(row or ())) for row in rows]
    if counts != [heads] * num_layers:
        raise ShapeError(
            f"sinks has {len(rows)} rows of {' or '.join(map(str, sorted(set(counts)))) or 'no'} numbers; "
            f"expected {num_layers} rows (layers) of {heads} numbers (query heads)"
        )
    return rows
