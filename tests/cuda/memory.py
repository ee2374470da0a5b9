"""Comparison of memory with its gaps, which shows every byte that a kernel changed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.capabilities import missing
from tests.cuda.kit import Kit, extent


def memory_of(array: Any) -> bytes:
    """Return all bytes that a host array spans, including its gaps."""
    before, behind = extent(array)
    return ctypes.string_at(array.ctypes.data - before, before + behind)


def assert_same_memory(got: Any, expected: Any) -> None:
    """Assert that two host arrays with the same strides are equal in every bit, gaps included."""
    assert got.shape == expected.shape
    assert got.strides == expected.strides
    if memory_of(got) != memory_of(expected):
        differs = (bytes_of(got) != bytes_of(expected)).any(axis=-1)
        first = [int(axis[0]) for axis in differs.nonzero()] if differs.any() else "a gap"
        raise AssertionError(f"{differs.sum()} of {differs.size} elements differ, first at {first}")


def bytes_of(array: Any) -> Any:
    packed = np.ascontiguousarray(array)
    return packed.reshape(-1).view(np.uint8).reshape(*array.shape, array.itemsize)


def spaced(array: Any, axis: int) -> Any:
    """Return a copy whose stride along one axis is an odd number of elements."""
    strides, step = [0] * array.ndim, 1
    for i in reversed(range(array.ndim)):
        strides[i] = step + (i == axis)
        step = strides[i] * array.shape[i]
        step += -step % 16 if i <= axis else 0
    memory = np.full(step, np.nan, array.dtype)
    copy = np.lib.stride_tricks.as_strided(memory, array.shape, [n * array.itemsize for n in strides])
    copy[...] = array
    return copy


def require_memory(cuda: Kit, num_bytes: int) -> None:
    """Skip a test if the GPU has less free memory; the emulator allocates only the pages that are touched."""
    if not cuda.is_emulated and cuda.runtime.memory_info(0)[0] < num_bytes:
        missing("device memory", f"the test needs {num_bytes:,} bytes")


def calls_of(cuda: Kit, call: Callable[[], Any]) -> dict[str, int]:
    """Run a call twice; return the counts of the emulated runtime for the second run, before its kernels run."""
    call()
    cuda.runtime.streams.deferred = True
    before = cuda.runtime.counts.copy()
    call()
    return dict(cuda.runtime.counts - before)
