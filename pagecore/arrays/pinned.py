"""Pinned host memory that copies to a device read while the host goes on to fill the next."""

from __future__ import annotations

import sys
import warnings

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays.cuda import Runtime


class Slot:
    """One piece of pinned memory; it may be written until it is sent, and again after `wait`.

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
        self._is_on_its_way = False

    def reserve(self, num_bytes: int) -> None:
        """Have room for so many bytes; what was there may be lost."""
        if self.memory.nbytes < num_bytes:
            self.wait()
            self.memory = self._runtime.allocate_pinned(num_bytes)
            self.address = self.memory.ctypes.data

    def send(self, begin: int, end: int, target: int, stream: int) -> None:
        """Copy bytes [begin, end) to `target`, in the order of a stream."""
        self._runtime.copy(target, self.address + begin, end - begin, stream)
        self._event.record(stream)
        self._is_on_its_way = True

    def wait(self) -> None:
        """Return once the copy that was sent is done."""
        if self._is_on_its_way:
            self._event.synchronize()
            self._is_on_its_way = False


class PinnedRing:
    """Slots of pinned memory, taken in turn.

    A slot is taken again when the copy that was last sent from it is done; the host waits for that only where it is
    `num_slots` copies ahead. When the ring goes, it waits for all of them.

    Attributes
    ----------
    latest : Slot
        The one that was taken last.
    """

    def __init__(self, runtime: Runtime, device: int, num_slots: int = 3) -> None:
        self._slots = [Slot(runtime, device) for _ in range(num_slots)]
        self._turn = 0
        self.latest = self._slots[-1]

    @property
    def nbytes(self) -> int:
        """Pinned memory of all slots."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def reserve(self, num_bytes: int) -> None:
        """Have room for so many bytes in every slot."""
        for slot in self._slots:
            slot.reserve(num_bytes)

    def take(self) -> Slot:
        """The next slot, free to be filled."""
        self.latest = slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        slot.wait()
        return slot

    def __del__(self) -> None:
        if sys.is_finalizing():  # the memory goes with the process
            return
        failure: Exception | None = None
        for slot in getattr(self, "_slots", ()):
            try:
                slot.wait()
            except Exception as error:  # a destructor warns and never raises
                failure = failure or error
        if failure is not None:
            warnings.warn(
                f"pinned memory is given back while a device may still read it: {failure}",
                ResourceWarning,
                stacklevel=1,
            )
