"""The device and the stream that CuPy uses in a thread."""

from __future__ import annotations

import threading
from functools import cache
from types import TracebackType
from typing import Any

from pagecore.arrays.cuda.driver_context import DriverContext
from pagecore.errors import DeviceError


class CurrentDevice:
    """Context that makes a device current in this thread and raises errors of CUDA as DeviceError.

    The device that was current before is restored if it is in use: since CUDA 12 making a device current creates its
    context, which takes hundreds of megabytes. A device that nothing has used holds no work, so the thread stays on the
    other one. The only device of a process remains current in a thread, so that it is made current once.
    """

    __slots__ = ("_before", "_context", "_device", "_driver", "_is_only", "_runtime", "_thread")

    def __init__(
        self,
        runtime: Any,
        driver: Any,
        context: DriverContext,
        thread: threading.local,
        device: int | None,
        is_only: bool,
    ) -> None:
        self._runtime = runtime
        self._driver = driver
        self._context = context
        self._thread = thread
        self._device = device
        self._is_only = is_only
        self._before: int | None = None

    def __enter__(self) -> None:
        if self._is_only and not self._device and getattr(self._thread, "has_context", False):
            return
        try:
            before = self._runtime.getDevice()
            device = before if self._device is None else self._device
            if self._device is None and not getattr(self._thread, "has_context", False):
                device = self._context.used_device(before, self._runtime.getDeviceCount())
            if device != before:
                self._runtime.setDevice(device)
                self._before = before
            elif not getattr(self._thread, "has_context", False):
                self._runtime.setDevice(device)  # driver calls need a context, which a new thread lacks
        except self._runtime.CUDARuntimeError as error:
            raise failure(self._device, error) from error
        self._thread.has_context = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None and self._context.is_in_use(self._before):
            try:
                self._runtime.setDevice(self._before)
            except self._runtime.CUDARuntimeError as late:
                if error is None:  # otherwise the error of the block is raised
                    raise failure(self._before, late) from late
        if isinstance(error, (self._runtime.CUDARuntimeError, self._driver.CUDADriverError)):
            raise failure(self._device, error) from error


def failure(device: int | None, error: BaseException) -> DeviceError:
    """Return the DeviceError for an error of CUDA; the device is None if it is the current one."""
    return DeviceError(f"CUDA failed on {'the current device' if device is None else f'cuda:{device}'}: {error}")


def external_stream(cupy: Any, stream: int, device: int) -> Any:
    """Return a context in which CuPy works on a stream that CuPy does not own; its device must be current."""
    return _borrowed_stream_class(cupy)(stream, -1 if is_default(stream) else device)


@cache
def _borrowed_stream_class(cupy: Any) -> Any:
    external = cupy.cuda.ExternalStream

    class BorrowedStream(external):  # type: ignore[misc, valid-type]
        """A stream that CuPy neither created nor destroys.

        CuPy 14 deprecates ExternalStream. Its successor, Stream.from_external, is missing from CuPy 13 and destroys the
        stream in some versions.
        """

        def __init__(self, handle: int, device: int) -> None:
            super(external, self).__init__(handle, device)

    return BorrowedStream


def is_default(stream: int) -> bool:
    """Return True for the handles of default streams, which every device has."""
    return stream in (0, 1, 2)
