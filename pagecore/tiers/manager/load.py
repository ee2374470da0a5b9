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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.manager.chunks import Chunk
from pagecore.tiers.manager.policy import Wanted, chunks_of
from pagecore.tiers.manager.port import Flags, Reader
from pagecore.tiers.manager.requests import Request
from pagecore.tiers.manager.search import Search, note_found
from pagecore.tiers.manager.surroundings import Surroundings
from pagecore.tiers.manager.tickets import StorePort


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
        self._pin: Reader | None = self._pinned()
        self._search = Search(around, request)
        self._chunks: list[Chunk] = []
        self._is_broken = False
        self._waits_for: Load | None = None
        request.load = self
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
        return self.request.has_ended and not self._chunks

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
        if self._pin is not None:
            longer = self._pinned()
            self._pin.release()
            self._pin = longer
        self._look()
        if self.is_expired or self._pin is None:
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
        return self._search.num_unanswered == 0 and not self._chunks

    def offer(self) -> int | None:
        """Return the tokens with which the stage can end, up to `cap`; None if it has to continue."""
        self.publish()
        if self.request.state == "searching":
            return None if self._waits_for is not None else self._offer_of_search()
        if self.request.state == "loading" and (self.is_expired or not self._chunks):
            return self._reach()
        return None

    def _offer_of_search(self) -> int | None:
        if self._search.has_ended or self.is_expired:
            return self._reach()
        sources, is_settled = self._search.assigned()
        if not is_settled:
            return None
        return max(self._search.longest(sources, self.cap).num_tokens, self._reach())

    def settle(self, num_tokens: int) -> bool:
        """End the stage with a prefix of `num_tokens` tokens; return True if the request has ended with it."""
        request = self.request
        if request.state == "searching":
            request.num_found_tokens = num_tokens
            if not self._search.has_ended:
                self._choose(num_tokens)
            if self._chunks or self.around.agrees:  # ranks end both stages together
                request.state = "loading"
                return False
            num_tokens = self._reach()
        request.num_tokens = num_tokens
        request.state = "late" if self.is_expired else "ready"
        self._count_loaded()
        return True

    def expire(self) -> None:
        """End the wait: the stage ends with what there is."""
        self.is_expired = True

    def cancel(self) -> None:
        """End the wait, and ask the stores for an early end of all batches."""
        with self.around.held():
            self.expire()
            self._search.cancel()
            for chunk in self._chunks:
                chunk.cancel()

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
        return self._search.num_unanswered + sum(chunk.num_open for chunk in self._chunks)

    @property
    def num_leases(self) -> int:
        """Number of chunks whose memory belongs to stores."""
        return len(self._chunks)

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
            while wanted.num_tokens > self._usable(self.cap):
                end = self._reserve(wanted, sources)
                if end >= wanted.num_tokens:
                    self._submit_all(sources)
                    break
                wanted = self._search.longest(sources, end)
        self._search.end()

    def _reserve(self, wanted: Wanted, sources: Sequence[NDArray[np.int64]]) -> int:
        """Take host memory for all chunks of a prefix, or for none; return the tokens for which there was memory."""
        size = self.around.planner.block_size
        missing = [lane[source[lane] >= 0] for lane, source in zip(wanted.positions, sources, strict=True)]
        for begin, end in chunks_of(missing, self.around.host.payload_bytes, self.around.chunk_bytes):
            positions = [lane[(lane >= begin) & (lane < end)] for lane in missing]
            lease = self.around.host.reserve(positions)
            if lease is None:
                for chunk in self._chunks:
                    chunk.give_back()
                self._chunks.clear()
                return begin * size
            self._chunks.append(Chunk(end * size, lease, positions))
        return wanted.num_tokens

    def _submit_all(self, sources: Sequence[NDArray[np.int64]]) -> None:
        for chunk in self._chunks:
            self._search.choose(chunk.positions, sources)
            for port in self.around.ports:
                self._submit(chunk, port)

    def _submit(self, chunk: Chunk, port: StorePort) -> None:
        """Load the entries of a chunk that come from one store, as one batch."""
        assert chunk.lease is not None
        keys, pieces, picked = [], [], []
        for lane, positions in enumerate(chunk.positions):
            mine = np.flatnonzero(self._search.chosen[lane][positions] == port.index)
            if len(mine):
                keys.append(self.around.keys(self.request, lane, positions[mine]))
                pieces.append(chunk.lease.pieces(lane)[mine])
                picked.append((lane, mine))
        if not keys:
            return

        def ended(ok: Flags, error: str | None) -> None:
            chunk.num_open -= 1
            self.request.note(error)
            begin = 0
            there = [(np.empty(0, np.int64), np.empty(0, np.bool_)) for _ in chunk.positions]
            for lane, mine in picked:
                chunk.ok[lane][mine] = ok[begin : begin + len(mine)]
                there[lane] = chunk.positions[lane][mine], chunk.ok[lane][mine]
                begin += len(mine)
            note_found(port, self.request, there, error, partial(self.around.keys, self.request))

        chunk.num_open += 1
        wanted = np.concatenate(keys)
        ticket = port.load(wanted, np.ascontiguousarray(np.concatenate(pieces)), ended)
        if ticket is None:  # the holds end with a load, which there is not
            port.unlock(wanted)
        chunk.tickets.append((port, ticket))

    def publish(self) -> None:
        """Publish the chunks that have ended, in order; give back those after a failure."""
        if self._is_broken:
            for chunk in [chunk for chunk in self._chunks if not chunk.num_open]:
                chunk.give_back()
                self._chunks.remove(chunk)
            return
        while self._chunks and not self._chunks[0].num_open:
            chunk = self._chunks.pop(0)
            is_whole = chunk.is_whole
            self._adopt(chunk)
            if not is_whole:
                self._is_broken = True
                for later in self._chunks:
                    later.cancel()
                self.publish()
                return

    def _adopt(self, chunk: Chunk) -> None:
        request, lease = self.request, chunk.lease
        assert lease is not None
        chunk.lease = None
        self.around.host.adopt(
            lease, request.tokens[: chunk.end], namespace=request.namespace, spans=request.spans, ok=chunk.ok
        )
        if self._pin is not None:  # not released by the caller
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
        first, last = request.num_host_tokens // size, min(request.num_tokens, self._usable(self.cap)) // size
        sources = self._search.farthest(first, last)
        for port in self.around.ports:
            if count := int((sources == port.index).sum()):
                request.loaded_tokens[port.medium] = request.loaded_tokens.get(port.medium, 0) + count * size
        if (sources >= 0).any():
            self.around.note_loaded(request, first * size, sources)
