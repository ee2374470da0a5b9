"""Tiers: a paged cache whose prefixes continue in host memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache._lock import Held
from pagecore.cache._sequence import Sequence, as_list
from pagecore.cache.paged import PagedKVCache
from pagecore.cache.parts import parts_of
from pagecore.cache.prefix.retention import RetentionOptions, Spans
from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.storage.checks import require_int, shown
from pagecore.tiers.host import _promote
from pagecore.tiers.host.records import Backup, HostStats
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.second_hit import SecondHits

Write = Literal["through", "second_hit", "on_release", "explicit"]


class Tiers:
    """A paged cache and its host tier, which work together without further calls.

    From its construction to `close`, the cache reports to the tiers: `PagedKVCache.add_sequence` first promotes what
    the host has of the prompt, `match_length` counts both, and commits and removals back up what they publish. A
    scheduler therefore uses the cache as it would without tiers.

    Parameters
    ----------
    cache : PagedKVCache
        A cache has at most one Tiers at a time.
    host : HostTier
        A tier of this cache.
    write : {"through", "second_hit", "on_release", "explicit"}
        The blocks that are backed up: all when a step publishes them; those that a second sequence has asked for; all
        when their sequence is removed; or only those of sequences passed to `save`.
    min_tokens : int
        Promotions that would bring fewer tokens are not worth their transfer: the tokens are computed.

    Raises
    ------
    UnsupportedOption
        A tier of another cache, a cache that has tiers already, or an unknown `write`.

    Notes
    -----
    A copy that fails is counted in `HostStats.num_failed`; the sequence then computes its tokens, and its blocks stay
    on the device. Sequences that are swapped out are not backed up.

    Examples
    --------
    >>> from pagecore import AttentionSpec, PagedKVCache
    >>> from pagecore.tiers.host.tier import HostTier
    >>> from pagecore.tiers.manager.tiers import Tiers
    >>> cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9)
    >>> tiers = Tiers(cache, HostTier(cache, num_blocks=65), min_tokens=16)
    >>> for start in range(0, 400, 100):  # 400 tokens in turn, in a cache that holds 128
    ...     with tiers.add_sequence(range(start, start + 100)) as sequence:
    ...         cache.commit(cache.prepare([sequence], 100))
    >>> tiers.add_sequence(range(100)).num_cached_tokens
    96
    >>> tiers.close()
    """

    def __init__(
        self,
        cache: PagedKVCache,
        host: HostTier,
        *,
        write: Write = "through",
        min_tokens: int = 64,
    ) -> None:
        parts = parts_of(cache)
        if not isinstance(host, HostTier) or host.cache is not cache:
            raise UnsupportedOption(f"host is {host!r}; expected a HostTier of this cache")
        if write not in get_args(Write):
            raise UnsupportedOption(f"write is {shown(write)}; use one of {', '.join(get_args(Write))}")
        self.cache, self.host, self.write = cache, host, write
        self.min_tokens = require_int("min_tokens", min_tokens, min=0, max=None)
        self._parts = parts
        self._hits = SecondHits(parts.block_size, host.num_blocks[0])
        self._is_closed = False
        with Held(parts.state.lock):
            if parts.state.observer is not None:
                raise UnsupportedOption("the cache has tiers already; close them first")
            parts.state.observer = self

    # -- use -----------------------------------------------------------------------------------------------------

    def add_sequence(self, tokens: ArrayLike, id: object = None, **options: Any) -> Sequence:
        """Promote what the host has of a prefix, then call `PagedKVCache.add_sequence`, under one lock.

        Arguments and errors are those of `PagedKVCache.add_sequence`, which does the same while the tiers are open.
        """
        return self.cache.add_sequence(tokens, id, **options)

    def match_length(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
        cross_digest: bytes | int | None = None,
    ) -> int:
        """Return the tokens of a prefix that the device or the host has; see `PagedKVCache.match_length`."""
        return self.cache.match_length(
            tokens, namespace=namespace, spans=spans, max_tokens=max_tokens, cross_digest=cross_digest
        )

    def save(self, sequences: Sequence | Iterable[Sequence]) -> int:
        """Back up the published blocks of sequences, whatever `write` is; see `HostTier.backup`."""
        return self.host.backup(as_list(sequences))

    def poll(self) -> list[Backup]:
        """Return the backups that ended since the last call; publishes those of a CUDA device."""
        return self.host.poll()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no copy runs; return False if `timeout` seconds pass first."""
        return self.host.drain(timeout)

    def stats(self) -> HostStats:
        """Return the statistics of the host tier."""
        return self.host.stats()

    def check_invariants(self) -> None:
        """Recount both trees, their pools and all transfers; raise `PagecoreError` if anything differs."""
        with Held(self._parts.state.lock):
            self.cache.check_invariants()
            self.host.check_invariants()

    def close(self) -> None:
        """Part from the cache, and close the host tier; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        with Held(self._parts.state.lock):
            self._parts.state.observer = None
        self.host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- calls of the cache, under its lock ----------------------------------------------------------------------

    def adding(self, ids: NDArray[np.int32], options: RetentionOptions, most: int) -> None:
        """Promote what the host has of a prefix; a failed copy leaves its tokens to be computed."""
        array = np.asarray(ids)
        if self.write == "second_hit":
            self._hits.note(array, options)
        try:
            self.host.promote_ids(array, options, most, self.min_tokens)
        except PagecoreError:
            pass  # counted by the host tier

    def committed(self, sequences: list[Sequence]) -> None:
        """Back up what a step has published."""
        if self.write in ("through", "second_hit"):
            for sequence in sequences:
                self._back_up(sequence)

    def removing(self, sequence: Sequence) -> None:
        """Back up what a sequence leaves behind."""
        if self.write != "explicit":
            self._back_up(sequence)
        self._hits.forget(sequence)

    def match_ids(self, ids: NDArray[np.int32], options: RetentionOptions, most: int) -> int:
        """Return the tokens of a prefix that the device would have after `adding`."""
        device, host = _promote.match_both(self._parts.state, self.host._index, ids, options, most)
        return host if host - device >= max(self.min_tokens, 1) else device

    def _back_up(self, sequence: Sequence) -> None:
        most = self._hits.limit(sequence) if self.write == "second_hit" else None
        try:
            self.host.backup(sequence, max_tokens=most)
        except PagecoreError:
            pass  # counted by the host tier
