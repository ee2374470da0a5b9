"""Search and load of a request.

States of a request: searching -> loading -> ready, and from both of the first to late at the deadline.

Q1: A request leaves `searching` when the stores whose answers matter have answered, or at its deadline.
Q2: Host memory is taken after the look-up, in chunks; a chunk belongs to the stores until all its batches have ended.
Q3: Chunks are published in order, after verification. The first entry that fails ends the prefix; chunks after it are
    given back.
Q4: The prefix that the host has is pinned from the beginning of the search until the request is released.
Q5: A request that lacks a block which an older one searches or loads waits until that one has ended, if both ask one
    store. It then searches, unless yet another one does; a block that the stores did not have is searched by all who
    waited and ask no other store, at once.
Q6: What arrives after the deadline is published when it arrives; the request is retired when nothing is open.
Q7: A prefix for which the host has no room goes in windows to the device, which then has it; see `windows`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.manager.loading.search import Search, Sources
from pagecore.tiers.manager.loading.transfers import HostTransfer, Transfer
from pagecore.tiers.manager.loading.windows import DeviceTransfer, fitting, plan_windows
from pagecore.tiers.manager.policy import Wanted
from pagecore.tiers.manager.port import Reader
from pagecore.tiers.manager.requests import Request
from pagecore.tiers.manager.surroundings import Surroundings


class Load:
    """The search and the load of one request.

    Parameters
    ----------
    around : Surroundings
    request : Request
    """

    def __init__(self, around: Surroundings, request: Request) -> None:
        self.around = around
        self.request = request
        self.cap = request.max_tokens
        self.is_expired = False
        self._pin: Reader | None = None
        self._search = Search(around, request)
        self._transfer: Transfer | None = None
        self._waits_for: Load | None = None
        request.load = self
        self._pin = self._pinned()
        self._look()

    def _look(self) -> None:
        """Note what host and device have."""
        request = self.request
        request.num_host_tokens = self._usable(request.max_tokens)
        request.num_device_tokens = self.around.device_tokens(request, request.max_tokens)
        request.num_tokens = self._reach()

    # -- search --------------------------------------------------------------------------------------------------

    def lacks_what(self, other: Load) -> bool:
        """Return True if another request searches or loads the first block that this one lacks, in a store of both."""
        block = self._first_missing
        own, chain = self.request.chain, other.request.chain
        if not other.request.loads or other.has_ended or own is None or chain is None:
            return False
        if not block < min(self._search.num_blocks, len(chain)) or not self._asked & other._asked:
            return False
        return bool((own[block] == chain[block]).all())

    @property
    def _first_missing(self) -> int:
        return self.request.num_host_tokens // self.around.planner.block_size

    @property
    def _asked(self) -> set[int]:
        return {port.index for port in self._search.asked}

    @property
    def has_ended(self) -> bool:
        """True if nothing is searched or loaded any more; look-ups may still be open."""
        return self.request.has_ended and not self._is_loading

    def wait_for(self, other: Load) -> None:
        """Search after another request has ended, instead of now."""
        self._waits_for = other

    @property
    def is_waiting(self) -> bool:
        """True while the request waits for another one."""
        return self._waits_for is not None

    @property
    def can_wake(self) -> bool:
        """True if the request need not wait longer: the request before it has ended, or its deadline has passed."""
        return self._waits_for is not None and (self._waits_for.has_ended or self.is_expired)

    def wake(self, leader_of: Callable[[Load], Load | None]) -> None:
        """End the wait: search, or wait for another request that searches or loads what is missing."""
        other, self._waits_for = self._waits_for, None
        assert other is not None
        self._pin_again()
        self._look()
        if self.is_expired or self._pin is None:
            self._search.skip()
            return
        has_missed = self._asked <= other._asked and other.has_missed(self._first_missing)
        self._waits_for = None if has_missed else leader_of(self)
        if self._waits_for is None:
            self.search()

    def has_missed(self, block: int) -> bool:
        """Return True if the stores did not have a block: those that wait for it then search at once, all of them."""
        return self.request.state == "ready" and not self._is_broken and block < self._search.num_blocks

    def search(self) -> None:
        """Look the missing entries up in every store, one batch each, unless too few tokens are missing."""
        there = max(self.request.num_host_tokens, self.request.num_device_tokens)
        missing = self._search.num_blocks * self.around.planner.block_size - there
        is_little = missing < self.around.min_tokens and self.request.loads and not self.around.agrees
        if missing <= 0 or not self.around.ports or is_little:
            self._search.skip()
            return
        assert self._pin is not None
        self._search.begin(self._pin)

    # -- what the stage could end with ---------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True if no store holds memory or entries for the request."""
        return self._search.num_unanswered == 0 and not self._is_loading

    def offer(self) -> int | None:
        """Return the tokens with which the stage can end, up to `cap`; None if it has to continue."""
        self.publish()
        if self.request.state == "searching":
            return None if self._waits_for is not None else self._offer_of_search()
        if self.request.state == "loading" and (self.is_expired or not self._is_loading):
            return self._reach()
        return None

    def _offer_of_search(self) -> int | None:
        if self._search.has_ended or self.is_expired:
            return self._reach()
        sources, is_settled = self._search.assigned()
        if not is_settled:
            return None
        return max(self._search.longest(sources, self.cap).num_tokens, self._reach())

    def settle(self, num_tokens: int) -> None:
        """End the stage with a prefix of `num_tokens` tokens, and the request with its last stage."""
        request = self.request
        if request.state == "searching":
            request.num_found_tokens = num_tokens
            if not self._search.has_ended:
                if request.error is None and not self.is_expired:
                    self.around.note_found(request, self._search.num_connected())
                self._choose(num_tokens)
            if self._is_loading or self.around.agrees:  # ranks end both stages together
                request.state = "loading"
                return
            num_tokens = self._reach()
        request.num_tokens = num_tokens
        if self._transfer is not None:
            self._transfer.stop()
        self._count_loaded()
        request.state = "late" if self.is_expired else "ready"  # last: after an interrupt the stage ends again

    def expire(self) -> None:
        """End the wait: the stage ends with what there is."""
        self.is_expired = True

    def cancel(self) -> None:
        """End the wait, and ask the stores for an early end of all batches."""
        with self.around.held():
            self.expire()
            self._search.cancel()
            if self._transfer is not None:
                self._transfer.cancel()

    def sources(self, lane: int) -> NDArray[np.int64]:
        """Return the index of the store from which each entry of a lane was loaded; below 0 for none."""
        return self._search.chosen[lane]

    @property
    def is_pinned(self) -> bool:
        """True if the load pins a prefix in the host."""
        return self._pin is not None

    @property
    def num_batches(self) -> int:
        """Number of look-ups and loads that the stores have not ended."""
        return self._search.num_unanswered + (self._transfer.num_batches if self._transfer is not None else 0)

    @property
    def num_leases(self) -> int:
        """Number of chunks whose memory belongs to stores."""
        return 0 if self._transfer is None else len(self._transfer.chunks)

    def release(self) -> None:
        """End the pin on the prefix in the host."""
        with self.around.held():  # a poll of another thread may be replacing the pin
            if self._pin is not None:
                self._pin.release()
                self._pin = None

    # -- load ----------------------------------------------------------------------------------------------------

    def _choose(self, num_tokens: int) -> None:
        """Begin to load a prefix, release the holds of all entries that are not loaded, and end the search."""
        sources, _ = self._search.assigned()
        gained = num_tokens - self._reach()
        is_wanted = self.request.loads and not self.is_expired
        if is_wanted and gained > 0 and (gained >= self.around.min_tokens or self.around.agrees):
            wanted = self._search.longest(sources, num_tokens)
            fits = fitting(self.around, wanted, sources) if self.around.can_stream else wanted.num_tokens
            if fits < wanted.num_tokens:
                wanted = self._search.longest(sources, 0 if self._stream(wanted, sources, fits) else fits)
            while wanted.num_tokens > self._usable(self.cap):
                host = HostTransfer(self.around, self.request, self._search, self._pin_again)
                end = host.reserve(wanted, sources)
                if end >= wanted.num_tokens:
                    self._transfer = host
                    host.begin(sources)
                    break
                wanted = self._search.longest(sources, end)
        self._search.end()

    def _stream(self, wanted: Wanted, sources: Sources, fits: int) -> bool:
        """Begin to load a prefix to the device, if that has room for more than the host; return False if not."""
        windows = plan_windows(self.around, self.request, self._search, wanted, sources, fits)
        if windows is None or not windows.begin(sources):
            return False
        self._transfer = windows
        return True

    def publish(self) -> None:
        """Publish what has arrived, in order."""
        if self._transfer is not None:
            self._transfer.publish()

    @property
    def _is_loading(self) -> bool:
        return self._transfer is not None and self._transfer.is_open

    @property
    def _is_broken(self) -> bool:
        return self._transfer is not None and self._transfer.is_broken

    def _pin_again(self) -> None:
        """Pin what the host has now, unless the caller has released the prefix."""
        if self._pin is not None:
            longer = self._pinned()
            self._pin.release()
            self._pin = longer

    # -- inside --------------------------------------------------------------------------------------------------

    def _pinned(self) -> Reader:
        request = self.request
        return self.around.host.hold(
            request.tokens, namespace=request.namespace, spans=request.spans, max_tokens=request.max_tokens
        )

    def _usable(self, most: int) -> int:
        """Return the tokens that the host can promote."""
        request = self.request
        return self.around.host.match(request.tokens, namespace=request.namespace, spans=request.spans, max_tokens=most)

    def _reach(self) -> int:
        """Return the tokens that host or device have, up to `cap`."""
        return max(self._usable(self.cap), self.around.device_tokens(self.request, self.cap))

    def _count_loaded(self) -> None:
        """Count the tokens of the request that came from each medium."""
        request, size = self.request, self.around.planner.block_size
        is_streamed = isinstance(self._transfer, DeviceTransfer)
        there = self.around.device_tokens(request, self.cap) if is_streamed else self._usable(self.cap)
        first, last = request.num_host_tokens // size, min(request.num_tokens, there) // size
        sources = self._search.farthest(first, last)
        loaded: Counter[str] = Counter()
        for port in self.around.ports:
            if count := int((sources == port.index).sum()):
                loaded[port.medium] += count * size
        request.loaded_tokens = dict(loaded)
        if (sources >= 0).any():
            self.around.note_loaded(request, first * size, sources, is_streamed=is_streamed)
