"""Batches of a guard, and the parts in which a guard hands them to its store."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers import payload
from pagecore.tiers.guard.breaker import Admission
from pagecore.tiers.guard.staging import Region
from pagecore.tiers.store import Keys, Pieces


class Kind(Enum):
    """Operation of a batch."""

    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"
    REMOVE = "remove"


@dataclass(eq=False, slots=True)
class Batch:
    """One submission to a guard until its `Done`.

    It ends when it has no parts left. `is_settled`: the breaker knows the outcome.
    """

    ticket: int
    kind: Kind
    deadline: float
    admission: Admission
    ok: NDArray[np.bool_]
    sizes: NDArray[np.uint64]
    parts: set[Part] = field(default_factory=set)
    error: str | None = None
    is_failure: bool = False
    is_full: bool = False
    is_given_up: bool = False
    is_settled: bool = False

    @property
    def can_be_late(self) -> bool:
        """True until the batch is given up; then, too, if an interrupt has left it without parts."""
        return not (self.is_given_up and self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the payloads that were admitted."""
        return int(self.sizes.sum())

    def fail(self, error: str, *, is_full: bool = False) -> None:
        """Note a failure of the store, or that it is full; the first reason stays."""
        self.error = self.error or error
        self.is_full = self.is_full or is_full
        self.is_failure = self.is_failure or not is_full


@dataclass(eq=False, slots=True)
class Part:
    """Keys of a batch that are handed to the store together.

    Attributes
    ----------
    batch : Batch or None
        None once the batch was abandoned: the part lives on until the store ends it.
    indices : ndarray of int64
        Positions of the keys in the batch.
    pieces : ndarray or None
        Pieces of the caller; None for a lookup or removal.
    regions : list of Region or None
        Staging memory of each piece; None for a direct store, or while the part waits for memory.
    ticket : int or None
        Ticket of the store, once the part was submitted.
    intact : ndarray of bool or None
        Result of the copy of a load, one for each key.
    before : ndarray or None
        Entries that a store of a part of a prefix follows; see `PrefixKeeper`.
    """

    batch: Batch | None
    kind: Kind
    keys: Keys
    indices: NDArray[np.int64]
    pieces: Pieces | None = None
    regions: list[Region] | None = None
    ticket: int | None = None
    intact: NDArray[np.bool_] | None = None
    before: Keys | None = None

    def staged(self, trailer: int) -> Pieces:
        """Return the pieces in staging memory, with `trailer` bytes after each payload."""
        assert self.regions is not None
        addresses = [region.address for region in self.regions]
        return np.array([addresses, part_sizes(self.pieces, trailer)], np.uint64).T.copy()

    def narrow(self, kept: NDArray[np.bool_]) -> None:
        """Keep the keys that `kept` marks."""
        self.keys = self.keys[kept]
        self.indices = self.indices[kept]
        self.pieces = None if self.pieces is None else self.pieces[kept]
        self.regions = [each for each, keep in zip(self.regions or (), kept.tolist(), strict=True) if keep]


def part_sizes(pieces: Pieces | None, trailer: int) -> list[int]:
    """Return the bytes of each payload in staging memory, with `trailer` bytes after it."""
    assert pieces is not None
    return [nbytes + trailer for nbytes in pieces[:, 1].tolist()]


def run(part: Part, *, framed: bool) -> None:
    """Copy the payloads of a part between its pieces and staging memory; for a load, set `part.intact`."""
    assert part.pieces is not None
    staged = part.staged(0)
    targets, sources = (part.pieces, staged) if part.kind is Kind.LOAD else (staged, part.pieces)
    part.intact = np.ones(len(part.keys), bool)
    if framed and part.kind is Kind.LOAD:
        part.intact = _stored_frames(staged) == payload.frames_of(part.keys, staged)
    for index in np.flatnonzero(part.intact).tolist():
        payload.copy(int(targets[index, 0]), int(sources[index, 0]), int(sources[index, 1]))
    if framed and part.kind is Kind.STORE:
        _write_frames(staged, payload.frames_of(part.keys, staged))


def _frame_views(staged: Pieces) -> list[memoryview]:
    return [payload.view(address + nbytes, payload.FRAME_BYTES) for address, nbytes in staged.tolist()]


def _stored_frames(staged: Pieces) -> NDArray[np.void]:
    return np.frombuffer(b"".join(_frame_views(staged)), payload.FRAME)


def _write_frames(staged: Pieces, frames: NDArray[np.void]) -> None:
    for target, frame in zip(_frame_views(staged), frames, strict=True):
        target[:] = frame.tobytes()
