"""Search of a request: look-ups of the missing entries in every store, and the nearest source of each entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.manager.policy import Wanted
from pagecore.tiers.manager.port import Flags, Positions, Reader
from pagecore.tiers.manager.requests import Request
from pagecore.tiers.manager.surroundings import Surroundings
from pagecore.tiers.manager.tickets import StorePort
from pagecore.tiers.store import Keys

__all__ = ["Search", "Sources", "note_found"]

# Sources of an entry: an index of a store, or one of these.
ABSENT, IN_HOST = -2, -1
# For each lane, the source of the entry of each block: int64 [num_blocks].
Sources = Sequence[NDArray[np.int64]]


class Search:
    """The look-ups of one request.

    The stores hold the entries that they found. A store keeps the hold of an entry that is loaded from it until the
    load ends; `end` releases all other holds, and those of answers that come later.

    Parameters
    ----------
    around : Surroundings
    request : Request

    Attributes
    ----------
    asked : list of StorePort
        The stores of the request's media.
    num_blocks : int
        Whole blocks of the prefix.
    has_ended : bool
        True if further answers change nothing.
    chosen : list of ndarray
        Source of each entry that is loaded, of each lane.
    """

    def __init__(self, around: Surroundings, request: Request) -> None:
        self._around = around
        self._request = request
        media = request.media
        self.asked = [port for port in around.ports if media is None or port.medium in media]
        self.num_blocks = request.max_tokens // around.planner.block_size
        self._unanswered: set[int] = set()  # indices of stores
        self.has_ended = False
        lanes = around.planner.num_lanes
        self.chosen = self._absent(lanes)
        self._sources = self._absent(lanes)
        self._searched: list[Positions] = [np.empty(0, np.int64)] * lanes
        self._lookups: list[tuple[StorePort, int | None]] = []
        self._answers: list[list[Flags] | None] = [None] * len(around.ports)

    @property
    def num_unanswered(self) -> int:
        """Number of look-ups that the stores have not ended."""
        return len(self._unanswered)

    def begin(self, pin: Reader) -> None:
        """Look the entries that the host lacks up in the stores of the request's media, one batch each."""
        first = self._request.num_host_tokens // self._around.planner.block_size
        for lane, source in enumerate(self._sources):
            positions, _ = pin.entries(lane)
            source[positions[positions < self.num_blocks]] = IN_HOST
            absent = np.flatnonzero(source == ABSENT)
            self._searched[lane] = absent[absent >= first].astype(np.int64)
        searched = enumerate(self._searched)
        keys = np.concatenate([self._around.keys(self._request, lane, positions) for lane, positions in searched])
        if not len(keys):
            self.skip()
            return
        for port in self._around.ports:
            if port not in self.asked:
                self._answers[port.index] = [np.zeros(len(lane), np.bool_) for lane in self._searched]
        self._unanswered = {port.index for port in self.asked}
        for port in self.asked:
            self._lookups.append((port, port.lookup(keys, partial(self._answered, port))))

    def skip(self) -> None:
        """End the search without a look-up."""
        self.has_ended = True

    def cancel(self) -> None:
        """Ask the stores for an early end of the look-ups; an interrupt may have come before some."""
        self._unanswered &= {port.index for port, _ in self._lookups}
        for port, ticket in self._lookups:
            port.cancel(ticket)

    def assigned(self) -> tuple[Sources, bool]:
        """Return the nearest source of each entry, and True if further answers cannot change it."""
        sources = [lane.copy() for lane in self._sources]
        for answer, port in zip(self._answers, self._around.ports, strict=True):
            if answer is None:
                searched = zip(sources, self._searched, strict=True)
                return sources, not any(bool((lane[places] == ABSENT).any()) for lane, places in searched)
            for lane, places, found in zip(sources, self._searched, answer, strict=True):
                new = places[found]
                lane[new[lane[new] == ABSENT]] = port.index
        return sources, True

    def longest(self, sources: Sources, cap: int) -> Wanted:
        """Return the longest reusable prefix of up to `cap` tokens, if all entries that have a source are there."""
        there = [lane != ABSENT for lane in sources]
        return self._around.planner.longest(self._request.tokens, there, cap)

    def num_connected(self) -> int:
        """Return the blocks from the start for which host or stores have the entries of all groups without a window."""
        sources, _ = self.assigned()
        return self._around.planner.num_connected([lane != ABSENT for lane in sources], self.num_blocks)

    def choose(self, positions: Sequence[Positions], sources: Sources) -> None:
        """Note that entries are loaded from their sources."""
        for lane, mine in enumerate(positions):
            self.chosen[lane][mine] = sources[lane][mine]

    def reject(self, positions: Sequence[Positions]) -> None:
        """Note that entries are not loaded."""
        for lane, mine in enumerate(positions):
            self.chosen[lane][mine] = ABSENT

    def farthest(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the index of the farthest store of the entries of each block from `first` to `last`; below 0: none."""
        farthest: NDArray[np.int64] = np.max(
            np.stack([lane[first:last] for lane in self.chosen]), axis=0, initial=ABSENT
        )
        if not self._around.planner.has_full_lanes:
            farthest = _with_blocks_before(farthest)
        return farthest

    def end(self) -> None:
        """Release the holds of all entries that are not loaded."""
        self.has_ended = True
        for port, found in zip(self._around.ports, self._answers, strict=True):
            if found is not None:
                self._unlock(port, found)

    # -- inside --------------------------------------------------------------------------------------------------

    def _absent(self, lanes: int) -> list[NDArray[np.int64]]:
        return [np.full(self.num_blocks, ABSENT, np.int64) for _ in range(lanes)]

    def _answered(self, port: StorePort, ok: Flags, error: str | None) -> None:
        self._unanswered.discard(port.index)
        self._request.note(error)
        found = np.split(ok, np.cumsum([len(lane) for lane in self._searched])[:-1])
        self._answers[port.index] = found
        listed = list(zip(self._searched, found, strict=True))
        note_found(port, self._request, listed, error, partial(self._around.keys, self._request))
        if self.has_ended:
            self._unlock(port, found)

    def _unlock(self, port: StorePort, found: Sequence[Flags]) -> None:
        """Release the holds of the entries that a store found and that are not loaded from it."""
        keys = []
        for lane, flags in enumerate(found):
            positions = self._searched[lane][flags]
            unused = positions[self.chosen[lane][positions] != port.index]
            if len(unused):
                keys.append(self._around.keys(self._request, lane, unused))
        if keys:
            port.unlock(np.concatenate(keys))


def _with_blocks_before(sources: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the source of each block; blocks without an entry have that of the next block with one."""
    places = np.append(np.flatnonzero(sources != ABSENT), len(sources))
    following = places[np.searchsorted(places, np.arange(len(sources)))]
    found: NDArray[np.int64] = np.append(sources, ABSENT)[following]
    return found


def note_found(
    port: StorePort,
    request: Request,
    found: Sequence[tuple[Positions, Flags]],
    error: str | None,
    keys: Callable[[int, Positions], Keys],
) -> None:
    """Note in the ledger of a store which entries of each lane it has; without an error it lacks the others."""
    prefix = request.tokens, request.namespace, request.spans
    port.note(*prefix, found, keys, forgets=error is None)
