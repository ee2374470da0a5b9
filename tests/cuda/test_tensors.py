"""Tensors in device memory: contents, views, uploads and synchronization between streams."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import pagecore
from pagecore.arrays import strided
from pagecore.arrays.tensors import uploads
from pagecore.arrays.tensors.streams import note_work
from pagecore.arrays.tensors.uploads import NUM_SMALL, SMALL_BYTES, to_device, upload
from pagecore.errors import DeviceError


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "int64", "bool"])
def test_zeros_are_zeros(cuda, dtype):
    tensor = pagecore.zeros((3, 5), dtype, cuda.device)
    got = cuda.get(tensor)
    assert (got.shape, got.dtype) == ((3, 5), tensor.dtype.numpy)
    assert not got.view(np.uint8).any()


def test_an_empty_shape_has_no_elements(cuda):
    assert cuda.get(pagecore.zeros((0, 5), "float32", cuda.device)).shape == (0, 5)
    assert cuda.get(pagecore.zeros((), "float32", cuda.device)) == 0


def test_the_source_of_an_upload_may_change_at_once(cuda, monkeypatch):
    """With more uploads in flight than there are slots, and with large ones, of one piece and of more than slots."""
    large = 1 << 17
    monkeypatch.setattr(uploads, "LARGE_BYTES", large)
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(1, 5000, 2 * NUM_SMALL), SMALL_BYTES, SMALL_BYTES + 1, 17 * large + 3]
    arrays = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    tensors = [cuda.empty(array.shape, "uint8") for array in arrays]
    stream = cuda.stream()
    if cuda.is_emulated:
        cuda.runtime.streams.deferred = True
        before = cuda.runtime.counts.copy()
    for array, tensor in zip(arrays, tensors, strict=True):
        sent = array.copy()
        upload(sent.ctypes.data, sent.nbytes, tensor.pointer, stream, 0)
        sent[:] = ~sent
    if cuda.is_emulated:
        spent = cuda.runtime.counts - before
        assert spent["pageable"] == 0
        assert spent["synchronizes"] == 0
        assert spent["event_synchronizes"] == NUM_SMALL + 1 + 3, "for each piece that finds all slots pending"
    cuda.runtime.synchronize(stream)
    for array, tensor in zip(arrays, tensors, strict=True):
        np.testing.assert_array_equal(cuda.get(tensor), array)


def test_uploads_of_a_few_hundred_kilobytes_do_not_wait(cuda):
    if not cuda.is_emulated:
        pytest.skip("only the emulator runs work as late as possible")
    array, tensor, stream = np.ones(100 << 10, np.uint8), cuda.empty(100 << 10, "uint8"), cuda.stream()
    cuda.runtime.streams.deferred = True
    before = cuda.runtime.counts.copy()
    for _ in range(12):
        upload(array.ctypes.data, array.nbytes, tensor.pointer, stream, 0)
    assert (cuda.runtime.counts - before)["event_synchronizes"] == 0


def test_uploads_of_a_stream_go_on_while_the_work_of_another_one_is_late(cuda):
    if not cuda.is_emulated:
        pytest.skip("only the emulator runs work as late as possible")
    array, tensor, streams = np.ones(8, np.uint8), cuda.empty(8, "uint8"), (cuda.stream(), cuda.stream())
    cuda.runtime.streams.deferred = True
    for number in range(NUM_SMALL):
        upload(array.ctypes.data, 8, tensor.pointer, streams[number > NUM_SMALL - 3], 0)
    before = cuda.runtime.counts.copy()
    for _ in range(3):
        cuda.runtime.streams.drain(streams[1])
        for _ in range(2):
            upload(array.ctypes.data, 8, tensor.pointer, streams[1], 0)
    assert (cuda.runtime.counts - before)["event_synchronizes"] == 0


def test_an_upload_is_refused_in_a_capture(cuda):
    """A graph would copy what later uploads put into the staging memory."""
    array, tensor, stream = np.arange(8, dtype=np.uint8), cuda.empty(8, "uint8"), cuda.stream()

    def work(stream):
        upload(array.ctypes.data, array.nbytes, tensor.pointer, stream, 0)

    def refused(stream):
        with pytest.raises(DeviceError, match="is being captured: upload before"):
            work(stream)

    for _ in range(NUM_SMALL):  # the staging memory is allocated
        work(stream)
    cuda.runtime.synchronize(stream)
    cuda.capture(refused)
    for _ in range(NUM_SMALL):
        work(stream)
    cuda.runtime.synchronize(stream)
    np.testing.assert_array_equal(cuda.get(tensor), array)


def test_views_are_views_of_the_same_memory(cuda):
    numbers = np.arange(24, dtype=ml_dtypes.bfloat16).reshape(4, 6)
    tensor = cuda.put(numbers)
    np.testing.assert_array_equal(cuda.get(tensor[1:, ::-2]), numbers[1:, ::-2])
    np.testing.assert_array_equal(cuda.get(tensor.transpose()), numbers.T)
    np.testing.assert_array_equal(cuda.get(tensor.reshape(3, 8)[-1]), numbers.reshape(3, 8)[-1])


def test_a_view_of_a_buffer_has_its_own_strides(cuda):
    tensor = cuda.put(np.arange(24, dtype=np.float32))
    cut = strided(tensor, (2, 3), (48, 8), byte_offset=4)
    np.testing.assert_array_equal(cuda.get(cut), [[1, 3, 5], [13, 15, 17]])


def test_a_capsule_and_back_is_the_same_memory(cuda):
    tensor = pagecore.zeros((2, 3), "bfloat16", cuda.device)
    back = pagecore.as_tensor(tensor.__dlpack__(max_version=(1, 0)))
    assert (back.pointer, back.shape, back.dtype, back.device) == (tensor.pointer, (2, 3), "bfloat16", cuda.device)
    note_work(tensor, 0)
    assert pagecore.as_tensor(tensor.__dlpack__(stream=1)).pointer == tensor.pointer


def test_an_uploaded_array_is_visible_to_every_stream(cuda):
    if cuda.is_emulated:
        cuda.runtime.stream = cuda.stream()
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    np.testing.assert_array_equal(cuda.get(to_device(array, cuda.device)), array)
