"""Pinned host memory that copies to a device read while the host goes on to fill the next."""

from __future__ import annotations

from pagecore.arrays.cuda import Runtime

# The host may be so many copies ahead of the device before it waits.
NUM_SLOTS = 3


class Slot:
    """One piece of pinned memory; it may be written until it is sent, and again after `wait`."""

    def __init__(self, runtime: Runtime, device: int) -> None:
        self.address = 0
        self._runtime = runtime
        self._event = runtime.make_event(device)
        self._is_on_its_way = False
        self._num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Have room for so many bytes; what was there may be lost."""
        if self._num_bytes < num_bytes:
            self.wait()
            self._memory = self._runtime.allocate_pinned(num_bytes)
            self._num_bytes, self.address = num_bytes, self._memory.ctypes.data

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
    `NUM_SLOTS` copies ahead. When the ring goes, it waits for all of them.
    """

    def __init__(self, runtime: Runtime, device: int) -> None:
        self._slots = [Slot(runtime, device) for _ in range(NUM_SLOTS)]
        self._turn = 0

    def reserve(self, num_bytes: int) -> None:
        """Have room for so many bytes in every slot."""
        for slot in self._slots:
            slot.reserve(num_bytes)

    def take(self) -> Slot:
        """The next slot, free to be filled."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % NUM_SLOTS
        slot.wait()
        return slot

    def __del__(self) -> None:
        for slot in getattr(self, "_slots", ()):
            slot.wait()
