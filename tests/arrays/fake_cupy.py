"""A fake `cupy` without a device: the names that pagecore uses, with the parameters of CuPy 13.6 and 14.

Memory is the host's. `calls` is what the CUDA runtime and driver were asked for, each with the device that was current.
"""

from __future__ import annotations

import ctypes
import threading
import types
import warnings
from typing import Any

BROKEN = "cudaErrorIllegalAddress: an illegal memory access"


class CUDARuntimeError(RuntimeError):
    """CuPy's error, which has a status; with a message as well, where a test needs one."""

    def __init__(self, message: str | int, status: int = 999) -> None:
        super().__init__(message)
        self.status = message if isinstance(message, int) else status


class CUDADriverError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class FakeCuda:
    """State of the fake `cupy.cuda`: two devices, each with one current stream."""

    def __init__(self, num_devices: int = 2, driver: int = 13020, built: int = 13020, capability: str = "9.0") -> None:
        self.num_devices, self.driver_version, self.built = num_devices, driver, built
        self.capability = tuple(int(number) for number in capability.split("."))
        self.calls: list[tuple[Any, ...]] = []
        self.failures: dict[str, Exception] = {}
        self.thread = threading.local()
        self.streams: list[Any] = []  # streams entered and not yet left
        self.homes: dict[int, tuple[int, int]] = {}  # address: (device, kind of memory)
        self.launched: list[int] = []
        self.event_status = 0
        self.pinned: dict[int, Any] = {}  # memory of cudaHostAlloc

    # ---- effects of the functions

    def call(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, self.getDevice(), *arguments))
        if name in self.failures:
            raise self.failures[name]

    def getDevice(self) -> int:
        if "getDevice" in self.failures:
            raise self.failures["getDevice"]
        return getattr(self.thread, "device", 0)

    def setDevice(self, device: int) -> None:
        if device >= self.num_devices:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self.calls.append(("setDevice", device))
        if f"setDevice {device}" in self.failures:
            raise self.failures[f"setDevice {device}"]
        self.thread.device = device

    def getDeviceCount(self) -> int:
        if "getDeviceCount" in self.failures:
            raise self.failures["getDeviceCount"]
        return self.num_devices

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        self.call("getDeviceProperties", device)
        return {
            "name": b"NVIDIA H200",
            "major": self.capability[0],
            "minor": self.capability[1],
            "multiProcessorCount": 132,
            "sharedMemPerBlockOptin": 232448,
            "sharedMemPerMultiprocessor": 233472,
        }

    def pointerGetAttributes(self, address: int) -> Any:
        if "pointerGetAttributes" in self.failures:
            raise self.failures["pointerGetAttributes"]
        device, kind = self.homes.get(address, (-1, 0))
        return types.SimpleNamespace(device=device, type=kind, devicePointer=address if kind else 0, hostPointer=0)

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        self.call("hostRegister", address, size, flags)
        self.homes.setdefault(address, (0, 1))

    def hostUnregister(self, address: int) -> None:
        self.call("hostUnregister", address)
        self.homes.pop(address)

    def eventQuery(self, event: int) -> int:
        self.call("eventQuery", event)
        return self.event_status

    def launchKernel(self, *arguments: int) -> None:
        (parameters,) = arguments[9:10]
        struct = ctypes.c_void_p.from_address(parameters).value
        assert struct is not None
        self.launched.append(ctypes.c_int.from_address(struct).value)
        self.call("launchKernel", *arguments[:9], arguments[10])

    def alloc(self, size: int) -> Any:
        self.call("alloc", size, self.streams[-1].ptr)
        kept = ctypes.create_string_buffer(size)
        return types.SimpleNamespace(ptr=ctypes.addressof(kept), mem=kept)

    def alloc_pinned_memory(self, size: int) -> Any:
        self.call("alloc_pinned_memory", size)
        return bytearray(size)

    def hostAlloc(self, size: int, flags: int) -> int:
        self.call("hostAlloc", size, flags)
        kept = ctypes.create_string_buffer(b"\xab" * size, size)
        self.pinned[ctypes.addressof(kept)] = kept
        return ctypes.addressof(kept)

    def freeHost(self, address: int) -> None:
        self.call("freeHost", address)
        del self.pinned[address]

    def get_current_stream(self, device_id: int = -1) -> Any:
        self.call("get_current_stream", device_id)
        return types.SimpleNamespace(ptr=100 + device_id, device_id=device_id)


