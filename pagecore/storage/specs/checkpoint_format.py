"""Formats of the checkpoints of states: which planes are quantised, and the planes that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Iterable

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage.checks import as_tuple, shown
from pagecore.storage.specs.spec import Plane

FORMATS = ("int8",)
# Dtypes of planes that int8 codes and scales can represent.
QUANTISED_DTYPES = ("float32", "bfloat16")
# Planes that are quantised unless others are named: the recurrent states.
RECURRENT = ("temporal",)


def checked_format(name: str, given: object) -> str | None:
    """Return the format of checkpoints, or None for that of the states; raise UnsupportedOption for any other."""
    if given is None or (isinstance(given, str) and given in FORMATS):
        return given
    raise UnsupportedOption(f"{name} is {shown(given)}; use {', '.join(map(repr, FORMATS))}, or None for exact states")


def check_quantised(plane: Plane) -> None:
    """Raise ShapeError or UnsupportedDtype for a plane that cannot be quantised."""
    if len(plane.shape) < 2:
        raise ShapeError(f"plane {plane.name!r} has shape {plane.shape}; it needs two axes, values and keys")
    if str(plane.dtype) not in QUANTISED_DTYPES:
        raise UnsupportedDtype(
            f"plane {plane.name!r} is {plane.dtype}; int8 checkpoints need float32 or bfloat16: use such a plane, or "
            "exact checkpoints"
        )


def checked_names(planes: Iterable[Plane], given: object) -> tuple[str, ...]:
    """Return the names of the planes that are quantised; raise an error for planes that cannot be."""
    stored = list(planes)
    names = as_tuple("planes", (given,) if isinstance(given, str) else given, "names of planes")  # type: ignore[arg-type]
    for name in names:
        meant = [plane for plane in stored if isinstance(name, str) and plane.name == name]
        if not meant:
            listed = ", ".join(sorted({plane.name for plane in stored}))
            raise UnsupportedOption(f"planes has {shown(name)}; the layers have {listed}")
        for plane in meant:
            check_quantised(plane)
    return tuple(names)


def scale_name(name: str) -> str:
    """Return the name of the plane with the scales of a quantised plane."""
    return f"{name}_scale"


def checkpoint_planes(planes: Iterable[Plane], quantised: Iterable[str]) -> tuple[Plane, ...]:
    """Return the planes of a checkpoint: int8 codes and scales for the quantised planes, and the others as they are."""
    names, stored = set(quantised), []
    for plane in planes:
        if plane.name not in names:
            stored.append(plane)
            continue
        stored.append(Plane(plane.name, plane.shape, "int8", per="sequence"))  # type: ignore[arg-type]
        scales = (*plane.shape[:-2], plane.shape[-1])
        stored.append(Plane(scale_name(plane.name), scales, plane.dtype, per="sequence"))
    return tuple(stored)
