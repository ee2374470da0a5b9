"""Calls of a scheduler, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from pagecore.cache.state._state import Held

if TYPE_CHECKING:
    from pagecore.cache.state._state import StateLock
    from pagecore.serving.scheduling.roster import Roster

__all__ = ["exclusive", "settle"]


class _Locked(Protocol):
    _lock: StateLock
    _roster: Roster


_Owner = TypeVar("_Owner", bound=_Locked)
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def settle(owner: _Locked) -> None:
    """Settle what an exception has interrupted; the caller holds the lock of a scheduler.

    A signal handler or a callback may call while its own thread is in the middle of a transition, which is not
    interrupted: it goes on when the inner call has returned.
    """
    if owner._lock.depth == 1:
        owner._roster.settle()


def exclusive(method: Callable[Concatenate[_Owner, _Given], _Result]) -> Callable[Concatenate[_Owner, _Given], _Result]:
    """Let a method hold the lock of its object, so that other threads wait until it has returned.

    Without the lock, a call would take the transition that another thread is in the middle of for an interrupted one,
    and undo it.
    """

    @wraps(method)
    def call(self: _Owner, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with Held(self._lock):
            settle(self)
            return method(self, *args, **kwargs)

    return call
