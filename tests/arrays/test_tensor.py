from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore.arrays import Tensor, as_tensor, empty, zeros
from pagecore.arrays.dtypes.dtype import DTYPES
from pagecore.errors import PagecoreError, ShapeError, UnsupportedOption
from tests.together import together

rng = np.random.default_rng(7)
KNOWN_TO_NUMPY = [dtype for dtype in DTYPES if dtype.cupy == dtype.numpy]
UNKNOWN_TO_NUMPY = [dtype for dtype in DTYPES if dtype.cupy != dtype.numpy]


def counted(shape, dtype="int32"):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    return array, as_tensor(array)


def assert_same(tensor, array):
    assert isinstance(tensor, Tensor)
    assert (tensor.shape, tensor.dtype) == (array.shape, str(array.dtype))
    if array.size:
        assert tensor.pointer == array.ctypes.data
        stepped = [axis for axis in range(array.ndim) if array.shape[axis] > 1]
        assert [tensor.strides[axis] for axis in stepped] == [array.strides[axis] for axis in stepped]
    np.testing.assert_array_equal(tensor.numpy(), array)


slices = st.slices(6) | st.builds(slice, *[st.none() | st.integers(-9, 9)] * 2, st.none() | st.integers(1, 9))
parts = st.integers(-4, 3) | slices | st.just(None) | st.just(Ellipsis)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=4), st.lists(parts, max_size=4).map(tuple))
def test_basic_indexing_gives_the_views_that_numpy_gives(shape, index):
    array, tensor = counted(shape)
    try:
        expected = array[index]
        if not isinstance(expected, np.ndarray):
            expected = array[(*index, ...)]
    except IndexError:
        with pytest.raises(PagecoreError):
            tensor[index]
        return
    assert_same(tensor[index], expected)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(slices, max_size=3).map(tuple), st.lists(slices, max_size=3).map(tuple))
def test_a_view_of_a_view_is_what_numpy_makes_of_it(first, second):
    array, tensor = counted((5, 6, 4))
    assert_same(tensor[first][second], array[first][second])


@pytest.mark.parametrize("index", [np.int64(1), np.int8(-1), (1,), slice(np.int32(1), None)], ids=repr)
def test_integers_of_numpy_index_too(index):
    array, tensor = counted((3, 4))
    assert_same(tensor[index], array[index])


@together(
    "index",
    [
        *(3, -4, 10**30, -(10**30), (0, 4), (0, 0, 0), (..., ...), (None,) * 7, slice(0, 2, 0), slice(0.5), slice("a")),
        *(
            1.0,
            "a",
            True,
            False,
            np.True_,
            np.array(True),
            [0, 1],
            np.array([0, 1]),
            np.array([True] * 3),
            object(),
            {},
        ),
    ],
)
def test_other_indices_are_refused(index):
    _, tensor = counted((3, 4))
    before = tensor.numpy().copy()
    with pytest.raises(PagecoreError):
        tensor[index]
    with pytest.raises(PagecoreError):
        tensor[index] = 0
    np.testing.assert_array_equal(tensor.numpy(), before)


def test_an_index_out_of_range_is_an_index_error():
    with pytest.raises(IndexError, match="axis 1 of length 4"):
        counted((3, 4))[1][0, 4]


def test_huge_slices_of_huge_steps_are_clipped():
    array, tensor = counted((5,))
    index = slice(-(10**30), 10**30, 2**62)
    assert_same(tensor[index], array[index])


@settings(deadline=None)
@given(st.permutations([2, 3, 4]), st.permutations(range(3)), st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24, -1])))
def test_a_reshape_is_a_view_exactly_where_numpy_needs_no_copy(shape, order, wanted):
    array = np.arange(24, dtype="i4").reshape(shape).transpose(order)
    try:
        expected = np.reshape(array, wanted, copy=False)
    except ValueError:
        with pytest.raises(ShapeError):
            as_tensor(array).reshape(wanted)
        return
    assert_same(as_tensor(array).reshape(*wanted), expected)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (5, 0, 2), (0, -1)])
def test_an_empty_tensor_takes_any_empty_shape(shape):
    expected = np.zeros((0, 4), "f4")
    if -1 in shape:
        with pytest.raises(ShapeError):
            as_tensor(expected).reshape(shape)
    else:
        assert as_tensor(expected).reshape(shape).shape == shape


@together("wanted", [7, (-1, -1), (-2, -6), (5, -1), (2**62, 2**62), (1,) * 9, None, 2.0, "ab", ()])
def test_shapes_of_other_sizes_are_refused(wanted):
    with pytest.raises(ShapeError):
        counted((3, 4))[1].reshape(wanted)


