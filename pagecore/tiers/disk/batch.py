"""Batches of a disk store between submission and end, and the checks of their arguments."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pagecore.errors import ShapeError
from pagecore.tiers.disk._io import UNIT
from pagecore.tiers.keys.fingerprint import Fingerprint
from pagecore.tiers.store import KEY_BYTES, Done, Keys, Pieces

# In place of the position of a transfer whose entry is not pinned yet.
NOT_TAKEN = -1


@dataclass(slots=True)
class Batch:
    """A submitted batch.

    Attributes
    ----------
    ticket : int
    keys : list of bytes
    kind : {"lookup", "load", "store", "remove"}
    ok : list of bool
        Results so far.
    places : list of int
        Position in `keys` of each transfer of the queue. While a submission takes what a transfer needs: of a store its
        position, which may not have a slot; of another batch `NOT_TAKEN`.
    present : list of bytes
        Keys of a store that were there already. They are pinned until the batch ends, so that it does not evict them;
        an empty key is not pinned yet.
    num_unpinned : int
        Keys of `present`, from the last one on, whose pins have ended.
    has_ended : bool
        The caller gets the result, or the batch was given back.
    num_settled : int
        Transfers, in the order of `places`, whose ends were taken into account, or which were given back; keys of a
        lookup that were given back.
    num_shared : int
        Keys that other batches are writing.
    error : str or None
        First reason of a failure.
    full : str or None
        First reason why there was no slot for a key, or why one that another batch is writing was not removed.
    """

    ticket: int
    keys: list[bytes]
    kind: Literal["lookup", "load", "store", "remove"]
    ok: list[bool]
    places: list[int] = field(default_factory=list)
    present: list[bytes] = field(default_factory=list)
    num_unpinned: int = 0
    has_ended: bool = False
    num_settled: int = 0
    num_shared: int = 0
    error: str | None = None
    full: str | None = None

    def note(self, place: int, error: int) -> None:
        """Record the result of one key, 0 or an errno of the queue."""
        self.ok[place] = error == 0
        if error:
            self.fail(_reason_of(error))

    def fail(self, reason: str) -> None:
        """Keep the first reason of a failure."""
        self.error = self.error or reason

    def done(self) -> Done:
        """Return the end of the batch."""
        is_full = self.error is None and self.full is not None
        return Done(self.ticket, np.array(self.ok, bool), self.error or self.full, is_full)


def _reason_of(error: int) -> str:
    """Return the text of an errno of the queue."""
    if error == errno.ECANCELED:
        return "cancelled"
    return "the sum of a payload differs" if error == errno.EBADMSG else os.strerror(error)


def split_keys(keys: Keys, fingerprint: Fingerprint) -> list[bytes]:
    """Return the keys as bytes; raise ShapeError for another shape, dtype or lane."""
    given = np.asarray(keys)
    if given.ndim != 2 or given.shape[1] != KEY_BYTES or given.dtype != np.uint8:
        raise ShapeError(f"expected keys as uint8 [n, {KEY_BYTES}], got {given.dtype} {list(given.shape)}")
    if len(given) and int(given[:, -1].max()) >= fingerprint.num_lanes:
        raise ShapeError(
            f"a key is of lane {given[:, -1].max()}; the fingerprint has lanes 0 to {fingerprint.num_lanes - 1}"
        )
    data = given.tobytes()
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


def split_before(keys: list[bytes], before: Keys | None, fingerprint: Fingerprint) -> list[bytes | None]:
    """Return the entry before each key in its prefix; None for all keys without `before`, and for states.

    `before` has the entry before the first key of a lane; the entry before any other key is the last one of its lane.
    """
    if before is None:
        return [None] * len(keys)
    last = {key[-1]: key for key in split_keys(before, fingerprint)}
    num_tokens = fingerprint.num_lanes - fingerprint.has_states
    links = []
    for key in keys:
        links.append(last.get(key[-1]) if key[-1] < num_tokens else None)
        last[key[-1]] = key
    return links


def split_pieces(pieces: Pieces, keys: list[bytes], fingerprint: Fingerprint) -> list[tuple[int, int]]:
    """Return address and bytes of each piece; raise ShapeError unless they fit the keys' lanes and are aligned."""
    given = np.asarray(pieces)
    if given.shape != (len(keys), 2) or given.dtype != np.uint64:
        raise ShapeError(f"expected pieces as uint64 [{len(keys)}, 2], got {given.dtype} {list(given.shape)}")
    listed: list[tuple[int, int]] = [(address, nbytes) for address, nbytes in given.tolist()]
    for key, (address, nbytes) in zip(keys, listed, strict=True):
        if nbytes != fingerprint.payload_bytes[key[-1]]:
            raise ShapeError(
                f"a piece of lane {key[-1]} has {nbytes} bytes, expected {fingerprint.payload_bytes[key[-1]]}; host "
                "and store must have the same layout"
            )
        if address == 0 or address % UNIT:
            raise ShapeError(
                f"a piece has the address {address}; give memory at a multiple of {UNIT}, as of a HostPool"
            )
    return listed
