"""CupyRuntime calls CuPy on the right device, and leaves the current device and contexts as they were."""

from __future__ import annotations

import sys
import threading

import pytest

from pagecore.arrays.cuda.cupy_runtime import CupyRuntime
from pagecore.arrays.cuda.protocol import DeviceProperties
from pagecore.errors import DeviceError
from tests.arrays.fake_cupy import BROKEN, CUDARuntimeError, FakeCuda, make_cupy


def test_properties_are_queried_once_and_name_the_architecture(fake, runtime):
    assert runtime.num_devices() == 2
    expected = DeviceProperties("NVIDIA H200", "sm_90a", 132, 232448, 233472)
    assert runtime.properties(1) == runtime.properties(1) == expected
    assert [call for call in fake.calls if call[0] == "getDeviceProperties"] == [("getDeviceProperties", 1, 1)]


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [("8.0", "sm_80"), ("8.9", "sm_89"), ("9.0", "sm_90a"), ("10.0", "sm_100a"), ("12.0", "sm_120"), ("7.5", "sm_75")],
)
def test_architectures_with_specific_instructions_end_in_a(monkeypatch, capability, architecture):
    monkeypatch.setitem(sys.modules, "cupy", make_cupy(FakeCuda(capability=capability)))
    assert CupyRuntime().properties(0).architecture == architecture


def test_a_call_restores_the_current_device(fake, runtime):
    assert runtime.memory_info(1) == (5, 9)
    assert fake.calls == [("setDevice", 1), ("memGetInfo", 1), ("setDevice", 0)]
    assert fake.getDevice() == 0


def test_a_failing_call_restores_the_current_device(fake, runtime):
    fake.failures["memGetInfo"] = CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access")
    with pytest.raises(DeviceError, match="CUDA failed on cuda:1: cudaErrorIllegalAddress"):
        runtime.memory_info(1)
    assert fake.getDevice() == 0


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("getDevice", lambda runtime: runtime.memory_info(1)),
        ("setDevice 1", lambda runtime: runtime.memory_info(1)),
        ("setDevice 0", lambda runtime: runtime.memory_info(1)),
        ("pointerGetAttributes", lambda runtime: runtime.fill(11, 0, 13, 77)),
    ],
)
def test_errors_of_switching_devices_are_device_errors(fake, runtime, name, call):
    fake.failures[name] = CUDARuntimeError(BROKEN)
    with pytest.raises(DeviceError, match=f"CUDA failed on .*: {BROKEN}"):
        call(runtime)


@pytest.mark.parametrize("error", [CUDARuntimeError("cudaErrorAssert: first"), ValueError("first")])
def test_an_error_of_the_call_hides_the_error_of_restoring_the_device(fake, runtime, error):
    fake.failures = {"memGetInfo": error, "setDevice 0": CUDARuntimeError("cudaErrorAssert: second")}
    with pytest.raises((DeviceError, ValueError), match="first"):
        runtime.memory_info(1)


def test_a_new_thread_gets_a_context_before_its_first_call(fake, runtime):
    thread = threading.Thread(target=runtime.memory_info, args=(0,))
    thread.start()
    thread.join()
    assert fake.calls == [("setDevice", 0), ("memGetInfo", 0)]


def test_a_device_that_nothing_has_used_gets_no_context(fake, driver):
    """Since CUDA 12, cudaSetDevice creates the context of a device, also to restore it."""
    driver.in_use = {1}
    runtime = CupyRuntime()
    assert runtime.memory_info(1) == (5, 9)
    assert fake.calls == [("setDevice", 1), ("memGetInfo", 1)]
    assert fake.getDevice() == 1  # also for what follows in this thread
    runtime.allocate_pinned(5)
    assert fake.calls[2:] == [("alloc_pinned_memory", 1, 5)]


def test_a_device_that_others_have_used_since_is_restored(fake, driver, runtime):
    driver.in_use = {1}
    fake.setDevice(0)
    again = CupyRuntime()
    again.memory_info(1)
    fake.setDevice(0)
    driver.in_use.add(0)
    again.memory_info(1)
    assert fake.getDevice() == 0


def test_a_thread_without_a_context_uses_a_device_that_has_one(fake, driver):
    driver.in_use = {1}
    runtime = CupyRuntime()
    thread = threading.Thread(target=runtime.allocate_pinned, args=(5,))
    thread.start()
    thread.join()
    assert fake.calls == [("setDevice", 1), ("alloc_pinned_memory", 1, 5)]


def test_without_any_context_the_current_device_gets_one(fake, driver):
    driver.in_use = set()
    CupyRuntime().allocate_pinned(5)
    assert fake.calls == [("setDevice", 0), ("alloc_pinned_memory", 0, 5)]


@pytest.mark.parametrize("lacks", ["function", "success"])
def test_every_device_is_restored_where_the_driver_does_not_answer(fake, driver, lacks):
    driver.in_use = set()
    if lacks == "function":
        del driver.cuDevicePrimaryCtxGetState
    else:
        driver.status = 3
    runtime = CupyRuntime()
    runtime.memory_info(1)
    assert fake.getDevice() == 0
    if lacks == "success":
        driver.status = 0  # it is asked again
        runtime.memory_info(1)
        assert fake.getDevice() == 1


def test_the_state_of_a_device_in_use_is_queried_once(fake, driver, runtime):
    for _ in range(3):
        runtime.memory_info(1)
    assert driver.asked.count(0) == 1


def test_with_one_device_the_current_device_is_queried_once_in_a_thread(monkeypatch):
    fake = FakeCuda(num_devices=1)
    monkeypatch.setitem(sys.modules, "cupy", make_cupy(fake))
    runtime = CupyRuntime()
    runtime.fill(11, 255, 13, 0)

    def refuse():
        raise CUDARuntimeError("another query")

    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDevice", refuse)
    runtime.fill(11, 255, 13, 0)
    fake.failures["memGetInfo"] = CUDARuntimeError(BROKEN)
    with pytest.raises(DeviceError, match=f"CUDA failed on cuda:0: {BROKEN}"):
        runtime.memory_info(0)
    refused = []

    def query():
        with pytest.raises(DeviceError, match="another query"):
            runtime.fill(11, 255, 13, 0)
        refused.append(True)

    thread = threading.Thread(target=query)  # it has no context yet
    thread.start()
    thread.join()
    assert refused


def test_with_one_device_another_is_an_error_after_the_first_call_too(monkeypatch):
    fake = FakeCuda(num_devices=1)
    monkeypatch.setitem(sys.modules, "cupy", make_cupy(fake))
    runtime = CupyRuntime()
    runtime.memory_info(0)
    fake.failures["setDevice 1"] = CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
    with pytest.raises(DeviceError, match="CUDA failed on cuda:1: cudaErrorInvalidDevice"):
        runtime.memory_info(1)
