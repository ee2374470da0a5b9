"""Validation of the caller's numbers: conversion to Python types, and limits."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np

from pagecore.errors import PagecoreError, ShapeError, UnsupportedOption, shown

__all__ = [
    "INT32_MAX",
    "LAYERS_MAX",
    "as_factor",
    "as_float",
    "as_tuple",
    "ceil_div",
    "flag",
    "member",
    "require_int",
    "shown",
]

# Ids, lengths and counts of blocks are int32.
INT32_MAX = 2**31 - 1
# More layers than any model has; a larger count is a mistake and would fill the memory with specs.
LAYERS_MAX = 1 << 16
# Between them, a number rounds to a float32 that is finite and above 0.
_FACTOR_ABOVE = 2.0**-150
_FACTOR_BELOW = 2.0**128 - 2.0**103


def require_int(name: str, value: SupportsIndex, min: int = 1, max: int | None = INT32_MAX, reason: str = "") -> int:
    """Return `value` as an int; raise ShapeError for non-integers, below `min` and above `max` (None: no limit).

    `reason` follows `min` in the message.
    """
    try:
        number = operator.index(_not_bool(value))
    except MemoryError:
        raise
    except Exception as error:  # __index__ of a foreign object may raise anything
        raise ShapeError(f"{name} is {shown(value)}; expected an integer of at least {min}") from error
    if number < min:
        raise ShapeError(f"{name} is {shown(number)}; it must be at least {min}{reason}")
    if max is not None and number > max:
        raise ShapeError(f"{name} is {shown(number)}; it must be at most {max}")
    return number


def require_pool(name: str, value: SupportsIndex, entry: str = "block", max: int | None = INT32_MAX) -> int:
    """Return the size of a pool as an int; raise ShapeError as `require_int`, and below 2, because entry 0 is null."""
    return require_int(name, value, 2, max, f" because {entry} 0 is the reserved null {entry}")


def _not_bool(value: SupportsIndex) -> SupportsIndex:
    """Return `value`; raise TypeError for a bool, which Python would count as 0 or 1."""
    if isinstance(value, bool):
        raise TypeError("a bool is not an integer")
    return value


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient rounded up."""
    return -(-dividend // divisor)


def member(name: str, value: SupportsIndex, count: int, owner: str, error: type[PagecoreError] = ShapeError) -> int:
    """Return `value` as an int from 0 to ``count - 1``; otherwise raise `error` with the range that `owner` has."""
    cause: Exception | None = None
    try:
        number = operator.index(_not_bool(value))
    except MemoryError:
        raise
    except Exception as raised:  # __index__ of a foreign object may raise anything
        number, cause = -1, raised
    if not 0 <= number < count:
        raise error(f"{name} is {shown(value)}; {owner} has {name}s 0 to {count - 1}") from cause
    return number


def flag(name: str, value: object) -> bool:
    """Return `value` as a bool; raise UnsupportedOption for anything but True and False."""
    if not isinstance(value, bool | np.bool_):
        raise UnsupportedOption(f"{name} is {shown(value)}; use True or False")
    return bool(value)


def as_tuple(name: str, values: Iterable[Any], entries: str) -> tuple[Any, ...]:
    """Return an iterable as a tuple; raise ShapeError, naming the expected `entries`, for anything else."""
    given: object = values
    try:
        if not isinstance(given, str | bytes):
            return tuple(values)
    except TypeError:
        pass
    raise ShapeError(f"{name} is {shown(values)}; expected {entries}")


def as_factor(name: str, value: SupportsFloat) -> float:
    """Return a factor of stored numbers as a float; raise ShapeError unless it is finite and above 0 as a float32."""
    factor = as_float(name, value)
    if not _FACTOR_ABOVE < factor < _FACTOR_BELOW:
        raise ShapeError(f"{name} is {factor}; expected a number that is finite and above 0 as a float32")
    return factor


def as_float(name: str, value: SupportsFloat) -> float:
    """Return `value` as a float; raise ShapeError for non-numbers, including bools and numeric strings."""
    given: object = value
    cause: Exception | None = None
    try:
        if not isinstance(given, str | bytes) and not _is_bool(given):
            return float(value)
    except MemoryError:
        raise
    except Exception as raised:  # __float__ of a foreign object may raise anything
        cause = raised
    raise ShapeError(f"{name} is {shown(value)}; expected a number") from cause


def _is_bool(value: object) -> bool:
    """Return True for bools of Python, and for scalars and arrays of bool."""
    if isinstance(value, float | int):
        return isinstance(value, bool)
    return str(getattr(value, "dtype", "")).removeprefix("torch.") == "bool"
