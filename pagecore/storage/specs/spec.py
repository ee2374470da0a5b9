"""Specs: the planes that a layer stores, and the checks of a user's own spec."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, SupportsIndex, TypeGuard, runtime_checkable

from pagecore.arrays import DType, as_dtype
from pagecore.arrays.dtypes.formats import Format, as_format
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage.checks import as_tuple, require_int, shown

CACHE_DTYPES = ("float32", "float16", "bfloat16")
Per = Literal["token", "block", "sequence"]
Side = Literal["key", "value"]
SIDES: tuple[Side, Side] = ("key", "value")
# Tokens of a block where no spec requires another number.
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Plane:
    """One array that a spec stores.

    Parameters
    ----------
    name : str
        Unique within the spec: "key", "value", "latent", "scale" ...
    shape : tuple of int
        Shape of one entry, the part of one token, block or sequence; ``(heads, dim)`` for keys.
    dtype : str or anything that names a dtype
    per : {"token", "block", "sequence"}
        Whether there is one entry for each token, block or sequence.

    Raises
    ------
    UnsupportedOption, UnsupportedDtype, ShapeError
        An invalid name, `per`, dtype or shape.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    per: Per = "token"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise UnsupportedOption(f"the name of a plane is {shown(self.name)}; expected a str, such as 'key'")
        sides = as_tuple(f"the shape of plane {self.name!r}", self.shape, "a tuple of integers, such as (heads, dim)")
        object.__setattr__(self, "shape", tuple(require_int(f"a side of plane {self.name!r}", n) for n in sides))
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        if not (isinstance(self.per, str) and self.per in ("token", "block", "sequence")):
            raise UnsupportedOption(f"plane {self.name!r} is per {shown(self.per)}; use 'token', 'block' or 'sequence'")

    @property
    def nbytes(self) -> int:
        """Bytes of one entry: of one token, block or sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class Spec(Protocol):
    """Description of a layer for pools, layouts and caches; `AttentionSpec` is one, and users may define others.

    An optional attribute `block_size` is the only block size, in tokens, for which planes per block are right; None for
    any. Two optional methods serve particular caches: ``shard(parallel) -> Spec`` returns a rank's part of the layer,
    and ``with_dtype(dtype) -> Spec`` the same layer stored as another dtype. A cache that needs a missing method raises
    UnsupportedOption.
    """

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The arrays that the layer stores."""

    @property
    def window(self) -> int | None:
        """Number of keys that a query sees, including its own; None for all."""


def is_spec(value: object) -> TypeGuard[Spec]:
    """Return True for a spec; False for a class of specs, although it has the same attributes."""
    # The same as isinstance(value, Spec), which takes 30 us with Python 3.11.
    return hasattr(value, "planes") and hasattr(value, "window") and not isinstance(value, type)


def stores_key_and_value(spec: Spec) -> bool:
    """Return True if the spec has the planes key and value, which `write` and `attend` serve."""
    return {"key", "value"} <= {plane.name for plane in spec.planes}


def window_of(spec: Spec) -> int | None:
    """Return the window of a spec as an int, or None for all keys; raise ShapeError for anything below 1."""
    window: Any = spec.window
    return None if window is None else require_int(f"window of a {type(spec).__name__}", window, max=None)


def check_block_size(spec: Spec, block_size: int) -> None:
    """Raise ShapeError if the spec is made for blocks of another size."""
    needed = block_size_of(spec)
    if needed is not None and needed != block_size:
        raise ShapeError(
            f"block_size is {block_size}, but the {type(spec).__name__} is made for blocks of {needed} tokens; use "
            f"block_size={needed}"
        )


def block_size_of(spec: object) -> int | None:
    """Return the block size that the planes of a spec require: rows or sealed blocks; None for any."""
    sealing = getattr(spec, "sealing", None)
    needed: int | None = getattr(spec if sealing is None else sealing, "block_size", None)
    return needed


def chosen_block_size(specs: Iterable[object], given: SupportsIndex | None) -> int:
    """Return a given block size; for None the one that specs require, or `DEFAULT_BLOCK_SIZE`.

    Raise ShapeError if they require several.
    """
    if given is not None:
        return require_int("block_size", given)
    sizes = {
        require_int(f"block_size of a {type(spec).__name__}", size)
        for spec in specs
        if (size := block_size_of(spec)) is not None
    }
    if len(sizes) > 1:
        raise ShapeError(
            f"the layers require blocks of {' and '.join(map(str, sorted(sizes)))} tokens, but a cache has one block "
            "size; give their specs the same block_size"
        )
    return sizes.pop() if sizes else DEFAULT_BLOCK_SIZE


def format_of(spec: Spec, side: Side) -> Format | None:
    """Return the format of keys or values: the attribute `format`, or `value_format`; None if the spec has neither."""
    name = getattr(spec, "value_format", None) if side == "value" else None
    if name is None:
        name = getattr(spec, "format", None)
    return None if name is None else as_format(name)


