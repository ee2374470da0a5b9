from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest

from pagecore.arrays import as_dtype, as_tensor, empty, zeros
from pagecore.arrays.dtypes.dtype import DTYPES
from pagecore.errors import PagecoreError
from tests.arrays.producers import capsule_name, read_capsule
from tests.together import together

READ_ONLY, IS_COPIED = 1, 2
VERSIONS = pytest.mark.parametrize("max_version", [None, (1, 3)])


def elements(managed):
    tensor = managed.tensor
    return [tensor.shape[i] for i in range(tensor.ndim)], [tensor.strides[i] for i in range(tensor.ndim)]


def frozen(array):
    array.flags.writeable = False
    return as_tensor(array)


@pytest.mark.parametrize(
    ("max_version", "name", "stamp"),
    [
        (None, b"dltensor", None),
        ((0, 8), b"dltensor", None),
        ((1, 0), b"dltensor_versioned", (1, 0)),
        ((1, 3), b"dltensor_versioned", (1, 3)),
        ((1, 99), b"dltensor_versioned", (1, 3)),
        ((2, 0), b"dltensor_versioned", (1, 3)),
        ((10**30, 10**30), b"dltensor_versioned", (1, 3)),
    ],
)
def test_the_capsule_is_the_newest_that_its_consumer_reads(max_version, name, stamp):
    capsule = empty((2, 3)).__dlpack__(max_version=max_version)
    assert capsule_name(capsule) == name
    if stamp:
        managed = read_capsule(capsule)
        assert (managed.major, managed.minor) == stamp


@VERSIONS
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_capsule_has_address_shape_strides_and_dtype(max_version, dtype):
    whole = empty((4, 6), dtype)
    part = whole[1:3, ::2]
    capsule = part.__dlpack__(max_version=max_version)
    tensor = read_capsule(capsule).tensor
    assert tensor.data + tensor.byte_offset == part.pointer == whole.pointer + 6 * whole.itemsize
    assert elements(read_capsule(capsule)) == ([2, 3], [6, 2])
    assert (tensor.code, tensor.bits, tensor.lanes) == (*as_dtype(dtype).dlpack, 1)
    assert (tensor.device_type, tensor.device_id) == (1, 0)


@VERSIONS
@pytest.mark.parametrize(
    ("shape", "strides"), [((), []), ((0,), [1]), ((3, 0, 2), [2, 2, 1]), ((1, 1), [1, 1]), ((5,), [1])]
)
def test_strides_are_never_null(max_version, shape, strides):
    capsule = zeros(shape).__dlpack__(max_version=max_version)
    managed = read_capsule(capsule)
    assert managed.tensor.strides
    assert elements(managed) == (list(shape), strides)
    assert bool(managed.tensor.data) == (0 not in shape)


def test_negative_and_zero_strides_are_exported():
    array = np.arange(6, dtype="f4")
    capsule = as_tensor(np.broadcast_to(array[::-1], (4, 6))).__dlpack__(max_version=(1, 0))
    assert elements(read_capsule(capsule)) == ([4, 6], [0, -1])
    np.testing.assert_array_equal(np.from_dlpack(as_tensor(array)[::-1]), array[::-1])


def test_strides_that_are_not_multiples_of_the_item_size_are_refused():
    packed = np.zeros(5, dtype=[("tag", "u1"), ("value", "f4")])
    tensor = as_tensor(packed["value"])
    assert tensor.strides == (5,)
    with pytest.raises(BufferError, match="5 bytes"):
        tensor.__dlpack__(max_version=(1, 0))
    with pytest.raises(PagecoreError):
        tensor.__dlpack__()
    # The stride of a single element is not used.
    assert read_capsule(tensor[:1].__dlpack__()).tensor.data == packed["value"].ctypes.data


def test_read_only_memory_is_flagged_or_refused_without_a_flag():
    tensor = frozen(np.zeros(3, dtype="f4"))
    assert read_capsule(tensor.__dlpack__(max_version=(1, 0))).flags == READ_ONLY
    assert read_capsule(empty(3).__dlpack__(max_version=(1, 0))).flags == 0
    for max_version in (None, (0, 9)):
        with pytest.raises(BufferError, match="read-only"):
            tensor.__dlpack__(max_version=max_version)


def test_read_only_survives_export_and_import():
    again = np.from_dlpack(as_tensor(np.from_dlpack(frozen(np.zeros(3, dtype="f4")))))
    assert not again.flags.writeable


@VERSIONS
def test_copy_true_returns_new_memory(max_version):
    array = np.arange(12, dtype="f4").reshape(3, 4)
    source = as_tensor(array)[::2, ::-1]
    capsule = source.__dlpack__(copy=True, max_version=max_version)
    managed = read_capsule(capsule)
    assert managed.tensor.data != source.pointer
    assert elements(managed) == ([2, 4], [4, 1])
    if max_version:
        assert managed.flags == IS_COPIED
    copied = as_tensor(capsule)
    array[:] = -1
    assert copied.tolist() == [[3, 2, 1, 0], [11, 10, 9, 8]]


