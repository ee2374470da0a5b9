"""Tiers: a paged cache whose prefixes continue in host memory and in stores."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from collections.abc import Sequence as Listed
from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.paged import PagedKVCache
from pagecore.cache.prefix.retention import Spans
from pagecore.cache.sequences._sequences import Sequence, as_list
from pagecore.cache.state._state import Held
from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import flag, require_int, shown
from pagecore.tiers.guard import Guard
from pagecore.tiers.host.operations._operations import require_all
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.arguments import (
    Write,
    check_agree,
    check_fingerprint,
    checked_parts,
    checked_seconds,
    checked_stores,
    checked_timeout,
    stream_slots,
)
from pagecore.tiers.manager.eviction import EvictionCalls
from pagecore.tiers.manager.ledger import Ledger
from pagecore.tiers.manager.observer import CacheObserver
from pagecore.tiers.manager.requests import Request
from pagecore.tiers.manager.running import Agree
from pagecore.tiers.manager.stats import TierStats
from pagecore.tiers.manager.stores import PIN_SECONDS, StoreSide
from pagecore.tiers.manager.writing.streams import ALL
from pagecore.tiers.store import BlockStore, Medium


class Tiers(EvictionCalls):
    """A paged cache, its host tier and its stores, which work together without further calls.

    From its construction to `close`, the cache reports to the tiers: `PagedKVCache.add_sequence` first promotes what
    the host has of the prompt, `match_length` counts both, and commits and removals back up what they publish. A
    scheduler therefore uses the cache as it would without tiers.

    Stores keep blocks by content, on disk or in a service that other processes and machines share. What is backed up to
    the host is written to every store. `request` loads a prefix from the stores to the host and returns at once; `poll`
    returns the requests that have ended, and has to be called now and then even without requests.

    Parameters
    ----------
    cache : PagedKVCache
        A cache has at most one Tiers at a time.
    host : HostTier
        A tier of this cache.
    stores : sequence of BlockStore
        The nearest first. Each is wrapped in a `Guard`, unless it is one or the cache has no bytes. They belong to the
        object: `close` closes them.
    fingerprint : Fingerprint, optional
        Identity of model and layout, for the keys of the stores, which need it.
    write : {"through", "second_hit", "on_release", "on_evict", "explicit"}
        The blocks that are backed up: all when a step publishes them; those that a second sequence has asked for, or a
        preempted one again; all when their sequence is removed; those that a step or promotion evicts; or only those of
        sequences passed to `save`. With "on_evict" the host holds what the device does not, and both together hit like
        one cache of both sizes; otherwise the host is a copy, and hits like one cache of its own size.
    min_tokens : int
        Promotions and loads that would bring fewer tokens are not worth their transfer: the tokens are computed.
    pin_seconds : float
        Seconds after the end of a request for which the host keeps its prefix pinned, unless `Request.release` comes
        first.
    agree : callable, optional
        For ranks that serve parts of one model: takes an int64 array and returns the elementwise minimum of the arrays
        of all ranks, such as an all-reduce. Requests then end on all ranks with the shortest prefix, for which all
        ranks have to make the same requests and polls in the same order.
    stream_blocks : int, optional
        Host blocks of each group, in each direction, through which prefixes pass for which the host has no room: to the
        stores, and with `request` to the device. 0 turns it off. By default those of 64 MiB, a quarter of the host at
        most.

    Raises
    ------
    UnsupportedOption
        A tier of another cache, a cache that has tiers already, or an unknown `write`; objects that are not stores, a
        fingerprint or callable; stores without a fingerprint, or for a cache with cross-attention layers, whose
        prefixes depend on encoder outputs that stores do not keep.
    ShapeError
        A fingerprint of other entries than the host has, or a number that is out of range.

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
        stores: Listed[BlockStore] = (),
        *,
        fingerprint: Fingerprint | None = None,
        write: Write = "through",
        min_tokens: int = 64,
        pin_seconds: float = PIN_SECONDS,
        agree: Agree | None = None,
        stream_blocks: SupportsIndex | None = None,
    ) -> None:
        parts = checked_parts(cache, host, write)
        given = checked_stores(stores, parts, fingerprint)
        check_fingerprint(fingerprint, given, host)
        check_agree(agree)
        seconds = checked_seconds("pin_seconds", pin_seconds)
        num_slots = stream_slots(host, stream_blocks)
        super().__init__(parts, host, write, require_int("min_tokens", min_tokens, min=0, max=None), len(given))
        self.cache = cache
        self._is_closed = False
        with Held(parts.state.lock):
            if parts.state.observer is not None:
                raise UnsupportedOption("the cache has tiers already; close them first")
            host.is_exclusive = write == "on_evict"
            try:
                self._stores = StoreSide(
                    _DeviceOf(host, self),
                    host,
                    [store if parts.device == "none" or isinstance(store, Guard) else Guard(store) for store in given],
                    fingerprint=fingerprint,
                    tree_lanes=host.tree_lanes,
                    num_origins=self.num_origins,
                    held=lambda: Held(parts.state.lock),
                    min_tokens=self.min_tokens,
                    pin_seconds=seconds,
                    agree=agree,
                    copies_nearer=write != "explicit",
                    num_slots=num_slots,
                    flush=self._write,
                )
            except BaseException:
                host.is_exclusive = False
                raise
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
        """Return the tokens of a prefix that the device or the host has; see `PagedKVCache.match_length`.

        In a cache with cross-attention layers, a call without `cross_digest` answers for prompts without an encoder's
        input.
        """
        return self.cache.match_length(
            tokens, namespace=namespace, spans=spans, max_tokens=max_tokens, cross_digest=cross_digest
        )

    @property
    def stores(self) -> tuple[BlockStore, ...]:
        """The stores, the nearest first, as `Guard` wraps them."""
        return tuple(port.store for port in self._stores.ports)

    @property
    def ledgers(self) -> tuple[tuple[Ledger, str], ...]:
        """The blocks that the stores of each medium are known to have, and the medium, for `EventPublisher`."""
        return self._stores.ledgers

    def request(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
        deadline: float | None = None,
        media: Collection[Medium] | None = None,
    ) -> Request:
        """Ask for a prefix, and return at once: what the stores have of it is loaded into the host.

        The stores are asked for what the host lacks, each with one batch, and the nearest that has an entry loads it.
        Host memory is taken when the answers are there, so that a miss costs none. The request is "ready" when all that
        was found is there, verified and published; the requests of other prompts do not delay it. At the deadline it is
        "late", with what is there, and the batches that are still open are published when they end. `add_sequence` then
        finds the prefix.

        Parameters
        ----------
        tokens, namespace, spans, max_tokens
            As for `PagedKVCache.add_sequence`.
        deadline : float, optional
            Seconds from now after which the request ends with what is there; None waits for the deadlines of the
            stores.
        media : collection of {"DISK", "EXTERNAL", "CPU"}, optional
            Media of the stores that are asked: an empty one asks none. By default all stores are.

        Returns
        -------
        Request
            It has ended already if there is nothing to look up.

        Raises
        ------
        ShapeError
            A negative deadline, or invalid tokens.
        UnsupportedDtype
            Tokens that are not integers, or a namespace without a value outside of the process.
        UnsupportedOption
            The tiers are closed, or an unknown medium.
        """
        return self._stores.request(
            tokens, namespace=namespace, spans=spans, max_tokens=max_tokens, deadline=deadline, media=media
        )

    def lookup(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
        deadline: float | None = None,
        media: Collection[Medium] | None = None,
    ) -> Request:
        """Ask how much of a prefix a request would find, and return at once; nothing is loaded.

        When the request has ended, `Request.num_found_tokens` is the length of the prefix that device, host and stores
        have together, however few tokens the host lacks, and `num_tokens` that of device and host. The part in the host
        stays pinned until `Request.release`, or for `pin_seconds`, and counts as used there; a store counts a look-up
        as it does that of a request. `match_length` answers for device and host alone, and uses nothing.

        Arguments and errors are those of `request`.
        """
        return self._stores.request(
            tokens,
            namespace=namespace,
            spans=spans,
            max_tokens=max_tokens,
            deadline=deadline,
            media=media,
            loads=False,
        )

    def save(self, sequences: Sequence | Iterable[Sequence], *, max_tokens: SupportsIndex | None = None) -> int:
        """Copy the published blocks of sequences to the host and to every store, whatever `write` is.

        Parameters
        ----------
        sequences : Sequence or iterable of Sequence
        max_tokens : int, optional
            Longest prefix of each sequence to copy: the shared beginning of prompts, for example.

        Returns
        -------
        int
            Blocks that were new in the host; see `HostTier.backup`.
        """
        copied, most = 0, ALL if max_tokens is None else min(require_int("max_tokens", max_tokens, 0, max=None), ALL)
        with Held(self._parts.state.lock):
            listed = require_all(self._parts.state, as_list(sequences))
            self._write()
            for sequence in listed:
                limit = min(most, self._stores.streams.limit_of(sequence))
                copied += self.host.backup(sequence, max_tokens=limit)
                self._write_whole(sequence, most)
                self._stream(sequence, most)
        return copied

    def poll(self) -> list[Request]:
        """Take the ends of transfers; return the requests that ended since the last call, other than in `request`."""
        self._write()
        return self._stores.poll()

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has batches of stores to end; for select and epoll."""
        return self._stores.fileno()

    def wait(self, request: Request, timeout: float | None = None) -> Request:
        """Poll until a request has ended, or `timeout` seconds have passed; return the request.

        No later `poll` returns this request, or others that end meanwhile: look at their `state`. Those that ended in
        an earlier `drain` are still returned by the next `poll`.
        """
        if not isinstance(request, Request):
            raise UnsupportedOption(f"expected a Request (as returned by request), got {shown(request)}")
        timeout = checked_timeout(timeout)
        self._stores.wait_for(request, timeout, self._take_ends)
        return request

    def stats(self) -> TierStats:
        """Return the statistics: hits by medium, the host tier, requests and stores."""
        with Held(self._parts.state.lock):
            requests, streams = self._stores.stats(), self._stores.stream_stats()
            return TierStats(self._hits_by_medium(), self.host.stats(), requests, streams)

    def check_invariants(self) -> None:
        """Recount both trees, their pools and all transfers; raise `PagecoreError` if anything differs."""
        with Held(self._parts.state.lock):
            self.cache.check_invariants()
            self.host.check_invariants()
            self._stores.check_invariants()

    def close(self, *, keep_host: bool = False) -> None:
        """Part from the cache, end all transfers, and close stores and host tier; a second call does nothing.

        With `keep_host` the host tier stays open with all that it has: a new Tiers of it, with other stores or another
        `write`, goes on where this one ends, so that a store can be attached or detached while an engine runs.

        Raises
        ------
        UnsupportedOption
            `keep_host` is not True or False.
        """
        keeps = flag("keep_host", keep_host)
        if self._is_closed:
            return
        self._is_closed = True
        with Held(self._parts.state.lock):
            self._parts.state.observer = None
        try:
            self._stores.close()
        finally:
            if keeps:
                self.host.is_exclusive = False
            else:
                self.host.close()

    def _take_ends(self) -> None:
        self._write()
        self._stores.take_ends()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _DeviceOf:
    """The device of a cache with tiers, whose own `match_length` counts what the host has as well."""

    def __init__(self, host: HostTier, tiers: CacheObserver) -> None:
        self._host, self._tiers = host, tiers

    def match_length(self, tokens: ArrayLike, **options: Any) -> int:
        return self._host.match_both(tokens, **options)[0]

    def bring(self, tokens: NDArray[np.int32], *, namespace: Hashable, spans: Any, max_tokens: int) -> None:
        self._tiers.bring(tokens, namespace, spans, max_tokens)

    def note_streamed(self, tokens: NDArray[np.int32], prefix: Any, start: int, media: NDArray[np.int64]) -> None:
        self._tiers.note_streamed(tokens, prefix, start, media)
