"""Rules that families share: the layers that have a sliding window, and the scale of the scores.

A rule of windows takes the fields of a config and the number of a layer, and returns True if the layer slides. A rule
of scales takes fields, head dim and layer. Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from pagecore.models.fields import Fields

__all__ = [
    "all_but_every_fifth_layer",
    "all_but_every_fourth_layer",
    "all_but_every_sixth_and_the_last",
    "all_but_every_sixth_layer",
    "every_layer",
    "every_other_layer",
    "is_last",
    "layers_above",
    "layers_with_rope",
    "multiplier",
    "no_layer",
    "root_of_scalar",
    "unscaled",
]


def no_layer(_fields: Fields, _layer: int) -> bool:
    """No layer slides unless `layer_types` says so."""
    return False


def every_layer(fields: Fields, _layer: int) -> bool:
    """Every layer slides, if there is a window."""
    return fields.value("sliding_window") is not None


def every_other_layer(_fields: Fields, layer: int) -> bool:
    """Layers 0, 2, 4 ... slide."""
    return layer % 2 == 0


def all_but_every_fourth_layer(_fields: Fields, layer: int) -> bool:
    """Layers 3, 7, 11 ... attend to all keys."""
    return (layer + 1) % 4 != 0


def all_but_every_fifth_layer(_fields: Fields, layer: int) -> bool:
    """Layers 4, 9, 14 ... attend to all keys."""
    return (layer + 1) % 5 != 0


def all_but_every_sixth_layer(_fields: Fields, layer: int) -> bool:
    """Layers 5, 11, 17 ... attend to all keys."""
    return (layer + 1) % 6 != 0


def all_but_every_sixth_and_the_last(fields: Fields, layer: int) -> bool:
    """Layers 5, 11, 17 ... and the last one attend to all keys."""
    return (layer + 1) % 6 != 0 and not is_last(fields, layer)


def is_last(fields: Fields, layer: int) -> bool:
    """Return True for the last layer of the model."""
    return layer == fields.integer("num_hidden_layers") - 1


def layers_above(fields: Fields, layer: int) -> bool:
    """Layers from `max_window_layers` on slide."""
    return layer >= fields.integer("max_window_layers", min=0)


def layers_with_rope(fields: Fields, layer: int) -> bool:
    """Return True if a layer has rotary positions: as listed, or all but every nth layer."""
    listed = fields.value("no_rope_layers")
    if not listed:
        return (layer + 1) % fields.integer("no_rope_layer_interval") != 0
    layers = fields.integer("num_hidden_layers")
    if not isinstance(listed, list | tuple) or len(listed) != layers or any(entry not in (0, 1) for entry in listed):
        fields.refuse(
            f"{fields.describe('no_rope_layers')}; it must list 0 or 1 for each of the {layers} layers, or be empty"
        )
    return bool(listed[layer])


def root_of_scalar(fields: Fields, _head_dim: int, _layer: int) -> float:
    """Return the scale of queries that are divided by the root of `query_pre_attn_scalar`."""
    scalar = fields.number("query_pre_attn_scalar")
    if not scalar:
        fields.refuse(f"{fields.describe('query_pre_attn_scalar')}; it must be above 0: its root divides the scores")
    return float(scalar**-0.5)


def multiplier(fields: Fields, _head_dim: int, _layer: int) -> float:
    """Return `attention_multiplier`."""
    return fields.number("attention_multiplier")


def unscaled(_fields: Fields, _head_dim: int, _layer: int) -> float:
    """Return 1, the scale of a model that normalises queries and keys, or does not scale at all."""
    return 1.0
