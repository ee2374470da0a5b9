"""Checks of arguments other than numbers and flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import shown

__all__ = ["as_instance", "check_callbacks"]

T = TypeVar("T")


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
