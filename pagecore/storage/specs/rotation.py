"""Rotations of keys and values: orthogonal transforms of the heads that a layer stores."""

from __future__ import annotations

from typing import Any

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.storage.checks import shown
from pagecore.storage.specs.spec import Side

HADAMARD = "hadamard"
# The least block of the transform; see `pagecore.ops.hadamard`.
LEAST_BLOCK = 8
# Summaries of keys by channel, of which a rotated key has none.
BY_CHANNEL = ("key_bounds", "label_channels")


def rotation_of(spec: object, side: Side) -> str | None:
    """Return the rotation of keys or values: the attribute `key_rotation` or `value_rotation`; None without one."""
    rotation: str | None = getattr(spec, f"{side}_rotation", None)
    return rotation


def is_rotated(spec: object) -> bool:
    """Return True if a layer stores rotated keys or values."""
    return rotation_of(spec, "key") is not None or rotation_of(spec, "value") is not None


def check_rotation(side: Side, rotation: object, dim_name: str, dim: int) -> None:
    """Raise an error unless a rotation of keys or values is known and serves their dim.

    Raises
    ------
    UnsupportedOption
        An unknown rotation.
    ShapeError
        A dim that is not a multiple of `LEAST_BLOCK`.
    """
    name = f"{side}_rotation"
    if rotation is None:
        return
    if not isinstance(rotation, str) or rotation != HADAMARD:
        raise UnsupportedOption(f"{name} is {shown(rotation)}; use {HADAMARD!r}, or None for no rotation")
    if dim % LEAST_BLOCK:
        raise ShapeError(
            f"{dim_name} is {dim}, but {name} {rotation!r} needs a multiple of {LEAST_BLOCK}; leave {name} out, or pad "
            "the heads with zeros"
        )


def refuse_summaries(spec: Any) -> None:
    """Raise UnsupportedOption for rotated keys next to summaries of the channels of keys."""
    if rotation_of(spec, "key") is None:
        return
    for summary in BY_CHANNEL:
        given = getattr(spec, summary, None)
        if given is not None and given is not False:
            raise UnsupportedOption(
                f"{summary} and key_rotation are given, but a rotation mixes the channels that {summary} summarises; "
                "leave one of them out"
            )
