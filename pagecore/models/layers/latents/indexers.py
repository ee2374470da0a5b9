"""Layers of sparse latent attention (DSA) that run an indexer, and so store an index key for each token.

Source: DeepSeek-V3.2 and GLM-5, in transformers 5.
"""

from __future__ import annotations

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields, shown

__all__ = ["every_layer_indexes", "indexed_layers", "layers_that_index"]

INDEXED = "indexed_attention"
_OF_LETTER = {"F": "full", "S": "shared"}


def every_layer_indexes(fields: Fields, num_layers: int) -> list[bool]:
    """Return True for each layer."""
    _check_layer_types(fields, num_layers)
    return [True] * num_layers


def layers_that_index(fields: Fields, num_layers: int) -> list[bool]:
    """Return True for each layer with an indexer; the others use the keys that the last one before them selected."""
    _check_layer_types(fields, num_layers)
    return indexed_layers(fields, num_layers)


def indexed_layers(fields: Fields, num_layers: int, first: int = 0) -> list[bool]:
    """Return as `layers_that_index`, without reading `layer_types`; `first` is the first layer that attends."""
    name = "indexer_types" if fields.given("indexer_types") is not None else "index_topk_pattern"
    kinds = fields.given(name)
    if kinds is None:
        period = max(1, fields.integer("index_topk_freq", min=0))
        offset = fields.integer("index_skip_topk_offset", min=0)
        return [max(layer - offset + 1, 0) % period == 0 for layer in range(num_layers)]
    if not isinstance(kinds, str | list | tuple) or len(kinds) != num_layers:
        fields.refuse(f"{fields.describe(name)}; it must have one entry for each of num_hidden_layers, {num_layers}")
    named = [_OF_LETTER.get(kind, kind) if isinstance(kinds, str) else kind for kind in kinds]
    for layer, kind in enumerate(named):
        if kind not in ("full", "shared"):
            fields.refuse(f"{fields.name(name)}[{layer}] is {shown(kind)}; expected 'full' (F) or 'shared' (S)")
    if named[first] == "shared":
        fields.refuse(
            f"{fields.name(name)}[{first}] is 'shared', but no layer before it has an indexer; make it 'full'"
        )
    return [kind == "full" for kind in named]


def _check_layer_types(fields: Fields, num_layers: int) -> None:
    listed = fields.given("layer_types")
    if listed is not None and listed != [INDEXED] * num_layers:
        raise UnsupportedOption(
            f"{fields.source}: {fields.describe('layer_types')}; each of the {num_layers} layers must be {INDEXED!r}"
        )
