"""Layers that read the keys and values of an earlier layer: those after the last that stores its own.

Source: the configuration files of Gemma 3n and Gemma 4 in transformers 5, and the modeling file of Hunyuan-Large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from pagecore.errors import UnsupportedOption
from pagecore.models.config_files.fields import Fields
from pagecore.storage import Alias, AttentionSpec, LatentSpec, RowSpec

__all__ = ["moved", "share_last_layers", "share_layers", "specs_of_layers"]

_Spec = TypeVar("_Spec")


def share_last_layers(
    fields: Fields, name: str, specs: Sequence[AttentionSpec | LatentSpec | RowSpec | Alias]
) -> list[AttentionSpec | LatentSpec | RowSpec | Alias]:
    """Return the specs with an `Alias` for each of the last layers.

    It refers to the last layer with the same window that stores its own keys and values.

    Parameters
    ----------
    fields : Fields
    name : str
        Field with the number of layers that share; the first layers store their own.
    specs : sequence of specs
        Specs of all layers, as if each stored its own.

    Raises
    ------
    ConfigError
        The number is not one of layers, or no layer with the same window stores keys and values.
    """
    count = fields.integer(name, min=0)
    first = len(specs) - count
    if count and first < 1:
        fields.refuse(f"{fields.describe(name)}; it must be below {fields.name('num_hidden_layers')}, {len(specs)}")
    sources = {getattr(spec, "window", None): layer for layer, spec in enumerate(specs[:first])}
    listed: list[AttentionSpec | LatentSpec | RowSpec | Alias] = list(specs[:first])
    for layer, spec in enumerate(specs[first:], first):
        window = getattr(spec, "window", None)
        if window not in sources:
            fields.refuse(
                f"{fields.describe(name)}, but no layer before layer {first} has the window of layer {layer}, "
                f"{window}: make {name} smaller"
            )
        listed.append(Alias(sources[window]))
    return listed


def share_layers(
    specs: Sequence[AttentionSpec | LatentSpec | RowSpec | Alias], sources: Sequence[int]
) -> list[AttentionSpec | LatentSpec | RowSpec | Alias]:
    """Return the specs with an `Alias` for each layer that reads the keys and values of an earlier one."""
    return [
        spec if source == layer else Alias(source)
        for layer, (spec, source) in enumerate(zip(specs, sources, strict=True))
    ]


def moved(specs: Sequence[_Spec], by: int) -> tuple[_Spec, ...]:
    """Return specs that follow `by` others: each `Alias` refers to the same layer as before."""
    return tuple(replace(spec, layer=spec.layer + by) if isinstance(spec, Alias) else spec for spec in specs)


def specs_of_layers(specs: Sequence[_Spec], numbers: Sequence[int]) -> tuple[_Spec, ...]:
    """Return the specs with the given numbers, for a pipeline stage; each `Alias` has the number within the stage.

    Raises
    ------
    UnsupportedOption
        A layer reads the keys and values of one that is not among them.
    """
    places = {number: place for place, number in enumerate(numbers)}
    chosen: list[_Spec] = []
    for number in numbers:
        spec = specs[number]
        if isinstance(spec, Alias):
            if spec.layer not in places:
                raise UnsupportedOption(
                    f"layer {number} reads the keys and values of layer {spec.layer}, which is in another pipeline "
                    "stage; use fewer stages"
                )
            spec = replace(spec, layer=places[spec.layer])
        chosen.append(spec)
    return tuple(chosen)