def check_spec(spec: object, who: str = "spec", *, attends: bool = False) -> None:
    """Raise an error for a spec that a pool or a cache cannot serve, before anything is allocated.

    Parameters
    ----------
    spec : Spec
        An AttentionSpec, or a user-defined spec.
    who : str
        Name of the spec in messages, such as "layer 3".
    attends : bool
        Require that `write` and `attend` can serve a plane named "key" or "value": both must be present, with equal
        numbers of heads, ``(heads, dim)`` per token and of a float dtype. With the attribute `format` they hold its
        codes, and planes "key_scale" and "value_scale" its scales; `value_format` is that of values, if it differs.
        With the attributes `key_rotation` and `value_rotation` they hold rotated rows, as those of an AttentionSpec;
        a cache refuses rotations of other planes.
        Planes of other names are only stored.

    Raises
    ------
    UnsupportedOption
        An object that is not a spec, no planes, duplicate names, planes per sequence, or a key or value that cannot be
        attended to.
    UnsupportedDtype
        A key or value with a dtype other than `CACHE_DTYPES`, or than those of the spec's format.
    ShapeError
        A window or a number of query heads that is not an integer of at least 1, or numbers of heads that do not match.
    """
    if not is_spec(spec):
        raise UnsupportedOption(f"{who} is {shown(spec)}; expected a spec such as AttentionSpec(...)")
    who = f"{who}, a {type(spec).__name__},"
    planes = _checked_planes(spec, who)
    window_of(spec)
    heads: Any = getattr(spec, "num_query_heads", None)
    heads = None if heads is None else require_int(f"num_query_heads of a {type(spec).__name__}", heads)
    if attends and not planes.keys().isdisjoint(("key", "value")):
        _check_attended(planes, heads, {side: format_of(spec, side) for side in SIDES}, who)


def _checked_planes(spec: Spec, who: str) -> dict[str, Plane]:
    """Return the planes by name."""
    planes: dict[str, Plane] = {}
    for plane in as_tuple(f"planes of a {type(spec).__name__}", spec.planes, "a tuple of Plane"):
        if not isinstance(plane, Plane):
            raise UnsupportedOption(f"{who} has {shown(plane)} among its planes; expected a Plane")
        if plane.per == "sequence":
            raise UnsupportedOption(
                f"{who} stores plane {plane.name!r} per sequence, as recurrent states are, which block pools do "
                "not hold; use a StatePool for it, and store planes per token or per block here"
            )
        if plane.name in planes:
            raise UnsupportedOption(f"{who} has two planes named {plane.name!r}; give each plane a unique name")
        planes[plane.name] = plane
    if not planes:
        raise UnsupportedOption(f"{who} has no planes; use an Alias for a layer that stores nothing of its own")
    return planes


def _check_attended(
    planes: dict[str, Plane], query_heads: int | None, formats: dict[Side, Format | None], who: str
) -> None:
    for name, stored in formats.items():
        if name not in planes:
            raise UnsupportedOption(
                f"{who} stores {', '.join(planes)} and no plane {name!r}; write and attend need both key and value: "
                "add the plane, or rename the other if it is only to be stored"
            )
        plane = planes[name]
        if plane.per != "token" or len(plane.shape) != 2:
            raise UnsupportedOption(
                f"{who} has a plane {name!r} of shape {plane.shape} per {plane.per}; expected (heads, dim) per token"
            )
        if stored is not None:
            _check_format(planes, name, stored, who)
        elif plane.dtype not in CACHE_DTYPES:
            raise UnsupportedDtype(
                f"{who} has a plane {name!r} of {plane.dtype}; without a format write and attend serve "
                f"{', '.join(CACHE_DTYPES)}"
            )
    heads = planes["key"].shape[0]
    if heads != planes["value"].shape[0]:
        raise ShapeError(
            f"{who} has {heads} heads in plane 'key' and {planes['value'].shape[0]} in 'value'; expected equal numbers"
        )
    if query_heads is not None and query_heads % heads:
        raise ShapeError(f"{who} has num_query_heads {query_heads}, not a multiple of its {heads} key-value heads")


def _check_format(planes: dict[str, Plane], name: str, stored: Format, who: str) -> None:
    """Raise an error unless a plane holds codes of the format, and its scales are in the plane of their name."""
    codes, scales = planes[name], planes.get(f"{name}_scale")
    if codes.dtype != stored.dtype:
        raise UnsupportedDtype(
            f"{who} has a plane {name!r} of {codes.dtype}; the codes of format {stored.name!r} are {stored.dtype}"
        )
    dim = codes.shape[1] * stored.codes_per_byte
    stored.check_dim(f"{who} has a dim of plane {name!r} that", dim)
    if stored.scale_dtype is None:
        return
    expected = (codes.shape[0], stored.row_scales(dim))
    if scales is None or scales.per != "token" or scales.shape != expected or scales.dtype != stored.scale_dtype:
        held = "no such plane" if scales is None else f"{scales.shape} of {scales.dtype} per {scales.per}"
        raise UnsupportedOption(
            f"{who} needs a plane '{name}_scale' of shape {expected} and dtype {stored.scale_dtype} per token for "
            f"format {stored.name!r}; it has {held}"
        )
