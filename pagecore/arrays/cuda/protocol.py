"""The interface to CUDA devices: memory, streams, events, kernels.

`cupy_runtime.CupyRuntime` implements it with CuPy, and the tests implement it with an emulator. `cuda.runtime()`
returns the implementation in use. No other module knows which one that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import DeviceError


class RefusedDuringCapture(DeviceError):
    """CUDA refuses a call while a thread captures a graph; the same call may succeed later."""


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a device that select kernels and launch shapes.

    Attributes
    ----------
    name : str
    architecture : str
        Compiler target: "sm_80", "sm_90a".
    num_multiprocessors : int
    shared_bytes_per_block : int
        Limit of dynamic shared memory for one block.
    shared_bytes_per_multiprocessor : int
    """

    name: str
    architecture: str
    num_multiprocessors: int
    shared_bytes_per_block: int
    shared_bytes_per_multiprocessor: int


class Event(Protocol):
    """A point in the work of a stream."""

    def record(self, stream: int) -> None:
        """Record the work submitted to `stream` so far."""

    def synchronize(self) -> None:
        """Wait until the recorded work is done; return at once if nothing was recorded."""

    def is_done(self) -> bool:
        """Return True if the recorded work is done, or nothing was recorded; the host does not wait."""


class Runtime(Protocol):
    """Operations on CUDA devices. Addresses and stream handles are ints; stream 0 is the default stream.

    Copies, fills and launches are asynchronous, in the order of their stream. Every call may raise `DeviceError`.
    """

    def num_devices(self) -> int:
        """Return the number of usable devices, 0 if there are none."""

    def properties(self, device: int) -> DeviceProperties:
        """Return the properties of a device; they are queried once."""

    def memory_info(self, device: int) -> tuple[int, int]:
        """Return the free and the total memory of a device in bytes."""

    def current_stream(self, device: int) -> int:
        """Return the stream for work whose caller passed neither a stream nor an array of a framework with one."""

    def allocate(self, num_bytes: int, device: int, stream: int) -> tuple[int, object]:
        """Allocate device memory for work of `stream`; return its address, a multiple of 256, and its owner."""

    def allocate_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate page-locked host memory, from which copies are asynchronous; the array owns it."""

    def register_host(self, address: int, num_bytes: int, device: int) -> None:
        """Page-lock host memory, so that every device accesses it at its own address; both are multiples of a page.

        RefusedDuringCapture if a graph that is being captured forbids it.
        """

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`; the work of devices on the memory has finished."""

    def export_ipc(self, address: int, device: int) -> tuple[bytes, int]:
        """Return a handle of the allocation that holds a device address, and the offset of the address in it.

        UnsupportedOption for memory that other processes cannot open, such as that of cuMemCreate.
        """

    def open_ipc(self, handle: bytes, device: int) -> int:
        """Map the allocation of another process by its handle; return its address."""

    def close_ipc(self, address: int, device: int) -> None:
        """Unmap an allocation that `open_ipc` returned; the work of devices on it has finished."""

    def memory_granularity(self, device: int) -> int:
        """Return the bytes of which reserved and mapped sizes are multiples."""

    def reserve_address(self, num_bytes: int, device: int) -> int:
        """Reserve addresses without memory, which `map_memory` puts there; return the first."""

    def map_memory(self, address: int, num_bytes: int, device: int) -> None:
        """Put new device memory, with any content, at a range of `reserve_address`; NotEnoughMemory without effect."""

    def unmap_memory(self, address: int, num_bytes: int, device: int) -> None:
        """Wait for all work of the device, and give the memory of a range back; its addresses stay reserved.

        CUDA cannot wait for a device while a stream is being captured: RefusedDuringCapture, and the memory stays.
        """

    def free_address(self, address: int, num_bytes: int, device: int) -> None:
        """Give back a range of reserved addresses, which has no memory."""

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy bytes between any two addresses, on a device or on the host."""

    def copy_rectangles(self, rectangles: NDArray[np.int64], stream: int) -> None:
        """Copy rows of bytes between addresses, all of one device and of page-locked memory.

        Each is (target, target pitch, source, source pitch, width, height). The pitch is the distance of rows in bytes,
        from `width` to 2^31 - 1; it has no meaning where `height` is 1.
        """

    def fill(self, target: int, byte: int, num_bytes: int, stream: int) -> None:
        """Set bytes of device memory to `byte`."""

    def make_stream(self, device: int) -> int:
        """Return a new stream that does not wait for the default stream; it lives as long as the runtime."""

    def make_event(self, device: int) -> Event:
        """Return a new event without timing."""

    def wait_event(self, stream: int, event: Event) -> None:
        """Make later work of `stream` wait for an event."""

    def synchronize(self, stream: int, device: int | None = None) -> None:
        """Wait for all work of a stream. A default stream is that of `device`, or of every device if it is None."""

    def is_capturing(self, stream: int) -> bool:
        """Return True if work submitted to `stream` is captured in a graph instead of being run."""

    def load(self, name: str, device: int, image: Callable[[], tuple[bytes, str]], shared_bytes: int) -> Any:
        """Load a kernel; return a handle for `launch`.

        Parameters
        ----------
        name : str
            The instance's name in the manifest.
        device : int
        image : callable
            Returns the cubin for the device and the kernel's symbol in it. A runtime that runs no machine code does not
            call it.
        shared_bytes : int
            Limit of dynamic shared memory that launches of the kernel request.
        """

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], num_threads: int, shared_bytes: int, stream: int, parameters: int
    ) -> None:
        """Launch a kernel whose one parameter is the struct at the address `parameters`; the struct is copied."""
