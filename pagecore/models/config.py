"""Specs of a model's layers from its config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.attention import Asked, Sinks, attention_specs
from pagecore.models.crossed import COMPOSED, CROSSED, composed_specs, crossed_specs
from pagecore.models.dtypes import stored_dtype
from pagecore.models.encoder_decoder import ENCODER_DECODERS, decoder_specs
from pagecore.models.fields import Fields, shown
from pagecore.models.hybrids import HYBRIDS
from pagecore.models.layer_kinds import attends, keeps_state
from pagecore.models.mllama import MLLAMA, mllama_specs
from pagecore.models.multimodal import ANY_TEXT_MODEL, FLAT, RENAMED, TEXT_FIELDS, TEXT_MODELS, THINKERS
from pagecore.models.opening import open_config
from pagecore.models.quantization import requested_format
from pagecore.models.served import SERVED
from pagecore.models.sharing import share_last_layers, specs_of_layers
from pagecore.models.sizes import sizes_of
from pagecore.models.states import state_spec
from pagecore.models.unserved import FULL, WHOLE_TYPES, unserved_attention, unserved_kind
from pagecore.storage import Alias, AttentionSpec, LatentSpec, StateSpec

__all__ = ["ModelConfig", "has_encoder", "read_model_config", "specs_from_config", "text_model"]

Config = str | os.PathLike[str] | Mapping[str, Any]
ModelSpec = AttentionSpec | LatentSpec | StateSpec | Alias


@dataclass(frozen=True)
class ModelConfig:
    """The cache of a model, as described by its config.

    Attributes
    ----------
    model_type : str
        The model family; for a multimodal model that of its text model.
    layers : tuple of AttentionSpec, CrossSpec, LatentSpec, StateSpec or Alias
        Specs in the order of the model's layers, as a cache takes them. A layer with attention and a state has two, the
        attention first; a layer that stores nothing has none, and one that reads the keys and values of an earlier
        layer has an `Alias`. Of a model with an encoder: the decoder's own layers,
        then a `CrossSpec` for the cross attention of each.
    max_length : int or None
        Maximum sequence length in tokens (`max_position_embeddings`); None if the config does not have it.
    specs_by_layer : tuple of tuple of int
        Numbers in `layers` of the specs of each model layer: ``(n,)`` in most models, ``(n, n + 1)`` in Falcon-H1,
        ``(n, num_layers + n)`` with an encoder, and ``()`` for an MLP of Nemotron-H. They are the layer numbers of a
        cache that is made with `layers`. By default each spec is a layer of its own.
    """

    model_type: str
    layers: tuple[ModelSpec, ...]
    max_length: int | None
    specs_by_layer: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.specs_by_layer:
            object.__setattr__(self, "specs_by_layer", tuple((number,) for number in range(len(self.layers))))

    @property
    def num_layers(self) -> int:
        """Number of model layers."""
        return len(self.specs_by_layer)

    def specs_of_stage(self, layers: range) -> tuple[ModelSpec, ...]:
        """Return the specs of model layers that form a pipeline stage, as a cache of the stage takes them.

        Raises
        ------
        UnsupportedOption
            A layer reads the keys and values of one in another stage.
        """
        return specs_of_layers(self.layers, [number for layer in layers for number in self.specs_by_layer[layer]])


def specs_from_config(
    config: Config, *, dtype: object = "auto", sinks: Sinks | None = None, format: str | None = "auto"
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
        of compressed-tensors and ModelOpt, `kv_cache_quant_algo` of ModelOpt), else none. Scales are weights and not
        part of a config; pass those of a checkpoint by ``dataclasses.replace(spec, key_scale=..., value_scale=...)``.

    Returns
    -------
    list of AttentionSpec, CrossSpec, LatentSpec or StateSpec
        One spec for each model layer, with heads, dims, dtype, format, window or chunk, scale, softcap and sinks, or
        with the planes and the chunk of a state. A layer of Falcon-H1 or Zamba2 with both has two specs, first that of
        its attention, and an MLP of Nemotron-H none: `read_model_config` returns the specs of each layer. States are
        stored as by SGLang and vLLM, convolutions ``[dim, kernel - 1]`` in `dtype`, recurrent states in float32 or as
        the config asks.

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
    if isinstance(given_type, str) and has_encoder(given_type):
        return _encoder_decoder(whole, given_type, dtype, sinks, format)
    model_type, fields = text_model(whole)
    family = SERVED[model_type]
    fields.defaults = {"max_position_embeddings": None, **family.defaults}
    fields.aliases = family.aliases
    fields.lift(family.nested)
    fields.check_aliases()
    unread = unserved_attention(lambda name: None if name in family.defaults else fields.given(name))
    _refuse_unserved(fields, model_type, unread)
    num_layers = family.count_layers(fields)
    find_kinds = family.states.kinds if family.states is not None else family.kinds
    kinds = [FULL] * num_layers if find_kinds is None else find_kinds(fields, num_layers)
    asked = Asked(stored_dtype(whole, fields, dtype), requested_format(whole, fields, format), sinks)
    attending = attention_specs(fields, family, model_type, kinds, asked)
    attention = iter(share_last_layers(fields, family.shared_field, attending) if family.shared_field else attending)
    state = state_spec(fields, family.states, asked.dtype) if family.states and any(map(keeps_state, kinds)) else None
    layers: list[ModelSpec] = []
    by_layer: list[tuple[int, ...]] = []
    for kind in kinds:
        own: list[ModelSpec] = [next(attention)] if attends(kind) else []
        if state is not None and keeps_state(kind):
            own.append(state)
        by_layer.append(tuple(range(len(layers), len(layers) + len(own))))
        layers += own
    return ModelConfig(model_type, tuple(layers), _max_length(fields), tuple(by_layer))


def has_encoder(model_type: str) -> bool:
    """Return True for a family with an encoder, whose decoder stores the encoder's keys and values."""
    return any(model_type in types for types in (ENCODER_DECODERS, CROSSED, COMPOSED, MLLAMA))


