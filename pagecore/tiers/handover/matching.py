"""Matching: which layers and heads of a sequence each exporter delivers to a cache."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pagecore.errors import UnsupportedOption
from pagecore.storage import TensorParallel
from pagecore.tiers.handover.geometry import BY_LAYER
from pagecore.tiers.handover.manifest import Geometry, GroupShape, Manifest, PlaneShape


@dataclass(frozen=True)
class Share:
    """Layers and heads of one group that one exporter delivers.

    Attributes
    ----------
    group, their_group : int
        The group of the importer, and that of the exporter.
    layers, their_layers : range
        The layers, numbered within the groups.
    heads, their_heads : range
        The heads, numbered on the ranks of the importer and the exporter; empty in a group without heads.
    whole : bool
        The exporter also delivers the planes that have no heads.
    """

    group: int
    their_group: int
    layers: range
    their_layers: range
    heads: range
    their_heads: range
    whole: bool


@dataclass(frozen=True)
class _Common:
    """Layers of one group of the importer that an exporter has, numbered within the groups of both."""

    exporter: Geometry
    group: int
    their_group: int
    layers: range
    their_layers: range

    @property
    def theirs(self) -> GroupShape:
        """The group of the exporter."""
        return self.exporter.groups[self.their_group]

    def only(self, layers: range) -> _Common:
        """Return some of the layers."""
        start = self.their_layers.start + layers.start - self.layers.start
        return replace(self, layers=layers, their_layers=range(start, start + len(layers)))

    def share(self, heads: range, their_heads: range, whole: bool) -> Share:
        """Return what the exporter delivers of these layers."""
        return Share(self.group, self.their_group, self.layers, self.their_layers, heads, their_heads, whole)


def match_geometry(mine: Geometry, manifests: Listed[Manifest], num_kv_heads: int | None = None) -> list[list[Share]]:
    """Return what each exporter delivers: ``shares[exporter]``.

    Raises
    ------
    UnsupportedOption
        Planes that differ in more than the split of layers and heads, layers or heads that no exporter delivers, or a
        combination of block sizes that cannot be served. The message names the difference.
    """
    common = []
    for manifest in manifests:
        _check_layers(mine, manifest.geometry)
        common.append(_common_layers(mine, manifest.geometry))
        _check_alike(mine, manifest.geometry, common[-1])
    shares: list[list[Share]] = [[] for _ in manifests]
    for group in range(len(mine.groups)):
        held = {i: each[group] for i, each in enumerate(common) if group in each}
        for layers in _segments(mine, group, list(held.values())):
            holders = {i: each.only(layers) for i, each in held.items() if layers.start in each.layers}
            for i, share in zip(holders, _shares(mine, list(holders.values()), num_kv_heads), strict=True):
                shares[i].append(share)
    return shares


def _check_layers(mine: Geometry, theirs: Geometry) -> None:
    """Raise UnsupportedOption unless the layers can be those of one model, or of stages of one."""
    is_alike = mine.layers == theirs.layers and len(mine.groups) == len(theirs.groups)
    if mine.first_layer is theirs.first_layer is None and not is_alike:
        raise UnsupportedOption(
            f"the exporter has {len(theirs.layers)} layers in {len(theirs.groups)} groups, arranged otherwise than the "
            f"{len(mine.layers)} layers in {len(mine.groups)} groups of the cache; use the same model on both sides, "
            "and first_layer for the stages of a pipeline"
        )
    for whole, stage in ((mine, theirs), (theirs, mine)):
        if whole.first_layer is None and stage.numbers.stop > len(whole.layers):
            raise UnsupportedOption(
                f"a stage has the layers up to {stage.numbers.stop - 1}, and the other side {len(whole.layers)} layers "
                "in all; pass first_layer on both sides if both are stages"
            )
    if (mine.states or theirs.states) and mine.numbers != theirs.numbers:
        raise UnsupportedOption(
            f"the cache has layers {_named(mine.numbers)} and the exporter {_named(theirs.numbers)}; states are not "
            "split or joined: use equal stages on both sides, and pass the manifest of the same stage"
        )


def _named(layers: range) -> str:
    return f"{layers.start} to {layers.stop - 1}"


def _common_layers(mine: Geometry, theirs: Geometry) -> dict[int, _Common]:
    """Return the layers that both sides have, by the group of the importer."""
    pairs: dict[int, set[tuple[int, int, int]]] = {}
    for number in range(max(mine.numbers.start, theirs.numbers.start), min(mine.numbers.stop, theirs.numbers.stop)):
        group, index = mine.layers[number - mine.numbers.start]
        their_group, their_index = theirs.layers[number - theirs.numbers.start]
        pairs.setdefault(group, set()).add((their_group, index, their_index))
    found = {}
    for group, listed in pairs.items():
        ordered = sorted(listed)
        their_group, index, their_index = ordered[0]
        count = len(ordered)
        if ordered != [(their_group, index + i, their_index + i) for i in range(count)] or (group < 0) != (
            their_group < 0
        ):
            raise UnsupportedOption(
                f"layers {_named(mine.numbers)} of the cache and {_named(theirs.numbers)} of the exporter are arranged "
                "otherwise; use the same specs on both sides"
            )
        if group >= 0:
            layers, their_layers = range(index, index + count), range(their_index, their_index + count)
            found[group] = _Common(theirs, group, their_group, layers, their_layers)
    return found | _common_sealed(mine, theirs, found)


def _common_sealed(mine: Geometry, theirs: Geometry, found: dict[int, _Common]) -> dict[int, _Common]:
    """Return the common sealed blocks of these layers; raise UnsupportedOption unless both sides seal alike."""
    for group, common in found.items():
        own, other = mine.groups[group].options.get("sealing"), common.theirs.options.get("sealing")
        if own != other:
            raise UnsupportedOption(
                f"layers of group {group} have {_rules(other)} at the exporter and {_rules(own)} here; use the same "
                "format, residual, group_size and block_size on both sides"
            )
    tails = {shape.tail: number for number, shape in enumerate(theirs.groups) if shape.tail is not None}
    sealed = {}
    for number, shape in enumerate(mine.groups):
        if shape.tail is not None and shape.tail in found:
            common = found[shape.tail]
            if common.their_group not in tails:
                raise UnsupportedOption(
                    f"group {number} has sealed blocks here, and the exporter has no sealed blocks of these layers; "
                    "use the same format, residual, group_size and block_size on both sides"
                )
            sealed[number] = replace(common, group=number, their_group=tails[common.their_group])
    return sealed


def _rules(sealing: dict[str, Any] | None) -> str:
    if sealing is None:
        return "no sealed blocks"
    return "sealed blocks with " + ", ".join(f"{name} {value}" for name, value in sealing.items())


def _segments(mine: Geometry, group: int, held: list[_Common]) -> list[range]:
    """Return the layers of a group, cut where the exporters' begin and end; raise if some are at no exporter."""
    count = mine.groups[group].layers
    cuts = sorted({0, count, *(end for each in held for end in (each.layers.start, each.layers.stop))})
    segments = [range(start, stop) for start, stop in pairwise(cuts)]
    for layers in segments:
        if not any(layers.start in each.layers for each in held):
            numbers = _layers_of(mine, group, layers)
            raise UnsupportedOption(
                f"layers {numbers} of the model are at no exporter; import the manifests of the stages that hold them "
                "too, as a list"
            )
    return segments


