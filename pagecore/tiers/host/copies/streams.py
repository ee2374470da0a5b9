"""The copies of a host tier in the order of streams: at once on the host, and on streams of a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays.cuda.protocol import Event
from pagecore.cache.parts import CacheParts
from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.storage import HostPool
from pagecore.storage.checks import shown
from pagecore.tiers.host.copies.arriving import LayerEvents
from pagecore.tiers.host.copies.copies import BlockCopies
from pagecore.tiers.host.operations._operations import Backup, EntryHold, SpilledPart, StreamedPart, release

Pairs = list[NDArray[np.int32]]
Saved = Backup | SpilledPart | StreamedPart
# Between two looks at an event while `drain` waits, in seconds.
PAUSE = 0.0005


class Transfers(Protocol):
    """Copies of a tier, which run at once or in the order of streams."""

    copies: BlockCopies

    @property
    def num_pending(self) -> int:
        """Copies that run."""

    @property
    def num_backups(self) -> int:
        """Pins of the host's tree that the backups which run have."""

    @property
    def is_captured(self) -> bool:
        """True while the stream of the cache is captured into a graph.

        Queries of events can wait until then: without the driver's relaxed mode of captures they end the capture.
        """

    def stream_of(self, stream: int | None) -> int | None:
        """Return the stream of a caller's copies; None on the host."""

    def is_ready(self) -> bool:
        """Return True if the host's memory can be copied to and from."""

    def promote(self, pairs: Pairs, hold: EntryHold) -> bool:
        """Copy to the device; return True if the hold is released later."""

    def backup(self, backup: Backup | StreamedPart) -> bool:
        """Copy to the host; return True if `poll` ends the backup."""

    def spill(self, backup: Saved) -> bool:
        """Copy blocks that the device is about to reuse to the host; return True if `poll` ends the backup."""

    def poll(self) -> Iterator[tuple[Saved, str | None]]:
        """End what is done, one after the other; yield the backups among it, each with an error or None."""

    def drain(self, timeout: float | None) -> bool:
        """Wait until everything submitted is done; `poll` then ends it."""


class HostTransfers:
    """Copies on the host, complete when a call returns. A cache without bytes makes none."""

    num_pending = 0
    num_backups = 0
    is_captured = False

    def __init__(self, copies: BlockCopies) -> None:
        self.copies = copies

    def stream_of(self, stream: int | None) -> int | None:
        """Return None; raise UnsupportedOption for a stream."""
        if stream is not None:
            raise UnsupportedOption(f"stream is {shown(stream)}; copies on the host have no streams: leave it out")
        return None

    def is_ready(self) -> bool:
        """Return True."""
        return True

    def promote(self, pairs: Pairs, hold: EntryHold) -> bool:  # noqa: ARG002
        """Copy to the cache; return False."""
        self.copies.run(pairs, to_device=True)
        return False

    def backup(self, backup: Backup | StreamedPart) -> bool:
        """Copy to the host; return False."""
        self.copies.run(backup.pairs, to_device=False)
        return False

    def spill(self, backup: Saved) -> bool:
        """Copy to the host; return False."""
        self.copies.run(backup.pairs, to_device=False)
        return False

    def poll(self) -> Iterator[tuple[Saved, str | None]]:
        """Yield nothing."""
        yield from ()

    def drain(self, timeout: float | None) -> bool:  # noqa: ARG002
        """Return True."""
        return True


@dataclass(slots=True, eq=False)
class _Running:
    stream: int
    event: Event
    backup: Saved | None = None
    hold: EntryHold | None = None


