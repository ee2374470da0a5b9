"""Pinned host memory for asynchronous copies to a device."""

from __future__ import annotations

import sys
import warnings

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays.cuda.protocol import Event, Runtime


def room_for(num_bytes: int) -> int:
    """Return the bytes to reserve for a size: a power of two, so that buffers grow seldom while sizes grow."""
    return 1 << max(num_bytes - 1, 0).bit_length()


class Slot:
    """One buffer of pinned memory. It may be written until it is sent, and again after `wait`.

    A buffer that is replaced by a larger one while a copy reads it stays until that copy is done.

    Attributes
    ----------
    memory : array of uint8
        The buffer; the constructor takes the first one.
    address : int
    """

    def __init__(self, runtime: Runtime, device: int, memory: NDArray[np.uint8]) -> None:
        self._use(memory)
        self._runtime = runtime
        self._device = device
        self._event = runtime.make_event(device)
        self._is_pending = False
        # Buffers that were replaced, each with the event of its last copy.
        self._replaced: list[tuple[Event, NDArray[np.uint8]]] = []

    def reserve(self, num_bytes: int) -> None:
        """Grow the buffer to at least `num_bytes`; its content may be lost. The host does not wait."""
        if self.memory.nbytes < num_bytes:
            memory = self._runtime.allocate_pinned(num_bytes)
            if self._is_pending:
                event = self._runtime.make_event(self._device)
                self._replaced.append((self._event, self.memory))
                self._event, self._is_pending = event, False
            self._use(memory)

    def _use(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self.address = memory.ctypes.data

    def send(self, begin: int, end: int, target: int, stream: int) -> None:
        """Copy bytes [begin, end) to `target`, in the order of a stream."""
        self._runtime.copy(target, self.address + begin, end - begin, stream)
        self._event.record(stream)
        self._is_pending = True

    def is_done(self) -> bool:
        """Return True if the copy that was sent is done; the host does not wait."""
        if self._is_pending and self._event.is_done():
            self._is_pending = False
        return not self._is_pending

    def wait(self) -> None:
        """Wait until the copy that was sent is done, and free replaced buffers whose copies are done."""
        if self._is_pending:
            self._event.synchronize()
            self._is_pending = False
        if self._replaced:
            self._replaced = [(event, memory) for event, memory in self._replaced if not event.is_done()]

    def wait_all(self) -> None:
        """Wait until no copy reads the buffer, or one that was replaced."""
        for event, _ in self._replaced:
            event.synchronize()
        self.wait()


class PinnedRing:
    """Slots of pinned memory, taken in turn.

    `take` waits until the copy last sent from the slot is done, so the host is at most `num_slots` copies ahead of the
    device. The destructor waits for all copies.

    Parameters
    ----------
    runtime : Runtime
    device : int
    num_slots : int
    slot_bytes : int
        Bytes of each slot, in one allocation for all; by default slots are empty until `reserve`.

    Attributes
    ----------
    slots : list of Slot
    """

    def __init__(self, runtime: Runtime, device: int, num_slots: int = 3, slot_bytes: int = 0) -> None:
        memory = runtime.allocate_pinned(num_slots * slot_bytes) if slot_bytes > 0 else np.empty(0, np.uint8)
        self.slots = [Slot(runtime, device, part) for part in memory.reshape(num_slots, slot_bytes)]
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory in all slots."""
        return sum(slot.memory.nbytes for slot in self.slots)

    def reserve(self, num_bytes: int) -> None:
        """Grow every slot to at least `num_bytes`."""
        for slot in self.slots:
            slot.reserve(num_bytes)

    def take(self) -> Slot:
        """Return the next slot, ready to be written."""
        slot = self.slots[self._turn]
        self._turn = (self._turn + 1) % len(self.slots)
        slot.wait()
        return slot

    def __del__(self) -> None:
        if sys.is_finalizing():  # the process frees the memory
            return
        failure: Exception | None = None
        for slot in getattr(self, "slots", ()):
            try:
                slot.wait_all()
            except Exception as error:  # a destructor warns and never raises
                failure = failure or error
        if failure is not None:
            warnings.warn(
                f"pinned memory is freed while a device may still read it: {failure}",
                ResourceWarning,
                stacklevel=1,
            )
