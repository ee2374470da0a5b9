"""Latent attention whose layers differ: some without a rotary part, some with an indexer, some that share latents.

Source: the configuration and modeling files of Mistral Large 4 and GLM-5-Next in transformers 5, and those of Ling in
SGLang.
"""

from __future__ import annotations

from dataclasses import replace

from pagecore.arrays import DType
from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields, shown
from pagecore.models.layer_types import attends
from pagecore.models.layers.latents.dims import latent_spec
from pagecore.models.layers.latents.indexers import every_layer_indexes, indexed_layers
from pagecore.models.layers.states.kinds import kinds_of_glm_5_next
from pagecore.models.layers.windows import layers_with_rope
from pagecore.storage import Alias, LatentSpec, RowSpec

__all__ = ["latents_of_glm_5_next", "latents_of_ling", "latents_of_mistral_large_4"]


def latents_of_mistral_large_4(
    fields: Fields, heads: int, num_layers: int, dtype: DType, format: str | None
) -> list[LatentSpec | RowSpec | Alias]:
    """Return the spec of each layer: some have no rotary part, and some read the latents of an earlier layer."""
    every_layer_indexes(fields, num_layers)  # refuses layers of other types
    indexed = indexed_layers(fields, num_layers)
    rotary = latent_spec(fields, heads, dtype, format)
    plain = replace(rotary, rope_dim=0)
    sources = _sources(fields, num_layers)
    specs: list[LatentSpec | RowSpec | Alias] = []
    for layer, source in enumerate(sources):
        if source != layer:
            _refuse_own_index(fields, layer, indexed[layer])
            specs.append(Alias(source))
            continue
        spec = rotary if layers_with_rope(fields, layer) else plain
        specs.append(replace(spec, index_dim=fields.integer("index_head_dim")) if indexed[layer] else spec)
    return specs


def _sources(fields: Fields, num_layers: int) -> list[int]:
    """Return for each layer the one whose latents it reads, which may be its own."""
    listed = fields.given("kv_source_layers")
    if listed is None:
        return list(range(num_layers))
    if not isinstance(listed, list | tuple) or len(listed) != num_layers:
        fields.refuse(f"{fields.describe('kv_source_layers')}; it must have one entry for each of {num_layers} layers")
    for layer, source in enumerate(listed):
        is_layer = isinstance(source, int) and not isinstance(source, bool) and 0 <= source <= layer
        if not is_layer or listed[source] != source:
            fields.refuse(
                f"{fields.name('kv_source_layers')}[{layer}] is {shown(source)}; it must be {layer} or an earlier "
                "layer that stores its own latents"
            )
        if layers_with_rope(fields, source) != layers_with_rope(fields, layer):
            fields.refuse(
                f"{fields.name('kv_source_layers')}[{layer}] is {source}, but only one of the two layers has a rotary "
                "part (no_rope_layers)"
            )
    return list(listed)


def _refuse_own_index(fields: Fields, layer: int, is_indexed: bool) -> None:
    if is_indexed:
        raise UnsupportedOption(
            f"{fields.source}: layer {layer} reads the latents of another layer (kv_source_layers), and stores index "
            "keys of its own, which no spec describes; pass a list of specs, or make its entry in indexer_types "
            "'shared'"
        )


def latents_of_glm_5_next(
    fields: Fields, heads: int, num_layers: int, dtype: DType, format: str | None
) -> list[LatentSpec | RowSpec | Alias]:
    """Return the spec of each layer, as if all attended: latents without a rotary part.

    Layers with an indexer store the key of each token and the logits of its weights in the mean of a group of tokens.
    """
    if fields.integer("qk_rope_head_dim", min=0):
        fields.refuse(f"{fields.describe('qk_rope_head_dim')}; it must be 0, the layers have no rotary part")
    spec = latent_spec(fields, heads, dtype, format, rope_min=0, rotates=False)
    indexed = replace(spec, index_dim=2 * fields.integer("index_head_dim"), index_format=None)
    kinds = kinds_of_glm_5_next(fields, num_layers)
    first = next((layer for layer, kind in enumerate(kinds) if attends(kind)), 0)
    return [indexed if each else spec for each in indexed_layers(fields, num_layers, first)]


def latents_of_ling(
    fields: Fields, heads: int, num_layers: int, dtype: DType, format: str | None
) -> list[LatentSpec | RowSpec | Alias]:
    """Return the spec of each layer, as if all attended; with `use_mla_nope` the rotary part is left out."""
    # Published files give the key-value heads of grouped attention, which these layers do not have.
    spec = latent_spec(fields, heads, dtype, format, checks_heads=False)
    if fields.flag("use_mla_nope"):
        spec = replace(spec, rope_dim=0, scale=float(fields.integer("qk_nope_head_dim") ** -0.5))
    return [spec] * num_layers
