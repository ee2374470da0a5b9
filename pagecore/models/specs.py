"""Specs of a model's layers from its config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

from pagecore.models.cache_format import requested_format, stored_dtype, with_rotations, with_value_format
from pagecore.models.config_files.fields import Fields
from pagecore.models.config_files.open_config import open_config
from pagecore.models.encoders.specs import decoder_fields, has_encoder, read_encoder_decoder
from pagecore.models.families.attention_specs import Sinks, SpecOptions, attention_specs
from pagecore.models.families.registry import FAMILIES
from pagecore.models.kv_scales import Scales, with_scales
from pagecore.models.layer_formats import with_asked_formats
from pagecore.models.layer_types import FULL, attends, keeps_state
from pagecore.models.layers.draft_windows import with_draft_windows
from pagecore.models.layers.rows import LayerRows, RowOptions
from pagecore.models.layers.sharing import share_last_layers, share_layers
from pagecore.models.layers.states.recurrent import state_spec
from pagecore.models.layers.unsupported import unsupported_fields
from pagecore.models.model_config import ModelConfig, ModelSpec
from pagecore.models.multimodal.text_model import refuse_attention, text_model
from pagecore.storage import StateSpec
from pagecore.storage.checks import require_int

__all__ = ["read_model_config", "specs_from_config"]

Config = str | os.PathLike[str] | Mapping[str, Any]


def specs_from_config(
    config: Config,
    *,
    dtype: object = "auto",
    sinks: Sinks | None = None,
    format: str | None = "auto",
    value_format: str | None = None,
    block_size: SupportsIndex | None = None,
    kv_scales: Scales | None = None,
    key_rotation: str | None = None,
    value_rotation: str | None = None,
) -> list[ModelSpec]:
    """Return the spec of each layer of a Hugging Face model, for `PagedKVCache(layers=...)`.

    docs/models.md lists the supported model types. A multimodal model has the specs of its text model, if the type of
    that is supported. Missing fields have the defaults of transformers 5. A field that would change the cache or the
    attention, and that the family does not read, raises; it is never ignored.

    Parameters
    ----------
    config : str, path or dict
        Path of a config.json or of its folder, or its fields; likewise a params.json of Mistral or Meta.
    dtype : {"auto", "bfloat16", "float16", "float32"} or a dtype object with one of these names
        Dtype of keys and values, and of convolution states. "auto" uses the model's `dtype` (or `torch_dtype`),
        bfloat16 if it has neither.
    sinks : array_like [layers with sinks][query heads], optional
        The learned sinks of a family that has them (gpt_oss, granite_swa and
        granitemoe_swa in every layer, mimo_v2_flash in sliding layers). Sinks are
        weights and not part of a config. Without them the specs have sinks of 0.0, which is sufficient for memory
        planning, but not for attention.
    format : str or None
        Format of stored keys and values, as for `AttentionSpec`, or of latents, as for `LatentSpec.with_format`; None
        stores them in `dtype`. "auto" uses the one that the config's `quantization_config` asks for (`kv_cache_scheme`
        of compressed-tensors, ModelOpt and AutoFP8, `kv_cache_dtype`, `kv_cache_quant_algo` and
        `kv_cache_quantized_layers` of ModelOpt, which may be in the hf_quant_config.json next to a config.json), else
        none. It may ask for another format of values, or of single layers.
    value_format : str, optional
        Format of stored values, if it is another than that of keys, as for `AttentionSpec`; it overrides what the
        config asks for. Layers with latents have none.
    block_size : int, optional
        Tokens of a block of the cache, for models with rows of several tokens (`RowSpec`); by default the least
        multiple of 16 that suits all of them.
    kv_scales : str, path or dict of int to (key, value), optional
        Scales of keys and values for "float8_e4m3fn", "float8_e5m2" and "nvfp4", which are weights and not part of a
        config: a checkpoint, as for `pagecore.models.read_kv_scales`, or for model layers by number a pair of floats,
        or of sequences with a float for each key-value head. Layers that have none keep scales of 1, and so does cross
        attention.
    key_rotation, value_rotation : {"hadamard"}, optional
        Rotation of the keys and values of the layers that store them in a format, as for `AttentionSpec`.

    Returns
    -------
    list of AttentionSpec, CrossSpec, LatentSpec, RowSpec or StateSpec
        One spec for each model layer, with heads, dims, dtype, format, window or chunk, scale, softcap and sinks, or
        with the planes and the chunk of a state. A layer of Falcon-H1 or Zamba2 with both has two specs, first that of
        its attention, and an MLP of Nemotron-H none: `read_model_config` returns the specs of each layer. States are
        stored as by SGLang and vLLM, convolutions ``[dim, kernel - 1]`` in `dtype`, recurrent states in float32 or as
        the config asks.

    Raises
    ------
    ConfigError
        The file cannot be read, a field is missing or invalid, or fields contradict each other; or `kv_scales` has
        layers that the model does not have. A ShapeError whose message names file and field.
    UnsupportedOption
        The `model_type` is unknown, its attention is not supported, or no format stores the keys and values as the
        config asks; the message names the field. Or `value_format` of layers with latents; or `kv_scales` of layers
        whose format takes none, or that store no keys and values. Or an unknown rotation; or a rotation of keys or
        values that no layer stores in a format.
    ShapeError
        A head dim that is not a multiple of 8, with a rotation.
    UnsupportedDtype
        A cache cannot have the dtype.
    """
    model = read_model_config(
        config,
        dtype=dtype,
        sinks=sinks,
        format=format,
        value_format=value_format,
        block_size=block_size,
        kv_scales=kv_scales,
        key_rotation=key_rotation,
        value_rotation=value_rotation,
    )
    return list(model.layers)


def read_model_config(
    config: Config,
    *,
    dtype: object = "auto",
    sinks: Sinks | None = None,
    format: str | None = "auto",
    value_format: str | None = None,
    block_size: SupportsIndex | None = None,
    kv_scales: Scales | None = None,
    key_rotation: str | None = None,
    value_rotation: str | None = None,
) -> ModelConfig:
    """Return the specs together with the model's type and maximum length.

    Parameters, errors and supported models are those of `specs_from_config`.

    Returns
    -------
    ModelConfig
    """
    whole = open_config(config)
    given_type = whole.given("model_type")
    encoded_type = given_type if isinstance(given_type, str) and has_encoder(given_type) else None
    if encoded_type is not None:
        model = read_encoder_decoder(whole, encoded_type, dtype, sinks, format)
    else:
        model = _read_decoder(whole, dtype, sinks, format, block_size)
    if isinstance(format, str) and format == "auto":
        text = text_model(whole)[1] if encoded_type is None else decoder_fields(whole, encoded_type)
        model = with_asked_formats(model, whole, text, value_format)
    layers = with_value_format(model.layers, value_format, whole.source)
    model = replace(model, layers=tuple(with_rotations(layers, key_rotation, value_rotation, whole.source)))
    return with_scales(model, kv_scales, whole.source)


def _read_decoder(
    whole: Fields, dtype: object, sinks: Sinks | None, format: str | None, block_size: SupportsIndex | None
) -> ModelConfig:
    """Return the specs of a model without an encoder of text."""
    model_type, text = text_model(whole)
    fields = with_draft_windows(whole, text)
    family = FAMILIES[model_type]
    fields.defaults = {"max_position_embeddings": None, **family.defaults}
    fields.aliases = family.aliases
    fields.lift(family.nested)
    fields.check_aliases()
    unread = unsupported_fields(lambda name: None if name in family.defaults else fields.given(name))
    refuse_attention(fields, model_type, unread)
    num_layers = family.count_layers(fields)
    find_kinds = family.states.kinds if family.states is not None else family.kinds
    kinds = [FULL] * num_layers if find_kinds is None else find_kinds(fields, num_layers)
    asked = SpecOptions(stored_dtype(whole, fields, dtype), requested_format(whole, fields, format), sinks)
    attending = attention_specs(fields, family, model_type, kinds, asked)
    if family.sources is not None:
        attending = share_layers(attending, family.sources(fields, num_layers))
    size = None if block_size is None else require_int("block_size", block_size)
    rows: Sequence[LayerRows] = [()] * num_layers
    if family.rows is not None:
        rows = family.rows(fields, num_layers, RowOptions(asked.dtype, asked.format, size))
    attention = iter(share_last_layers(fields, family.shared_field, attending) if family.shared_field else attending)
    layers: list[ModelSpec] = []
    by_layer: list[tuple[int, ...]] = []
    state: StateSpec | None = None
    for layer, kind in enumerate(kinds):
        own: list[ModelSpec] = [*([next(attention)] if attends(kind) else []), *rows[layer]]
        if family.states is not None and keeps_state(kind):
            if state is None or family.states.planes_of_layer is not None:
                state = state_spec(fields, family.states, asked.dtype, layer)
            own.append(state)
        by_layer.append(tuple(range(len(layers), len(layers) + len(own))))
        layers += own
    return ModelConfig(model_type, tuple(layers), _max_length(fields), tuple(by_layer))


def _max_length(fields: Fields) -> int | None:
    length = fields.value("max_position_embeddings")
    return None if length is None else fields.integer("max_position_embeddings")
