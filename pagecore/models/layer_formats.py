"""Formats of stored keys and values that ModelOpt gives for each layer, or for values apart from keys.

Source: `kv_cache_quantized_layers` and the algorithm FP8_K_NVFP4_V of ModelOpt's configs; vLLM's `fp8_k_nvfp4_v`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.models.cache_format import Formats, formats_of_algorithm, uniform_formats, with_value_format
from pagecore.models.config_files.fields import Fields, shown
from pagecore.models.config_files.quantization import layers_of_cache, quantization_of
from pagecore.models.kv_scales import is_other_part, parse_layer_name
from pagecore.models.model_config import ModelConfig, ModelSpec
from pagecore.storage import AttentionSpec, CrossSpec, LatentSpec

__all__ = ["with_asked_formats"]


def with_asked_formats(model: ModelConfig, whole: Fields, text: Fields) -> ModelConfig:
    """Return a model whose specs have the formats that its config asks for, in addition to one for all keys.

    Parameters
    ----------
    model : ModelConfig
        With the format of `requested_format` in all layers.
    whole, text : Fields
        As for `requested_format`.

    Raises
    ------
    UnsupportedOption
        A layer with an algorithm that no format stores, a name that is not that of a layer, or latents whose values
        would have a format of their own.
    ShapeError
        The groups of a format do not divide the dim of a layer.
    """
    fields = quantization_of(whole, text)
    part = None if fields is None else layers_of_cache(fields)
    if part is not None:
        return _with_layers(model, part)
    value = None if fields is None else uniform_formats(fields).value
    if value is None:
        return model
    return replace(model, layers=tuple(with_value_format(model.layers, value, whole.source)))


def _with_layers(model: ModelConfig, part: Fields) -> ModelConfig:
    """Return the model with the formats of `kv_cache_quantized_layers`; other layers keep the model's dtype."""
    layers: list[ModelSpec] = list(model.layers)
    changed: dict[tuple[ModelSpec, Formats], ModelSpec] = {}
    for layer, formats in _by_layer(part).items():
        for number in model.specs_by_layer[layer] if layer < model.num_layers else ():
            spec = layers[number]
            if not isinstance(spec, AttentionSpec | LatentSpec) or isinstance(spec, CrossSpec):
                continue
            if (spec, formats) not in changed:
                stored = _in_formats(spec, formats, f"{part.source}: layer {layer}")
                changed[spec, formats] = spec if stored == spec else stored
            layers[number] = changed[spec, formats]
    return replace(model, layers=tuple(layers))


def _by_layer(part: Fields) -> dict[int, Formats]:
    """Return the formats by layer, without those of towers and of layers that predict several tokens."""
    name, given = "kv_cache_quantized_layers", part.given("kv_cache_quantized_layers")
    if not isinstance(given, Mapping):
        raise UnsupportedOption(
            f"{part.source}: {part.describe(name)}; it must be an object with a quant_algo for each layer"
        )
    found: dict[int, Formats] = {}
    for module, options in given.items():
        if is_other_part(module):
            continue
        parsed = parse_layer_name(module)
        algorithm = options.get("quant_algo") if isinstance(options, Mapping) else options
        formats = formats_of_algorithm(algorithm)
        if parsed is None or formats is None or found.setdefault(parsed.layer, formats) != formats:
            raise UnsupportedOption(
                f"{part.source}: {part.name(name)} has {shown(module)} with the algorithm {shown(algorithm)}; expected "
                "one of FP8, NVFP4, FP8_K_NVFP4_V and NO_QUANT for the attention of a layer: pass format="
            )
    return found


def _in_formats(spec: AttentionSpec | LatentSpec, formats: Formats, who: str) -> ModelSpec:
    if isinstance(spec, LatentSpec) and formats.value is not None:
        raise UnsupportedOption(
            f"{who}: its values would be stored as {formats.value}, but it stores latents, which have no values; pass "
            "format="
        )
    try:
        if isinstance(spec, LatentSpec):
            return spec.with_format(formats.key)
        return replace(spec.with_format(formats.key), value_format=formats.value)
    except PagecoreError as error:
        raise type(error)(f"{who}: {error}") from error