@pytest.mark.parametrize(
    "axes", [(), (None,), (0, 1, 2), (2, 0, 1), ((1, 2, 0),), ([-1, 0, 1],), (np.array([2, 1, 0]),)]
)
def test_transposing_permutes_the_axes_as_numpy_does(axes):
    array, tensor = counted((2, 3, 4))
    assert_same(tensor.transpose(*axes), array.transpose(*axes))


@pytest.mark.parametrize("axes", [(0,), (0, 1), (0, 0, 1), (0, 1, 3), (0, 1, -4), (0, 1, 2, 3), ("abc",), (0.0, 1, 2)])
def test_axes_that_are_not_a_permutation_are_refused(axes):
    with pytest.raises(ShapeError):
        counted((2, 3, 4))[1].transpose(*axes)


@together("dtype", DTYPES)
def test_an_ndarray_over_a_tensor_shares_its_memory(dtype):
    tensor = zeros((3, 4), dtype)
    for array in (tensor.numpy(), np.asarray(tensor), np.array(tensor, copy=False), tensor.__array__()):
        assert array.ctypes.data == tensor.pointer
        assert (array.dtype, array.shape, array.flags.writeable) == (dtype.numpy, (3, 4), True)
    tensor.numpy()[1, 2] = 1
    assert tensor[1, 2].item() == 1


@together("dtype", DTYPES)
@together("index", [np.s_[::-1, ::2], np.s_[1], np.s_[2, 1], np.s_[:0], np.s_[..., None]])
def test_strided_ndarrays_over_a_tensor_are_the_same_elements(dtype, index):
    array = rng.integers(0, 2, (3, 4)).astype(dtype.numpy)
    tensor = as_tensor(array)[index]
    expected = array[index] if isinstance(array[index], np.ndarray) else array[(*index, ...)]
    assert_same(tensor, expected)
    np.testing.assert_array_equal(np.asarray(tensor), expected)


def test_array_honours_dtype_and_copy():
    tensor = counted((3,))[1]
    assert np.asarray(tensor, dtype="float64").tolist() == [0, 1, 2]
    assert np.array(tensor, copy=True).ctypes.data != tensor.pointer
    assert tensor.__array__(copy=True).ctypes.data != tensor.pointer
    assert tensor.__array__("float64").dtype == "float64"
    assert tensor.__array__(np.int32, copy=False).ctypes.data == tensor.pointer
    with pytest.raises(ValueError, match="copy"):
        tensor.__array__(np.float64, copy=False)
    half = zeros(3, "bfloat16")
    assert np.array(half, copy=True).ctypes.data != half.pointer
    assert np.asarray(half, dtype="float32").tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="copy"):
        np.array(half, dtype="float32", copy=False)


@pytest.mark.parametrize("dtype", KNOWN_TO_NUMPY)
def test_the_array_interface_matches_numpy(dtype):
    array = np.ones((3, 4), dtype.numpy)[:, ::-2]
    array.flags.writeable = False
    interface = as_tensor(array).__array_interface__
    assert interface == {key: array.__array_interface__[key] for key in ("shape", "strides", "typestr", "data")} | {
        "version": 3
    }


@pytest.mark.parametrize("dtype", UNKNOWN_TO_NUMPY)
def test_dtypes_unknown_to_numpy_have_no_array_interface(dtype):
    tensor = empty(3, dtype)
    assert not hasattr(tensor, "__array_interface__")
    with pytest.raises(BufferError, match=dtype):
        memoryview(tensor)


def test_host_tensors_have_no_cuda_array_interface():
    assert not hasattr(empty(3), "__cuda_array_interface__")


@pytest.mark.parametrize("dtype", KNOWN_TO_NUMPY)
def test_the_buffer_protocol_shares_memory(dtype):
    tensor = zeros((3, 4), dtype)[1:, ::2]
    view = memoryview(tensor)
    assert (view.shape, view.strides, view.itemsize) == (tensor.shape, tensor.strides, dtype.itemsize)
    assert not view.readonly
    assert np.asarray(view).ctypes.data == tensor.pointer
    assert np.asarray(view).dtype == dtype.numpy
    assert as_tensor(view).pointer == tensor.pointer


def test_consumers_of_plain_bytes_get_contiguous_writable_memory_or_an_error():
    tensor = zeros((2, 4), "uint8")
    assert bytes(tensor) == b"\0" * 8
    assert bytearray(b"x") + tensor[1] == b"x\0\0\0\0"
    with pytest.raises(BufferError, match="contiguous"):
        ask_for_buffer(tensor[:, ::2], SIMPLE)
    with pytest.raises(BufferError, match="contiguous"):
        ask_for_buffer(tensor[:, ::2], C_CONTIGUOUS)
    with pytest.raises(BufferError, match="read-only"):
        ask_for_buffer(as_tensor(b"ab"), WRITABLE)


SIMPLE, WRITABLE, C_CONTIGUOUS = 0x0, 0x1, 0x38


