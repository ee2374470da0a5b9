"""Calls of `Tiers` that evict, clear and revoke prefixes: in the device, the host and the stores together."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, SupportsIndex, get_args

from numpy.typing import ArrayLike

from pagecore.cache.paged import PagedKVCache
from pagecore.cache.prefix.retention import Spans
from pagecore.cache.sequences._sequences import Sequence, token_ids
from pagecore.cache.state._state import Held
from pagecore.errors import PagecoreError, StoreError, UnsupportedOption
from pagecore.storage.checks import require_int
from pagecore.tiers.manager.arguments import AnyMedium, checked_media, checked_spans, checked_timeout
from pagecore.tiers.manager.observer import CacheObserver
from pagecore.tiers.manager.tickets import StorePort
from pagecore.tiers.store import Keys

# Waits without the lock, of some seconds each, before a call that needs a cache at rest keeps the other threads out.
MAX_ROUNDS, ROUND_SECONDS = 4, 1.0


class EvictionCalls(CacheObserver):
    """The calls of `Tiers` that take prefixes away, and the wait for what runs."""

    cache: PagedKVCache
    _is_closed: bool

    def evict_prefix(
        self,
        tokens: ArrayLike,
        *,
        keep: SupportsIndex = 0,
        namespace: Hashable = None,
        spans: Spans | None = None,
        cross_digest: bytes | int | None = None,
    ) -> int:
        """Evict the end of one prefix from the device, the host and the stores; return the blocks that were freed.

        Device and host evict it as `PagedKVCache.evict_prefix` does: until a block that something uses, or that another
        prefix continues. What is being copied or was requested lately is in use: call `drain` and `Request.release`
        first. Stores then delete what neither device nor host has any more, in batches that end in `poll` or `drain`,
        after what is being saved; `StoreStats.num_removed` counts the keys. An entry that a store fails to delete stays
        there. Other processes that share a store lose what is deleted.

        Arguments and errors are those of `PagedKVCache.evict_prefix`.

        Raises
        ------
        UnsupportedOption
            The tiers are closed.
        """
        self._require_open()
        kept = require_int("keep", keep, 0, max=None)
        ids = token_ids(tokens)
        prefix: dict[str, Any] = {"namespace": namespace, "spans": checked_spans(spans), "cross_digest": cross_digest}
        with Held(self._parts.state.lock):
            freed = self.cache.evict_prefix(ids, keep=kept, **prefix)
            freed += self.host.evict_prefix(ids, keep=kept, **prefix)
            first = max(self.host.path_length(ids, **prefix), min(kept, len(ids)))
            self._stores.remove(ids, namespace, prefix["spans"], -(-first // self.host.block_size))
        return freed

    def evict_namespace(self, namespace: Hashable, *, cross_digest: bytes | int | None = None) -> int:
        """Evict all prefixes of a namespace from the device and the host; return the blocks that were freed.

        What is in use stays, as in `evict_prefix`. Stores cannot list a namespace and keep its entries: name the next
        version of an adapter or tenant otherwise, or evict its prefixes one by one.

        Arguments and errors are those of `PagedKVCache.evict_namespace`.

        Raises
        ------
        UnsupportedOption
            The tiers are closed.
        """
        self._require_open()
        with Held(self._parts.state.lock):
            freed = self.cache.evict_namespace(namespace, cross_digest=cross_digest)
            return freed + self.host.evict_namespace(namespace, cross_digest=cross_digest)

    def clear(self, media: Collection[AnyMedium] = ("GPU", "CPU")) -> int:
        """Evict all prefixes that nothing uses from some media; return the blocks that device and host freed.

        Waits until no copy, load or write runs, and ends the pins of requests that have ended. What sequences and pins
        of the caller use stays. The call then waits until the stores have deleted the entries that they listed;
        `StoreStats.num_removed` counts them.

        A prefix that the host keeps counts as written: after ``clear(["DISK"])`` it reaches the disk again only by
        `save`, or once it is computed after the host has lost it. Name "CPU" as well: everything is then written again.

        Parameters
        ----------
        media : collection of {"GPU", "CPU", "DISK", "EXTERNAL"}
            The device, the host tier, and the stores of a medium. A store has to list its entries
            (`pagecore.tiers.EntryLister`), as `DiskStore` does; services that many processes share do not. "CPU" names
            the host tier and those stores of that medium that can be cleared; the others stay as they are.

        Raises
        ------
        UnsupportedOption
            The tiers are closed, an unknown medium, or a store that cannot be cleared; nothing is evicted.
        StoreError
            A store cannot list its entries, and nothing is evicted; or it has kept some of them, such as while its
            circuit breaker is open, and everything else is cleared.
        """
        self._require_open()
        named = checked_media(media, get_args(AnyMedium))
        ports = self._stores.ports_to_clear(named - {"GPU"})
        freed = 0
        with self._at_rest():
            entries = [(port, _listed(port)) for port in ports]
            self._stores.release_ended()
            if "GPU" in named:
                freed += self.cache.clear_prefix_cache()
            if "CPU" in named:
                freed += self.host.clear()
            clearing = self._stores.clear(entries)
        self._stores.finish(clearing)
        return freed

    def revoke_prefix(
        self,
        tokens: ArrayLike,
        *,
        valid: SupportsIndex = 0,
        namespace: Hashable = None,
        spans: Spans | None = None,
        cross_digest: bytes | int | None = None,
    ) -> dict[Sequence, int]:
        """Withdraw blocks whose content is wrong from the device, the host and the stores; see `PagedKVCache`.

        Waits until no copy, load or write runs. Requests that have ended keep their host blocks, which no prompt finds.
        Stores delete the blocks of `tokens` from the wrong one on, as in `evict_prefix`. They cannot list the other
        prefixes that continue it: call the method for the tokens of each that a store may have.

        Arguments, result and errors are those of `PagedKVCache.revoke_prefix`.

        Raises
        ------
        UnsupportedOption
            The tiers are closed.
        """
        self._require_open()
        first, ids = require_int("valid", valid, 0, max=None), token_ids(tokens)
        prefix: dict[str, Any] = {"namespace": namespace, "spans": checked_spans(spans), "cross_digest": cross_digest}
        affected = self.cache.revoke_prefix(ids, valid=first, **prefix)  # nothing more is copied from the device
        with self._at_rest():
            affected.update(self.cache.revoke_prefix(ids, valid=first, **prefix))
            self.host.revoke_prefix(ids, valid=first, **prefix)
            self._stores.remove(ids, namespace, prefix["spans"], min(first, len(ids)) // self.host.block_size)
        return affected

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no copy, load or write runs; return False if `timeout` seconds pass first.

        Spilled ends of prefixes that wait for their beginnings are published and written, too. The next `poll` returns
        the requests that end meanwhile, except those that `wait` is called for first.

        Raises
        ------
        UnsupportedOption
            This process is a fork of the one that made the tiers, and stores have open batches: those that it had at
            that time, or requests of the fork.
        """
        timeout = checked_timeout(timeout)
        self._publish_spilled()
        end = None if timeout is None else time.monotonic() + timeout
        if not self.host.drain(timeout):
            return False
        self._write()
        return self._stores.drain(None if end is None else max(end - time.monotonic(), 0.0))

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Hold the lock while no copy, load or write runs; what runs is waited for without it.

        Other threads may begin more meanwhile: after `MAX_ROUNDS` of these waits they wait until everything has ended.
        """
        for attempt in count(1):
            self.drain(ROUND_SECONDS)
            with Held(self._parts.state.lock):
                self._publish_spilled()  # what other threads have begun meanwhile
                self._write()
                if attempt >= MAX_ROUNDS:
                    self.drain()
                if not self.host.stats().num_pending and self._stores.is_at_rest:
                    yield
                    return

    def _publish_spilled(self) -> None:
        with suppress(PagecoreError):  # counted by the host tier
            self.host.publish_spilled()

    def _require_open(self) -> None:
        if self._is_closed:
            raise UnsupportedOption("the tiers are closed; make new ones")


def _listed(port: StorePort) -> Keys:
    """Return the keys of a store that is to be cleared."""
    try:
        return port.keys()
    except StoreError as error:
        raise StoreError(
            f"{error}; nothing was evicted: clear again later, or leave {port.medium} out of media"
        ) from error
