"""CupyRuntime calls CuPy on the right device, and its errors name what to install."""

from __future__ import annotations

import builtins
import ctypes
import gc
import sys
import threading

import numpy as np
import pytest

import pagecore
from pagecore.arrays import cuda
from pagecore.arrays.cuda import cupy_pinned, driver_memory, use_runtime
from pagecore.arrays.cuda.cupy_current import external_stream
from pagecore.arrays.cuda.cupy_runtime import CupyRuntime
from pagecore.arrays.cuda.protocol import DeviceProperties
from pagecore.errors import DeviceError, NotEnoughMemory, UnsupportedOption
from tests.arrays.fake_cupy import CUDADriverError, CUDARuntimeError, FakeCuda, OutOfMemoryError, make_cupy
from tests.arrays.fake_driver import FakeDriver, install
from tests.capabilities import require


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    driver = install(monkeypatch, FakeDriver())
    driver.in_use = {0, 1}
    return driver


@pytest.fixture
def fake(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", make_cupy(fake))
    return fake


@pytest.fixture
def runtime(fake):
    made = CupyRuntime()
    made.current_stream(0)  # gives this thread its context
    del fake.calls[:]
    return made


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


BROKEN = "cudaErrorIllegalAddress: an illegal memory access"


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


def test_memory_is_allocated_by_cupy_on_its_stream(fake, runtime):
    address, kept = runtime.allocate(1000, 1, 77)
    assert address == kept.ptr
    assert ("alloc", 1, 1000, 77) in fake.calls
    assert fake.streams == []
    runtime.allocate(8, 1, 0)
    assert fake.calls[-2:] == [("alloc", 1, 8, 0), ("setDevice", 0)]


def test_failed_allocations_name_the_size(fake, runtime):
    fake.failures["alloc"] = OutOfMemoryError("Out of memory allocating 1,000 bytes")
    with pytest.raises(NotEnoughMemory, match="cuda:1 cannot allocate 1,000 bytes: Out of memory"):
        runtime.allocate(1000, 1, 77)
    fake.failures["alloc_pinned_memory"] = OutOfMemoryError("no")
    with pytest.raises(NotEnoughMemory, match="cannot allocate 5 bytes of pinned memory"):
        runtime.allocate_pinned(5)


def test_a_lack_of_pinned_memory_differs_from_other_failures(fake, runtime):
    fake.failures["alloc_pinned_memory"] = CUDARuntimeError("cudaErrorMemoryAllocation: out of memory", 2)
    with pytest.raises(NotEnoughMemory, match="cannot allocate 5 bytes of pinned memory: cudaErrorMemoryAllocation"):
        runtime.allocate_pinned(5)
    fake.failures["alloc_pinned_memory"] = CUDARuntimeError(BROKEN, 700)
    with pytest.raises(DeviceError, match="CUDA failed"):
        runtime.allocate_pinned(5)


@pytest.mark.parametrize("size", [0, 5])
def test_pinned_memory_is_an_array_that_owns_it(fake, runtime, size):
    array = runtime.allocate_pinned(size)
    array[...] = 3
    assert array.dtype == np.uint8
    assert array.tolist() == [3] * size
    assert fake.calls == [("alloc_pinned_memory", 0, max(size, 1))]


LARGE = cupy_pinned.POOL_BYTES_MAX + 1


def test_large_pinned_memory_is_given_back_with_its_last_array(fake, runtime):
    """CuPy's pool would keep it, and a larger request would take new memory."""
    array = runtime.allocate_pinned(LARGE)
    assert (array.dtype, array.shape, array.flags.writeable) == (np.uint8, (LARGE,), True)
    assert fake.calls == [("hostAlloc", 0, LARGE, 1)]
    part, address = array[5:], array.ctypes.data
    assert list(fake.pinned) == [address]
    array[...] = 3
    del array
    gc.collect()
    assert part[-1] == 3
    assert list(fake.pinned) == [address]
    del part
    gc.collect()
    assert fake.pinned == {}
    assert fake.calls[-1] == ("freeHost", 0, address)
    runtime.allocate_pinned(LARGE - 1)
    assert fake.calls[-1] == ("alloc_pinned_memory", 0, LARGE - 1)


def test_large_pinned_memory_that_fails_is_asked_for_again_without_the_pool_s_spare_memory(fake, runtime):
    fake.failures["hostAlloc"] = CUDARuntimeError("cudaErrorMemoryAllocation: out of memory", 2)
    with pytest.raises(NotEnoughMemory, match=f"cannot allocate {LARGE:,} bytes of pinned memory: cudaErrorMemory"):
        runtime.allocate_pinned(LARGE)
    assert [call[0] for call in fake.calls] == ["hostAlloc", "free_all_blocks", "hostAlloc"]
    fake.failures["hostAlloc"] = CUDARuntimeError(BROKEN, 700)
    with pytest.raises(DeviceError, match="CUDA failed"):
        runtime.allocate_pinned(LARGE)
    assert fake.pinned == {}


def test_pinned_memory_that_cannot_be_freed_is_a_warning(fake, runtime):
    array = runtime.allocate_pinned(LARGE)
    fake.failures["freeHost"] = CUDARuntimeError(BROKEN, 700)
    with pytest.warns(ResourceWarning, match="pinned memory was not freed: CUDA failed"):
        array.base.__del__()
    del fake.failures["freeHost"]


def test_host_memory_is_registered_for_every_device_and_at_its_own_address(fake, runtime):
    runtime.register_host(4096, 8192, 1)
    assert ("hostRegister", 1, 4096, 8192, 3) in fake.calls
    runtime.unregister_host(4096)
    assert fake.calls[-1][0::2] == ("hostUnregister", 4096)
    fake.homes[8192] = (0, 0)  # seen at another address
    with pytest.raises(DeviceError, match="sees registered host memory at another address"):
        runtime.register_host(8192, 4096, 0)
    assert fake.calls[-1][0::2] == ("hostUnregister", 8192)


def test_memory_that_cannot_be_page_locked_is_an_error(fake, runtime):
    fake.failures["hostRegister"] = CUDARuntimeError("cudaErrorMemoryAllocation: out of memory", 2)
    with pytest.raises(NotEnoughMemory, match="cannot page-lock 4,096 bytes"):
        runtime.register_host(4096, 4096, 0)
    fake.failures["hostRegister"] = CUDARuntimeError(BROKEN, 700)
    with pytest.raises(DeviceError, match="CUDA failed on cuda:0"):
        runtime.register_host(4096, 4096, 0)


def test_memory_is_shared_by_the_handle_of_its_allocation(fake, runtime, monkeypatch):
    monkeypatch.setattr(driver_memory, "allocation_start", lambda address: 4096)
    assert runtime.export_ipc(5000, 1) == (bytes(range(64)), 904)
    assert ("ipcGetMemHandle", 1, 5000) in fake.calls
    assert runtime.open_ipc(b"handle", 1) == 12_345
    assert ("ipcOpenMemHandle", 1, b"handle") in fake.calls
    runtime.close_ipc(12_345, 1)
    assert ("ipcCloseMemHandle", 1, 12_345) in fake.calls


@pytest.mark.parametrize("status", [1, 801])
def test_memory_that_has_no_handle_is_refused_by_name(fake, runtime, status):
    fake.failures["ipcGetMemHandle"] = CUDARuntimeError("cudaErrorInvalidValue: invalid argument", status)
    with pytest.raises(UnsupportedOption, match=r"memory of cuMemCreate, such as torch's expandable_segments"):
        runtime.export_ipc(5000, 0)


def test_handles_that_cannot_be_made_or_opened_are_errors_of_the_device(fake, runtime):
    fake.failures["ipcGetMemHandle"] = CUDARuntimeError(BROKEN, 700)
    with pytest.raises(DeviceError, match="CUDA failed on cuda:0"):
        runtime.export_ipc(5000, 0)
    fake.failures["ipcOpenMemHandle"] = CUDARuntimeError("cudaErrorDeviceUninitialized", 201)
    with pytest.raises(DeviceError, match=r"cannot open the IPC handle \(cudaErrorDeviceUninitialized\)"):
        runtime.open_ipc(b"handle", 0)


def test_mapped_memory_is_given_back_after_the_work_of_its_device(fake, runtime, monkeypatch):
    def record(name, result=None):
        def called(*arguments):
            fake.call(name, *arguments)
            return result

        monkeypatch.setattr(driver_memory, name, called)

    record("granularity", 4096)
    record("reserve_address", 1 << 40)
    for name in ("map_memory", "unmap_memory", "free_address"):
        record(name)
    assert runtime.memory_granularity(1) == 4096
    assert runtime.reserve_address(8192, 1) == 1 << 40
    runtime.map_memory(1 << 40, 8192, 1)
    runtime.unmap_memory(1 << 40, 8192, 1)
    runtime.free_address(1 << 40, 8192, 1)
    assert [call for call in fake.calls if call[0] != "setDevice"] == [
        ("granularity", 1, 1),
        ("reserve_address", 1, 8192),
        ("map_memory", 1, 1 << 40, 8192, 1),
        ("deviceSynchronize", 1),
        ("unmap_memory", 1, 1 << 40, 8192),
        ("free_address", 1, 1 << 40, 8192),
    ]
    assert fake.getDevice() == 0


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


def test_with_one_device_the_device_of_an_address_is_not_queried(monkeypatch):
    fake = FakeCuda(num_devices=1)
    monkeypatch.setitem(sys.modules, "cupy", make_cupy(fake))
    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "pointerGetAttributes", None)
    CupyRuntime().fill(11, 255, 13, 0)
    assert fake.calls[-1] == ("memsetAsync", 0, 11, 255, 13, 0)


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


