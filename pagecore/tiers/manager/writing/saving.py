"""Writes to the stores of a cache with tiers: of what the host has and of what passes through it, and deletions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import UnsupportedDtype
from pagecore.tiers.keys import Fingerprint, content_chain, lane_keys
from pagecore.tiers.manager.policy import PrefixPlanner
from pagecore.tiers.manager.port import Positions, Prefix, Spans, StreamHost
from pagecore.tiers.manager.stats import StreamStats
from pagecore.tiers.manager.surroundings import Slots
from pagecore.tiers.manager.tickets import StorePort
from pagecore.tiers.manager.writing.deletions import Deletions
from pagecore.tiers.manager.writing.removal import Clearing, Removal
from pagecore.tiers.manager.writing.stream_parts import Passed, StreamedPrefix
from pagecore.tiers.manager.writing.streams import Streams
from pagecore.tiers.manager.writing.waiting import StoreWaits
from pagecore.tiers.manager.writing.writes import Writer
from pagecore.tiers.store import Keys, Medium

__all__ = ["StoreWrites"]


class StoreWrites(StoreWaits):
    """Base class of `StoreSide`: the part of it that writes to stores and deletes from them.

    Parameters
    ----------
    host : StreamHost
    ports : tuple of StorePort
    fingerprint : Fingerprint or None
    planner : PrefixPlanner
    chunk_bytes, num_slots, num_origins, flush, clock
        As for `StoreSide`.
    num_groups : int
        Lanes that are not of states.
    """

    def __init__(
        self,
        host: StreamHost,
        ports: tuple[StorePort, ...],
        fingerprint: Fingerprint | None,
        planner: PrefixPlanner,
        *,
        chunk_bytes: int,
        num_groups: int,
        num_slots: int,
        num_origins: int,
        flush: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(ports)
        self.host, self.planner, self.chunk_bytes = host, planner, chunk_bytes
        self._fingerprint = fingerprint
        self._touched = [port for port in ports if port.can_touch]
        self._writer = Writer(host, ports, num_groups, chunk_bytes, clock)
        self._deletions = Deletions(ports)
        self.slots = Slots(num_slots)
        self._passed = Passed(planner.block_size, num_origins)
        self._streams = Streams(
            host,
            self._writer,
            full_lanes=planner.full_lanes,
            block_size=planner.block_size,
            num_slots=num_slots if self.can_stream else 0,
            known=self._passed,
            keys_of=self._keys_of,
            flush=flush,
            ended=self._stream_ended,
        )

    @property
    def can_stream(self) -> bool:
        """True if prefixes can pass through the host."""
        return self.slots.most > 0 and self.host.can_stream

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

    def stream(self, owner: Hashable, prefix: StreamedPrefix, num_host_tokens: int, version: int) -> None:
        """Write the blocks of a prefix for which the host had no room to the stores, through leased host blocks."""
        with self.held():
            self._streams.offer(owner, prefix, num_host_tokens, version)

    @property
    def streams(self) -> Streams:
        """The streams to the stores."""
        return self._streams

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
        places = np.arange(begin, len(tokens) // self.planner.block_size)
        with self.held():
            self._passed.forget()
            if not self._deletions.is_possible or not len(places):
                return
            try:
                chain = self._chain(tokens, namespace, spans)
            except UnsupportedDtype:
                return
            self._deletions.remove(Removal(tokens, namespace, spans, chain, places, len(self.host.payload_bytes)))

    def ports_to_clear(self, media: frozenset[Medium]) -> list[StorePort]:
        """Return the stores of some media; raise UnsupportedOption if one cannot be cleared, StoreError if not now."""
        return self._deletions.ports_to_clear(media)

    def clear(self, entries: Iterable[tuple[StorePort, Keys]]) -> Clearing:
        """Begin to delete entries; `finish` waits for the stores."""
        with self.held():
            self._passed.forget()
            return self._deletions.clear(entries)

    def stream_stats(self) -> StreamStats:
        """Return the counters of what passes through the host."""
        with self.held():
            stats, slots = self._streams.stats(), self.slots
            return replace(
                stats,
                num_loaded_blocks=slots.num_blocks,
                bytes_loaded=slots.num_bytes,
                num_leased_blocks=stats.num_leased_blocks + slots.used,
            )

    # -- inside --------------------------------------------------------------------------------------------------

    def _chain(self, tokens: NDArray[np.int32], namespace: Hashable, spans: Spans | None) -> Keys:
        assert self._fingerprint is not None
        return content_chain(self._fingerprint, tokens, namespace=namespace, spans=spans)

    def _keys_of(self, prefix: StreamedPrefix) -> Callable[[int, Positions], Keys]:
        chain = self._chain(prefix.tokens, prefix.namespace, prefix.spans)
        return lambda lane, places: lane_keys(chain[places], lane)

    def _stream_ended(self, prefix: StreamedPrefix) -> None:
        """Let the beginning of a prefix count as used last: its windows were written from the beginning to the end."""
        if self.counts_uses:
            self.touch(prefix.tokens, prefix.namespace, prefix.spans)

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
