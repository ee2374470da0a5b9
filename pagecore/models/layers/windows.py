"""Rules by which layers have a sliding window, if a config does not list them.

A rule takes the fields of a config and the number of a layer, and returns True if the layer slides. Source: the
configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from pagecore.models.config_files.fields import Fields

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
    "no_layer",
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
