"""What a layer stores: its planes, and what a spec is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

from pagecore.arrays import DType, as_dtype
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage.checks import as_tuple, require_int, shown

CACHE_DTYPES = ("float32", "float16", "bfloat16")
Per = Literal["token", "block", "sequence"]


@dataclass(frozen=True)
class Plane:
    """One array that a spec stores.

    Parameters
    ----------
    name : str
        "key", "value", "latent", "scale" ...
    shape : tuple of int
        What one token (or block, or sequence) holds; ``(heads, dim)`` for a key.
    dtype : str or anything that names a dtype
    per : {"token", "block", "sequence"}
        What there is one of.
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
        """Bytes of one entry: of one token for a plane that is per token."""
        return math.prod(self.shape) * self.dtype.itemsize


@runtime_checkable
class Spec(Protocol):
    """What pools, layouts and the cache need to know of a layer.

    Two methods more serve what not every cache asks for: ``shard(parallel) -> Spec``, a rank's part of the layer, and
    ``with_dtype(dtype) -> Spec``, the same layer stored as another dtype. A spec that lacks one is refused by name
    where it is needed.
    """

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The arrays that the layer stores."""

    @property
    def window(self) -> int | None:
        """How many keys a query sees, itself included; None for all."""


def is_spec(value: object) -> TypeGuard[Spec]:
    """Return True for a spec; a class of specs has the names of its attributes, but is not a spec."""
    return isinstance(value, Spec) and not isinstance(value, type)


def window_of(spec: Spec) -> int | None:
    """Return the window of a spec as an int, None for all keys; ShapeError for anything but an integer from 1 on."""
    window: Any = spec.window
    return None if window is None else require_int(f"window of a {type(spec).__name__}", window, max=None)


def check_spec(spec: object, who: str = "spec", *, attends: bool = False) -> None:
    """Refuse a spec that a pool or a cache could not serve, before anything is made.

    Parameters
    ----------
    spec : Spec
        An AttentionSpec, or a spec of the user's own.
    who : str
        Name of the spec in messages, such as "layer 3".
    attends : bool
        Whether `write` and `attend` are to serve it: then it stores the planes key and value, ``(heads, dim)`` per
        token and of a float dtype. Other planes are copied, swapped and counted with them. Without it the
        planes are only stored and counted.

    Raises
    ------
    UnsupportedOption
        An object that is not a spec, no planes, equal names, planes per sequence, planes that cannot be attended to.
    UnsupportedDtype
        A key or value of another dtype than `CACHE_DTYPES`.
    ShapeError
        A window or a number of query heads below 1, heads that do not fit each other.
    """
    if not is_spec(spec):
        raise UnsupportedOption(f"{who} is {shown(spec)}; expected a spec such as AttentionSpec(...)")
    who = f"{who}, a {type(spec).__name__},"
    planes = _checked_planes(spec, who)
    window_of(spec)
    heads: Any = getattr(spec, "num_query_heads", None)
    heads = None if heads is None else require_int(f"num_query_heads of a {type(spec).__name__}", heads)
    if attends:
        _check_attended(planes, heads, who)


def _checked_planes(spec: Spec, who: str) -> dict[str, Plane]:
    """The planes by name."""
    planes: dict[str, Plane] = {}
    for plane in as_tuple(f"planes of a {type(spec).__name__}", spec.planes, "a tuple of Plane"):
        if not isinstance(plane, Plane):
            raise UnsupportedOption(f"{who} has {shown(plane)} among its planes; expected a Plane")
        if plane.per == "sequence":
            raise UnsupportedOption(
                f"{who} stores plane {plane.name!r} per sequence, as recurrent states are, which is not served; "
                "store planes per token or per block"
            )
        if plane.name in planes:
            raise UnsupportedOption(f"{who} has two planes named {plane.name!r}; give each a name of its own")
        planes[plane.name] = plane
    if not planes:
        raise UnsupportedOption(f"{who} has no planes; a layer that stores nothing of its own is an Alias")
    return planes


def _check_attended(planes: dict[str, Plane], query_heads: int | None, who: str) -> None:
    for name in ("key", "value"):
        if name not in planes:
            raise UnsupportedOption(
                f"{who} stores {', '.join(planes)} and no plane {name!r}; write and attend serve key and value: use "
                "device='none' to count its blocks only, or KVPool to store them"
            )
        plane = planes[name]
        if plane.per != "token" or len(plane.shape) != 2:
            raise UnsupportedOption(
                f"{who} has a plane {name!r} of shape {plane.shape} per {plane.per}; expected (heads, dim) per token"
            )
        if plane.dtype not in CACHE_DTYPES:
            raise UnsupportedDtype(
                f"{who} has a plane {name!r} of {plane.dtype}; write and attend serve {', '.join(CACHE_DTYPES)}"
            )
    heads = planes["key"].shape[0]
    if heads != planes["value"].shape[0]:
        raise ShapeError(
            f"{who} has {heads} heads in plane 'key' and {planes['value'].shape[0]} in 'value'; expected equal numbers"
        )
    if query_heads is not None and query_heads % heads:
        raise ShapeError(f"{who} has num_query_heads {query_heads}, not a multiple of its {heads} key-value heads")
