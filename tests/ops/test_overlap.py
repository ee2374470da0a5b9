"""shares_memory and overlaps_elements agree with sets of bytes, and are cheap for slices of one array."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from pagecore.arrays import as_tensor
from pagecore.ops.arguments._overlap import overlaps_elements, shares_memory


def bytes_of(array: np.ndarray[Any, Any]) -> list[int]:
    """Return the address of every byte of every element."""
    starts = np.full(array.shape, array.ctypes.data, np.int64)
    for axis, (length, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        shape = [-1 if i == axis else 1 for i in range(array.ndim)]
        starts += (np.arange(length, dtype=np.int64) * stride).reshape(shape)
    return (starts.reshape(-1, 1) + np.arange(array.itemsize)).ravel().tolist()


def random_view(random: np.random.Generator, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a view of a few elements of `memory`, with any strides: negative, zero, odd or overlapping."""
    dtype = [np.dtype(np.int8), np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.int64)][random.integers(4)]
    ndim = int(random.integers(0, 4))
    shape = random.integers(0 if random.random() < 0.1 else 1, 5, ndim).tolist()
    strides = (random.integers(-14, 15, ndim) * random.choice([1, 2, 4])).tolist()
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
    offset = int(random.integers(-low, len(memory) - high)) if 0 not in shape else 0
    return np.ndarray(shape, dtype, memory.data, offset, strides)


@pytest.mark.parametrize("seed", range(4))
def test_arrays_share_memory_exactly_where_a_byte_is_of_both(seed):
    random = np.random.default_rng(seed)
    memory = np.zeros(600, np.int8)
    seen = {True: 0, False: 0}
    for _ in range(500):
        a, b = random_view(random, memory), random_view(random, memory)
        expected = not set(bytes_of(a)).isdisjoint(bytes_of(b))
        assert shares_memory(as_tensor(a), as_tensor(b)) is expected, (a.strides, a.shape, b.strides, b.shape)
        assert shares_memory(as_tensor(b), as_tensor(a)) is expected
        seen[expected] += 1
        each = bytes_of(a)
        assert overlaps_elements(as_tensor(a)) is (len(set(each)) < len(each)), (a.strides, a.shape)
    assert min(seen.values()) > 20


def test_slices_of_one_array_are_apart_unless_they_name_one_element():
    whole = np.zeros((4, 6, 4, 6), np.float16)
    parts = [slice(None), slice(0, 2), slice(2, 4), slice(0, None, 2), slice(1, None, 2), slice(None, None, -2)]
    numbers = np.arange(whole.size).reshape(whole.shape)
    for a, b in itertools.product(itertools.product(parts, repeat=2), repeat=2):
        at, other = (slice(None), *a), (slice(None), *b)
        expected = not set(numbers[at].ravel().tolist()).isdisjoint(numbers[other].ravel().tolist())
        turned = whole[other].transpose(2, 0, 3, 1)
        assert shares_memory(as_tensor(whole[at]), as_tensor(turned)) is expected
        assert not overlaps_elements(as_tensor(turned))


def test_large_arrays_that_interleave_in_unlike_steps_are_decided_without_walking_them():
    memory = np.zeros(3 * 10**6, np.float32)
    assert not shares_memory(as_tensor(memory[::3]), as_tensor(memory[1::6]))
    assert shares_memory(as_tensor(memory[::3]), as_tensor(memory[1::5]))
    assert not overlaps_elements(as_tensor(as_strided(memory, (1000, 1000), (12, 12 * 1000))))
    assert overlaps_elements(as_tensor(as_strided(memory, (1000, 1000), (12, 12 * 999))))


def test_a_layout_larger_than_memory_counts_as_shared():
    small = np.zeros(4, np.float32)
    huge = as_strided(small, (2**30, 2**30), (2**31, 12))
    assert overlaps_elements(as_tensor(as_strided(small, (2**30, 2**29), (2**31, 2**31 - 4))))
    assert not shares_memory(as_tensor(small[:0]), as_tensor(huge))
