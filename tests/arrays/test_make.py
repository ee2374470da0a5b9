from __future__ import annotations

import gc
import resource
import sys

import numpy as np
import pytest

from pagecore.arrays import Tensor, as_tensor, empty, strided, zeros
from pagecore.arrays.dtypes.dtype import DTYPES
from pagecore.errors import DeviceError, NotEnoughMemory, PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption
from tests.together import together

MIB = 1 << 20
MAKERS = pytest.mark.parametrize("make", [empty, zeros])


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@MAKERS
@together("dtype", DTYPES)
@together("shape", [(), (1,), (3,), (0,), (2, 0, 5), (3, 5, 7), (1,) * 8])
def test_a_new_tensor_is_contiguous_and_aligned(make, dtype, shape):
    tensor = make(shape, dtype)
    array = np.zeros(shape, tensor.dtype.numpy)
    assert (tensor.shape, tensor.ndim, tensor.size, tensor.nbytes) == (shape, array.ndim, array.size, array.nbytes)
    assert (tensor.dtype, tensor.itemsize, tensor.device, tensor.readonly) == (dtype, array.itemsize, "cpu", False)
    if tensor.size:
        assert tensor.strides == array.strides
        assert tensor.pointer % 64 == 0
    assert tensor.numpy().flags.c_contiguous


@MAKERS
@pytest.mark.parametrize(("nbytes", "alignment"), [(4 * MIB - 1, 64), (4 * MIB, 2 * MIB), (5 * MIB + 1, 2 * MIB)])
def test_large_tensors_start_on_a_huge_page(make, nbytes, alignment):
    for _ in range(3):
        tensor = make(nbytes, "uint8")
        assert tensor.pointer % alignment == 0
        array = tensor.numpy()
        array[0] = array[-1] = 7


@pytest.mark.parametrize("size", [1, 100, 4 * MIB, 9 * MIB])
def test_zeros_are_zero_also_in_memory_that_was_used_before(size):
    for _ in range(4):
        tensor = zeros(size, "uint8")
        assert not tensor.numpy().any()
        tensor[:] = 255
        del tensor
        dirty = empty(size, "uint8")
        dirty[:] = 255
        del dirty


def test_large_zeros_take_no_memory_until_touched():
    before = resident()
    tensor = zeros(1 << 30, "uint8")
    assert resident() - before < 64 * MIB
    tensor[123] = 1
    assert resident() - before < 64 * MIB


@pytest.mark.slow
def test_memory_is_freed_with_the_last_view():
    before = resident()
    for _ in range(20):
        tensor = empty(64 * MIB, "uint8")
        tensor[:] = 1
        view = tensor[5:].numpy()
        del tensor
        assert view[0] == 1
        del view
    gc.collect()
    assert resident() - before < 64 * MIB


@MAKERS
@pytest.mark.parametrize("shape", [3, np.int32(3), [3], np.array([3]), np.array(3), range(3, 4), (3,)], ids=str)
def test_a_shape_is_an_integer_or_any_sequence_of_them(make, shape):
    assert make(shape).shape == (3,)


@MAKERS
@together(
    ("shape", "message"),
    [
        (-1, "-1"),
        ((2, -3), "-3"),
        ((1,) * 9, "8 axes"),
        ((2**40, 2**40), "2\\^63"),
        ((2**63,), "64 bits"),
        ((10**40,), "64 bits"),
        ((-(10**40),), "64 bits"),
        ((0, 2**62, 2**62), "2\\^63"),
        ((2**61,), "2\\^63"),
        (2.0, "2.0"),
        ((2, 2.0), "2.0"),
        (None, "None"),
        ("34", "'34'"),
        ((np.array([1, 2]),), "integer"),
        (np.zeros((2, 2), int), "integer"),
    ],
)
def test_invalid_shapes_are_refused(make, shape, message):
    with pytest.raises(ShapeError, match=message):
        make(shape)


@MAKERS
@pytest.mark.parametrize("shape", [2**50, (2**60,), (2**30, 2**30)])
def test_more_memory_than_available_is_refused(make, shape):
    with pytest.raises(NotEnoughMemory, match="bytes"):
        make(shape)


@MAKERS
@pytest.mark.parametrize("device", ["none", None, 0, "CPU", "cuda:-1"])
def test_other_devices_are_refused(make, device):
    with pytest.raises(DeviceError, match="it must be 'cpu', 'cuda'"):
        make(3, device=device)