def _layers_of(mine: Geometry, group: int, layers: range) -> list[int]:
    """Return the numbers in the model of some layers of a group."""
    tail = mine.groups[group].tail
    place = group if tail is None else tail
    return [mine.numbers[i] for i, (each, index) in enumerate(mine.layers) if each == place and index in layers]


def _check_alike(mine: Geometry, theirs: Geometry, common: dict[int, _Common]) -> None:
    """Raise UnsupportedOption unless common layers differ in the split of heads or the block size only."""
    for group, layers in common.items():
        own, other = mine.groups[group], layers.theirs
        _check_planes(f"group {group}", own.planes, other.planes, own.options, other.options)
        if own.is_cross != other.is_cross:
            sides = ("here", "at the exporter") if own.is_cross else ("at the exporter", "here")
            raise UnsupportedOption(
                f"group {group} is of cross attention {sides[0]}, and not {sides[1]}; use the same specs on both sides"
            )
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
        _check_block_sizes(mine, theirs, list(common))


def _check_planes(
    who: str, own: list[PlaneShape], other: list[PlaneShape], options: dict[str, Any], theirs: dict[str, Any]
) -> None:
    inner = [
        [(p.name, p.shape[1:] if len(p.shape) == 2 else p.shape, p.dtype, p.per) for p in each] for each in (own, other)
    ]
    formats = [[each.get(name) for name in ("format", "value_format")] for each in (options, theirs)]
    if inner[0] != inner[1] or formats[0] != formats[1]:
        raise UnsupportedOption(
            f"{who} has planes {_listed(other)} of {_of_formats(*formats[1])} at the exporter and {_listed(own)} of "
            f"{_of_formats(*formats[0])} here; use the same specs on both sides"
        )


