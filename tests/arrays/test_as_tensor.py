from __future__ import annotations

import array
import ctypes
import gc
import sys
import unittest.mock

import ml_dtypes
import numpy as np
import pytest

from pagecore.arrays import as_tensor, empty, like
from pagecore.errors import PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption
from tests.together import together


def test_a_tensor_is_itself():
    tensor = empty(3)
    assert as_tensor(tensor) is tensor


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::-1, ::-2],
        lambda a: a.T,
        lambda a: a[:, None, 1:2],
        lambda a: np.broadcast_to(a[0], (7, 6)),
        lambda a: a[:0],
        lambda a: a[2, 3, ...],
        lambda a: a.view(np.recarray),
        np.asmatrix,
        lambda a: np.lib.stride_tricks.as_strided(a, (3, 3), (4, 4)),
        np.asfortranarray,
    ],
)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_any_strides_of_numpy_are_kept(view):
    source = view(np.arange(24, dtype="f4").reshape(4, 6))
    tensor = as_tensor(source)
    assert (tensor.pointer, tensor.shape, tensor.strides) == (source.ctypes.data, source.shape, source.strides)
    assert tensor.readonly == (not source.flags.writeable)
    np.testing.assert_array_equal(tensor.numpy(), source)


def test_strides_that_are_not_multiples_of_the_item_size_are_viewed():
    packed = np.zeros(3, dtype=[("tag", "u1"), ("value", "f4")])
    packed["value"] = [1, 2, 3]
    assert as_tensor(packed["value"]).tolist() == [1, 2, 3]


@together("dtype", ["f8", "u2", "u4", "u8", "i2", "c8", ">f4", ">i8", "V4", "S3", "U2", "O", "M8[s]"])
def test_other_dtypes_of_numpy_are_refused(dtype):
    with pytest.raises(UnsupportedDtype):
        as_tensor(np.zeros(3, dtype))


def test_more_than_8_axes_are_refused():
    assert as_tensor(np.zeros((1,) * 8, "f4")).ndim == 8
    for ndim in (9, 64):
        with pytest.raises(ShapeError, match="8"):
            as_tensor(np.zeros((1,) * ndim, "f4"))


def test_masked_arrays_are_refused():
    with pytest.raises(UnsupportedOption, match="mask"):
        as_tensor(np.ma.zeros(3, "f4"))


def test_a_view_takes_one_reference_and_gives_it_back():
    source = np.zeros(8, "f4")
    before = sys.getrefcount(source)
    tensor = as_tensor(source)
    assert sys.getrefcount(source) == before + 1
    views = [tensor[i:] for i in range(5)]
    assert sys.getrefcount(source) == before + 6
    del tensor, views
    assert sys.getrefcount(source) == before


def test_refused_arrays_are_not_held():
    source = np.zeros(8, "f8")
    before = sys.getrefcount(source)
    for _ in range(10):
        with pytest.raises(UnsupportedDtype):
            as_tensor(source)
    gc.collect()
    assert sys.getrefcount(source) == before


BUFFERS = [
    (bytearray(b"abc"), "uint8", False),
    (b"abc", "uint8", True),
    (memoryview(b"abc")[::-1], "uint8", True),
    (array.array("f", [1, 2]), "float32", False),
    (array.array("i", [1, 2]), "int32", False),
    (array.array("l", [1, 2]), "int64", False),
    (array.array("q", [1, 2]), "int64", False),
    (array.array("b", [1, 2]), "int8", False),
    ((ctypes.c_float * 3 * 2)(), "float32", False),
    ((ctypes.c_int64 * 3)(), "int64", False),
    ((ctypes.c_bool * 3)(), "bool", False),
    (memoryview(np.ones((2, 3), "f2"))[::-1], "float16", False),
    (memoryview(bytearray(0)), "uint8", False),
]


@together(("source", "dtype", "readonly"), BUFFERS)
def test_buffers_are_viewed(source, dtype, readonly):
    tensor = as_tensor(source)
    expected = np.asarray(source)
    assert (tensor.dtype, tensor.readonly, tensor.shape) == (dtype, readonly, np.asarray(memoryview(source)).shape)
    np.testing.assert_array_equal(np.asarray(tensor).ravel(), np.frombuffer(expected.tobytes(), tensor.dtype.numpy))


def test_a_buffer_is_lent_until_the_last_view_dies():
    source = bytearray(8)
    view = as_tensor(source)[2:]
    with pytest.raises(BufferError):
        source.append(1)
    del view
    source.append(1)


@pytest.mark.parametrize(
    "source", [array.array("d", [1]), array.array("H", [1]), array.array("L", [1]), (ctypes.c_float.__ctype_be__ * 2)()]
)
def test_other_formats_of_buffers_are_refused_and_given_back(source):
    with pytest.raises(UnsupportedDtype):
        as_tensor(source)
    if isinstance(source, array.array):
        source.append(1)


class Interface:
    def __init__(self, source, **changes):
        self.source = source
        self.__array_interface__ = source.__array_interface__ | changes


