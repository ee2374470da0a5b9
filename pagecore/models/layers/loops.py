"""Layers of Inkling 2 with a loop: those in the middle are passed several times, and store each pass.

Source: the configuration and modeling files of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.storage.checks import LAYERS_MAX

__all__ = ["LOOP_DEFAULTS", "layers_of_loop", "loop_number", "passes_of_inkling"]

_NAMES = {"core_start": "loop_layer_index_start", "core_end": "loop_layer_index_end", "num_passes": "loop_num_passes"}
_NAMES |= {"gate_rank": "loop_gate_rank"}
# Published files have the names of the object `loop_config`, and transformers names of its own.
LOOP_DEFAULTS: Mapping[str, object] = {
    **{f"loop_config.{name}": None for name in _NAMES},
    **dict(zip(_NAMES.values(), (6, 18, 3, 64), strict=True)),
}


def loop_number(fields: Fields, name: str, most: int = LAYERS_MAX) -> int:
    """Return a number of `loop_config`, or of the field that transformers calls it."""
    nested = f"loop_config.{name}"
    return fields.integer(nested if fields.given(nested) is not None else _NAMES[name], max=most)


def layers_of_loop(fields: Fields) -> range:
    """Return the numbers of the layers that are passed several times."""
    count = fields.integer("num_hidden_layers", max=LAYERS_MAX)
    start, end = (loop_number(fields, name, count) for name in ("core_start", "core_end"))
    if end < start:
        fields.refuse(f"the loop is from layer {start} to {end}; it must begin before it ends")
    return range(start, end)


def passes_of_inkling(fields: Fields) -> list[int]:
    """Return the numbers of the model's layers in the order in which they store keys and values."""
    count, loop = fields.integer("num_hidden_layers", max=LAYERS_MAX), layers_of_loop(fields)
    again = loop_number(fields, "num_passes") - 1
    if count + again * len(loop) > LAYERS_MAX:
        fields.refuse(f"the loop has {again + 1} passes; all of them must have at most {LAYERS_MAX} layers")
    layers = [*range(count)]
    return [*layers[: loop.stop], *[*loop] * again, *layers[loop.stop :]]
