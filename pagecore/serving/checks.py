"""Checks of arguments other than numbers and flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

import numpy as np

from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.storage.checks import as_float, shown

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["as_array", "as_instance", "as_rate", "check_callbacks", "named"]

T = TypeVar("T")
# Times of the longest trace at these rates are finite.
RATE_MIN, RATE_MAX = 1e-6, 1e15


def as_array(name: str, given: ArrayLike, entries: str) -> NDArray[Any]:
    """Return `given` as an array; raise ShapeError, naming the expected `entries`, if NumPy cannot read it."""
    try:
        return np.asarray(given)
    except MemoryError:
        raise
    except Exception as error:  # ragged lists, tensors of a device or without data, foreign objects
        raise ShapeError(f"{name} is not {entries}: {error}") from error


def as_rate(name: str, value: SupportsFloat, unit: str) -> float:
    """Return a number per second as a float; raise ShapeError unless it is between 1e-6 and 1e15."""
    rate = as_float(name, value)
    if not RATE_MIN <= rate <= RATE_MAX:
        raise ShapeError(
            f"{name} is {rate}; expected a finite number of {unit} above 0: from {RATE_MIN:g} to {RATE_MAX:g}"
        )
    return rate


def as_instance(name: str, value: object, kind: type[T]) -> T:
    """Return `value`; raise UnsupportedOption unless it is an instance of `kind`."""
    if not isinstance(value, kind):
        raise UnsupportedOption(f"{name} is {shown(value)}; expected a {kind.__name__}")
    return value


def check_callbacks(progress: object, watchers: object) -> None:
    """Raise UnsupportedOption unless `progress` is a function and `watchers` a sequence of functions."""
    if not callable(progress):
        raise UnsupportedOption(f"progress is {shown(progress)}; expected a function")
    if not isinstance(watchers, Sequence) or not all(map(callable, watchers)):
        raise UnsupportedOption(f"watchers is {shown(watchers)}; expected a sequence of functions")


def named(name: str, call: Callable[[], T]) -> T:
    """Return the result of a call that parses a memory size; its errors name the option `name`."""
    try:
        return call()
    except (ShapeError, NotEnoughMemory) as error:
        reason = str(error)
        text = reason.replace("memory is", f"{name} is", 1) if "memory is" in reason else f"{name}: {reason}"
        raise type(error)(text) from None
