"""Entries that stores are asked to delete: those of a prefix, or all that they have."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.keys import lane_keys
from pagecore.tiers.manager.port import Flags, Positions, Spans
from pagecore.tiers.manager.tickets import StorePort
from pagecore.tiers.store import Keys

__all__ = ["Clearing", "Removal"]


class Clearing:
    """The removal of all entries of stores.

    Attributes
    ----------
    open : set of StorePort
        Stores that have not answered.
    failures : list of str
        Each store that has kept entries, how many, and the reason.
    """

    def __init__(self) -> None:
        self.open: set[StorePort] = set()
        self.failures: list[str] = []

    def end(self, port: StorePort, ok: Flags, error: str | None) -> None:
        """Take the answer of a store."""
        self.open.discard(port)
        kept = len(ok) - int(np.count_nonzero(ok))
        if kept:
            self.failures.append(
                f"{port.store.name} has kept {kept} of {len(ok)} entries ({error or 'without a reason'})"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Removal:
    """The entries of every lane at the `places` of a prefix.

    Attributes
    ----------
    tokens, namespace, spans
        The prefix.
    chain : ndarray
        Hash of each whole block, from `content_chain`.
    places : ndarray
        Positions of blocks, ascending.
    num_lanes : int
        Groups of tokens, and states.
    """

    tokens: NDArray[np.int32]
    namespace: Hashable
    spans: Spans | None
    chain: Keys
    places: Positions
    num_lanes: int

    def keys(self, lane: int, positions: Positions) -> Keys:
        """Return the content keys of entries of a lane."""
        return lane_keys(self.chain[positions], lane)

    def all_keys(self) -> Keys:
        """Return the content keys of all entries, lane after lane."""
        return np.concatenate([self.keys(lane, self.places) for lane in range(self.num_lanes)])

    def marked(self, ok: Flags) -> list[tuple[Positions, Flags]]:
        """Return the positions of each lane that were deleted, with False: the store has them no more."""
        lanes = [self.places[mine] for mine in np.split(ok, self.num_lanes)]
        return [(positions, np.zeros(len(positions), np.bool_)) for positions in lanes]
