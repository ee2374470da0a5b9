"""Work of CupyRuntime: copies, events, synchronization, kernels, and launches on the right stream."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from pagecore.arrays.cuda.cupy_current import external_stream
from pagecore.arrays.cuda.cupy_runtime import CupyRuntime
from pagecore.errors import DeviceError
from tests.arrays.fake_cupy import BROKEN, CUDADriverError, CUDARuntimeError
from tests.capabilities import require


def test_copies_and_fills_use_the_stream(fake, runtime):
    fake.homes = {11: (1, 2)}
    runtime.copy(11, 12, 13, 77)
    runtime.fill(11, 255, 13, 77)
    calls = [call for call in fake.calls if call[0] != "setDevice"]
    assert calls == [("memcpyAsync", 0, 11, 12, 13, 4, 77), ("memsetAsync", 1, 11, 255, 13, 77)]


def test_rows_are_copied_in_one_call_and_as_one_run_where_they_have_no_gaps(fake, runtime):
    fake.homes = {11: (1, 2)}
    runtime.copy_rectangles(np.array([[11, 64, 12, 96, 32, 5], [21, 32, 22, 32, 32, 5], [31, 0, 32, 0, 32, 1]]), 77)
    expected = [("memcpy2DAsync", 11, 64, 12, 96, 32, 5, 4, 77), ("memcpyAsync", 21, 22, 160, 4, 77)]
    expected += [("memcpyAsync", 31, 32, 32, 4, 77)]
    assert fake.calls == [(name, 0, *arguments) for name, *arguments in expected]
    runtime.copy_rectangles(np.array([[11, 64, 12, 96, 32, 5]]), 0)
    assert fake.calls[-2][:2] == ("memcpy2DAsync", 1)  # of the device of the memory
    del fake.calls[:]
    runtime.copy_rectangles(np.empty((0, 6), np.int64), 77)
    assert fake.calls == []


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_the_default_stream_is_that_of_the_device_of_the_memory(fake, runtime, stream):
    fake.homes = {11: (1, 2), 12: (0, 1)}  # device memory of cuda:1, pinned memory
    runtime.copy(11, 12, 13, stream)
    runtime.copy(12, 11, 13, stream)
    runtime.copy(12, 12, 13, stream)
    runtime.fill(11, 0, 13, stream)
    assert [call[:2] for call in fake.calls if call[0] != "setDevice"] == [
        ("memcpyAsync", 1),
        ("memcpyAsync", 1),
        ("memcpyAsync", 0),
        ("memsetAsync", 1),
    ]


def test_events_are_recorded_and_waited_for_on_their_device(fake, runtime):
    event = runtime.make_event(1)
    event.record(77)
    runtime.wait_event(78, event)
    event.synchronize()
    number = event.event.ptr
    assert [call for call in fake.calls if call[0] != "setDevice"] == [
        ("Event", 1, True),
        ("eventRecord", 1, number, 77),
        ("streamWaitEvent", 1, 78, number),
        ("eventSynchronize", 1, number),
    ]


@pytest.mark.parametrize(("status", "done"), [(0, True), (600, False)])
def test_an_event_is_done_or_not_ready(fake, runtime, status, done):
    event = runtime.make_event(1)
    fake.event_status = status
    assert event.is_done() is done
    assert ("eventQuery", 1, event.event.ptr) in fake.calls


def test_an_event_after_failed_work_is_an_error_and_not_pending_for_ever(fake, runtime):
    """CuPy returns the status of a query without raising it, and its `Event.done` is False for every error."""
    event = runtime.make_event(1)
    fake.event_status = 700
    with pytest.raises(DeviceError, match="CUDA failed on cuda:1: 700"):
        event.is_done()
    assert fake.getDevice() == 0


def test_a_capture_that_an_error_has_ended_is_a_device_error(fake, runtime):
    fake.failures["streamIsCapturing"] = RuntimeError("an error has invalidated the capture sequence")
    with pytest.raises(DeviceError, match="an error has invalidated the capture"):
        runtime.is_capturing(77)
    fake.failures["streamIsCapturing"] = CUDARuntimeError(BROKEN)
    with pytest.raises(DeviceError, match=BROKEN):
        runtime.is_capturing(77)


def test_synchronize_waits_for_a_stream_and_for_the_default_stream_of_every_device(fake, runtime):
    runtime.synchronize(77)
    assert fake.calls == [("streamSynchronize", 0, 77)]
    del fake.calls[:]
    runtime.synchronize(0)
    assert [call for call in fake.calls if call[0] != "setDevice"] == [
        ("streamSynchronize", 0, 0),
        ("streamSynchronize", 1, 0),
    ]


def test_synchronize_leaves_devices_alone_that_nothing_has_used(fake, driver):
    driver.in_use = {1}
    runtime = CupyRuntime()
    fake.setDevice(1)
    del fake.calls[:]
    runtime.synchronize(0)
    assert fake.calls == [("setDevice", 1), ("streamSynchronize", 1, 0)]


def test_synchronize_with_a_device_waits_for_its_default_stream_only(fake, runtime):
    runtime.synchronize(0, 1)
    assert [call for call in fake.calls if call[0] != "setDevice"] == [("streamSynchronize", 1, 0)]


def test_the_default_stream_is_never_captured(fake, runtime):
    assert runtime.is_capturing(77)
    assert not runtime.is_capturing(0)
    assert fake.calls == [("streamIsCapturing", 0, 77)]


def test_the_current_stream_is_that_of_cupy(fake, runtime):
    assert runtime.current_stream(1) == 101


@pytest.mark.parametrize(("shared", "attributes"), [(48 * 1024, 0), (48 * 1024 + 1, 1)])
def test_a_kernel_is_loaded_on_its_device_with_its_limit_of_shared_memory(fake, runtime, shared, attributes):
    kernel = runtime.load("write_kv<float>", 1, lambda: (b"code", "_Z5write"), shared)
    assert (kernel.name, kernel.device, kernel.module, kernel.function) == ("write_kv<float>", 1, 900, 901)
    calls = [call for call in fake.calls if call[0] != "setDevice"]
    assert calls[:2] == [("moduleLoadData", 1, b"code"), ("moduleGetFunction", 1, 900, "_Z5write")]
    assert calls[2:] == [("funcSetAttribute", 1, 901, 8, shared)] * attributes


def test_a_failed_load_names_the_device_and_the_remedy(fake, runtime):
    fake.failures["moduleLoadData"] = CUDADriverError("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available")
    with pytest.raises(DeviceError, match=r"cuda:1 \(NVIDIA H200, sm_90a\) cannot load .* of write_kv: .*newer driver"):
        runtime.load("write_kv", 1, lambda: (b"code", "_Z5write"), 0)


def test_a_launch_passes_a_pointer_to_the_address_of_the_struct(fake, runtime):
    kernel = runtime.load("write_kv", 1, lambda: (b"code", "_Z5write"), 0)
    del fake.calls[:]
    for number in (41, 42):
        parameter = ctypes.c_int(number)
        runtime.launch(kernel, (3, 4, 5), 128, 1024, 77, ctypes.addressof(parameter))
    assert fake.launched == [41, 42]
    launches = [call for call in fake.calls if call[0] == "launchKernel"]
    assert launches == [("launchKernel", 1, 901, 3, 4, 5, 128, 1, 1, 1024, 77, 0)] * 2


def test_a_failed_launch_is_a_device_error(fake, runtime):
    kernel = runtime.load("write_kv", 0, lambda: (b"code", "_Z5write"), 0)
    fake.failures["launchKernel"] = CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
    parameter = ctypes.c_int(1)
    with pytest.raises(DeviceError, match="CUDA failed on cuda:0: CUDA_ERROR_INVALID_VALUE"):
        runtime.launch(kernel, (1, 1, 1), 32, 0, 77, ctypes.addressof(parameter))


def test_a_borrowed_stream_of_cupy_neither_warns_nor_is_destroyed():
    cupy = require("cupy")
    stream = external_stream(cupy, 12345, 1)
    assert isinstance(stream, cupy.cuda.ExternalStream)
    assert (stream.ptr, stream.device_id) == (12345, 1)
    assert external_stream(cupy, 0, 1).device_id == -1
    assert not hasattr(type(stream), "__del__")
