from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from pagecore.arrays import as_tensor, empty
from pagecore.errors import DeviceError, PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption
from tests.arrays.producers import Producer, capsule_name
from tests.together import together

FORMS = pytest.mark.parametrize("versioned", [True, False], ids=["versioned", "unversioned"])
READ_ONLY = 1


class Answering:
    """A producer whose `__dlpack__` returns a given object."""

    def __init__(self, answer):
        self.answer = answer

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **arguments):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@FORMS
def test_an_imported_array_is_viewed_in_place(versioned):
    producer = Producer(versioned=versioned)
    tensor = as_tensor(producer)
    assert tensor.pointer == producer.pointer
    assert (tensor.shape, tensor.strides, tensor.dtype) == ((2, 3, 4), (48, 16, 4), "float32")
    np.testing.assert_array_equal(tensor.numpy(), np.arange(24, dtype="f4").reshape(2, 3, 4))


@FORMS
def test_the_deleter_runs_once_when_the_last_view_dies(versioned):
    producer = Producer(versioned=versioned)
    tensor = as_tensor(producer)
    part = tensor[1, ::2]
    array = part.numpy()
    del tensor, part
    gc.collect()
    assert producer.deleted == 0
    np.testing.assert_array_equal(array, [[12, 13, 14, 15], [20, 21, 22, 23]])
    del array
    gc.collect()
    assert producer.deleted == 1


@FORMS
def test_the_deleter_runs_once_when_the_parent_outlives_its_views(versioned):
    producer = Producer(versioned=versioned)
    tensor = as_tensor(producer)
    part = tensor[1]
    del part
    assert producer.deleted == 0
    del tensor
    gc.collect()
    assert producer.deleted == 1


@FORMS
def test_an_unconsumed_capsule_is_released_once(versioned):
    producer = Producer(versioned=versioned)
    capsule = producer.capsule()
    del capsule
    assert producer.deleted == 1


@FORMS
def test_a_capsule_is_renamed_and_cannot_be_consumed_twice(versioned):
    producer = Producer(versioned=versioned)
    capsule = producer.capsule()
    tensor = as_tensor(capsule)
    assert capsule_name(capsule) == b"used_" + producer.name
    with pytest.raises(UnsupportedOption, match="once"):
        as_tensor(capsule)
    assert tensor.pointer == producer.pointer
    del tensor, capsule
    gc.collect()
    assert producer.deleted == 1


def test_a_producer_that_returns_one_capsule_twice_is_refused():
    producer = Producer()
    answering = Answering(producer.capsule())
    tensor = as_tensor(answering)
    with pytest.raises(UnsupportedOption, match="once"):
        as_tensor(answering)
    del tensor, answering
    gc.collect()
    assert producer.deleted == 1


WRONG = [
    ({"lanes": 4}, UnsupportedDtype, "4 lanes"),
    ({"lanes": 0}, UnsupportedDtype, "0 lanes"),
    ({"code": 5, "bits": 64}, UnsupportedDtype, "code 5"),
    ({"code": 2, "bits": 64}, UnsupportedDtype, "64 bits"),
    ({"code": 17, "bits": 4}, UnsupportedDtype, "code 17"),
    ({"code": 255, "bits": 255}, UnsupportedDtype, "code 255"),
    ({"device_type": 4}, DeviceError, "type 4"),
    ({"device_type": 0}, DeviceError, "type 0"),
    ({"device_type": -7}, DeviceError, "type -7"),
    ({"ndim": 9}, ShapeError, "9 axes"),
    ({"ndim": -1}, ShapeError, "-1 axes"),
    ({"ndim": 2**31 - 1}, ShapeError, "axes"),
    ({"shape": None}, ShapeError, "no shape"),
    ({"data": None}, DeviceError, "no address"),
]


@FORMS
@together(("fields", "error", "message"), WRONG)
def test_invalid_tensors_are_refused_and_released_once(versioned, fields, error, message):
    producer = Producer(versioned=versioned, **fields)
    with pytest.raises(error, match=message):
        as_tensor(producer)
    gc.collect()
    assert producer.deleted == 1


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((-1,), (1,)),
        ((2**62,), (1,)),
        ((2**40, 2**40), (0, 0)),
        ((0, 2**62), (1, 1)),
        ((2,), (2**62,)),
        ((2,), (-(2**63),)),
        ((2**50, 2), (2**50, 1)),
        ((2**61,), None),
    ],
)
def test_shapes_and_strides_past_64_bits_are_refused_and_released_once(shape, strides):
    producer = Producer(shape, strides)
    with pytest.raises(ShapeError):
        as_tensor(producer)
    gc.collect()
    assert producer.deleted == 1


@pytest.mark.parametrize("major", [0, 2, 99])
def test_another_major_version_is_refused_and_released_once(major):
    producer = Producer(major=major, ndim=-5, code=77)
    with pytest.raises(UnsupportedOption, match=f"DLPack {major}.0"):
        as_tensor(producer)
    gc.collect()
    assert producer.deleted == 1