def test_tensors_live_in_cupy_s_memory(fake, runtime):
    with use_runtime(runtime):
        tensor = pagecore.zeros((2, 3), "float32", "cuda:1", stream=77)
    assert [call for call in fake.calls if call[0] != "setDevice"] == [
        ("alloc", 1, 24, 77),
        ("memsetAsync", 0, tensor.pointer, 0, 24, 77),
    ]


def test_a_borrowed_stream_of_cupy_neither_warns_nor_is_destroyed():
    cupy = require("cupy")
    stream = external_stream(cupy, 12345, 1)
    assert isinstance(stream, cupy.cuda.ExternalStream)
    assert (stream.ptr, stream.device_id) == (12345, 1)
    assert external_stream(cupy, 0, 1).device_id == -1
    assert not hasattr(type(stream), "__del__")


# ---- no usable device: one error for each reason


def refusal():
    with use_runtime(None), pytest.raises(DeviceError) as caught:
        cuda.runtime()
    return str(caught.value)


def import_fails(monkeypatch, error):
    plain = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "cupy":
            raise error
        return plain(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)


def test_without_cupy_the_extras_are_named(monkeypatch):
    import_fails(monkeypatch, ModuleNotFoundError("No module named 'cupy'", name="cupy"))
    assert "CuPy, which is not installed: install pagecore[cuda12] or pagecore[cuda13]" in refusal()