def make_cupy(cuda: FakeCuda) -> types.ModuleType:
    """Return the module; its functions append their arguments to `cuda.calls`."""

    def forwarded(name: str, result: Any = None) -> Any:
        def function(*arguments: Any) -> Any:
            cuda.call(name, *arguments)
            return result

        return function

    class _BaseStream:
        def __init__(self, ptr: int, device_id: int) -> None:
            self.ptr, self.device_id = ptr, device_id

        def __enter__(self) -> Any:
            assert self.device_id in (-1, cuda.getDevice()), "a stream of another device than the current one"
            cuda.streams.append(self)
            return self

        def __exit__(self, *_: object) -> None:
            cuda.streams.pop()

    class ExternalStream(_BaseStream):
        def __init__(self, ptr: int, device_id: int = -1) -> None:
            warnings.warn("ExternalStream is deprecated", DeprecationWarning, stacklevel=2)
            super().__init__(ptr, device_id)

    class Event:
        number = 500

        def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
            Event.number += 1
            self.ptr = Event.number
            cuda.call("Event", disable_timing)

    runtime = types.SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        is_hip=False,
        memcpyDefault=4,
        hostAllocPortable=1,
        driverGetVersion=lambda: cuda.driver_version,
        runtimeGetVersion=lambda: cuda.built,
        memGetInfo=forwarded("memGetInfo", (5, 9)),
        memcpyAsync=forwarded("memcpyAsync"),
        memcpy2DAsync=forwarded("memcpy2DAsync"),
        memsetAsync=forwarded("memsetAsync"),
        eventRecord=forwarded("eventRecord"),
        eventSynchronize=forwarded("eventSynchronize"),
        streamWaitEvent=forwarded("streamWaitEvent"),
        streamSynchronize=forwarded("streamSynchronize"),
        streamIsCapturing=forwarded("streamIsCapturing", True),
        deviceSynchronize=forwarded("deviceSynchronize"),
        ipcGetMemHandle=forwarded("ipcGetMemHandle", bytes(range(64))),
        ipcOpenMemHandle=forwarded("ipcOpenMemHandle", 12_345),
        ipcCloseMemHandle=forwarded("ipcCloseMemHandle"),
        **{
            name: getattr(cuda, name)
            for name in (
                *("getDevice", "setDevice", "getDeviceCount", "getDeviceProperties", "pointerGetAttributes"),
                *("hostRegister", "hostUnregister", "hostAlloc", "freeHost", "eventQuery"),
            )
        },
    )
    driver = types.SimpleNamespace(
        CUDADriverError=CUDADriverError,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        moduleLoadData=forwarded("moduleLoadData", 900),
        moduleGetFunction=forwarded("moduleGetFunction", 901),
        funcSetAttribute=forwarded("funcSetAttribute"),
        launchKernel=cuda.launchKernel,
    )
    module = types.ModuleType("cupy")
    pool = types.SimpleNamespace(free_all_blocks=forwarded("free_all_blocks"))
    module.get_default_pinned_memory_pool = lambda: pool  # type: ignore[attr-defined]
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        runtime=runtime,
        driver=driver,
        ExternalStream=ExternalStream,
        Event=Event,
        alloc=cuda.alloc,
        alloc_pinned_memory=cuda.alloc_pinned_memory,
        get_current_stream=cuda.get_current_stream,
    )
    return module
