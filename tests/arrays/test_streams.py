"""The stream of an operation, and its waits for other streams."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

import pagecore
from pagecore.arrays.cuda.current import use_runtime
from pagecore.arrays.dtypes.dtype import DType
from pagecore.arrays.exchange._exchange import work_stream
from pagecore.arrays.tensors.results import finished_result, lasts_for_graphs, new_result
from pagecore.arrays.tensors.streams import await_producer, note_work, stream_handle
from pagecore.errors import DeviceError, NotEnoughMemory, UnsupportedOption
from tests.arrays.fake_cupy import FakeCuda, make_cupy
from tests.arrays.fake_frameworks import Array, Streams, fake_jax, fake_torch
from tests.arrays.fake_runtime import FakeRuntime
from tests.together import together

FLOAT32, BFLOAT16 = DType("float32"), DType("bfloat16")


@pytest.fixture
def runtime():
    fake = FakeRuntime()
    with use_runtime(fake):
        yield fake


@pytest.fixture
def streams(runtime, monkeypatch):
    streams = Streams()
    monkeypatch.setitem(sys.modules, "torch", fake_torch(streams))
    monkeypatch.setitem(sys.modules, "jax", fake_jax())
    return streams


def torch_tensor(shape=(4,), dtype="float32", device=0):
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=dtype, device=torch.device("cuda", device))


# ---- the handle


@pytest.mark.parametrize("handle", [0, 1, 2, 77, (1 << 64) - 1])
def test_an_int_is_a_handle(handle):
    assert stream_handle(handle, None, 0) == handle


def stream_with(**attributes):
    return types.SimpleNamespace(**attributes)


@pytest.mark.parametrize(
    "stream",
    [
        stream_with(__cuda_stream__=lambda: (0, 77)),
        stream_with(__cuda_stream__=(0, 77)),
        stream_with(__cuda_stream__=lambda: (0, 77), ptr=5, cuda_stream=6),
        stream_with(cuda_stream=77, device_index=1),
        stream_with(ptr=77, device_id=1),
        stream_with(ptr=77, device_id=-1),
    ],
    ids=["method", "attribute", "protocol first", "torch", "cupy", "cupy default"],
)
def test_the_handle_is_read_from_streams_of_frameworks(stream):
    assert stream_handle(stream, None, 1) == 77


@together("stream", [-1, 1 << 64, True, "77", 7.0, [], object(), stream_with(ptr="77"), np.int64(7)])
def test_invalid_streams_are_refused(stream):
    with pytest.raises(UnsupportedOption, match="it must be None, a handle"):
        stream_handle(stream, None, 0)


def broken():
    raise OSError("gone")


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        (lambda: (1, 77), "version 1"),
        (lambda: 77, "__cuda_stream__ of SimpleNamespace is broken"),
        (broken, "gone"),
        (lambda: (0, -77), "it must be None, a handle"),
        (lambda: (0, True), "it must be None, a handle"),
    ],
)
def test_a_broken_protocol_is_refused(protocol, message):
    with pytest.raises(UnsupportedOption, match=message):
        stream_handle(stream_with(__cuda_stream__=protocol), None, 0)


@pytest.mark.parametrize("name", ["device_index", "device_id"])
def test_a_stream_of_another_device_is_refused(name):
    with pytest.raises(DeviceError, match="stream is of cuda:1 and the arrays are on cuda:0"):
        stream_handle(stream_with(ptr=77, **{name: 1}), None, 0)


def test_without_a_stream_the_framework_of_the_example_decides(runtime, streams, monkeypatch):
    tensor = pagecore.empty(4, device="cuda")
    assert stream_handle(None, tensor, 0) == 7  # that of the runtime
    assert stream_handle(None, [1, 2], 0) == 7
    example = torch_tensor()
    assert stream_handle(None, example, 0) == 40
    with streams.on(0, 55):
        assert stream_handle(None, example, 0) == 55
    assert stream_handle(None, torch_tensor(device=1), 1) == 41
    assert stream_handle(0, example, 0) == 0
    assert stream_handle(None, sys.modules["jax"].Array(tensor, 3), 0) == 7
    cupy = make_cupy(FakeCuda())
    cupy.ndarray = Array
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert stream_handle(None, Array(tensor, 3), 1) == 101


def test_torch_without_cuda_raises_its_own_error(torch):
    """The exchange functions of a build without CUDA fail, so the stream is taken from torch itself."""
    stream = work_stream(torch.zeros(3), 0)
    assert stream is None or isinstance(stream, int)
    assert work_stream(np.zeros(3), 0) is None


# ---- results


def test_results_for_torch_are_allocated_by_torch_on_its_current_stream(runtime, streams):
    example = torch_tensor()
    result = new_result((2, 3), BFLOAT16, example, 0, 40)
    assert (result.shape, result.dtype, result.device) == ((2, 3), "bfloat16", "cuda:0")
    given = finished_result(result, example, 40)
    assert type(given) is type(example)
    assert given.stream == 40
    assert given.tensor.pointer == result.pointer


@pytest.mark.parametrize("stream", [0, 1, 66])
def test_results_for_torch_on_another_stream_are_allocated_on_that_stream(runtime, streams, stream):
    result = new_result((2, 3), FLOAT32, torch_tensor(device=1), 1, stream)
    assert result.allocation.producer.stream == (stream if stream == 66 else 0)
    assert streams.current == {0: 40, 1: 41}


def test_results_for_tensors_record_the_stream(runtime):
    example = pagecore.empty(4, device="cuda:1")
    del runtime.calls[:]
    result = new_result((2, 3), FLOAT32, example, 1, 66)
    assert runtime.calls == [("allocate", 24, 1, 66)]
    assert finished_result(result, example, 66) is result
    result.__dlpack__(stream=5)
    assert runtime.calls[1:] == [("record", 1, 66), ("wait", 5, 1)]


def test_a_result_records_the_stream_of_the_work(runtime):
    example = pagecore.empty(4, device="cuda")
    result = new_result((2, 3), FLOAT32, example, 0, 66)
    finished_result(result, example, 67)
    del runtime.calls[:]
    result.__dlpack__(stream=5)
    assert runtime.calls == [("record", 1, 67), ("wait", 5, 1)]


def test_results_for_jax_are_exported_after_the_work(runtime, streams):
    example = sys.modules["jax"].Array(pagecore.empty(4, device="cuda"), 3)
    result = new_result((2, 3), FLOAT32, example, 0, 66)
    runtime.calls.append("launched")
    given = finished_result(result, example, 66)
    assert isinstance(given, sys.modules["jax"].Array)
    assert given.tensor.pointer == result.pointer
    assert runtime.calls[-3:] == ["launched", ("record", 1, 66), ("wait", 90, 1)]


def test_results_for_cupy_are_allocated_by_cupy_on_the_stream(runtime, monkeypatch):
    cuda = FakeCuda()
    cupy = make_cupy(cuda)
    made = []

    class Device:
        def __init__(self, number):
            self.number = number

        def __enter__(self):
            cuda.setDevice(self.number)

        def __exit__(self, *_):
            cuda.setDevice(0)

    def empty(shape, dtype):
        made.append((cuda.getDevice(), cuda.streams[-1].ptr, shape, np.dtype(dtype)))
        return Array(pagecore.empty(shape, dtype, "cuda:1"), 0)

    cupy.ndarray, cupy.empty, cupy.cuda.Device = Array, empty, Device
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    example = Array(pagecore.empty(4, device="cuda:1"), 0)
    result = new_result((2, 3), FLOAT32, example, 1, 66)
    assert made == [(1, 66, (2, 3), np.dtype("float32"))]
    assert type(finished_result(result, example, 66)) is Array


# ---- waiting


def test_only_arrays_of_jax_are_awaited(runtime, streams):
    tensor = pagecore.empty(4, device="cuda")
    array = sys.modules["jax"].Array(tensor, 3)
    await_producer(array, 66)
    await_producer(array, 0)
    assert array.asked == [66, 1]
    given = torch_tensor()
    for other in (given, tensor, np.zeros(3), [1]):
        await_producer(other, 66)
    assert given.asked == []


def test_a_view_does_not_wait_and_jax_gets_stream_one(runtime, streams):
    """JAX would use -1 as the address of a stream; stream 1, its default stream, waits on the device."""
    array, other = sys.modules["jax"].Array(pagecore.empty(4, device="cuda"), 3), torch_tensor()
    assert pagecore.as_tensor(array).readonly
    pagecore.as_tensor(other)
    assert (array.asked, other.asked) == ([1], [-1])


def test_a_failure_of_jax_to_order_its_work_is_a_device_error(runtime, streams):
    array = sys.modules["jax"].Array(pagecore.empty(4, device="cuda"), 3)
    array.__class__.__dlpack__ = lambda self, stream: broken()
    with pytest.raises(DeviceError, match="JAX cannot order its work before stream 0x42: gone"):
        await_producer(array, 66)


def test_work_on_memory_of_other_libraries_is_not_recorded(runtime, streams):
    viewed = pagecore.as_tensor(torch_tensor())
    note_work(viewed, 66)
    note_work(pagecore.zeros(3), 66)
    viewed.__dlpack__(stream=5)
    assert viewed.allocation.producer.asked[-1] == 5


# ---- frameworks that are being imported, and devices without memory


def test_a_framework_that_is_being_imported_has_no_instances(runtime, monkeypatch):
    for name in ("torch", "jax", "cupy"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    array = np.zeros(3, np.float32)
    assert stream_handle(None, array, 0) == runtime.stream
    await_producer(array, 7)
    assert not lasts_for_graphs(array)
    assert new_result((3,), FLOAT32, array, 0, 7).shape == (3,)
    assert type(pagecore.arrays.like(array, [])) is np.ndarray


class OutOfMemoryError(RuntimeError):
    """An error that, like that of torch, is not a MemoryError."""


def test_out_of_memory_of_a_framework_is_not_enough_memory(streams, monkeypatch):
    example = torch_tensor()

    def empty(*arguments, **options):
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 4 KiB")

    monkeypatch.setattr(sys.modules["torch"], "empty", empty)
    with pytest.raises(NotEnoughMemory, match="cuda:1 cannot allocate 4,000 bytes: CUDA out of memory"):
        new_result((10, 100), FLOAT32, example, 1, 41)


def test_other_errors_of_a_framework_are_not_converted(streams, monkeypatch):
    example = torch_tensor()
    monkeypatch.setattr(sys.modules["torch"], "empty", lambda *arguments, **options: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        new_result((10, 100), FLOAT32, example, 1, 41)
