"""Pinned host memory for asynchronous copies to a device."""

from __future__ import annotations

import sys
import warnings

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays.cuda.protocol import Runtime


class Slot:
    """One buffer of pinned memory. It may be written until it is sent, and again after `wait`.

    Attributes
    ----------
    memory : array of uint8
    address : int
    """

    def __init__(self, runtime: Runtime, device: int) -> None:
        self.memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.address = 0
        self._runtime = runtime
        self._event = runtime.make_event(device)
        self._is_pending = False

    def reserve(self, num_bytes: int) -> None:
        """Grow the buffer to at least `num_bytes`; its content may be lost."""
        if self.memory.nbytes < num_bytes:
            self.wait()
            self.memory = self._runtime.allocate_pinned(num_bytes)
            self.address = self.memory.ctypes.data

    def send(self, begin: int, end: int, target: int, stream: int) -> None:
        """Copy bytes [begin, end) to `target`, in the order of a stream."""
        self._runtime.copy(target, self.address + begin, end - begin, stream)
        self._event.record(stream)
        self._is_pending = True

    def wait(self) -> None:
        """Wait until the copy that was sent is done."""
        if self._is_pending:
            self._event.synchronize()
            self._is_pending = False


class PinnedRing:
    """Slots of pinned memory, taken in turn.

    `take` waits until the copy last sent from the slot is done, so the host is at most `num_slots` copies ahead of the
    device. The destructor waits for all copies.

    Attributes
    ----------
    latest : Slot
        The slot that was taken last.
    """

    def __init__(self, runtime: Runtime, device: int, num_slots: int = 3) -> None:
        self._slots = [Slot(runtime, device) for _ in range(num_slots)]
        self._turn = 0
        self.latest = self._slots[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory in all slots."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def reserve(self, num_bytes: int) -> None:
        """Grow every slot to at least `num_bytes`."""
        for slot in self._slots:
            slot.reserve(num_bytes)

    def take(self) -> Slot:
        """Return the next slot, ready to be written."""
        self.latest = slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        slot.wait()
        return slot

    def __del__(self) -> None:
        if sys.is_finalizing():  # the process frees the memory
            return
        failure: Exception | None = None
        for slot in getattr(self, "_slots", ()):
            try:
                slot.wait()
            except Exception as error:  # a destructor warns and never raises
                failure = failure or error
        if failure is not None:
            warnings.warn(
                f"pinned memory is freed while a device may still read it: {failure}",
                ResourceWarning,
                stacklevel=1,
            )
