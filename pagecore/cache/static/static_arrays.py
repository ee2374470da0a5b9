"""Arrays of a static cache: the layers of one kind, in one contiguous array for each plane."""

from __future__ import annotations

from collections.abc import Sequence

from pagecore.arrays import Tensor, zeros
from pagecore.cache.layers.groups import Group
from pagecore.cache.layers.operations import given_factors, write_format
from pagecore.cache.static._static import StaticRoom
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage import Plane, Spec
from pagecore.storage.specs.spec import SIDES, format_of


class StaticArrays:
    """The planes of layers that are stored alike, and the writes to them.

    Parameters
    ----------
    planes : tuple of Plane
        Planes of every layer, see `alike_planes`.
    specs : list of specs
        One for each layer that stores planes.
    batch, length : int
        Sequences, and tokens of each.
    device : str

    Attributes
    ----------
    named : dict of str to Tensor
        Each plane, ``[layers, batch, heads, length, dim]``; zero at first.
    room : StaticRoom
    """

    def __init__(self, planes: tuple[Plane, ...], specs: Sequence[Spec], batch: int, length: int, device: str) -> None:
        extents = len(specs), batch, planes[0].shape[0], length
        self.named: dict[str, Tensor] = {
            plane.name: zeros((*extents, plane.shape[1]), plane.dtype, device) for plane in planes
        }
        self.room = self._make_room(specs, device)

    def _make_room(self, specs: Sequence[Spec], device: str) -> StaticRoom:
        keys, values = self.named["key"], self.named["value"]
        stored = [format_of(specs[0], side) for side in SIDES]
        if stored == [None, None]:
            return StaticRoom(keys, values)
        options = [given_factors(spec, device) | write_format(spec) for spec in specs]
        scales = self.named.get("key_scale"), self.named.get("value_scale")
        codes_per_byte = [1 if each is None else each.codes_per_byte for each in stored]
        return StaticRoom(keys, values, *scales, options, *codes_per_byte)

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(array.nbytes for array in self.named.values())


def alike_planes(groups: Sequence[Group]) -> tuple[Plane, ...]:
    """Return the planes of all groups; raise UnsupportedOption if they differ or a static cache cannot hold them."""
    planes = [_planes_of(group.spec) for group in groups]
    for other in planes[1:]:
        _check_alike(planes[0], other)
    return planes[0]


def encoder_capacity(groups: Sequence[Group]) -> int:
    """Return the most encoder tokens of a sequence, from the specs of groups of cross attention.

    Raises
    ------
    ShapeError
        A spec without `max_tokens`.
    UnsupportedOption
        Specs with different `max_tokens`.
    """
    found = [group.max_cross_tokens for group in groups]
    if None in found:
        raise ShapeError(
            "max_tokens of a CrossSpec is None, and a static cache has no pool that limits it; set it to the most "
            "encoder tokens of a sequence, such as 1500 for Whisper"
        )
    if len(set(found)) > 1:
        raise UnsupportedOption(
            f"max_tokens is {found[0]} in some CrossSpec layers and {found[-1]} in others; a static cache keeps all "
            "of them in one array: use one number, or a PagedKVCache"
        )
    assert found[0] is not None
    return found[0]


def _planes_of(spec: Spec) -> tuple[Plane, ...]:
    """Return the planes that a static cache holds; raise UnsupportedOption for a spec with any others."""
    planes = {plane.name: plane for plane in spec.planes}
    scales: set[str] = set()
    if {"key", "value"} <= planes.keys():
        formats = {side: format_of(spec, side) for side in SIDES}
        scales = {f"{side}_scale" for side, each in formats.items() if each and each.scale_dtype is not None}
    if planes.keys() != {"key", "value"} | scales:
        raise UnsupportedOption(
            f"a {type(spec).__name__} stores {', '.join(planes)}; a static cache holds key and value only, and the "
            "scales of their format: use a PagedKVCache"
        )
    return tuple(planes[name] for name in ("key", "value", *sorted(scales)))


def _check_alike(first: tuple[Plane, ...], other: tuple[Plane, ...]) -> None:
    names = [[plane.name for plane in planes] for planes in (first, other)]
    if names[0] != names[1]:
        raise UnsupportedOption(
            f"some layers store {', '.join(names[0])} and others {', '.join(names[1])}; a static cache keeps all "
            "layers in one array: make one cache for each format, or a PagedKVCache"
        )
    for a, b in zip(first, other, strict=True):
        if a != b:
            raise UnsupportedOption(
                f"{a.name} is {a.shape} of {a.dtype} in some layers and {b.shape} of {b.dtype} in others; a static "
                "cache keeps all layers in one array: make one cache for each kind, or a PagedKVCache"
            )