@pytest.mark.parametrize(
    "error",
    [
        ImportError("\n=====\nFailed to import CuPy.\nlibcublas.so.12: cannot open\n====="),
        ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock"),
        AttributeError("module has no attribute"),
    ],
)
def test_a_broken_cupy_is_named_with_the_first_line_of_its_error(monkeypatch, error):
    import_fails(monkeypatch, error)
    message = refusal()
    assert "CuPy is installed and does not work" in message
    assert "\n" not in message
    assert "install pagecore[cuda12]" in message


def test_cupy_for_rocm_is_refused(fake):
    sys.modules["cupy"].cuda.runtime.is_hip = True
    assert "built for ROCm" in refusal()


@pytest.mark.parametrize(
    ("driver", "error", "message"),
    [
        (0, "cudaErrorInsufficientDriver: CUDA driver version is insufficient", "no CUDA driver found"),
        (
            12080,
            "cudaErrorInsufficientDriver: CUDA driver version is insufficient",
            r"supports CUDA 12.8 and CuPy is built for CUDA 13.2: install pagecore[cuda12]",
        ),
        (13020, "cudaErrorNoDevice: no CUDA-capable device is detected", "sees no device (cudaErrorNoDevice"),
        (13020, "cudaErrorSystemDriverMismatch: mismatch", "sees no device (cudaErrorSystemDriverMismatch"),
    ],
)
def test_a_missing_driver_an_old_one_and_a_missing_device_are_distinct_errors(fake, driver, error, message):
    fake.driver_version = driver
    fake.failures["getDeviceCount"] = CUDARuntimeError(error)
    assert message in refusal()


def test_a_driver_without_devices_is_refused(fake):
    fake.num_devices = 0
    assert "sees no device (it counts 0): check nvidia-smi and CUDA_VISIBLE_DEVICES" in refusal()


def test_a_missing_device_is_named(fake):
    with use_runtime(None), pytest.raises(DeviceError, match="'cuda:2', but this process sees 2 CUDA devices"):
        pagecore.empty(3, device="cuda:2")
