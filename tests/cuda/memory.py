"""What lies in memory, elements and gaps: so that a test sees every byte that a kernel changed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.capabilities import missing
from tests.cuda.kit import Kit, extent


def memory_of(array: Any) -> bytes:
    """Return all bytes that a host array spans, its gaps included."""
    before, behind = extent(array)
    return ctypes.string_at(array.ctypes.data - before, before + behind)


def assert_same_memory(got: Any, expected: Any) -> None:
    """Bit for bit, where the one is the device's copy of the other's layout."""
    assert got.shape == expected.shape
    assert got.strides == expected.strides
    if memory_of(got) != memory_of(expected):
        differs = (bytes_of(got) != bytes_of(expected)).any(axis=-1)
        first = [int(axis[0]) for axis in differs.nonzero()] if differs.any() else "a gap"
        raise AssertionError(f"{differs.sum()} of {differs.size} elements differ, the first at {first}")


def bytes_of(array: Any) -> Any:
    packed = np.ascontiguousarray(array)
    return packed.reshape(-1).view(np.uint8).reshape(*array.shape, array.itemsize)


def spaced(array: Any, axis: int) -> Any:
    """Return a copy whose entries along one axis lie an odd number of elements apart."""
    strides, step = [0] * array.ndim, 1
    for i in reversed(range(array.ndim)):
        strides[i] = step + (i == axis)
        step = strides[i] * array.shape[i]
        step += -step % 16 if i <= axis else 0
    memory = np.full(step, np.nan, array.dtype)
    copy = np.lib.stride_tricks.as_strided(memory, array.shape, [n * array.itemsize for n in strides])
    copy[...] = array
    return copy


def want_memory(cuda: Kit, num_bytes: int) -> None:
    """Skip a test where the device has not that much; the emulator takes memory only where it is touched."""
    if not cuda.is_emulated and cuda.runtime.memory_info(0)[0] < num_bytes:
        missing("device memory", f"the test wants {num_bytes:,} bytes")


def calls_of(cuda: Kit, call: Callable[[], Any]) -> dict[str, int]:
    """Run a call a second time and return what it then asked of the emulated runtime, and not what kernels did."""
    call()
    cuda.runtime.streams.deferred = True
    before = cuda.runtime.counts.copy()
    call()
    return dict(cuda.runtime.counts - before)
