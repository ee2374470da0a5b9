"""Geometry: the planes of a cache, compared with those of the exporters whose sequence it imports."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from typing import Any

from pagecore.cache.parts import CacheParts
from pagecore.errors import DeviceError, UnsupportedOption
from pagecore.storage import Plane, Spec, StateSpec, TensorParallel
from pagecore.storage.specs.attended import attended_keys
from pagecore.tiers.handover.manifest import QUANTISED, Geometry, GroupShape, Manifest, PlaneShape

# Fields of a spec that stored bytes depend on in addition to the planes.
OPTIONS = ("format", "key_scale", "value_scale", "label_channels")


def check_served(parts: CacheParts) -> None:
    """Raise DeviceError for a cache whose sequences cannot be handed over."""
    if parts.device == "none":
        raise DeviceError("the cache has device='none' and stores no bytes to hand over; make it with device='cpu'")


def describe(parts: CacheParts) -> Geometry:
    """Return the geometry of a cache."""
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


@dataclass(frozen=True)
class Share:
    """Heads of one group that one exporter delivers.

    Attributes
    ----------
    theirs, mine : range
        The heads, numbered on the exporter's and on the importer's rank; empty in a group without heads.
    whole : bool
        The exporter also delivers the planes that have no heads.
    """

    theirs: range
    mine: range
    whole: bool


def match_geometry(mine: Geometry, manifests: Listed[Manifest], num_kv_heads: int | None = None) -> list[list[Share]]:
    """Return what each exporter delivers of each group: ``shares[exporter][group]``.

    Raises
    ------
    UnsupportedOption
        Planes that differ in more than the split of heads, heads that no exporter delivers, or a combination of block
        sizes that cannot be served. The message names the difference.
    """
    for manifest in manifests:
        _check_alike(mine, manifest.geometry)
    shares: list[list[Share]] = [[] for _ in manifests]
    geometries = [manifest.geometry for manifest in manifests]
    for group in range(len(mine.groups)):
        for listed, share in zip(shares, _shares(mine, geometries, group, num_kv_heads), strict=True):
            listed.append(share)
    return shares


def _check_alike(mine: Geometry, theirs: Geometry) -> None:
    """Raise UnsupportedOption unless the geometries differ in the split of heads or the block size only."""
    if mine.layers != theirs.layers or len(mine.groups) != len(theirs.groups):
        raise UnsupportedOption(
            f"the exporter has {len(theirs.layers)} layers in {len(theirs.groups)} groups, arranged otherwise than the "
            f"{len(mine.layers)} layers in {len(mine.groups)} groups of the cache; use the same model on both sides"
        )
    for group, (own, other) in enumerate(zip(mine.groups, theirs.groups, strict=True)):
        _check_planes(f"group {group}", own.planes, other.planes, own.options, other.options)
        if own.limits != other.limits:
            raise UnsupportedOption(
                f"group {group} has window, chunk, lookahead and sink tokens {other.limits} at the exporter and "
                f"{own.limits} here; use the same specs on both sides"
            )
    if [_names(planes) for planes in mine.states] != [_names(planes) for planes in theirs.states]:
        raise UnsupportedOption("the states of the exporter have other planes; use the same specs on both sides")
    if mine.states != theirs.states or (mine.states and (mine.rank, mine.size) != (theirs.rank, theirs.size)):
        raise UnsupportedOption(
            f"the cache is rank {mine.rank} of {mine.size} and the exporter rank {theirs.rank} of {theirs.size}; "
            "states are not split or joined: use equal ranks on both sides"
        )
    if mine.block_size != theirs.block_size:
        _check_block_sizes(mine, theirs)


def _check_planes(
    who: str, own: list[PlaneShape], other: list[PlaneShape], options: dict[str, Any], theirs: dict[str, Any]
) -> None:
    inner = [
        [(p.name, p.shape[1:] if len(p.shape) == 2 else p.shape, p.dtype, p.per) for p in each] for each in (own, other)
    ]
    formats = [each.get("format") for each in (options, theirs)]
    if inner[0] != inner[1] or formats[0] != formats[1]:
        raise UnsupportedOption(
            f"{who} has planes {_listed(other)} of format {formats[1]} at the exporter and {_listed(own)} of format "
            f"{formats[0]} here; use the same specs on both sides"
        )


def _names(planes: list[PlaneShape]) -> list[str]:
    return [plane.name for plane in planes]


def _listed(planes: list[PlaneShape]) -> str:
    return ", ".join(f"{plane.name} {tuple(plane.shape)} {plane.dtype} per {plane.per}" for plane in planes)


def _check_block_sizes(mine: Geometry, theirs: Geometry) -> None:
    """Raise UnsupportedOption where tokens cannot be cut out of blocks of another size."""
    sizes = f"blocks of {theirs.block_size} tokens at the exporter and {mine.block_size} here"
    for group, own in enumerate(mine.groups):
        if any(limit for limit in own.limits):
            raise UnsupportedOption(f"group {group} has a window and {sizes}; use the same block_size on both sides")
        if any(plane.per == "block" for plane in own.planes):
            raise UnsupportedOption(f"group {group} has planes per block and {sizes}; use the same block_size")


def _shares(mine: Geometry, theirs: list[Geometry], group: int, num_kv_heads: int | None) -> list[Share]:
    """Return the heads of a group that each exporter delivers; every head of the rank comes from one of them."""
    own = _num_heads(mine.groups[group])
    if own == 0:
        return [Share(range(0), range(0), i == 0) for i in range(len(theirs))]
    others = [_num_heads(each.groups[group]) for each in theirs]
    sizes = [(each.size, heads) for each, heads in zip(theirs, others, strict=True)]
    total = _model_heads(group, (mine.size, own), sizes, num_kv_heads)
    wanted = TensorParallel(mine.rank, mine.size).heads(total)
    shares, missing = [], set(wanted)
    for i, geometry in enumerate(theirs):
        held = TensorParallel(geometry.rank, geometry.size).heads(total)
        part = [head for head in held if head in missing]
        missing -= set(part)
        first = part[0] if part else wanted.start
        theirs_first = first - held.start if part else 0
        share = Share(
            range(theirs_first, theirs_first + len(part)),
            range(first - wanted.start, first - wanted.start + len(part)),
            i == 0,
        )
        _check_factors(group, mine.groups[group], own, share.mine, geometry.groups[group], others[i], share.theirs)
        shares.append(share)
    if missing:
        ranks = ", ".join(f"{each.rank} of {each.size}" for each in theirs)
        raise UnsupportedOption(
            f"heads {sorted(missing)} of group {group} are not at rank {ranks}; import the manifests of the ranks that "
            "hold them too, as a list"
        )
    return shares


def _num_heads(group: GroupShape) -> int:
    """Return the heads of a group on one rank; 0 if its planes have none."""
    return next((plane.shape[0] for plane in group.planes if len(plane.shape) == 2), 0)


def _model_heads(group: int, mine: tuple[int, int], theirs: list[tuple[int, int]], given: int | None) -> int:
    """Return the key-value heads of the whole model, from (ranks, heads of a rank) of each side."""
    possible: set[int] | None = None
    for size, heads in [mine, *theirs]:
        totals = {heads * size}
        if heads == 1:  # one head each: split, or replicated over the ranks
            totals = {total for total in range(1, size + 1) if size % total == 0}
        possible = totals if possible is None else possible & totals
    if len(possible or ()) > 1 and given is not None:
        possible = {given} & (possible or set())
    if not possible:
        raise UnsupportedOption(
            f"group {group} has {mine[1]} heads on each of {mine[0]} ranks here, and (ranks, heads) {theirs} at the "
            "exporters; use caches of the same model, and its num_kv_heads"
        )
    if len(possible) > 1 and any(each != mine for each in theirs):
        raise UnsupportedOption(
            f"group {group} has one head on each of {mine[0]} ranks here and (ranks, heads) {theirs} at the exporters; "
            "whether heads are replicated is unknown: pass num_kv_heads, the heads of the whole model"
        )
    return max(possible)


def _check_factors(
    group: int, mine: GroupShape, own: int, my_heads: range, theirs: GroupShape, other: int, their_heads: range
) -> None:
    """Raise UnsupportedOption if given scales or label channels of the heads differ."""
    for name in OPTIONS[1:]:
        here, there = mine.options.get(name), theirs.options.get(name)
        if isinstance(here, list) and len(here) == own:
            here = here[my_heads.start : my_heads.stop]
        if isinstance(there, list) and len(there) == other:
            there = there[their_heads.start : their_heads.stop]
        if here != there:
            raise UnsupportedOption(
                f"{name} of group {group} is {there} at the exporter and {here} here; use the same specs on both sides"
            )
