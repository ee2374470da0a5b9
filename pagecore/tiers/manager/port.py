"""The parts of a cache and its host tier that loads from stores and writes to stores need."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.index import RadixTree
from pagecore.tiers.store import Pieces

__all__ = [
    "DeviceSide",
    "Flags",
    "HostSide",
    "Lease",
    "Positions",
    "Prefix",
    "Reader",
    "Releasable",
    "Spans",
    "StagedBlocks",
    "StreamHost",
]

# Indices of blocks in a prompt; for states the block at whose end the state is.
Positions = NDArray[np.int64]
Flags = NDArray[np.bool_]
Spans = Iterable[tuple[int, int, bytes | int]]


class Lease(Protocol):
    """Entries of every lane that the host tier gave for a load: blocks that are in no tree and cannot be evicted."""

    def pieces(self, lane: int) -> Pieces:
        """Return address and bytes of the entries of a lane, in the order in which they were asked for."""

    def release(self) -> None:
        """Give the entries back, unpublished."""


class Releasable(Protocol):
    """Something whose bytes in the host stay until it is released."""

    def release(self) -> None:
        """End the pin or lease."""


class Reader(Releasable, Protocol):
    """A pin on the entries that the host tier has of a prefix, whose bytes stay until it is released."""

    def entries(self, lane: int) -> tuple[Positions, Pieces]:
        """Return the positions of the entries that the prefix has in a lane, and their address and bytes."""


class StagedBlocks(Releasable, Protocol):
    """Blocks of the device that are copied to leased host blocks, which no tree has."""

    @property
    def positions(self) -> Sequence[Positions]:
        """Positions of the blocks of each lane."""

    @property
    def is_running(self) -> bool:
        """True until the bytes are there."""

    def pieces(self, lane: int) -> Pieces:
        """Return address and bytes of the blocks of a lane, in the order of `positions`."""


class Prefix(Protocol):
    """A prefix that a backup has just published in the host's tree: the tokens from `start` to `stop`, whole blocks."""

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids from the start of the sequence."""

    @property
    def namespace(self) -> Hashable:
        """Namespace of the sequence."""

    @property
    def spans(self) -> Spans | None:
        """Spans of the sequence."""

    @property
    def start(self) -> int:
        """Number of tokens that the host had before."""

    @property
    def stop(self) -> int:
        """Number of tokens that the host has now."""


class DeviceSide(Protocol):
    """The part of a cache that a request asks."""

    def match_length(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
    ) -> int:
        """Return the number of tokens whose prefix is cached."""

    def bring(self, tokens: NDArray[np.int32], *, namespace: Hashable, spans: Spans | None, max_tokens: int) -> None:
        """Promote what the host has of a prefix, up to what fits."""

    def note_streamed(self, tokens: NDArray[np.int32], prefix: Any, start: int, media: NDArray[np.int64]) -> None:
        """Note the media from which the blocks of a prefix came to the device, from token `start` on."""


class HostSide(Protocol):
    """Host memory of a cache with a prefix tree of its own; see `pagecore.tiers.host.HostTier`."""

    @property
    def tree(self) -> RadixTree:
        """The tree of the host."""

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Bytes of an entry of each lane: the groups in order, then the states if there are any."""

    def match(
        self,
        tokens: NDArray[np.int32],
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
    ) -> int:
        """Return the length of the longest reusable prefix, which never includes the last token."""

    def hold(
        self,
        tokens: NDArray[np.int32],
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
    ) -> Reader:
        """Pin the entries of a prefix, of blocks past the reusable ones, too; without the last token."""

    def reserve(self, positions: Sequence[Positions]) -> Lease | None:
        """Take entries for each lane, evicting what is not pinned; None if too few are evictable."""

    def adopt(
        self,
        lease: Any,  # one that `reserve` returned
        tokens: NDArray[np.int32],
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        ok: Sequence[Flags] | None = None,
    ) -> int:
        """Publish the entries of a lease that arrived, and give the others back; return the reusable tokens."""

    def check_invariants(self) -> None:
        """Recount trees, pools, leases and pins."""


class StreamHost(HostSide, Protocol):
    """The part of a host tier through which prefixes pass that are longer than it."""

    @property
    def can_stream(self) -> bool:
        """False if prefixes cannot pass through."""

    @property
    def is_copying(self) -> bool:
        """True while copies between device and host run."""

    def stage(
        self,
        tokens: NDArray[np.int32],
        begin: int,
        end: int,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
    ) -> StagedBlocks | None:
        """Copy blocks [begin, end) of a prefix from the device to leased blocks; None if too much is pinned."""

    def deliver(
        self,
        lease: Any,  # one that `reserve` returned
        tokens: NDArray[np.int32],
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        ok: Sequence[Flags],
    ) -> int:
        """Publish loaded entries on the device, and end the lease; return the tokens of the device's path."""

    def room(self) -> list[int]:
        """Return the free and evictable entries of each lane."""

    def device_room(self) -> list[int]:
        """Return the free and evictable blocks of each group of the device."""
