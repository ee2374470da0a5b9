"""Methods of a host tier that evict: for room, everything, one prefix or one namespace."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Listed
from typing import SupportsIndex

from numpy.typing import ArrayLike

from pagecore.cache.prefix.retention import Spans
from pagecore.cache.state._state import Held
from pagecore.storage.checks import require_int
from pagecore.tiers.host.methods.parts import TierParts
from pagecore.tiers.host.operations import _operations


class EvictMethods(TierParts):
    """`HostTier.make_room`, `clear`, `evict_prefix`, `evict_namespace`, `revoke_prefix` and `path_length`."""

    def make_room(self, counts: Listed[int]) -> bool:
        """Evict until `counts` entries of each lane are free; return False, with nothing evicted, if they cannot be.

        Raises
        ------
        ShapeError
            `counts` has another length than there are lanes, or an entry that is not an integer of at least 0.
        """
        needed = self._counts_of_lanes("counts", counts)
        with Held(self._parts.state.lock):
            if self._index.free(needed):
                return True
            if self._index.tail is None:
                return False
            _operations.drop_waiting(self._parts.state, self._index)
            return self._index.free(needed)

    def clear(self) -> int:
        """Evict everything that is not pinned; return the number of freed blocks."""
        with Held(self._parts.state.lock):
            _operations.drop_waiting(self._parts.state, self._index)
            return self._index.clear()

    def evict_prefix(
        self,
        tokens: ArrayLike,
        *,
        keep: SupportsIndex = 0,
        namespace: Hashable = None,
        spans: Spans | None = None,
        cross_digest: bytes | int | None = None,
    ) -> int:
        """Evict the end of one prefix from the host; return the number of freed blocks.

        Blocks go from the last one of `tokens`, until one that is pinned or that another prefix continues: what a store
        reads, a request has loaded or a copy writes stays. Arguments and errors are those of
        `PagedKVCache.evict_prefix`; the device keeps what it has.
        """
        kept = require_int("keep", keep, 0, max=None)
        ids, options, _ = self._prefix_of(tokens, namespace, spans, None, cross_digest)
        kept = min(kept, len(ids))
        self._require_open()
        with Held(self._parts.state.lock):
            before = self._num_free()
            _operations.evict_waiting(self._parts.state, self._index, ids, options, kept)
            self._index.evict_prefix(ids, options, kept)
            return self._num_free() - before

    def evict_namespace(self, namespace: Hashable, *, cross_digest: bytes | int | None = None) -> int:
        """Evict all prefixes of a namespace that nothing pins from the host; return the number of freed blocks.

        Arguments and errors are those of `PagedKVCache.evict_namespace`; the device keeps what it has.
        """
        _, options, _ = self._prefix_of((), namespace, None, None, cross_digest)
        self._require_open()
        with Held(self._parts.state.lock):
            before = self._num_free()
            _operations.drop_waiting_of(self._parts.state, self._index, options.namespace)
            self._index.evict_namespace(options.namespace)
            return self._num_free() - before

    def revoke_prefix(
        self,
        tokens: ArrayLike,
        *,
        valid: SupportsIndex = 0,
        namespace: Hashable = None,
        spans: Spans | None = None,
        cross_digest: bytes | int | None = None,
    ) -> int:
        """Withdraw the block that has token `valid` of a prefix, and what continues it; return the freed blocks.

        Also while requests and stores hold it: they keep the blocks, which no prompt finds. A copy that runs publishes
        its blocks when it ends: call `drain` before. Arguments and errors are those of `PagedKVCache.revoke_prefix`;
        the device keeps what it has.
        """
        first = require_int("valid", valid, 0, max=None)
        ids, options, _ = self._prefix_of(tokens, namespace, spans, None, cross_digest)
        self._require_open()
        with Held(self._parts.state.lock):
            before = self._num_free()
            _operations.drop_waiting(self._parts.state, self._index)
            _operations.revoke(self._parts.state, self._index, ids, options, min(first, len(ids)))
            return self._num_free() - before

    def path_length(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        cross_digest: bytes | int | None = None,
    ) -> int:
        """Return the tokens of a prefix whose blocks the device or the host has, whether or not they can be reused.

        Of layers with windows and states it counts the path, on which these may have nothing.
        """
        ids, options, _ = self._prefix_of(tokens, namespace, spans, None, cross_digest)
        with Held(self._parts.state.lock):
            return self._index.path_length(ids, options)

    def _num_free(self) -> int:
        return sum(pool.num_free for pool in self.block_pools[: self.num_groups])
