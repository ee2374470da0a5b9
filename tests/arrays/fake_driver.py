"""A fake libcuda: the capture mode of each thread, and the devices that have a primary context."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


class FakeDriver:
    """The two functions of libcuda that `DriverContext` calls; each returns the status `status`."""

    def __init__(self) -> None:
        self.thread = threading.local()
        self.exchanged: list[int] = []
        self.in_use: set[int] = set()
        self.asked: list[int] = []
        self.status = 0

        def exchange(reference: Any) -> int:
            if self.status == 0:
                cell = reference._obj
                self.exchanged.append(cell.value)
                self.thread.mode, cell.value = cell.value, self.mode
            return self.status

        def get_state(device: int, flags: Any, active: Any) -> int:
            self.asked.append(device)
            active._obj.value = device in self.in_use
            return self.status

        # Functions, so that `argtypes` can be set.
        self.cuThreadExchangeStreamCaptureMode = exchange
        self.cuDevicePrimaryCtxGetState = get_state

    @property
    def mode(self) -> int:
        """The capture mode of the calling thread."""
        return getattr(self.thread, "mode", GLOBAL)


def install(monkeypatch: Any, driver: FakeDriver) -> FakeDriver:
    """Let runtimes that are made from now on find the driver."""

    def load(name: str) -> FakeDriver:
        assert name == "libcuda.so.1"
        return driver

    monkeypatch.setattr(ctypes, "PyDLL", load)
    return driver
