"""Streams of long prefixes to the stores: blocks for which the host has no room pass through leased host blocks.

A stream takes the blocks of one prefix from the device, a few windows at a time:

    device --stage--> leased host blocks --save--> stores      and the lease is given back when all stores have read it

S1: At most `num_slots` blocks of a prefix's length are leased at a time, by all streams together.
S2: No tree of the host has a leased block. What the host's tree has of the prefix was submitted to the stores before.
S3: Windows are submitted in the order of the prefix, so that a store that keeps prefixes can follow it.
S4: A stream ends early if the device has lost the next block, if a copy fails, if no store takes a window, or if the
    host is pinned while nothing runs that would end the pins. What follows is not stored; nothing else changes.
S5: `known` has the prefixes whose streamed blocks were submitted, so that they are streamed once. A failure, a removal
    and a look-up that misses one forget all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from pagecore.errors import PagecoreError, UnsupportedDtype
from pagecore.tiers.manager.port import Positions, StreamHost
from pagecore.tiers.manager.stats import StreamStats
from pagecore.tiers.manager.writing.stream_parts import Owner, Passed, Stream, StreamedPrefix, Window
from pagecore.tiers.manager.writing.writes import Writer, Written
from pagecore.tiers.store import Keys

__all__ = ["Streams"]

# Windows into which the leased blocks are divided: some are copied and read while others are written.
NUM_WINDOWS = 4
# Streams that wait for leased blocks; more are dropped.
MAX_STREAMS = 256
ALL = 2**31 - 1  # tokens


class Streams:
    """The streams of one cache, under its lock.

    Parameters
    ----------
    host : StreamHost
    writer : Writer
    full_lanes : sequence of int
        The groups without a window; there is one at least.
    block_size, num_slots : int
        Tokens of a block, and the most blocks that are leased at a time; 0 for no streams.
    known : Passed
    keys_of : callable
        ``keys_of(prefix)`` returns a function for the content keys of entries, for a lane and positions.
    flush : callable
        Writes what backups have published in the host so far to the stores.
    ended : callable
        ``ended(prefix)`` is called when the stores have taken a prefix, or a part of it.
    """

    def __init__(
        self,
        host: StreamHost,
        writer: Writer,
        *,
        full_lanes: Sequence[int],
        block_size: int,
        num_slots: int,
        known: Passed,
        keys_of: Callable[[StreamedPrefix], Callable[[int, Positions], Keys]],
        flush: Callable[[], None],
        ended: Callable[[StreamedPrefix], None],
    ) -> None:
        self._host, self._writer = host, writer
        self._full_lanes, self._size = full_lanes, block_size
        self._num_slots = num_slots
        self._known, self._keys_of, self._flush, self._ended = known, keys_of, flush, ended
        self._owners: dict[Hashable, Owner] = {}
        self._queue: list[Stream] = []
        self._num_used = 0
        self._is_advancing = False
        self._num_streams = self._num_blocks = self._num_bytes = self._num_dropped = 0

    # -- counts --------------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """True if prefixes can be streamed: there is a store that takes entries."""
        return self._num_slots > 0 and self._writer.has_ports

    @property
    def is_idle(self) -> bool:
        """True if nothing is streamed or waits for its turn."""
        return not self._queue

    @property
    def is_copying(self) -> bool:
        """True while copies from the device run, whose ends no descriptor announces."""
        return any(window.blocks.is_running for stream in self._queue for window in stream.windows)

    @property
    def num_leases(self) -> int:
        """Number of leases of the host."""
        return sum(len(stream.windows) for stream in self._queue)

    @property
    def num_written(self) -> int:
        """Number of leases that stores read."""
        return sum(window.is_submitted for stream in self._queue for window in stream.windows)

    def stats(self) -> StreamStats:
        """Return the counters."""
        return StreamStats(
            num_streams=self._num_streams,
            num_stored_blocks=self._num_blocks,
            bytes_stored=self._num_bytes,
            num_dropped_blocks=self._num_dropped,
            num_leased_blocks=self._num_used,
            num_open=len(self._queue),
        )

    def check_invariants(self) -> None:
        """Raise PagecoreError if the leased blocks are not those of the windows, or a stream that has ended is kept."""
        used = sum(window.end - window.begin for stream in self._queue for window in stream.windows)
        if used != self._num_used or used > self._num_slots or any(stream.has_ended for stream in self._queue):
            raise PagecoreError(
                f"inconsistent streams: {self._num_used} of {self._num_slots} blocks are counted as leased, the "
                f"windows of {len(self._queue)} streams have {used}"
            )

    # -- owners --------------------------------------------------------------------------------------------------

    @property
    def has_owners(self) -> bool:
        """True if the prefix of a live owner is or was streamed."""
        return bool(self._owners)

    def limit_of(self, owner: Hashable) -> int:
        """Return the tokens that the host's tree is to have of an owner at most, less if its prefix is streamed."""
        state = self._owners.get(owner)
        return ALL if state is None else state.limit

    def done_of(self, owner: Hashable, version: int) -> int:
        """Return the tokens of an owner that were given to a stream; 0 if it had another version then."""
        state = self._owners.get(owner)
        return 0 if state is None or state.version != version else len(state.prefix.tokens)

    def forget_owner(self, owner: Hashable) -> None:
        """Forget an owner; its stream goes on as long as the device has the blocks."""
        self._owners.pop(owner, None)

    def offer(self, owner: Hashable, prefix: StreamedPrefix, num_host_tokens: int, version: int) -> None:
        """Stream the blocks of a prefix for which the host had no room."""
        state = self._owners.get(owner)
        done = 0
        if state is None:
            limit = max(num_host_tokens - self._num_slots * self._size, 0)
            state = self._owners[owner] = Owner(limit, prefix, version)
        else:
            done = state.num_done(prefix)
        state.prefix, state.version = prefix, version
        first = max(num_host_tokens, self._known.match(prefix.tokens, prefix), done) // self._size
        end = len(prefix.tokens) // self._size
        if first >= end:
            return
        try:
            keys = self._keys_of(prefix)
        except UnsupportedDtype:  # a namespace without a value outside of the process
            return
        if state.stream in self._queue and state.stream.end * self._size == done:
            state.stream.prefix, state.stream.keys, state.stream.end = prefix, keys, end
        elif len(self._queue) >= MAX_STREAMS:
            self._num_dropped += end - first
            return
        else:
            last = [-1] * len(self._host.payload_bytes)
            state.stream = Stream(prefix, keys, first, end, last)
            self._queue.append(state.stream)
            self._num_streams += 1
        self.advance()

    # -- progress ------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Submit the windows whose copies have ended, and stage the next ones."""
        if not self._queue or self._is_advancing:
            return
        self._is_advancing = True  # a store without room for a batch ends it at once
        try:
            self._flush()
            for stream in list(self._queue):
                self._submit(stream)
                while stream.next < stream.end and self._num_used < self._num_slots and self._stage(stream):
                    self._submit(stream)
        finally:
            self._is_advancing = False
            self._sweep()

    def stop(self) -> None:
        """End all streams: windows that stores read go back when their writes end, the others now."""
        for stream in list(self._queue):
            self._drop(stream)
            for window in [each for each in stream.windows if not each.is_submitted]:
                window.release()
        self._owners.clear()
        self._sweep()

    # -- inside --------------------------------------------------------------------------------------------------

    def _stage(self, stream: Stream) -> bool:
        """Copy the next window of a stream to leased blocks; return False if it has to wait, or has ended."""
        known = self._known.match(stream.prefix.tokens, stream.prefix) // self._size
        stream.next = min(max(stream.next, known), stream.end)
        window = max(self._num_slots // NUM_WINDOWS, 1)
        size = min(window, stream.end - stream.next, self._num_slots - self._num_used)
        blocks = None
        while size > 0 and blocks is None:
            begin, end = stream.next, stream.next + size
            try:
                blocks = self._host.stage(
                    stream.prefix.tokens, begin, end, namespace=stream.prefix.namespace, spans=stream.prefix.spans
                )
            except PagecoreError:  # counted by the host tier
                break
            if blocks is None and self._is_busy:
                return False
            size //= 2
        count = 0 if blocks is None else len(blocks.positions[self._full_lanes[0]])
        if blocks is None or not count:
            if blocks is not None:
                blocks.release()
            self._drop(stream)
            return False
        stream.windows.append(
            Window(self._window_ended, stream, stream.prefix, stream.keys, blocks, begin, begin + count)
        )
        self._num_used += count
        stream.next += count
        if stream.next < end:  # the device has lost what follows
            self._drop(stream)
        return True

    @property
    def _is_busy(self) -> bool:
        """True while something runs whose end unpins blocks of the host."""
        return bool(self._num_used) or self._writer.num_pins > 0 or self._host.is_copying

    def _submit(self, stream: Stream) -> None:
        """Give the windows whose copies have ended to the stores, in order."""
        for window in list(stream.windows):
            if window.is_submitted:
                continue
            if window.blocks.is_running:
                return
            window.is_submitted = True
            self._known.add(window.prefix.tokens[: window.end * self._size], window.prefix)
            before = [window.begin - 1 if lane in self._full_lanes else last for lane, last in enumerate(stream.last)]
            for lane, positions in enumerate(window.blocks.positions):
                stream.last[lane] = int(positions[-1]) if len(positions) else stream.last[lane]
            prefix = Written(window.prefix.tokens, window.prefix.namespace, window.prefix.spans, window.keys)
            self._writer.stream(window, prefix, window.blocks, before, window.saved)

    def _window_ended(self, window: Window) -> None:
        """Take a window back; end the stream if no store has taken it."""
        stream, count = window.stream, window.end - window.begin
        stream.windows.remove(window)
        self._num_used -= count
        if window.num_saved:
            self._num_blocks += count
            sizes = zip(window.blocks.positions, self._host.payload_bytes, strict=True)
            self._num_bytes += sum(len(positions) * size for positions, size in sizes)
        else:
            self._num_dropped += count
            self._drop(stream)
        if window.num_failed or not window.num_saved:
            self._known.forget()
        if not self._is_advancing:
            self._sweep()

    def _drop(self, stream: Stream) -> None:
        """Stage no more windows of a stream."""
        self._num_dropped += max(stream.end - stream.next, 0)
        stream.end = stream.next

    def _sweep(self) -> None:
        """Forget the streams that have ended."""
        for stream in [each for each in self._queue if each.has_ended]:
            self._queue.remove(stream)
            self._ended(stream.prefix)
