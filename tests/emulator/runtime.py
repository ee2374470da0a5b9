"""Emulated CUDA runtime: implements `pagecore.arrays.cuda.current.Runtime` on host memory."""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays.cuda.protocol import DeviceProperties, Event, RefusedDuringCapture
from pagecore.errors import DeviceError, UnsupportedOption
from tests.emulator import build
from tests.emulator.streams import Marker, Streams

# Fields of emulator::Counts in native/machine.hpp.
COUNTED = ("read_bytes", "copied_bytes", "written_bytes", "matrix_loads", "matrix_conflicts", "most_accesses")
# The least of all supported architectures: shared memory of a block (sm_86, sm_89, sm_120), and bytes of a launch's
# parameters (before CUDA 12.1).
SHARED_BYTES = 99 * 1024
PARAMETER_BYTES = 4096


class EmulatorError(AssertionError):
    """An error of a kernel, which a GPU might not report. The message names kernel, block, thread and line."""


class Instance(ctypes.Structure):
    """emulator::Instance in native/instance.hpp."""

    _fields_ = [("kernel", ctypes.c_void_p), ("parameter_bytes", ctypes.c_uint64), ("max_threads", ctypes.c_int)]


@dataclass
class Kernel:
    """A loaded instance."""

    name: str
    library: ctypes.CDLL
    instance: int
    parameter_bytes: int
    max_threads: int
    shared_bytes: int = 0


