"""What pagecore asks of a CUDA device: memory, streams, events, kernels. One object answers: a `Runtime`.

`runtime()` gives CuPy's, made when it is first asked for. The tests put another in its place, which runs the kernels on
the host; nothing above this module knows which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class DeviceProperties:
    """What launches are fitted to.

    Attributes
    ----------
    name : str
    architecture : str
        As the compiler is told: "sm_80", "sm_90a".
    num_multiprocessors : int
    shared_bytes_per_block : int
        The most dynamic shared memory that a block may ask for.
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
        """Let the event be what the stream has been given up to now."""

    def synchronize(self) -> None:
        """Wait until that is done; at once where nothing was recorded."""


class Runtime(Protocol):
    """A way to CUDA devices. Addresses and stream handles are ints; stream 0 is the default stream.

    Every call may raise `DeviceError`. Copies, fills and launches are asynchronous, in the order of their stream.
    """

    def num_devices(self) -> int:
        """Devices that can be used; 0 where there are none."""

    def properties(self, device: int) -> DeviceProperties:
        """What a device is; asked once and kept."""

    def memory_info(self, device: int) -> tuple[int, int]:
        """Bytes that a device has free, and has."""

    def current_stream(self, device: int) -> int:
        """The stream that the caller works on, where nothing else says it."""

    def allocate(self, num_bytes: int, device: int, stream: int) -> tuple[int, object]:
        """Device memory for work of `stream`: its address, a multiple of 256, and what keeps it alive."""

    def allocate_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Host memory that copies can read while the host goes on; the array keeps it alive."""

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy bytes between any two places, device or host."""

    def fill(self, target: int, byte: int, num_bytes: int, stream: int) -> None:
        """Set bytes of device memory."""

    def make_event(self, device: int) -> Event:
        """A new event, without timing."""

    def wait_event(self, stream: int, event: Event) -> None:
        """Let what the stream is given from now on wait for an event."""

    def synchronize(self, stream: int, device: int | None = None) -> None:
        """Wait for all work of a stream; of a default stream, on `device`, or on every device where that is None."""

    def is_capturing(self, stream: int) -> bool:
        """Whether what the stream is given becomes part of a graph instead of being run."""

    def load(self, name: str, device: int, image: Callable[[], tuple[bytes, str]], shared_bytes: int) -> Any:
        """A kernel that can be launched.

        `name` is that of the instance, as in the manifest; `image` gives the cubin for the device and the kernel's
        symbol in it, and is called only by a runtime that needs them. `shared_bytes` is the most that a launch will
        ask for.
        """

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], num_threads: int, shared_bytes: int, stream: int, parameters: int
    ) -> None:
        """Launch a kernel of one parameter, the struct at the address `parameters`, which is copied."""


_runtime: Runtime | None = None


def runtime() -> Runtime:
    """The runtime in use; `DeviceError` where there is no way to a device."""
    global _runtime  # noqa: PLW0603
    if _runtime is None:
        from pagecore.arrays.cupy_runtime import CupyRuntime

        _runtime = CupyRuntime()
    return _runtime


@contextmanager
def use_runtime(other: Runtime | None) -> Iterator[None]:
    """Put another runtime in place for the length of a block; memory of one is of no use to another."""
    global _runtime  # noqa: PLW0603
    before, _runtime = _runtime, other
    try:
        yield
    finally:
        _runtime = before
