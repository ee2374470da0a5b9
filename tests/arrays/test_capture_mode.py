"""Calls that CUDA forbids to all threads while one captures are made in a mode that permits them."""

from __future__ import annotations

import ctypes
import sys

import pytest

from pagecore.arrays.cuda import driver_memory
from pagecore.arrays.cuda.cupy_runtime import CupyRuntime
from pagecore.arrays.cuda.pinned import PinnedRing
from pagecore.arrays.cuda.protocol import RefusedDuringCapture
from pagecore.errors import DeviceError
from tests.arrays.fake_cupy import CUDARuntimeError, FakeCuda, make_cupy
from tests.arrays.fake_driver import GLOBAL, RELAXED, THREAD_LOCAL, FakeDriver, install

UNSUPPORTED = "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing"


class CapturingCuda(FakeCuda):
    """CUDA while another thread captures in the mode "global"; `modes` has the mode of the thread in each call."""

    unsafe = ("hostRegister", "hostUnregister", "alloc", "alloc_pinned_memory", "eventQuery", "eventSynchronize")
    unsafe += ("streamSynchronize", "moduleLoadData", "hostAlloc", "freeHost", "deviceSynchronize")
    unsafe += ("ipcOpenMemHandle", "ipcCloseMemHandle", "map_memory", "unmap_memory")

    def __init__(self, driver):
        super().__init__()
        self.driver, self.modes = driver, {}

    def call(self, name, *arguments):
        self.modes[name] = self.driver.mode
        if name in self.unsafe and self.driver.mode == GLOBAL:
            raise CUDARuntimeError(UNSUPPORTED, 900)
        super().call(name, *arguments)


@pytest.fixture
def driver(monkeypatch):
    return install(monkeypatch, FakeDriver())


@pytest.fixture
def fake(monkeypatch, driver):
    fake = CapturingCuda(driver)
    monkeypatch.setitem(sys.modules, "cupy", make_cupy(fake))
    return fake


@pytest.fixture
def runtime(fake):
    return CupyRuntime()


@pytest.fixture
def mapping(monkeypatch, fake):
    """The driver's functions of mapped memory, as calls of the fake."""
    for name in ("map_memory", "unmap_memory"):
        monkeypatch.setattr(driver_memory, name, lambda *arguments, name=name: fake.call(name, *arguments))


CALLS = {
    "hostRegister": lambda runtime: runtime.register_host(4096, 4096, 1),
    "hostUnregister": lambda runtime: (runtime.register_host(4096, 4096, 1), runtime.unregister_host(4096)),
    "alloc_pinned_memory": lambda runtime: runtime.allocate_pinned(5),
    "hostAlloc": lambda runtime: runtime.allocate_pinned(2 << 20),
    "freeHost": lambda runtime: runtime.allocate_pinned(2 << 20),
    "eventQuery": lambda runtime: runtime.make_event(1).is_done(),
    "eventSynchronize": lambda runtime: runtime.make_event(1).synchronize(),
    "streamSynchronize": lambda runtime: runtime.synchronize(77),
    "moduleLoadData": lambda runtime: runtime.load("write_kv", 1, lambda: (b"code", "_Z5write"), 0),
    "ipcOpenMemHandle": lambda runtime: runtime.open_ipc(b"handle", 1),
    "ipcCloseMemHandle": lambda runtime: runtime.close_ipc(4096, 1),
    "map_memory": lambda runtime: runtime.map_memory(1 << 40, 8192, 1),
    "unmap_memory": lambda runtime: runtime.unmap_memory(1 << 40, 8192, 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_during_the_capture_of_another_thread_is_permitted(fake, driver, runtime, mapping, name):
    CALLS[name](runtime)
    assert fake.modes[name] == RELAXED
    assert driver.mode == GLOBAL  # as before


def test_device_memory_is_allocated_beyond_captures_of_other_threads_alone(fake, driver, runtime):
    runtime.allocate(8, 1, 77)
    assert fake.modes["alloc"] == THREAD_LOCAL
    assert driver.mode == GLOBAL


def test_launches_copies_and_records_change_no_mode(fake, driver, runtime):
    kernel = runtime.load("write_kv", 0, lambda: (b"code", "_Z5write"), 0)
    event = runtime.make_event(0)
    del driver.exchanged[:]
    parameter = ctypes.c_int(1)
    runtime.launch(kernel, (1, 1, 1), 32, 0, 77, ctypes.addressof(parameter))
    runtime.copy(11, 12, 13, 77)
    runtime.fill(11, 0, 13, 77)
    event.record(77)
    runtime.wait_event(78, event)
    assert driver.exchanged == []


def test_a_failing_call_restores_the_mode_of_the_thread(fake, driver, runtime):
    driver.thread.mode = THREAD_LOCAL
    fake.failures["eventSynchronize"] = CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access")
    event = runtime.make_event(0)
    with pytest.raises(DeviceError, match="IllegalAddress"):
        event.synchronize()
    assert driver.mode == THREAD_LOCAL


@pytest.mark.parametrize("lacks", ["library", "function", "success"])
def test_without_the_driver_s_function_calls_are_made_in_the_mode_of_the_thread(monkeypatch, fake, driver, lacks):
    if lacks == "library":
        monkeypatch.setattr(ctypes, "PyDLL", lambda name: (_ for _ in ()).throw(OSError("no libcuda.so.1")))
    elif lacks == "function":
        del driver.cuThreadExchangeStreamCaptureMode
    else:
        driver.status = 3
    fake.unsafe = ()
    CupyRuntime().synchronize(77)
    assert fake.modes["streamSynchronize"] == GLOBAL


def test_a_refused_registration_names_the_capture(monkeypatch, fake, driver):
    driver.status = 3
    with pytest.raises(RefusedDuringCapture, match="cannot page-lock 4,096 bytes while a stream is being captured"):
        CupyRuntime().register_host(4096, 4096, 0)


def test_the_destructor_of_a_ring_waits_in_a_thread_that_captures(fake, driver, runtime):
    ring = PinnedRing(runtime, 0, 1)
    slot = ring.take()
    slot.reserve(8)
    slot.send(0, 8, 11, 77)
    ring.__del__()
    assert fake.modes["eventSynchronize"] == RELAXED
