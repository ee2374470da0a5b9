"""Page-locking of host memory for CUDA devices, chunk by chunk in a thread of its own."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterable, Sequence

from pagecore.arrays.cuda.protocol import RefusedDuringCapture, Runtime

# A registration holds locks of the driver, on which calls of all processes wait, for up to a second for each GiB; Linux
# 6.11 to 6.13 pin no more than 2 GiB by one call, and one call for 512 GiB fails on current drivers.
CHUNK_BYTES = 1 << 30
# Between two attempts to register a chunk while CUDA refuses it because a graph is being captured, in seconds.
RETRY_PAUSE = 0.05

Chunk = tuple[int, int]


def whole_chunks(nbytes: int, unit: int, chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Return ranges of at most `chunk_bytes` that cover `nbytes`, cut at multiples of `unit` (at least one each)."""
    step = max(chunk_bytes // unit, 1) * unit
    return [(begin, min(begin + step, nbytes)) for begin in range(0, nbytes, step)]


def joined(chunks: Iterable[Chunk], chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Return adjoining chunks joined into ranges of at most `chunk_bytes`."""
    merged: list[Chunk] = []
    for begin, end in chunks:
        if merged and merged[-1][1] == begin and end - merged[-1][0] <= chunk_bytes:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


class Registration:
    """Registration of host memory with CUDA, which runs in the background from construction on.

    Chunks are registered in order; a chunk that CUDA refuses while a graph is being captured is tried again, unless
    `awaits_captures` is False. `close` ends it at the next chunk, and unregisters.

    Parameters
    ----------
    runtime : Runtime
    device : int
    address : int
        Start of the memory; a multiple of a page.
    chunks : sequence of (int, int)
        Adjoining ranges of bytes from 0 on. A copy by DMA must not cross from one into another.
    owner : object
        Owner of the mapping; the thread keeps it alive while it registers.
    awaits_captures : bool
        False for a caller that waits for the end: its own thread may be the one that captures.
    """

    def __init__(
        self,
        runtime: Runtime,
        device: int,
        address: int,
        chunks: Sequence[Chunk],
        owner: object,
        *,
        awaits_captures: bool = True,
    ) -> None:
        self._runtime, self._device, self._address = runtime, device, address
        self._awaits_captures = awaits_captures
        self._chunks = list(chunks)
        self._done: list[Chunk] = []
        self._failure: Exception | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, args=(owner,), name="pagecore-register", daemon=True)
        self._thread.start()

    def covers(self, begin: int, end: int) -> bool:
        """Return True if bytes [begin, end) are registered."""
        done = self._done
        return not self._is_closed and (begin >= end or (bool(done) and end <= done[-1][1]))

    def wait(self, timeout: float | None) -> bool:
        """Wait until everything is registered; return False if `timeout` seconds pass first.

        Raises
        ------
        DeviceError, NotEnoughMemory
            The error of the chunk that could not be registered.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._failure is None and not self._is_closed and len(self._done) < len(self._chunks):
                left = None if limit is None else limit - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
            if self._failure is not None:
                raise self._failure
            return not self._is_closed

    def close(self) -> None:
        """End the thread, and unregister what it registered; the work of devices on the memory has finished."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # the thread may drop the last reference to the owner
            self._thread.join()
        for begin, _ in reversed(self._done):
            try:
                self._runtime.unregister_host(self._address + begin)
            except Exception as error:  # also called by a finalizer, which warns and never raises
                warnings.warn(f"host memory stays page-locked: {error}", ResourceWarning, stacklevel=2)
        self._done = []

    def _work(self, owner: object) -> None:  # noqa: ARG002
        for begin, end in self._chunks:
            if self._is_closed:
                return
            try:
                if not self._register(begin, end):
                    return
            except Exception as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._done.append((begin, end))
                self._changed.notify_all()

    def _register(self, begin: int, end: int) -> bool:
        """Register a chunk, after captures if they forbid it; return False if `close` was called before that."""
        while True:
            try:
                self._runtime.register_host(self._address + begin, end - begin, self._device)
            except RefusedDuringCapture:
                if not self._awaits_captures:
                    raise
                with self._changed:
                    if self._changed.wait_for(lambda: self._is_closed, RETRY_PAUSE):
                        return False
            else:
                return True
