"""Methods of a host tier for prefixes that are longer than the host: blocks pass through it, and no tree has them."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Listed

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.prefix.retention import Spans
from pagecore.cache.sequences._sequences import Sequence
from pagecore.cache.state._state import Held
from pagecore.storage import HostPool
from pagecore.storage.checks import INT32_MAX, require_int
from pagecore.tiers.host.methods.entries import EntryMethods, arrived
from pagecore.tiers.host.methods.leases import Indices, Lease, pieces_of
from pagecore.tiers.host.operations import _operations


class Staged:
    """Blocks of a prefix of the device in leased host blocks; `HostTier.stage` makes it.

    Attributes
    ----------
    positions : tuple of numpy.ndarray
        int64 indices of the blocks in the prefix, of each lane. Lanes of windows lack what the device lacks.
    """

    def __init__(self, inner: _operations.StreamedPart, pool: HostPool, num_lanes: int) -> None:
        self._inner, self._pool = inner, pool
        places = [each.astype(np.int64) for each in inner.places]
        self.positions: tuple[Indices, ...] = (*places, *[np.empty(0, np.int64)] * (num_lanes - len(places)))

    @property
    def is_running(self) -> bool:
        """True until the bytes are there: on CUDA until a `poll` after the end of the copy."""
        return self._inner.is_running

    @property
    def num_blocks(self) -> int:
        """Leased blocks of all lanes."""
        return sum(map(len, self.positions))

    def pieces(self, lane: int) -> NDArray[np.uint64]:
        """Return address and bytes of the blocks of a lane: uint64 ``[n, 2]``, in the order of `positions`."""
        blocks = self._inner.host_blocks
        return np.zeros((0, 2), np.uint64) if blocks is None else pieces_of(self._pool, lane, blocks[lane])

    def release(self) -> None:
        """Give the host blocks back, after the copy if it still runs; a second call does nothing."""
        self._inner.drop()


class StreamMethods(EntryMethods):
    """`HostTier.stage`, `deliver`, `unsaved`, `room` and `device_room`."""

    @property
    def can_stream(self) -> bool:
        """True if prefixes can pass through: in a cache without states, with a group of layers without a window."""
        return self.num_lanes == self.num_groups > len(self._index.tree.windows) and self._parts.cross is None

    @property
    def num_cut(self) -> int:
        """Backups so far for which the host had not enough room; see `unsaved`."""
        return self._index.num_cut

    @property
    def is_copying(self) -> bool:
        """True while copies between the device and the host run, which pin blocks of both."""
        return self._transfers.num_pending > 0

    def stage(
        self, tokens: ArrayLike, begin: int, end: int, *, namespace: Hashable = None, spans: Spans | None = None
    ) -> Staged | None:
        """Copy blocks of the device's prefix cache to leased host blocks, which no tree has.

        Parameters
        ----------
        tokens, namespace, spans
            As for `match`.
        begin, end : int
            Blocks [begin, end) of the prefix.

        Returns
        -------
        Staged or None
            None if too much of the host is pinned, or its memory is not registered yet. Without blocks if the device
            does not have the prefix up to and with block `begin`; shorter than wanted if it does not have all of it.

        Raises
        ------
        ShapeError
            `begin` or `end` is not an integer of at least 0.
        PagecoreError
            The copy failed: nothing is held.
        """
        first, stop = (
            min(require_int(name, each, 0, max=None), INT32_MAX) for name, each in (("begin", begin), ("end", end))
        )
        self._require_memory()
        if not self._transfers.is_ready():
            return None
        ids, options, _ = self._prefix_of(tokens, namespace, spans, None, None)
        try:
            inner = _operations.stage(self._parts.state, self._index, ids, options, first, stop, self._transfers.backup)
        except Exception:
            self._counts["failed"] += 1
            raise
        if inner is None:
            return None
        staged = Staged(inner, self.pool, self.num_lanes)
        self._counts["backed_up_bytes"] += self._bytes_of([len(each) for each in staged.positions])
        return staged

    def deliver(
        self,
        lease: Lease,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        ok: Listed[NDArray[np.bool_]],
    ) -> int:
        """Copy loaded entries to the device and publish them in its prefix cache; the lease ends.

        Cached blocks that no sequence uses are evicted for them. Entries past a gap, or for which the device has no
        room, are given back, and so is what the device has already.

        Parameters
        ----------
        lease : Lease
        tokens, namespace, spans
            As for `match`; the tokens cover the positions of the lease.
        ok : sequence of bool arrays
            For each lane, False for entries that did not arrive.

        Returns
        -------
        int
            Tokens of the prefix that all groups without a window of the device have now, in whole blocks.

        Raises
        ------
        ShapeError
            `ok` has another length than the lease; nothing was published.
        PagecoreError
            The copy failed, or the memory of the cache is released: nothing was published.
        """
        try:
            self._require_memory()
            ids, options, _ = self._prefix_of(tokens, namespace, spans, None, None)
            places = arrived(lease, ok)
            spill = self.spill if self.is_exclusive and self._transfers.is_ready() else None
            # Until later steps wait for a load that failed, no other thread may take its blocks, which are free.
            state = self._parts.state
            with Held(state.lock):
                try:
                    count, copied = _operations.deliver(
                        state, self._index, lease._inner, ids, options, places, self._transfers.promote, spill
                    )
                except BaseException:
                    self._counts["failed"] += 1
                    self._await_failed()
                    raise
            self._counts["promoted_bytes"] += self._bytes_of(copied) if copied else 0
            return count * self._index.block_size
        finally:
            lease.release()

    def unsaved(self, sequence: Sequence, max_tokens: int, known: int = 0) -> tuple[int, int]:
        """Return the tokens that the host has of a sequence after `backup`, and those that were to be copied.

        Both are 0 if the host had room for all of them, or if they are `known`.
        """
        most = min(require_int("max_tokens", max_tokens, 0, max=None), INT32_MAX)
        streamed = min(require_int("known", known, 0, max=None), INT32_MAX)
        return _operations.unsaved(self._parts.state, self._index, sequence, most, streamed)

    def room(self) -> list[int]:
        """Return the free and evictable entries of each lane."""
        with Held(self._parts.state.lock):
            return self._index.available()

    def device_room(self) -> list[int]:
        """Return the free and evictable blocks of each group of the device."""
        return _operations.device_room(self._parts.state, self._index)
