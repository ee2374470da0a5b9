"""Memory saver: memory whose pages are given back to the system, and taken again, while its addresses stay valid."""

from __future__ import annotations

from pagecore.arrays import Tensor
from pagecore.errors import DeviceError, UnsupportedOption
from pagecore.storage import HostMemory
from pagecore.storage.checks import flag
from pagecore.storage.memory.device_memory import DeviceMemory


class MemorySaver:
    """Allocator of a cache whose pages can be given back while all addresses stay valid.

    Attributes
    ----------
    is_released : bool
    """

    def __init__(self) -> None:
        self.is_released = False
        self._memories: list[HostMemory | DeviceMemory] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all memory."""
        return sum(memory.nbytes for memory in self._memories)

    def allocate(self, nbytes: int, device: str) -> Tensor:
        """Return memory: on the host zeroed, with pages that are taken when they are first touched."""
        memory = HostMemory(nbytes, touch=False) if device == "cpu" else DeviceMemory(nbytes, device)
        self._memories.append(memory)
        return memory.tensor()

    def release(self) -> None:
        """Give all pages back."""
        self.is_released = True  # first: a failure leaves a part of the memory, which `resume` completes
        for memory in self._memories:
            memory.discard()

    def resume(self) -> None:
        """Take all memory again, or none; zeros are in it."""
        if not self.is_released:
            return
        try:
            for memory in self._memories:
                if isinstance(memory, DeviceMemory):
                    memory.restore()
        except BaseException:
            self.release()
            raise
        self.is_released = False

    def require_memory(self) -> None:
        """Raise DeviceError while the memory is released."""
        if self.is_released:
            raise DeviceError("the memory of the cache is released; call resume_memory() first")


def checked_saver(memory_saver: bool, allocator: object, buffers: object, device: str) -> MemorySaver | None:
    """Return the saver of a cache on `device`, or None; raise UnsupportedOption for options that exclude it."""
    if not flag("memory_saver", memory_saver):
        return None
    if buffers is not None or allocator is not None:
        raise UnsupportedOption("memory_saver is True, but the memory is the caller's; leave buffers and allocator out")
    if device == "none":
        raise UnsupportedOption("memory_saver is True, but device is 'none': such a cache has no bytes; leave it out")
    return MemorySaver()
