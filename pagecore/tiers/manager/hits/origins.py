"""Media of prefixes: where blocks of the device came from, until a prompt uses them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pagecore.index import BlockPool, RadixTree
from pagecore.tiers.manager.port import Spans

__all__ = ["DEVICE", "HOST", "Origins", "PrefixIndex", "PrefixMedia"]

# Indices of the first two media.
DEVICE, HOST = 0, 1


class PrefixIdentity(Protocol):
    """Properties in which prefixes of equal tokens differ."""

    @property
    def namespace(self) -> Hashable:
        """Adapter or tenant."""

    @property
    def spans(self) -> Spans | None:
        """Media in the prompt."""


class PrefixIndex:
    """A prefix tree of made-up ids, so that prefixes are compared token by token; the oldest blocks are forgotten.

    Parameters
    ----------
    block_size : int
    num_blocks : int
        Blocks that it remembers.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self._tree = RadixTree(block_size)
        self._pool = BlockPool(max(2, num_blocks))

    def match(self, ids: NDArray[np.int32], options: PrefixIdentity) -> int:
        """Return the tokens at the beginning of `ids` that are known."""
        return self._tree.match(ids, namespace=options.namespace, spans=options.spans).num_tokens

    def blocks(self, ids: NDArray[np.int32], options: PrefixIdentity) -> NDArray[np.int32]:
        """Return the ids of the blocks at the beginning of `ids` that are known."""
        return np.asarray(self._tree.match(ids, namespace=options.namespace, spans=options.spans).blocks)

    def add(self, ids: NDArray[np.int32], options: PrefixIdentity) -> tuple[NDArray[np.int32], int]:
        """Remember the first whole blocks of `ids`, up to `num_blocks`; return their ids, and how many were known."""
        most = (self._pool.num_blocks - 1) * self._tree.block_size
        count = min(len(ids), most) // self._tree.block_size
        with self._tree.match_and_lock(ids, namespace=options.namespace, spans=options.spans) as receipt:
            held = np.asarray(receipt.match.blocks)
            missing = count - len(held)
            if missing <= 0:
                return held, len(held)
            if missing > self._pool.num_free:
                self._pool.free(self._tree.evict("full", missing - self._pool.num_free).blocks)
            fresh = self._pool.try_allocate(min(missing, self._pool.num_free))
            assert fresh is not None
            blocks = np.concatenate([held, fresh])
            prefix = ids[: len(blocks) * self._tree.block_size]
            self._tree.insert(prefix, blocks, namespace=options.namespace, spans=options.spans)
            return blocks, len(held)


class Origins:
    """The medium from which each block of some prefixes came; blocks that it does not know are of the device.

    Parameters
    ----------
    block_size : int
    num_blocks : int
        Blocks that it remembers.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._prefixes = PrefixIndex(block_size, num_blocks)
        self._media = np.full(max(2, num_blocks), DEVICE, np.int64)
        self._is_empty = True

    def note(self, ids: NDArray[np.int32], options: PrefixIdentity, start: int, media: NDArray[np.int64]) -> None:
        """Set the media of the blocks of a prefix from token `start` on, a multiple of the block size."""
        first = start // self._prefixes.block_size
        blocks, known = self._prefixes.add(ids, options)
        self._media[blocks[known:]] = DEVICE
        blocks = blocks[first : first + len(media)]
        self._media[blocks] = media[: len(blocks)]
        self._is_empty = False

    def media_of(self, ids: NDArray[np.int32], options: PrefixIdentity) -> NDArray[np.int64]:
        """Return the medium of each whole block of a prefix: `DEVICE`, `HOST`, or a larger index for one of a store."""
        media = np.full(len(ids) // self._prefixes.block_size, DEVICE, np.int64)
        if not self._is_empty:
            blocks = self._prefixes.blocks(ids, options)
            media[: len(blocks)] = self._media[blocks]
        return media

    def forget(self, ids: NDArray[np.int32], options: PrefixIdentity, start: int = 0) -> None:
        """Count the known blocks of a prefix, from token `start` on, as blocks of the device from now on."""
        if not self._is_empty:
            self._media[self._prefixes.blocks(ids, options)[start // self._prefixes.block_size :]] = DEVICE


class PrefixMedia(NamedTuple):
    """The medium of each whole block of a prefix that a sequence reuses, and the names of the media."""

    media: NDArray[np.int64]
    names: tuple[str, ...]

    def counts(self, num_tokens: int, block_size: int) -> NDArray[np.int64]:
        """Return how many of the first tokens are of each medium; those after the whole blocks are of the device."""
        whole = min(num_tokens // block_size, len(self.media))
        counts = np.bincount(self.media[:whole], minlength=len(self.names)) * block_size
        counts[self.media[whole] if whole < len(self.media) else DEVICE] += num_tokens - whole * block_size
        return counts
