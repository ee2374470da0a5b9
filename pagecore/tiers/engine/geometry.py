"""Geometry of pools as messages between processes: layouts and specs to values of JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any, SupportsIndex

from pagecore.errors import PagecoreError, PeerError, ShapeError
from pagecore.storage import KVLayout, Plane, Spec, StateSpec
from pagecore.storage.checks import as_tuple, shown
from pagecore.storage.pools.pool_geometry import PoolGeometry, checked_geometry

VERSION = 1


@dataclass(frozen=True)
class StoredPlanes:
    """A spec of stored planes only, without options of attention."""

    planes: tuple[Plane, ...]
    window: int | None = None


def packed(kind: str, content: dict[str, Any]) -> bytes:
    """Return a message of a kind."""
    return json.dumps({"pagecore": kind, "version": VERSION} | content).encode()


def unpacked(kind: str, message: bytes) -> dict[str, Any]:
    """Return the content of a message; raise PeerError for one of another kind or version."""
    try:
        content = json.loads(message)
        found, version = content["pagecore"], content["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PeerError(f"expected a message of a {kind}, got {shown(message)}; the peer must export one") from None
    if (found, version) != (kind, VERSION):
        raise PeerError(
            f"expected a {kind} of version {VERSION}, got a {shown(found)} of version {shown(version)}; use the same "
            "pagecore in both processes"
        )
    return dict(content)


def geometry_values(geometry: PoolGeometry) -> dict[str, Any]:
    """Return a geometry as values of JSON."""
    return {
        "groups": [
            {"planes": _plane_values(spec.planes), "num_layers": num_layers} for spec, num_layers in geometry.groups
        ],
        "block_size": geometry.block_size,
        "num_blocks": list(geometry.num_blocks),
        "states": [_plane_values(spec.planes) for spec in geometry.state_specs],
        "num_states": geometry.num_states,
        "heads": geometry.heads,
    }


def read_geometry(content: dict[str, Any]) -> PoolGeometry:
    """Return a geometry from values of JSON; raise PeerError for values that describe none."""
    try:
        groups = [(StoredPlanes(_planes(group["planes"])), group["num_layers"]) for group in content["groups"]]
        states = [StateSpec(_planes(planes)) for planes in content["states"]]
        return checked_geometry(
            groups, content["block_size"], states, content["num_blocks"], content["num_states"], content["heads"]
        )
    except (PagecoreError, KeyError, TypeError, ValueError) as error:
        raise PeerError(f"the peer describes a pool that is not valid: {error!r}") from error


def with_own_specs(
    geometry: PoolGeometry,
    groups: Iterable[tuple[Spec, SupportsIndex]] | None,
    state_specs: Iterable[StateSpec] | None,
    block_size: SupportsIndex | None,
) -> PoolGeometry:
    """Return a peer's geometry with the specs of this process; raise ShapeError where their bytes differ."""
    listed = None if groups is None else as_tuple("groups", groups, "a list of (spec, num_layers)")
    own = checked_geometry(
        geometry.groups if listed is None else listed,
        geometry.block_size if block_size is None else block_size,
        geometry.state_specs if state_specs is None else state_specs,
        geometry.num_blocks if listed is None else _counts(listed, geometry),
        geometry.num_states,
        geometry.heads,
    )
    mine, theirs = geometry_values(own), geometry_values(geometry)
    for name, value in mine.items():
        if value != theirs[name]:
            raise ShapeError(
                f"the peer's pool has {name} {shown(theirs[name])}; expected {shown(value)}: both processes must serve "
                "the same model with the same options"
            )
    return own


def _counts(groups: Sized, geometry: PoolGeometry) -> tuple[int, ...]:
    if len(groups) != len(geometry.num_blocks):
        raise ShapeError(f"the peer's pool has {len(geometry.num_blocks)} groups; expected {len(groups)}")
    return geometry.num_blocks


def layout_values(layout: KVLayout) -> dict[str, Any]:
    """Return a bound layout as values of JSON."""
    return {
        "order": layout.order,
        "heads": layout.heads,
        "planes": _plane_values(layout.planes),
        "num_layers": layout.num_layers,
        "num_blocks": layout.num_blocks,
        "block_size": layout.block_size,
        "block_alignment": layout.block_alignment,
    }


def read_layout(content: dict[str, Any]) -> KVLayout:
    """Return a bound layout from values of JSON; raise PeerError for values that describe none."""
    try:
        layout = KVLayout(**content | {"planes": _planes(content["planes"])})
        layout.plane_layout(0)
    except (PagecoreError, KeyError, TypeError, ValueError) as error:
        raise PeerError(f"the peer describes a layout that is not valid: {error!r}") from error
    return layout


def _plane_values(planes: Iterable[Plane]) -> list[list[Any]]:
    return [[plane.name, list(plane.shape), str(plane.dtype), plane.per] for plane in planes]


def _planes(values: Iterable[Any]) -> tuple[Plane, ...]:
    return tuple(Plane(name, tuple(shape), dtype, per) for name, shape, dtype, per in values)
