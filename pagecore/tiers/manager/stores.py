"""Stores of a cache with tiers: requests for prefixes, copies to the stores, and their statistics."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from threading import RLock

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.prefix.retention import reusable
from pagecore.cache.sequences._sequences import token_ids
from pagecore.errors import PagecoreError, StoreError, UnsupportedDtype, UnsupportedOption
from pagecore.tiers.keys import Fingerprint, content_chain, lane_keys
from pagecore.tiers.manager.arguments import checked_media, checked_seconds, checked_spans, require_fingerprint
from pagecore.tiers.manager.ledger import Ledger
from pagecore.tiers.manager.load import Load
from pagecore.tiers.manager.origins import HOST, Origins
from pagecore.tiers.manager.policy import PrefixPlanner
from pagecore.tiers.manager.port import DeviceSide, Flags, HostSide, Positions, Prefix, Spans
from pagecore.tiers.manager.removal import Clearing, Removal
from pagecore.tiers.manager.requests import Request
from pagecore.tiers.manager.running import Agree, RunningLoads
from pagecore.tiers.manager.stats import RequestStats
from pagecore.tiers.manager.tickets import StorePort
from pagecore.tiers.manager.writes import Writer
from pagecore.tiers.store import BlockStore, Keys, Medium

CHUNK_BYTES = 16 << 20
PIN_SECONDS = 10.0


class StoreSide:
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
    clock : callable
        Returns the time in seconds.
    """

    def __init__(
        self,
        cache: DeviceSide,
        host: HostSide,
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_fingerprint(stores, fingerprint)
        self.host = host
        # Stores of one medium have one ledger: events name only the medium.
        ledgers: dict[str, Ledger] = {}
        for store in stores:
            ledgers.setdefault(store.medium, Ledger(host.tree, tree_lanes))
        self.ledgers = tuple((ledger, medium) for medium, ledger in ledgers.items())
        self.ports = tuple(StorePort(store, index, ledgers[store.medium]) for index, store in enumerate(stores))
        self._touched = [port for port in self.ports if port.can_touch]
        self.planner = PrefixPlanner(host.tree, tree_lanes)
        self.min_tokens = min_tokens
        self.chunk_bytes = chunk_bytes
        self._cache = cache
        self._fingerprint = fingerprint
        self._copies_nearer = copies_nearer
        self._clock = clock
        self._writer = Writer(host, self.ports, len(tree_lanes), chunk_bytes, clock)
        # Blocks that the host has from a store, until they are promoted; `media` names the indices.
        self.loaded = Origins(self.planner.block_size, num_origins)
        self.media = tuple(dict.fromkeys(("GPU", "CPU", *(port.medium for port in self.ports))))
        self._num_removals = 0
        self._unreturned: list[Request] = []  # ended in `drain`, until `poll` returns them
        self._loads = RunningLoads(agree, pin_seconds, self._copy_nearer)
        lock = RLock()
        self.held = held if held is not None else lambda: lock
        self._epoll: select.epoll | None = select.epoll()
        for port in self.ports:
            self._epoll.register(port.store.fileno(), select.EPOLLIN)

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
            load = Load(self, request)
            leader = self._loads.add(load)
            if leader is None:
                load.search()
            else:
                load.wait_for(leader)
            if not self.agrees:
                self._settle()
            return request

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
            return self._settle()

    def write(self, prefixes: Iterable[Prefix]) -> int:
        """Write what backups have published in the host to the stores; return the number of entries.

        Prefixes whose namespace has no value outside of the process are left out.
        """
        if not self.ports:
            return 0
        with self.held():
            return sum(self._write(prefix) for prefix in prefixes if prefix.stop)

    @property
    def has_unsaved(self) -> bool:
        """True if a store has failed to take entries that `write_again` would write."""
        return self._writer.has_unsaved

    def write_again(self, tokens: NDArray[np.int32], namespace: Hashable, spans: Spans | None) -> None:
        """Write those entries of a prefix that a store has failed to take before, and that the host has."""
        num_blocks = len(tokens) // self.planner.block_size
        with self.held():
            try:
                chain = self._chain(tokens, namespace, spans)
            except UnsupportedDtype:
                return
            longer = np.append(tokens, np.int32(0))  # a match leaves the last token out
            self._writer.write_again(
                longer, namespace, spans, lambda lane, places: lane_keys(chain[places], lane), num_blocks
            )

    @property
    def counts_uses(self) -> bool:
        """True if a store's order of eviction counts what the device and the host serve."""
        return bool(self._touched)

    def touch(self, tokens: NDArray[np.int32], namespace: Hashable, spans: Spans | None) -> None:
        """Report the entries of a prefix as used to the stores that count it: the device or the host served them."""
        if len(tokens) < self.planner.block_size:
            return
        with self.held():
            try:
                chain = self._chain(tokens, namespace, spans)
            except UnsupportedDtype:
                return
            for lane in range(len(self.host.payload_bytes)):
                keys = lane_keys(chain, lane)
                for port in self._touched:
                    port.touch(keys)

    def remove(self, tokens: NDArray[np.int32], namespace: Hashable, spans: Spans | None, begin: int) -> None:
        """Delete the entries of a prefix from a block on, in every store that deletes on request.

        Nothing happens if the namespace has no value outside of the process.
        """
        ports = [port for port in self.ports if port.can_remove]
        places = np.arange(begin, len(tokens) // self.planner.block_size)
        if not ports or not len(places):
            return
        with self.held():
            try:
                chain = self._chain(tokens, namespace, spans)
            except UnsupportedDtype:
                return
            removal = Removal(tokens, namespace, spans, chain, places, len(self.host.payload_bytes))
            for port in ports:
                self._num_removals += 1
                port.remove(removal.all_keys(), partial(self._removed, port, removal))

    def ports_to_clear(self, media: frozenset[Medium]) -> list[StorePort]:
        """Return the stores of some media; raise UnsupportedOption if one cannot be cleared, StoreError if not now.

        Stores of medium "CPU" that cannot be cleared are left out: the medium has the host tier as well.
        """
        ports = [port for port in self.ports if port.medium in media and (port.medium != "CPU" or port.can_clear)]
        for port in ports:
            port.require_clear()
        return ports

    def clear(self, entries: Iterable[tuple[StorePort, Keys]]) -> Clearing:
        """Begin to delete entries; `finish` waits for the stores."""
        clearing = Clearing()
        with self.held():
            for port, keys in entries:
                port.note_listed(keys)
                if len(keys):
                    self._num_removals += 1
                    clearing.num_open += 1
                    port.remove(keys, partial(self._cleared, clearing, port, keys))
        return clearing

    def finish(self, clearing: Clearing) -> None:
        """Wait until the stores have answered, or another thread closes them; raise StoreError for entries kept."""
        while clearing.num_open and self._keep_ends_if_open():
            if clearing.num_open:
                self.wait(0.05)
        if clearing.num_open:  # a store that raised while it was closed
            clearing.failures.append(f"{clearing.num_open} stores were closed before they answered")
        if clearing.failures:
            raise StoreError(
                f"not all entries were deleted: {'; '.join(clearing.failures)}; everything else that was named is "
                "cleared: clear again later, or clear the store by its own tools"
            )

    def release_ended(self) -> None:
        """End the pins of all requests that have ended."""
        self._loads.release_ended()

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has something to do."""
        self._check_open()
        assert self._epoll is not None
        return self._epoll.fileno()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no batch is open, with polls; return False if `timeout` seconds pass first.

        The next `poll` returns the requests that end meanwhile.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._keep_ends()
            if self.is_at_rest:
                return True
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return False
            self.wait(0.05 if left is None else min(left, 0.05))

    def wait_for(self, request: Request, timeout: float | None, poll: Callable[[], object]) -> None:
        """Call `poll` until a request has ended, which no later poll returns, or `timeout` seconds have passed."""
        end = None if timeout is None else time.monotonic() + timeout
        while not request.has_ended:
            poll()
            left = 0.02 if end is None else min(end - time.monotonic(), 0.02)
            if request.has_ended or left <= 0:
                break
            self.wait(left)
        if request.has_ended:
            with self.held():
                self._unreturned = [one for one in self._unreturned if one is not request]

    def wait(self, timeout: float) -> None:
        """Wait until `poll` has something to do, `timeout` seconds at most."""
        epoll = self._epoll
        if epoll is not None:
            with suppress(ValueError, OSError):  # another thread has closed it
                epoll.poll(timeout)

    @property
    def is_at_rest(self) -> bool:
        """True if no request is open and no store has a batch."""
        return not self.num_pending and not self._loads.num_open

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
            busy = self._loads.num_batches + self._writer.num_batches + self._num_removals
            if busy != self.num_pending:
                raise PagecoreError(
                    f"inconsistent tiers: requests, copies and removals wait for {busy} batches, the stores have "
                    f"{self.num_pending}"
                )
            if not busy and self._writer.num_pins:
                raise PagecoreError(f"inconsistent tiers: {self._writer.num_pins} pins of copies without a batch")

    @property
    def num_leases(self) -> int:
        """Number of leases of the host that loads hold."""
        return self._loads.num_leases

    @property
    def num_pins(self) -> int:
        """Number of pins on the host that requests and copies hold."""
        return self._loads.num_pins + self._writer.num_pins

    def close(self, timeout: float = 5.0) -> None:
        """End all requests, wait up to `timeout` seconds for open batches, and close the stores; idempotent."""
        with self.held():
            if self._epoll is None:
                return
            self._loads.cancel_all()
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

    def device_tokens(self, request: Request, max_tokens: int) -> int:
        """Return the tokens of a request that the device has, up to `max_tokens`."""
        return self._cache.match_length(
            request.tokens, namespace=request.namespace, spans=request.spans, max_tokens=max_tokens
        )

    def keys(self, request: Request, lane: int, positions: Positions) -> Keys:
        """Return the content keys of entries of a request."""
        assert request.chain is not None
        return lane_keys(request.chain[positions], lane)

    # -- inside --------------------------------------------------------------------------------------------------

    def _close_epoll(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
        self._epoll = None

    def note_loaded(self, request: Request, start: int, sources: NDArray[np.int64]) -> None:
        """Note the store of each block from token `start` on that was loaded for a request; below 0 for none."""
        index = np.array([*(self.media.index(port.medium) for port in self.ports), HOST])
        end = start + len(sources) * self.planner.block_size
        self.loaded.note(request.tokens[:end], request, start, index[np.maximum(sources, -1)])

    def _chain(self, tokens: NDArray[np.int32], namespace: Hashable, spans: Spans | None) -> Keys:
        assert self._fingerprint is not None
        return content_chain(self._fingerprint, tokens, namespace=namespace, spans=spans)

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

    def _removed(self, port: StorePort, removal: Removal, ok: Flags, _error: str | None) -> None:
        self._num_removals -= 1
        gone = removal.marked(ok)
        port.note(removal.tokens, removal.namespace, removal.spans, gone, removal.keys, forgets=True)

    def _cleared(self, clearing: Clearing, port: StorePort, keys: Keys, ok: Flags, error: str | None) -> None:
        self._num_removals -= 1
        port.note_removed(keys[ok])
        clearing.end(port.store.name, ok, error)

    def _write(self, prefix: Prefix) -> int:
        tokens, spans = prefix.tokens[: prefix.stop], prefix.spans
        try:
            chain = self._chain(tokens, prefix.namespace, spans)
        except UnsupportedDtype:
            return 0
        longer = np.append(tokens, np.int32(0))  # a match leaves the last token out
        return self._writer.write(
            longer,
            prefix.namespace,
            spans,
            prefix.start // self.planner.block_size,
            lambda lane, places: lane_keys(chain[places], lane),
        )

    def _keep_ends(self) -> None:
        """Take the ends of batches; the next `poll` returns the requests that end with them."""
        with self.held():
            self._unreturned += self.take_ends()

    def _keep_ends_if_open(self) -> bool:
        """Take the ends of batches; return False if `close` has ended all of them."""
        with self.held():
            if self._epoll is None:
                return False
            self._keep_ends()
            return True

    def _settle(self) -> list[Request]:
        return self._loads.advance(self._clock())

    def _check_open(self) -> None:
        if self._epoll is None:
            raise UnsupportedOption("the tiers are closed; make new ones")