def ask_for_buffer(tensor, flags):
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(tensor), (ctypes.c_char * 80)(), flags)


def test_assignment_broadcasts_and_casts_like_numpy():
    tensor = zeros((3, 4), "bfloat16")
    tensor[1] = 2
    tensor[:, 1::2] = np.array([[1.5], [2.5], [3.5]])
    tensor[0, 0] = as_tensor(np.float32(7) * np.ones(1, "f4"))
    tensor[2, :2] = [8, 9]
    tensor[...][2, 2] = ml_dtypes.bfloat16(4)
    assert tensor.tolist() == [[7, 1.5, 0, 1.5], [2, 2.5, 2, 2.5], [8, 9, 4, 3.5]]


def test_assignment_between_overlapping_views_is_as_if_copied_first():
    array, tensor = counted((6,))
    tensor[1:] = tensor[:-1]
    assert array.tolist() == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "value",
    [np.zeros(3), [1, 2], "a", None, object(), 10**30, [[1], [2, 3]]],
    ids=lambda value: repr(value).split(" at 0x")[0],
)
def test_values_that_do_not_fit_are_refused(value):
    array, tensor = counted((4,), "int8")
    with pytest.raises(PagecoreError):
        tensor[:] = value
    assert array.tolist() == [0, 1, 2, 3]


def test_read_only_tensors_refuse_assignment_and_so_do_their_views():
    array = np.zeros((2, 3), "f4")
    array.flags.writeable = False
    tensor = as_tensor(array)
    for view in (tensor, tensor[0], tensor.reshape(3, 2), tensor.transpose()):
        assert view.readonly
        assert not view.numpy().flags.writeable
        with pytest.raises(UnsupportedOption, match="read-only"):
            view[...] = 1


def test_lengths_iteration_and_truth_follow_numpy():
    array, tensor = counted((3, 2))
    assert len(tensor) == 3
    for row, expected in zip(tensor, array, strict=True):
        assert_same(row, expected)
    assert bool(as_tensor(np.ones(1, "f4")))
    assert not zeros(())
    for refused in (lambda: len(zeros(())), lambda: list(zeros(())), lambda: bool(tensor), tensor.item):
        with pytest.raises(ShapeError):
            refused()


@together("dtype", DTYPES)
def test_elements_come_out_as_python_numbers(dtype):
    tensor = zeros((2, 1), dtype)
    tensor[1] = 1
    expected = {"b": bool, "i": int, "u": int}.get(dtype.cupy.kind if dtype in KNOWN_TO_NUMPY else "f", float)
    assert tensor.tolist() == [[0], [1]]
    assert type(tensor[1].item()) is type(tensor.tolist()[0][0]) is expected


def test_tensors_compare_and_hash_by_identity():
    tensor, other = zeros(3), zeros(3)
    assert tensor != other
    assert tensor != tensor[:]
    assert len({tensor, other, tensor}) == 2


def test_the_repr_is_short_and_touches_no_data():
    assert repr(zeros((2, 3), "bfloat16")) == "Tensor(shape=(2, 3), dtype=bfloat16, device=cpu)"
    assert repr(as_tensor(b"ab")) == "Tensor(shape=(2,), dtype=uint8, device=cpu, readonly)"


def test_tensors_are_never_copied_implicitly():
    for refused in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            refused(zeros(3))


def test_attributes_cannot_be_set():
    tensor = zeros(3)
    for name in ("shape", "readonly", "pointer", "data", "owner", "anything"):
        with pytest.raises(AttributeError):
            setattr(tensor, name, 1)


def test_a_view_owns_the_allocation_and_not_its_parent():
    array = np.zeros((4, 4), "f4")
    parent = as_tensor(array)
    parent_held, array_held = weakref.ref(parent), weakref.ref(array)
    view = parent[1:, ::2].transpose().reshape(2, 3)
    del parent, array
    assert parent_held() is None
    assert array_held() is not None
    view[:] = 3
    assert view.tolist() == [[3] * 3] * 2
    del view
    assert array_held() is None


def test_a_tensor_in_a_cycle_keeps_its_memory_to_the_end():
    seen = []

    class Ring:
        def __init__(self):
            self.tensor = as_tensor(np.full(100, 7, "i4"))
            self.me = self

        def __del__(self):
            seen.append(self.tensor[99].item())

    Ring()
    gc.collect()
    assert seen == [7]


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_the_buffer_of_an_array_cannot_be_pickled_or_copied(take):
    span = zeros((4, 8)).numpy().base
    while isinstance(span, np.ndarray | memoryview):
        span = span.base if isinstance(span, np.ndarray) else span.obj
    for memory in (span, type(span).__new__(type(span))):
        with pytest.raises(TypeError, match="copy the array"):
            take(memory)
