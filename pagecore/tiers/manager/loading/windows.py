"""Loads of prefixes for which the host has no room: windows of entries pass through leased host blocks to the device.

W1: A window is published on the device after all windows before it, so that what is there can be reused at any time.
W2: All loads together lease at most `Slots.most` blocks of a prefix's length at a time; a window alone may have more.
W3: The stores hold the entries of windows that were not submitted; `stop` releases these holds.
W4: Nothing on the device is pinned: what a step needs it evicts, and the load then ends with what is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from pagecore.errors import PagecoreError
from pagecore.tiers.manager.loading.chunks import Chunk
from pagecore.tiers.manager.loading.search import Search, Sources
from pagecore.tiers.manager.loading.transfers import Transfer
from pagecore.tiers.manager.policy import Wanted, chunks_of
from pagecore.tiers.manager.port import Positions
from pagecore.tiers.manager.requests import Request
from pagecore.tiers.manager.surroundings import Surroundings

__all__ = ["DeviceTransfer", "fitting", "plan_windows"]

# Windows into which the leased blocks are divided: some are loaded while others are copied.
NUM_WINDOWS = 4


class DeviceTransfer(Transfer):
    """A load whose entries are published on the device, window after window; `plan_windows` makes it."""

    def __init__(
        self, around: Surroundings, request: Request, search: Search, windows: Sequence[tuple[int, list[Positions]]]
    ) -> None:
        super().__init__(around, request, search)
        self._waiting = deque(windows)

    @property
    def is_open(self) -> bool:
        """True if host memory is leased, or will be."""
        return bool(self.chunks or self._waiting)

    def begin(self, sources: Sources) -> bool:
        """Submit the first windows; return False, with nothing changed, if the host has no memory for one."""
        for _, positions in self._waiting:
            self._search.choose(positions, sources)
        self.fill()
        if not self.chunks:
            for _, positions in self._waiting:
                self._search.reject(positions)
            self._waiting.clear()
        return bool(self.chunks)

    def fill(self) -> None:
        """Submit windows while there are leased blocks for them; stop if there will be none."""
        slots = self.around.slots
        while self._waiting and not self.is_broken:
            end, positions = self._waiting[0]
            count = _length(positions)
            if slots.used and slots.used + count > slots.most:
                return
            lease = self.around.host.reserve(positions)
            if lease is None:
                if not (self.chunks or slots.used or self.around.host.is_copying):
                    self.stop()
                return
            self._waiting.popleft()
            slots.used += count
            chunk = Chunk(end * self.around.planner.block_size, lease, positions)
            self.chunks.append(chunk)
            self.submit(chunk)

    def publish(self) -> None:
        """Publish the windows that have ended, and submit the next ones."""
        super().publish()
        self.fill()

    def take(self, chunk: Chunk) -> bool:
        """Publish what has arrived of a window on the device; return True if that is everything."""
        request, lease = self.request, chunk.lease
        assert lease is not None
        chunk.lease = None
        self.around.slots.used -= _length(chunk.positions)
        try:
            reached = self.around.host.deliver(
                lease, request.tokens[: chunk.end], namespace=request.namespace, spans=request.spans, ok=chunk.ok
            )
        except PagecoreError:  # counted by the host tier
            return False
        if reached < chunk.end or not chunk.is_whole:
            return False
        self.around.slots.num_blocks += _length(chunk.positions)
        self.around.slots.num_bytes += sum(
            len(lane) * size for lane, size in zip(chunk.positions, self.around.host.payload_bytes, strict=True)
        )
        return True

    def drop(self, chunk: Chunk) -> None:
        """Give back a window that is not published."""
        self.around.slots.used -= _length(chunk.positions)
        chunk.give_back()

    def stop(self) -> None:
        """Submit no more windows, and release the holds of their entries."""
        while self._waiting:
            _, positions = self._waiting.popleft()
            for port in self.around.ports:
                mine = [
                    lane[chosen[lane] == port.index]
                    for lane, chosen in zip(positions, self._search.chosen, strict=True)
                ]
                keys = [self.around.keys(self.request, lane, each) for lane, each in enumerate(mine) if len(each)]
                if keys:
                    port.unlock(np.concatenate(keys))
            self._search.reject(positions)


def plan_windows(
    around: Surroundings, request: Request, search: Search, wanted: Wanted, sources: Sources, fits: int
) -> DeviceTransfer | None:
    """Return a load to the device, if that has room for more of a prefix than `fits` tokens, those of the host.

    What the host has of the prefix is promoted for it.
    """
    size = around.planner.block_size
    room = around.host.device_room()
    device = around.device_tokens(request, request.max_tokens)
    reach = max(min(room[lane] for lane in around.planner.full_lanes) * size, device)
    if reach < wanted.num_tokens:
        wanted = search.longest(sources, reach)
    host = around.host.match(
        request.tokens, namespace=request.namespace, spans=request.spans, max_tokens=request.max_tokens
    )
    start = max(device, host)
    if wanted.num_tokens <= max(start, fits):
        return None
    missing = [lane[lane >= start // size] for lane in wanted.positions]
    if any(bool((source[lane] < 0).any()) for lane, source in zip(missing, sources, strict=True)):
        return None  # the host has entries past what it can promote
    if host > device:
        around.bring(request, host)
        if around.device_tokens(request, host) < start:
            return None
    nbytes = max(around.slots.most // NUM_WINDOWS, 1) * sum(around.host.payload_bytes)
    ranges = chunks_of(missing, around.host.payload_bytes, min(nbytes, around.chunk_bytes))
    windows = [(end, [lane[(lane >= begin) & (lane < end)] for lane in missing]) for begin, end in ranges]
    return DeviceTransfer(around, request, search, windows)


def fitting(around: Surroundings, wanted: Wanted, sources: Sources) -> int:
    """Return the tokens of a prefix for whose entries the host has room, if nothing else takes it."""
    fits = wanted.num_tokens
    for lane, source, room in zip(wanted.positions, sources, around.host.room(), strict=True):
        missing = lane[source[lane] >= 0]
        if len(missing) > room:
            fits = min(fits, int(missing[room]) * around.planner.block_size)
    return fits


def _length(positions: Sequence[Positions]) -> int:
    """Return the blocks of a prefix that a window covers."""
    return max(map(len, positions))
