"""State of threads and contexts in the CUDA driver: the functions of libcuda for which CuPy has no binding."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_uint
from types import TracebackType
from typing import Any

# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: captures of other threads forbid nothing. CU_STREAM_CAPTURE_MODE_RELAXED: nor
# does a capture of this thread, except for calls that conflict with it, such as a wait for an event recorded in it.
THREAD_LOCAL, RELAXED = 1, 2


class CaptureMode:
    """Context in which captures of streams forbid fewer calls to this thread, and the calls do not end the captures.

    In the mode "global", which is the default of CUDA and of torch, a capture of any thread forbids calls such as
    cudaHostRegister and cudaEventQuery to all threads.
    """

    __slots__ = ("_before", "_exchange", "_mode")

    def __init__(self, exchange: Any, mode: int) -> None:
        self._exchange = exchange
        self._mode = mode
        self._before: c_int | None = None

    def __enter__(self) -> None:
        mode = c_int(self._mode)
        if self._exchange is not None and self._exchange(byref(mode)) == 0:
            self._before = mode  # overwritten by the call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            self._exchange(byref(self._before))


class DriverContext:
    """Functions of libcuda, looked up once. Without libcuda modes stay as they are, and every device is in use."""

    def __init__(self) -> None:
        try:
            # Neither function waits, so they keep the GIL.
            library: Any = ctypes.PyDLL("libcuda.so.1")
        except OSError:
            library = None
        self._exchange = _function(library, "cuThreadExchangeStreamCaptureMode", POINTER(c_int))
        self._get_state = _function(library, "cuDevicePrimaryCtxGetState", c_int, POINTER(c_uint), POINTER(c_int))
        self._in_use: set[int] = set()

    def capture_mode(self, mode: int) -> CaptureMode:
        """Return a context for calls that captures would forbid."""
        return CaptureMode(self._exchange, mode)

    def is_in_use(self, device: int) -> bool:
        """Return True if the device has a primary context; making a device current creates one, which takes memory."""
        if device in self._in_use:
            return True
        flags, is_active = c_uint(), c_int()
        if self._get_state is None or self._get_state(device, byref(flags), byref(is_active)) != 0:
            return True
        if is_active.value:
            self._in_use.add(device)
        return bool(is_active.value)

    def used_device(self, device: int, num_devices: int) -> int:
        """Return a device that is in use: `device`, or the first of the others; `device` if none is."""
        if self.is_in_use(device):
            return device
        return next((each for each in range(num_devices) if self.is_in_use(each)), device)


def _function(library: Any, name: str, *signature: Any) -> Any:
    """Return a function of libcuda, or None if the driver lacks it."""
    function = getattr(library, name, None)
    if function is not None:
        function.argtypes = signature
    return function
