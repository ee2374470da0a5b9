"""CUDA devices through CuPy: its memory pools and its bindings of the CUDA runtime and driver.

CuPy is imported when a `CupyRuntime` is created. Errors of CuPy and CUDA are raised as DeviceError.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays.cuda import cupy_pinned, driver_memory
from pagecore.arrays.cuda.cupy_current import CurrentDevice, external_stream, failure, is_default
from pagecore.arrays.cuda.cupy_library import count_devices, import_cupy
from pagecore.arrays.cuda.driver_context import RELAXED, THREAD_LOCAL, CaptureMode, DriverContext
from pagecore.arrays.cuda.protocol import DeviceProperties, Event, RefusedDuringCapture
from pagecore.errors import DeviceError, NotEnoughMemory, UnsupportedOption

# A kernel needs an attribute to use more dynamic shared memory than this.
_PLAIN_SHARED_BYTES = 48 * 1024
# cudaErrorMemoryAllocation and cudaErrorNotReady; CuPy does not export them, here and below.
_ERROR_MEMORY_ALLOCATION, _ERROR_NOT_READY = 2, 600
# cudaErrorStreamCaptureUnsupported and cudaErrorStreamCaptureInvalidated: a capture, or one that an error has ended.
_ERRORS_CAPTURE = (900, 901)
# cudaHostRegisterPortable | cudaHostRegisterMapped.
_REGISTER_FLAGS = 3
# cudaErrorInvalidValue and cudaErrorNotSupported: replies to memory that other processes cannot open.
_ERRORS_NOT_SHAREABLE = (1, 801)
# Major versions with architecture-specific instructions (sm_90a); their cubins run on that one architecture.
_ARCHITECTURE_SPECIFIC = {9, 10, 11}


class CupyRuntime:
    """The `Runtime` of pagecore on CuPy; see `pagecore.arrays.cuda.protocol` for its methods.

    Each call makes its device current in the calling thread, and restores the device that was current before. A device
    that the process has not used is not restored, because that would create its context, which takes memory: to use
    several devices in a thread, make the one for other work current first (`torch.cuda.set_device`). Calls that CUDA
    forbids to all threads while one captures a graph, such as allocations and waits for events, are made in a mode in
    which they neither fail nor end the capture. The exception is `unmap_memory`: it waits for the whole device, which
    CUDA refuses in every mode during a capture.

    Raises
    ------
    DeviceError
        CuPy is missing or broken, or there is no usable device.
    """

    def __init__(self) -> None:
        self._cupy = import_cupy()
        self._runtime = self._cupy.cuda.runtime
        self._driver = self._cupy.cuda.driver
        self._num_devices = count_devices(self._runtime)
        self._properties: dict[int, DeviceProperties] = {}
        self._streams: list[Any] = []
        self._thread = threading.local()
        self._context = DriverContext()

    def num_devices(self) -> int:
        """Return the number of devices that the process sees."""
        return self._num_devices

    def properties(self, device: int) -> DeviceProperties:
        """Return the properties of a device; they are queried once."""
        if device not in self._properties:
            with self._on(device):
                self._properties[device] = self._query_properties(device)
        return self._properties[device]

    def memory_info(self, device: int) -> tuple[int, int]:
        """Return the free and the total memory of a device in bytes; blocks cached by CuPy's pool are not free."""
        with self._on(device):
            free, total = self._runtime.memGetInfo()
        return int(free), int(total)

    def current_stream(self, device: int) -> int:
        """Return CuPy's current stream."""
        with self._on(device):
            return int(self._cupy.cuda.get_current_stream(device).ptr)

    def allocate(self, num_bytes: int, device: int, stream: int) -> tuple[int, object]:
        """Allocate device memory from CuPy's pool for work of `stream`."""
        # In a capture of this thread it stays forbidden: a graph would use memory that is freed before it runs.
        mode = self._context.capture_mode(THREAD_LOCAL)
        with mode, self._on(device), external_stream(self._cupy, stream, device):
            try:
                memory = self._cupy.cuda.alloc(num_bytes)
            except MemoryError as error:
                raise NotEnoughMemory(f"cuda:{device} cannot allocate {num_bytes:,} bytes: {error}") from error
        return int(memory.ptr), memory

    def allocate_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate page-locked host memory: from CuPy's pool, or by cudaHostAlloc if it is large."""
        with self._relaxed(), self._on(None):
            try:
                if num_bytes > cupy_pinned.POOL_BYTES_MAX:
                    return cupy_pinned.allocate(self._cupy, num_bytes, self._free_pinned)
                memory = self._cupy.cuda.alloc_pinned_memory(max(num_bytes, 1))
            except (MemoryError, self._runtime.CUDARuntimeError) as error:  # the pool does not convert errors of CUDA
                if not isinstance(error, MemoryError) and error.status != _ERROR_MEMORY_ALLOCATION:
                    raise
                raise NotEnoughMemory(
                    f"the host cannot allocate {num_bytes:,} bytes of pinned memory: {error}"
                ) from error
        return np.ndarray(num_bytes, np.uint8, memory)

    def _free_pinned(self, address: int) -> None:
        with self._relaxed(), self._on(None):
            self._runtime.freeHost(address)

    def register_host(self, address: int, num_bytes: int, device: int) -> None:
        """Page-lock host memory by cudaHostRegister."""
        with self._relaxed(), self._on(device):
            try:
                self._runtime.hostRegister(address, num_bytes, _REGISTER_FLAGS)
            except self._runtime.CUDARuntimeError as error:
                if error.status in _ERRORS_CAPTURE:
                    raise RefusedDuringCapture(
                        f"CUDA cannot page-lock {num_bytes:,} bytes while a stream is being captured ({error}); call "
                        "again after the capture"
                    ) from error
                if error.status != _ERROR_MEMORY_ALLOCATION:
                    raise
                raise NotEnoughMemory(
                    f"the host cannot page-lock {num_bytes:,} bytes: {error}; raise `ulimit -l`, or use less memory"
                ) from error
            if int(self._runtime.pointerGetAttributes(address).devicePointer) != address:
                self._runtime.hostUnregister(address)
                raise DeviceError(
                    f"cuda:{device} sees registered host memory at another address than the host does; use memory that "
                    "CUDA allocates, such as a SwapSpace"
                )

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`."""
        with self._relaxed(), self._on(None):
            self._runtime.hostUnregister(address)

    def export_ipc(self, address: int, device: int) -> tuple[bytes, int]:
        """Return the handle of cudaIpcGetMemHandle and the offset in the allocation."""
        with self._on(device):
            try:
                handle = bytes(self._runtime.ipcGetMemHandle(address))
            except self._runtime.CUDARuntimeError as error:
                if error.status not in _ERRORS_NOT_SHAREABLE:
                    raise
                raise UnsupportedOption(
                    f"the memory at {address:#x} of cuda:{device} has no IPC handle ({error}): memory of cuMemCreate, "
                    "such as torch's expandable_segments, of cudaMallocAsync and of the host has none; allocate the "
                    "pool with cudaMalloc, or share host memory by a descriptor"
                ) from error
            return handle, address - driver_memory.allocation_start(address)

    def open_ipc(self, handle: bytes, device: int) -> int:
        """Map an allocation by cudaIpcOpenMemHandle."""
        with self._relaxed(), self._on(device):
            try:
                return int(self._runtime.ipcOpenMemHandle(handle))
            except self._runtime.CUDARuntimeError as error:
                raise DeviceError(
                    f"cuda:{device} cannot open the IPC handle ({error}); the exporting process must be another one, "
                    "still alive, and on the same device"
                ) from error

    def close_ipc(self, address: int, device: int) -> None:
        """Unmap an allocation by cudaIpcCloseMemHandle."""
        with self._relaxed(), self._on(device):
            self._runtime.ipcCloseMemHandle(address)

    def memory_granularity(self, device: int) -> int:
        """Return the least size of memory that cuMemCreate makes."""
        with self._on(device):
            return driver_memory.granularity(device)

    def reserve_address(self, num_bytes: int, device: int) -> int:
        """Reserve addresses by cuMemAddressReserve."""
        with self._on(device):
            return driver_memory.reserve_address(num_bytes)

    def map_memory(self, address: int, num_bytes: int, device: int) -> None:
        """Put memory at reserved addresses by cuMemCreate, cuMemMap and cuMemSetAccess."""
        with self._relaxed(), self._on(device):
            driver_memory.map_memory(address, num_bytes, device)

    def unmap_memory(self, address: int, num_bytes: int, device: int) -> None:
        """Wait for the device, which cuMemUnmap does not, and give memory back."""
        with self._relaxed(), self._on(device):
            try:
                self._runtime.deviceSynchronize()
            except self._runtime.CUDARuntimeError as error:
                if error.status not in _ERRORS_CAPTURE:
                    raise
                raise RefusedDuringCapture(
                    f"CUDA frees no memory while a stream is being captured ({error}); call again after the capture"
                ) from error
            driver_memory.unmap_memory(address, num_bytes)

    def free_address(self, address: int, num_bytes: int, device: int) -> None:
        """Give addresses back by cuMemAddressFree."""
        with self._on(device):
            driver_memory.free_address(address, num_bytes)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy bytes between any two addresses."""
        # Any device may be current for a copy on a created stream. A default stream is that of the current device.
        with self._on(self._device_of(target, source) if is_default(stream) else None):
            self._runtime.memcpyAsync(target, source, num_bytes, self._runtime.memcpyDefault, stream)

    def copy_rectangles(self, rectangles: NDArray[np.int64], stream: int) -> None:
        """Copy rows of bytes, by cudaMemcpyAsync where they have no gaps and by cudaMemcpy2DAsync elsewhere."""
        if not len(rectangles):
            return
        kind, copy, copy_rows = self._runtime.memcpyDefault, self._runtime.memcpyAsync, self._runtime.memcpy2DAsync
        with self._on(self._device_of(int(rectangles[0, 0]), int(rectangles[0, 2])) if is_default(stream) else None):
            for target, target_pitch, source, source_pitch, width, height in rectangles.tolist():
                if height == 1 or target_pitch == source_pitch == width:
                    copy(target, source, width * height, kind, stream)
                else:
                    copy_rows(target, target_pitch, source, source_pitch, width, height, kind, stream)

    def fill(self, target: int, byte: int, num_bytes: int, stream: int) -> None:
        """Set bytes of device memory."""
        with self._on(self._device_of(target)):
            self._runtime.memsetAsync(target, byte, num_bytes, stream)

    def make_stream(self, device: int) -> int:
        """Return a new non-blocking stream, which the runtime keeps."""
        with self._on(device):
            stream = self._cupy.cuda.Stream(non_blocking=True)
        self._streams.append(stream)
        return int(stream.ptr)

    def make_event(self, device: int) -> CupyEvent:
        """Return a new event without timing."""
        with self._on(device):
            return CupyEvent(self, device, self._cupy.cuda.Event(disable_timing=True))

    def wait_event(self, stream: int, event: Event) -> None:
        """Make later work of `stream` wait for an event."""
        assert isinstance(event, CupyEvent)
        with self._on(event.device):
            self._runtime.streamWaitEvent(stream, event.event.ptr)

    def synchronize(self, stream: int, device: int | None = None) -> None:
        """Wait for all work of a stream. A default stream is that of `device`, or of every device if it is None.

        A device that the process has not used has no work, and is left alone.
        """
        devices: Iterable[int | None] = [device]
        if device is None and is_default(stream):
            devices = [each for each in range(self._num_devices) if self._context.is_in_use(each)]
        for each in devices:
            with self._relaxed(), self._on(each):
                self._runtime.streamSynchronize(stream)

    def is_capturing(self, stream: int) -> bool:
        """Return True if work submitted to `stream` is captured in a graph."""
        if stream in (0, 1):  # never captured; querying them while another stream is being captured is an error
            return False
        with self._on(None):
            try:
                return bool(self._runtime.streamIsCapturing(stream))
            except self._runtime.CUDARuntimeError:
                raise
            except RuntimeError as error:  # CuPy's report of a capture that an error has ended
                raise failure(None, error) from error

    def load(self, name: str, device: int, image: Callable[[], tuple[bytes, str]], shared_bytes: int) -> CupyKernel:
        """Load a cubin; it stays loaded for the life of the process."""
        code, symbol = image()
        with self._relaxed(), self._on(device):
            try:
                module = self._driver.moduleLoadData(code)
            except self._driver.CUDADriverError as error:
                properties = self.properties(device)
                raise DeviceError(
                    f"cuda:{device} ({properties.name}, {properties.architecture}) cannot load the machine code of "
                    f"{name}: {error}. If the driver is older than the compiler, install a newer driver or an older "
                    "nvidia-cuda-nvrtc, and clear the folder of pagecore.ops.cuda.compilation.cubins.cache_folder()"
                ) from error
            function = self._driver.moduleGetFunction(module, symbol)
            if shared_bytes > _PLAIN_SHARED_BYTES:
                attribute = self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._driver.funcSetAttribute(function, attribute, shared_bytes)
        return CupyKernel(name, device, module, function)

    def launch(
        self,
        kernel: CupyKernel,
        grid: tuple[int, int, int],
        num_threads: int,
        shared_bytes: int,
        stream: int,
        parameters: int,
    ) -> None:
        """Launch a kernel whose one parameter is the struct at the address `parameters`."""
        slot = self._parameter_slot()
        slot.value = parameters
        with self._on(kernel.device):
            address = ctypes.addressof(slot)
            self._driver.launchKernel(kernel.function, *grid, num_threads, 1, 1, shared_bytes, stream, address, 0)

    def _parameter_slot(self) -> ctypes.c_void_p:
        """Return the array of one pointer that launches of this thread pass; the launch reads it without the GIL."""
        slot: ctypes.c_void_p | None = getattr(self._thread, "slot", None)
        if slot is None:
            slot = self._thread.slot = ctypes.c_void_p()
        return slot

    def _on(self, device: int | None) -> CurrentDevice:
        is_only = self._num_devices == 1
        return CurrentDevice(self._runtime, self._driver, self._context, self._thread, device, is_only)

    def _relaxed(self) -> CaptureMode:
        return self._context.capture_mode(RELAXED)

    def _device_of(self, *addresses: int) -> int | None:
        """Return the device of the first address that is in device memory; None if there is one device only."""
        if self._num_devices == 1:
            return None
        for address in addresses:
            try:
                attributes = self._runtime.pointerGetAttributes(address)
            except self._runtime.CUDARuntimeError as error:
                raise failure(None, error) from error
            if attributes.devicePointer and attributes.type in (2, 3):  # device or managed memory, not pinned
                return int(attributes.device)
        return None

    def _query_properties(self, device: int) -> DeviceProperties:
        fields = self._runtime.getDeviceProperties(device)
        major, minor = fields["major"], fields["minor"]
        return DeviceProperties(
            name=fields["name"].decode(),
            architecture=f"sm_{major}{minor}{'a' if major in _ARCHITECTURE_SPECIFIC else ''}",
            num_multiprocessors=fields["multiProcessorCount"],
            shared_bytes_per_block=fields["sharedMemPerBlockOptin"],
            shared_bytes_per_multiprocessor=fields["sharedMemPerMultiprocessor"],
        )


@dataclass(frozen=True)
class CupyKernel:
    """A loaded kernel: driver handles, valid on one device."""

    name: str
    device: int
    module: int
    function: int


class CupyEvent:
    """A point in the work of a stream."""

    def __init__(self, runtime: CupyRuntime, device: int, event: Any) -> None:
        self._owner = runtime
        self.device = device
        self.event = event

    def record(self, stream: int) -> None:
        """Record the work submitted to `stream` so far."""
        with self._owner._on(self.device):
            self._owner._runtime.eventRecord(self.event.ptr, stream)

    def synchronize(self) -> None:
        """Wait until the recorded work is done; return at once if nothing was recorded."""
        with self._owner._relaxed(), self._owner._on(self.device):
            self._owner._runtime.eventSynchronize(self.event.ptr)

    def is_done(self) -> bool:
        """Return True if the recorded work is done, or nothing was recorded; the host does not wait."""
        runtime = self._owner._runtime
        with self._owner._relaxed(), self._owner._on(self.device):
            status = runtime.eventQuery(self.event.ptr)  # returns errors, of earlier work too, instead of raising them
            if status not in (0, _ERROR_NOT_READY):
                raise runtime.CUDARuntimeError(status)
        return bool(status == 0)
