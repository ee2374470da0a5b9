"""Formats of stored keys and values that ModelOpt gives for each layer, or for values apart from keys.

Source: `kv_cache_quantized_layers` and the algorithm FP8_K_NVFP4_V of ModelOpt's configs; vLLM's `fp8_k_nvfp4_v`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, NoReturn

from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.models.cache_format import (
    FORMAT_REMEDY,
    Formats,
    asking_field,
    formats_of_algorithm,
    uniform_formats,
    with_value_format,
)
from pagecore.models.config_files.fields import Fields, shown
from pagecore.models.config_files.quantization import layers_of_cache, quantization_of
from pagecore.models.kv_scales import is_other_part, parse_layer_name
from pagecore.models.model_config import ModelConfig, ModelSpec
from pagecore.storage import AttentionSpec, CrossSpec, LatentSpec

__all__ = ["with_asked_formats"]

_LAYERS = "kv_cache_quantized_layers"
# Parts of names of modules: of attention (mixer: Nemotron-H, temporal_block: RecurrentGemma), and of cross attention.
_ATTENTION = re.compile(r".*(attn|attention)|mixer|temporal_block", re.IGNORECASE)
_CROSS_ATTENTION = re.compile(r"(encoder|cross|encdec|encoder_decoder)_?(attn|attention)", re.IGNORECASE)


class _Attention(NamedTuple):
    """The self-attention or the cross attention of a layer."""

    layer: int
    is_cross: bool


def with_asked_formats(model: ModelConfig, whole: Fields, text: Fields, value_format: str | None) -> ModelConfig:
    """Return a model whose specs have the formats that its config asks for, in addition to one for all keys.

    Parameters
    ----------
    model : ModelConfig
        With the format of `requested_format` in all layers.
    whole, text : Fields
        As for `requested_format`.
    value_format : str or None
        The format that the caller will give the values; those of the config are not used then.

    Raises
    ------
    UnsupportedOption
        A layer with an algorithm that no format stores, or with two; a name that is not that of the attention of a
        layer; or latents whose values would have a format of their own.
    ShapeError
        The groups of a format do not divide the dim of a layer.
    """
    fields = quantization_of(whole, text)
    if fields is None:
        return model
    part = layers_of_cache(fields)
    if part is not None:
        return _with_layers(model, part, value_format is not None)
    value = uniform_formats(fields).value
    if value is None or value_format is not None:
        return model
    asking = asking_field(fields)
    if asking is not None and any(isinstance(spec, LatentSpec) for spec in model.layers):
        raise UnsupportedOption(
            f"{fields.source}: {asking[0].describe(asking[1])}, which stores values as {value}, but the layers store "
            f"latents, which have no values; {FORMAT_REMEDY}"
        )
    return replace(model, layers=tuple(with_value_format(model.layers, value, whole.source)))


def _with_layers(model: ModelConfig, part: Fields, are_values_given: bool) -> ModelConfig:
    """Return the model with the formats of `kv_cache_quantized_layers`; other layers keep the model's dtype."""
    layers: list[ModelSpec] = list(model.layers)
    changed: dict[tuple[ModelSpec, Formats], ModelSpec] = {}
    for (layer, is_cross), asked in _by_attention(part).items():
        formats = Formats(asked.key) if are_values_given else asked
        for number in model.specs_by_layer[layer] if layer < model.num_layers else ():
            spec = layers[number]
            if not isinstance(spec, AttentionSpec | LatentSpec) or isinstance(spec, CrossSpec) != is_cross:
                continue
            if (spec, formats) not in changed:
                stored = _in_formats(spec, formats, f"{part.source}: layer {layer}")
                changed[spec, formats] = spec if stored == spec else stored
            layers[number] = changed[spec, formats]
    return replace(model, layers=tuple(layers))


def _by_attention(part: Fields) -> dict[_Attention, Formats]:
    """Return the formats of each attention, without those of towers and of layers that predict several tokens."""
    given = part.given(_LAYERS)
    if not isinstance(given, Mapping):
        raise UnsupportedOption(
            f"{part.source}: {part.describe(_LAYERS)}; it must be an object with a quant_algo for each layer: "
            f"{FORMAT_REMEDY}"
        )
    found: dict[_Attention, tuple[str, Formats]] = {}
    for module, options in given.items():
        if not isinstance(module, str):
            _refuse(part, f"the key {shown(module)}; expected the name of a module")
        if is_other_part(module):
            continue
        attention = _attention_of(module)
        if attention is None:
            _refuse(part, f"{shown(module)}; expected the name of the attention of a layer")
        algorithm = options.get("quant_algo") if isinstance(options, Mapping) else options
        formats = formats_of_algorithm(algorithm)
        if formats is None:
            _refuse(
                part,
                f"{shown(module)} with the algorithm {shown(algorithm)}; expected one of FP8, NVFP4, FP8_K_NVFP4_V and "
                "NO_QUANT",
            )
        first, before = found.setdefault(attention, (module, formats))
        if before != formats:
            _refuse(part, f"other formats for {shown(module)} than for {shown(first)}, which share a cache")
    return {attention: formats for attention, (_, formats) in found.items()}


def _attention_of(module: str) -> _Attention | None:
    """Return the attention that a module is, or that it is a part of; None for other modules."""
    parsed = parse_layer_name(module)
    names = [] if parsed is None else [name for name in parsed.module.split(".") if _ATTENTION.fullmatch(name)]
    if parsed is None or not names:
        return None
    return _Attention(parsed.layer, any(_CROSS_ATTENTION.fullmatch(name) is not None for name in names))


def _refuse(part: Fields, what: str) -> NoReturn:
    raise UnsupportedOption(f"{part.source}: {part.name(_LAYERS)} has {what}; {FORMAT_REMEDY}")


def _in_formats(spec: AttentionSpec | LatentSpec, formats: Formats, who: str) -> ModelSpec:
    if isinstance(spec, LatentSpec) and formats.value is not None:
        raise UnsupportedOption(
            f"{who}: its values would be stored as {formats.value}, but it stores latents, which have no values; "
            f"{FORMAT_REMEDY}"
        )
    try:
        if isinstance(spec, LatentSpec):
            return spec.with_format(formats.key)
        return replace(spec.with_format(formats.key), value_format=formats.value)
    except PagecoreError as error:
        raise type(error)(f"{who}: {error}") from error