def test_strides_of_null_mean_c_contiguous():
    tensor = as_tensor(Producer((4, 6), None))
    assert tensor.strides == (24, 4)


def test_the_byte_offset_moves_element_0():
    producer = Producer((3,), (2,), byte_offset=20)
    tensor = as_tensor(producer)
    assert tensor.pointer == producer.pointer + 20
    assert tensor.tolist() == [5, 7, 9]


def test_negative_and_zero_strides_are_kept():
    producer = Producer((2, 3), (0, -2), byte_offset=16)
    tensor = as_tensor(producer)
    assert tensor.strides == (0, -8)
    assert tensor.tolist() == [[4, 2, 0], [4, 2, 0]]


def test_an_empty_array_may_have_no_address():
    assert as_tensor(Producer((0, 4), (4, 1), data=None)).shape == (0, 4)


def test_a_zero_dimensional_array_needs_neither_shape_nor_strides():
    assert as_tensor(Producer((), None, shape=None)).item() == 0.0


def test_a_managed_tensor_without_a_deleter_is_not_released():
    producer = Producer()
    producer.managed.deleter = type(producer.deleter)()
    tensor = as_tensor(producer)
    del tensor
    gc.collect()
    assert producer.deleted == 0


def test_the_read_only_flag_is_imported():
    tensor = as_tensor(Producer(flags=READ_ONLY))
    assert tensor.readonly
    assert not tensor.numpy().flags.writeable
    assert not as_tensor(Producer()).readonly


def test_a_producer_without_max_version_is_called_again_without_it():
    producer = Producer(versioned=False, knows_max_version=False)
    assert as_tensor(producer).pointer == producer.pointer
    assert [sorted(arguments) for arguments in producer.asked] == [["max_version"], []]


def test_host_producers_are_called_without_a_stream():
    producer = Producer()
    as_tensor(producer)
    assert producer.asked == [{"max_version": (1, 3)}]


@pytest.mark.parametrize(("device", "name"), [((2, 0), "cuda:0"), ((2, 3), "cuda:3"), ((13, 1), "cuda:1")])
def test_cuda_memory_is_viewed_without_waiting_and_never_read(device, name):
    producer = Producer(device=device)
    tensor = as_tensor(producer)
    assert (tensor.device, tensor.pointer) == (name, producer.pointer)
    assert producer.asked == [{"max_version": (1, 3), "stream": -1}]
    with pytest.raises(DeviceError, match="cuda"):
        tensor.numpy()
    with pytest.raises(DeviceError, match="cuda"):
        np.asarray(tensor)
    with pytest.raises(DeviceError, match="cuda"):
        tensor[0] = 1
    with pytest.raises(DeviceError, match="cuda"):
        tensor.tolist()
    assert tensor[1].pointer == producer.pointer + 48


def test_pinned_host_memory_is_host_memory():
    assert as_tensor(Producer(device=(3, 0))).device == "cpu"


def test_the_streams_of_exported_cuda_memory_are_ordered_by_its_producer():
    producer = Producer(device=(2, 0))
    tensor = as_tensor(producer)
    tensor.__dlpack__(stream=7, max_version=(1, 0))
    assert producer.asked[-1] == {"stream": 7}
    count = len(producer.asked)
    tensor.__dlpack__(stream=-1, max_version=(1, 0))
    assert len(producer.asked) == count


@pytest.mark.parametrize(
    "answer", [None, 7, "dltensor", object(), ValueError("no"), RuntimeError("gone"), TypeError("?")]
)
def test_a_producer_that_does_not_return_a_capsule_is_refused(answer):
    with pytest.raises(PagecoreError):
        as_tensor(Answering(answer))


@pytest.mark.parametrize("device", [None, (), (None, 0), ("cpu", 0), 3])
def test_a_producer_with_an_invalid_device_is_refused(device):
    producer = Producer()
    producer.device = device
    with pytest.raises(PagecoreError):
        as_tensor(producer)


def test_a_foreign_capsule_is_refused():
    import datetime

    with pytest.raises(UnsupportedOption, match="capsule"):
        as_tensor(datetime.datetime_CAPI)


def test_the_last_view_may_die_on_another_thread():
    producer = Producer()
    held = [as_tensor(producer)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert producer.deleted == 1


def test_a_view_over_an_import_survives_export_and_re_import():
    producer = Producer()
    again = as_tensor(as_tensor(producer)[1].__dlpack__(max_version=(1, 3)))
    gc.collect()
    assert producer.deleted == 0
    assert again.pointer == producer.pointer + 48
    del again
    gc.collect()
    assert producer.deleted == 1


def test_importing_and_exporting_many_times_leaks_no_memory():
    tracemalloc = pytest.importorskip("tracemalloc")
    source = empty((4, 4))

    def cycle(count):
        for _ in range(count):
            as_tensor(source[1:].__dlpack__(max_version=(1, 3)))
            as_tensor(source.__dlpack__())
            source.__dlpack__(copy=True)
            as_tensor(np.from_dlpack(source))

    cycle(10)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        cycle(2000)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20_000
