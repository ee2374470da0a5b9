"""Calls of a scheduler, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pagecore.cache.state._state import Held, StateLock

__all__ = ["exclusive"]


class _Locked(Protocol):
    @property
    def _lock(self) -> StateLock: ...


_Owner = TypeVar("_Owner", bound=_Locked)
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def exclusive(method: Callable[Concatenate[_Owner, _Given], _Result]) -> Callable[Concatenate[_Owner, _Given], _Result]:
    """Let a method hold the lock of its object, so that other threads wait until it has returned.

    A call settles what an exception has interrupted. Without the lock it would take the transition that another thread
    is in the middle of for an interrupted one, and undo it.
    """

    @wraps(method)
    def call(self: _Owner, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with Held(self._lock):
            return method(self, *args, **kwargs)

    return call