def test_objects_with_an_array_interface_are_viewed_and_kept_alive():
    source = np.arange(6, dtype="i4").reshape(2, 3)[:, ::-1]
    pointer, before = source.ctypes.data, sys.getrefcount(source)
    tensor = as_tensor(Interface(source))
    assert (tensor.pointer, tensor.strides) == (pointer, source.strides)
    assert sys.getrefcount(source) == before + 1
    del tensor
    gc.collect()
    assert sys.getrefcount(source) == before


def test_read_only_array_interfaces_give_read_only_tensors():
    source = np.arange(6, dtype="i4")
    assert as_tensor(Interface(source, data=(source.ctypes.data, True))).readonly


@pytest.mark.parametrize(
    "changes",
    [{"typestr": "<f8"}, {"typestr": "?!"}, {"shape": (-1,)}, {"shape": None}, {"data": "no"}, {"strides": (1, 2, 3)}],
    ids=str,
)
def test_broken_array_interfaces_are_refused(changes):
    with pytest.raises(PagecoreError):
        as_tensor(Interface(np.zeros(4, "f4"), **changes))


class CudaInterface:
    def __init__(self, **changes):
        self.__cuda_array_interface__ = {
            "shape": (2, 3),
            "typestr": "<f4",
            "data": (0x7000_0000_0000, False),
            "strides": None,
            "version": 3,
        } | changes


def test_cuda_array_interfaces_are_viewed_both_ways():
    source = CudaInterface(strides=(24, 8), data=(0x7000_0000_0010, True))
    tensor = as_tensor(source)
    assert (tensor.device, tensor.pointer, tensor.strides) == ("cuda:0", 0x7000_0000_0010, (24, 8))
    assert tensor.readonly
    assert tensor.__cuda_array_interface__ == source.__cuda_array_interface__ | {"stream": None}
    assert not hasattr(tensor, "__array_interface__")
    assert as_tensor(CudaInterface()).strides == (12, 4)
    with pytest.raises(BufferError, match="stream"):
        tensor.__dlpack__(stream=1, max_version=(1, 0))


@together(
    "changes",
    [
        {"typestr": "<f8"},
        {"typestr": None},
        {"data": None},
        {"data": (None, False)},
        {"data": (-1, False)},
        {"data": (2**64, False)},
        {"data": ("a", False)},
        {"shape": (-1, 2)},
        {"shape": None},
        {"shape": (2,) * 9},
        {"strides": (1,)},
        {"strides": (2**63 - 1, 1)},
        {"mask": object()},
    ],
)
def test_broken_cuda_array_interfaces_are_refused(changes):
    with pytest.raises(PagecoreError):
        as_tensor(CudaInterface(**changes))


def test_cupy_is_asked_for_a_view_of_cuda_memory(monkeypatch):
    cupy = unittest.mock.MagicMock()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    tensor = as_tensor(CudaInterface())
    assert tensor.cupy() is cupy.ndarray.return_value
    cupy.cuda.UnownedMemory.assert_called_once_with(tensor.pointer, 24, tensor, 0)
    shape, dtype, _, strides = cupy.ndarray.call_args.args
    assert (shape, dtype, strides) == ((2, 3), np.dtype("f4"), (12, 4))


def test_cupy_views_need_cuda_memory_and_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(PagecoreError, match=r"cupy\.asarray"):
        empty(3).cupy()
    with pytest.raises(PagecoreError, match="cuda12"):
        as_tensor(CudaInterface()).cupy()


class Liar:
    """A class that claims to be ndarray, as a mock with a spec does."""

    @property
    def __class__(self):
        return np.ndarray


class Raising:
    def __getattr__(self, name):
        raise AttributeError(name)

    def __repr__(self):
        raise RuntimeError


@together(
    "wrong",
    [
        *(None, 1, 1.5, True, "text", [1.0, 2.0], (1,), {}, {1}, range(3), iter([]), object(), ..., NotImplemented),
        *(np.float32(1), np.int64(1), ml_dtypes.bfloat16(1), np.ndarray, type, np, as_tensor, Liar(), Raising()),
    ],
)
def test_objects_without_memory_are_refused(wrong):
    with pytest.raises(UnsupportedDtype, match="not an array"):
        as_tensor(wrong)


def test_a_mock_of_an_array_is_refused():
    with pytest.raises(PagecoreError):
        as_tensor(unittest.mock.Mock(spec=np.ndarray))


@pytest.mark.parametrize(
    "example",
    [np.zeros(1), np.float32(1), [1], None, 3, object(), np.ma.zeros(2), Liar()],
    ids=lambda value: repr(value).split(" at 0x")[0],
)
def test_like_anything_without_a_framework_is_numpy(example):
    tensor = empty((2, 3), "bfloat16")
    result = like(tensor, example)
    assert type(result) is np.ndarray
    assert (result.ctypes.data, result.dtype) == (tensor.pointer, ml_dtypes.bfloat16)


def test_like_a_tensor_is_the_tensor():
    tensor = empty(3)
    assert like(tensor, empty(0)) is tensor
    source = np.zeros(3, "f4")
    assert like(source, tensor).pointer == source.ctypes.data
