"""The text model of a config: its type, and the fields that describe it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields, shown
from pagecore.models.families.registry import FAMILIES
from pagecore.models.layers.unsupported import UNATTENDED_TYPES, UNSUPPORTED_TYPES, unsupported_layers
from pagecore.models.multimodal.default_sizes import sizes_of
from pagecore.models.multimodal.known_types import DECODER_TYPES, closest_types
from pagecore.models.multimodal.text_fields import (
    ANY_TEXT_MODEL,
    FLAT,
    NESTED,
    RENAMED,
    TEXT_FIELDS,
    TEXT_MODELS,
    THINKERS,
    VERSIONED,
    WITHOUT_LATENTS,
)

__all__ = ["has_thinker", "refuse_attention", "text_model"]


def text_model(whole: Fields) -> tuple[str, Fields]:
    """Return the type and the fields of the text model, which has the key-value cache."""
    model_type, fields = _text_model(whole)
    if model_type in WITHOUT_LATENTS and _has_no_latents(fields):
        model_type = WITHOUT_LATENTS[model_type]
    if fields is not whole:
        fields.sizes = sizes_of(model_type, whole.given("model_type"))
    return model_type, fields


def has_thinker(whole: Fields) -> bool:
    """Return True for a model whose text model and encoders are in `thinker_config`."""
    model_type = whole.given("model_type")
    if not isinstance(model_type, str) or model_type not in THINKERS:
        return False
    return model_type not in ANY_TEXT_MODEL or whole.given("thinker_config") is not None


def _has_no_latents(fields: Fields) -> bool:
    dims = [fields.given(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    return fields.given("use_mla") is False or dims == [0, 0]


def _text_model(whole: Fields) -> tuple[str, Fields]:
    model_type = _model_type(whole)
    if has_thinker(whole):
        return _text_model(whole.inner("thinker_config"))
    if model_type in ANY_TEXT_MODEL or model_type in TEXT_FIELDS:
        name, expected = TEXT_FIELDS.get(model_type) or ("text_config", ANY_TEXT_MODEL[model_type])
        outer = name.rpartition(".")[0]
        if outer:
            whole.lift([outer])
            whole.defaults = {**whole.defaults, name: {}}
        fields = whole.inner(name)
        if model_type in UNATTENDED_TYPES:  # refused by caches for transformers, and stored like causal attention
            fields = fields.without("use_bidirectional_attention")
        if fields.given("model_type") is None:
            return expected, fields
        inner = _model_type(fields)
        if inner not in FAMILIES:
            raise UnsupportedOption(
                f"{whole.source}: {fields.describe('model_type')}, which is not a text model; {closest_types(inner)}"
            )
        return inner, fields
    if model_type in FAMILIES:
        return model_type, whole
    if model_type in VERSIONED:
        return _versioned(whole, model_type)
    nested = _known_text_model(whole)
    if nested and (model_type not in TEXT_MODELS or (model_type in FLAT and nested != "text_config")):
        fields = whole.inner(nested)
        return str(fields.given("model_type")), fields
    expected = TEXT_MODELS[model_type]
    if model_type in FLAT and whole.given("text_config") is None:
        return expected, whole
    fields = whole.inner("text_config")
    if fields.given("model_type") not in (None, expected, RENAMED.get(expected)):
        raise UnsupportedOption(
            f"{whole.source}: {fields.describe('model_type')}; expected {expected}, the text model of {model_type}"
        )
    return expected, fields


def _versioned(whole: Fields, model_type: str) -> tuple[str, Fields]:
    """Return the text model of a type whose fields are at the top level, and whose `version` decides the family."""
    versions = VERSIONED[model_type]
    given: Any = whole.given("version")
    if given is None:  # files of the first two versions of MiniCPM-V have none
        given = 2.0 if whole.given("hidden_size") == 2304 else 2.5
    try:
        version = -1.0 if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        version = -1.0
    found = next((name for least, name in versions if version >= least), None)
    if found is None:
        whole.refuse(f"{whole.describe('version')}; it must be the version of the model, such as {versions[0][0]}")
    return found, whole


def _model_type(fields: Fields) -> str:
    model_type = fields.value("model_type")
    if isinstance(model_type, str) and model_type in UNSUPPORTED_TYPES:
        refuse_attention(fields, model_type, UNSUPPORTED_TYPES[model_type])
    if not isinstance(model_type, str) or not (model_type in DECODER_TYPES or _known_text_model(fields)):
        nested = [fields.inner(name) for name in NESTED if isinstance(fields.given(name), Mapping)]
        for part in [*nested, fields]:
            refuse_attention(fields, model_type, unsupported_layers(part.given("model_type"), part.given))
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('model_type')}, which is unknown; {closest_types(model_type)}: for "
            "another model pass a list of specs"
        )
    return model_type


def _known_text_model(fields: Fields) -> str:
    """Return the field of a multimodal model of any type with a text model of a known family; "" without one."""
    for name in NESTED:
        given = fields.given(name)
        inner = given.get("model_type") if isinstance(given, Mapping) else None
        if isinstance(inner, str) and inner in FAMILIES:
            return name
    return ""


def refuse_attention(fields: Fields, model_type: str, attention: str | None) -> None:
    """Raise UnsupportedOption if a model has an attention that is not supported, described by `attention`."""
    if attention is not None:
        raise UnsupportedOption(
            f"{fields.source}: model_type is {shown(model_type)}, which has {attention}; pagecore only supports full, "
            "sliding-window, chunked (llama4) and latent attention, and the states of the families in docs/models.md"
        )