def test_a_copy_of_read_only_memory_can_be_written():
    capsule = frozen(np.ones(3, dtype="f4")).__dlpack__(copy=True)
    copied = as_tensor(capsule)
    copied[:] = 2
    assert copied.tolist() == [2, 2, 2]


@pytest.mark.parametrize("copy", [None, False])
def test_without_copy_the_memory_is_shared(copy):
    tensor = empty(3)
    assert read_capsule(tensor.__dlpack__(copy=copy)).tensor.data == tensor.pointer


@together(
    "arguments",
    [
        {"stream": 0},
        {"stream": 1},
        {"stream": -1},
        {"stream": "default"},
        {"dl_device": (2, 0)},
        {"dl_device": (1, 1)},
        {"dl_device": 7},
        {"dl_device": ()},
        {"max_version": 1},
        {"max_version": (1,)},
        {"max_version": (1, 2, 3)},
        {"max_version": ("a", "b")},
        {"max_version": (float("nan"), 0)},
    ],
)
def test_unsupported_requests_for_host_memory_are_buffer_errors(arguments):
    with pytest.raises(BufferError) as raised:
        empty(3).__dlpack__(**arguments)
    assert isinstance(raised.value, PagecoreError)


def test_the_host_device_may_be_requested():
    tensor = empty(3)
    assert tensor.__dlpack_device__() == (1, 0)
    assert capsule_name(tensor.__dlpack__(dl_device=(1, 0))) == b"dltensor"


@VERSIONS
def test_a_capsule_keeps_the_allocation_alive_and_releases_it_unconsumed(max_version):
    array = np.zeros(8, dtype="f4")
    held = weakref.ref(array)
    tensor = as_tensor(array)
    del array
    capsule = tensor[2:].__dlpack__(max_version=max_version)
    del tensor
    gc.collect()
    assert held() is not None
    del capsule
    gc.collect()
    assert held() is None


@VERSIONS
def test_export_takes_one_reference_and_gives_it_back(max_version):
    array = np.zeros(8, dtype="f4")
    tensor = as_tensor(array)
    before = sys.getrefcount(array)
    capsules = [tensor.__dlpack__(max_version=max_version) for _ in range(10)]
    assert sys.getrefcount(array) == before + 10
    consumed = [as_tensor(capsule) for capsule in capsules[:5]]
    assert sys.getrefcount(array) == before + 10
    del capsules
    assert sys.getrefcount(array) == before + 5
    del consumed
    assert sys.getrefcount(array) == before


def test_a_refused_export_takes_no_reference():
    packed = np.zeros(5, dtype=[("tag", "u1"), ("value", "f4")])["value"]
    tensor = as_tensor(packed)
    before = sys.getrefcount(packed)
    for max_version in (None, (1, 0)) * 5:
        with pytest.raises(BufferError):
            tensor.__dlpack__(max_version=max_version)
    assert sys.getrefcount(packed) == before


def test_the_deleter_may_run_without_the_gil():
    array = np.zeros(8, dtype="f4")
    tensor = as_tensor(array)
    before = sys.getrefcount(array)
    capsule = tensor.__dlpack__(max_version=(1, 0))
    managed = read_capsule(capsule)
    # A CFUNCTYPE call releases the GIL, as in a thread of a consumer.
    release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.cast(managed.deleter, ctypes.c_void_p).value)
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    rename(capsule, b"used_dltensor_versioned")
    release(ctypes.addressof(managed))
    assert sys.getrefcount(array) == before


def test_a_deleter_that_runs_after_the_interpreter_does_not_crash():
    # The capsule is consumed by hand. atexit handlers of C run after the interpreter is finalised.
    program = """
import ctypes
from pagecore.arrays import empty
from tests.arrays.producers import read_capsule
capsule = empty(4).__dlpack__(max_version=(1, 0))
managed = read_capsule(capsule)
rename = ctypes.pythonapi.PyCapsule_SetName
rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
NAME = ctypes.c_char_p(b"used_dltensor_versioned")
rename(capsule, NAME)
libc = ctypes.CDLL(None)
libc.on_exit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
# on_exit calls f(status, argument): a deleter takes the argument first, so a thunk swaps them.
code = bytes([0x48, 0x89, 0xF7, 0x48, 0xB8]) + ctypes.cast(managed.deleter, ctypes.c_void_p).value.to_bytes(8, "little")
code += bytes([0xFF, 0xE0])
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
ctypes.pythonapi.Py_IncRef(ctypes.py_object(page))
libc.on_exit(address, ctypes.addressof(managed))
print("ready")
"""
    import platform

    if platform.machine() != "x86_64":
        pytest.skip("needs x86-64: the thunk is machine code")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
