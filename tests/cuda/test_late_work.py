"""Memory between streams: a reader sees the writes that its stream waits for, and no others.

Only the emulator can delay the work of a stream, so only the emulator runs these tests.
"""

from __future__ import annotations

import numpy as np
import pytest

import pagecore
from pagecore.arrays.tensors.results import finished_result, new_result
from pagecore.errors import DeviceError


@pytest.fixture(autouse=True)
def _emulated(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it delays the work of a stream")


@pytest.fixture
def late(cuda):
    """A device that does its work when the host waits for it."""
    cuda.runtime.streams.deferred = True
    return cuda.runtime


def bytes_of(runtime, tensor, stream):
    """Read a tensor on `stream` without waiting for other streams."""
    host = np.empty(tensor.nbytes, np.uint8)
    runtime.copy(host.ctypes.data, tensor.pointer, host.nbytes, stream)
    return host


def test_zeros_are_visible_to_every_stream(late):
    tensor = pagecore.zeros(64, "uint8", "cuda")
    assert not bytes_of(late, tensor, late.streams.make()).any()


def test_zeros_of_one_stream_are_visible_to_that_stream(late):
    stream, other = late.streams.make(), late.streams.make()
    before = late.counts.copy()
    tensor = pagecore.zeros(64, "uint8", "cuda", stream=stream)
    assert late.counts["synchronizes"] == before["synchronizes"]
    assert bytes_of(late, tensor, other).all()  # the 0xFF of new memory: `other` has not waited
    assert not bytes_of(late, tensor, stream).any()


def test_an_importer_on_another_stream_sees_the_zeros_of_the_exporting_stream(late):
    stream, other = late.streams.make(), late.streams.make()
    tensor = pagecore.zeros(64, "uint8", "cuda", stream=stream)
    tensor.__dlpack__(stream=other)
    assert not bytes_of(late, tensor, other).any()


def test_an_importer_on_another_stream_sees_the_computed_result(late):
    stream, other = late.streams.make(), late.streams.make()
    query = pagecore.empty(4, "uint8", "cuda")
    result = new_result((64,), query.dtype, query, 0, stream)
    late.fill(result.pointer, 5, 64, stream)
    given = finished_result(result, query, stream)
    given.__dlpack__(stream=other)
    assert (bytes_of(late, given, other) == 5).all()


def test_memory_cannot_be_allocated_while_a_graph_is_captured(cuda):
    stream = cuda.runtime.streams.make()
    cuda.runtime.streams.begin_capture(stream)
    with pytest.raises(DeviceError, match=r"while stream .* is captured"):
        pagecore.empty(3, device="cuda")


def test_memory_for_a_captured_stream_cannot_be_exported_to_another_that_is_not(cuda):
    """A stream that is captured cannot wait for a stream that is not."""
    stream, other = cuda.runtime.streams.make(), cuda.runtime.streams.make()
    tensor = pagecore.zeros(64, "uint8", "cuda", stream=other)
    cuda.runtime.streams.begin_capture(stream)
    with pytest.raises(BufferError, match="export the memory before the capture begins"):
        tensor.__dlpack__(stream=stream)


def test_the_device_s_free_memory_shrinks_and_comes_back(cuda):
    before = cuda.runtime.memory_info(0)[0]
    tensor = pagecore.empty(1 << 20, "uint8", "cuda")
    assert before - cuda.runtime.memory_info(0)[0] == 1 << 20
    del tensor
    assert cuda.runtime.memory_info(0)[0] == before