@MAKERS
def test_other_dtypes_are_refused(make):
    with pytest.raises(UnsupportedDtype):
        make(3, "float64")


def test_a_tensor_is_not_made_by_its_class():
    with pytest.raises(UnsupportedOption, match="empty"):
        Tensor()
    with pytest.raises(TypeError):
        type("Derived", (Tensor,), {})


def test_a_tensor_made_around_its_constructor_is_empty():
    bare = Tensor.__new__(Tensor)
    assert (bare.shape, bare.tolist(), bare.nbytes, bare.dtype) == ((0,), [], 0, "float32")
    assert bare.numpy().shape == np.from_dlpack(bare).shape == np.asarray(bare).shape == (0,)
    assert as_tensor(bare.__dlpack__(copy=True)).shape == bare[::-1].shape == bare.reshape(0, 7)[:, 0].shape == (0,)
    with pytest.raises(IndexError):
        bare[0]
    with pytest.raises(ShapeError):
        bare.item()


def test_planes_of_several_dtypes_are_cut_out_of_one_slab():
    slab = zeros(4096, "uint8")
    key = strided(slab, (3, 4), (64, 2), 128, "bfloat16")
    value = strided(slab, (2, 8), None, 1024, "float32")
    assert (key.pointer, value.pointer) == (slab.pointer + 128, slab.pointer + 1024)
    assert (key.strides, value.strides) == ((64, 2), (32, 4))
    key[1] = [1, 2, 3, 4]
    value[:] = 5
    raw = slab.numpy()
    np.testing.assert_array_equal(raw[192:200].view("u2"), [0x3F80, 0x4000, 0x4040, 0x4080])
    np.testing.assert_array_equal(raw[1024:1088].view("f4"), np.full(16, 5))
    raw[192:200] = raw[1024:1088] = 0
    assert not raw.any()


def test_a_strided_view_keeps_the_memory_alive_and_read_only():
    data = b"abcdefgh"
    before = sys.getrefcount(data)
    view = strided(data, 4, 2, 1)
    assert bytes(view.numpy()) == b"bdfh"
    assert view.readonly
    assert sys.getrefcount(data) == before + 1
    del view
    assert sys.getrefcount(data) == before


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "dtype", "expected"),
    [
        (4, None, 4, None, [4, 5, 6, 7]),
        ((2, 2), (-4, 1), 4, None, [[4, 5], [0, 1]]),
        ((3,), (0,), 7, None, [7, 7, 7]),
        ((), (), 7, None, 7),
        ((2,), None, 0, "int32", [0x03020100, 0x07060504]),
        ((0, 5), None, 8, None, []),
        ((0,), (10**9,), 0, "int64", []),
        ((1,), (10**9,), 3, None, [3]),
    ],
)
def test_views_up_to_the_last_byte_are_allowed(shape, strides, offset, dtype, expected):
    buffer = np.arange(8, dtype="u1")
    assert strided(buffer, shape, strides, offset, dtype).tolist() == expected


@together(
    ("shape", "strides", "offset", "dtype"),
    [
        (9, None, 0, None),
        (4, None, 5, None),
        (1, None, -1, None),
        (1, None, 8, None),
        (0, None, 9, None),
        (0, None, -1, None),
        ((2,), (-1,), 0, None),
        ((2, 2), (7, 1), 0, None),
        ((2,), None, 1, "int32"),
        (1, None, 2**63 - 1, None),
        (1, None, 2**63, None),
        (1, None, -(2**63), None),
        ((2,), (2**63 - 1,), 2**63 - 1, None),
        ((3,), (2**62,), 0, None),
        ((2**40, 2**40), (0, 0), 0, None),
        ((2, 2), (1,), 0, None),
        ((2,), (1, 1), 0, None),
        ((2,), "a", 0, None),
        ((2,), None, (0, 0), None),
        ((2,), None, None, None),
        ((2,), None, 0.5, None),
        ((2,), None, 0, "float64"),
    ],
)
def test_views_outside_the_buffer_are_refused(shape, strides, offset, dtype):
    with pytest.raises(PagecoreError):
        strided(np.arange(8, dtype="u1"), shape, strides, offset, dtype)


def test_only_contiguous_buffers_can_be_cut():
    with pytest.raises(ShapeError, match="contiguous"):
        strided(np.zeros((4, 4), "f4")[:, ::2], 3)
