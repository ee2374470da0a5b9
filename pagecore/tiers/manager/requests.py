"""Request: the handle of a caller on a prefix that stores load."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.manager.port import Spans
from pagecore.tiers.store import Keys, Medium

__all__ = ["Request", "RequestState"]

RequestState = Literal["searching", "loading", "ready", "late"]


class Running(Protocol):
    """The work of a request."""

    def cancel(self) -> None:
        """End the wait, and ask the stores for an early end."""

    def release(self) -> None:
        """End the pin on the prefix in the host."""


class Request:
    """A prefix that was asked for; `Tiers.request` makes it, and `Tiers.poll` returns it once when it has ended.

    Attributes
    ----------
    tokens : ndarray of int32
    namespace : hashable
    spans : tuple or None
    media : frozenset or None
        Media of the stores that are asked; None for all.
    loads : bool
        False for a look-up, which loads nothing.
    state : {"searching", "loading", "ready", "late"}
        "late" means that the deadline passed first; what arrives afterwards is still published in the host.
    num_tokens : int
        Tokens of the prefix that device or host have, once the request has ended. With ranks, the shortest of all.
    num_found_tokens : int
        Tokens of the prefix that device, host and stores had together at the end of the search; a request loads them as
        far as the host has room, a look-up does not.
    num_host_tokens, num_device_tokens : int
        Tokens that host and device had when the search began.
    loaded_tokens : dict
        Tokens that were loaded, by medium. A block counts for the farthest medium that one of its entries came from, or
        without entries of its own (as in models of windows or states alone) as the next block that has one.
    is_retired : bool
        True if no store holds memory or entries for the request any more.
    error : str or None
        Reason of the last failure of a store; the request then ends with what there is.
    """

    def __init__(
        self,
        tokens: NDArray[np.int32],
        namespace: Hashable,
        spans: Spans | None,
        max_tokens: int,
        deadline_at: float | None,
        *,
        media: frozenset[Medium] | None = None,
        loads: bool = True,
    ) -> None:
        self.tokens = tokens
        self.namespace = namespace
        self.spans = spans
        self.max_tokens = max_tokens
        self.deadline_at = deadline_at
        self.media = media
        self.loads = loads
        self.state: RequestState = "searching"
        self.num_tokens = self.num_found_tokens = self.num_host_tokens = self.num_device_tokens = 0
        self.loaded_tokens: dict[str, int] = {}
        self.is_retired = False
        self.error: str | None = None
        self.chain: Keys | None = None
        self.load: Running | None = None

    def cancel(self) -> None:
        """End the wait at the next poll, and ask the stores for an early end of what is open."""
        if self.load is not None:
            self.load.cancel()

    def release(self) -> None:
        """End the pin on the prefix in the host; call it after the sequence was added."""
        if self.load is not None:
            self.load.release()

    def note(self, error: str | None) -> None:
        """Keep the reason of a failure of a store; None for none."""
        if error is not None:
            self.error = error

    @property
    def has_ended(self) -> bool:
        """True if the request is ready or late."""
        return self.state in ("ready", "late")

    def __repr__(self) -> str:
        return f"Request({len(self.tokens)} tokens, {self.state}, {self.num_tokens} there)"
