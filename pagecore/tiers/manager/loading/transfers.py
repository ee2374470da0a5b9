"""Transfers of a load: chunks of entries that stores write to leased host blocks, published in the host in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from pagecore.tiers.manager.loading.chunks import Chunk
from pagecore.tiers.manager.loading.search import Search, Sources, note_found
from pagecore.tiers.manager.policy import Wanted, chunks_of
from pagecore.tiers.manager.port import Flags
from pagecore.tiers.manager.requests import Request
from pagecore.tiers.manager.surroundings import Surroundings
from pagecore.tiers.manager.tickets import StorePort

__all__ = ["HostTransfer", "Transfer"]


class Transfer(ABC):
    """Chunks of a load that stores fill, and their publication in order.

    The first chunk with an entry that has not arrived ends the prefix; later chunks are given back.
    """

    def __init__(self, around: Surroundings, request: Request, search: Search) -> None:
        self.around, self.request = around, request
        self._search = search
        self.chunks: list[Chunk] = []
        self.is_broken = False

    @property
    def is_open(self) -> bool:
        """True if host memory is leased, or will be."""
        return bool(self.chunks)

    @property
    def num_batches(self) -> int:
        """Number of loads that the stores have not ended."""
        return sum(chunk.num_open for chunk in self.chunks)

    def cancel(self) -> None:
        """Ask the stores for an early end of all batches."""
        self.stop()
        for chunk in self.chunks:
            chunk.cancel()

    def stop(self) -> None:  # noqa: B027
        """Begin nothing more."""

    def publish(self) -> None:
        """Publish the chunks that have ended, in order; give back those after a failure."""
        while not self.is_broken and self.chunks and not self.chunks[0].num_open:
            chunk = self.chunks.pop(0)
            if not self.take(chunk):
                self.is_broken = True
                self.stop()
                for later in self.chunks:
                    later.cancel()
        if self.is_broken:
            for chunk in [chunk for chunk in self.chunks if not chunk.num_open]:
                self.chunks.remove(chunk)
                self.drop(chunk)

    @abstractmethod
    def take(self, chunk: Chunk) -> bool:
        """Publish a chunk that has ended; return True if later chunks can follow it."""

    def drop(self, chunk: Chunk) -> None:
        """Give back a chunk that is not published."""
        chunk.give_back()

    def submit(self, chunk: Chunk) -> None:
        """Load the entries of a chunk, as one batch for each store."""
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
            chunk.open.discard(port.index)
            self.request.note(error)
            begin = 0
            there = [(np.empty(0, np.int64), np.empty(0, np.bool_)) for _ in chunk.positions]
            for lane, mine in picked:
                chunk.ok[lane][mine] = ok[begin : begin + len(mine)]
                there[lane] = chunk.positions[lane][mine], chunk.ok[lane][mine]
                begin += len(mine)
            note_found(port, self.request, there, error, partial(self.around.keys, self.request))

        chunk.open.add(port.index)
        wanted = np.concatenate(keys)
        ticket = port.load(wanted, np.ascontiguousarray(np.concatenate(pieces)), ended)
        if ticket is None:  # the holds end with a load, which there is not
            port.unlock(wanted)
        chunk.tickets.append((port, ticket))


class HostTransfer(Transfer):
    """A load whose entries are published in the tree of the host.

    Parameters
    ----------
    adopted : callable
        Called after a chunk was published.
    """

    def __init__(self, around: Surroundings, request: Request, search: Search, adopted: Callable[[], None]) -> None:
        super().__init__(around, request, search)
        self._adopted = adopted

    def reserve(self, wanted: Wanted, sources: Sources) -> int:
        """Take host memory for all chunks of a prefix, or for none; return the tokens for which there was memory."""
        size = self.around.planner.block_size
        missing = [lane[source[lane] >= 0] for lane, source in zip(wanted.positions, sources, strict=True)]
        for begin, end in chunks_of(missing, self.around.host.payload_bytes, self.around.chunk_bytes):
            positions = [lane[(lane >= begin) & (lane < end)] for lane in missing]
            lease = self.around.host.reserve(positions)
            if lease is None:
                for chunk in self.chunks:
                    chunk.give_back()
                self.chunks.clear()
                return begin * size
            self.chunks.append(Chunk(end * size, lease, positions))
        return wanted.num_tokens

    def begin(self, sources: Sequence[np.ndarray]) -> None:
        """Load all chunks."""
        for chunk in self.chunks:
            self._search.choose(chunk.positions, sources)
            self.submit(chunk)

    def take(self, chunk: Chunk) -> bool:
        """Publish what has arrived of a chunk in the host; return True if that is everything."""
        request, lease = self.request, chunk.lease
        assert lease is not None
        chunk.lease = None
        self.around.host.adopt(
            lease, request.tokens[: chunk.end], namespace=request.namespace, spans=request.spans, ok=chunk.ok
        )
        self._adopted()
        return chunk.is_whole
