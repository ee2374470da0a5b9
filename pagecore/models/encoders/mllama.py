"""Decoders of which some layers attend to images in place of tokens: Mllama (Llama 3.2 Vision) and MOSS-VL.

Source: the configuration and modeling files of transformers 5, SGLang's model of MOSS-VL, and the sizes of its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagecore.models.config_files.fields import Fields
from pagecore.models.families.attention_specs import SpecOptions, attention_specs
from pagecore.models.families.common_fields import GROUPED
from pagecore.models.families.family import Family
from pagecore.models.layer_types import FULL
from pagecore.storage import AttentionSpec, CrossSpec
from pagecore.storage.checks import LAYERS_MAX

__all__ = ["MLLAMA", "mllama_specs", "mllama_text"]

# Model types with the field of the text model's config.
MLLAMA: Mapping[str, str] = {"mllama": "text_config", "mllama_text_model": "", "moss_vl": "text_config"}
_SIZES: Mapping[str, object] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "vocab_size": 128256,
}
_MOSS_SIZES: Mapping[str, object] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "vocab_size": 151936,
}
# The first layer that attends to images, and the distance of the others.
_CROSSED = {"mllama": (3, 5, 40), "moss_vl": (2, 4, 48)}
_VISION = {"image_size": 448, "patch_size": 14, "max_num_tiles": 4}


def mllama_specs(
    whole: Fields, model_type: str, asked: SpecOptions
) -> tuple[tuple[AttentionSpec | CrossSpec, ...], int | None]:
    """Return the spec of each layer, in the order of the model, and its maximum length.

    A layer of `cross_attention_layers` stores the keys and values of one image; more images need more `max_tokens`.
    Images of MOSS-VL have any size.

    Raises
    ------
    ConfigError, UnsupportedOption
        As `specs_from_config`.
    """
    fields = mllama_text(whole, model_type)
    dim = 128 if model_type == "moss_vl" else None
    family = Family({**GROUPED, "head_dim": dim, "num_key_value_heads": 8, "cross_attention_layers": None})
    fields.defaults = {"max_position_embeddings": None, **family.defaults}
    count = fields.integer("num_hidden_layers", max=LAYERS_MAX)
    crossed = _crossed(fields, count, _CROSSED.get(model_type, _CROSSED["mllama"]))
    limit = _tokens_of_image(whole) if model_type == "mllama" else None
    layers: list[AttentionSpec | CrossSpec] = []
    for layer, spec in enumerate(attention_specs(fields, family, model_type, [FULL] * count, asked)):
        assert isinstance(spec, AttentionSpec)
        if layer in crossed:
            heads, dim, queries = spec.num_kv_heads, spec.head_dim, spec.num_query_heads
            cross = CrossSpec(heads, dim, dtype=spec.dtype, num_query_heads=queries, format=spec.format)
            layers.append(replace(cross, max_tokens=limit))
        else:
            layers.append(spec)
    longest = fields.value("max_position_embeddings")
    return tuple(layers), None if longest is None else fields.integer("max_position_embeddings")


def mllama_text(whole: Fields, model_type: str) -> Fields:
    """Return the fields of the text model; one inside another config has default sizes."""
    fields = whole.inner(MLLAMA[model_type]) if MLLAMA[model_type] else whole
    sizes = _MOSS_SIZES if model_type == "moss_vl" else _SIZES
    fields.sizes = sizes if fields is not whole else {}
    return fields


def _crossed(fields: Fields, count: int, default: tuple[int, int, int]) -> frozenset[int]:
    """Return the numbers of the layers that attend to images; by default those of the smallest published model."""
    listed: Any = fields.value("cross_attention_layers")
    if listed is None:
        first, distance, end = default
        return frozenset(layer for layer in range(first, end, distance) if layer < count)
    if not isinstance(listed, list | tuple) or not all(type(n) is int and 0 <= n < count for n in listed):
        fields.refuse(f"{fields.describe('cross_attention_layers')}; it must list layers from 0 to {count - 1}")
    return frozenset(listed)


def _tokens_of_image(whole: Fields) -> int | None:
    """Return the patches of all tiles of an image, each with a class token; None without a vision tower."""
    if not isinstance(whole.given("vision_config"), Mapping):
        return None
    vision = whole.inner("vision_config")
    vision.defaults = _VISION
    return ((vision.integer("image_size") // vision.integer("patch_size")) ** 2 + 1) * vision.integer("max_num_tiles")
