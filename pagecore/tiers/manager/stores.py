"""Stores of a cache with tiers: requests for prefixes, copies to the stores, and their statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from threading import RLock

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.prefix.retention import reusable
from pagecore.cache.sequences._sequences import token_ids
from pagecore.errors import PagecoreError
from pagecore.tiers.keys import Fingerprint, lane_keys
from pagecore.tiers.manager.arguments import checked_media, checked_seconds, checked_spans, require_fingerprint
from pagecore.tiers.manager.hits.origins import HOST, Origins
from pagecore.tiers.manager.ledger import Ledger
from pagecore.tiers.manager.loading.load import Load
from pagecore.tiers.manager.policy import PrefixPlanner
from pagecore.tiers.manager.port import DeviceSide, Positions, Spans, StreamHost
from pagecore.tiers.manager.requests import Request
from pagecore.tiers.manager.running import Agree, RunningLoads
from pagecore.tiers.manager.stats import RequestStats
from pagecore.tiers.manager.tickets import StorePort
from pagecore.tiers.manager.writing.saving import StoreWrites
from pagecore.tiers.store import BlockStore, Keys, Medium

CHUNK_BYTES = 16 << 20
PIN_SECONDS = 10.0
# Longest waits of `drain` for the ends of batches, and of copies, in seconds.
PAUSE, COPY_PAUSE = 0.05, 0.0005


class StoreSide(StoreWrites):
    """Requests and copies of one cache with a host tier and stores.

    Parameters
    ----------
    cache : PagedKVCache
    host : HostTier
    stores : sequence of BlockStore
        The nearest first. They belong to the object, which closes them.
    fingerprint : Fingerprint
    tree_lanes : sequence of int
        The group of each lane of the host's tree.
    num_origins : int
        Loaded blocks whose store is remembered until they are promoted.
    held : callable, optional
        Returns a context that holds the lock of the cache, which may be held already.
    min_tokens : int
        Fewer missing tokens are not looked up.
    chunk_bytes : int
        Bytes of one batch of a load or store.
    pin_seconds : float
        Seconds after the end of a request for which its prefix stays pinned in the host, unless it is released.
    agree : callable, optional
        Elementwise minimum over ranks; see `Tiers`.
    copies_nearer : bool
        Entries that a store loads are written to the stores before it.
    num_slots : int
        Host blocks of each group through which prefixes pass that are longer than the host, in each direction; 0 for
        none.
    flush : callable
        Writes what backups have published in the host so far to the stores.
    clock : callable
        Returns the time in seconds.
    """

    def __init__(
        self,
        cache: DeviceSide,
        host: StreamHost,
        stores: Sequence[BlockStore],
        *,
        fingerprint: Fingerprint | None,
        tree_lanes: Sequence[int],
        num_origins: int = 0,
        held: Callable[[], AbstractContextManager[object]] | None = None,
        min_tokens: int = 64,
        chunk_bytes: int = CHUNK_BYTES,
        pin_seconds: float = PIN_SECONDS,
        agree: Agree | None = None,
        copies_nearer: bool = True,
        num_slots: int = 0,
        flush: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_fingerprint(stores, fingerprint)
        # Stores of one medium have one ledger: events name only the medium.
        ledgers: dict[str, Ledger] = {}
        for store in stores:
            ledgers.setdefault(store.medium, Ledger(host.tree, tree_lanes))
        self.ledgers = tuple((ledger, medium) for medium, ledger in ledgers.items())
        super().__init__(
            host,
            tuple(StorePort(store, index, ledgers[store.medium]) for index, store in enumerate(stores)),
            fingerprint,
            PrefixPlanner(host.tree, tree_lanes),
            chunk_bytes=chunk_bytes,
            num_groups=len(tree_lanes),
            num_slots=num_slots,
            num_origins=num_origins,
            flush=flush,
            clock=clock,
        )
        self.min_tokens = min_tokens
        self._cache = cache
        self._copies_nearer = copies_nearer
        self._clock = clock
        # Blocks that the host has from a store, until they are promoted; `media` names the indices.
        self.loaded = Origins(self.planner.block_size, num_origins)
        self.media = tuple(dict.fromkeys(("GPU", "CPU", *(port.medium for port in self.ports))))
        self._loads = RunningLoads(agree, pin_seconds, self._copy_nearer)
        lock = RLock()
        self.held = held if held is not None else lambda: lock

    # -- requests ------------------------------------------------------------------------------------------------

    def request(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
        deadline: float | None = None,
        media: Collection[Medium] | None = None,
        loads: bool = True,
    ) -> Request:
        """Ask for a prefix; see `Tiers.request` and, without `loads`, `Tiers.lookup`."""
        asked = None if media is None else checked_media(media)
        seconds = None if deadline is None else checked_seconds("deadline", deadline)
        ids = token_ids(tokens)
        most = reusable(len(ids), max_tokens) // self.planner.block_size * self.planner.block_size
        spans = checked_spans(spans)
        with self.held():
            self._check_open()
            end = None if seconds is None else self._clock() + seconds
            request = Request(ids, namespace, spans, most, end, media=asked, loads=loads)
            if self.ports:
                request.chain = self._chain(ids[:most], namespace, spans)
            try:
                self._begin(Load(self, request))
            except BaseException:
                if request.load is not None:
                    request.load.cancel()
                    request.load.release()
                raise
            return request

    def _begin(self, load: Load) -> None:
        """Search, or wait for an older request that does."""
        leader = self._loads.add(load)
        if leader is None:
            load.search()
        else:
            load.wait_for(leader)
        if not self.agrees:
            self._settle()

    def poll(self) -> list[Request]:
        """Take the ends of batches; return the requests that ended since the last call, other than in `request`."""
        with self.held():
            self._check_open()
            ended = self.take_ends()
            kept, self._unreturned = self._unreturned, []
            return [*kept, *ended]

    def take_ends(self) -> list[Request]:
        """Take the ends of batches; return the requests that end with them, which `poll` does not return again."""
        with self.held():
            self._check_open()
            for port in self.ports:
                port.poll()
            self._streams.advance()
            return self._settle()

    def release_ended(self) -> None:
        """End the pins of all requests that have ended."""
        self._loads.release_ended()

    @property
    def is_at_rest(self) -> bool:
        """True if no request is open and no store has a batch."""
        return not self.num_pending and not self._loads.num_open and self._streams.is_idle

    @property
    def pause(self) -> float:
        """Longest wait between two looks, in seconds."""
        return COPY_PAUSE if self._streams.is_copying else PAUSE

    @property
    def num_pending(self) -> int:
        """Number of batches that the stores have not ended."""
        return sum(port.num_pending for port in self.ports)

    def stats(self) -> RequestStats:
        """Return the counters."""
        with self.held():
            return self._loads.stats({port.store.name: port.stats() for port in self.ports})

    def check_invariants(self) -> None:
        """Recount what requests and copies hold; raise PagecoreError if a request or pin is lost."""
        with self.held():
            self._loads.check_invariants()
            self._streams.check_invariants()
            busy = self._loads.num_batches + self._writer.num_batches + self._deletions.num_open
            if busy != self.num_pending:
                raise PagecoreError(
                    f"inconsistent tiers: requests, copies and removals wait for {busy} batches, the stores have "
                    f"{self.num_pending}"
                )
            if not busy and self._writer.num_pins:
                raise PagecoreError(f"inconsistent tiers: {self._writer.num_pins} pins of copies without a batch")

    @property
    def num_leases(self) -> int:
        """Number of leases of the host that loads and streams hold."""
        return self._loads.num_leases + self._streams.num_leases

    @property
    def num_pins(self) -> int:
        """Number of pins on the host that requests and copies hold."""
        return self._loads.num_pins + self._writer.num_pins - self._streams.num_written

    def close(self, timeout: float = 5.0) -> None:
        """End all requests, wait up to `timeout` seconds for open batches, and close the stores; idempotent."""
        with self.held():
            if self._epoll is None:
                return
            self._loads.cancel_all()
            self._streams.stop()
            self._copies_nearer = False
            with ExitStack() as ends:  # from the last one to the first, whatever a store raises
                ends.callback(self._loads.release_all)
                ends.callback(self._settle)
                for port in reversed(self.ports):
                    ends.callback(port.close)
                ends.callback(self._close_epoll)
                with suppress(PagecoreError):
                    self.drain(timeout)

    # -- for loads -----------------------------------------------------------------------------------------------

    @property
    def agrees(self) -> bool:
        """True if ranks end their requests together."""
        return self._loads.agrees

    def bring(self, request: Request, max_tokens: int) -> None:
        """Promote what the host has of a request, up to what fits."""
        self._cache.bring(request.tokens, namespace=request.namespace, spans=request.spans, max_tokens=max_tokens)

    def device_tokens(self, request: Request, max_tokens: int) -> int:
        """Return the tokens of a request that the device has, up to `max_tokens`."""
        return self._cache.match_length(
            request.tokens, namespace=request.namespace, spans=request.spans, max_tokens=max_tokens
        )

    def keys(self, request: Request, lane: int, positions: Positions) -> Keys:
        """Return the content keys of entries of a request."""
        assert request.chain is not None
        return lane_keys(request.chain[positions], lane)

    def note_loaded(
        self, request: Request, start: int, sources: NDArray[np.int64], *, is_streamed: bool = False
    ) -> None:
        """Note the store of each block from token `start` on that was loaded for a request; below 0 for none."""
        index = np.array([*(self.media.index(port.medium) for port in self.ports), HOST])
        end = start + len(sources) * self.planner.block_size
        media = index[np.maximum(sources, -1)]
        if not is_streamed:
            self.loaded.note(request.tokens[:end], request, start, media)
            return
        self._cache.note_streamed(request.tokens[:end], request, start, media)
        if sources.max() <= min((port.index for port in self.ports if port.takes_entries), default=-1):
            self._passed.add(request.tokens[:end], request)  # no store lacks it

    def note_found(self, request: Request, num_blocks: int) -> None:
        """Take the answer of all stores: what they lack is to be streamed again."""
        if request.media is None:
            known = self._passed.match(request.tokens[: request.max_tokens], request)
            if num_blocks * self.planner.block_size < known:
                self._passed.forget()

    # -- inside --------------------------------------------------------------------------------------------------

    def _copy_nearer(self, load: Load) -> None:
        """Write what a request has loaded to the stores that are nearer than its source."""
        request = load.request
        if not self._copies_nearer or request.chain is None or len(self.ports) < 2:
            return
        lanes = range(len(self.host.payload_bytes))
        for port in [each for each in self.ports[:-1] if each.takes_entries]:
            wanted = [np.flatnonzero(load.sources(lane) > port.index) for lane in lanes]
            if any(map(len, wanted)):
                self._writer.copy(
                    request.tokens, request.namespace, request.spans, wanted, partial(self.keys, request), port
                )

    def _settle(self) -> list[Request]:
        return self._loads.advance(self._clock())
