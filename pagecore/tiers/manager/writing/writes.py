"""Copies of host entries to the stores."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pagecore.tiers.manager.policy import chunks_of
from pagecore.tiers.manager.port import Flags, HostSide, Positions, Releasable, Spans, StagedBlocks
from pagecore.tiers.manager.tickets import StorePort
from pagecore.tiers.manager.writing.unsaved import Unsaved
from pagecore.tiers.store import Keys, Pieces

__all__ = ["Writer", "Written"]


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A prefix whose entries are written.

    Attributes
    ----------
    keys : callable
        Returns the content keys of entries, for a lane and positions.
    """

    tokens: NDArray[np.int32]
    namespace: Hashable
    spans: Spans | None
    keys: Callable[[int, Positions], Keys]


class Writer:
    """Writes entries of the host to every store, and pins them until each store has read its copy.

    Parameters
    ----------
    host : HostSide
    ports : sequence of StorePort
        Those that take no entries are passed over.
    num_groups : int
        Lanes that are not of states.
    chunk_bytes : int
        A batch has about `chunk_bytes` bytes.
    clock : callable
        Returns the time in seconds.
    """

    def __init__(
        self,
        host: HostSide,
        ports: Sequence[StorePort],
        num_groups: int,
        chunk_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._ports = [port for port in ports if port.takes_entries]
        self._unsaved = {port: Unsaved(clock) for port in self._ports}
        self._num_groups = num_groups
        self._chunk_bytes = chunk_bytes
        # Batches that the stores have not ended, of each prefix that is pinned for them.
        self._open: dict[Releasable, set[object]] = {}
        # Calls at the ends of writes in several batches.
        self._touches: dict[Releasable, Callable[[], None]] = {}

    @property
    def has_ports(self) -> bool:
        """True if a store takes entries."""
        return bool(self._ports)

    @property
    def num_pins(self) -> int:
        """Number of prefixes and streamed parts that are pinned while stores read them."""
        return len(self._open)

    @property
    def num_batches(self) -> int:
        """Number of batches that the stores have not ended."""
        return sum(map(len, self._open.values()))

    @property
    def has_unsaved(self) -> bool:
        """True if a store has failed to take entries, and did not take them later."""
        return any(self._unsaved.values())

    def write(
        self,
        tokens: NDArray[np.int32],
        namespace: Hashable,
        spans: Spans | None,
        start: int,
        keys: Callable[[int, Positions], Keys],
    ) -> int:
        """Write the entries from `start` on of a prefix that the host has; return their number.

        Parameters
        ----------
        tokens : ndarray of int32
            The prefix, and at least one token more.
        namespace, spans
            As for `PagedKVCache.add_sequence`.
        start : int
            Number of blocks whose entries were written before. The deepest state is written in any case.
        keys : callable
            Returns the content keys of entries, for a lane and positions.
        """
        if not self._ports:
            return 0
        if start and self.has_unsaved:
            self.write_again(tokens, namespace, spans, keys, start)
        reader = self._host.hold(tokens, namespace=namespace, spans=spans, max_tokens=len(tokens) - 1)
        lanes = [reader.entries(lane) for lane in range(len(self._host.payload_bytes))]
        is_new = [(places >= start) | (lane >= self._num_groups) for lane, (places, _) in enumerate(lanes)]
        return self._submit(reader, Written(tokens, namespace, spans, keys), lanes, is_new, self._ports)

    def write_again(
        self,
        tokens: NDArray[np.int32],
        namespace: Hashable,
        spans: Spans | None,
        keys: Callable[[int, Positions], Keys],
        stop: int,
    ) -> None:
        """Write the entries of a prefix before block `stop` that a store has not taken, and that the host has."""
        for port, unsaved in self._unsaved.items():
            if not unsaved:
                continue
            reader = self._host.hold(tokens, namespace=namespace, spans=spans, max_tokens=len(tokens) - 1)
            lanes = [reader.entries(lane) for lane in range(len(self._host.payload_bytes))]
            is_due = [unsaved.due(keys(lane, places)) & (places < stop) for lane, (places, _) in enumerate(lanes)]
            self._submit(reader, Written(tokens, namespace, spans, keys), lanes, is_due, [port])

    def copy(
        self,
        tokens: NDArray[np.int32],
        namespace: Hashable,
        spans: Spans | None,
        wanted: Sequence[Positions],
        keys: Callable[[int, Positions], Keys],
        port: StorePort,
    ) -> int:
        """Write the entries at the `wanted` positions of each lane to one store; the host may lack some."""
        reader = self._host.hold(tokens, namespace=namespace, spans=spans)
        lanes = [reader.entries(lane) for lane in range(len(wanted))]
        is_wanted = [np.isin(places, chosen) for (places, _), chosen in zip(lanes, wanted, strict=True)]
        return self._submit(reader, Written(tokens, namespace, spans, keys), lanes, is_wanted, [port])

    def stream(
        self,
        reader: Releasable,
        prefix: Written,
        blocks: StagedBlocks,
        before: Sequence[int],
        answered: Callable[[Flags], None],
    ) -> int:
        """Write leased blocks to every store, and release `reader` when each store has read them; return their number.

        Parameters
        ----------
        before : sequence of int
            For each lane the position of the entry that the first one follows, below 0 for none.
        answered : callable
            ``answered(ok)`` is called with the answer of each store.
        """
        lanes, is_new = [], []
        for lane, positions in enumerate(blocks.positions):
            follows = np.arange(before[lane], before[lane] + (before[lane] >= 0))
            none = np.zeros((len(follows), 2), np.uint64)
            lanes.append((np.concatenate([follows, positions]), np.concatenate([none, blocks.pieces(lane)])))
            is_new.append(np.arange(len(follows) + len(positions)) >= len(follows))
        return self._submit(reader, prefix, lanes, is_new, self._ports, answered)

    def _submit(
        self,
        reader: Releasable,
        prefix: Written,
        lanes: Sequence[tuple[Positions, Pieces]],
        is_chosen: Sequence[Flags],
        ports: Sequence[StorePort],
        answered: Callable[[Flags], None] | None = None,
    ) -> int:
        self._open[reader] = {reader}  # for this call
        try:
            return self._submit_chunks(reader, prefix, lanes, is_chosen, ports, answered)
        finally:
            self._ended(reader, reader)

    def _submit_chunks(
        self,
        reader: Releasable,
        prefix: Written,
        lanes: Sequence[tuple[Positions, Pieces]],
        is_chosen: Sequence[Flags],
        ports: Sequence[StorePort],
        answered: Callable[[Flags], None] | None,
    ) -> int:
        """Submit the chosen entries of each lane in batches; return their number."""
        positions = [places[mask] for (places, _), mask in zip(lanes, is_chosen, strict=True)]
        pieces = [where[mask] for (_, where), mask in zip(lanes, is_chosen, strict=True)]
        count = sum(map(len, positions))
        chunks = chunks_of(positions, self._host.payload_bytes, self._chunk_bytes) if count else []
        for begin, end in chunks:
            picked = [(lane >= begin) & (lane < end) for lane in positions]
            entries = np.concatenate([prefix.keys(lane, positions[lane][mine]) for lane, mine in enumerate(picked)])
            memory = np.concatenate([where[mine] for where, mine in zip(pieces, picked, strict=True)])
            chosen = [lane[mine] for lane, mine in zip(positions, picked, strict=True)]
            listed = [_before(prefix, lane, lanes[lane][0], each) for lane, each in enumerate(chosen)]
            before = np.concatenate(listed)
            for port in ports:
                batch = port, begin
                ended = partial(self._saved, reader, batch, prefix, chosen, entries, answered)
                self._open[reader].add(batch)
                port.save(entries, memory, ended, before)
        if len(chunks) > 1:
            self._touches[reader] = partial(_touch_all, prefix, positions, ports)
        return count

    def _saved(
        self,
        reader: Releasable,
        batch: tuple[StorePort, int],
        prefix: Written,
        positions: Sequence[Positions],
        entries: Keys,
        answered: Callable[[Flags], None] | None,
        ok: Flags,
        _error: str | None,
    ) -> None:
        port, _ = batch
        if answered is None:  # what streams is not in the host
            self._unsaved[port].note(entries, ok)
        there = np.split(ok, np.cumsum([len(lane) for lane in positions])[:-1])
        listed = list(zip(positions, there, strict=True))
        port.note(prefix.tokens, prefix.namespace, prefix.spans, listed, prefix.keys, forgets=False)
        if answered is not None:
            answered(ok)
        self._ended(reader, batch)

    def _ended(self, reader: Releasable, batch: object) -> None:
        batches = self._open.get(reader)
        if batches is None:  # an interrupt came after the last end
            return
        batches.discard(batch)
        if not batches:
            del self._open[reader]
            reader.release()
            if (touch := self._touches.pop(reader, None)) is not None:
                touch()


def _before(prefix: Written, lane: int, places: Positions, chosen: Positions) -> Keys:
    """Return the key of the entry before the first chosen one of a lane, among those that the host has."""
    count = int(np.searchsorted(places, chosen[0])) if len(chosen) else 0
    return prefix.keys(lane, places[max(count - 1, 0) : count])


def _touch_all(prefix: Written, positions: Sequence[Positions], ports: Sequence[StorePort]) -> None:
    """Let the beginning of a prefix count as used last: its batches were written from the beginning to the end."""
    for port in ports:
        if port.can_touch:
            for lane, places in enumerate(positions):
                port.touch(prefix.keys(lane, places))
