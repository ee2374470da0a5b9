"""Methods of a host tier that bring prefixes back: matches of both trees, and promotions to the device."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.prefix.retention import RetentionOptions, Spans
from pagecore.cache.state._state import Held
from pagecore.storage.checks import INT32_MAX, require_int
from pagecore.tiers.host.methods.spilling import SpillMethods
from pagecore.tiers.host.operations import _operations


class PromoteMethods(SpillMethods):
    """`HostTier.match`, `match_both`, `promote` and `wait_for_loads`."""

    def match(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
        cross_digest: bytes | int | None = None,
    ) -> int:
        """Return the number of tokens that a promotion could bring; nothing is held, and nothing counts as used.

        Arguments and errors are those of `PagedKVCache.match_length`: without `cross_digest`, the number is that of
        prompts without an encoder's input.
        """
        return self.match_both(
            tokens, namespace=namespace, spans=spans, max_tokens=max_tokens, cross_digest=cross_digest
        )[1]

    def match_both(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
        cross_digest: bytes | int | None = None,
    ) -> tuple[int, int]:
        """Return the tokens of a prefix that the device has, and those that the host has; see `match`."""
        ids, options, most = self._prefix_of(tokens, namespace, spans, max_tokens, cross_digest)
        return self.match_ids(ids, options, most)

    def match_ids(self, ids: NDArray[np.int32], options: RetentionOptions, most: int) -> tuple[int, int]:
        """Do the work of `match_both`, with converted arguments."""
        with Held(self._parts.state.lock):
            self._publish_for(ids, options)
            return _operations.match_both(self._parts.state, self._index, ids, options, most)

    def promote(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
        min_tokens: int = 1,
        cross_digest: bytes | int | None = None,
    ) -> int:
        """Copy what the host has of a prefix into blocks of the cache, up to what fits; return the tokens there now.

        Cached blocks that no sequence uses are evicted for it. The copies go to the stream of the cache's last step, so
        that the next step finds them; on the host they are done when the call returns.

        Parameters
        ----------
        tokens, namespace, spans, max_tokens, cross_digest
            As for `PagedKVCache.add_sequence`; without `cross_digest`, the prefix is that of prompts without an
            encoder's input.
        min_tokens : int
            Fewer tokens than these stay in the host.

        Raises
        ------
        ShapeError, UnsupportedDtype
            As `PagedKVCache.match_length`.
        PagecoreError
            A copy failed, or the memory of the cache is released: nothing was published on the device, and the host
            has what it had.
        """
        ids, options, most = self._prefix_of(tokens, namespace, spans, max_tokens, cross_digest)
        return self.promote_ids(ids, options, most, require_int("min_tokens", min_tokens, min=0, max=None))

    def promote_ids(self, ids: NDArray[np.int32], options: RetentionOptions, most: int, min_tokens: int) -> int:
        """Do the work of `promote`, with converted arguments."""
        self._require_memory()
        min_tokens = min(min_tokens, INT32_MAX)
        spill = self.spill if self.is_exclusive and self._transfers.is_ready() else None
        with Held(self._parts.state.lock):
            self._publish_for(ids, options)
            failed = self._counts["failed"] + 1
            try:
                now, before, copied = _operations.promote(
                    self._parts.state, self._index, ids, options, most, min_tokens, self._transfers.promote, spill
                )
            except BaseException:
                self._counts["failed"] = failed  # once, if it was the copy of a spill, which has counted itself
                self._await_failed()
                raise
            if any(copied):
                self._counts["promotions"] += 1
                self._counts["promoted_bytes"] += self._bytes_of(copied)
                self._counts["promoted"] += now - before
            return now

    @property
    def is_released(self) -> bool:
        """True while the cache has given its memory back (`PagedKVCache.release_memory`): nothing can be promoted."""
        return self._parts.saver is not None and self._parts.saver.is_released

    def wait_for_loads(self) -> None:
        """Make later work of the cache's stream wait for layers that are still being loaded; the host does not wait."""
        with Held(self._parts.state.lock):
            self._parts.store.await_arrivals()
