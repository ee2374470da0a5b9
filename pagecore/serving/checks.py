"""Checks of arguments other than numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from pagecore.errors import UnsupportedOption

__all__ = ["as_flag", "as_instance", "check_callbacks"]

T = TypeVar("T")


def as_flag(name: str, value: object) -> bool:
    """Return `value`; raise UnsupportedOption for anything but True and False."""
    if not isinstance(value, bool):
        raise UnsupportedOption(f"{name} is {value!r}; expected True or False")
    return value


def as_instance(name: str, value: object, kind: type[T]) -> T:
    """Return `value`; raise UnsupportedOption unless it is an instance of `kind`."""
    if not isinstance(value, kind):
        raise UnsupportedOption(f"{name} is {value!r}; expected a {kind.__name__}")
    return value


def check_callbacks(progress: object, watchers: object) -> None:
    """Raise UnsupportedOption unless `progress` is a function and `watchers` a sequence of functions."""
    if not callable(progress):
        raise UnsupportedOption(f"progress is {progress!r}; expected a function")
    if not isinstance(watchers, Sequence) or not all(map(callable, watchers)):
        raise UnsupportedOption(f"watchers is {watchers!r}; expected a sequence of functions")
