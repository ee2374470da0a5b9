"""Geometry: the planes and layers of a cache, as a manifest describes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Listed
from dataclasses import replace
from typing import Any

from pagecore.arrays.dtypes.formats import FOUR_OVER_SIX
from pagecore.cache.memory.sealer import sealed_groups
from pagecore.cache.parts import CacheParts
from pagecore.errors import DeviceError
from pagecore.storage import Plane, Spec, StateSpec
from pagecore.storage.checks import require_int
from pagecore.storage.specs.attended import attended_keys
from pagecore.storage.specs.attention_spec import sealing_of
from pagecore.tiers.handover.manifest import QUANTISED, Geometry, GroupShape, PlaneShape

# Fields of a spec by layer that stored bytes depend on, in addition to the planes and formats of its group.
BY_LAYER = ("key_scale", "value_scale", "label_channels", "key_rotation", "value_rotation")
FIRST_LAYER_MAX = 1 << 20


def check_served(parts: CacheParts) -> None:
    """Raise DeviceError for a cache whose sequences cannot be handed over."""
    if parts.device == "none":
        raise DeviceError("the cache has device='none' and stores no bytes to hand over; make it with device='cpu'")


def describe(parts: CacheParts, first_layer: int | None = None) -> Geometry:
    """Return the geometry of a cache; `first_layer` is the number of its first layer if it is a pipeline stage.

    Raises
    ------
    ShapeError
        A `first_layer` below 0 or past `FIRST_LAYER_MAX`.
    """
    if first_layer is not None:
        first_layer = require_int("first_layer", first_layer, 0, max=FIRST_LAYER_MAX)
    groups = []
    tails = {sealed: tail for tail, sealed in sealed_groups(parts.layers).items()}
    sealings = {tail: _rules(parts.groups[sealed].spec) for sealed, tail in tails.items()}
    for number, group in enumerate(parts.groups):
        keys = attended_keys(group.spec)
        limits = [keys.window, keys.chunk, keys.lookahead, keys.sink_tokens]
        options: dict[str, Any] = _formats(group.spec)
        specs = _specs_of(parts, number)
        options |= {name: [_plain(getattr(spec, name, None)) for spec in specs] for name in BY_LAYER}
        if number in sealings:
            options["sealing"] = sealings[number]
        shapes = _shapes(group.spec.planes)
        groups.append(GroupShape(shapes, group.num_layers, limits, options, group.is_cross, tails.get(number)))
    return Geometry(
        parts.block_size,
        [[layer.group, layer.index] for layer in parts.layers],
        groups,
        [_shapes(_with_checkpoint(spec)) for spec in parts.state_specs],
        parts.parallel.rank,
        parts.parallel.size,
        first_layer,
    )


def _specs_of(parts: CacheParts, group: int) -> list[Spec]:
    """Return the specs of the layers of a group, in their order in its pool."""
    placed = {layer.index: layer.spec for layer in reversed(parts.layers) if group in (layer.group, layer.sealed_group)}
    return [spec for _, spec in sorted(placed.items())]


def _formats(spec: Spec) -> dict[str, Any]:
    """Return the formats in which the layers of a group store keys and values, whatever chose their scales."""
    key = getattr(spec, "format", None)
    value = getattr(spec, "value_format", None)
    stored = {"format": key, "value_format": key if value is None else value}
    return {name: "nvfp4" if each == FOUR_OVER_SIX else each for name, each in stored.items()}


def _rules(spec: Spec) -> dict[str, int | str]:
    """Return the rules by which the blocks of a layer are sealed."""
    sealing = sealing_of(spec)
    assert sealing is not None
    return dataclasses.asdict(sealing)


def _with_checkpoint(spec: Spec) -> list[Plane]:
    """Return the planes of a state, and those of its checkpoint if that is quantised."""
    planes = list(spec.planes)
    if isinstance(spec, StateSpec) and spec.checkpoint_format is not None:
        planes += [replace(plane, name=QUANTISED + plane.name) for plane in spec.checkpoint_spec.planes]
    return planes


def _shapes(planes: Listed[Plane]) -> list[PlaneShape]:
    return [PlaneShape(plane.name, list(plane.shape), str(plane.dtype), plane.per) for plane in planes]


def _plain(value: Any) -> Any:
    """Return tuples as lists, as MessagePack returns them."""
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
