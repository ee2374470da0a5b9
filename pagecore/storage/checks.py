"""Numbers that a caller gives, and how large they may be."""

from __future__ import annotations

import operator
from typing import SupportsFloat, SupportsIndex

from pagecore.errors import ShapeError

# Ids, lengths and counts of blocks are int32.
INT32_MAX = 2**31 - 1
# More than any model has; a count beyond it is a mistake, and would fill the memory with specs.
LAYERS_MAX = 1 << 16


def at_least(name: str, value: SupportsIndex, least: int = 1) -> int:
    """`value` as an int, refused below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ShapeError(f"{name} is {value!r}; give an integer of at least {least}") from None
    if number < least:
        raise ShapeError(f"{name} is {number}; it must be at least {least}")
    return number


def within(name: str, value: SupportsIndex, least: int = 1, most: int = INT32_MAX) -> int:
    """`value` as an int, refused below `least` and above `most`."""
    number = at_least(name, value, least)
    if number > most:
        raise ShapeError(f"{name} is {number}; it must be at most {most}")
    return number


def as_float(name: str, value: SupportsFloat) -> float:
    """`value` as a float, refused where it is no number, be it text that spells one."""
    given: object = value
    try:
        if not isinstance(given, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ShapeError(f"{name} is {value!r}; give a number")
