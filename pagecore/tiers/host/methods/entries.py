"""Methods of a host tier for stores: blocks for loads, their publication, and pins for readers."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Listed

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.prefix.retention import Spans
from pagecore.cache.state._state import Held
from pagecore.errors import ShapeError
from pagecore.storage.checks import require_int
from pagecore.tiers.host.methods.leases import Hold, Indices, Lease
from pagecore.tiers.host.methods.spilling import SpillMethods
from pagecore.tiers.host.operations import _operations


def arrived(lease: Lease, ok: Listed[NDArray[np.bool_]]) -> list[Indices]:
    """Return the positions of a lease, with -1 for entries that did not arrive; raise ShapeError for other lengths."""
    counts = [len(each) for each in lease.positions]
    if [len(each) for each in ok] != counts:
        raise ShapeError(f"ok has {[len(each) for each in ok]} entries; expected {counts}")
    return [np.where(each, one, -1) for each, one in zip(ok, lease.positions, strict=True)]


class EntryMethods(SpillMethods):
    """`HostTier.reserve`, `adopt` and `hold`."""

    def reserve(self, positions: Listed[ArrayLike]) -> Lease | None:
        """Take host blocks for entries that a store loads; return None if too much of the host is pinned.

        Parameters
        ----------
        positions : sequence of integers
            For each lane the indices of the blocks in the prefix; for the states, the block at whose end the state is.
            What is not pinned is evicted for them: `hold` the blocks of the prefix that the host has.

        Raises
        ------
        ShapeError
            Not one list for each lane.
        """
        self._require_open()
        for space in self._parts.swap_spaces:
            if space.shares(self):
                space.wait()  # a store writes at once, and a device may still read what a sequence gave back
        places = [np.array(each, np.int64).reshape(-1) for each in positions]
        if len(places) != self.num_lanes:
            raise ShapeError(f"positions have {len(places)} lists; give one for each of {self.num_lanes} lanes")
        counts = [len(each) for each in places]
        inner = _operations.reserve(self._parts.state, self._index, counts)
        if inner is None and self._index.tail is not None:
            _operations.drop_waiting(self._parts.state, self._index)
            inner = _operations.reserve(self._parts.state, self._index, counts)
        return None if inner is None else Lease(inner, places, self.pool, self._release)

    def adopt(
        self,
        lease: Lease,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        cross_digest: bytes | int | None = None,
        ok: Listed[NDArray[np.bool_]] | None = None,
    ) -> int:
        """Publish loaded entries in the host's tree; return the tokens that the host can promote of `tokens` now.

        Entries that the tree has already, or that lie past a gap, are given back. The lease ends.

        Parameters
        ----------
        lease : Lease
        tokens, namespace, spans, cross_digest
            As for `match`; the tokens cover the positions of the lease.
        ok : sequence of bool arrays, optional
            For each lane, False for entries that did not arrive; by default all did.

        Raises
        ------
        ShapeError
            A position outside of the tokens, or one listed twice; `ok` has another length than the lease.
        DoubleFree
            The lease was adopted or released before.
        UnsupportedOption
            The tier is closed, which has ended the lease.
        """
        self._require_open()
        ids, options, _ = self._prefix_of(tokens, namespace, spans, None, cross_digest)
        places = list(lease.positions)
        if ok is not None:
            places = arrived(lease, ok)
        with Held(self._parts.state.lock):
            _operations.adopt(self._parts.state, self._index, lease._inner, ids, options, places)
            return _operations.match_both(self._parts.state, self._index, ids, options, len(ids))[1]

    def hold(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
        cross_digest: bytes | int | None = None,
    ) -> Hold:
        """Pin what the host has of a prefix while its bytes are read; see `Hold`. Arguments are those of `match`."""
        self._require_open()
        ids, options, _ = self._prefix_of(tokens, namespace, spans, None, cross_digest)
        most = len(ids) if max_tokens is None else min(require_int("max_tokens", max_tokens, 0, max=None), len(ids))
        with Held(self._parts.state.lock):
            self._publish_for(ids, options)
            inner = _operations.hold(self._parts.state, self._index, ids, options, most)
        return Hold(inner, self.pool, self._release)