class Memory:
    """An allocation of device memory, which is freed with this object."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address, self.num_bytes = address, num_bytes
        self.finalizer: Any = None

    def free(self) -> None:
        self.finalizer()


class EmulatedEvent:
    def __init__(self, runtime: EmulatedRuntime) -> None:
        self._runtime = runtime
        self.marker: Marker | None = None

    def record(self, stream: int) -> None:
        self._runtime.counts["records"] += 1
        self.marker = self._runtime.streams.mark(stream)

    def synchronize(self) -> None:
        self._runtime.counts["event_synchronizes"] += 1
        self._runtime.streams.refuse_any_capture("the host waits for an event")
        if self.marker is not None:
            self.marker.refuse_captured()
            self._runtime.streams.drain(self.marker.stream, self.marker)

    def is_done(self) -> bool:
        self._runtime.counts["event_queries"] += 1
        self._runtime.streams.refuse_any_capture("the host queries an event")
        if self.marker is not None:
            self.marker.refuse_captured()
        return self.marker is None or self.marker.passed


class EmulatedRuntime:
    """Emulated device. Work runs at once or, if `streams.deferred` is set, when the host waits for it.

    Parameters
    ----------
    sources : Path
        Folder of the manifest and the kernels.
    folder : Path
        Folder of the compiled libraries.
    seed : int
        Seed of the order in which blocks, warps and lanes run; 0: by number. May be set at any time.
    num_multiprocessors, num_devices : int
        Properties that the runtime reports.

    Attributes
    ----------
    may_overwrite : bool
        True if several threads may write different values to one address, as for a duplicate slot.
    stream : int
        The current stream.
    streams : Streams
        All streams, with their queues and captures.
    counts : Counter
        Number of calls: allocations, pinned_allocations, copies, fills, launches, records, waits, synchronizes,
        event_synchronizes, loads. Work of kernels: read_bytes, copied_bytes (asynchronous), written_bytes;
        matrix_loads, and matrix_conflicts (extra passes over the banks of shared memory for them); most_accesses, the
        largest number of accesses to device memory of a thread between two collectives, added up over launches.
    allocated : dict
        Bytes of each allocation of device memory, by address.
    launched : list of str
        Names of the launched instances, in order.
    """

    def __init__(
        self,
        sources: Path = build.SOURCES,
        folder: Path = build.FOLDER,
        *,
        seed: int = 0,
        num_multiprocessors: int = 4,
        num_devices: int = 1,
    ) -> None:
        self.seed = seed
        self.may_overwrite = False
        self.stream = 0
        self.streams = Streams()
        self.counts: Counter[str] = Counter()
        self.launched: list[str] = []
        self.total_bytes = 1 << 34
        self._used_bytes = 0
        self.allocated: dict[int, int] = {}
        self._reserved: dict[int, NDArray[np.uint8]] = {}
        self._sources, self._folder = sources, folder
        self._num_devices = num_devices
        self._properties = DeviceProperties("emulated", "sm_90a", num_multiprocessors, SHARED_BYTES, 228 * 1024)
        self._kernels: dict[str, Kernel] = {}
        self._engine = build.engine()

    def num_devices(self) -> int:
        return self._num_devices

    def properties(self, device: int) -> DeviceProperties:
        return self._properties

    def memory_info(self, device: int) -> tuple[int, int]:
        return self.total_bytes - self._used_bytes, self.total_bytes

    def current_stream(self, device: int) -> int:
        return self.stream

    def allocate(self, num_bytes: int, device: int, stream: int) -> tuple[int, object]:
        self.counts["allocations"] += 1
        self.streams.refuse_any_capture("device memory is allocated")
        address = self._engine.pc_allocate(max(num_bytes, 1))
        if not address:
            raise DeviceError(f"the emulated device cannot allocate {num_bytes} bytes")
        self._used_bytes += num_bytes
        self.allocated[address] = max(num_bytes, 1)
        memory = Memory(address, num_bytes)
        memory.finalizer = finalizer = weakref.finalize(memory, self._free, address, num_bytes, stream)
        finalizer.atexit = False
        return address, memory

    def _free(self, address: int, num_bytes: int, stream: int) -> None:
        """Free memory in the order of the stream for which it was allocated."""
        self._used_bytes -= num_bytes
        self.allocated.pop(address, None)
        self.streams.submit(stream, lambda: self._engine.pc_release(address))

    def allocate_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        self.counts["pinned_allocations"] += 1
        self.streams.refuse_any_capture("pinned memory is allocated")
        array = np.full(max(num_bytes, 1), 0xFF, np.uint8)
        address = array.ctypes.data
        self._engine.pc_add_host_memory(address, array.nbytes)
        weakref.finalize(array, self._engine.pc_release, address).atexit = False
        return array[:num_bytes]

    def register_host(self, address: int, num_bytes: int, device: int) -> None:
        self.counts["registrations"] += 1
        if address % 4096 or num_bytes % 4096:
            raise DeviceError(f"{num_bytes} bytes at {address:#x} are not whole pages")
        self._engine.pc_add_host_memory(address, num_bytes)

    def unregister_host(self, address: int) -> None:
        self.counts["registrations"] -= 1
        self._engine.pc_release(address)

    def export_ipc(self, address: int, device: int) -> tuple[bytes, int]:
        for start, size in self.allocated.items():
            if start <= address < start + size:
                return start.to_bytes(64, "little"), address - start
        raise UnsupportedOption(f"the memory at {address:#x} has no IPC handle; memory of cuMemCreate has none")

    def open_ipc(self, handle: bytes, device: int) -> int:
        address = int.from_bytes(handle, "little")
        if address not in self.allocated:
            raise DeviceError("the handle's process has ended")
        self.counts["opened"] += 1
        return address

    def close_ipc(self, address: int, device: int) -> None:
        self.counts["opened"] -= 1

    def memory_granularity(self, device: int) -> int:
        return 1 << 16

    def reserve_address(self, num_bytes: int, device: int) -> int:
        kept = np.zeros(num_bytes + 256, np.uint8)
        address = -(-kept.ctypes.data // 256) * 256
        self._reserved[address] = kept
        return address

    def map_memory(self, address: int, num_bytes: int, device: int) -> None:
        self.streams.refuse_any_capture("device memory is mapped")
        self._reserved[address].fill(0xFF)
        self._used_bytes += num_bytes
        self._engine.pc_add_host_memory(address, num_bytes)

    def unmap_memory(self, address: int, num_bytes: int, device: int) -> None:
        try:
            self.streams.refuse_any_capture("the host waits for a device")
        except DeviceError as error:
            raise RefusedDuringCapture(str(error)) from error
        for stream in self.streams.known():
            self.streams.drain(stream)
        self._used_bytes -= num_bytes
        self._engine.pc_release(address)

    def free_address(self, address: int, num_bytes: int, device: int) -> None:
        del self._reserved[address]

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self.counts["copies"] += 1
        if num_bytes == 0:
            return
        known = [address for address in (target, source) if self._is_known(address)]
        for address in known:
            self.expect_allocated(address, num_bytes)
        held = source
        if len(known) < 2:
            self.streams.refuse_capture(stream, "pageable memory is copied")
        if source not in known:  # read before the call returns, which not every device guarantees
            self.counts["pageable"] += 1
            kept = ctypes.create_string_buffer(ctypes.string_at(source, num_bytes), num_bytes)
            held = ctypes.addressof(kept)

        def work(keep: object = kept if source not in known else None) -> None:
            for address in known:
                self.expect_allocated(address, num_bytes)
            ctypes.memmove(target, held, num_bytes)

        self.streams.submit(stream, work)
        if target not in known:  # written before the call returns
            self.streams.drain(stream)

    def copy_rectangles(self, rectangles: NDArray[np.int64], stream: int) -> None:
        copies = self.counts["copies"]
        for target, target_pitch, source, source_pitch, width, height in rectangles.tolist():
            if height > 1 and not all(width <= pitch < 1 << 31 for pitch in (target_pitch, source_pitch)):
                raise DeviceError(f"rows of {width} bytes at distances of {target_pitch} and {source_pitch}")
            for address, pitch in ((target, target_pitch), (source, source_pitch)):
                self.expect_allocated(address, (height - 1) * pitch + width)  # one allocation, one registration
            for row in range(height):
                self.copy(target + row * target_pitch, source + row * source_pitch, width, stream)
        self.counts["copies"] = copies + len(rectangles)

    def _is_known(self, address: int) -> bool:
        """Return True for device memory and pinned memory, and False for pageable memory."""
        text = ctypes.create_string_buffer(1)
        return self.is_device_address(address) or bool(self._engine.pc_check_memory(address, 1, text, 1))

    def fill(self, target: int, byte: int, num_bytes: int, stream: int) -> None:
        self.counts["fills"] += 1

        def work() -> None:
            self.expect_allocated(target, num_bytes)
            ctypes.memset(target, byte, num_bytes)

        self.expect_allocated(target, num_bytes)
        self.streams.submit(stream, work)

    def make_stream(self, device: int) -> int:
        return self.streams.make()

    def make_event(self, device: int) -> Event:
        return EmulatedEvent(self)

    def wait_event(self, stream: int, event: Any) -> None:
        self.counts["waits"] += 1
        if event.marker is not None:
            self.streams.wait(stream, event.marker)

    def synchronize(self, stream: int, device: int | None = None) -> None:
        self.counts["synchronizes"] += 1
        self.streams.refuse_any_capture("the host waits for a stream")
        self.streams.drain(stream)

    def finish(self) -> None:
        """Run all deferred work, so that every error of a kernel is raised."""
        self.streams.finish()

    def is_capturing(self, stream: int) -> bool:
        return self.streams.is_capturing(stream)

    def load(self, name: str, device: int, image: Callable[[], tuple[bytes, str]] | None, shared_bytes: int) -> Kernel:
        self.counts["loads"] += 1
        self.streams.refuse_any_capture("a kernel is loaded")
        if shared_bytes > SHARED_BYTES:
            raise DeviceError(f"{name} requests {shared_bytes} bytes of shared memory; a block has {SHARED_BYTES}")
        if name not in self._kernels:
            instances = build.read_manifest(self._sources)
            if name not in instances:
                raise DeviceError(f"the manifest has no kernel {name}; it lists {', '.join(instances) or 'none'}")
            library = ctypes.CDLL(str(build.instance_path(instances[name], self._sources, self._folder)))
            instance = Instance.in_dll(library, build.symbol_of(instances[name]))
            address = ctypes.addressof(instance)
            if instance.parameter_bytes > PARAMETER_BYTES:
                raise DeviceError(f"{name} has {instance.parameter_bytes} bytes of parameters, over {PARAMETER_BYTES}")
            self._kernels[name] = Kernel(name, library, address, instance.parameter_bytes, instance.max_threads)
        kernel = self._kernels[name]
        kernel.shared_bytes = max(kernel.shared_bytes, shared_bytes)
        return kernel

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        num_threads: int,
        shared_bytes: int,
        stream: int,
        parameters: int,
    ) -> None:
        self.counts["launches"] += 1
        self.launched.append(kernel.name)
        limits = (2**31 - 1, 65535, 65535)
        if not all(1 <= blocks <= limit for blocks, limit in zip(grid, limits, strict=True)):
            raise DeviceError(f"{kernel.name} cannot be launched with a grid of {grid} blocks; the limits are {limits}")
        if not 1 <= num_threads <= kernel.max_threads:
            raise DeviceError(
                f"{kernel.name} cannot be launched with {num_threads} threads a block; it is declared for at most "
                f"{kernel.max_threads}"
            )
        if not 0 <= shared_bytes <= max(kernel.shared_bytes, 48 * 1024):
            raise DeviceError(
                f"{kernel.name} is launched with {shared_bytes} bytes of shared memory; it was loaded for at most "
                f"{kernel.shared_bytes}"
            )
        held = ctypes.create_string_buffer(ctypes.string_at(parameters, kernel.parameter_bytes), kernel.parameter_bytes)
        self.streams.submit(stream, lambda: self._execute(kernel, grid, num_threads, shared_bytes, held))

    def _execute(
        self, kernel: Kernel, grid: tuple[int, int, int], num_threads: int, shared_bytes: int, parameters: Any
    ) -> None:
        text = ctypes.create_string_buffer(4096)
        counted = (ctypes.c_uint64 * len(COUNTED))()
        if self._engine.pc_launch(
            kernel.name.encode(),
            kernel.instance,
            ctypes.addressof(parameters),
            (ctypes.c_int * 3)(*grid),
            num_threads,
            shared_bytes,
            self.may_overwrite,
            self.seed,
            counted,
            text,
            len(text),
        ):
            raise EmulatorError(text.value.decode())
        self.counts.update(dict(zip(COUNTED, counted, strict=True)))

    def run(self, name: str, grid: tuple[int, int, int], num_threads: int, shared_bytes: int, parameters: Any) -> None:
        """Load and launch an instance with a struct: bytes, or an object with a buffer (ctypes.Structure, NumPy)."""
        kernel = self.load(name, 0, None, shared_bytes)
        raw = bytes(parameters)
        if len(raw) != kernel.parameter_bytes:
            raise DeviceError(f"{name} takes a struct of {kernel.parameter_bytes} bytes, not of {len(raw)}")
        held = ctypes.create_string_buffer(raw, max(len(raw), 1))
        self.launch(kernel, grid, num_threads, shared_bytes, 0, ctypes.addressof(held))

    def is_device_address(self, address: int) -> bool:
        """Return True if an address is in the range reserved for device memory."""
        return bool(self._engine.pc_is_device(address))

    def expect_allocated(self, address: int, num_bytes: int) -> None:
        """Raise EmulatorError if bytes are outside the allocated memory."""
        text = ctypes.create_string_buffer(512)
        if num_bytes and not self._engine.pc_check_memory(address, num_bytes, text, len(text)):
            raise EmulatorError(f"a copy or fill of {num_bytes} bytes at {address:#x}: {text.value.decode()}")
