"""Host blocks that a store reads or writes: new ones for a load, and those of a cached prefix for a store."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pagecore.storage import HostPool
from pagecore.tiers.host.operations._operations import EntryHold, EntryLease

Indices = NDArray[np.int64]


def pieces_of(pool: HostPool, lane: int, ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Return address and bytes of entries: uint64 ``[n, 2]``; addresses are 0 in a pool without bytes."""
    if pool.memory is not None:
        return pool.pieces(lane, ids)
    found = np.zeros((len(ids), 2), np.uint64)
    found[:, 1] = pool.payload_bytes[lane]
    return found


class Lease:
    """New host blocks for entries of a prefix; `HostTier.reserve` makes it.

    As a context manager it releases what was not adopted.

    Attributes
    ----------
    positions : tuple of numpy.ndarray
        int64 indices of the blocks in the prefix, of each lane; for a state, of the block at whose end it is.
    """

    def __init__(
        self, inner: EntryLease, positions: Listed[Indices], pool: HostPool, release: Callable[[EntryLease], None]
    ) -> None:
        self._inner, self._pool, self._release = inner, pool, release
        self.positions = tuple(positions)

    @property
    def is_held(self) -> bool:
        """False after the lease was adopted or released."""
        return self._inner.is_held

    @property
    def blocks(self) -> tuple[NDArray[np.int32], ...]:
        """Ids of the host blocks of each lane, in the order of `positions`."""
        return self._inner.blocks

    def pieces(self, lane: int) -> NDArray[np.uint64]:
        """Return address and bytes of the blocks of a lane: uint64 ``[n, 2]``, in the order of `positions`."""
        return pieces_of(self._pool, lane, self._inner.blocks[lane])

    def release(self) -> None:
        """Give the blocks back; a second call does nothing."""
        self._release(self._inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Hold:
    """A prefix of the host, pinned until `release`; `HostTier.hold` makes it.

    Attributes
    ----------
    num_tokens : int
        Tokens of the prefix, in whole blocks.
    state_tokens : int
        Tokens before the deepest state of the prefix; 0 for none.
    """

    def __init__(self, inner: EntryHold, pool: HostPool, release: Callable[[EntryLease], None]) -> None:
        self._inner, self._pool, self._release = inner, pool, release
        self.num_tokens, self.state_tokens = inner.num_tokens, inner.state_tokens
        self._block_size = inner.index.block_size

    def entries(self, lane: int) -> tuple[Indices, NDArray[np.uint64]]:
        """Return what the host has of a lane: indices int64 ``[n]`` in the prefix, and pieces uint64 ``[n, 2]``.

        The lane of a window is without its holes. That of states has the deepest state, with the index of the block at
        whose end it is.
        """
        blocks = self._inner.blocks[lane]
        if lane == self._inner.index.num_groups:
            positions = np.full(len(blocks), self.state_tokens // self._block_size - 1, np.int64)
        else:
            positions = np.flatnonzero(blocks)
            blocks = blocks[positions]
        return positions, pieces_of(self._pool, lane, blocks)

    def release(self) -> None:
        """Unpin the prefix; a second call does nothing."""
        self._release(self._inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
