"""Tensors of CUDA memory, over a fake runtime that keeps it on the host and records its calls."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import pytest

import pagecore
from pagecore.arrays import strided
from pagecore.arrays.cuda.current import use_runtime
from pagecore.arrays.tensors.streams import note_work
from tests.arrays.fake_runtime import FakeRuntime
from tests.together import together


@pytest.fixture
def runtime():
    fake = FakeRuntime()
    with use_runtime(fake):
        yield fake


def bytes_of(tensor):
    return ctypes.string_at(tensor.pointer, tensor.nbytes)


@pytest.mark.parametrize(("device", "name"), [("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")])
def test_empty_allocates_on_the_named_device(runtime, device, name):
    tensor = pagecore.empty((2, 3), "bfloat16", device)
    assert (tensor.device, tensor.shape, tensor.strides) == (name, (2, 3), (6, 2))
    assert tensor.__dlpack_device__() == (2, int(name[-1]))
    assert tensor.pointer % 256 == 0
    assert runtime.calls[0] == ("allocate", 12, int(name[-1]), 7)


def test_zeros_are_zero_before_any_stream_can_use_them(runtime):
    tensor = pagecore.zeros((5,), "int64", "cuda")
    assert bytes_of(tensor) == bytes(40)
    assert runtime.calls == [("allocate", 40, 0, 7), ("fill", 0, 40, 7), ("synchronize", 7, 0)]


def test_memory_for_one_stream_waits_for_nothing(runtime):
    pagecore.zeros((5,), "int64", "cuda", stream=9)
    assert runtime.calls == [("allocate", 40, 0, 9), ("fill", 0, 40, 9)]


def test_memory_made_while_a_graph_is_captured_waits_for_nothing(runtime):
    runtime.capturing = (7,)
    pagecore.empty(5, "int64", "cuda")
    assert "synchronize" not in [call[0] for call in runtime.calls]


def test_an_empty_tensor_has_memory_of_its_own_and_is_not_filled(runtime):
    tensor = pagecore.zeros((0, 4), "float32", "cuda")
    assert tensor.size == 0
    assert [call[0] for call in runtime.calls] == ["allocate", "synchronize"]


def test_a_missing_device_is_refused(runtime):
    with pytest.raises(pagecore.DeviceError, match=r"'cuda:2', but this process sees 2 CUDA devices"):
        pagecore.empty(3, device="cuda:2")
    with use_runtime(FakeRuntime(0)), pytest.raises(pagecore.DeviceError, match="no CUDA device"):
        pagecore.empty(3, device="cuda")


@together("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "", None, "cpu:1", "mps", "cuda:0 "])
def test_invalid_device_names_are_refused(device):
    with pytest.raises(pagecore.DeviceError, match="it must be 'cpu', 'cuda'"):
        pagecore.empty(3, device=device)


def test_a_stream_for_host_memory_is_refused():
    with pytest.raises(pagecore.UnsupportedOption, match="host memory has no streams"):
        pagecore.empty(3, stream=0)


def test_views_share_the_allocation_and_keep_it(runtime):
    base = pagecore.zeros((4, 6), "float32", "cuda:1")
    view = base[1:, ::-2]
    assert (view.shape, view.strides, view.device) == ((3, 3), (24, -8), "cuda:1")
    assert view.pointer == base.pointer + 24 + 20
    assert view.allocation is base.allocation
    assert base.reshape(8, 3).transpose().strides == (4, 12)
    cut = strided(base, (2, 2), (24, 4), byte_offset=8, dtype="int32")
    assert (cut.device, cut.pointer, cut.dtype) == ("cuda:1", base.pointer + 8, "int32")
    with pytest.raises(pagecore.ShapeError, match="a buffer of 96 bytes"):
        strided(base, (25,))


def test_access_by_numpy_raises(runtime):
    tensor = pagecore.zeros((4,), "float32", "cuda")
    for reach in (tensor.numpy, tensor.tolist, tensor.__array__, tensor[:1].item, lambda: tensor.__setitem__(0, 1.0)):
        with pytest.raises(pagecore.DeviceError, match="which NumPy cannot read"):
            reach()
    with pytest.raises(BufferError, match="buffer protocol"):
        memoryview(tensor)
    assert not hasattr(tensor, "__array_interface__")
    interface = tensor.__cuda_array_interface__
    assert (interface["data"], interface["shape"], interface["version"]) == ((tensor.pointer, False), (4,), 3)


def exported(tensor, runtime, **stream):
    del runtime.calls[:]
    capsule = tensor.__dlpack__(max_version=(1, 0), **stream)
    viewed = pagecore.as_tensor(capsule)
    assert (viewed.pointer, viewed.device, viewed.shape) == (tensor.pointer, tensor.device, tensor.shape)
    return runtime.calls


def test_a_consumer_on_another_stream_waits_for_the_memory_s_own(runtime):
    tensor = pagecore.zeros((4,), "float32", "cuda", stream=9)
    assert exported(tensor, runtime, stream=11) == [("record", 1, 9), ("wait", 11, 1)]
    assert exported(tensor[1:], runtime, stream=12) == [("record", 2, 9), ("wait", 12, 2)]


@pytest.mark.parametrize("stream", [{}, {"stream": None}, {"stream": 1}, {"stream": 0}])
def test_streams_none_and_one_are_the_default_stream(runtime, stream):
    tensor = pagecore.zeros((4,), "float32", "cuda", stream=9)
    assert exported(tensor, runtime, **stream) == [("record", 1, 9), ("wait", 0, 1)]


def test_the_per_thread_stream_is_not_the_default_stream(runtime):
    tensor = pagecore.zeros((4,), "float32", "cuda", stream=9)
    assert exported(tensor, runtime, stream=2) == [("record", 1, 9), ("wait", 2, 1)]


def test_a_consumer_that_orders_streams_itself_or_shares_the_stream_does_not_wait(runtime):
    tensor = pagecore.zeros((4,), "float32", "cuda", stream=9)
    assert exported(tensor, runtime, stream=-1) == []
    assert exported(tensor, runtime, stream=9) == []
    default = pagecore.zeros((4,), "float32", "cuda", stream=1)
    assert exported(default, runtime, stream=1) == []
    waited_for = pagecore.zeros(4, "float32", "cuda")
    assert exported(waited_for, runtime, stream=11) == []


def test_a_consumer_waits_for_the_work_of_an_operation(runtime):
    tensor = pagecore.zeros((4,), "float32", "cuda")
    note_work(tensor[1:3], 5)
    assert exported(tensor, runtime, stream=11) == [("record", 1, 5), ("wait", 11, 1)]


def test_an_export_to_a_stream_that_is_being_captured_is_refused(runtime):
    tensor = pagecore.zeros((4,), "float32", "cuda", stream=9)
    runtime.capturing = (11,)
    with pytest.raises(BufferError, match="being captured"):
        exported(tensor, runtime, stream=11)
    assert runtime.calls == []


@pytest.mark.parametrize("stream", [-2, 1 << 64, "0", 1.0, True])
def test_invalid_streams_are_refused(runtime, stream):
    tensor = pagecore.zeros((4,), "float32", "cuda")
    with pytest.raises(BufferError, match="it must be None, -1 or the handle of a stream"):
        tensor.__dlpack__(stream=stream)


def test_other_devices_and_copies_are_refused(runtime):
    tensor = pagecore.zeros((4,), "float32", "cuda")
    with pytest.raises(BufferError, match="not on DLPack device"):
        tensor.__dlpack__(dl_device=(1, 0))
    with pytest.raises(BufferError, match="only host memory can be copied"):
        tensor.__dlpack__(copy=True)


def test_the_memory_lives_as_long_as_a_capsule(runtime):
    tensor = pagecore.empty(3, device="cuda")
    gone = weakref.ref(tensor.allocation)
    capsule = tensor.__dlpack__()
    del tensor
    assert gone() is not None
    del capsule
    assert gone() is None


def test_as_tensor_gives_the_tensor_itself(runtime):
    tensor = pagecore.zeros((4,), "float32", "cuda")
    assert pagecore.as_tensor(tensor) is tensor
    assert pagecore.arrays.like(tensor, tensor) is tensor
    with pytest.raises(pagecore.DeviceError, match="which NumPy cannot read"):
        pagecore.arrays.like(tensor, np.zeros(3))