class StreamTransfers:
    """Copies of a cache on CUDA.

    Promotions go to the stream of the cache's last step: the next step waits for them, and the host does not. Backups
    go to a stream of their own, which waits for what the cache's stream was given before. Blocks of either side are
    held until the event of their copies has passed.
    """

    def __init__(self, parts: CacheParts, pool: HostPool, copies: BlockCopies, pipelined: bool) -> None:
        assert parts.staging is not None
        assert pool.memory is not None
        self._parts, self._staging, self.copies, self._memory = parts, parts.staging, copies, pool.memory
        self._runtime, self._device = parts.staging.runtime, parts.staging.device
        self._save = self._runtime.make_stream(self._device)
        self._passed = self._runtime.make_event(self._device)
        self._running: list[_Running] = []
        self._is_ready = False
        self._arrivals: LayerEvents | None = None
        if pipelined:
            found = parts.store.arrivals  # those of an earlier tier of the cache, whose loads may still run
            self._arrivals = found if isinstance(found, LayerEvents) else LayerEvents(parts.staging, self._runtime)
            parts.store.arrivals = self._arrivals

    def stream_of(self, stream: int | None) -> int | None:
        """Return the given stream, or that of the cache's last step."""
        found = self._staging.stream if stream is None else stream
        self._await_registered(found)
        return found

    @property
    def num_pending(self) -> int:
        """Copies that run."""
        return len(self._running)

    @property
    def num_backups(self) -> int:
        """Pins of the host's tree that the backups which run have."""
        return sum(one.backup.num_receipts for one in self._running if one.backup is not None)

    @property
    def is_captured(self) -> bool:
        """True while the stream of the cache is captured into a graph."""
        return self._runtime.is_capturing(self._staging.stream)

    def is_ready(self) -> bool:
        """Return True once all of the host's memory is registered."""
        self._is_ready = self._is_ready or self._memory.is_registered(0, self._memory.nbytes)
        return self._is_ready

    def _await_registered(self, stream: int) -> None:
        """Wait until the host's memory is registered; refuse a captured stream, for whose end that may wait."""
        self._staging.refuse_captured(stream)
        if not self.is_ready():
            self._memory.wait_registered(None)

    def promote(self, pairs: Pairs, hold: EntryHold) -> bool:
        """Submit copies to the stream of the cache; the hold is released once they are done."""
        self._await_registered(self._staging.stream)
        stream = self._staging.stream if self._arrivals is None else self._arrivals.stream
        with self._submitting(stream):
            if self._arrivals is None:
                self.copies.run(pairs, to_device=True, stream=stream)
                event = self._recorded(stream)
            else:
                event = self._load_layers(pairs, self._arrivals)
            self._running.append(_Running(stream, event, hold=hold))
        return True

    def _load_layers(self, pairs: Pairs, arrivals: LayerEvents) -> Event:
        """Submit the copies layer by layer to a stream of their own; return the event of the last."""
        self._passed.record(self._staging.stream)  # earlier steps may still use the new blocks
        stream = arrivals.stream
        self._runtime.wait_event(stream, self._passed)
        event = self._recorded(stream)
        for number, layer in enumerate(self._parts.layers):
            lane = len(pairs) - 1 if layer.keeps_state else layer.cached_group
            is_kept = layer.keeps_state or lane < len(self._parts.cached_groups)
            if is_kept and len(pairs[lane]):
                self.copies.run_layer(number, pairs[lane], to_device=True, stream=stream)
                event = self._recorded(stream)
                arrivals.note(layer, event)
        return event

    def backup(self, backup: Backup | StreamedPart) -> bool:
        """Submit copies to the stream of backups."""
        stream = self._staging.stream
        self._staging.refuse_captured(stream)
        self._parts.store.await_arrivals()
        self._passed.record(stream)
        self._runtime.wait_event(self._save, self._passed)
        with self._submitting(self._save):
            self.copies.run(backup.pairs, to_device=False, stream=self._save)
            self._running.append(_Running(self._save, self._recorded(self._save), backup=backup))
        return True

    def spill(self, backup: Saved) -> bool:
        """Submit copies to the stream of the cache: later steps, which reuse the blocks, come after them."""
        stream = self._staging.stream
        self._staging.refuse_captured(stream)
        self._parts.store.await_arrivals()
        with self._submitting(stream):
            self.copies.run(backup.pairs, to_device=False, stream=stream)
            self._running.append(_Running(stream, self._recorded(stream), backup=backup))
        return True

    @contextmanager
    def _submitting(self, stream: int) -> Iterator[None]:
        """Wait for what was submitted to a stream if the code below raises: the caller then gives the blocks back."""
        try:
            yield
        except BaseException:
            with suppress(PagecoreError):  # a device that is lost writes no more
                self._runtime.synchronize(stream, self._device)
            raise

    def _recorded(self, stream: int) -> Event:
        event = self._runtime.make_event(self._device)
        event.record(stream)
        return event

    def poll(self) -> Iterator[tuple[Saved, str | None]]:
        """End the copies whose events have passed; yield the backups."""
        pending = set()
        for one in list(self._running):
            # The events of a stream pass in order: one query of a stream that runs is enough.
            if one.stream in pending or not one.event.is_done():
                pending.add(one.stream)
                continue
            # Both before the copy is forgotten: a second call does nothing, and an interrupt leaks no pin.
            if one.hold is not None:
                release(self._parts.state, one.hold)
            error = None if one.backup is None else _finish(one.backup)
            self._running.remove(one)
            if one.backup is not None:
                yield one.backup, error

    def drain(self, timeout: float | None) -> bool:
        """Wait for the events of all copies."""
        if timeout is None:
            for one in list(self._running):
                one.event.synchronize()
            return True
        deadline = time.monotonic() + timeout
        while not all(one.event.is_done() for one in list(self._running)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(PAUSE)
        return True


def _finish(backup: Saved) -> str | None:
    """End a backup; return the error if the host's tree has no memory for it."""
    try:
        backup.finish()
    except Exception as error:
        return str(error)
    return None


def make_transfers(parts: CacheParts, pool: HostPool, copies: BlockCopies, pipelined: bool) -> Transfers:
    """Return the copies of a tier for the device of its cache."""
    if parts.staging is None:
        return HostTransfers(copies)
    return StreamTransfers(parts, pool, copies, pipelined)
