"""The parts of a host tier that its methods share."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Listed
from contextlib import suppress

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.lifecycle.cross_request import cross_namespace
from pagecore.cache.parts import CacheParts
from pagecore.cache.prefix.retention import RetentionOptions, Spans, retention_options, reusable
from pagecore.cache.sequences._sequences import token_ids
from pagecore.errors import PagecoreError, ShapeError, UnsupportedOption
from pagecore.index import BlockPool
from pagecore.storage import HostPool
from pagecore.storage.checks import INT32_MAX, as_tuple, require_int
from pagecore.tiers.host.copies.streams import Transfers
from pagecore.tiers.host.operations import _operations
from pagecore.tiers.host.operations._operations import HostIndex

Options = tuple[NDArray[np.int32], RetentionOptions, int]


class TierParts:
    """Base class of the host tier: its parts, and the conversion of arguments."""

    pool: HostPool
    block_pools: tuple[BlockPool, ...]
    _parts: CacheParts
    _index: HostIndex
    _transfers: Transfers
    _is_closed: bool

    @property
    def num_lanes(self) -> int:
        """Lanes of entries: the groups of tokens, and one for states."""
        return len(self.block_pools)

    @property
    def num_groups(self) -> int:
        """Groups of tokens that prefixes have; 0 for a cache whose layers all keep states."""
        return len(self._parts.cached_groups)

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._is_closed

    def _bytes_of(self, counts: Listed[int]) -> int:
        """Return the bytes of a number of entries of each lane."""
        return sum(count * size for count, size in zip(counts, self.pool.payload_bytes, strict=True))

    def _require_open(self) -> None:
        if self._is_closed:
            raise UnsupportedOption("the host tier is closed; make another one")

    def _counts_of_lanes(self, name: str, counts: Listed[int]) -> list[int]:
        """Return a number for each lane, at most INT32_MAX; raise ShapeError for anything else."""
        listed = as_tuple(name, counts, "a number for each lane")
        if len(listed) != self.num_lanes:
            raise ShapeError(
                f"{name} has {len(listed)} entries; give {self.num_lanes}: one for each group of tokens, and one for "
                "the states of a cache that has them"
            )
        return [min(require_int(f"{name} of a lane", each, 0, max=None), INT32_MAX) for each in listed]

    def _require_memory(self) -> None:
        """Raise an error if the tier is closed, or the memory of the cache is released."""
        self._require_open()
        if self._parts.saver is not None:
            self._parts.saver.require_memory()

    def _prefix_of(
        self,
        tokens: ArrayLike,
        namespace: Hashable,
        spans: Spans | None,
        max_tokens: int | None,
        digest: bytes | int | None,
    ) -> Options:
        ids = token_ids(tokens)
        options = retention_options(self._parts.eviction_policy, cross_namespace(namespace, digest), spans)
        return ids, options, reusable(len(ids), max_tokens)

    def _await_failed(self) -> None:
        """Make later steps wait for layers that are being loaded: the blocks of a load that failed are free."""
        with suppress(PagecoreError):  # the caller raises the error of the load
            self._parts.store.await_arrivals()

    def _release(self, inner: _operations.EntryLease) -> None:
        _operations.release(self._parts.state, inner)
