"""A runtime whose devices are host memory; it runs every call at once and records it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from pagecore.arrays.cuda.protocol import DeviceProperties
from pagecore.errors import NotEnoughMemory


class FakeEvent:
    def __init__(self, calls: list[tuple[Any, ...]], number: int) -> None:
        self.calls, self.number = calls, number

    def record(self, stream: int) -> None:
        self.calls.append(("record", self.number, stream))

    def synchronize(self) -> None:
        self.calls.append(("synchronize_event", self.number))

    def is_done(self) -> bool:
        self.calls.append(("is_done", self.number))
        return True


class FakeRuntime:
    def __init__(self, num_devices: int = 2, stream: int = 7, capturing: tuple[int, ...] = ()) -> None:
        # Reserved addresses: the array, and True where memory is mapped; and the bytes that may be mapped.
        self.ranges: dict[int, tuple[Any, bool]] = {}
        self.room = 1 << 30
        self.calls: list[tuple[Any, ...]] = []
        self.devices, self.stream, self.capturing = num_devices, stream, capturing
        self.events = self.streams = 0

    def num_devices(self) -> int:
        return self.devices

    def properties(self, device: int) -> DeviceProperties:
        return DeviceProperties("fake", "sm_90a", 4, 100_000, 200_000)

    def memory_info(self, device: int) -> tuple[int, int]:
        return 3 << 30, 4 << 30

    def current_stream(self, device: int) -> int:
        return self.stream

    def allocate(self, num_bytes: int, device: int, stream: int) -> tuple[int, object]:
        self.calls.append(("allocate", num_bytes, device, stream))
        kept = np.full(num_bytes + 256, 0xAB, np.uint8)
        return -(-kept.ctypes.data // 256) * 256, kept

    def allocate_pinned(self, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.empty(num_bytes, np.uint8)

    def register_host(self, address: int, num_bytes: int, device: int) -> None:
        self.calls.append(("register_host", address, num_bytes, device))

    def unregister_host(self, address: int) -> None:
        self.calls.append(("unregister_host", address))

    def export_ipc(self, address: int, device: int) -> tuple[bytes, int]:
        self.calls.append(("export_ipc", address, device))
        return (address - address % 4096).to_bytes(64, "little"), address % 4096

    def open_ipc(self, handle: bytes, device: int) -> int:
        self.calls.append(("open_ipc", handle, device))
        return int.from_bytes(handle, "little")

    def close_ipc(self, address: int, device: int) -> None:
        self.calls.append(("close_ipc", address, device))

    def memory_granularity(self, device: int) -> int:
        return 1 << 16

    def reserve_address(self, num_bytes: int, device: int) -> int:
        assert num_bytes > 0
        assert num_bytes % (1 << 16) == 0
        kept = np.full(num_bytes + 256, 0xEE, np.uint8)
        address = -(-kept.ctypes.data // 256) * 256
        self.ranges[address] = (kept, False)
        self.calls.append(("reserve_address", address, num_bytes, device))
        return address

    def map_memory(self, address: int, num_bytes: int, device: int) -> None:
        kept, is_mapped = self.ranges[address]
        assert not is_mapped
        if num_bytes > self.room:
            raise NotEnoughMemory("the fake device is full")
        self.room -= num_bytes
        kept.fill(0xAB)
        self.ranges[address] = (kept, True)
        self.calls.append(("map_memory", address, num_bytes, device))

    def unmap_memory(self, address: int, num_bytes: int, device: int) -> None:
        kept, is_mapped = self.ranges[address]
        assert is_mapped
        self.room += num_bytes
        kept.fill(0xEE)
        self.ranges[address] = (kept, False)
        self.calls.append(("unmap_memory", address, num_bytes, device))

    def free_address(self, address: int, num_bytes: int, device: int) -> None:
        _, is_mapped = self.ranges.pop(address)
        assert not is_mapped
        self.calls.append(("free_address", address, num_bytes, device))

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self.calls.append(("copy", num_bytes, stream))
        ctypes.memmove(target, source, num_bytes)

    def copy_rectangles(self, rectangles: np.ndarray[Any, np.dtype[np.int64]], stream: int) -> None:
        self.calls.append(("copy_rectangles", len(rectangles), stream))
        for target, target_pitch, source, source_pitch, width, height in rectangles.tolist():
            for row in range(height):
                ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

    def fill(self, target: int, byte: int, num_bytes: int, stream: int) -> None:
        self.calls.append(("fill", byte, num_bytes, stream))
        ctypes.memset(target, byte, num_bytes)

    def make_stream(self, device: int) -> int:
        self.streams += 1
        self.calls.append(("make_stream", device))
        return 1000 + self.streams

    def make_event(self, device: int) -> FakeEvent:
        self.events += 1
        return FakeEvent(self.calls, self.events)

    def wait_event(self, stream: int, event: Any) -> None:
        self.calls.append(("wait", stream, event.number))

    def synchronize(self, stream: int, device: int | None = None) -> None:
        self.calls.append(("synchronize", stream, device))

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    def load(self, name: str, device: int, image: Callable[[], tuple[bytes, str]], shared_bytes: int) -> Any:
        self.calls.append(("load", name, device, shared_bytes))
        return name, device

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], num_threads: int, shared_bytes: int, stream: int, parameters: int
    ) -> None:
        self.calls.append(("launch", kernel, grid, num_threads, shared_bytes, stream, parameters))
