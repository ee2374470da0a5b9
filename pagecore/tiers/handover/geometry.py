"""Geometry: the planes and layers of a cache, as a manifest describes them."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import replace
from typing import Any

from pagecore.cache.parts import CacheParts
from pagecore.errors import DeviceError, UnsupportedOption
from pagecore.storage import Plane, Spec, StateSpec
from pagecore.storage.checks import require_int
from pagecore.storage.specs.attended import attended_keys
from pagecore.tiers.handover.manifest import QUANTISED, Geometry, GroupShape, PlaneShape

# Fields of a spec that stored bytes depend on in addition to the planes.
OPTIONS = ("format", "value_format", "key_scale", "value_scale", "label_channels")
FIRST_LAYER_MAX = 1 << 20


def check_served(parts: CacheParts) -> None:
    """Raise DeviceError or UnsupportedOption for a cache whose sequences cannot be handed over."""
    if parts.device == "none":
        raise DeviceError("the cache has device='none' and stores no bytes to hand over; make it with device='cpu'")
    if parts.seals_blocks:
        raise UnsupportedOption(
            "the cache has sealed blocks (format kivi2 or kivi4), which a hand-over does not move; use another format, "
            "such as 'int4_token'"
        )


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
    for group in parts.groups:
        keys = attended_keys(group.spec)
        limits = [keys.window, keys.chunk, keys.lookahead, keys.sink_tokens]
        options = {name: _plain(getattr(group.spec, name, None)) for name in OPTIONS}
        groups.append(GroupShape(_shapes(group.spec.planes), group.num_layers, limits, options, group.is_cross))
    return Geometry(
        parts.block_size,
        [[layer.group, layer.index] for layer in parts.layers],
        groups,
        [_shapes(_with_checkpoint(spec)) for spec in parts.state_specs],
        parts.parallel.rank,
        parts.parallel.size,
        first_layer,
    )


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
