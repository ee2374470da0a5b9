"""Memory of CupyRuntime: allocation, pinned and registered memory, handles, and mappings."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

import pagecore
from pagecore.arrays.cuda import cupy_pinned, driver_memory, use_runtime
from pagecore.arrays.cuda.cupy_runtime import CupyRuntime
from pagecore.arrays.cuda.protocol import RefusedDuringCapture
from pagecore.errors import DeviceError, NotEnoughMemory, UnsupportedOption
from tests.arrays.fake_cupy import BROKEN, CUDARuntimeError, FakeCuda, OutOfMemoryError, make_cupy


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


@pytest.mark.parametrize("status", [900, 901])
def test_memory_is_not_given_back_during_a_capture_nor_after_an_error_in_it(fake, runtime, status):
    fake.failures["deviceSynchronize"] = CUDARuntimeError("cudaErrorStreamCapture", status)
    with pytest.raises(RefusedDuringCapture, match="frees no memory while a stream is being captured"):
        runtime.unmap_memory(1 << 40, 8192, 1)
    fake.failures["hostRegister"] = CUDARuntimeError("cudaErrorStreamCapture", status)
    with pytest.raises(RefusedDuringCapture, match="cannot page-lock 4,096 bytes"):
        runtime.register_host(4096, 4096, 0)


def test_with_one_device_the_device_of_an_address_is_not_queried(monkeypatch):
    fake = FakeCuda(num_devices=1)
    monkeypatch.setitem(sys.modules, "cupy", make_cupy(fake))
    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "pointerGetAttributes", None)
    CupyRuntime().fill(11, 255, 13, 0)
    assert fake.calls[-1] == ("memsetAsync", 0, 11, 255, 13, 0)


def test_tensors_live_in_cupy_s_memory(fake, runtime):
    with use_runtime(runtime):
        tensor = pagecore.zeros((2, 3), "float32", "cuda:1", stream=77)
    assert [call for call in fake.calls if call[0] != "setDevice"] == [
        ("alloc", 1, 24, 77),
        ("memsetAsync", 0, tensor.pointer, 0, 24, 77),
    ]