def _of_formats(key: object, value: object) -> str:
    return f"format {key}" if key == value else f"formats {key} and {value}"


def _names(planes: list[PlaneShape]) -> list[str]:
    return [plane.name for plane in planes]


def _listed(planes: list[PlaneShape]) -> str:
    return ", ".join(f"{plane.name} {tuple(plane.shape)} {plane.dtype} per {plane.per}" for plane in planes)


def _check_block_sizes(mine: Geometry, theirs: Geometry, groups: list[int]) -> None:
    """Raise UnsupportedOption where tokens cannot be cut out of blocks of another size."""
    sizes = f"blocks of {theirs.block_size} tokens at the exporter and {mine.block_size} here"
    for group in groups:
        own = mine.groups[group]
        if any(limit for limit in own.limits):
            raise UnsupportedOption(f"group {group} has a window and {sizes}; use the same block_size on both sides")
        if any(plane.per == "block" for plane in own.planes):
            raise UnsupportedOption(f"group {group} has planes per block and {sizes}; use the same block_size")


def _shares(mine: Geometry, common: list[_Common], num_kv_heads: int | None) -> list[Share]:
    """Return the heads of some layers that each exporter delivers: together, all heads of the rank.

    Each delivers one range. It has heads of an earlier exporter only between others that are still missing.
    """
    group, own = common[0].group, mine.groups[common[0].group]
    if _num_heads(own) == 0:
        shares = [each.share(range(0), range(0), i == 0) for i, each in enumerate(common)]
        for share, each in zip(shares, common, strict=True):
            _check_layers_alike(mine, share, each.theirs)
        return shares
    sizes = [(each.exporter.size, _num_heads(each.theirs)) for each in common]
    total = _model_heads(group, (mine.size, _num_heads(own)), sizes, num_kv_heads)
    wanted = TensorParallel(mine.rank, mine.size).heads(total)
    missing = set(wanted)
    shares = []
    for i, each in enumerate(common):
        held = TensorParallel(each.exporter.rank, each.exporter.size).heads(total)
        part = [head for head in held if head in missing]
        missing -= set(part)
        share = each.share(_numbers(part, wanted), _numbers(part, held), i == 0)
        if part:
            _check_layers_alike(mine, share, each.theirs)
        shares.append(share)
    if missing:
        ranks = ", ".join(f"{each.exporter.rank} of {each.exporter.size}" for each in common)
        raise UnsupportedOption(
            f"heads {sorted(missing)} of group {group} are not at rank {ranks}; import the manifests of the ranks that "
            "hold them too, as a list"
        )
    return shares


def _numbers(heads: list[int], held: range) -> range:
    """Return the range of ascending heads of the model, as numbered on a rank that holds `held`."""
    return range(heads[0] - held.start, heads[-1] + 1 - held.start) if heads else range(0)


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


def _check_layers_alike(geometry: Geometry, share: Share, theirs: GroupShape) -> None:
    """Raise UnsupportedOption if options by layer differ: given scales, label channels or rotations."""
    mine = geometry.groups[share.group]
    for name in BY_LAYER:
        for layer, their_layer in zip(share.layers, share.their_layers, strict=True):
            here, there = _option(mine, name, layer, share.heads), _option(theirs, name, their_layer, share.their_heads)
            if here != there:
                (number, *_) = _layers_of(geometry, share.group, range(layer, layer + 1))
                raise UnsupportedOption(
                    f"{name} of layer {number} is {there} at the exporter and {here} here; use the same specs on both "
                    "sides"
                )


def _option(group: GroupShape, name: str, layer: int, heads: range) -> object:
    """Return an option of a layer, and of a list with an entry for each head those of some heads.

    Equal entries are one: a spec of some heads may have a number where that of more heads has a list.
    """
    by_layer = group.options.get(name)
    option = by_layer[layer] if isinstance(by_layer, list) and len(by_layer) == group.layers else None
    if isinstance(option, list) and len(option) == _num_heads(group):
        option = option[heads.start : heads.stop]
        return option[0] if option and all(each == option[0] for each in option) else option
    return option
