"""The text model of a config: its type, and the fields that describe it."""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields, shown
from pagecore.models.encoders.specs import ENCODER_TYPES
from pagecore.models.families.hybrids import HYBRIDS
from pagecore.models.families.recurrent import RECURRENT
from pagecore.models.families.registry import FAMILIES
from pagecore.models.layers.unsupported import UNSUPPORTED_TYPES, unsupported_layers
from pagecore.models.multimodal.default_sizes import sizes_of
from pagecore.models.multimodal.text_fields import ANY_TEXT_MODEL, FLAT, RENAMED, TEXT_FIELDS, TEXT_MODELS, THINKERS

__all__ = ["refuse_attention", "text_model"]


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
        if inner not in FAMILIES:
            raise UnsupportedOption(
                f"{whole.source}: {fields.describe('model_type')}; the text model of a {model_type} must be one of "
                f"{', '.join(sorted(FAMILIES))}"
            )
        return inner, fields
    if model_type in FAMILIES:
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


def _model_type(fields: Fields) -> str:
    model_type = fields.value("model_type")
    if isinstance(model_type, str) and model_type in UNSUPPORTED_TYPES:
        refuse_attention(fields, model_type, UNSUPPORTED_TYPES[model_type])
    known = {*FAMILIES, *TEXT_MODELS, *TEXT_FIELDS, *ANY_TEXT_MODEL, *THINKERS}
    if not isinstance(model_type, str) or not (model_type in known or _has_known_text_model(fields)):
        is_nested = isinstance(fields.given("text_config"), Mapping)
        for part in [*([fields.inner("text_config")] if is_nested else []), fields]:
            refuse_attention(fields, model_type, unsupported_layers(part.given("model_type"), part.given))
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('model_type')}, which is unknown; expected one of "
            f"{', '.join(sorted({*known, *ENCODER_TYPES}))}: for another model "
            "pass a list of specs"
        )
    return model_type


def _has_known_text_model(fields: Fields) -> bool:
    """Return True for a multimodal model of any type whose text model is of a known family."""
    given = fields.given("text_config")
    inner = given.get("model_type") if isinstance(given, Mapping) else None
    return isinstance(inner, str) and inner in FAMILIES


def refuse_attention(fields: Fields, model_type: str, attention: str | None) -> None:
    """Raise UnsupportedOption if a model has an attention that is not supported, described by `attention`."""
    if attention is not None:
        raise UnsupportedOption(
            f"{fields.source}: model_type is {shown(model_type)}, which has {attention}; pagecore only supports full, "
            f"sliding-window, chunked (llama4) and latent "
            f"attention, and the states of {', '.join([*HYBRIDS, *RECURRENT])}"
        )