def _encoder_decoder(
    whole: Fields, model_type: str, dtype: object, sinks: Sinks | None, format: str | None
) -> ModelConfig:
    """Return the specs of a family with an encoder: the decoder's own layers, then its cross-attention layers.

    In a Mllama layers of both kinds alternate, and none attends twice.
    """
    if sinks is not None:
        raise UnsupportedOption(f"sinks are given, but {model_type} has no sinks; leave sinks out")
    decoder = _decoder(whole, model_type)
    asked = Asked(stored_dtype(whole, decoder, dtype), requested_format(whole, decoder, format), None)
    layers: tuple[ModelSpec, ...]
    if model_type in MLLAMA:
        return ModelConfig(model_type, *mllama_specs(whole, model_type, asked))
    if model_type in ENCODER_DECODERS:
        layers, longest = decoder_specs(whole, model_type, asked.dtype, asked.format)
    elif model_type in COMPOSED:
        layers, longest = composed_specs(whole, model_type, asked)
    else:
        layers, longest = crossed_specs(whole, model_type, asked)
    num_layers = len(layers) // 2
    return ModelConfig(model_type, layers, longest, tuple((n, num_layers + n) for n in range(num_layers)))


def _decoder(whole: Fields, model_type: str) -> Fields:
    """Return the fields of the decoder of a model with an encoder; those of the model if they are not nested."""
    path = CROSSED[model_type].path if model_type in CROSSED else {**COMPOSED, **MLLAMA}.get(model_type, "")
    return whole.inner(path) if isinstance(whole.given(path), Mapping) else whole


def _max_length(fields: Fields) -> int | None:
    length = fields.value("max_position_embeddings")
    return None if length is None else fields.integer("max_position_embeddings")


def text_model(whole: Fields) -> tuple[str, Fields]:
    """Return the type and the fields of the text model, which has the key-value cache."""
    model_type, fields = _text_model(whole)
    if fields is not whole:
        fields.sizes = sizes_of(model_type)
    return model_type, fields


def _text_model(whole: Fields) -> tuple[str, Fields]:
    model_type = _model_type(whole)
    if model_type in THINKERS:
        return _text_model(whole.inner("thinker_config"))
    if model_type in ANY_TEXT_MODEL or model_type in TEXT_FIELDS:
        name, expected = TEXT_FIELDS.get(model_type) or ("text_config", ANY_TEXT_MODEL[model_type])
        fields = whole.inner(name)
        if fields.given("model_type") is None:
            return expected, fields
        inner = _model_type(fields)
        if inner not in SERVED:
            raise UnsupportedOption(
                f"{whole.source}: {fields.describe('model_type')}; the text model of a {model_type} must be one of "
                f"{', '.join(sorted(SERVED))}"
            )
        return inner, fields
    if model_type in SERVED:
        return model_type, whole
    if model_type not in TEXT_MODELS:
        fields = whole.inner("text_config")
        return str(fields.given("model_type")), fields
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
            f"sliding-window, chunked (llama4) and latent attention, and the states of {', '.join(HYBRIDS)}"
        )


def _has_served_text_model(fields: Fields) -> bool:
    """Return True for a multimodal model of any type whose text model is of a known family."""
    given = fields.given("text_config")
    inner = given.get("model_type") if isinstance(given, Mapping) else None
    return isinstance(inner, str) and inner in SERVED


def _model_type(fields: Fields) -> str:
    model_type = fields.value("model_type")
    if isinstance(model_type, str) and model_type in WHOLE_TYPES:
        _refuse_unserved(fields, model_type, WHOLE_TYPES[model_type])
    known = {*SERVED, *TEXT_MODELS, *TEXT_FIELDS, *ANY_TEXT_MODEL, *THINKERS}
    if not isinstance(model_type, str) or not (model_type in known or _has_served_text_model(fields)):
        is_nested = isinstance(fields.given("text_config"), Mapping)
        for part in [*([fields.inner("text_config")] if is_nested else []), fields]:
            _refuse_unserved(fields, model_type, unserved_kind(part.given("model_type"), part.given))
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('model_type')}, which is unknown; expected one of "
            f"{', '.join(sorted({*known, *ENCODER_DECODERS, *CROSSED, *COMPOSED, *MLLAMA}))}: for another model "
            "pass a list of specs"
        )
    return model_type
